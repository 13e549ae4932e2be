"""The source makes batches, handles failures at every step, cuts and resets, and fills in whole columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type

from gleanrl._os import clock
from gleanrl.collectors.batch_columns import IDS, NONFINITE
from gleanrl.collectors.source import CollectionOptions
from gleanrl.errors import EnvironmentFailure, InvalidArgumentError, NonFiniteError
from tests.collectors.helpers import (
    NEVER,
    SCRIPT,
    Calls,
    ResetFails,
    T,
    check_names,
    collect,
    collection,
    raising,
)
from tests.contract.helpers import check_stream, on_td
from tests.fakes import Script
from tests.fakes_base import CountingEnv, CrookedEnv, StepCountEnv, TeamEnv


class TestBatches:
    """The contents of a batch without failures."""

    @pytest.mark.parametrize("batch_size", [(), (1,), (3,), (2, 2)])
    @pytest.mark.parametrize("max_steps", [None, 1, 3])
    def test_streams_continue_across_batches_of_any_length(
        self, batch_size: tuple[int, ...], max_steps: int | None
    ) -> None:
        made = collection(CountingEnv(SCRIPT, batch_size), max_steps=max_steps)
        lengths = [1, 4, 7, 2, 5]
        batches = [collect(made, n) for n in lengths]
        assert [b.batch_size for b in batches] == [(*batch_size, n) for n in lengths]
        assert all(b.names == [None] * len(batch_size) + ["time"] for b in batches)
        check_stream(batches, SCRIPT, limit=max_steps)
        frames = sum(b.numel() for b in batches)
        assert (made.snapshot().ledger.stepped, made.snapshot().ledger.delivered) == (frames, frames)
        if max_steps is not None:
            for batch in batches:
                assert torch.equal(batch["step_count"].squeeze(-1), batch["observation"][..., 2].long())
                assert torch.equal(batch["next", "step_count"], batch["step_count"] + 1)
        ends = torch.cat([b["next", "done"].reshape(-1) for b in batches])
        assert made.snapshot().trajectories.num_ended == int(ends.sum())

    def test_batches_share_no_memory(self) -> None:
        made = collection(CountingEnv(SCRIPT, (2,)), max_steps=3, nonfinite="mark")
        first = collect(made)
        frozen = first.clone()
        second = collect(made)
        assert (first == frozen).all()
        pointers = [
            {leaf.untyped_storage().data_ptr() for leaf in b.values(True, True)} for b in (first, second)
        ]
        assert not pointers[0] & pointers[1]

    def test_returns_and_lengths_equal_the_script(self) -> None:
        made = collection(CountingEnv(SCRIPT))
        for _ in range(4):
            collect(made)
        lengths = [SCRIPT.length(0, k) for k in range(made.snapshot().trajectories.num_ended)]
        assert list(made.snapshot().trajectories.recent_lengths) == lengths
        returns = [sum(SCRIPT.reward(0, k, s + 1) for s in range(n)) for k, n in enumerate(lengths)]
        assert list(made.snapshot().trajectories.recent_returns) == pytest.approx(returns)

    def test_rewards_of_a_team_are_added_up(self) -> None:
        made = collection(TeamEnv(Script(lengths=(2,))))
        collect(made, 2)
        expected = sum(2 * Script().reward(0, 0, s) + 1 for s in (1, 2))
        assert made.snapshot().trajectories.recent_returns[0] == pytest.approx(expected)

    def test_seconds_measure_collecting_only(self) -> None:
        fake = clock.FakeClock()
        made = collection(CountingEnv(SCRIPT), on_td(lambda td: [fake.advance(0.25), torch.zeros(2)][1]))
        with clock.use(fake):
            collect(made)
            fake.advance(1000)
            collect(made)
        assert made.snapshot().ledger.seconds == 2 * T * 0.25

    def test_the_exploration_type_holds_during_the_rollout_only(self) -> None:
        seen: set[Any] = set()
        policy = on_td(lambda td: [seen.add(interaction_type()), torch.zeros(2)][1])
        made = collection(CountingEnv(SCRIPT), policy, exploration_type=InteractionType.MEAN)
        seen.clear()
        before = interaction_type()
        collect(made)
        assert seen == {InteractionType.MEAN} and interaction_type() == before


class TestLimit:
    """`max_steps` and the groups of flags."""

    @pytest.mark.parametrize("batch_size", [(), (2,)])
    def test_nested_done_groups_are_truncated_with_the_root(self, batch_size: tuple[int, ...]) -> None:
        made = collection(TeamEnv(NEVER, batch_size, nested_flags=True), max_steps=3)
        batch = torch.cat([collect(made, 4), collect(made, 5)], -1)
        ends = torch.tensor([False, False, True] * 3).expand(*batch_size, 9)
        for group in ((), ("agents",)):
            for name in ("done", "truncated", "terminated"):
                flag = batch[("next", *group, name)].flatten(len(batch_size) + 1)  # (*batch, 9, agents)
                expected = torch.zeros_like(ends) if name == "terminated" else ends
                assert torch.equal(flag, expected.unsqueeze(-1).expand_as(flag)), (group, name)
        assert torch.equal(batch["step_count"].squeeze(-1), torch.arange(9).expand(*batch_size, 9) % 3)
        assert torch.equal(
            batch["agents", "observation"][..., 0, 2].long(), torch.arange(9).expand(*batch_size, 9) % 3
        )

    def test_partial_reset_restarts_the_count_of_its_rows_only(self) -> None:
        made = collection(CountingEnv(NEVER, (2,)), max_steps=4)
        batches = [collect(made, 2)]
        made.reset(torch.tensor([False, True]))
        batches.append(collect(made, 4))
        counts = torch.cat([b["step_count"].squeeze(-1) for b in batches], -1)
        assert counts.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]]
        assert batches[1][IDS].tolist() == [[0, 0, 3, 3], [2] * 4]

    def test_a_step_count_of_the_environment_is_not_overwritten(self) -> None:
        with pytest.raises(InvalidArgumentError, match="max_frames_per_traj: .*step_count"):
            collection(StepCountEnv(NEVER), max_steps=3)
        assert collect(collection(StepCountEnv(NEVER)))["step_count"].squeeze(-1).tolist() == list(range(T))


class TestRandomFrames:
    """Random batches have the policy's columns."""

    @pytest.mark.parametrize("batch_size", [(), (3,)])
    def test_the_policys_extras_are_zero(self, batch_size: tuple[int, ...]) -> None:
        def policy(tensordict: TensorDictBase) -> TensorDictBase:
            size = tensordict.batch_size
            tensordict["hidden", "state"] = torch.full((*size, 4), 3.0)
            tensordict["log_prob"] = torch.full(size, -2.5, dtype=torch.float64)
            return tensordict.set("action", torch.full((*size, 2), 9.0))

        made = collection(CountingEnv(SCRIPT, batch_size), policy)
        batches = [collect(made, random=random) for random in (True, False, True)]
        keys = [{k: (v.shape, v.dtype) for k, v in b.items(True, True)} for b in batches]
        assert keys[0] == keys[1] == keys[2]
        for batch, value in zip(batches, (0.0, 1.0, 0.0), strict=True):
            assert (batch["hidden", "state"] == 3 * value).all() and (batch["log_prob"] == -2.5 * value).all()
            assert bool((batch["action"] == 9).all()) is bool(value)
            assert bool((batch["action"].abs() <= 1).all()) is not bool(value)
        check_stream(batches, SCRIPT)


