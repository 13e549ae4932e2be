"""Strings, objects and tensors of different shapes, which columns can't hold, stay with their row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.utils import split_trajectories
from gleanrl.data import Bounded, LazyTensorStorage, MultiStep, ReplayBuffer
from gleanrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv, check_env_specs
from gleanrl.envs.transforms import Compose, InitTracker, RenameTransform, RewardSum, StepCounter
from gleanrl.errors import EnvironmentContractError, SpecError
from gleanrl.testing import check_env
from tests.fakes_lists import TalkingEnv, check_rows, check_streams, rows_of, said, talking

ENVS: dict[str, Callable[[bool], EnvBase]] = {
    "one": lambda ragged: TalkingEnv(0, ragged=ragged),
    "serial": lambda ragged: SerialEnv(3, talking(3, ragged=ragged)),
    "parallel": lambda ragged: ParallelEnv(3, talking(3, ragged=ragged), num_processes=2),
    "transformed": lambda ragged: TransformedEnv(
        SerialEnv(2, talking(2, ragged=ragged)), Compose(StepCounter(), RewardSum(), InitTracker())
    ),
    "nested": lambda ragged: SerialEnv(
        2, lambda: ParallelEnv(2, talking(2, ragged=ragged), num_processes=1), create_env_kwargs=None
    ),
}


@pytest.fixture(params=ENVS)
def make(request: pytest.FixtureRequest) -> Callable[[bool], EnvBase]:
    """Return a function that makes an environment or a batch of environments."""
    return ENVS[request.param]


@pytest.mark.parametrize("ragged", [False, True])
def test_rollouts_and_collectors_keep_rows_together(make: Any, ragged: bool) -> None:
    with closing(make(ragged)) as env:
        batch = env.rollout(9, break_when_any_done=False)
        check_streams(batch)
        assert batch.shape == (*env.batch_size, 9) and batch.names[-1] == "time"
        assert isinstance(batch, LazyStackedTensorDict if ragged else TensorDict)
        assert isinstance(batch.get("text"), NonTensorStack) and batch.get("text").batch_size == batch.shape
    collector = SyncDataCollector(make(ragged), None, frames_per_batch=12, total_frames=36)
    before: dict[int, tuple[int, int, int]] = {}
    for batch in collector:
        check_streams(batch)
        for number, row in enumerate(
            batch.reshape(-1, batch.shape[-1]).unbind(0) if batch.ndim > 1 else [batch]
        ):
            first, last = rows_of(row)[0], rows_of(row)[-1]
            if number in before:
                assert said(first) == before[number], "the stream goes on where it was"
            name, trajectory, step = said(last)
            over = bool(last["next", "done"])
            before[number] = (name, trajectory + 1, 0) if over else (name, trajectory, step + 1)


def test_each_row_of_a_batch_is_a_record(make: Any) -> None:
    with closing(make(False)) as env:
        batch = env.rollout(5, break_when_any_done=False)
        texts = batch["text"]
        assert rows_of(batch)[0]["text"] == (texts[0] if batch.ndim == 1 else rows_of(batch)[0]["text"])
        assert batch[..., 2]["text"] == [t[2] for t in texts] if batch.ndim == 2 else True
        assert batch.clone()["next", "text"] == batch["next", "text"]


class TestPolicies:
    def test_a_policy_reads_and_writes_text(self) -> None:
        def policy(row: TensorDictBase) -> TensorDictBase:
            said(row)
            return row.set("thought", "about " + row["text"]).set("action", torch.tensor(1))

        collector = SyncDataCollector(TalkingEnv(), policy, frames_per_batch=7, total_frames=21)
        for batch in collector:
            check_streams(batch)
            assert [row["thought"] for row in rows_of(batch)] == [
                f"about {row['text']}" for row in rows_of(batch)
            ]

    def test_policy_of_several_environments_gets_all_texts(self) -> None:
        def policy(row: TensorDictBase) -> TensorDictBase:
            assert row["text"] == ["/".join(str(int(n)) for n in code) for code in row["code"]]
            return row.set("action", torch.ones(3, dtype=torch.int64))

        for make in (SerialEnv, ParallelEnv):
            with closing(make(3, talking(3, ragged=False))) as env:
                check_streams(env.rollout(6, policy, break_when_any_done=False))

    def test_a_module_gets_the_string(self) -> None:
        seen: list[str] = []
        module = TensorDictModule(
            lambda text: (seen.append(text), torch.tensor(len(text) % 2))[1],
            in_keys=["text"],
            out_keys=["action"],
        )
        batch = TalkingEnv().rollout(4, module, break_when_any_done=False)
        assert seen[-4:] == batch["text"] and (batch["action"] == 1).all()


class TestResets:
    def test_partial_reset_keeps_the_values_of_all_other_environments(self) -> None:
        for make in (SerialEnv, ParallelEnv):
            with closing(make(3, talking(3, ragged=True))) as env:
                root = env.reset()
                root = env.step_mdp(env.rand_step(root)) if hasattr(env, "step_mdp") else root
                before = [said(row) for row in root.unbind(0)]
                mask = torch.tensor([[False], [True], [False]])
                after = env.reset(root.set("_reset", mask))
                found = [said(row) for row in after.unbind(0)]
                assert found[0] == before[0] and found[2] == before[2]
                assert found[1] == (1, before[1][1] + 1, 0)

    def test_collectors_reset_by_index(self) -> None:
        collector = SyncDataCollector(SerialEnv(2, talking(2)), None, frames_per_batch=8, total_frames=-1)
        iterator = iter(collector)
        check_streams(next(iterator))
        collector.reset([1])
        batch = next(iterator)
        check_streams(batch)
        assert said(batch[1, 0])[2] == 0
        collector.shutdown()

    def test_return_same_td_reuses_the_batch(self) -> None:
        collector = SyncDataCollector(
            TalkingEnv(ragged=False), None, frames_per_batch=5, total_frames=20, return_same_td=True
        )
        for batch in collector:
            check_streams(batch)


class TestUnlikeMembers:
    @pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
    def test_shapes_that_differ_from_member_to_member(self, kind: Any) -> None:
        makers = [lambda i=i: TalkingEnv(i, ((3, 1), (2,))[i], width=i + 2) for i in range(2)]
        with closing(kind(2, makers)) as env:
            batch = env.rollout(7, break_when_any_done=False)
            check_streams(batch)
            assert isinstance(batch, LazyStackedTensorDict) and batch.shape == (2, 7)
            assert batch[0]["wide"].shape == (7, 2) and batch[1]["next", "wide"].shape == (7, 3)
        collector = SyncDataCollector(kind(2, makers), None, frames_per_batch=10, total_frames=30)
        for batch in collector:
            check_streams(batch)
        collector.shutdown()

    def test_policy_reads_the_common_keys_of_different_environments(self) -> None:
        env = SerialEnv(2, [lambda i=i: TalkingEnv(i, (3,), width=i + 2) for i in range(2)])
        policy = TensorDictModule(
            lambda text: torch.zeros(len(text), dtype=torch.int64), in_keys=["text"], out_keys=["action"]
        )
        batch = env.rollout(7, policy, break_when_any_done=False)
        assert batch.shape == (2, 7) and batch[1]["wide"].shape == (7, 3) and (batch["action"] == 0).all()
        check_streams(batch)


class TestAfterwards:
    @pytest.fixture(params=[False, True], ids=["texts", "unlike shapes"])
    def batch(self, request: pytest.FixtureRequest) -> Iterator[TensorDictBase]:
        """Yield a batch of a collector of three environments."""
        collector = SyncDataCollector(
            SerialEnv(3, talking(3, ragged=request.param)), None, frames_per_batch=30, total_frames=30
        )
        yield next(iter(collector))
        collector.shutdown()

    def test_split_trajectories_keeps_rows_together(self, batch: TensorDictBase) -> None:
        split = split_trajectories(batch)
        kept = [
            row
            for row, real in zip(rows_of(split), split["collector", "mask"].flatten(), strict=True)
            if real
        ]
        gone = [
            row
            for row, real in zip(rows_of(split), split["collector", "mask"].flatten(), strict=True)
            if not real
        ]
        assert [said(row) for row in kept] == [said(row) for row in rows_of(batch)]
        assert gone and all(row["text"] is None and row["code"].sum() == 0 for row in gone)

    def test_collector_splits_trajectories(self) -> None:
        collector = SyncDataCollector(
            TalkingEnv(), None, frames_per_batch=10, total_frames=20, split_trajs=True
        )
        for batch in collector:
            real = [
                row
                for row, mask in zip(rows_of(batch), batch["collector", "mask"].flatten(), strict=True)
                if mask
            ]
            assert len([said(row) for row in real]) == 10

    @pytest.mark.parametrize("ragged", [False, True])
    def test_collector_writes_into_a_buffer(self, ragged: bool) -> None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=16)
        collector = SyncDataCollector(
            TalkingEnv(ragged=ragged), None, frames_per_batch=10, total_frames=50, replay_buffer=buffer
        )
        assert [*collector] == [None] * 5
        assert len(buffer) == 20 and check_rows(buffer.sample())

    def test_multi_step_postproc_keeps_rows_together(self, batch: TensorDictBase) -> None:
        steps = MultiStep(0.9, 3)(batch)
        for row in rows_of(steps):
            (name, trajectory, step), after = said(row), said(row["next"])
            assert after == (name, trajectory, step + int(row["steps_to_next_obs"]))


class TestChecks:
    @pytest.mark.parametrize("ragged", [False, True])
    def test_suites_take_such_environments(self, ragged: bool) -> None:
        assert check_env(TalkingEnv(ragged=ragged), skip=["seed"]).passed
        check_env_specs(TalkingEnv(ragged=ragged))
        check_env_specs(SerialEnv(2, talking(2, ragged=ragged)))

    def test_check_env_specs_finds_wrong_strings_and_shapes(self) -> None:
        class Loud(TalkingEnv):
            def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
                return super()._step(tensordict).set("text", torch.ones(1))

        with pytest.raises(SpecError, match="'text'"):
            check_env_specs(Loud())
        env = TalkingEnv()
        spec = env.observation_spec.clone()
        spec["group", "spread"] = Bounded(0, 1, (-1, 2))
        env.observation_spec = spec
        with pytest.raises(SpecError, match="'spread'"):
            check_env_specs(env)


class TestBadInput:
    def test_value_outside_its_spec_raises(self) -> None:
        class Wrong(TalkingEnv):
            value: Any = None

            def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
                out = super()._step(tensordict)
                if self.count == 2:
                    out["group", "spread"] = torch.zeros(4, 3)
                return out

        with pytest.raises(
            EnvironmentContractError, match=r"'spread'\) expected .*\(-1, 2\) float32, got \(4, 3\)"
        ):
            Wrong(lengths=(5,)).rollout(5)

    def test_missing_text_raises(self) -> None:
        class Silent(TalkingEnv):
            def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
                return super()._step(tensordict).exclude("text")

        with pytest.raises(
            EnvironmentContractError, match=r"step returned no \('next', 'text'\), expected \(\) objects"
        ):
            Silent().rollout(3)


def test_transforms_may_touch_lists() -> None:
    env = TransformedEnv(TalkingEnv(ragged=False), RenameTransform(["text"], ["mission"]))
    batch = env.rollout(6, break_when_any_done=False)
    assert batch["mission"] == ["/".join(str(int(n)) for n in code) for code in batch["code"]]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_transform_ends_episodes(ragged: bool) -> None:
    env = TransformedEnv(SerialEnv(2, talking(2, ragged=ragged)), StepCounter(max_steps=2))
    for batch in SyncDataCollector(env, None, frames_per_batch=10, total_frames=40):
        check_streams(batch)
        assert batch["code"][..., 2].max() <= 1


def test_a_truncated_batch_of_unlike_shapes() -> None:
    env = TalkingEnv()
    env.add_truncated_keys()
    collector = SyncDataCollector(env, None, frames_per_batch=4, total_frames=8, set_truncated=True)
    for batch in collector:
        assert batch["next", "truncated"][-1].all() and check_rows(batch)
