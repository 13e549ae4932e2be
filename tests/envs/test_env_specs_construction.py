"""Every environment class accepts the base constructor's keywords, also if its own constructor doesn't name them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from gleanrl.data import Composite, Unbounded
from gleanrl.envs import AutoResetEnv, EnvBase, GymEnv, ParallelEnv, SerialEnv
from gleanrl.errors import EnvironmentContractError, InvalidTypeError, UnsupportedError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

LONG = Script(lengths=(50,))


class Bare(CountingEnv):
    def __init__(self) -> None:
        super().__init__(LONG)


class Open(EnvBase):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(spec_locked=False, auto_reset=True, **kwargs)


class TestLock:
    def test_specs_are_locked_after_the_construction(self) -> None:
        env = Bare()
        assert env.is_spec_locked
        with pytest.raises(RuntimeError, match="locked composite"):
            env.observation_spec["more"] = Unbounded(3)
        assert env.set_spec_lock_(False) is env and not env.is_spec_locked
        env.observation_spec["more"] = Unbounded(3)
        assert env.set_spec_lock_().is_spec_locked and env.observation_keys == ["observation", "more"]
        env.action_spec = Unbounded(2)
        with pytest.raises(UnsupportedError):
            env.full_action_spec["more"] = Unbounded(3)

    def test_output_spec_can_be_unlocked_and_locked_again(self) -> None:
        env = Bare()
        env.output_spec.unlock_()["full_observation_spec"]["more"] = Unbounded(3)
        env.output_spec.lock_()
        assert "more" in env.observation_keys
        env.set_spec_lock_(False).observation_spec["again"] = Unbounded(3)

    def test_the_keyword_needs_no_place_in_the_constructor(self) -> None:
        env: Any = Bare(spec_locked=False)  # type: ignore[call-arg]
        env.observation_spec["more"] = Unbounded(3)
        assert "more" in env.observation_keys

    def test_constructor_may_pass_spec_keywords_on(self) -> None:
        assert isinstance(Open(), AutoResetEnv) and not Open().is_spec_locked
        open_: Any = Open
        assert type(open_(auto_reset=False, spec_locked=True)) is Open
        assert open_(auto_reset=False, spec_locked=True).is_spec_locked

    def test_a_transformed_environment_has_its_bases(self) -> None:
        env = Bare().append_transform(lambda td: td)
        assert env.is_spec_locked and not env.set_spec_lock_(False).is_spec_locked
        assert not env.base_env.is_spec_locked


class TestKind:
    def test_signatures_equal_the_constructors(self) -> None:
        assert list(inspect.signature(Open).parameters) == ["kwargs"]
        assert "env_name" in inspect.signature(GymEnv).parameters

    def test_abstract_methods_are_required(self) -> None:
        class Half(SerialEnv.__mro__[1]):  # type: ignore[misc]
            """Implements no method of a batch."""

        with pytest.raises(TypeError, match="abstract"):
            Half(1, Bare, None, None)

    def test_class_may_construct_another_class(self) -> None:
        env = ParallelEnv(1, Bare, serial_for_single=True)
        assert type(env) is SerialEnv and env.is_spec_locked

    def test_keywords_reach_the_environment_of_another_class(self) -> None:
        env: Any = ParallelEnv(
            1, Bare, serial_for_single=True, auto_reset=True, auto_reset_replace=False, spec_locked=False
        )
        assert type(env) is AutoResetEnv and type(env.base_env) is SerialEnv
        assert env.transform.replace is False and not env.base_env.is_spec_locked

    def test_mistyped_keyword_is_refused_with_the_nearest_name(self) -> None:
        with pytest.raises(InvalidTypeError, match="spec_locked"):
            EnvBase(spec_lockd=True)  # type: ignore[call-arg]

    def test_gym_env_accepts_the_base_keywords(self) -> None:
        env: Any = GymEnv("CartPole-v1", auto_reset=True, auto_reset_replace=False)
        assert type(env) is AutoResetEnv and env.transform.replace is False
        assert torch.equal(env.observation_spec.zero()["observation"], torch.zeros(4))
        env.close()


class Assigning(EnvBase):
    """Assigns some attributes first, and calls the base constructor with the other ones."""

    def __init__(self, assigned, **kwargs):
        for name, value in assigned.items():
            setattr(self, name, value)
        super().__init__(**kwargs)


def test_device_and_batch_size_may_be_assigned_before_the_constructor_runs():
    env = Assigning({"device": torch.device("cpu")}, batch_size=[2])
    assert env.device == torch.device("cpu") and env.batch_size == (2,)
    assert env.full_done_spec.device == torch.device("cpu")
    env = Assigning({"device": "cpu"})
    assert env.device == torch.device("cpu")
    env = Assigning({"batch_size": [2]}, device="cpu")
    assert env.device == torch.device("cpu") and env.batch_size == (2,)
    env = Assigning({"device": "meta", "batch_size": [3]}, device="cpu", batch_size=[2])
    assert env.device == torch.device("cpu") and env.batch_size == (2,)


def test_refused_batch_size_changes_nothing():
    env = CountingEnv(LONG, (3,))
    before = env.specs.clone()
    with pytest.raises(EnvironmentContractError, match="doesn't begin with"):
        env.batch_size = [2]
    assert env.batch_size == (3,) and env.specs == before
    assert env.rollout(2).batch_size == (3, 2)
    empty = EnvBase()
    empty.batch_size = [2]
    empty.observation_spec = Composite(x=Unbounded(2), shape=(2,))
    assert empty.full_observation_spec is not empty.full_state_spec is not empty.full_action_spec
