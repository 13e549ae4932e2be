"""Who started Ray ends it, once nobody of ours uses it any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gleanrl.errors import ClosedError
from gleanrl.ray_runtime import RayRuntime
from tests import rays


def test_a_ray_that_runs_is_used_and_left(ray_session):
    first, second = RayRuntime(), RayRuntime()
    assert not first.ended
    for runtime in (first, second, second):
        runtime.release()
        assert runtime.ended and ray_session.is_initialized()
    with pytest.raises(ClosedError, match="Ray was shut down"):
        first.check()
    with pytest.warns(UserWarning, match="ray_init_config: Ray runs already"):
        RayRuntime({"num_cpus": 1}).release()


def test_the_last_user_ends_what_was_started():
    # A process of its own: this one's Ray lives as long as the session.
    script = """
import sys

import gleanrl.collectors.distributed, gleanrl.data, gleanrl.envs
from gleanrl.ray_runtime import RayRuntime
from tests import rays

assert "ray" not in sys.modules
ray = rays.prepare()
first = RayRuntime(rays.CONFIG)
second = RayRuntime(rays.CONFIG)
first.release()
first.release()
assert ray.is_initialized() and first.ended and not second.ended
second.release()
assert not ray.is_initialized() and second.ended
"""
    assert rays.prepare() is not None
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
