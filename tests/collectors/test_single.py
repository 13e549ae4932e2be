"""`SyncDataCollector` turns keywords into plans, and moves, marks and processes batches."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl._os import clock
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper, SerialEnv, StepCounter, TransformedEnv
from gleanrl.errors import (
    ClosedError,
    EnvironmentFailure,
    InvalidArgumentError,
    PolicyError,
    UnsupportedError,
)
from tests.collectors.helpers import IDS, NEVER, SCRIPT, Calls, Net, Staying, check_names, make, raising, take
from tests.contract.helpers import check_stream, on_td
from tests.fakes import NestedDictEnv, OracleEnv, Script
from tests.fakes_base import CountingEnv, CrookedEnv, TeamEnv

CPU, CPU0 = torch.device("cpu"), torch.device("cpu:0")


def test_policies_may_return_numpy_arrays_and_numbers() -> None:
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    for action in (1, np.int64(1), np.array(1), torch.tensor(1)):
        batch = next(iter(make(env, lambda observation, action=action: action)))
        assert batch["action"].dtype is torch.int64 and (batch["action"] == 1).all()
    pair = SerialEnv(2, "CartPole-v1", create_env_kwargs={"categorical_action_encoding": True})
    batch = next(iter(make(pair, lambda observation: (observation[:, 0] > 0).long().numpy())))
    assert torch.equal(batch["action"], (batch["observation"][..., 0] > 0).long())


def test_policies_read_nested_observations_and_groups() -> None:
    for env in (GymWrapper(NestedDictEnv()), SerialEnv(2, NestedDictEnv)):

        def act(robot: TensorDictBase, clock: torch.Tensor) -> Any:
            assert torch.equal(robot["clock"], clock) and set(robot.keys()) == {"pose", "clock"}
            return (clock / 100).expand(*clock.shape[:-1], 2).float().numpy()

        batch = next(iter(make(env, act)))
        assert torch.equal(batch["action"], (batch["robot", "clock"] / 100).expand(batch["action"].shape))


@pytest.mark.parametrize("action", [1, np.array(1), torch.tensor(1)], ids=type)
def test_an_index_for_a_one_hot_action_names_the_encoding(action: Any) -> None:
    with pytest.raises(PolicyError, match="index of a choice.*categorical_action_encoding=True"):
        next(iter(make(GymEnv("CartPole-v1"), lambda observation: action)))
    several = [action] * 2 if isinstance(action, int) else action
    with pytest.raises(PolicyError, match="index of a choice.*categorical_action_encoding=True"):
        act = lambda observation: torch.as_tensor(np.broadcast_to(several, 2).copy())  # noqa: E731
        next(iter(make(SerialEnv(2, "CartPole-v1"), act)))


class TestConstruction:
    """Keywords become plans, and a failing constructor closes all that it opened."""

    def test_attributes_are_the_rounded_numbers(self) -> None:
        collector = make(CountingEnv(SCRIPT, (4,)), frames=10, total_frames=21, init_random_frames=13)
        assert collector.requested_frames_per_batch == 10
        assert (collector.frames_per_batch, collector.total_frames, collector.init_random_frames) == (
            12,
            24,
            24,
        )
        assert make().total_frames == math.inf

    def test_rounding_is_warned_about_once_where_the_collector_is_made(self) -> None:
        with pytest.warns(UserWarning) as caught:
            collector = SyncDataCollector(
                CountingEnv(SCRIPT, (4,)), frames_per_batch=10, total_frames=21, init_random_frames=13
            )
        assert len(caught) == 1
        assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(collector)) == 2

    @pytest.mark.parametrize("limit", [None, 0, -5])
    def test_without_a_limit_there_is_no_step_count(self, limit: int | None) -> None:
        assert "step_count" not in take(make(max_frames_per_traj=limit), 1)[0].keys()

    def test_a_fractional_limit_is_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"max_frames_per_traj: .* 2\.5"):
            make(max_frames_per_traj=2.5)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"frames": 0}, InvalidArgumentError),
            ({"policy": on_td(lambda td: torch.zeros(5)), "storing_device": "toaster"}, InvalidArgumentError),
            ({"policy": lambda pixels, depth: pixels}, TypeError),
            ({"max_frames_per_traj": 3, "env": "step_count"}, InvalidArgumentError),
            ({"policy": on_td(lambda td: td["nothing"])}, KeyError),
        ],
    )
    def test_failing_constructor_closes_made_environments_only(
        self, wrong: dict[str, Any], error: type[Exception]
    ) -> None:
        made: list[CountingEnv] = []

        class Env(CountingEnv):
            closings = 0

            def _declare(self) -> None:
                super()._declare()
                if wrong.get("env") == "step_count":
                    spec = self.observation_spec
                    spec["step_count"] = spec["observation"].clone()
                    self.observation_spec = spec

            def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
                out = super()._package(flags)
                return out.set("step_count", out["observation"].clone()) if "env" in wrong else out

            def close(self, **kwargs: Any) -> None:
                self.closings += 1

        def factory() -> Env:
            made.append(Env(SCRIPT))
            return made[-1]

        keywords = {name: value for name, value in wrong.items() if name != "env"}
        given = Env(SCRIPT)
        for env in (factory, given):
            with pytest.raises(error):
                make(env, **keywords)
        gc.collect()
        assert (made[0].closings, given.closings) == (1, 0)

    def test_set_truncated_needs_a_flag(self) -> None:
        with pytest.raises(UnsupportedError, match="add_truncated_keys"):
            make(CountingEnv(SCRIPT, flags=("done", "terminated")), set_truncated=True)

    def test_repr_shows_env_policy_and_budget(self) -> None:
        shown = repr(make(policy=Net(), total_frames=12))
        for text in ("SyncDataCollector(", "CountingEnv", "frames_per_batch=6", "total_frames=12", "policy="):
            assert text in shown
        assert "total_frames=endless" in repr(make())

    def test_a_closed_collector_has_the_same_repr(self) -> None:
        collector = make(total_frames=12)
        shown, html = repr(collector), collector._repr_html_()
        assert len(shown.splitlines()) == 5 and "<td" in html
        for _ in collector:
            pass
        collector.shutdown()
        assert repr(collector) == shown and collector._repr_html_() == html

    def test_stats_print_on_lines_and_as_a_table(self) -> None:
        collector = make(total_frames=12)
        stats = collector.stats()
        assert repr(stats).splitlines()[:2] == ["CollectorStats(", "    delivered=0,"]
        assert "reasons={}" in repr(stats) and stats._repr_html_().count("<tr>") == 1 + len(vars(stats))


class TestBatches:
    """Changes between collection and delivery."""

    def test_random_frames_come_first(self) -> None:
        collector = make(policy=Net(7.0), init_random_frames=7, total_frames=18)
        assert [bool((batch["action"] == 7).all()) for batch in collector] == [False, False, True]

    def test_a_rollout_is_neither_random_nor_counted_in_the_budget(self) -> None:
        collector = make(policy=Net(7.0), init_random_frames=6, total_frames=12)
        batches = [collector.rollout(), *collector]
        assert [bool((batch["action"] == 7).all()) for batch in batches] == [True, False, True]
        assert collector.stats().delivered == 18 and collector.stats().batches == 2
        check_stream(batches, SCRIPT)

    @pytest.mark.parametrize("batch_size", [(), (2,)])
    def test_set_truncated_marks_the_last_step_of_every_group_and_nothing_else(
        self, batch_size: tuple[int, ...]
    ) -> None:
        collector = make(TeamEnv(NEVER, batch_size, nested_flags=True), set_truncated=True, frames=8)
        plain = make(TeamEnv(NEVER, batch_size, nested_flags=True), frames=8)
        for batch, other in zip(take(collector, 2), take(plain, 2), strict=True):
            for group in ((), ("agents",)):
                for name in ("done", "truncated"):
                    flag = batch[("next", *group, name)].movedim(len(batch_size), 0)
                    assert flag[-1].all() and not flag[:-1].any()
                assert not batch[("next", *group, "terminated")].any()
            assert torch.equal(batch[IDS], other[IDS])

    def test_reset_at_each_iter(self) -> None:
        batches = take(make(reset_at_each_iter=True, max_frames_per_traj=3), 4)
        check_stream(batches, SCRIPT, fresh_batches=True, limit=3)

    def test_postproc_gets_split_trajectories(self) -> None:
        seen: list[torch.Size] = []
        collector = make(
            CountingEnv(Script(lengths=(3,))),
            split_trajs=True,
            postproc=lambda b: [seen.append(b.shape), b][1],
        )
        assert take(collector, 1)[0].shape == (2, 3) and seen == [(2, 3)]
        assert collector.stats().delivered == 6

    def test_failing_postproc_discards_only_its_batch(self) -> None:
        calls: list[int] = []

        def postproc(batch: TensorDictBase) -> TensorDictBase:
            calls.append(len(calls))
            return batch if calls[-1] != 1 else raising(ZeroDivisionError())()

        collector = make(postproc=postproc, total_frames=18)
        batches = take(collector, 1)
        with pytest.raises(ZeroDivisionError):
            collector.next()
        batches += list(collector)
        check_names(batches)  # type: ignore[arg-type]
        assert sum(batch.numel() for batch in batches) == 18
        assert (collector.stats().stepped, dict(collector.stats().reasons)) == (24, {"postproc": 6})

    def test_iteration_continues_after_an_environment_error(self) -> None:
        collector = make(CrookedEnv("raise", 9, script=SCRIPT), total_frames=18)
        batches = take(collector, 1)
        with pytest.raises(EnvironmentFailure):
            collector.next()
        batches += list(collector)
        check_names(batches)  # type: ignore[arg-type]
        stats = collector.stats()
        assert (stats.delivered, stats.discarded, stats.stepped, stats.batches) == (18, 2, 20, 3)


class TestDevices:
    """Two spellings of one device are handled like two devices."""

    @pytest.mark.parametrize("storing", [None, "cpu", "cpu:0"])
    @pytest.mark.parametrize("same", [False, True])
    def test_batches_are_complete_for_every_storing_device(self, storing: str | None, same: bool) -> None:
        collector = make(
            CountingEnv(SCRIPT, (2,)), storing_device=storing, return_same_td=same, frames=8, total_frames=28
        )
        batches, pointers = [], []
        for batch in collector:
            assert batch.device == (None if storing is None else torch.device(storing))
            batches.append(batch.clone())
            pointers.append(batch["observation"].data_ptr())
            del batch
        assert [batch.shape for batch in batches] == [(2, 4)] * 3 + [(2, 2)]
        check_stream(batches, SCRIPT)
        if same:
            assert len(set(pointers[:3])) == 1

    @pytest.mark.parametrize("storing", [None, "cpu:0"])
    def test_return_same_td_returns_one_object(self, storing: str | None) -> None:
        collector = iter(make(storing_device=storing, return_same_td=True))
        first = next(collector)
        frozen = first.clone()
        assert next(collector) is first and not torch.equal(first["observation"], frozen["observation"])

    @pytest.mark.parametrize("storing", [None, "cpu:0"])
    def test_batches_do_not_change_by_default(self, storing: str | None) -> None:
        collector = iter(make(storing_device=storing))
        first = next(collector)
        frozen = first.clone()
        assert next(collector) is not first and (first == frozen).all()

    def test_the_environment_is_moved(self) -> None:
        collector = make(CountingEnv(SCRIPT), env_device="cpu")
        assert collector.env.device == CPU
        assert next(iter(collector)).device == CPU

    @pytest.mark.parametrize("policy", [Net(0.0), on_td(lambda td: torch.zeros(2)), None])
    def test_policy_may_have_another_device(self, policy: Any) -> None:
        check_stream(take(make(policy=policy, policy_device="cpu:0"), 3), SCRIPT)

    def test_a_copied_policy_waits_for_the_push(self) -> None:
        net = Net(0.0)
        copied, live = make(policy=Staying(net), policy_device="cpu"), make(policy=net, policy_device="cpu")
        copied.update_policy_weights_()
        seen = []
        for step in range(3):
            nn.init.constant_(net.value, float(step))
            seen.append((float(take(copied, 1)[0]["action"].max()), float(take(live, 1)[0]["action"].max())))
            if step == 1:
                copied.update_policy_weights_()
                live.update_policy_weights_()
        assert seen == [(0.0, 0.0), (0.0, 1.0), (1.0, 2.0)]


class TestControl:
    """Resets, seeds, shutdown."""

    def test_reset_by_index(self) -> None:
        collector = make(CountingEnv(NEVER, (3,)), frames=9)
        batches = take(collector, 1)
        collector.reset([0, 2])
        batches += take(collector, 1)
        assert batches[1]["observation"][:, 0, 2].tolist() == [0, 3, 0]
        check_names(batches)  # type: ignore[arg-type]

    def test_invalid_reset_index_is_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="batch of environments"):
            make().reset(0)
        with pytest.raises(UnsupportedError, match="leave index out"):
            make(CountingEnv(NEVER, (3,))).reset(0, options={})
        with pytest.raises(IndexError):
            make(CountingEnv(NEVER, (3,))).reset(3)

    def test_reset_with_keywords(self) -> None:
        env = CountingEnv(NEVER)
        collector = make(env)
        batches = take(collector, 1)
        collector.reset(options=5)
        batches += take(collector, 1)
        assert {"options": 5} in env.reset_kwargs
        check_names(batches)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("batch_size", "last"), [((), 11), ((3,), 13)])
    def test_seeding_resets(self, batch_size: tuple[int, ...], last: int) -> None:
        env = CountingEnv(NEVER, batch_size)
        collector = make(env)
        batches = take(collector, 1)
        assert collector.set_seed(11) in (11, last)
        batches += take(collector, 1)
        assert env.seeds[-1] == 11 and not batches[1]["observation"][..., 0, 2].any()
        check_names(batches)  # type: ignore[arg-type]

    def test_after_shutdown_only_state_and_stats_are_left(self) -> None:
        collector = make()
        take(collector, 1)
        collector.shutdown()
        collector.shutdown()
        assert collector.stats().delivered == 6 and collector.state_dict()["frames"] == 6
        for call in (collector.next, collector.rollout, collector.reset, lambda: collector.set_seed(0)):
            with pytest.raises(ClosedError):
                call()

    @pytest.mark.parametrize("used", [True, False])
    def test_deleting_the_collector_closes_an_unshared_environment(self, used: bool) -> None:
        env = CountingEnv(SCRIPT)
        collector = make(env)
        take(collector, 1)
        if used:
            env.rollout(2)
        del collector
        gc.collect()
        assert env.is_closed is not used

    @pytest.mark.parametrize("batched", [False, True])
    @pytest.mark.parametrize("end", ["budget", "shutdown", "replaced"])
    def test_second_collector_reopens_a_closed_environment(self, end: str, batched: bool) -> None:
        single: Any = partial(GymEnv, "CartPole-v1")
        env = TransformedEnv(SerialEnv(2, single) if batched else single(), StepCounter())

        def made() -> Any:
            return SyncDataCollector(env, frames_per_batch=10, total_frames=20)

        collector = made()
        if end == "budget":
            assert len(list(collector)) == 2
        elif end == "shutdown":
            collector.shutdown()
        else:
            collector.next()
        assert env.is_closed is (end != "replaced")
        collector = made()
        gc.collect()
        assert [batch.numel() for batch in collector] == [10, 10]

    def test_frames_per_second_leave_the_learner_out(self) -> None:
        fake = clock.FakeClock()
        collector = make(policy=on_td(lambda td: [fake.advance(0.5), torch.zeros(2)][1]))
        with clock.use(fake):
            for _ in range(3):
                take(collector, 1)
                fake.advance(60)
        assert collector.stats().frames_per_s == 2.0

    def test_the_bar_is_shown_and_taken_away(self, capsys: pytest.CaptureFixture[str]) -> None:
        list(make(total_frames=12, progress=True))
        assert "12 frames" in capsys.readouterr().out


def test_exception_of_the_policy_is_not_changed() -> None:
    collector = make(policy=Calls(3, raising(ZeroDivisionError("mine"))))
    with pytest.raises(ZeroDivisionError, match="mine"):
        collector.next()
    wrong: Callable[..., Any] = Calls(8, lambda action: action[..., :1])
    collector = make(policy=wrong)
    take(collector, 1)
    with pytest.raises(PolicyError, match=r"'action' expected shape \(2,\)"):
        collector.next()


def test_a_limit_gives_the_environment_the_flag_that_it_sets() -> None:
    collector = make(CountingEnv(NEVER, flags=("done",)), frames=6, total_frames=6, max_frames_per_traj=2)
    (batch,) = collector
    assert batch["next", "truncated"].squeeze(-1).tolist() == [False, True] * 3
    assert batch["next", "done"].squeeze(-1).tolist() == [False, True] * 3
    assert not batch["next", "terminated"].any()


def test_weights_of_the_wrapper_fit_too() -> None:
    collector = SyncDataCollector(CountingEnv(NEVER), nn.Linear(3, 2), frames_per_batch=2, device="cpu")
    collector.update_policy_weights_(TensorDict.from_module(collector.policy).data.clone().zero_())
    assert all(not parameter.any() for parameter in collector.policy.parameters())


@pytest.mark.parametrize(
    "disturb", [lambda env: env.rollout(3), lambda env: env.reset()], ids=["rollout", "reset"]
)
@pytest.mark.parametrize(
    "make_env", [lambda: CountingEnv(SCRIPT), lambda: GymWrapper(OracleEnv(script=SCRIPT))]
)
def test_environment_used_outside_the_collector_is_reset(make_env: Any, disturb: Any) -> None:
    env = make_env()
    collector = make(env, frames=7, total_frames=21)
    stream = iter(collector)
    first = next(stream)
    disturb(env)
    with pytest.warns(UserWarning, match="outside the collector"):
        second = next(stream)
    third = next(stream)
    ids = [set(batch[IDS].tolist()) for batch in (first, second, third)]
    assert not ids[0] & ids[1], "an interrupted trajectory doesn't go on"
    for batch in (first, second, third):  # observations are (stream, episode, step)
        seen, after = batch["observation"], batch["next", "observation"]
        assert torch.equal(after[:, 1], seen[:, 1]) and torch.equal(after[:, 2], seen[:, 2] + 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"postproc": 3}, "postproc: expected a callable"),
        ({"interruptor": object()}, "interruptor: expected"),
        ({"exploration_type": 7}, "exploration_type: expected"),
        ({"device": "cuda:7"}, "env_device: cuda:7 can't be used here"),
    ],
)
def test_unusable_arguments_are_refused_at_construction(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SyncDataCollector(CountingEnv(NEVER), frames_per_batch=2, **kwargs)


def test_postproc_that_returns_none_raises_and_delivers_nothing() -> None:
    collector = make(CountingEnv(NEVER), frames=4, total_frames=8, postproc=lambda batch: None)
    with pytest.raises(TypeError, match="postproc: expected the batch"):
        collector.next()
    stats = collector.stats()
    assert stats.delivered == 0 and stats.reasons == {"postproc": 4}


def test_none_in_place_of_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match="load_state_dict: expected a mapping, got NoneType"):
        make(CountingEnv(NEVER)).load_state_dict(None)


def test_policy_that_returns_none_raises() -> None:
    with pytest.raises(PolicyError, match=r"expected \['action'\], it returned None"):
        SyncDataCollector(CountingEnv(NEVER), lambda observation: None, frames_per_batch=2)


def test_getattr_and_map_fn_reach_the_parts() -> None:
    collector = make(total_frames=-1)
    assert collector.getattr_env("batch_size") == collector.env.batch_size
    assert collector.getattr_policy("__class__") is type(collector.policy)
    assert collector.map_fn("set_seed", [(3,), (5,)], [{}, {"static_seed": True}]) == [
        collector.set_seed(3),
        collector.set_seed(5, static_seed=True),
    ]
    assert collector.map_fn("set_seed", list_of_kwargs=[{"seed": 4}]) == [collector.set_seed(4)]
    assert collector.map_fn("reset") == []
    with pytest.raises(InvalidArgumentError, match="got 1 and 2"):
        collector.map_fn("reset", [()], [{}, {}])
    with pytest.raises(AttributeError):
        collector.getattr_rb("storage")
    assert collector.pre_collect_hook is None and collector.trajs_per_batch is None
