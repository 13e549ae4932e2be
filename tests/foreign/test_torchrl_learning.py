"""TorchRL's policies, losses and transforms work on gleanrl's batches and in its buffers (`make test-foreign`)."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

torchrl = pytest.importorskip("torchrl")

from torchrl import envs as foreign  # noqa: E402
from torchrl.modules import (  # noqa: E402
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

from gleanrl.collectors import SyncDataCollector  # noqa: E402
from gleanrl.data import (  # noqa: E402
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    Unbounded,
)
from gleanrl.envs import (  # noqa: E402
    ExplorationType,
    GymEnv,
    SerialEnv,
    TransformedEnv,
    transforms,
)
from tests.foreign import torchrl_envs as envs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


def q_network():
    return QValueActor(MLP(4, 2, num_cells=[16]), in_keys=["observation"], action_space="one-hot")


# ------------------------------------------------------------ policies and losses
@pytest.mark.parametrize("make", [envs.cartpole, lambda: GymEnv("CartPole-v1")], ids=["theirs", "ours"])
def test_dqn_trains_on_gleanrl_batches(make):
    network = q_network()
    explore = EGreedyModule(spec=envs.cartpole().full_action_spec, annealing_num_steps=100)
    collector = SyncDataCollector(
        make(),
        TensorDictSequential(network, explore),
        frames_per_batch=64,
        total_frames=192,
        init_random_frames=64,
    )
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(200), batch_size=32, priority_key="td_error"
    )
    loss = DQNLoss(network, action_space="one-hot", delay_value=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    for batch in collector:
        buffer.extend(batch)
        sample = buffer.sample()
        value = loss(sample)["loss"]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer.update_tensordict_priority(sample)
        assert value.isfinite()
    assert any(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


@pytest.mark.parametrize(
    "make",
    [
        envs.pendulum,
        lambda: GymEnv("Pendulum-v1"),
        lambda: SerialEnv(2, envs.pendulum),
        lambda: SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
    ],
    ids=["theirs", "ours", "theirs in a batch", "ours in a batch"],
)
def test_ppo_trains_on_gleanrl_batches(make):
    net = TensorDictModule(
        nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()),
        in_keys=["observation"],
        out_keys=["loc", "scale"],
    )
    actor = ProbabilisticActor(
        net,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )
    with torch.no_grad():  # far from values at which the distribution's numbers become coarse
        for parameter in net.parameters():
            parameter.mul_(0.1)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    advantage, loss = GAE(gamma=0.99, lmbda=0.95, value_network=critic), ClipPPOLoss(actor, critic)
    collector = SyncDataCollector(make(), actor, frames_per_batch=120, total_frames=240)
    buffer = ReplayBuffer(storage=LazyTensorStorage(120), sampler=SamplerWithoutReplacement(), batch_size=60)
    for batch in collector:
        advantage(batch)
        buffer.extend(batch.reshape(-1))
        for sample in [buffer.sample() for _ in range(2)]:
            out = loss(sample)
            total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
            total.backward()
            assert total.isfinite()
            # The learned policy is still the acting one.
            assert torch.allclose(out["ESS"], torch.ones(()), atol=1e-3)
    assert all(p.grad is not None and bool(p.grad.any()) for p in [*actor.parameters(), *critic.parameters()])


def test_exploration_modules_obey_the_collectors_type():
    module = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    noise = AdditiveGaussianModule(envs.pendulum().action_spec, sigma_init=1.0, sigma_end=1.0)

    def quiet(exploration_type):
        policy = TensorDictSequential(module, noise)
        collector = SyncDataCollector(
            envs.pendulum(), policy, frames_per_batch=20, total_frames=20, exploration_type=exploration_type
        )
        batch = collector.next()
        return torch.allclose(batch["action"], module.module(batch["observation"]))

    assert quiet(ExplorationType.DETERMINISTIC)
    assert not quiet(ExplorationType.RANDOM)


@pytest.mark.parametrize("place", ["theirs", "ours around theirs", "ours around a batch of theirs", "ours"])
def test_recurrent_policies_find_their_state(place):
    gru = GRUModule(
        input_size=4, hidden_size=8, in_keys=["observation", "hidden"], out_keys=["seen", ("next", "hidden")]
    )
    if place == "theirs":
        env = foreign.TransformedEnv(
            envs.cartpole(), foreign.Compose(foreign.InitTracker(), gru.make_tensordict_primer())
        )
    else:
        base = {
            "ours": lambda: GymEnv("CartPole-v1"),
            "ours around theirs": envs.cartpole,
            "ours around a batch of theirs": lambda: SerialEnv(2, envs.cartpole),
        }[place]()
        primer = transforms.TensorDictPrimer(hidden=Unbounded((1, 8)))
        env = TransformedEnv(base, transforms.Compose(transforms.InitTracker(), primer))
    value = QValueActor(nn.Linear(8, 2), in_keys=["seen"], action_space="one-hot")
    policy = TensorDictSequential(gru, value)
    collector = SyncDataCollector(env, policy, frames_per_batch=60, total_frames=120)
    for batch in collector:
        assert batch["next", "hidden"].any(-1).all()
        goes_on = ~batch["next", "done"][..., :-1, 0]
        assert torch.equal(
            batch["hidden"][..., 1:, :, :][goes_on], batch["next", "hidden"][..., :-1, :, :][goes_on]
        )
        assert not batch["hidden"][batch["is_init"][..., 0]].any()


# ------------------------------------------------------------ transforms of buffers
def stored_and_sampled(transform, data):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), transform=transform, batch_size=50)
    buffer.extend(data)
    return buffer.storage.get(range(len(buffer))), buffer.sample()


def test_buffer_calls_forward_on_read():
    data = TensorDict({"pixels": torch.randint(0, 255, (20, 8, 8, 3), dtype=torch.uint8)}, [20])
    stored, sample = stored_and_sampled(foreign.ToTensorImage(in_keys=["pixels"]), data)
    assert torch.equal(stored["pixels"], data["pixels"])
    assert sample["pixels"].shape == (50, 3, 8, 8) and sample["pixels"].dtype == torch.float32


def test_buffer_calls_inv_on_write():
    data = TensorDict({"a": torch.randn(20, 3)}, [20])
    stored, sample = stored_and_sampled(foreign.DoubleToFloat(in_keys=["a"], in_keys_inv=["a"]), data)
    assert stored["a"].dtype == torch.float64 and sample["a"].dtype == torch.float32
    stored, sample = stored_and_sampled(foreign.RenameTransform(["kept"], ["a"], ["kept"], ["a"]), data)
    assert set(stored.keys()) == {"kept"} and set(sample.keys()) == {"a"}
    assert torch.equal(stored["kept"], data["a"]) and set(data.keys()) == {"a"}


def test_buffer_applies_chains_of_transforms():
    chain = foreign.Compose(
        foreign.PermuteTransform((-1, -3, -2), in_keys=["pixels"], in_keys_inv=["pixels"]),
        foreign.RewardScaling(loc=1.0, scale=10.0, in_keys=["reward"]),
    )
    data = TensorDict({"pixels": torch.randn(20, 3, 8, 8), "reward": torch.ones(20, 1)}, [20])
    stored, sample = stored_and_sampled(chain, data)
    assert stored["pixels"].shape == (20, 8, 8, 3) and sample["pixels"].shape == (50, 3, 8, 8)
    assert torch.equal(stored["reward"], data["reward"]) and torch.equal(
        sample["reward"], torch.full((50, 1), 11.0)
    )


def test_buffer_applies_a_transform_of_trajectories():
    batch = SyncDataCollector(envs.Episodes, frames_per_batch=24, total_frames=24).next()
    stored, _ = stored_and_sampled(foreign.Reward2GoTransform(gamma=1.0), batch)
    rewards = batch["next", "reward"]
    expected = torch.stack([rewards[k : k - k % 3 + 3].sum() for k in range(24)])
    assert torch.allclose(stored["next", "reward"].flatten(), expected, atol=1e-5)
