"""`EnvBase` completes flags, merges partial resets, seeds and closes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, StepCounter, TransformedEnv
from gleanrl.errors import (
    ClosedError,
    EnvironmentContractError,
    InvalidArgumentError,
    SchemaError,
    SpecError,
    UnsupportedError,
)
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv, CrookedEnv, PayingEnv, StillDoneEnv, TeamEnv

LONG = Script(lengths=(50,))
FLAGS = ("done", "terminated", "truncated")


class Vandal(CountingEnv):
    """Zeroes the rows outside the reset mask in tensors that it returned earlier, and overwrites its mask and input."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        mask = self.masks[-1]
        if mask is None:
            self.kept = out
            return out.copy()
        assert tensordict is not None
        keep = mask.reshape(self.batch_size)
        for key, value in out.items():
            tensordict[key].zero_()
            self.kept[key].copy_(
                value.masked_fill(~keep.reshape(*keep.shape, *[1] * (value.ndim - keep.ndim)), 0)
            )
        tensordict["_reset"].fill_(True)
        return self.kept.copy()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        for key in self.kept.keys():
            self.kept[key].copy_(out[key])
        return self.kept.copy().set("reward", out["reward"])


class TestReset:
    @pytest.mark.parametrize("rows", [(True, False, False), (False, False, True), (False, False, False)])
    def test_kept_rows_survive_overwrites_by_the_environment(self, rows: tuple[bool, ...]) -> None:
        env = Vandal(LONG, (3,))
        root = env.step(env.rand_action(env.reset()))["next"].exclude("reward")
        before = root["observation"].clone()
        mask = torch.tensor(rows).unsqueeze(-1)
        out = env.reset(root.copy().set("_reset", mask))
        assert mask[:, 0].tolist() == list(rows), "the caller's mask is left alone"
        assert torch.equal(out["observation"][:, 2], before[:, 2] * ~mask[:, 0])
        assert torch.equal(out["observation"][:, 0], torch.arange(3.0))
        assert "_reset" not in out.keys()

    def test_rollout_survives_overwritten_rows(self) -> None:
        data = Vandal(Script(lengths=(2, 3, 5)), (3,)).rollout(20, break_when_any_done=False)
        assert torch.equal(data["next", "observation"][..., 2], data["observation"][..., 2] + 1)
        assert torch.equal(data["observation"][:, 1:, 2] == 0, data["next", "done"][:, :-1, 0])

    def test_every_mask_reaches_the_environment(self) -> None:
        seen: list[Any] = []

        class Watching(TeamEnv):
            def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
                if tensordict is not None:
                    seen.append({key: tensordict[key].clone() for key in self.reset_keys})
                return super()._reset(tensordict, **kwargs)

        env = Watching(Script(lengths=(1, 9)), (2,), nested_flags=True)
        env.step_and_maybe_reset(env.rand_action(env.reset()))
        assert [mask[:, 0].tolist() for mask in seen[0].values()] == [[True, False], [[True], [False]]]

    def test_group_mask_ignores_flags_of_rows_that_are_kept(self) -> None:
        env = TeamEnv(Script(lengths=(1,)), (2,), nested_flags=True)
        root = env.step(env.rand_action(env.reset()))["next"].exclude(("agents", "reward"))
        assert root["agents", "done"].all()
        out = env.reset(root.set("_reset", torch.tensor([[True], [False]])))
        assert out["done"][:, 0].tolist() == [False, True]
        assert out["agents", "done"][:, :, 0].tolist() == [[False] * 2, [True] * 2]

    def test_done_in_a_row_that_was_reset(self) -> None:
        env = StillDoneEnv(LONG, (2,), allow_done_after_reset=True)
        root = env.reset()
        root["done"] = torch.tensor([[True], [False]])
        env.allow_done_after_reset = False
        with pytest.raises(EnvironmentContractError, match="reset of StillDoneEnv returned done"):
            env.reset(root.copy().set("_reset", torch.tensor([[False], [True]])))
        quiet = CountingEnv(LONG, (2,))
        root = quiet.reset()
        root["done"] = torch.tensor([[True], [False]])
        out = quiet.reset(root.set("_reset", torch.tensor([[False], [True]])))
        assert out["done"][:, 0].tolist() == [True, False], "rows that stay may be done"

    def test_a_root_without_a_mask_is_passed_on(self) -> None:
        seen: list[Any] = []

        class Watching(CountingEnv):
            def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
                seen.append(tensordict)
                return super()._reset(None, **kwargs)

        env = Watching(LONG, (2,))
        out = env.reset(TensorDict({"task": torch.ones(2)}, [2]))
        assert seen[0]["task"].all() and out["observation"][:, 2].tolist() == [0, 0]

    def test_reset_that_returns_its_input_raises(self) -> None:
        class Same(CountingEnv):
            def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
                out = super()._reset(None, **kwargs)
                return out if tensordict is None else tensordict.update(out)

        env = Same(LONG)
        with pytest.raises(EnvironmentContractError, match="_reset returned its input"):
            env.reset(env.reset())


