"""Strings, objects and tensors of different shapes pass through workers with their row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import ParallelEnv, SerialEnv
from tests.collectors.workers.crews import KINDS, collecting
from tests.contract.helpers import IDS
from tests.contract.multi import frames
from tests.fakes_lists import check_rows, rows_of, said, talking

BOTH = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    ("kind", "ragged", "members"),
    [
        ("sync", False, "single"),
        ("async", True, "single"),
        ("sync", True, "serial"),
        ("async", False, "serial"),
        ("sync", True, "parallel"),
    ],
)
def test_rows_stay_together(kind: str, ragged: bool, members: str) -> None:
    entries: list[Any] = talking(4, ragged=ragged)
    if members != "single":
        batch_of = SerialEnv if members == "serial" else ParallelEnv
        entries = [lambda pair=entries[i : i + 2]: batch_of(2, pair) for i in (0, 2)]
    with collecting(kind, entries, frames=24, total_frames=72) as collector:
        batches = list(collector)
    names: dict[int, tuple[int, int]] = {}
    seen = set()
    for batch in batches:
        assert batch.names[-1] == "time"
        assert isinstance(batch.get("text"), NonTensorStack) and batch.get("text").batch_size == batch.shape
        assert isinstance(batch, LazyStackedTensorDict) == ragged
        for place, name in zip(check_rows(batch), batch[IDS].reshape(-1).tolist(), strict=True):
            assert place not in seen and names.setdefault(name, place[:2]) == place[:2]
            seen.add(place)
    assert frames(batches) == 72


@pytest.mark.parametrize("cat", [0, -1])
def test_rows_are_joined_in_worker_order(cat: int) -> None:
    with collecting(
        "sync", talking(3, ragged=False), frames=25, total_frames=50, cat_results=cat
    ) as collector:
        batches = list(collector)
    for batch in batches:
        owners = [place[0] for place in check_rows(batch)]
        assert owners == sorted(owners) and set(owners) == {0, 1, 2}
    assert frames(batches) == 50


@pytest.mark.parametrize("kind", ["async"])
def test_policies_read_and_write_strings(kind: str) -> None:
    def policy(tensordict: Any) -> Any:
        tensordict["action"] = torch.tensor(len(tensordict["text"]) % 2)
        tensordict.set_non_tensor("said", tensordict["text"] + "!")
        return tensordict

    with collecting(kind, talking(2, ragged=False), policy, frames=8, total_frames=24) as collector:
        for batch in collector:
            for row in rows_of(batch):
                assert row["said"] == row["text"] + "!" and row["action"].item() == len(row["text"]) % 2


@pytest.mark.parametrize("kind", ["sync"])
def test_split_trajectories_keep_rows_together(kind: str) -> None:
    with collecting(kind, talking(2), frames=24, total_frames=48, split_trajs=True) as collector:
        for batch in collector:
            for trajectory in batch.unbind(0):
                real = [row for row in rows_of(trajectory) if row["collector", "mask"]]
                places = [said(row) for row in real]
                assert places == [(*places[0][:2], places[0][2] + i) for i in range(len(places))]


@BOTH
def test_into_a_buffer_and_unchanged_by_later_batches(kind: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    cat = {"cat_results": 0} if kind == "sync" else {}
    with collecting(
        kind, talking(2, ragged=False), frames=10, total_frames=60, replay_buffer=rb, **cat
    ) as collector:
        list(collector)
    assert len(set(check_rows(rb[:]))) == 60
    check_rows(rb.sample())
    with collecting(kind, talking(2), frames=10, total_frames=60) as collector:
        batches = list(collector)
    assert len({place for batch in batches for place in check_rows(batch)}) == 60
