"""The owner sees a worker's start, life and end."""

from __future__ import annotations

import os
import resource

import pytest

from gleanrl._process.worker import Stacks, Timeouts, require_descriptors, require_platform
from gleanrl.errors import CapacityError, InvalidArgumentError, UnsupportedError


def test_stacks_are_taken_once():
    stacks = Stacks()
    os.write(stacks.descriptor, b"one\ntwo\n")
    assert stacks.read() == "one\ntwo" and stacks.take() == "one\ntwo" and stacks.take() == ""
    os.write(stacks.descriptor, b"three")
    assert stacks.take() == "three"
    stacks.close()


def test_too_few_files_are_noticed_beforehand():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, hard))
    try:
        require_descriptors(2)
        with pytest.raises(CapacityError, match="100 workers need 316 open files.*ulimit"):
            require_descriptors(100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_other_systems_are_refused_with_the_reason(monkeypatch):
    require_platform()
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(UnsupportedError, match="Linux .*no pidfd_open.*SerialEnv"):
        require_platform()


@pytest.mark.parametrize("name", ["start_s", "work_s", "close_s"])
@pytest.mark.parametrize("value", [-1, "3", float("nan"), float("inf"), True])
def test_invalid_timeouts_are_refused(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        Timeouts(**{name: value})


def test_timeouts_may_be_none():
    assert Timeouts(start_s=None, work_s=None, close_s=0) == Timeouts(None, None, 0.0)
    with pytest.raises(InvalidArgumentError, match="work_s"):
        Timeouts(work_s=0)
    with pytest.raises(InvalidArgumentError, match="close_s"):
        Timeouts(close_s=None)
