"""Batches accept the forms of `create_env_fn` that users pass."""

from __future__ import annotations

import pickle

import pytest

from gleanrl.envs import SerialEnv
from gleanrl.envs.vector.factories import Factory, factories, is_environment, require_unused, with_own_copies
from gleanrl.errors import ClosedError, InvalidArgumentError, InvalidTypeError, LengthError, UnsupportedError
from tests.envs.vector.makers import oracle


def test_single_callable_serves_all_members():
    given = factories(3, oracle, {"stream": 4})
    assert len(given) == 3 and all(factory.alike(given[0]) for factory in given)
    assert given[0]().stream == 4


def test_list_gives_each_member_its_callable():
    given = factories(2, [oracle, lambda **kwargs: oracle(7)], [{"stream": 1}, {}])
    assert [factory().stream for factory in given] == [1, 7]
    assert not given[0].alike(given[1])


@pytest.mark.parametrize("name", ["create_env_fn", "create_env_kwargs"])
def test_list_of_another_length_is_refused(name):
    arguments = {
        "create_env_fn": oracle,
        "create_env_kwargs": {},
        name: [oracle] if name[-1] == "n" else [{}],
    }
    with pytest.raises(LengthError, match=f"{name}: expected 2 entries") as caught:
        factories(2, **arguments)
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("num_envs", [0, -1, True, 2.0, "2"])
def test_invalid_number_of_environments_is_refused(num_envs):
    with pytest.raises(InvalidArgumentError, match="num_workers"):
        factories(num_envs, oracle, None)


def test_values_other_than_factories_are_refused():
    with pytest.raises(InvalidTypeError, match="create_env_fn"):
        factories(1, 3, None)
    with pytest.raises(InvalidTypeError, match="create_env_kwargs"):
        factories(1, oracle, 3)
    with pytest.raises(InvalidTypeError, match="made int"):
        factories(1, lambda: 3, None)[0]()
    with pytest.raises(UnsupportedError, match="exists already"):
        factories(1, oracle(), {"stream": 1})
    assert not is_environment(SerialEnv) and is_environment(oracle())


def test_used_and_closed_environments_are_refused():
    used, closed = oracle(), oracle()
    used.reset()
    closed.close()
    with pytest.raises(InvalidArgumentError, match="started already"):
        factories(1, used, None)
    with pytest.raises(ClosedError, match="was closed"):
        factories(1, closed, None)
    started = SerialEnv(1, oracle)
    started.start()
    with pytest.raises(InvalidArgumentError, match="started already"):
        factories(1, [started], None)
    require_unused(object())  # an environment of another library doesn't say whether it started


def test_a_repeated_environment_is_copied():
    env = oracle(5)
    first, second, third = (factory() for factory in with_own_copies(factories(3, [env, env, oracle], None)))
    assert first is env and second is not env and second.stream == 5
    second.reset()
    assert env.episode == -1 and second.episode == 0
    assert not env.usage.started and third.stream == 0


def test_factories_of_lambdas_and_environments_are_pickled():
    number = 3
    made = pickle.loads(pickle.dumps(Factory(lambda stream: oracle(stream + number), {"stream": 4})))()
    assert made.stream == 7
    assert pickle.loads(pickle.dumps(Factory(oracle(6))))().stream == 6


def test_a_callable_that_returns_one_environment_makes_copies():
    env = oracle(3)
    factory, looked_at = factories(1, lambda: env, None)[0].probed()
    assert looked_at is not env and factory() is not factory() and env not in (factory(), looked_at)
    assert pickle.loads(pickle.dumps(factory))().stream == 3
    given = factories(2, [oracle, oracle(5)], None)
    for same in given:
        assert same.probed()[0] is same and same.model is None


def test_an_environment_takes_keywords_if_it_can():
    batch = SerialEnv(2, oracle)
    made = Factory(batch, {"stream": 8})()
    assert made is batch and batch.stream == [8, 8]
