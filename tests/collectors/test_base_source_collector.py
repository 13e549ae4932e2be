"""All collectors deliver batches, count frames and continue after errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from gleanrl.envs import GymEnv
from gleanrl.errors import ClosedError, EnvironmentFailure, PolicyError
from tests.collectors.helpers import IDS, NEVER, SCRIPT, check_names, make, raising, steps_of, take
from tests.fakes_base import CountingEnv


class Ending(CountingEnv):
    """Raises `error` at its seventh step."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(NEVER)
        self.error = error

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        if len(self.actions) == 7:
            raise self.error("on purpose")
        return out


class TestStopIteration:
    """An environment's StopIteration is an ordinary error, which no loop takes for its end."""

    def test_stop_iteration_is_raised_by_next(self) -> None:
        collector = make(Ending(StopIteration))
        take(collector, 1)
        with pytest.raises(StopIteration, match="step raised StopIteration: on purpose") as caught:
            collector.next()
        assert isinstance(caught.value, EnvironmentFailure) and isinstance(caught.value, RuntimeError)

    @pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, GeneratorExit, KeyError])
    def test_loops_raise_instead_of_ending(self, error: type[BaseException]) -> None:
        collector = make(Ending(error), total_frames=24)
        found = []
        with pytest.raises((EnvironmentFailure, error), match="on purpose") as caught:
            for batch in collector:
                found.append(batch)
        assert len(found) == 1
        if error is StopIteration:
            assert isinstance(caught.value.__cause__, StopIteration)
        found += list(collector)
        assert len(found) == 4
        check_names(found)


def test_builtin_next_continues_iterations_and_stops_at_the_budget() -> None:
    collector = make(CountingEnv(SCRIPT), total_frames=18)
    found = [next(collector), next(iter(collector)), next(collector)]
    check_names(found)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(collector)
    assert collector.closed


def test_builtin_next_raises_after_a_shutdown() -> None:
    collector = make(CountingEnv(SCRIPT), total_frames=18)
    next(collector)
    collector.shutdown()
    with pytest.raises(ClosedError):
        next(collector)


def test_iterator_continues_after_an_error() -> None:
    batches: Iterator[Any] = iter(make(Ending(KeyError), total_frames=18))
    found = [next(batches)]
    with pytest.raises(KeyError):
        next(batches)
    found += list(batches)
    assert len(found) == 3 and next(batches, None) is None
    check_names(found)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_on_the_way_to_the_user_is_counted(error: type[BaseException]) -> None:
    calls: list[int] = []

    def postproc(batch: Any) -> Any:
        calls.append(1)
        return raising(error())() if len(calls) == 2 else batch

    env = CountingEnv(NEVER)
    collector = make(env, postproc=postproc)
    found = take(collector, 1)
    with pytest.raises(error):
        collector.next()
    stats = collector.stats()
    assert stats.reasons == {"interrupted": 6} and stats.stepped == steps_of(env) == 12
    found += take(collector, 2)
    assert not set(found[0][IDS].tolist()) & set(found[1][IDS].tolist())
    check_names(found)  # type: ignore[arg-type]


def test_postproc_may_read_the_stats() -> None:
    seen: list[int] = []
    collector = make(CountingEnv(NEVER), postproc=lambda td: [seen.append(collector.stats().stepped), td][1])
    take(collector, 3)
    assert seen == [0, 6, 12]
    assert collector.stats().delivered == 18 and not collector.stats().reasons


def test_rollout_does_not_count_against_the_budget() -> None:
    collector = make(CountingEnv(SCRIPT), total_frames=12, init_random_frames=6)
    assert collector.rollout().numel() == 6
    assert collector.state_dict()["frames"] == 0 and collector.stats().delivered == 6
    assert [batch.numel() for batch in collector] == [6, 6]
    assert collector.stats().delivered == 18 and collector.stats().batches == 2


class TestRandomActions:
    """Random actions come from the collector's own generator."""

    def frames(self, collector: Any, count: int = 3) -> torch.Tensor:
        return torch.cat([batch["action"] for batch in take(collector, count)])

    @pytest.mark.parametrize("kwargs", [{}, {"policy": True, "init_random_frames": 18}])
    def test_global_seed_decides_and_later_draws_have_no_effect(self, kwargs: dict[str, Any]) -> None:
        def collector() -> Any:
            policy = torch.nn.Linear(3, 2) if "policy" in kwargs else None
            return make(CountingEnv(NEVER), **{**kwargs, "policy": policy})

        found = []
        for disturbed in (False, True):
            made = collector()
            torch.manual_seed(5)
            first = self.frames(made, 1)
            state = torch.get_rng_state()
            if disturbed:
                torch.rand(7)
            found.append(torch.cat([first, self.frames(made, 2)]))
            if not disturbed:
                assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(*found)
        torch.manual_seed(6)
        assert not torch.equal(self.frames(collector()), found[0])

    def test_a_seed_of_the_collector_decides(self) -> None:
        def frames(seed: int) -> torch.Tensor:
            collector = make(CountingEnv(NEVER))
            collector.set_seed(seed)
            return self.frames(collector)

        assert torch.equal(frames(3), frames(3)) and not torch.equal(frames(3), frames(4))

    def test_random_actions_continue_in_a_restored_collector(self) -> None:
        collector, other = make(CountingEnv(NEVER)), make(CountingEnv(NEVER))
        take(collector, 1)
        other.load_state_dict(collector.state_dict())
        assert torch.equal(self.frames(collector), self.frames(other))

    def test_rollouts_of_environments_draw_from_the_global_generator(self) -> None:
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            found.append(torch.cat([CountingEnv(NEVER).rollout(4)["action"] for _ in range(2)]))
        assert torch.equal(*found)


def test_state_can_be_saved_after_the_end_but_not_after_closing() -> None:
    collector = make(CountingEnv(SCRIPT), total_frames=12)
    assert len(list(collector)) == 2
    assert collector.state_dict()["frames"] == 12 and collector.next() is None
    with pytest.raises(ClosedError):
        collector.rollout()
    early = make(CountingEnv(SCRIPT), total_frames=12)
    state = early.state_dict()
    early.shutdown()
    with pytest.raises(ClosedError):
        early.next()
    for closed in (collector, early):
        before = closed.state_dict()
        with pytest.raises(ClosedError, match="make a new collector"):
            closed.load_state_dict(state)
        assert closed.state_dict()["frames"] == before["frames"], "nothing of it was taken over"


def test_the_plan_is_shown_without_addresses() -> None:
    shown = repr(make(CountingEnv(NEVER), lambda observation: observation[..., :2]).plan)
    assert (
        "actor=PolicyActor, random_actor=RandomActor, policy=TensorDictModule" in shown
        and " at 0x" not in shown
    )


def test_scores_in_place_of_discrete_actions_are_refused() -> None:
    collector = make(GymEnv("CartPole-v1"), torch.nn.Linear(4, 2))
    with pytest.raises(PolicyError, match="argmax .*categorical_action_encoding=True"):
        collector.next()