class TestMaybeReset:
    def test_maybe_reset_without_done_returns_the_same_root(self) -> None:
        env = TeamEnv(LONG, (2,), nested_flags=True)
        root = env.reset()
        assert env.maybe_reset(root) is root and len(env.masks) == 1

    def test_the_root_itself_is_not_changed(self) -> None:
        env = CountingEnv(Script(lengths=(1,)), (2,))
        root = env.step(env.rand_action(env.reset()))["next"].exclude("reward")
        before = root.clone()
        env.maybe_reset(root)
        assert root.keys() == before.keys() and (root == before).all()


class Bare(CountingEnv):
    """Returns rewards and flags without their last dimension, and an integer reward."""

    def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
        out = super()._package(flags)
        return out.update({key: out[key].squeeze(-1) for key in self.flags})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        return out.set("reward", torch.full(self.batch_size, 3))


class TestStep:
    @pytest.mark.parametrize("size", [(), (3,)], ids=str)
    def test_missing_last_dimension_is_added(self, size: tuple[int, ...]) -> None:
        env = Bare(LONG, size)
        data = env.step(env.rand_action(env.reset()))
        for key in (*FLAGS, ("next", "reward"), *(("next", flag) for flag in FLAGS)):
            assert data[key].shape == (*size, 1)
        assert data["next", "reward"].dtype == torch.float32 and (data["next", "reward"] == 3).all()

    def test_step_writes_into_its_input(self) -> None:
        env = CountingEnv(LONG)
        root = env.rand_action(env.reset())
        assert (
            env.step(root) is root
            and env.forward(env.rand_action(env.reset()))["next", "observation"][2] == 1
        )

    def test_old_next_entries_stay_without_changing_the_old_next(self) -> None:
        env = CountingEnv(LONG)
        old = TensorDict({"mine": torch.ones(1), "observation": torch.zeros(3)}, [])
        data = env.step(env.rand_action(env.reset()).set("next", old))
        assert data["next", "mine"] == 1 and data["next", "observation"][2] == 1
        assert set(old.keys()) == {"mine", "observation"} and not old["observation"].any()

    def test_step_that_returns_its_input_raises(self) -> None:
        class Same(CountingEnv):
            def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
                return tensordict.update(super()._step(tensordict))

        env = Same(LONG)
        with pytest.raises(EnvironmentContractError, match="_step returned its input"):
            env.step(env.rand_action(env.reset()))

    def test_step_without_the_declared_reward_raises(self) -> None:
        env = PayingEnv("pay", script=LONG)
        env.reward_spec = Composite(other=Unbounded(shape=(1,)))
        with pytest.raises(EnvironmentContractError, match="_step returned no 'other'.*'pay'"):
            env.step(env.rand_action(env.reset()))

    @pytest.mark.parametrize("locked", [True, False])
    def test_step_of_another_batch_size_needs_an_unlocked_environment(self, locked: bool) -> None:
        class Free(CountingEnv):
            batch_locked = locked

            def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
                size = tensordict.batch_size
                return TensorDict(
                    {"reward": torch.zeros(*size, 1), "done": torch.zeros(*size, 1).bool()}, size
                )

        env = Free(LONG, (3,), flags=("done",))
        data = TensorDict({"action": torch.zeros(5, 2)}, [5])
        if locked:
            with pytest.raises(SchemaError, match=r"expected batch size \(3,\), got \(5,\)"):
                env.step(data)

    @pytest.mark.parametrize("fault", ["dtype", "shape"])
    def test_run_type_checks_checks_values(self, fault: str) -> None:
        env = CrookedEnv(fault, at=1, script=LONG, run_type_checks=True)
        env.observation_spec = Composite(
            observation=Bounded(low=-99.0, high=99.0, shape=(3,), dtype=torch.float32)
        )
        with pytest.raises(SpecError):
            env.step(env.rand_action(env.reset()))
        env = CrookedEnv(fault, at=1, script=LONG)
        env.step(env.rand_action(env.reset()))


