"""A collector accepts environments, callables and classes, and refuses other values."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest

from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.collectors.build import made_env, make_env
from gleanrl.data import Composite
from gleanrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv
from gleanrl.errors import EnvironmentFailure, InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.fakes_base import CountingEnv


class TestMakeEnv:
    """`make_env` accepts environments, callables and classes, and refuses other values."""

    def test_environment_is_returned_unchanged(self) -> None:
        env = CountingEnv()
        assert make_env(env, None) is make_env(env, {}) is env

    def test_a_callable_or_a_class_is_called_with_the_keywords(self) -> None:
        assert make_env(CountingEnv, {"batch_size": (2,)}).batch_size == (2,)
        assert make_env(lambda **kwargs: CountingEnv(**kwargs), {"batch_size": (3,)}).batch_size == (3,)

    def test_keywords_for_an_existing_environment_need_its_support(self) -> None:
        with pytest.raises(UnsupportedError, match="create_env_kwargs: the environment exists already"):
            make_env(CountingEnv(), {"a": 1})

        class Willing(CountingEnv):
            def update_kwargs(self, kwargs: Any) -> None:
                self.given = dict(kwargs)

        assert make_env(Willing(), {"a": 1}).given == {"a": 1}

    def test_a_name_is_made_by_gymnasium(self) -> None:
        env = make_env("CartPole-v1", {"categorical_action_encoding": True})
        assert type(env) is GymEnv and env.action_spec.shape == ()
        with pytest.raises(gymnasium.error.NameNotFound):
            make_env("NoSuchTask-v0", None)

    @pytest.mark.parametrize("make", [lambda env: env, lambda env: lambda: env], ids=["instance", "callable"])
    def test_a_gymnasium_environment_is_wrapped(self, make: Any) -> None:
        inner = gymnasium.make("CartPole-v1")
        env = make_env(make(inner), None)
        assert type(env) is GymWrapper and env._env is inner
        vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        assert make_env(make(vector), None).batch_size == (2,)

    @pytest.mark.parametrize("value", [None, 3, [CountingEnv]])
    def test_other_values_are_refused(self, value: Any) -> None:
        with pytest.raises(InvalidTypeError, match=f"got {type(value).__name__}"):
            make_env(value, None)

    def test_a_callable_that_makes_no_environment_is_refused(self) -> None:
        with pytest.raises(InvalidTypeError, match="create_env_fn: .* got NoneType"):
            make_env(lambda: None, None)


@pytest.mark.parametrize("given", [True, False])
def test_made_environment_is_closed_if_the_block_raises(given: bool) -> None:
    env = CountingEnv()
    with pytest.raises(KeyError), made_env(env if given else lambda: env, None) as found:
        assert found is env
        raise KeyError
    assert env.is_closed is not given


def test_a_gymnasium_environment_of_the_user_stays_open_if_the_block_raises() -> None:
    inner = gymnasium.make("CartPole-v1")
    with pytest.raises(KeyError), made_env(inner, None) as env:
        raise KeyError
    assert not env.is_closed
    env.close()


@pytest.mark.parametrize(
    "given", ["CartPole-v1", lambda: gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")], ids=type
)
def test_workers_and_batches_make_gymnasium_environments(given: Any) -> None:
    batch = SerialEnv(2, given)
    assert batch.rollout(3).shape == (2, 3)
    batch.close()
    collector = MultiSyncDataCollector([given] * 2, None, frames_per_batch=6, total_frames=6, cat_results=0)
    (data,) = collector
    assert data["observation"].shape == (6, 4) and len(data["collector", "traj_ids"].unique()) == 2


def test_error_of_the_block_is_raised_although_closing_fails() -> None:
    with pytest.raises(KeyError), made_env(Unclosable, None):
        raise KeyError
    with pytest.raises(InvalidArgumentError, match="frames_per_batch"):
        SyncDataCollector(Unclosable, None, frames_per_batch=-1, total_frames=6)


class Unclosable(CountingEnv):
    """Can't be closed."""

    def close(self, **kwargs: Any) -> None:
        raise RuntimeError("the simulator can't be closed")


@pytest.mark.parametrize("kind", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_error_of_a_maker_is_raised_although_closing_another_member_fails(kind: Any) -> None:
    calls = [0, 0]  # the first environment of each callable only provides its specs

    def first() -> Any:
        calls[0] += 1
        return CountingEnv() if calls[0] == 1 else Unclosable()

    def second() -> Any:
        calls[1] += 1
        if calls[1] > 1:
            raise ZeroDivisionError
        return CountingEnv()

    batch = kind(2, [first, second])
    with pytest.raises((ZeroDivisionError, EnvironmentFailure), match="ZeroDivisionError|^$"):
        batch.start()
    batch.close()


class OthersBatch(Unclosable):
    """Refuses the end flag, as another library's batch of environments does."""

    def __init__(self) -> None:
        super().__init__()
        self.done_spec = Composite({name: self.full_done_spec[name] for name in ("done", "terminated")})

    def add_truncated_keys(self) -> Any:
        raise RuntimeError("not in a batch")


@pytest.mark.parametrize("workers", [False, True])
def test_environment_without_a_truncated_flag_refuses_a_limit_with_advice(workers: bool) -> None:
    kind, make = (MultiSyncDataCollector, [OthersBatch]) if workers else (SyncDataCollector, OthersBatch)
    with pytest.raises(
        UnsupportedError, match=r"OthersBatch has no 'truncated' flag.*not in a batch.*make_env\(\)"
    ):
        kind(make, None, frames_per_batch=4, total_frames=4, max_frames_per_traj=2)
