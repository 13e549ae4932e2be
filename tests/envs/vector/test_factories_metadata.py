"""Batches read the declarations of environments without starting the given ones."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Bounded, Composite, Unbounded
from gleanrl.envs import GymWrapper
from gleanrl.envs.vector.factories import (
    EnvMetaData,
    common_batch_size,
    common_device,
    factories,
    read_metadata,
    stackable,
    stacked_spec,
)
from gleanrl.errors import InvalidArgumentError
from tests.envs.vector.makers import SCRIPT, oracle, streams, with_goal
from tests.fakes import FakeFailure, OracleEnv
from tests.fakes_base import CountingEnv


class Built:
    """Records the oracles that it makes, and keeps their wrappers only if asked to."""

    def __init__(self, holding=False):
        self.made, self.held = [], [] if holding else None

    def __call__(self, stream=0):
        self.made.append(OracleEnv(stream=stream, script=SCRIPT))
        env = GymWrapper(self.made[-1])
        if self.held is not None:
            self.held.append(env)
        return env


def test_equal_factories_share_one_probe_environment():
    build = Built()
    assert len(read_metadata(factories(4, build, None))[1]) == 4
    assert len(build.made) == 1 and build.made[0].closed
    read_metadata(factories(3, build, streams(3)))
    assert len(build.made) == 4


def test_unused_environments_held_elsewhere_count_as_new():
    build = Built(holding=True)
    given = factories(2, build, None)
    assert read_metadata(given)[0] == given
    assert len(build.made) == 2 and all(stream.closed == 1 for stream in build.made)


def test_probe_is_closed_before_the_next_one_is_made():
    class Single(Built):
        def __call__(self, stream=0):
            if self.made and not self.made[-1].closed:
                raise FakeFailure("occupied")
            return super().__call__(stream)

    build = Single(holding=True)
    read_metadata(factories(2, build, None))
    assert len(build.made) == 1 and build.made[0].closed


def test_existing_environment_is_read_without_a_copy():
    env = oracle()
    read_metadata(factories(2, env, None))
    assert not env.is_closed and not env.usage.started


def test_factory_with_metadata_builds_no_environment():
    class Knowing(Built):
        meta_data = EnvMetaData.of(oracle())

    build = Knowing()
    assert read_metadata(factories(2, build, None))[1][0] is Knowing.meta_data
    assert not build.made


def test_specs_are_stacked():
    _, each = read_metadata(factories(2, oracle, None))
    spec = stacked_spec("observation", each, None)
    assert isinstance(spec, Composite) and spec["observation"].shape == (2, 3)
    assert stackable(each)


def test_different_specs_are_stacked_lazily():
    tight = lambda: CountingEnv()  # noqa: E731
    wide = CountingEnv()
    wide.action_spec = Bounded(-2.0, 2.0, (2,))
    _, each = read_metadata(factories(2, [tight, wide], None))
    assert stackable(each)
    assert stacked_spec("action", each, None)["action"].rand().shape == (2, 2)
    _, each = read_metadata(factories(2, [oracle, with_goal], None))
    assert not stackable(each)
    longer = CountingEnv()
    longer.observation_spec = Composite(observation=Unbounded((4,)))
    _, each = read_metadata(factories(2, [tight, longer], None))
    assert not stackable(each)
    assert stacked_spec("observation", each, None)["observation"].shape == (2, -1)


def test_sizes_and_devices_must_agree():
    _, each = read_metadata(factories(2, [lambda: CountingEnv(batch_size=(2,)), CountingEnv], None))
    with pytest.raises(InvalidArgumentError, match="one batch size"):
        common_batch_size(each)
    _, each = read_metadata(factories(2, [lambda: CountingEnv(device="cpu"), CountingEnv], None))
    with pytest.raises(InvalidArgumentError, match="device"):
        common_device(each)
    assert common_device(each[:1]) == torch.device("cpu")
    assert stacked_spec("reward", each, torch.device("cpu")).device == torch.device("cpu")
