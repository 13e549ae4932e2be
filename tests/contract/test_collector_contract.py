"""The contract of a collector: layout, devices, names, methods, state, seeds, hooks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gleanrl.collectors.collectors import SyncDataCollector as SyncDataCollectorOfOldPath
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from gleanrl.collectors import BaseCollector, Collector, DataCollectorBase, SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper
from gleanrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from gleanrl.errors import GleanError
from tests.contract.helpers import (
    IDS,
    Constant,
    check_stream,
    counter,
    leaf_keys,
    on_td,
    snapshot,
    tensors_below,
    valid_rows,
)
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv

Make = Callable[..., SyncDataCollector]
SCRIPT = Script(seed=31)
FLAGS = ("done", "terminated", "truncated")


def env() -> GymWrapper:
    return GymWrapper(OracleEnv(script=SCRIPT))


class TestLayout:
    """The leaves of a batch, their shapes, dtypes and devices, and the batch's names and device."""

    def test_cartpole_batch_has_the_documented_leaves(self, make_collector: Make) -> None:
        batch = next(iter(make_collector(GymEnv("CartPole-v1"), frames_per_batch=20, total_frames=-1)))
        expected = {
            "action": ((20, 2), torch.int64),
            "observation": ((20, 4), torch.float32),
            ("next", "observation"): ((20, 4), torch.float32),
            ("next", "reward"): ((20, 1), torch.float32),
            IDS: ((20,), torch.int64),
            **dict.fromkeys(FLAGS, ((20, 1), torch.bool)),
            **{("next", key): ((20, 1), torch.bool) for key in FLAGS},
        }
        assert {key: (tuple(batch[key].shape), batch[key].dtype) for key in leaf_keys(batch)} == expected
        assert (
            batch.batch_size == batch["next"].batch_size == batch["collector"].batch_size == torch.Size([20])
        )

    def test_batch_of_environments_has_a_leading_dimension(self, make_collector: Make) -> None:
        batch = next(iter(make_collector(CountingEnv(SCRIPT, (3,)), frames_per_batch=12, total_frames=-1)))
        assert (
            batch.batch_size
            == batch["next"].batch_size
            == batch["collector"].batch_size
            == torch.Size([3, 4])
        )
        assert batch[IDS].shape == (3, 4) and batch["next", "reward"].shape == (3, 4, 1)

    @pytest.mark.parametrize("envs", [(), (3,)])
    def test_the_last_dimension_is_named_time(self, make_collector: Make, envs: tuple[int, ...]) -> None:
        for batch in make_collector(CountingEnv(SCRIPT, envs), frames_per_batch=6, total_frames=18):
            assert batch.names[-1] == "time" and len(batch.names) == 1 + len(envs)

    def test_without_devices_the_batch_has_none(self, make_collector: Make) -> None:
        batch = next(iter(make_collector(env(), frames_per_batch=4, total_frames=-1)))
        assert batch.device is None and batch["next"].device is None and batch["collector"].device is None

    @pytest.mark.parametrize(
        "kwargs", [{"device": "cpu"}, {"storing_device": "cpu"}, {"device": torch.device("cpu")}]
    )
    def test_device_and_storing_device_mark_the_batch(
        self, make_collector: Make, kwargs: dict[str, Any]
    ) -> None:
        batch = next(iter(make_collector(env(), frames_per_batch=4, total_frames=-1, **kwargs)))
        cpu = torch.device("cpu")
        assert batch.device == batch["next"].device == batch["collector"].device == cpu

    def test_storing_device_falls_back_where_env_and_policy_agree(self, make_collector: Make) -> None:
        kwargs = {"env_device": "cpu", "policy_device": "cpu"}
        batch = next(iter(make_collector(env(), Constant(), frames_per_batch=4, total_frames=-1, **kwargs)))
        assert batch.device == torch.device("cpu")

    def test_environment_with_a_device_sets_the_batch_device(self, make_collector: Make) -> None:
        environment = GymWrapper(OracleEnv(script=SCRIPT), device="cpu")
        batches = list(
            make_collector(environment, Constant(), frames_per_batch=4, total_frames=8, device="cpu")
        )
        assert batches[0].device == torch.device("cpu")
        check_stream(batches, SCRIPT)


