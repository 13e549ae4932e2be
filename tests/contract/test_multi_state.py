"""Seeds and saved states of collectors with workers reproduce the same data."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from gleanrl.data import Composite, Unbounded
from gleanrl.envs import SerialEnv
from gleanrl.errors import GleanError
from tests.collectors.workers.crews import KINDS, collecting
from tests.contract.helpers import IDS, Constant, check_ledger, snapshot, tensors_below
from tests.contract.multi import SCRIPT, WHOLE, check_workers, frames, makers, shares, take
from tests.fakes_base import CountingEnv

BOTH = pytest.mark.parametrize("kind", KINDS)
CAT: dict[str, Any] = {"sync": "stack", "async": WHOLE}


class SeededEnv(CountingEnv):
    """Observes its seed and random numbers drawn from it."""

    def _declare(self) -> None:
        super()._declare()
        shape = tuple(self.batch_size)
        spec = self.observation_spec
        self.observation_spec = Composite(
            observation=spec["observation"],
            seed=Unbounded((*shape, 1), dtype=torch.int64),
            noise=Unbounded((*shape, 1)),
            shape=self.batch_size,
        )
        self.generator = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(seed)
        self.generator.manual_seed(seed)

    def _package(self, flags: dict[str, torch.Tensor]) -> Any:
        shape = (*self.batch_size, 1)
        noise = torch.rand(shape, generator=self.generator)
        seed = torch.full(shape, self.seeds[-1] if self.seeds else -1)
        return super()._package(flags).update({"seed": seed, "noise": noise})


def seeded(workers: int, batch_size: tuple[int, ...] = ()) -> list[Any]:
    def maker(first: int) -> Any:
        def make() -> Any:
            env = SeededEnv(SCRIPT, batch_size)
            env._streams += first
            return env

        return make

    return [maker(100 * worker) for worker in range(workers)]


def by_worker(batches: list[TensorDictBase], workers: int, kind: str) -> dict[int, Any]:
    found: dict[int, list[TensorDictBase]] = {}
    for batch in batches:
        for owner, share in shares(batch, workers, CAT[kind]).items():
            found.setdefault(owner, []).append(share)
    return {owner: torch.cat(pieces, -1) for owner, pieces in found.items()}


@BOTH
def test_set_seed_gives_each_environment_another_seed_and_returns_the_last(kind: str) -> None:
    with collecting(kind, seeded(3), frames=12) as collector:
        assert collector.set_seed(1) == 3
        batches = take(collector, 12 if kind == "async" else 1)
        for owner, rows in by_worker(batches, 3, kind).items():
            assert rows["seed"].unique().tolist() == [owner + 1]
        assert collector.set_seed(7, static_seed=True) == 7
        batches = take(collector, 6 if kind == "async" else 1)
        for rows in by_worker(batches, 3, kind).values():
            assert rows["seed"].unique().tolist() == [7]


def test_seeds_go_through_batches_of_environments() -> None:
    members = seeded(4)
    entries = [lambda: SerialEnv(2, members[:2]), lambda: SerialEnv(2, members[2:])]
    with collecting("sync", entries, frames=8) as collector:
        assert collector.set_seed(10) == 13
        assert collector.next()["seed"][..., 0, 0].tolist() == [[10, 11], [12, 13]]


@BOTH
def test_the_same_seed_gives_the_same_data(kind: str) -> None:
    def run(seed: int) -> dict[int, Any]:
        with collecting(kind, seeded(2), frames=24, total_frames=96, init_random_frames=48) as collector:
            collector.set_seed(seed)
            return by_worker(list(collector), 2, kind)

    first, second, other = run(3), run(3), run(4)
    for owner in set(first) & set(second):
        length = min(first[owner].shape[-1], second[owner].shape[-1])
        a, b = first[owner][:length], second[owner][:length]
        assert length and all(torch.equal(a[key], b[key]) for key in a.keys(True, True))
    for owner in set(first) & set(other):
        length = min(first[owner].shape[-1], other[owner].shape[-1])
        assert not torch.equal(first[owner]["action"][:length], other[owner]["action"][:length])
        assert not torch.equal(first[owner]["noise"][:length], other[owner]["noise"][:length])
    if kind == "sync":
        assert not torch.equal(first[0]["action"], first[1]["action"]), "no worker draws alike"


def test_stochastic_policies_draw_from_the_workers_own_global_generators() -> None:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.rand(*observation.shape[:-1], 2)

    def run() -> torch.Tensor:
        with collecting("sync", makers(2), policy, frames=12, total_frames=36) as collector:
            collector.set_seed(5)
            return torch.cat([batch["action"] for batch in collector], 1)

    first, second = run(), run()
    assert torch.equal(first, second), "`set_seed` seeds them"
    assert not torch.equal(first[0], first[1])


@BOTH
def test_loaded_state_continues_after_the_saved_batch(kind: str) -> None:
    with collecting(kind, makers(2), Constant(0.25), total_frames=96) as first:
        before = take(first, 3)
        state = first.state_dict()
        frozen = [tensor.clone() for tensor in tensors_below(state)]
        take(first, 1)
        assert all(map(torch.equal, frozen, tensors_below(state))), "the state is a copy"
    assert {"worker0", "worker1", "frames", "iter"} <= set(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with collecting(kind, makers(2), Constant(0.5), total_frames=96) as second:
        second.load_state_dict(state)
        assert second.stats().delivered == 36
        after = list(second)
        assert second.stats().delivered == 96 and frames(after) == 60
        check_ledger(second)
    assert all((batch["action"] == 0.25).all() for batch in after), "the weights are restored"
    ids = [{*batch[IDS].reshape(-1).tolist()} for batch in before + after]
    assert set.union(*ids[:3]).isdisjoint(set.union(*ids[3:])), "no id comes again"
    check_workers(after, 2, CAT[kind])


@pytest.mark.parametrize("kind", ["sync"])
def test_a_state_after_the_end(kind: str) -> None:
    with collecting(kind, makers(2), total_frames=24) as collector:
        list(collector)
        state = collector.state_dict()
    again = collector.state_dict()
    assert set(again) == set(state) and again["frames"] == state["frames"]
    with collecting(kind, makers(2), total_frames=48) as other:
        other.load_state_dict(state)
        assert frames(list(other)) == 24


@BOTH
def test_a_state_of_other_workers_raises_and_changes_nothing(kind: str) -> None:
    with collecting(kind, makers(3), total_frames=96) as first:
        take(first, 2)
        state = first.state_dict()
    with collecting(kind, makers(2), total_frames=96) as second:
        batches = take(second, 1)
        with pytest.raises((KeyError, ValueError, RuntimeError), match="worker") as caught:
            second.load_state_dict(state)
        assert isinstance(caught.value, GleanError)
        smaller = {key: value for key, value in second.state_dict().items() if key != "worker1"}
        with pytest.raises(KeyError, match="worker1"):
            second.load_state_dict(smaller)
        with pytest.raises((KeyError, ValueError, RuntimeError), match="surprise"):
            second.load_state_dict({**second.state_dict(), "surprise": 1})
        with pytest.raises(GleanError):
            second.load_state_dict({**second.state_dict(), "frames": "many"})
        batches += list(second)
        assert frames(batches) == 96
    check_workers(batches, 2, CAT[kind])


@pytest.mark.parametrize("kind", ["async"])
def test_lenient_load_ignores_unknown_entries(kind: str) -> None:
    with collecting(kind, makers(2), Constant(0.25), total_frames=96) as first:
        take(first, 2)
        state = {**first.state_dict(), "surprise": 1}
    with collecting(kind, makers(2), Constant(0.5), total_frames=96) as second:
        second.load_state_dict(state, strict=False)
        batch = second.next()
        assert (batch["action"] == 0.25).all() and second.stats().delivered == 36


def test_random_draws_continue_after_a_load() -> None:
    with collecting("sync", makers(2), total_frames=96) as first:
        first.set_seed(3)
        take(first, 2)
        state = first.state_dict()
        first.load_state_dict(state)
        expected = [snapshot(batch) for batch in take(first, 2)]
    with collecting("sync", makers(2), total_frames=96) as second:
        second.load_state_dict(state)
        for copy in expected:
            batch = second.next()
            assert torch.equal(batch["action"], copy["action"])
