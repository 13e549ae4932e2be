"""Transforms of buffers: rewards to go, burn-in of recurrent states, random pieces of sequences."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs.transforms import (
    BurnInTransform,
    Compose,
    RandomCropTensorDict,
    Reward2GoTransform,
    TransformedEnv,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingArgumentError, SchemaError
from tests.envs.transforms.ways import single


def steps(done, reward):
    done = torch.tensor(done, dtype=torch.bool).unsqueeze(-1)
    following = {"reward": torch.tensor(reward).unsqueeze(-1), "done": done}
    return TensorDict({"next": following}, done.shape[:-1])


def test_rewards_to_go_stop_at_ends():
    batch = steps([[0, 1, 0, 1, 0]], [[1.0, 2.0, 3.0, 4.0, 5.0]])
    buffer = ReplayBuffer(storage=LazyTensorStorage(5, ndim=2), transform=Reward2GoTransform(gamma=0.5))
    before = batch.clone()
    buffer.extend(batch)
    assert buffer[:]["next", "reward"].flatten().tolist() == [2.0, 2.0, 5.0, 4.0, 5.0]
    assert (batch == before).all()
    aside = Reward2GoTransform(gamma=0.5, out_keys=["reward_to_go"]).inv(batch)
    assert aside["reward_to_go"].flatten().tolist() == [2.0, 2.0, 5.0, 4.0, 5.0]
    assert torch.equal(aside["next", "reward"], batch["next", "reward"])


@pytest.mark.parametrize("size", [(), (3,)], ids=str)
def test_rewards_to_go_of_records_that_are_whole_trajectories(size):
    reward, done = torch.rand(*size, 4, 1), torch.zeros(*size, 4, 1, dtype=torch.bool)
    done[..., -1, :] = True
    data = TensorDict({"next": TensorDict({"reward": reward, "done": done}, size)}, size)
    out = Reward2GoTransform(gamma=1.0).inv(data)
    assert out.batch_size == size and torch.allclose(out["next", "reward"][..., 0, :], reward.sum(-2))


@pytest.mark.parametrize("top", [True, False])
def test_rewards_to_go_of_agents_sum_over_time(top):
    reward, done = torch.rand(2, 6, 3, 1), torch.zeros(2, 6, 3, 1, dtype=torch.bool)
    done[:, 2, 1] = done[:, 5] = True
    data = TensorDict({"next": {"agents": {"reward": reward, "done": done}}}, [2, 6])
    if top:
        data["next", "done"] = done.any(-2)
    agents = {"in_keys": [("next", "agents", "reward")], "out_keys": [("agents", "sum")]}
    out = Reward2GoTransform(gamma=1.0, done_key=("agents", "done"), **agents).inv(data)
    assert torch.allclose(out["agents", "sum"][:, 0], reward[:, :3].sum(1))
    assert torch.allclose(out["agents", "sum"][:, 3], reward[:, 3:].sum(1))


def test_a_row_without_an_end_is_refused():
    with pytest.raises(RuntimeError, match="no end"):
        Reward2GoTransform().inv(steps([[0, 1], [0, 0]], [[1.0, 1.0], [1.0, 1.0]]))


class Counter(TensorDictModuleBase):
    """A recurrent module whose state is the sum of its inputs."""

    in_keys = ["x", "h"]
    out_keys = ["y", ("next", "h")]

    def forward(self, td):
        total = td["h"][:, :1] + td["x"].cumsum(1)
        td["y"] = total
        td["next", "h"] = total
        return td


def test_the_state_after_the_burn_in_begins_the_rest():
    x = torch.arange(12.0).reshape(2, 6, 1)
    batch = TensorDict({"x": x, "h": torch.zeros(2, 6, 1)}, [2, 6])
    out = BurnInTransform(Counter(), burn_in=4)(batch.clone())
    assert out.shape == (2, 2)
    assert torch.equal(out["h"][:, 0], x[:, :4].sum(1))
    assert torch.equal(out["x"], x[:, 4:])
    assert BurnInTransform([Counter()], burn_in=0)(batch) is batch
    with pytest.raises(RuntimeError, match="above 6"):
        BurnInTransform(Counter(), burn_in=6)(batch)


def test_random_crops_are_consecutive_steps():
    torch.manual_seed(0)
    batch = TensorDict(
        {"t": torch.arange(10).expand(50, 10), "mask": torch.arange(10).expand(50, 10) < 7}, [50, 10]
    )
    out = RandomCropTensorDict(3)(batch)
    assert out.shape == (50, 3)
    assert torch.equal(out["t"][:, 1:], out["t"][:, :-1] + 1)
    assert set(out["t"][:, 0].tolist()) == set(range(8))
    masked = RandomCropTensorDict(3, mask_key="mask")(batch)
    assert bool(masked["mask"].all())
    assert set(masked["t"][:, 0].tolist()) == set(range(5))
    with pytest.raises(RuntimeError, match="at least 8"):
        RandomCropTensorDict(8, mask_key="mask")(batch)


def test_random_crop_accepts_another_dimension():
    batch = TensorDict({"t": torch.arange(10).reshape(10, 1).expand(10, 4)}, [10, 4])
    out = RandomCropTensorDict(3, sample_dim=-2)(batch)
    assert out.shape == (3, 4)
    assert torch.equal(out["t"][1:], out["t"][:-1] + 1)


def test_modules_that_read_no_keys_are_refused():
    with pytest.raises(InvalidTypeError, match="BurnInTransform: expected TensorDict modules, got a Linear"):
        BurnInTransform([torch.nn.Linear(3, 4)], 1)


@pytest.mark.parametrize(
    "make", [Reward2GoTransform, lambda: RandomCropTensorDict(2), lambda: BurnInTransform(Counter(), 1)]
)
def test_buffer_transforms_are_refused_in_environments(make):
    with pytest.raises(ValueError, match="replay buffers only"):
        TransformedEnv(single(), make())
    with pytest.raises(ValueError, match="replay buffers only"):
        TransformedEnv(single(), Compose(make())).reset()


def test_bad_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="burn_in"):
        BurnInTransform(Counter(), -1)
    with pytest.raises(InvalidArgumentError, match="sub_seq_len"):
        RandomCropTensorDict(0)
    stateless = Counter()
    stateless.out_keys = ["y"]
    with pytest.raises(MissingArgumentError, match="out_keys"):
        BurnInTransform(stateless, 1)


@pytest.mark.parametrize("dim", [1, -1])
def test_the_dimension_that_is_cropped_may_be_counted_from_the_front(dim):
    data = TensorDict({"a": torch.arange(12).reshape(2, 6)}, [2, 6])
    out = RandomCropTensorDict(3, sample_dim=dim, seed=0)(data)
    assert out.batch_size == (2, 3) and (out["a"].diff(dim=1) == 1).all()
    with pytest.raises(SchemaError, match="dimension 2"):
        RandomCropTensorDict(3, sample_dim=2)(data)


def test_reward_to_go_of_integers_is_refused_instead_of_truncated():
    data = steps([[0, 0, 1]], [[0.0, 0.0, 1.0]])
    data["next", "reward"] = data["next", "reward"].long()
    with pytest.raises(SchemaError, match="floating dtype"):
        Reward2GoTransform(gamma=0.5).inv(data)
