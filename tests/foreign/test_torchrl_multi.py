"""TorchRL's environments, transforms, policies and losses work with collectors in processes (`make test-foreign`)."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

torchrl = pytest.importorskip("torchrl")

from tensordict.nn import TensorDictModule, TensorDictSequential  # noqa: E402
from torchrl import envs, modules, objectives  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

from gleanrl.collectors import (  # noqa: E402
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
)
from gleanrl.data import (  # noqa: E402
    LazyTensorStorage,
    TensorDictPrioritizedReplayBuffer,
)
from gleanrl.envs import (  # noqa: E402
    Compose,
    GymEnv,
    InitTracker,
    StepCounter,
    TransformedEnv,
)
from tests.foreign.torchrl_policies import gaussian  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

CLASSES = [MultiSyncDataCollector, MultiaSyncDataCollector]


@contextmanager
def collecting(cls, make, policy, **kwargs):
    kwargs = {"frames_per_batch": 40, "total_frames": 120, **kwargs}
    collector = cls([make] * 2, policy, **kwargs)
    try:
        yield collector
    finally:
        collector.shutdown()


def theirs():
    transforms = envs.Compose(envs.StepCounter(7), envs.RewardSum(), envs.DoubleToFloat())
    return envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), transforms)


def their_environment():
    return TransformedEnv(envs.GymEnv("Pendulum-v1"), StepCounter(7))


def their_transform():
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(StepCounter(7), envs.TrajCounter()))


def cartpole():
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(30), InitTracker()))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "make",
    [
        theirs,
        envs.EnvCreator(theirs),
        their_environment,
        their_transform,
        partial(envs.SerialEnv, 2, theirs),
    ],
    ids=["theirs", "creator", "environment", "transform", "serial"],
)
def test_torchrl_environments_and_actors_run_in_workers(cls, make):
    with collecting(cls, make, gaussian(GymEnv("Pendulum-v1").action_spec)) as collector:
        batches = list(collector)
    assert sum(batch.numel() for batch in batches) == 120
    for batch in batches:
        assert (batch["action"].abs() <= 2).all() and batch["action_log_prob"].isfinite().all()
        assert batch["next", "step_count"].max() == 7
        stays = ~batch["next", "done"][..., :-1, 0]
        assert torch.equal(
            batch["observation"][..., 1:, :][stays], batch["next", "observation"][..., :-1, :][stays]
        )


@pytest.mark.parametrize("cls", CLASSES)
def test_exploration_steps_reach_the_workers(cls):
    spec = cartpole().action_spec
    network = modules.QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=spec)
    explore = modules.EGreedyModule(spec, eps_init=1.0, eps_end=0.0, annealing_num_steps=10)
    with collecting(cls, cartpole, TensorDictSequential(network, explore), total_frames=400) as collector:
        greedy = []
        for batch in collector:
            chosen = batch["action_value"].argmax(-1) == batch["action"].long().argmax(-1)
            greedy.append(chosen.float().mean().item())
            explore.step(10)
            collector.update_policy_weights_()
    assert greedy[0] < 0.9 and greedy[-3:] == [1.0] * 3


@pytest.mark.parametrize("cls", CLASSES)
def test_recurrent_states_and_primers_work_in_workers(cls):
    lstm = modules.LSTMModule(input_size=4, hidden_size=5, in_key="observation", out_key="embedding")
    head = TensorDictModule(nn.Linear(5, 2), ["embedding"], ["action_value"])
    value = modules.QValueModule(spec=cartpole().action_spec)

    def make():
        return cartpole().append_transform(lstm.make_tensordict_primer())

    with collecting(cls, make, TensorDictSequential(lstm, head, value)) as collector:
        for batch in collector:
            stays, began = ~batch["next", "done"][..., :-1, 0], batch["is_init"][..., 0]
            for key in ("recurrent_state_h", "recurrent_state_c"):
                state, after = batch[key], batch["next", key]
                assert not state[began].any() and after.any()
                assert torch.equal(state[..., 1:, :, :][stays], after[..., :-1, :, :][stays])


def test_policy_loss_runs_on_batches_of_all_workers():
    actor = gaussian(GymEnv("Pendulum-v1").action_spec)
    critic = modules.ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    loss = objectives.ClipPPOLoss(actor, critic)
    with collecting(MultiSyncDataCollector, theirs, actor, cat_results="stack") as collector:
        for batch in collector:
            GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
            losses = loss(batch.reshape(-1))
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            assert next(actor.parameters()).grad.abs().sum() > 0
            assert losses["kl_approx"].abs() < 1e-3  # the log-probabilities belong to the policy that acted


def test_value_loss_and_priorities_run_on_batches_of_single_workers():
    network = modules.QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=cartpole().action_spec)
    loss = objectives.DQNLoss(network, action_space=cartpole().action_spec)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(120), batch_size=32
    )
    with collecting(MultiaSyncDataCollector, cartpole, network, replay_buffer=buffer) as collector:
        assert list(collector) == [None] * 3
    sample = buffer.sample()
    loss(sample)["loss"].backward()
    buffer.update_tensordict_priority(sample)
    assert len(buffer) == 120 and next(network.parameters()).grad.abs().sum() > 0