class TestNonFinite:
    """The choices "raise", "mark" and "pass"."""

    def env(self, at: int = 3) -> CrookedEnv:
        return CrookedEnv("nan", at, script=NEVER, batch_size=(2,))

    def test_marked_rows_are_flagged_and_the_rest_delivered(self) -> None:
        made = collection(self.env(), nonfinite="mark")
        batches = [collect(made), collect(made)]
        expected = torch.zeros(2, T, dtype=torch.bool)
        expected[1, 2:4] = True  # next of the step, and root of the following step
        assert torch.equal(batches[0][NONFINITE], expected) and not batches[1][NONFINITE].any()
        assert (made.snapshot().ledger.flagged, made.snapshot().ledger.delivered) == (2, 4 * T - 2)

    def test_pass_neither_marks_nor_counts(self) -> None:
        made = collection(self.env(), nonfinite="pass")
        batch = collect(made)
        assert batch["next", "observation"].isnan().sum() == 1
        assert NONFINITE not in batch.keys(True) and made.snapshot().ledger.flagged == 0

    def test_a_bad_value_of_a_reset_is_found_in_the_root(self) -> None:
        class Env(CountingEnv):
            def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
                out = super()._reset(tensordict, **kwargs)
                out["observation"][1] = float("inf") if len(self.masks) == 2 else out["observation"][1]
                return out

        made = collection(Env(Script(lengths=(3,))))
        with pytest.raises(NonFiniteError, match="put out inf in 'observation' at step 3 of the batch"):
            collect(made)

    def test_non_finite_policy_outputs_are_not_checked(self) -> None:
        policy = on_td(
            lambda td: [td.set("value", torch.tensor(float("nan"))), torch.full((2,), float("inf"))][1]
        )
        batch = collect(collection(CountingEnv(NEVER), policy))
        assert batch["value"].isnan().all() and batch["action"].isinf().all()

    def test_unknown_nonfinite_choice_is_refused(self) -> None:
        with pytest.raises(
            InvalidArgumentError, match="nonfinite: expected 'raise', 'mark' or 'pass', got 'drop'"
        ):
            CollectionOptions(nonfinite="drop")


