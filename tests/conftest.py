"""Setup of each session: one thread for torch, reproducible draws and examples, and a check for leaked resources."""

from __future__ import annotations

import gc
import importlib
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

# Each worker process of a test imports the module of the test. This takes a third of the time if pytest is there.
fork_server.preload("pytest")

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
    "data/datasets/test_show_page",
    "data/replay_buffers/ray",
    "docs",
    "envs/vector",
    "examples",
    "programs",
    "test___main__",
    "test_leaks",
    "test_takeover",
)
"""Beginnings of the paths of tests that are slow because they start processes."""

ON_RAY = re.compile("(?<![a-z])ray(?![a-z])|/distributed/")
"""Matches the ids of all tests on Ray, and of some more."""

SENT_ALONE = tuple(f"{HERE.name}/{place}" for place in STARTING_PROCESSES)

NAMED_FOR_PROCESSES = re.compile("killed|parallel|process|worker|a?sync(?=[]-])", re.IGNORECASE)
"""Names and parameters of further tests that start processes."""

MANY_DRAWS = (
    "collectors/test_policy_weights_weights_learning",
    "contract/buffers/test_prioritized_slices",
    "contract/buffers/test_slice_starts",
)
"""Tests that train a policy or draw thousands of samples."""

DEVICES = "devices/"
"""Tests of `make test-devices`. There are about a thousand, and on the CPU they repeat checks of other folders."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadgroup`, send the groups of `group_of` to the processes, in the order of collection.

    xdist would send each test alone, and for each result it would look at all tests sent before.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # otherwise the slow tests would come last
    scheduler = importlib.import_module("xdist.scheduler").LoadGroupScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


def group_of(nodeid):
    """Return the group that a pytest process runs together: tests on Ray, a slow test alone, or the tests of a file."""
    if ON_RAY.search(nodeid):
        return "ray"
    return nodeid if nodeid.startswith(SENT_ALONE) else nodeid.partition("::")[0]


def pytest_collection_finish():
    freeze()


def freeze():
    """Freeze all objects, so that garbage collection doesn't scan them. Tests collect garbage thousands of times."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Mark tests as slow that start processes or try many examples.

    Tests on Ray run first, in one pytest process. They get a long timeout, because each Ray actor imports torch.
    """
    items.sort(key=lambda item: not ON_RAY.search(item.nodeid))
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        starts = place.startswith(STARTING_PROCESSES) or NAMED_FOR_PROCESSES.search(item.name)
        if starts or place.startswith((*MANY_DRAWS, DEVICES)) or is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.slow)
        if "ray_session" in getattr(item, "fixturenames", ()):
            assert ON_RAY.search(item.nodeid), f"{item.nodeid}: name a test on Ray so that ON_RAY matches it"
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last test on Ray, end Ray. After a file, freeze the modules that its tests have imported."""
    if nextitem is not None and not ON_RAY.search(nextitem.nodeid):
        rays.end()
    if nextitem is not None and nextitem.path != item.path:
        freeze()


@pytest.fixture(scope="session", autouse=True)
def no_leaks():
    """Fail the session if its tests leak processes, shared memory or open files."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # CUDA keeps its first handles open until the process ends
    before = Holdings.now()
    yield
    rays.end()
    fork_server.shut_down()
    gc.unfreeze()
    before.check()


@pytest.fixture(scope="session")
def ray_session():
    """Start Ray on this machine, and return the module. Tests end their own actors."""
    pytest.importorskip("ray", reason="Ray isn't installed")
    return rays.kept(rays.running)


@pytest.fixture(autouse=True)
def the_same_draws_in_every_run(request):
    """Seed each test by its name, so that its draws depend neither on the run nor on earlier tests."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)  # environments and users draw from NumPy's global generator
    # torch.manual_seed stores a traceback of the call for each device type that is absent. This costs 1 ms per test.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


@pytest.fixture(autouse=True)
def gradients_stay_on():
    """Fail a test that leaves autograd disabled in its thread; otherwise later tests that learn would fail."""
    yield
    left_off = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert not left_off, "the test left gradients off"
