"""Batches of collectors with workers have the documented shapes, worker order, splitting and truncation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.collectors import aSyncDataCollector
from gleanrl.errors import GleanError
from tests.collectors.workers.crews import Stream, collecting
from tests.contract.helpers import IDS, MASK, leaf_keys, same, snapshot
from tests.contract.multi import ENVS, SCRIPT, WHOLE, check_workers, frames, makers, shares, storages
from tests.fakes import Script
from tests.fakes_base import CountingEnv

B = 3
CATS = ["stack", 0, -1, WHOLE]


def kind_of(cat: Any) -> tuple[str, dict[str, Any]]:
    return ("async", {}) if cat == WHOLE else ("sync", {"cat_results": cat})


def shape_of(cat: Any, p: int, steps: int) -> tuple[int, ...]:
    """Return the documented batch shape for shares of `steps` steps."""
    lead = () if p == 1 else (p,)
    return {
        "stack": (B, *lead, steps),
        0: (B * steps,) if p == 1 else (B * p, steps),
        -1: (*lead, B * steps),
        WHOLE: (*lead, B * steps),  # a whole batch from one worker
    }[cat]


@pytest.mark.parametrize(
    ("env", "cat"),
    [
        *[(env, cat) for env in ("single", "batched") for cat in CATS],
        *[("serial", "stack"), ("parallel", "stack"), ("parallel", WHOLE), ("vector", -1), ("vector", WHOLE)],
    ],
)
def test_batches_have_the_documented_shapes(env: str, cat: Any) -> None:
    p = ENVS[env][0]
    kind, kwargs = kind_of(cat)
    with collecting(kind, makers(B, kind=env), frames=24 * p, total_frames=72 * p, **kwargs) as collector:
        assert collector.frames_per_batch == collector.requested_frames_per_batch == 24 * p
        batches = list(collector)
    assert [tuple(batch.shape) for batch in batches] == [shape_of(cat, p, 8)] * 3
    check_workers(batches, B, cat)
    for batch in batches:
        assert batch.names[-1] == "time" and batch["next"].names[-1] == "time"
        assert batch["observation"].shape == (*batch.shape, 3) and batch["action"].shape == (*batch.shape, 2)
        assert batch["next", "reward"].shape == (*batch.shape, 1) and batch[IDS].shape == batch.shape
        assert all(batch[key].is_contiguous() and not batch[key].is_shared() for key in leaf_keys(batch))
        assert not {key for key in leaf_keys(batch) if isinstance(key, str) and key.startswith("_")}


def test_stack_is_the_default_and_needs_no_warning() -> None:
    with collecting("sync", B, total_frames=24) as collector:
        assert [tuple(batch.shape) for batch in collector] == [(B, 4)] * 2


@pytest.mark.parametrize(
    ("env", "cat"), [("single", "stack"), ("single", -1), ("batched", 0), ("batched", WHOLE)]
)
def test_split_trajectories_of_all_workers_are_whole(env: str, cat: Any) -> None:
    p = ENVS[env][0]
    kind, kwargs = kind_of(cat)
    with collecting(
        kind, makers(B, kind=env), frames=24 * p, total_frames=72 * p, split_trajs=True, **kwargs
    ) as collector:
        batches = list(collector)
    names: dict[int, tuple[int, int]] = {}
    total = 0
    for batch in batches:
        assert batch.ndim == 2
        for row in batch.unbind(0):
            real = row[row[MASK]]
            (name,) = real[IDS].unique().tolist()
            places = real["observation"].long()
            (place,) = {tuple(pair) for pair in places[:, :2].tolist()}
            assert names.setdefault(name, place) == place and name % B == place[0] // 100
            assert (places[1:, 2] == places[:-1, 2] + 1).all()
            assert not real["next", "done"][:-1].any(), "one trajectory a row"
            assert (row["observation"][~row[MASK]] == 0).all(), "padded with zeros"
            total += len(real)
    assert total == 72 * p and len(set(names.values())) == len(names)


@pytest.mark.parametrize(
    ("env", "cat"),
    [("single", 0), ("single", WHOLE), ("batched", "stack"), ("batched", 0), ("batched", -1)],
)
def test_set_truncated_marks_the_last_step_of_each_share(env: str, cat: Any) -> None:
    p, script = ENVS[env][0], Script(seed=62, low=3, high=9)
    kind, kwargs = kind_of(cat)
    with collecting(
        kind, makers(B, script, env), frames=24 * p, total_frames=48 * p, set_truncated=True, **kwargs
    ) as collector:
        batches = list(collector)
    for share in (share for batch in batches for share in shares(batch, B, cat).values()):
        after = share["next"]
        assert after["truncated"][..., -1, :].all() and after["done"][..., -1, :].all()
        flags = [script.flags(*place) for place in after["observation"].long().reshape(-1, 3).tolist()]
        terminated = torch.tensor([flag[0] for flag in flags]).reshape(share.shape)
        truncated = torch.tensor([flag[1] for flag in flags]).reshape(share.shape)
        assert torch.equal(after["terminated"].squeeze(-1), terminated), "terminated is the environment's"
        assert torch.equal(after["truncated"][..., :-1, 0], truncated[..., :-1])
        assert not share["truncated"].any() and not share["done"].any()


def test_set_truncated_without_such_a_flag_raises_at_construction() -> None:
    def make() -> CountingEnv:
        return CountingEnv(SCRIPT, flags=("done", "terminated"))

    for kind in ("sync", "async"):
        with (
            pytest.raises(RuntimeError, match="add_truncated_keys") as caught,
            collecting(kind, [make] * 2, set_truncated=True),
        ):
            pass
        assert isinstance(caught.value, GleanError)


@pytest.mark.parametrize("cat", ["cat", "Stack", "", 1.5, True, 3])
def test_other_cat_results_are_value_errors(cat: Any) -> None:
    with (
        pytest.raises(ValueError, match="cat_results") as caught,
        collecting("sync", 2, total_frames=12, cat_results=cat) as collector,
    ):
        collector.next()
    assert isinstance(caught.value, GleanError)


@pytest.mark.parametrize("cat", [0, -1, "cat"])
def test_an_asynchronous_collector_puts_nothing_together(cat: Any) -> None:
    with pytest.raises(ValueError, match="cat_results"), collecting("async", 2, cat_results=cat):
        pass
    with collecting("async", 1, cat_results="stack", total_frames=12) as collector:
        assert tuple(collector.next().shape) == (12,)


def test_one_worker_has_the_documented_shapes() -> None:
    with collecting("sync", 1, total_frames=24) as collector:
        batches = list(collector)
    assert [tuple(batch.shape) for batch in batches] == [(1, 12)] * 2
    collector = aSyncDataCollector(Stream(0, SCRIPT), None, frames_per_batch=12, total_frames=24)
    batches = list(collector)
    assert [tuple(batch.shape) for batch in batches] == [(12,)] * 2
    check_workers(batches, 1, WHOLE)


@pytest.mark.parametrize("cat", ["stack", -1, WHOLE])
def test_batches_share_no_memory_and_never_change(cat: Any) -> None:
    kind, kwargs = kind_of(cat)
    with collecting(kind, makers(B, kind="batched"), frames=12, total_frames=96, **kwargs) as collector:
        batches, frozen = [], []
        for batch in collector:
            batches.append(batch)
            frozen.append(snapshot(batch))
            batch["observation"] += 0  # the caller may change its batches
    assert all(same(batch, copy) for batch, copy in zip(batches, frozen, strict=True))
    places = [memory.data_ptr() for batch in batches for memory in storages(batch)]
    assert len(set(places)) == len(places), "each leaf has memory of its own"
    for batch in batches:
        for key in leaf_keys(batch):
            size = batch[key].numel() * batch[key].element_size()
            assert batch[key].untyped_storage().nbytes() <= max(64, 2 * size), "saving one saves no other"
    assert frames(batches) == 96
    check_workers(batches, B, cat)
