"""The last user in a process that started Ray shuts Ray down."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gleanrl._process.ray import RayRuntime
from gleanrl.errors import ClosedError
from tests import rays


def test_running_ray_is_used_and_not_shut_down(ray_session):
    first, second = RayRuntime(), RayRuntime()
    assert not first.ended
    for runtime in (first, second, second):
        runtime.release()
        assert runtime.ended and ray_session.is_initialized()
    with pytest.raises(ClosedError, match="Ray was shut down"):
        first.check()
    with pytest.warns(UserWarning, match="ray_init_config: Ray runs already"):
        RayRuntime({"num_cpus": 1}).release()


def test_last_user_shuts_down_a_started_ray():
    # This runs in another process, because the Ray of the test process lives until the end of the test run.
    script = """
import os
import sys

import numpy as np

import gleanrl.collectors.distributed, gleanrl.data, gleanrl.envs
from gleanrl._process.ray import RayRuntime
from tests import rays

assert "ray" not in sys.modules
ray = rays.prepare()
first = RayRuntime(rays.CONFIG)
second = RayRuntime(rays.CONFIG)
first.release()
first.release()
assert ray.is_initialized() and first.ended and not second.ended

# Freed memory of the object store is used again at once, instead of after a hundred objects.
assert "RAY_free_objects_batch_size" not in os.environ
places = []
while len(places) < 90 and len(places) == len(set(places)):
    ref = ray.put(np.ones(1 << 20, np.uint8))
    places.append(ray.get(ref).ctypes.data)
    del ref
assert len(set(places)) < len(places)

second.release()
assert not ray.is_initialized() and second.ended
"""
    assert rays.prepare() is not None
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
