"""Batches check their options."""

from __future__ import annotations

import pytest
import torch

from gleanrl._process.worker import Timeouts
from gleanrl.envs.vector.base import BatchOptions, ThreadCap, as_timeouts
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


def options(shared_memory=True, memmap=False, num_threads=None, start_method=None, **refused):
    given = {
        **dict.fromkeys(
            ("device", "share_individual_td", "pin_memory", "policy_proof", "allow_step_when_done")
        ),
        "num_threads": num_threads,
        "shared_memory": shared_memory,
        "memmap": memmap,
        "mp_start_method": start_method,
    }
    return BatchOptions.of({**given, **refused})


def test_invalid_options_are_refused():
    with pytest.raises(InvalidArgumentError, match="pin_memory"):
        options(pin_memory=True)
    with pytest.raises(InvalidArgumentError, match="mp_start_method: expected 'fork', .* got 'thread'"):
        options(start_method="thread")
    with pytest.raises(RuntimeError, match="memmap"):
        options(memmap=True)
    options(memmap=True, shared_memory=False)


def test_timeouts_are_normalised():
    given = Timeouts(work_s=3)
    assert as_timeouts(given) is given and as_timeouts(None) == Timeouts()
    with pytest.raises(InvalidTypeError, match="timeouts: expected Timeouts"):
        as_timeouts(3)


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_number_of_processes_is_checked(value):
    with pytest.raises(InvalidArgumentError, match="num_threads"):
        options(num_threads=value)
    assert options(num_threads=2).num_threads == 2 and options().num_threads is None


def test_the_thread_cap_is_lifted_once():
    before = torch.get_num_threads()
    cap = ThreadCap(before + 1)
    cap.apply()
    assert torch.get_num_threads() == before + 1
    cap.lift()
    torch.set_num_threads(before)
    cap.lift()
    assert torch.get_num_threads() == before
    idle = ThreadCap(None)
    idle.apply()
    idle.lift()
    assert torch.get_num_threads() == before
