"""Dumps of a storage's snapshot write only the rows that changed since the dump before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl._os import fault_points
from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorStorage
from tests.data.replay_buffers.moments import ROWS, SEGMENTS, buffer, cut_small, data


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)


def dump(made: ReplayBuffer, folder: Path) -> tuple[int, int]:
    """Dump; return the numbers of linked row files and of reads that compared earlier rows."""
    with fault_points.inject({}) as visits:
        made.dumps(folder)
    (newest,) = folder.glob("ckpt-*")
    other = buffer(storage=type(made.storage)) if type(made.storage) is not TensorStorage else buffer()
    other.loads(folder)
    assert (other[:] == made[:]).all()
    return visits.counts["fs.link"], visits.counts["fs.read"] - 1


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_second_dump_writes_changed_segments_only(tmp_path: Path, storage: Any) -> None:
    made = buffer(storage=storage)
    made.extend(data(0, 2_950))
    made.sample()  # gives the sampler a generator
    made.dumps(tmp_path)
    for start in range(3):
        made.extend(data(start, 60))  # wraps in the first round
        with fault_points.inject({}) as visits:
            made.dumps(tmp_path)
        touched = 2 if start == 0 else 1
        assert visits.counts["fs.link"] == SEGMENTS - touched
        assert visits.counts["fs.create"] == touched + 2  # also the small values and the manifest
        assert visits.counts["fs.read"] == 1  # the earlier manifest
    other = buffer()
    other.loads(tmp_path)
    assert (other[:] == made[:]).all()
    assert torch.equal(other.storage.state_dict()["generations"], made.storage.state_dict()["generations"])


def test_loaded_buffer_links_unchanged_segments_of_its_checkpoint(tmp_path: Path) -> None:
    made, other = buffer(), buffer()
    made.extend(data(0, 3_500))
    made.dumps(tmp_path)
    other.loads(tmp_path)
    other.extend(data(7_000, 100))
    with fault_points.inject({}) as visits:
        other.dumps(tmp_path)
    assert visits.counts["fs.link"] == SEGMENTS - 1 and visits.counts["fs.read"] == 1
    made.loads(tmp_path)  # generations grow in a filled buffer, so no row counts as unchanged
    assert (other[:] == made[:]).all()
    made.dumps(tmp_path)
    other.loads(tmp_path)
    assert (other[:] == made[:]).all()


def test_dump_finds_changes_through_a_view(tmp_path: Path) -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    view = made.storage.get(slice(None))["n"]
    for number in range(3):
        assert dump(made, tmp_path)[0] == (0 if not number else SEGMENTS - 1)
        view[number * 500] = -7
    del view
    assert dump(made, tmp_path)[0] == SEGMENTS - 1
    held = made[5:7]
    made.dumps(tmp_path)
    held["n"][0] = -9
    assert dump(made, tmp_path)[0] == SEGMENTS - 1


def test_dump_finds_changes_of_given_tensors(tmp_path: Path) -> None:
    records = data(0, ROWS)
    made = ReplayBuffer(storage=TensorStorage(records), batch_size=4)
    made.dumps(tmp_path)
    records["n"][2_999] = -1
    assert dump(made, tmp_path)[0] == SEGMENTS - 1


def test_changes_through_views_from_before_a_new_column_are_found(tmp_path: Path) -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    view = made.storage.get(slice(None))["n"]
    made["y"] = torch.ones(ROWS)
    made.dumps(tmp_path)
    view[0] = -1
    assert dump(made, tmp_path)[0] == SEGMENTS - 1


def test_forked_processes_link_only_unchanged_segments(tmp_path: Path) -> None:
    made = buffer()
    made.extend(data(0, ROWS))
    made.dumps(tmp_path)
    child = os.fork()
    if child == 0:
        made.extend(data(40_000, 100))
        made.dumps(tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made.extend(data(50_000, 100))  # as many rows as the child wrote
    assert dump(made, tmp_path)[0] == SEGMENTS - 1


def test_dump_of_another_buffer_links_nothing(tmp_path: Path) -> None:
    made, other = buffer(), buffer()
    made.extend(data(0, ROWS))
    other.extend(data(1, ROWS))
    made.dumps(tmp_path)
    assert dump(other, tmp_path)[0] == 0
    made.empty()
    made.extend(data(1, ROWS))
    assert dump(made, tmp_path)[0] == 0  # generations differ


def test_priorities_that_didnt_change_are_linked(tmp_path: Path) -> None:
    made = ReplayBuffer(
        storage=LazyTensorStorage(300_000), sampler=PrioritizedSampler(300_000, 0.7, 0.5), batch_size=4
    )
    made.extend(torch.arange(300_000))
    made.sample()  # gives the sampler a generator
    made.dumps(tmp_path)
    made.update_priority(torch.tensor([5]), torch.tensor([3.0]))
    with fault_points.inject({}) as visits:
        made.dumps(tmp_path)
    assert visits.counts["fs.create"] == 3  # small values, a piece of the priorities, the manifest
