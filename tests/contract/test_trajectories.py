"""Trajectories are exact: stream, ids, borders, aliasing, step limits, forced truncation, splitting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper
from tests.contract.helpers import IDS, MASK, check_stream, same, snapshot
from tests.fakes import FrameEnv, MutatingEnv, OracleEnv, ReusingEnv, Script
from tests.fakes_base import CountingEnv, StepCountEnv, TeamEnv

Make = Callable[..., SyncDataCollector]
ONE_STEP = Script(lengths=(1,))
LONG = Script(low=11, high=23)
POLICIES: dict[str, Any] = {
    "random": None,
    "tensors": lambda observation: observation[..., :2] * 0,
    "tensordict": lambda td: td.set("action", td["observation"][..., :2] * 0),
}


class TestStream:
    """`next` is (stream, episode, step + 1); the following root equals it, or is a reset root after done."""

    @pytest.mark.parametrize("kind", POLICIES)
    @pytest.mark.parametrize("script", [Script(seed=1), Script(seed=2, ending="truncated"), ONE_STEP, LONG])
    @pytest.mark.parametrize("frames", [1, 5, 16])
    def test_stream_of_one_environment_is_exact(
        self, make_collector: Make, kind: str, script: Script, frames: int
    ) -> None:
        env = GymWrapper(OracleEnv(stream=2, script=script))
        batches = list(make_collector(env, POLICIES[kind], frames_per_batch=frames, total_frames=48))
        assert sum(batch.numel() for batch in batches) == 48
        check_stream(batches, script)

    @pytest.mark.parametrize("kind", POLICIES)
    @pytest.mark.parametrize("script", [Script(seed=1), Script(seed=2, ending="both"), ONE_STEP, LONG])
    @pytest.mark.parametrize("envs", [1, 3])
    def test_streams_of_a_batched_environment_are_exact(
        self, make_collector: Make, kind: str, script: Script, envs: int
    ) -> None:
        env = CountingEnv(script, (envs,))
        batches = list(make_collector(env, POLICIES[kind], frames_per_batch=7 * envs, total_frames=42 * envs))
        assert [tuple(batch.shape) for batch in batches] == [(envs, 7)] * 6
        check_stream(batches, script)

    @pytest.mark.parametrize(
        "make_env", [lambda: CountingEnv(Script(seed=5)), lambda: CountingEnv(Script(seed=5), (1,))]
    )
    def test_a_factory_serves_as_well_as_an_environment(self, make_collector: Make, make_env: Any) -> None:
        check_stream(list(make_collector(make_env, frames_per_batch=6, total_frames=30)), Script(seed=5))

    @pytest.mark.parametrize("nested_flags", [False, True])
    def test_streams_of_agents_are_exact(self, make_collector: Make, nested_flags: bool) -> None:
        script = Script(seed=6)
        env = TeamEnv(script, (2,), nested_flags=nested_flags)
        batches = list(make_collector(env, frames_per_batch=12, total_frames=60))
        assert batches[0]["agents", "action"].shape == (2, 6, 2, 2)
        for batch in batches:
            rewards = batch["next", "agents", "reward"]
            assert torch.equal(rewards[..., 0, :] + 1, rewards[..., 1, :])
        lead = [
            batch.clone().set("observation", batch["agents", "observation"][..., 0, :]) for batch in batches
        ]
        for batch in lead:
            batch["next", "observation"] = batch["next", "agents", "observation"][..., 0, :]
        check_stream(lead, script)
        if nested_flags:
            flags = torch.stack([batch["next", "agents", "done"] for batch in batches])
            assert torch.equal(flags.all(-2), torch.stack([batch["next", "done"] for batch in batches]))

    def test_done_resets_only_the_environments_that_are_done(self, make_collector: Make) -> None:
        env = CountingEnv(Script(lengths=(2, 3, 5)), (3,))
        list(make_collector(env, frames_per_batch=30, total_frames=30))
        partial = [mask for mask in env.masks if mask is not None and not mask.all()]
        assert partial, "no partial reset was asked for"
        assert all(mask.shape == (3, 1) and mask.any() for mask in partial)


class TestIds:
    """A value of `("collector", "traj_ids")` names one trajectory only, which keeps it across batches."""

    def test_the_first_ids_are_laid_out_in_environment_order(self, make_collector: Make) -> None:
        batch = next(iter(make_collector(CountingEnv(LONG, (4,)), frames_per_batch=8, total_frames=-1)))
        assert batch[IDS].dtype == torch.int64
        assert batch[IDS].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]

    def test_one_environment_counts_up_from_zero(self, make_collector: Make) -> None:
        env = GymWrapper(OracleEnv(script=Script(lengths=(3,))))
        ids = torch.cat([batch[IDS] for batch in make_collector(env, frames_per_batch=4, total_frames=12)])
        assert ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]

    @pytest.mark.parametrize("envs", [(), (3,)])
    def test_reset_starts_new_ids(self, make_collector: Make, envs: tuple[int, ...]) -> None:
        collector = make_collector(CountingEnv(LONG, envs), frames_per_batch=6, total_frames=-1)
        stream = iter(collector)
        first = next(stream)
        collector.reset()
        second = next(stream)
        check_stream([first, second], LONG, fresh_batches=True)
        assert not set(first[IDS].flatten().tolist()) & set(second[IDS].flatten().tolist())

    @pytest.mark.parametrize("index", [[1], torch.tensor([1]), 1])
    def test_reset_by_index_changes_only_the_given_rows(self, make_collector: Make, index: Any) -> None:
        collector = make_collector(CountingEnv(LONG, (3,)), frames_per_batch=9, total_frames=-1)
        stream = iter(collector)
        first = next(stream)
        collector.reset(index)
        second = next(stream)
        check_stream([first[[0, 2]], second[[0, 2]]], LONG)
        check_stream([first[[1]], second[[1]]], LONG, fresh_batches=True)
        assert second[IDS][1, 0] not in first[IDS]

    @pytest.mark.parametrize("envs", [(), (3,)])
    def test_reset_at_each_iter_resets_first_and_gives_new_ids(
        self, make_collector: Make, envs: tuple[int, ...]
    ) -> None:
        env = CountingEnv(Script(seed=9), envs)
        batches = list(make_collector(env, frames_per_batch=12, total_frames=60, reset_at_each_iter=True))
        check_stream(batches, Script(seed=9), fresh_batches=True)

    def test_rollout_takes_its_ids_from_the_same_sequence(self, make_collector: Make) -> None:
        script = Script(seed=8)
        collector = make_collector(CountingEnv(script), frames_per_batch=5, total_frames=-1)
        batches = [collector.rollout() for _ in range(5)]
        assert [batch.numel() for batch in batches] == [5] * 5
        check_stream(batches, script)


class TestAliasing:
    """A delivered batch never changes, and later changes of the environment's arrays don't reach it."""

    @pytest.mark.parametrize("kind", POLICIES)
    def test_batches_do_not_change_when_later_ones_are_collected(
        self, make_collector: Make, kind: str
    ) -> None:
        kept: list[tuple[TensorDictBase, Any]] = []
        env = GymWrapper(OracleEnv(script=Script(seed=4)))
        for batch in make_collector(env, POLICIES[kind], frames_per_batch=6, total_frames=36):
            kept.append((batch, snapshot(batch)))
        assert all(same(batch, frozen) for batch, frozen in kept)
        assert len({id(batch) for batch, _ in kept}) == 6

    def test_writing_into_a_batch_does_not_reach_the_next_one(self, make_collector: Make) -> None:
        script = Script(seed=4)
        copies = []
        for batch in make_collector(CountingEnv(script, (2,)), frames_per_batch=12, total_frames=48):
            copies.append(batch.clone())
            batch.apply_(lambda leaf: leaf.fill_(1))
        check_stream(copies, script)

    @pytest.mark.parametrize("kind", POLICIES)
    def test_an_environment_that_reuses_its_array_is_recorded_right(
        self, make_collector: Make, kind: str
    ) -> None:
        env = GymWrapper(ReusingEnv(script=Script(seed=4)))
        batches = list(make_collector(env, POLICIES[kind], frames_per_batch=7, total_frames=42))
        check_stream(batches, Script(seed=4))

    def test_return_same_td_gives_one_object_with_new_values(self, make_collector: Make) -> None:
        script = Script(seed=4)
        env = GymWrapper(OracleEnv(script=script))
        seen, copies = [], []
        for batch in make_collector(env, frames_per_batch=6, total_frames=36, return_same_td=True):
            seen.append(batch)
            copies.append(batch.clone())
        assert len(copies) == 6 and all(batch is seen[0] for batch in seen)
        check_stream(copies, script)
        assert torch.equal(seen[0]["observation"], copies[-1]["observation"])

    def test_an_environment_that_overwrites_its_action_does_not_change_the_record(
        self, make_collector: Make
    ) -> None:
        inner = MutatingEnv(script=LONG)
        (batch,) = make_collector(
            GymWrapper(inner), lambda observation: observation[..., 2:].repeat_interleave(2, -1) + 1,
            frames_per_batch=9, total_frames=9,
        )  # fmt: skip
        assert batch["action"][:, 0].tolist() == list(range(1, 10))
        assert [float(action[0]) for action in inner.actions[-9:]] == list(range(1, 10))

    def test_leaves_are_contiguous_and_fit_for_learning(self, make_collector: Make) -> None:
        net = torch.nn.Linear(3, 2)
        (batch,) = make_collector(CountingEnv(LONG, (3,)), net, frames_per_batch=12, total_frames=12)
        for leaf in batch.values(True, True):
            assert leaf.is_contiguous() and not leaf.requires_grad and not leaf.is_inference()
        net(batch["observation"]).sum().backward()

    def test_uint8_frames_stay_uint8(self, make_collector: Make) -> None:
        env = GymWrapper(FrameEnv(script=Script(seed=4)))
        batches = list(make_collector(env, frames_per_batch=10, total_frames=30))
        frames = torch.cat([batch["next", "observation"] for batch in batches])
        assert frames.dtype == torch.uint8 and frames.shape == (30, 8, 8, 4)
        steps = torch.cat([batch["observation"] for batch in batches])[:, 0, 0, 2]
        assert torch.equal(frames[:, 0, 0, 2], steps + 1) and (frames[:, 0, 0, 3] == 255).all()


class TestMaxFramesPerTraj:
    """A step counter truncates (never terminates) each trajectory at the limit, independent of batches."""

    @pytest.mark.parametrize("envs", [(), (2,)])
    @pytest.mark.parametrize("limit", [1, 4])
    def test_limit_truncates_each_trajectory(
        self, make_collector: Make, envs: tuple[int, ...], limit: int
    ) -> None:
        script = Script(seed=7, low=1, high=9, ending="terminated")
        frames = 6 * (envs[0] if envs else 1)
        batches = list(
            make_collector(
                CountingEnv(script, envs),
                frames_per_batch=frames,
                total_frames=5 * frames,
                max_frames_per_traj=limit,
            )
        )
        data = torch.cat(batches, -1)
        counts = data["step_count"]
        assert counts.dtype == torch.int64 and counts.shape == (*data.shape, 1)
        assert torch.equal(counts.squeeze(-1), data["observation"][..., 2].long())
        assert torch.equal(data["next", "step_count"], counts + 1)
        at_limit = data["next", "step_count"] == limit
        triples = data["next", "observation"].long().reshape(-1, 3).tolist()
        ended = torch.tensor([script.flags(*t)[0] for t in triples]).reshape(data["next", "done"].shape)
        assert torch.equal(data["next", "truncated"], at_limit)
        assert torch.equal(data["next", "terminated"], ended)
        assert torch.equal(data["next", "done"], at_limit | ended)
        capped = tuple(min(limit, script.length(0, episode)) for episode in range(60))
        if not envs and limit > 1:
            assert max(capped) == limit and at_limit.any() and ended.any()
        for row in data.unsqueeze(0) if not envs else data:
            changes = row[IDS].diff() != 0
            assert torch.equal(changes, row["next", "done"][:-1, 0])

    @pytest.mark.parametrize("value", [None, 0, -1])
    def test_limit_of_none_zero_or_less_is_off(self, make_collector: Make, value: int | None) -> None:
        env = CountingEnv(Script(ending="never"))
        (batch,) = make_collector(env, frames_per_batch=20, total_frames=20, max_frames_per_traj=value)
        assert "step_count" not in batch.keys() and not batch["next", "done"].any()

    def test_an_existing_step_count_is_refused(self) -> None:
        with pytest.raises(ValueError, match="step_count"):
            SyncDataCollector(StepCountEnv(), None, frames_per_batch=4, total_frames=8, max_frames_per_traj=3)

    def test_an_existing_step_count_is_fine_without_a_limit(self, make_collector: Make) -> None:
        (batch,) = make_collector(StepCountEnv(LONG), frames_per_batch=4, total_frames=4)
        assert batch["next", "step_count"].flatten().tolist() == [1, 2, 3, 4]

    def test_limit_sets_nested_flags(self, make_collector: Make) -> None:
        env = TeamEnv(Script(ending="never"), nested_flags=True)
        (batch,) = make_collector(env, frames_per_batch=9, total_frames=9, max_frames_per_traj=3)
        for flag in ("done", "truncated"):
            assert batch["next", flag].flatten().nonzero().flatten().tolist() == [2, 5, 8]
            assert batch["next", "agents", flag][..., 0].all(-1).nonzero().flatten().tolist() == [2, 5, 8]
            assert torch.equal(batch["next", "agents", flag].any(-2), batch["next", flag])
        assert not batch["next", "terminated"].any() and not batch["next", "agents", "terminated"].any()

    def test_limit_truncates_a_gym_environment(self, make_collector: Make) -> None:
        env = GymWrapper(OracleEnv(script=Script(ending="never")))
        batches = list(make_collector(env, frames_per_batch=5, total_frames=15, max_frames_per_traj=4))
        ends = torch.cat([batch["next", "truncated"] for batch in batches]).flatten()
        assert ends.nonzero().flatten().tolist() == [3, 7, 11]
        assert torch.cat(batches)[IDS].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3


class TestSetTruncated:
    """In the last row every `truncated` is set, `done` follows, and `terminated` is unchanged."""

    @pytest.mark.parametrize("envs", [(), (3,)])
    def test_last_row_is_truncated_and_done(self, make_collector: Make, envs: tuple[int, ...]) -> None:
        script = Script(seed=11, ending="terminated")
        for batch in make_collector(
            CountingEnv(script, envs), frames_per_batch=12, total_frames=72, set_truncated=True
        ):
            triples = batch["next", "observation"].long().reshape(-1, 3).tolist()
            ended = torch.tensor([script.flags(*t)[0] for t in triples]).reshape(batch["next", "done"].shape)
            last = torch.zeros_like(ended)
            last[..., -1, :] = True
            assert torch.equal(batch["next", "truncated"], last)
            assert torch.equal(batch["next", "terminated"], ended)
            assert torch.equal(batch["next", "done"], ended | last)

    def test_nested_flags_of_the_last_row_are_truncated(self, make_collector: Make) -> None:
        env = TeamEnv(Script(ending="never"), nested_flags=True)
        (batch,) = make_collector(env, frames_per_batch=4, total_frames=4, set_truncated=True)
        for flag in ("done", "truncated"):
            assert batch["next", "agents", flag][:, 0, 0].tolist() == [False, False, False, True]
        assert not batch["next", "agents", "terminated"].any()

    def test_without_a_truncated_key_construction_raises(self) -> None:
        env = CountingEnv(flags=("done", "terminated"))
        with pytest.raises(RuntimeError, match="truncated"):
            SyncDataCollector(env, None, frames_per_batch=4, total_frames=4, set_truncated=True)

    def test_add_truncated_keys_makes_it_possible(self, make_collector: Make) -> None:
        env = CountingEnv(Script(ending="never"), flags=("done", "terminated")).add_truncated_keys()
        (batch,) = make_collector(env, frames_per_batch=4, total_frames=4, set_truncated=True)
        assert batch["next", "truncated"].flatten().tolist() == [False, False, False, True]


class TestSplitTrajs:
    """`split_trajs=True` pads trajectories to `[n, longest]` with zeros and a mask."""

    @pytest.mark.parametrize("envs", [(), (2,)])
    def test_rows_are_trajectories(self, make_collector: Make, envs: tuple[int, ...]) -> None:
        script = Script(seed=12)
        frames = 20
        batches = list(
            make_collector(
                CountingEnv(script, envs), frames_per_batch=frames, total_frames=3 * frames, split_trajs=True
            )
        )
        owners: dict[int, tuple[int, int]] = {}
        for batch in batches:
            assert batch.ndim == 2 and int(batch[MASK].sum()) == frames
            for row in batch:
                mask = row[MASK]
                real = row[mask]
                assert mask.tolist() == [True] * len(real) + [False] * (len(mask) - len(real)) and len(real)
                (name,) = set(real[IDS].tolist())
                triples = real["observation"].long()
                owner = (int(triples[0, 0]), int(triples[0, 1]))
                assert owners.setdefault(name, owner) == owner
                assert (triples[:, :2] == triples[0, :2]).all() and (triples[:, 2].diff() == 1).all()
                assert not real["next", "done"][:-1].any()
                for leaf in row[~mask].exclude(MASK).values(True, True):
                    assert not leaf.any()
        assert len(set(owners.values())) == len(owners), "two ids for one trajectory"
        data = torch.cat([batch[batch[MASK]] for batch in batches])
        assert len(data) == 3 * frames

    def test_a_trajectory_keeps_its_id_across_split_batches(self, make_collector: Make) -> None:
        env = CountingEnv(Script(lengths=(7, 4)))
        first, second = make_collector(env, frames_per_batch=9, total_frames=18, split_trajs=True)
        assert first[IDS][first[MASK]][-1] == second[IDS][second[MASK]][0]

    def test_postproc_runs_after_the_split(self, make_collector: Make) -> None:
        shapes = []

        def postproc(batch: TensorDictBase) -> TensorDictBase:
            shapes.append(tuple(batch.shape))
            return batch

        env = CountingEnv(Script(lengths=(2, 3)))
        make = make_collector(env, frames_per_batch=10, total_frames=10, split_trajs=True, postproc=postproc)
        (batch,) = make
        assert shapes == [tuple(batch.shape)] and batch.ndim == 2