class TestIteration:
    """`for`, `iterator`, `next` and `rollout` deliver batches until the budget ends or `shutdown`."""

    def test_next_returns_batches_without_a_device_and_then_none(self, make_collector: Make) -> None:
        collector = make_collector(env(), frames_per_batch=5, total_frames=15, device="cpu")
        batches = [collector.next() for _ in range(3)]
        assert all(batch.device is None for batch in batches)
        check_stream(batches, SCRIPT)
        assert collector.next() is None and collector.next() is None

    def test_iterator_yields_the_same_batches_as_iter(self, make_collector: Make) -> None:
        batches = list(make_collector(env(), frames_per_batch=5, total_frames=15).iterator())
        assert [batch.numel() for batch in batches] == [5, 5, 5]

    def test_second_loop_continues_after_a_break(self, make_collector: Make) -> None:
        collector = make_collector(env(), frames_per_batch=5, total_frames=25)
        batches = []
        for batch in collector:
            batches.append(batch)
            break
        batches.extend(collector)
        assert sum(batch.numel() for batch in batches) == 25
        check_stream(batches, SCRIPT)

    def test_rollout_does_not_count(self, make_collector: Make) -> None:
        collector = make_collector(env(), frames_per_batch=5, total_frames=10)
        extra = collector.rollout()
        assert extra.batch_size == (5,) and extra.names[-1] == "time" and IDS in leaf_keys(extra)
        state = collector.state_dict()
        assert state["frames"] == 0 and state["iter"] == 0
        batches = list(collector)
        assert sum(batch.numel() for batch in batches) == 10
        check_stream([extra, *batches], SCRIPT)

    def test_shutdown_can_be_called_again(self, make_collector: Make) -> None:
        collector = make_collector(env(), frames_per_batch=5, total_frames=10)
        next(iter(collector))
        for _ in range(3):
            collector.shutdown()

    def test_shutdown_closes_the_environment_once(self, make_collector: Make) -> None:
        inner = OracleEnv(script=SCRIPT)
        collector = make_collector(GymWrapper(inner), frames_per_batch=5, total_frames=10)
        collector.shutdown()
        collector.shutdown()
        assert inner.closed == 1

    def test_the_environment_is_closed_when_the_budget_is_spent(self, make_collector: Make) -> None:
        inner = OracleEnv(script=SCRIPT)
        collector = make_collector(GymWrapper(inner), frames_per_batch=5, total_frames=10)
        list(collector)
        assert inner.closed == 1
        assert collector.state_dict()["frames"] == 10

    @pytest.mark.parametrize(
        "use", [lambda c: next(iter(c)), lambda c: c.next(), lambda c: c.rollout(), lambda c: c.reset()]
    )
    def test_closed_collector_raises_a_clear_error(self, make_collector: Make, use: Any) -> None:
        collector = make_collector(env(), frames_per_batch=5, total_frames=-1)
        next(iter(collector))
        collector.shutdown()
        with pytest.raises(RuntimeError, match=r"(?i)closed|shut") as caught:
            use(collector)
        assert isinstance(caught.value, GleanError)

    def test_an_open_iterator_ends_or_raises_after_shutdown(self, make_collector: Make) -> None:
        collector = make_collector(env(), frames_per_batch=5, total_frames=-1)
        stream = iter(collector)
        next(stream)
        collector.shutdown()
        with pytest.raises((GleanError, StopIteration)):
            next(stream)

    def test_del_is_silent(self) -> None:
        inner = OracleEnv(script=SCRIPT)
        collector = SyncDataCollector(GymWrapper(inner), None, frames_per_batch=5, total_frames=-1)
        next(iter(collector))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del collector
            gc.collect()
        assert inner.closed == 1

    def test_collectors_derive_from_the_base_class(self) -> None:
        assert issubclass(SyncDataCollector, DataCollectorBase)
        assert issubclass(DataCollectorBase, torch.utils.data.IterableDataset)
        with pytest.raises(NotImplementedError):
            DataCollectorBase[0]  # type: ignore[index]

    def test_aliases_name_the_same_classes(self) -> None:
        assert Collector is SyncDataCollector is SyncDataCollectorOfOldPath
        assert BaseCollector is DataCollectorBase

    def test_create_env_kwargs_reach_the_factory(self, make_collector: Make) -> None:
        def make_env(stream: int) -> GymWrapper:
            return GymWrapper(OracleEnv(stream=stream, script=SCRIPT))

        kwargs = {"create_env_kwargs": {"stream": 9}, "frames_per_batch": 4, "total_frames": 4}
        (batch,) = make_collector(make_env, **kwargs)
        assert (batch["observation"][:, 0] == 9).all()

    def test_stats_count_frames(self, make_collector: Make) -> None:
        collector = make_collector(CountingEnv(SCRIPT, (2,)), frames_per_batch=8, total_frames=24)
        assert counter(collector, "delivered") == 0
        for number, _ in enumerate(collector, 1):
            assert counter(collector, "delivered") == counter(collector, "stepped") == 8 * number
        assert counter(collector, "flagged") == counter(collector, "discarded") == 0


