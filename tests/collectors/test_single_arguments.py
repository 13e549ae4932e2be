"""Arguments of later releases have the expected effect, or are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from gleanrl import collectors
from gleanrl.collectors import SyncDataCollector
from gleanrl.errors import ClosedError, EndlessError, InvalidArgumentError, InvalidTypeError
from tests.collectors.helpers import NEVER, SCRIPT, Net, make
from tests.fakes_base import CountingEnv


@pytest.mark.parametrize(("frames", "total", "batches"), [(6, 12, 2), (6, 13, 3), (6, 1, 1), (5, 20, 4)])
def test_the_length_is_the_number_of_batches(frames: int, total: int, batches: int) -> None:
    collector = make(CountingEnv(SCRIPT), frames=frames, total_frames=total)
    assert len(collector) == batches == len(list(collector)) and collector


def test_len_of_an_endless_collector_raises() -> None:
    collector = make(CountingEnv(SCRIPT))
    with pytest.raises(EndlessError, match="unknown without total_frames") as caught:
        len(collector)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, RuntimeError)
    assert collector and [batch for batch, _ in zip(collector, range(2), strict=False)]


def test_names_since_0_11_take_the_same_arguments() -> None:
    assert collectors.Collector is SyncDataCollector
    assert collectors.BaseCollector is collectors.DataCollectorBase


class TestPolicy:
    def test_policy_factory_makes_the_policy(self) -> None:
        made = []
        collector = make(policy_factory=lambda: made.append(Net(0.25)) or made[0])
        assert collector.policy.module is made[0] and len(made) == 1
        with pytest.raises(InvalidTypeError, match="policy_factory: .*given already"):
            make(policy=Net(), policy_factory=Net)
        with pytest.raises(InvalidTypeError, match="policy_factory: expected a callable, got int"):
            make(policy_factory=3)

    def test_trusted_policy_gets_tensordicts_for_any_parameter_name(self) -> None:
        class Policy(nn.Module):
            def forward(self, anything: Any) -> TensorDictBase:
                out: TensorDictBase = anything.set("action", anything["observation"][..., :2] * 0 + 0.25)
                return out

        with pytest.raises((TypeError, AttributeError, RuntimeError, IndexError)):
            make(CountingEnv(SCRIPT), Policy()).next()
        for policy in (Policy(), Policy().forward):
            batch = make(CountingEnv(SCRIPT), policy, trust_policy=True).next()
            assert batch is not None and batch["action"].eq(0.25).all()
        assert make(CountingEnv(SCRIPT), Net(), trust_policy=False).next() is not None
        assert make(CountingEnv(SCRIPT), None, trust_policy=True).next() is not None

    def test_no_op_arguments_are_accepted(self) -> None:
        collector = make(
            policy=Net(), compile_policy=False, cudagraph_policy=None, no_cuda_sync=True, use_buffers=False,
            replay_buffer=None, extend_buffer=True, weight_updater=None, policy_factory=None,
        )  # fmt: skip
        assert collector.next() is not None


class TestHooks:
    def test_hooks_run_before_and_after_every_batch(self) -> None:
        calls: list[Any] = []
        collector = make(
            CountingEnv(SCRIPT),
            pre_collect_hook=lambda: calls.append("before"),
            post_collect_hook=lambda batch: calls.append(batch["marked"].sum().item()),
            postproc=lambda batch: batch.set("marked", torch.ones(batch.shape)),
            total_frames=12,
        )
        list(collector)
        assert calls == ["before", 6.0, "before", 6.0]

    def test_errors_of_hooks_are_raised(self) -> None:
        def broken(*_: Any) -> None:
            raise ZeroDivisionError("mine")

        before = make(CountingEnv(SCRIPT), pre_collect_hook=broken)
        with pytest.raises(ZeroDivisionError):
            before.next()
        assert before.stats().stepped == 0
        after = make(CountingEnv(SCRIPT), post_collect_hook=broken)
        with pytest.raises(ZeroDivisionError):
            after.next()
        assert after.stats().reasons == {"postproc": 6}
        for name in ("pre_collect_hook", "post_collect_hook"):
            with pytest.raises(InvalidTypeError, match=f"{name}: expected a callable, got int"):
                make(**{name: 3})


def test_every_frame_carries_the_version_of_the_policy() -> None:
    collector = make(CountingEnv(SCRIPT, (2,)), Net(), track_policy_version=True)
    versions = []
    for update in (lambda: None, collector.update_policy_weights_, collector.increment_version):
        update()
        batch = collector.next()
        assert batch is not None and batch["policy_version"].shape == batch.shape == (2, 3)
        versions.append(batch["policy_version"].unique().tolist())
    assert versions == [[0], [1], [2]] and collector.policy_version == collector.get_policy_version() == 2
    other = make(CountingEnv(SCRIPT, (2,)), Net(), track_policy_version=True)
    other.load_state_dict(collector.state_dict())
    assert other.next()["policy_version"].eq(2).all()  # type: ignore[index]
    assert "policy_version" not in make(CountingEnv(SCRIPT)).next().keys()  # type: ignore[union-attr]
    with pytest.raises(InvalidTypeError, match="track_policy_version: expected True or False, got 'uuid'"):
        make(track_policy_version="uuid")


@pytest.mark.parametrize("given", ["random", "RANDOM", InteractionType.RANDOM, "mode", "deterministic"])
def test_exploration_types_are_accepted_by_name(given: Any) -> None:
    seen = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append(interaction_type())
        return td.set("action", torch.zeros(2))

    make(CountingEnv(NEVER), policy, exploration_type=given).next()
    expected = given if isinstance(given, InteractionType) else InteractionType.from_str(given)
    assert set(seen[1:]) == {expected}  # the first call is the trial
    with pytest.raises(InvalidArgumentError, match="exploration"):
        make(exploration_type="sometimes")


def test_devices_are_accepted_by_name() -> None:
    collector = make(CountingEnv(NEVER), Net(), device="cpu")
    cpu = torch.device("cpu")
    assert (collector.env_device, collector.policy_device, collector.storing_device) == (cpu, cpu, cpu)
    plain = make(CountingEnv(NEVER), Net())
    assert (plain.env_device, plain.policy_device, plain.storing_device) == (None, None, None)


class TestTheEnd:
    def test_shutdown_may_leave_the_environment_open(self) -> None:
        env = CountingEnv(SCRIPT)
        collector = make(env)
        collector.next()
        collector.shutdown(timeout=1.0, close_env=False)
        assert not env.is_closed and env.rollout(3).shape == (3,)
        collector.shutdown()
        assert env.is_closed

    def test_closed_collector_error_explains_how_to_continue(self) -> None:
        collector = make(CountingEnv(SCRIPT), total_frames=6)
        list(collector)
        for call in (collector.reset, lambda: collector.set_seed(1), collector.rollout, collector.next):
            if call == collector.next:
                assert call() is None
                continue
            with pytest.raises(ClosedError, match=r"a separate environment.*shutdown\(close_env=False\)"):
                call()
        assert collector.state_dict()["frames"] == 6 and len(collector) == 1
        collector.update_policy_weights_()
        assert collector.env.is_closed
