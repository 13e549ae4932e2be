"""Environments, policies and hooks may behave in awkward but legal ways, or fail once in mid-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper
from gleanrl.errors import GleanError
from tests.contract.helpers import Constant, check_ledger, check_stream, counter
from tests.fakes import FakeFailure, FrameEnv, Script
from tests.fakes_base import CountingEnv, CrookedEnv, ForgetfulEnv, GreedyEnv, ReusingBase

Make = Callable[..., SyncDataCollector]
SCRIPT = Script(seed=61)
LONG = Script(lengths=(100,))


class TestEnvironments:
    """The record is right even if an environment reuses or overwrites tensors."""

    @pytest.mark.parametrize("policy", [None, lambda observation: observation[..., :2] * 0 + 0.5])
    @pytest.mark.parametrize("make_env", [ReusingBase, ForgetfulEnv, GreedyEnv])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
    def test_collected_rows_are_right(
        self, make_collector: Make, make_env: Any, shape: tuple[int, ...], policy: Any
    ) -> None:
        env = make_env(SCRIPT, shape)
        width = env.batch_size.numel()
        batches = list(make_collector(env, policy, frames_per_batch=7 * width, total_frames=35 * width))
        assert all(batch.shape == (*shape, 7) for batch in batches)
        check_stream(batches, SCRIPT)
        for t, action in enumerate(env.actions[-35:]):
            assert torch.equal(batches[t // 7]["action"][..., t % 7, :], action)

    @pytest.mark.parametrize("make_env", [ReusingBase, ForgetfulEnv, GreedyEnv])
    def test_rollout_rows_are_right(self, make_env: Any) -> None:
        env = make_env(Script(lengths=(2, 3)), (3,))
        data = env.rollout(12, break_when_any_done=False)
        assert torch.equal(data["next", "observation"][..., 2], data["observation"][..., 2] + 1)
        ended = data["next", "done"][:, :-1, 0]
        assert torch.equal(data["observation"][:, 1:, 2] == 0, ended)
        assert torch.equal(data["action"].unbind(1)[-1], env.actions[-1])

    def test_a_class_is_a_factory(self, make_collector: Make) -> None:
        check_stream(list(make_collector(CountingEnv, frames_per_batch=5, total_frames=10)), Script())

    def test_one_environment_serves_one_collector_after_another(self, make_collector: Make) -> None:
        env = CountingEnv(LONG)
        for _ in range(2):
            check_stream([next(iter(make_collector(env, frames_per_batch=5, total_frames=-1)))], LONG)


KEEP: dict[str, Callable[[TensorDictBase], Any]] = {
    "a leaf": lambda batch: batch["next", "observation"],
    "a row": lambda batch: batch["next", "observation"][3:5],
    "a row of the batch": lambda batch: batch[3:5],
    "a flat view": lambda batch: batch["next", "observation"].view(-1),
    "an array": lambda batch: batch["next", "observation"].numpy(),
    "a slice of an array": lambda batch: batch["next", "observation"].numpy()[3:5],
    "dlpack": lambda batch: np.from_dlpack(batch["next", "observation"]),
    "a memoryview": lambda batch: memoryview(batch["next", "observation"].numpy()),
    "a storage": lambda batch: batch["next", "observation"].untyped_storage(),
    "a nested tensordict": lambda batch: batch["next"],
    "another dtype": lambda batch: batch["next", "observation"].view(torch.int32),
    "a detached copy": lambda batch: batch.copy(),
}


class TestLargeBatches:
    """Memory of a batch may be reused only when no reference of any kind is left."""

    @pytest.mark.parametrize("kind", KEEP)
    def test_kept_parts_of_a_batch_never_change(self, make_collector: Make, kind: str) -> None:
        env = GymWrapper(FrameEnv(size=192, script=Script(ending="never")))
        kept = []
        for batch in make_collector(env, frames_per_batch=20, total_frames=160):
            frozen = torch.as_tensor(batch["next", "observation"]).clone()
            kept.append((KEEP[kind](batch), KEEP[kind](TensorDict({"next": {"observation": frozen}}, [20]))))
            del batch
        for part, expected in kept:
            if isinstance(part, TensorDictBase):
                path = ("next", "observation") if "next" in part.keys() else "observation"
                part, expected = part[path], expected[path]
            if isinstance(part, torch.UntypedStorage):
                part, expected = (torch.tensor(s, dtype=torch.uint8) for s in (part, expected))
            assert np.array_equal(np.asarray(part), np.asarray(expected))


class Actor:
    """Acts through a method, or when it is called."""

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :2] * 0 + 0.25

    __call__ = act


def scaled(observation: torch.Tensor, scale: float) -> torch.Tensor:
    return observation[..., :2] * 0 + scale


class TestPolicies:
    """Further ways to write a policy, and policies whose outputs change."""

    @pytest.mark.parametrize(
        "policy",
        [Actor().act, Actor(), functools.partial(scaled, scale=0.25)],
        ids=["bound-method", "callable-object", "partial"],
    )
    def test_callables_of_all_kinds_act(self, make_collector: Make, policy: Any) -> None:
        (batch,) = make_collector(CountingEnv(SCRIPT), policy, frames_per_batch=5, total_frames=5)
        assert (batch["action"] == 0.25).all()

    def test_a_partial_that_leaves_an_unknown_argument_open(self) -> None:
        with pytest.raises(TypeError, match="scale"):
            SyncDataCollector(CountingEnv(SCRIPT), scaled, frames_per_batch=5)

    def test_module_that_reads_a_missing_key_raises(self) -> None:
        policy = TensorDictModule(lambda x: x[..., :2], in_keys=["nothere"], out_keys=["action"])
        with pytest.raises(Exception, match="nothere"):
            next(iter(SyncDataCollector(CountingEnv(SCRIPT), policy, frames_per_batch=5)))

    @pytest.mark.parametrize("first", [0, 1])
    def test_an_extra_output_that_comes_and_goes(self, make_collector: Make, first: int) -> None:
        calls = [first]

        def policy(td: TensorDictBase) -> TensorDictBase:
            calls[0] += 1
            if calls[0] % 2:
                td["value"] = td["observation"][..., :1].clone()
            return td.set("action", td["observation"][..., :2] * 0)

        with pytest.raises(GleanError, match="value"):
            list(make_collector(CountingEnv(LONG), policy, frames_per_batch=6, total_frames=12))

    @pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[..., :1]])
    def test_an_extra_output_that_changes_dtype_or_shape(self, make_collector: Make, change: Any) -> None:
        calls = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            calls.append(1)
            value = td["observation"] * 2
            td["value"] = change(value) if len(calls) == 5 else value
            return td.set("action", td["observation"][..., :2] * 0)

        with pytest.raises(GleanError, match="value"):
            list(make_collector(CountingEnv(LONG), policy, frames_per_batch=6, total_frames=12))

    @pytest.mark.parametrize("error", [FakeFailure("broke"), KeyboardInterrupt()])
    @pytest.mark.parametrize("at", [4, 9])
    def test_a_policy_that_raises_once(self, make_collector: Make, error: BaseException, at: int) -> None:
        class Fragile(Constant):
            def forward(self, observation: torch.Tensor) -> torch.Tensor:
                out = super().forward(observation)
                if self.calls == at:
                    raise error
                return out

        collector = make_collector(CountingEnv(SCRIPT), Fragile(), frames_per_batch=5, total_frames=20)
        with pytest.raises(type(error)):
            list(collector)
        check_ledger(collector)
        check_stream(list(collector), SCRIPT, first_step=None)
        assert counter(collector, "delivered") == 20


class TestHooks:
    """A hook that fails once loses its batch only, and the ledger shows the loss."""

    def test_a_postproc_that_raises_once(self, make_collector: Make) -> None:
        calls = []

        def postproc(batch: TensorDictBase) -> TensorDictBase:
            calls.append(1)
            if len(calls) == 2:
                raise FakeFailure("broke")
            return batch

        collector = make_collector(
            CountingEnv(SCRIPT), frames_per_batch=5, total_frames=20, postproc=postproc
        )
        kept = []
        with pytest.raises(FakeFailure):
            for batch in collector:
                kept.append(batch)
        check_ledger(collector)
        rest = list(collector)
        assert len(kept) == 1 and sum(batch.numel() for batch in kept + rest) == 20
        check_stream(rest, SCRIPT, first_step=None)
        assert counter(collector, "delivered") == 20 and counter(collector, "discarded") == 5

    @pytest.mark.parametrize("fault", ["raise", "nan", "dtype"])
    def test_a_fault_in_one_row_of_several_resets_them_all(self, make_collector: Make, fault: str) -> None:
        env = CrookedEnv(fault, 8, script=LONG, batch_size=(3,))
        collector = make_collector(env, frames_per_batch=15, total_frames=60)
        kept = []
        with pytest.raises(GleanError):
            for batch in collector:
                kept.append(batch)
        rest = list(collector)
        assert (rest[0]["observation"][:, 0, 2] == 0).all()
        check_stream(kept, LONG)
        check_stream(rest, LONG)
        old = set(torch.cat([batch["collector", "traj_ids"].flatten() for batch in kept]).tolist())
        new = set(torch.cat([batch["collector", "traj_ids"].flatten() for batch in rest]).tolist())
        assert not old & new

    def test_discarded_frames_do_not_use_up_the_budget(self, make_collector: Make) -> None:
        env = CrookedEnv("raise", 7, script=LONG)
        collector = make_collector(env, frames_per_batch=5, total_frames=12)
        with pytest.raises(GleanError):
            list(collector)
        assert [batch.numel() for batch in collector] == [5, 2]
        assert counter(collector, "discarded") >= 1