class TestLife:
    def test_missing_methods_of_a_subclass_are_named(self) -> None:
        env = EnvBase()
        for call in (env.reset, lambda: env.set_seed(0), lambda: env.step(env.fake_tensordict())):
            with pytest.raises(UnsupportedError, match="EnvBase doesn't define _"):
                call()

    @pytest.mark.parametrize(
        ("size", "static", "last"),
        [((), False, 5), ((), True, 5), ((6,), False, 10), ((2, 3), False, 10), ((6,), True, 5)],
    )
    def test_seeds_of_a_batch_are_consecutive(self, size: tuple[int, ...], static: bool, last: int) -> None:
        env = CountingEnv(LONG, size)
        assert env.set_seed(5, static_seed=static) == last and env.seeds == [5]

    @pytest.mark.parametrize("seed", [1.0, None, "1", True])
    def test_non_integer_seed_is_refused(self, seed: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="seed: expected an integer"):
            CountingEnv().set_seed(seed)

    def test_closed_environment_refuses_every_call(self) -> None:
        env = CountingEnv(LONG)
        data = env.rand_action(env.reset())
        env.close()
        env.close()
        for call in (env.reset, lambda: env.step(data), lambda: env.rollout(2), lambda: env.set_seed(1)):
            with pytest.raises(ClosedError, match="CountingEnv was closed"):
                call()

    @pytest.mark.parametrize(
        ("given", "size"), [(None, ()), (3, (3,)), ([2, 3], (2, 3)), (torch.Size([4]), (4,))]
    )
    def test_batch_size_is_normalised(self, given: Any, size: tuple[int, ...]) -> None:
        env = EnvBase(batch_size=given)
        assert env.batch_size == env.shape == torch.Size(size) and env.ndim == env.ndimension() == len(size)
        assert env.numel() == max(1, torch.Size(size).numel())
        assert repr(env) == f"EnvBase(batch_size={size}, device=None)"

    def test_to_moves_specs_and_modules(self) -> None:
        class Learned(CountingEnv):
            def __init__(self) -> None:
                super().__init__(LONG)
                self.net = nn.Linear(1, 1)

        env = Learned()
        assert env.to("meta") is env
        assert env.device == torch.device("meta") == env.action_spec.device == env.net.weight.device
        assert env.fake_tensordict().device == torch.device("meta")
        assert env.to(torch.float64).device == torch.device("meta"), "a dtype moves nothing"

    def test_default_stepper_is_the_tensordict_stepper(self) -> None:
        stepper = CountingEnv(LONG, (3,)).make_stepper()
        assert isinstance(stepper, TensorDictStepper) and stepper.batch_size == (3,)

    def test_fake_data_are_zeros_and_copies(self) -> None:
        env = TeamEnv(LONG, (2,), nested_flags=True)
        fake = env.fake_tensordict()
        fake["done"].fill_(True)
        assert not fake["next", "done"].any() and not env.fake_tensordict()["done"].any()
        assert ("agents", "action") in fake.keys(True) and ("next", "agents", "action") not in fake.keys(True)


@pytest.mark.parametrize("around", [lambda make: make(), lambda make: SerialEnv(1, make)])
@pytest.mark.parametrize("make", [CountingEnv, lambda: GymWrapper(OracleEnv())])
def test_a_missing_action_is_named(make, around):
    env = around(make)
    with pytest.raises(
        KeyError, match=r"step: the action \['action'\] is missing; got \['done', 'observation'"
    ):
        env.step(env.reset())


class DeviceLess(CountingEnv):
    """Is on the CPU, and returns TensorDicts without a device."""

    def __init__(self) -> None:
        super().__init__(Script(lengths=(2, 3)), device="cpu")
        self.seen: set[Any] = set()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.seen |= set() if tensordict is None else {tensordict.device}
        return super()._reset(tensordict, **kwargs).clear_device_()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.seen.add(tensordict.device)
        return super()._step(tensordict).clear_device_()


@pytest.mark.parametrize(
    "use",
    [
        lambda env: env.rollout(8, break_when_any_done=False),
        lambda env: env.rollout(8, lambda td: env.rand_action(td), break_when_any_done=False),
        lambda env: list(SyncDataCollector(env, None, frames_per_batch=8, total_frames=16)),
        lambda env: SerialEnv(1, [env]).rollout(8, break_when_any_done=False),
        lambda env: TransformedEnv(env, StepCounter()).rollout(8, break_when_any_done=False),
        lambda env: env.rand_step(env.step_and_maybe_reset(env.rand_action(env.reset()))[1]),
    ],
)
def test_roots_are_on_the_device_of_the_environment(use: Any) -> None:
    env = DeviceLess()
    use(env)
    assert env.seen == {torch.device("cpu")}


@pytest.mark.parametrize(
    "make",
    [
        lambda: CountingEnv(),
        lambda: GymEnv("CartPole-v1"),
        lambda: SerialEnv(2, CountingEnv),
        lambda: TransformedEnv(CountingEnv(), StepCounter()),
    ],
)
def test_batch_locked_is_read_only(make: Any) -> None:
    env = make()
    with pytest.raises(RuntimeError, match="batch_locked is a read-only property, True for this"):
        env.batch_locked = False
    assert env.batch_locked
