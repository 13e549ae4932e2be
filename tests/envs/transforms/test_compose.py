"""`Compose` chains transforms, and a chain can be changed like a list."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs.transforms import (
    Compose,
    InitTracker,
    ObservationNorm,
    RewardSum,
    SignTransform,
    StepCounter,
    Transform,
    TransformedEnv,
)
from gleanrl.envs.transforms.compose import CallableTransform, flattened
from gleanrl.errors import ContainerError, InvalidTypeError, UnsupportedError
from tests.envs.transforms.ways import single
from tests.fakes_base import CountingEnv


def double(key="a"):
    return ObservationNorm(loc=0.0, scale=2.0, in_keys=[key])


def add(key="a"):
    return ObservationNorm(loc=1.0, scale=1.0, in_keys=[key])


def test_outputs_pass_the_first_transform_first():
    td = TensorDict({"a": torch.tensor([3.0])}, [])
    assert Compose(double(), add())(td.clone())["a"].item() == 7
    assert Compose(add(), double())(td.clone())["a"].item() == 8


def test_inputs_pass_the_last_transform_first():
    norm = {"in_keys": [], "in_keys_inv": ["a"]}
    chain = Compose(ObservationNorm(0.0, 2.0, **norm), ObservationNorm(1.0, 1.0, **norm))
    td = TensorDict({"a": torch.tensor([3.0])}, [])
    assert chain.inv(td)["a"].item() == 1
    assert td["a"].item() == 3


def test_a_chain_is_a_sequence():
    first, second = StepCounter(), InitTracker()
    chain = Compose(first, second)
    assert len(chain) == 2
    assert chain[0] is first
    assert list(chain) == [first, second]
    assert isinstance(chain[:1], Compose)
    assert chain[:1][0] is not first
    nested = Compose(Compose(StepCounter()), RewardSum())
    assert [type(t) for t in flattened(nested)] == [StepCounter, RewardSum]


def test_insert_accepts_positive_and_negative_indices():
    chain = Compose(StepCounter())
    chain.append(RewardSum())
    chain.insert(-1, InitTracker())
    assert [type(t) for t in chain] == [StepCounter, InitTracker, RewardSum]
    with pytest.raises(IndexError, match="from -3 to 3"):
        chain.insert(4, SignTransform(in_keys=["a"]))


def test_appending_updates_the_specs_of_the_environment():
    env = TransformedEnv(single(), Compose(StepCounter()))
    assert "episode_reward" not in env.observation_spec.keys()
    env.transform.append(RewardSum())
    assert "episode_reward" in env.observation_spec.keys()


def test_a_transform_has_one_container():
    counter = StepCounter()
    chain = Compose(counter)
    with pytest.raises(ContainerError, match="clone"):
        Compose(counter)
    with pytest.raises(AttributeError):
        TransformedEnv(single(), counter)
    assert chain[0] is counter and counter.container is None
    counter.reset_parent()
    env = TransformedEnv(single(), counter)
    assert env.transform is counter and counter.container is env


def test_members_of_a_deleted_chain_can_be_reused():
    chain = Compose(StepCounter(), RewardSum())
    longer = Compose(InitTracker(), *chain.clone())
    assert [type(transform) for transform in longer] == [InitTracker, StepCounter, RewardSum]
    with pytest.raises(ContainerError, match="clone"):
        Compose(InitTracker(), *chain)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"]
)
def test_copies_of_an_environment_have_separate_transforms(copied):
    env = TransformedEnv(CountingEnv(), Compose(StepCounter(), RewardSum()))
    env.rollout(2)
    twin = copied(env)
    assert twin.transform[0].container is twin and env.transform[0].container is env
    assert twin.transform[1].parent.base_env is twin.base_env


def test_a_chain_in_an_environment_can_be_changed():
    env = TransformedEnv(single(), Compose(StepCounter(), InitTracker(), RewardSum()))
    counter = env.transform.pop(0)
    assert counter.holder is None and "step_count" not in env.reset().keys()
    del env.transform[-1]
    assert "episode_reward" not in env.rollout(2)["next"].keys()
    env.transform[0] = counter
    assert env.transform[0].container is env and set(env.observation_spec.keys()) == {
        "observation",
        "step_count",
    }
    assert env.rollout(2)["next", "step_count"].flatten().tolist() == [1, 2]
    env.transform[0] = counter  # assigning a transform to its present place is allowed
    assert len(env.transform) == 1
    for mistake in (
        lambda: Compose().pop(),
        lambda: env.transform.pop(3),
        lambda: env.transform.__delitem__(5),
    ):
        with pytest.raises(IndexError):
            mistake()
    other = Compose(RewardSum())
    with pytest.raises(ContainerError):
        env.transform[0] = other[0]
    assert env.transform[0] is counter


def test_clone_has_no_container_and_is_independent():
    norm = double()
    env = TransformedEnv(single(), Compose(norm))
    twin = norm.clone()
    assert twin.container is None
    assert norm.container is env
    twin.scale.fill_(5.0)
    assert norm.scale.item() == 2


def test_callables_are_wrapped():
    chain = Compose(lambda td: td.set("b", td["a"] + 1))
    assert isinstance(chain[0], CallableTransform)
    assert chain(TensorDict({"a": torch.zeros(2)}, [2]))["b"].tolist() == [1.0, 1.0]
    with pytest.raises(InvalidTypeError, match="got None"):
        Compose(lambda td: None)(TensorDict({}, []))
    with pytest.raises(InvalidTypeError, match="expected a Transform"):
        Compose(3)


def test_missing_keys_raise_unless_tolerated():
    chain = Compose(double("nothing"))
    with pytest.raises(KeyError, match="'nothing' not found"):
        chain(TensorDict({"a": torch.zeros(())}, []))
    chain.set_missing_tolerance(True)
    assert list(chain(TensorDict({"a": torch.zeros(())}, [])).keys()) == ["a"]


def test_the_parent_is_the_environment_as_the_transform_sees_it():
    first, second = StepCounter(), RewardSum()
    env = TransformedEnv(single(), Compose(first, second))
    assert isinstance(first.parent, TransformedEnv)
    assert first.parent.base_env is env.base_env
    assert "step_count" in second.parent.observation_spec.keys()
    assert "episode_reward" not in second.parent.observation_spec.keys()
    assert Compose(StepCounter())[0].parent is None


def test_a_chain_in_a_buffer_keeps_its_state_with_it():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Compose(double()), batch_size=2)
    buffer.extend(TensorDict({"a": torch.ones(4)}, [4]))
    assert buffer.sample()["a"].tolist() == [2.0, 2.0]
    other = copy.deepcopy(buffer)
    buffer._transform if hasattr(buffer, "_transform") else None
    assert other.sample()["a"].tolist() == [2.0, 2.0]


def test_a_transform_of_another_library_is_refused():
    class Foreign:
        def __call__(self, tensordict):
            return tensordict

        def transform_observation_spec(self, spec):
            return spec

    with pytest.raises(UnsupportedError, match="Foreign is another library's .* its own TransformedEnv"):
        Compose(Foreign())


class Recording(Transform):
    """Counts the calls of `dump`."""

    dumped = ()

    def dump(self, suffix=None):
        self.dumped = (*self.dumped, suffix)


def test_dump_reaches_every_transform_of_a_chain():
    last = Recording()
    env = TransformedEnv(CountingEnv(), Compose(StepCounter(), Compose(last)))
    env.transform.dump(suffix="best")
    assert last.dumped == ("best",)


def test_transforms_of_a_clone_can_be_put_into_another_chain():
    copy = Compose(StepCounter(), RewardSum()).clone()
    chain = Compose(InitTracker(), *copy)
    env = TransformedEnv(single(), chain)
    assert {"is_init", "step_count", "episode_reward"} <= set(env.reset().keys())
    with pytest.raises(ContainerError, match="StepCounter was put from this Compose into another one"):
        TransformedEnv(single(), copy)


def test_transforms_of_an_environment_cannot_be_put_into_another_chain():
    env = TransformedEnv(single(), Compose(StepCounter(), RewardSum()))
    with pytest.raises(ContainerError, match="part of another Compose or TransformedEnv"):
        Compose(InitTracker(), *env.transform)
    assert len(Compose(InitTracker(), *env.transform.clone())) == 3


def test_deleting_a_slice_frees_all_its_transforms():
    first, second, third = StepCounter(), InitTracker(), RewardSum()
    chain = Compose(first, second, third)
    del chain[0:2]
    assert list(chain) == [third] and first.holder is second.holder is None
    assert list(Compose(second, first)) == [second, first]
    new = StepCounter()
    with pytest.raises(InvalidTypeError, match="index of one transform"):
        chain[0:1] = new
    assert list(chain) == [third] and third.holder is chain and new.holder is None


class Closing(Transform):
    """Notes that it was closed; closing may fail."""

    def __init__(self, closed, error=None):
        super().__init__()
        self.closed, self.error = closed, error

    def close(self):
        self.closed.append(self)
        if self.error is not None:
            raise self.error


def test_an_error_of_close_leaves_no_part_open():
    closed, error = [], ValueError("disk full")
    chain = Compose(Closing(closed), Closing(closed, error), Closing(closed))
    env = TransformedEnv(CountingEnv(), chain)
    with pytest.raises(ValueError, match="disk full"):
        env.close()
    assert closed == list(chain) and env.base_env.is_closed and env.is_closed
    env.close()
    assert len(closed) == 3