class TestStateAndSeeds:
    """`state_dict`, `load_state_dict`, `set_seed`."""

    def test_state_has_the_documented_keys(self, make_collector: Make) -> None:
        collector = make_collector(env(), Constant(0.5), frames_per_batch=5, total_frames=20)
        stream = iter(collector)
        next(stream), next(stream)
        state = collector.state_dict()
        assert {"policy_state_dict", "env_state_dict", "frames", "iter"} <= set(state)
        assert state["frames"] == 10 and state["iter"] == 2
        assert [tensor.tolist() for tensor in tensors_below(state["policy_state_dict"])] == [[0.5, 0.5]]

    def test_loading_restores_weights_and_counters(self, make_collector: Make) -> None:
        first = make_collector(env(), Constant(0.5), frames_per_batch=5, total_frames=20)
        next(iter(first))
        other = Constant(0.25)
        second = make_collector(env(), other, frames_per_batch=5, total_frames=20)
        second.load_state_dict(first.state_dict())
        batches = list(second)
        assert sum(batch.numel() for batch in batches) == 15
        assert all((batch["action"] == 0.5).all() for batch in batches)

    def test_load_of_a_mismatching_state_raises_and_changes_nothing(self, make_collector: Make) -> None:
        first = make_collector(env(), nn.Linear(3, 2), frames_per_batch=5, total_frames=20)
        next(iter(first))
        policy = Constant(0.25)
        second = make_collector(env(), policy, frames_per_batch=5, total_frames=20)
        with pytest.raises((RuntimeError, KeyError, ValueError)):
            second.load_state_dict(first.state_dict())
        assert (policy.value == 0.25).all() and second.state_dict()["frames"] == 0

    def test_the_state_does_not_alias_the_live_policy(self, make_collector: Make) -> None:
        policy = Constant(0.5)
        collector = make_collector(env(), policy, frames_per_batch=5, total_frames=20)
        second = make_collector(env(), Constant(0.25), frames_per_batch=5, total_frames=20)
        second.load_state_dict(collector.state_dict())
        with torch.no_grad():
            policy.value.fill_(9)
        assert (next(iter(second))["action"] == 0.5).all()

    def test_set_seed_of_one_environment_returns_the_seed(self, make_collector: Make) -> None:
        assert make_collector(env(), frames_per_batch=5, total_frames=5).set_seed(7) == 7
        assert make_collector(env(), frames_per_batch=5, total_frames=5).set_seed(7, static_seed=True) == 7

    def test_set_seed_reaches_the_environment(self, make_collector: Make) -> None:
        inner = OracleEnv(script=SCRIPT)
        collector = make_collector(GymWrapper(inner), frames_per_batch=5, total_frames=5)
        collector.set_seed(7)
        list(collector)
        assert [seed for seed, _ in inner.resets if seed is not None] == [7]

    def test_equal_seeds_give_equal_data(self, make_collector: Make) -> None:
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            collector = make_collector(GymEnv("CartPole-v1"), frames_per_batch=60, total_frames=120)
            collector.set_seed(11)
            runs.append([snapshot(batch) for batch in collector])
        for one, two in zip(*runs, strict=True):
            assert all(torch.equal(one[key], two[key]) for key in one)

    def test_other_seeds_give_other_data(self, make_collector: Make) -> None:
        starts = []
        for seed in (1, 2):
            collector = make_collector(GymEnv("CartPole-v1"), frames_per_batch=4, total_frames=4)
            collector.set_seed(seed)
            starts.append(collector.next()["observation"][0])
        assert not torch.equal(*starts)


