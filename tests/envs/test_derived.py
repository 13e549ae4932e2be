"""Environments derived for other releases work alone, in rollouts, in collectors and in batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl import data, envs
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import ParallelEnv, SerialEnv, check_env_specs
from gleanrl.testing import check_env
from tests.envs.derived import kinds

KINDS = kinds(envs, data)
SLOPPY = {"undeclared", "undeclared_reset"}
"""The kinds that return undeclared keys."""
pytestmark = pytest.mark.filterwarnings("ignore::gleanrl._rollout.tensordict_stepper.UndeclaredKeyWarning")


@pytest.fixture(params=KINDS)
def make(request: Any) -> Any:
    return KINDS[request.param]


def test_steps_resets_and_rollouts_agree_with_the_declaration(make: Any, request: Any) -> None:
    if request.node.callspec.params["make"] in SLOPPY:
        with pytest.raises(AssertionError, match="'extra'"):
            check_env_specs(make())
        return
    check_env_specs(make())
    make().check_env_specs(seed=1)
    check_env(make)


def test_rollout_equals_step_and_reset(make: Any) -> None:
    torch.manual_seed(0)
    batch = make().rollout(12, break_when_any_done=False)
    env = make()
    root = env.reset()
    for row in batch.unbind(-1):
        stepped, root = env.step_and_maybe_reset(root.update(row.select(*env.action_keys)))
        for key in row.keys(True, True):
            assert torch.equal(row[key].nan_to_num(9), stepped[key].nan_to_num(9)), key


def test_collector_delivers_the_declared_keys(make: Any) -> None:
    collector = SyncDataCollector(make(), None, frames_per_batch=12, total_frames=24)
    keys = {
        key
        for role in ("observation", "reward", "done")
        for key in getattr(make(), f"full_{role}_spec").keys(True, True)
    }
    for batch in collector:
        assert batch.numel() == 12 and keys <= set(batch["next"].keys(True, True))
    collector.shutdown()


def test_serial_and_parallel_batches_agree(make: Any) -> None:
    rollouts = []
    for kind in (SerialEnv, ParallelEnv):
        env = kind(2, make)
        torch.manual_seed(0)
        rollouts.append(env.rollout(8, break_when_any_done=False))
        env.close()
    serial, parallel = rollouts
    assert serial.shape == (2, *make().batch_size, 8) == parallel.shape
    assert set(serial.keys(True, True)) == set(parallel.keys(True, True))
    for key in serial.keys(True, True):
        assert torch.equal(serial[key].nan_to_num(9), parallel[key].nan_to_num(9)), key


def test_set_seed_returns_the_environments_own_next_seed() -> None:
    assert [KINDS[kind]().set_seed(3) for kind in ("in_init", "seed_tells")] == [3, 3]


class TestSpecs:
    def test_a_composite_takes_the_batch_size_that_comes_later(self) -> None:
        env = KINDS["before_super_batched"]()
        assert env.specs.shape == env.full_action_spec.shape == (2,)

    @pytest.mark.parametrize("kind", ["unbatched_setters", "full_unbatched_setters"])
    def test_specs_without_batch_dimensions_are_expanded(self, kind: str) -> None:
        env = KINDS[kind]()
        assert env.observation_spec["observation"].shape == env.action_spec.shape == (*env.batch_size, 1)
        assert env.observation_spec_unbatched["observation"].shape == env.action_spec_unbatched.shape == (1,)
        for role in ("observation", "action", "reward", "done", "state"):
            assert getattr(env, f"full_{role}_spec_unbatched").shape == ()
        assert env.input_spec_unbatched.shape == env.output_spec_unbatched.shape == ()

    def test_environment_without_reward_has_no_reward_keys(self) -> None:
        assert KINDS["without_reward"]().reward_keys == []


class TestReset:
    def test_reset_returns_its_input_if_the_environment_does(self) -> None:
        env = KINDS["before_super_batched"]()
        root = TensorDict({"mine": torch.ones(2)}, [2])
        assert env.reset(root) is root and set(root.keys()) == {"mine", "observation", "done", "terminated"}
        before = root["observation"]
        root["_reset"] = torch.tensor([[True], [False]])
        assert env.reset(root) is root and "_reset" not in root.keys()
        assert root["observation"] is not before

    def test_reset_with_only_a_mask_is_partial_or_full(self) -> None:
        env = KINDS["before_super_batched"]()
        env.rollout(3)
        every = TensorDict({"_reset": torch.ones(2, 1, dtype=torch.bool)}, [2])
        assert (env.reset(every)["observation"] == 0).all()
        env.rollout(3)
        some = TensorDict({"_reset": torch.tensor([[True], [False]])}, [2])
        with pytest.warns(UserWarning, match="partial reset: the input has no"):
            assert env.reset(some)["observation"].flatten().tolist() == [0, 3]


def test_undeclared_keys_of_a_reset_are_recorded_with_a_warning() -> None:
    env = KINDS["undeclared_reset"]()
    with pytest.warns(UserWarning, match="which no spec declares") as caught:
        batch = env.rollout(3)
    assert len(caught) == 1 and batch["next", "extra"].flatten().tolist() == [1, 2, 3]
