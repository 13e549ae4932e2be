"""`EnvCreator` creates environments and shares the statistics of their transforms."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from torch import nn

from gleanrl.envs import EnvCreator, GymEnv, GymWrapper, ParallelEnv, SerialEnv, env_creator, get_env_metadata
from gleanrl.envs.transforms import TransformedEnv, VecNorm
from gleanrl.errors import SchemaError
from tests.envs.vector.makers import oracle, streams
from tests.fakes import Script
from tests.fakes_base import CountingEnv


class Built:
    """Counts the environments that it makes, and keeps no reference to them."""

    def __init__(self):
        self.count = 0

    def __call__(self, **kwargs):
        self.count += 1
        return oracle(**kwargs)


class Average(nn.Module):
    """Shares its statistics."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def share_statistics(self):
        return self.total

    def use_statistics(self, statistics):
        self.total = statistics


class Averaging(CountingEnv):
    """Has a transform with shared statistics."""

    def __init__(self):
        super().__init__()
        self.transform = nn.Sequential(Average(), nn.Identity())

    def append_transform(self, transform):
        """Do nothing. `EnvCreator` looks for transforms only where this method exists."""


def test_creator_builds_one_environment_for_the_specs(monkeypatch):
    closed, close = [], GymWrapper.close
    monkeypatch.setattr(GymWrapper, "close", lambda self, **kw: closed.append(True) or close(self, **kw))
    build = Built()
    creator = EnvCreator(build, {"stream": 3})
    assert build.count == 1 and closed
    env = SerialEnv(2, creator)
    assert build.count == 1 and env.stream == [3, 3] and build.count == 3
    assert SerialEnv(2, creator, create_env_kwargs=streams(2)).stream == [0, 1]
    assert creator(stream=5).stream == 5
    assert "GymWrapper" in repr(creator)


def test_existing_environment_is_copied_and_stays_open():
    """A callable that returns the same environment twice gets copies of it. None of them closes the original."""
    env = CountingEnv()
    for make in (lambda: env, env):
        creator = EnvCreator(make)
        first, second = creator(), creator()
        assert first is not second and env not in (first, second)
        first.rollout(2)
        first.close()
        assert second.rollout(2).shape == (2,) and not env.is_closed
        assert SerialEnv(2, creator).rollout(2).shape == (2, 2)
    assert not env.masks  # the caller's environment was neither stepped nor reset
    env.rollout(2)


def test_variants_replace_keywords():
    creator = EnvCreator(CountingEnv, {"batch_size": (2,)}, script=Script(lengths=(2,)))
    assert creator().rollout(9).shape == (2, 2)
    variant = creator.make_variant(batch_size=(3,))
    assert creator().batch_size == (2,) and variant().rollout(9).shape == (3, 2)
    assert variant.meta_data is creator.meta_data


def test_a_variant_shares_the_statistics_and_they_can_be_saved():
    creator = EnvCreator(lambda **_: TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(["observation"])))
    variant = creator.make_variant(unused=1)
    variant().rollout(5)
    state = creator.state_dict()
    loc = creator().transform.loc["observation"]
    creator().rollout(5)
    assert not torch.equal(variant().transform.loc["observation"], loc)
    creator.load_state_dict(state)
    assert torch.equal(variant().transform.loc["observation"], loc)
    for odd in ({}, {"0": {}}, {"1": state["0"]}, {"x": {}}, [state]):
        with pytest.raises(SchemaError):
            creator.load_state_dict(odd)
    assert torch.equal(variant().transform.loc["observation"], loc)
    assert EnvCreator(oracle).state_dict() == {}


def test_creator_is_pickled():
    creator = cloudpickle.loads(cloudpickle.dumps(EnvCreator(lambda: oracle(4))))
    assert creator().stream == 4 and creator.meta_data.batch_size == ()
    env = ParallelEnv(2, creator)
    assert env.stream == [4, 4]
    env.close()


def test_share_memory_shares_statistics():
    creator = EnvCreator(Averaging)
    first, second = creator(), creator()
    first.transform[0].total.add_(3)
    assert float(second.transform[0].total) == 3
    apart = EnvCreator(Averaging, share_memory=False)
    assert apart().transform[0].total is not apart().transform[0].total
    assert [part.total for part in [first.transform[0]]] == [creator._shared[0]]


@pytest.mark.parametrize("of", [lambda: GymEnv("CartPole-v1"), EnvCreator(lambda: GymEnv("CartPole-v1"))])
def test_metadata_are_read_from_every_kind_of_factory(of):
    found = get_env_metadata(of)
    assert found.name == "GymEnv" and found.specs["observation"]["observation"].shape == (4,)
    assert get_env_metadata(GymEnv("Pendulum-v1")).specs["action"]["action"].shape == (1,)
    assert get_env_metadata(oracle, {"stream": 1}).batch_size == ()
    creator = env_creator(of)
    assert env_creator(creator) is creator