class TestHooks:
    """`postproc`, `exploration_type`, `interruptor`."""

    def test_postproc_result_is_delivered(self, make_collector: Make) -> None:
        def postproc(batch: TensorDictBase) -> TensorDictBase:
            return batch.select("observation", IDS)

        for batch in make_collector(env(), frames_per_batch=5, total_frames=15, postproc=postproc):
            assert leaf_keys(batch) == {"observation", IDS} and batch.numel() == 5

    def test_a_postproc_with_to_is_moved_to_the_storing_device(self, make_collector: Make) -> None:
        class Moved:
            devices: list[Any] = []

            def to(self, device: Any) -> Moved:
                self.devices.append(torch.device(device))
                return self

            def __call__(self, batch: TensorDictBase) -> TensorDictBase:
                return batch

        list(
            make_collector(env(), frames_per_batch=5, total_frames=5, postproc=Moved(), storing_device="cpu")
        )
        assert Moved.devices == [torch.device("cpu")]

    def test_exploration_types_are_tensordicts(self) -> None:
        assert ExplorationType is InteractionType
        with set_exploration_type(ExplorationType.MEAN):
            assert exploration_type() == interaction_type() == InteractionType.MEAN

    @pytest.mark.parametrize("kind", [None, *InteractionType])
    def test_the_policy_runs_under_the_exploration_type(self, make_collector: Make, kind: Any) -> None:
        seen = []

        def action(td: TensorDictBase) -> torch.Tensor:
            seen.append((exploration_type(), interaction_type()))
            return td["observation"][..., :2] * 0

        kwargs = {} if kind is None else {"exploration_type": kind}
        before = exploration_type()
        collector = make_collector(env(), on_td(action), frames_per_batch=5, total_frames=5, **kwargs)
        stream = iter(collector)
        seen.clear()
        next(stream)
        wanted = kind or InteractionType.RANDOM
        assert seen == [(wanted, wanted)] * 5
        assert exploration_type() == before, "the type must not leak out of the rollout"

    def test_exploration_mode_is_the_old_spelling(self, make_collector: Make) -> None:
        seen = []

        def action(td: TensorDictBase) -> torch.Tensor:
            seen.append(exploration_type())
            return td["observation"][..., :2] * 0

        collector = make_collector(
            env(), on_td(action), frames_per_batch=5, total_frames=5, exploration_mode="mean"
        )
        list(collector)
        assert seen[-5:] == [InteractionType.MEAN] * 5

    @pytest.mark.parametrize("envs", [(), (3,)])
    @pytest.mark.parametrize("at", [1, 3, 6])
    def test_an_interrupted_batch_has_only_real_steps(
        self, make_collector: Make, envs: tuple[int, ...], at: int
    ) -> None:
        class Interruptor:
            """Stops every batch after `at` steps."""

            calls = 0

            def collection_stopped(self) -> bool:
                self.calls += 1
                return self.calls % at == 0

        width = envs[0] if envs else 1
        interruptor = Interruptor()
        collector = make_collector(
            CountingEnv(SCRIPT, envs),
            frames_per_batch=6 * width,
            total_frames=24 * width,
            interruptor=interruptor,
        )
        batches = list(collector)
        assert valid_rows(batches[0]) == at * width
        assert sum(valid_rows(batch) for batch in batches) == 24 * width, "cut steps must not count"
        check_stream(batches, SCRIPT)
        assert counter(collector, "delivered") == 24 * width

    def test_reset_when_done_false_is_refused(self) -> None:
        with pytest.raises(ValueError, match="reset_when_done") as caught:
            SyncDataCollector(env(), None, frames_per_batch=5, total_frames=5, reset_when_done=False)
        assert isinstance(caught.value, GleanError)

    @pytest.mark.parametrize("value", [None, True, False])
    def test_use_buffers_is_accepted_and_has_no_effect(
        self, make_collector: Make, value: bool | None
    ) -> None:
        batches = list(make_collector(env(), frames_per_batch=5, total_frames=15, use_buffers=value))
        check_stream(batches, SCRIPT)
