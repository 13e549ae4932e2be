"""One thread for torch, the same draws and examples in every run, and nothing left behind by a test or a session."""

from __future__ import annotations

import gc
import random
import re
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import is_hypothesis_test, settings

from gleanrl._os import fork_server
from tests import rays
from tests.leaks import Holdings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# A shell's background job ignores Ctrl-C, which tests raise and wait for.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two cores, two pytest processes: more threads would only get in each other's way.
torch.set_num_threads(1)

HERE = Path(__file__).parent
STARTING_PROCESSES = (
    "_checkpoint/test_async_dump",
    "_os",
    "_process",
    "benchmarks",
    "chaos",
    "collectors/distributed",
    "collectors/test_multi",
    "collectors/workers",
    "contract/test_multi_",
    "data/replay_buffers/ray",
    "docs",
    "envs/vector",
    "examples",
    "programs",
    "test___main__",
    "test_leaks",
    "test_takeover",
)
"""Tests that take their time because they start processes, by the beginning of their path."""

NAMED_FOR_PROCESSES = re.compile("killed|parallel|process|worker|a?sync(?=[]-])", re.IGNORECASE)
"""Others that do, by their names and parameters."""

MANY_DRAWS = (
    "collectors/test_policy_weights_weights_learning",
    "contract/buffers/test_prioritized_slices",
    "contract/buffers/test_slice_starts",
)
"""Tests that learn, or draw by the thousand."""

DEVICES = "devices/"
"""Tests of `make test-devices`: a thousand, which on the CPU show what others show."""


def pytest_collection_finish():
    """Put modules and tests out of the collector's sight: tests collect garbage by the thousand."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Mark what is slow by its nature: processes that start, and what tries or draws many examples.

    Tests on Ray run in one process of several, and may take long: each actor imports torch.
    """
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        starts = place.startswith(STARTING_PROCESSES) or NAMED_FOR_PROCESSES.search(item.name)
        if starts or place.startswith((*MANY_DRAWS, DEVICES)) or is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.slow)
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session", autouse=True)
def no_leaks():
    """Fail the session when its tests leave processes, shared memory or open files behind."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # what it opens stays open to the process's end
    before = Holdings.now()
    yield
    fork_server.shut_down()
    before.check()


@pytest.fixture(scope="session")
def ray_session():
    """Ray, the module; it runs on this machine until the session's end. Tests end their own actors."""
    with rays.running() as ray:
        yield ray


@pytest.fixture(autouse=True)
def the_same_draws_in_every_run(request):
    """Seed each test by its name, so that neither the run nor the tests before it decide what it draws."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)  # what environments and users draw from
    # torch.manual_seed keeps a traceback of each call for devices that aren't there: a millisecond in each test.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


@pytest.fixture(autouse=True)
def gradients_stay_on():
    """Fail the test that leaves autograd off in its thread, instead of those that learn after it."""
    yield
    left_off = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert not left_off, "the test left gradients off"
