"""`BatchSizeTransform` gives an environment a batch size, or reshapes its batch."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from gleanrl.envs import EnvBase
from gleanrl.envs.transforms import BatchSizeTransform, TransformedEnv
from gleanrl.errors import InvalidArgumentError
from tests.envs.transforms.ways import batched, single


class Unlocked(EnvBase):
    """Steps a batch of any size, because its whole state is in the TensorDict."""

    batch_locked = False

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(x=Unbounded((1,)))
        self.state_spec = Composite(x=Unbounded((1,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))

    def _reset(self, tensordict=None, **kwargs):
        size = torch.Size() if tensordict is None else tensordict.batch_size
        return TensorDict({"x": torch.zeros(*size, 1), "done": torch.zeros(*size, 1, dtype=torch.bool)}, size)

    def _step(self, td):
        x = td["x"] + td["action"]
        done = torch.zeros_like(x, dtype=torch.bool)
        return TensorDict({"x": x, "reward": x.clone(), "done": done}, td.batch_size)

    def _set_seed(self, seed):
        pass


def test_an_unlocked_environment_gets_a_batch():
    env = TransformedEnv(Unlocked(), BatchSizeTransform(batch_size=[4]))
    assert env.batch_size == (4,)
    assert env.action_spec.shape == (4, 1)
    batch = env.rollout(3)
    assert batch.shape == (4, 3)
    assert torch.allclose(batch["next", "x"], batch["x"] + batch["action"])
    assert torch.equal(batch["next", "x"][:, :-1], batch["x"][:, 1:])


def test_a_batch_is_reshaped_and_back():
    env = TransformedEnv(batched(), BatchSizeTransform(reshape_fn=lambda td: td.reshape(3, 1)))
    assert env.batch_size == (3, 1)
    batch = env.rollout(4, break_when_any_done=False)
    assert batch.shape == (3, 1, 4)
    assert batch["action"].shape == (3, 1, 4, 2)
    assert torch.equal(batch["next", "observation"][..., 2], batch["observation"][..., 2] + 1)


def test_a_function_may_take_the_place_of_the_reset():
    def reset(request, came):
        return came.set("observation", came["observation"] + 100)

    env = TransformedEnv(batched(), BatchSizeTransform(batch_size=[3], reset_func=reset))
    assert float(env.reset()["observation"].min()) == 100


def test_buffer_reshapes_samples():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(6),
        batch_size=6,
        transform=BatchSizeTransform(reshape_fn=lambda td: td.reshape(2, 3)),
    )
    buffer.extend(TensorDict({"a": torch.arange(6)}, [6]))
    assert buffer.sample().shape == (2, 3)


def test_batch_size_or_reshape_fn_is_required():
    with pytest.raises(InvalidArgumentError, match="not both"):
        BatchSizeTransform()


def test_reset_function_may_receive_the_environment():
    seen = []

    def made(tensordict, tensordict_reset, env):
        seen.append(env)
        return tensordict_reset

    env = TransformedEnv(
        single(), BatchSizeTransform(reshape_fn=lambda td: td.unsqueeze(0), reset_func=made, env_kwarg=True)
    )
    assert env.reset().batch_size == (1,) and seen == [env]