class TestCuts:
    """The interruptor."""

    @pytest.mark.parametrize("batch_size", [(), (2,)])
    @pytest.mark.parametrize("every", [1, 2, 3, T, T + 1])
    def test_a_batch_ends_with_the_step_after_which_it_was_stopped(
        self, every: int, batch_size: tuple[int, ...]
    ) -> None:
        calls = itertools.count(1)
        made = collection(
            CountingEnv(SCRIPT, batch_size),
            max_steps=3,
            nonfinite="mark",
            stop=lambda _: next(calls) % every == 0,
        )
        batches = [collect(made) for _ in range(4)]
        lengths = [batch.shape[-1] for batch in batches]
        assert all(n <= T for n in lengths) and (every > T or lengths[0] == every)
        check_stream(batches, SCRIPT, limit=3)
        counts = torch.cat([b["step_count"] - b["observation"][..., 2:].long() for b in batches], -2)
        assert not counts.any() and not any(b[NONFINITE].any() for b in batches)
        assert (
            made.snapshot().ledger.delivered
            == made.snapshot().ledger.stepped
            == sum(b.numel() for b in batches)
        )

    def test_bad_value_in_a_cut_batch_is_reported_at_its_place(self) -> None:
        calls = itertools.count(1)
        env = CrookedEnv("nan", 2, script=NEVER, batch_size=(2,))
        with pytest.raises(NonFiniteError, match="environment 1 .* at step 1 of the batch"):
            collect(collection(env, stop=lambda _: next(calls) == 3))


class TestReuse:
    """One block for all batches."""

    def test_batches_share_one_tensordict_and_its_memory(self) -> None:
        made = collection(CountingEnv(SCRIPT, (2,)), max_steps=3, nonfinite="mark", reuse_block=True)
        copies, first = [], None
        for _ in range(4):
            batch = collect(made)
            first = first or (batch, {k: v.data_ptr() for k, v in batch.items(True, True)})
            assert batch is first[0] and {k: v.data_ptr() for k, v in batch.items(True, True)} == first[1]
            copies.append(batch.clone())
        check_stream(copies, SCRIPT, limit=3)

    def test_batches_of_other_lengths_have_separate_tensordicts(self) -> None:
        calls = itertools.count(1)
        made = collection(CountingEnv(SCRIPT), reuse_block=True, stop=lambda _: next(calls) == T + 2)
        copies = [collect(made, n).clone() for n in (T, T, T, 3, T)]
        assert [len(copy) for copy in copies] == [T, 2, T, 3, T]
        check_stream(copies, SCRIPT)

    def test_a_failure_leaves_no_stale_rows(self) -> None:
        made = collection(CrookedEnv("raise", T + 3, script=SCRIPT), reuse_block=True)
        copies = [collect(made).clone()]
        with pytest.raises(EnvironmentFailure):
            collect(made)
        copies.append(collect(made).clone())
        check_names(copies)
        check_stream(copies[1:], SCRIPT)


class TestReset:
    """Resets by the caller."""

    def test_all_environments_begin_new_trajectories(self) -> None:
        made = collection(CountingEnv(NEVER, (2,)))
        batches = [collect(made)]
        made.reset()
        batches.append(collect(made))
        assert [b[IDS][:, 0].tolist() for b in batches] == [[0, 1], [2, 3]]
        check_names(batches)

    def test_consecutive_resets_consume_no_ids(self) -> None:
        made = collection(CountingEnv(NEVER))
        made.reset()
        made.reset()
        assert collect(made)[IDS].tolist() == [0] * T

    @pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=4)))
    def test_masked_environments_begin_new_trajectories(self, mask: tuple[bool, ...]) -> None:
        made = collection(CountingEnv(NEVER, (2, 2)))
        batches = [collect(made)]
        chosen = torch.tensor(mask).reshape(2, 2)
        kept = chosen.clone()
        made.reset(chosen)
        assert torch.equal(chosen, kept)
        batches.append(collect(made))
        check_names(batches)
        assert torch.equal(batches[1]["observation"][..., 0, 2] == 0, chosen)
        assert torch.equal(batches[1][IDS][..., 0] != batches[0][IDS][..., 0], chosen)

    def test_keywords_go_to_the_environment_and_are_not_lost(self) -> None:
        env = CountingEnv(NEVER)
        made = collection(env)
        batches = [collect(made)]
        made.adopt(made.snapshot())  # an adopted state begins with a reset
        made.reset(options=7)
        resets = len(env.masks)
        batches.append(collect(made))
        assert env.reset_kwargs[-1] == {"options": 7} and len(env.masks) == resets
        check_names(batches)
        assert batches[1]["observation"][0, 2] == 0

    @pytest.mark.parametrize("kwargs", [{}, {"options": 1}])
    def test_a_failing_reset_is_explained_and_tried_again(self, kwargs: dict[str, Any]) -> None:
        made = collection(ResetFails(2, script=NEVER))
        first = collect(made)
        with pytest.raises(EnvironmentFailure, match="reset raised KeyError"):
            made.reset(**kwargs)
        second = collect(made)
        check_names([first, second])
        assert second["observation"][0, 2] == 0

    def test_partial_reset_does_not_replace_a_due_full_reset(self) -> None:
        env = CountingEnv(NEVER, (2,))
        made = collection(env, Calls(T + 3, raising(KeyboardInterrupt())))
        batches = [collect(made)]
        with pytest.raises(KeyboardInterrupt):
            collect(made)
        made.reset(torch.tensor([True, False]))
        batches.append(collect(made))
        assert (batches[1]["observation"][:, 0, 2] == 0).all()
        check_names(batches)
