"""TorchRL's losses with gleanrl's specs run forward and backward on gleanrl's batches (`make test-foreign`)."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

torchrl = pytest.importorskip("torchrl")

from tensordict.nn import TensorDictModule  # noqa: E402
from torchrl import modules, objectives  # noqa: E402

from gleanrl.collectors import SyncDataCollector  # noqa: E402
from gleanrl.data import (  # noqa: E402
    Categorical,
    Composite,
    Unbounded,
)
from gleanrl.envs import (  # noqa: E402
    EnvBase,
    GymEnv,
)
from tests.foreign.torchrl_policies import gaussian  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


@functools.cache
def specs_and_batch(name, **kwargs):
    env = GymEnv(name, **kwargs)
    spec = env.action_spec
    policy = chooses(spec) if name == "CartPole-v1" else gaussian(spec)
    collector = SyncDataCollector(env, policy, frames_per_batch=32, total_frames=32, set_truncated=True)
    return spec, next(iter(collector)).exclude("collector")


def module(net, *keys, out):
    return TensorDictModule(net, list(keys), [out])


class Both(nn.Module):
    """A network of observation and action."""

    def __init__(self, out=1):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, out))

    def forward(self, observation, action):
        return self.net(torch.cat([observation, action.float()], -1))


def chooses(spec):
    return modules.ProbabilisticActor(
        module(nn.Linear(4, 2), "observation", out="logits"),
        in_keys=["logits"],
        spec=spec,
        distribution_class=modules.OneHotCategorical,
        return_log_prob=True,
    )


def values(spec):
    return modules.QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=spec)


def distributions(spec):
    net = nn.Sequential(nn.Linear(4, 10), nn.Unflatten(-1, (5, 2)), nn.LogSoftmax(-2))
    return modules.DistributionalQValueActor(
        net, in_keys=["observation"], spec=spec, support=torch.arange(5.0)
    )


def follows(spec):
    return modules.Actor(nn.Linear(3, 1), in_keys=["observation"], spec=spec)


def value(width=3):
    return modules.ValueOperator(nn.Linear(width, 1), in_keys=["observation"])


def q_value(out=1):
    net = module(Both(out), "observation", "action", out="state_action_value")
    _, batch = specs_and_batch("Pendulum-v1")
    net(batch.copy())  # materialises the lazy parameters
    return net


def rnd():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def q_values(key="action_value"):
    return module(nn.Linear(4, 2), "observation", out=key)


VALUES = {
    "A2CLoss": lambda s: objectives.A2CLoss(gaussian(s), value()),
    "BCLoss": lambda s: objectives.BCLoss(gaussian(s)),
    "CQLLoss": lambda s: objectives.CQLLoss(gaussian(s), q_value(), action_spec=s),
    "ClipPPOLoss": lambda s: objectives.ClipPPOLoss(gaussian(s), value()),
    "CrossQLoss": lambda s: objectives.CrossQLoss(gaussian(s), q_value(), action_spec=s),
    "DDPGLoss": lambda s: objectives.DDPGLoss(follows(s), q_value()),
    "IQLLoss": lambda s: objectives.IQLLoss(gaussian(s), q_value(), value()),
    "KLPENPPOLoss": lambda s: objectives.KLPENPPOLoss(gaussian(s), value()),
    "PPOLoss": lambda s: objectives.PPOLoss(gaussian(s), value()),
    "REDQLoss": lambda s: objectives.REDQLoss(gaussian(s), q_value(), action_spec=s),
    "ReinforceLoss": lambda s: objectives.ReinforceLoss(gaussian(s), value()),
    "RNDLoss": lambda s: objectives.RNDLoss(rnd(), rnd()),
    "SACLoss": lambda s: objectives.SACLoss(gaussian(s), q_value(), action_spec=s),
    "SACLoss with a value network": lambda s: objectives.SACLoss(
        gaussian(s), q_value(), value(), action_spec=s
    ),
    "TD3BCLoss": lambda s: objectives.TD3BCLoss(follows(s), q_value(), action_spec=s),
    "TD3Loss": lambda s: objectives.TD3Loss(follows(s), q_value(), action_spec=s),
    "TQCLoss": lambda s: objectives.TQCLoss(gaussian(s), q_value(5), action_spec=s),
}

CHOICES = {
    "A2CLoss of choices": lambda s: objectives.A2CLoss(chooses(s), value(4)),
    "ClipPPOLoss of choices": lambda s: objectives.ClipPPOLoss(chooses(s), value(4)),
    "DQNLoss": lambda s: objectives.DQNLoss(values(s), action_space=s),
    "DQNLoss, double": lambda s: objectives.DQNLoss(values(s), double_dqn=True),
    "DiscreteCQLLoss": lambda s: objectives.DiscreteCQLLoss(values(s), action_space=s),
    "DiscreteIQLLoss": lambda s: objectives.DiscreteIQLLoss(
        chooses(s), q_values("state_action_value"), value(4), action_space=s
    ),
    "DiscreteSACLoss": lambda s: objectives.DiscreteSACLoss(
        chooses(s), q_values(), action_space=s, num_actions=s.space.n
    ),
    "DistributionalDQNLoss": lambda s: objectives.DistributionalDQNLoss(distributions(s), gamma=0.9),
}


def check(loss, batch):
    if hasattr(loss, "make_value_estimator"):
        with contextlib.suppress(NotImplementedError):  # a loss without values
            loss.make_value_estimator()
    out = loss(batch.clone())
    losses = [out[key] for key in out.keys() if key == "loss" or key.startswith("loss_")]
    assert losses and all(torch.isfinite(each).all() for each in losses)
    sum(each.sum() for each in losses).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in loss.parameters())


@pytest.mark.parametrize("name", VALUES)
def test_losses_of_continuous_actions_run(name):
    spec, batch = specs_and_batch("Pendulum-v1")
    check(VALUES[name](spec), batch)


@pytest.mark.parametrize("name", CHOICES)
def test_losses_of_discrete_actions_run(name):
    spec, batch = specs_and_batch("CartPole-v1")
    check(CHOICES[name](spec), batch)


def test_losses_read_the_action_space_of_integer_specs():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    spec = env.action_spec
    network = values(spec)
    batch = next(iter(SyncDataCollector(env, network, frames_per_batch=32, total_frames=32)))
    check(objectives.DQNLoss(network, action_space=spec), batch)


class Team(EnvBase):
    """Three agents that choose one of two actions for a shared reward."""

    def __init__(self):
        super().__init__()
        each = {"observation": Unbounded((3, 4))}
        self.observation_spec = Composite(agents=Composite(each, shape=(3,)))
        self.action_spec = Composite(agents=Composite(action=Categorical(2, (3,)), shape=(3,)))
        self.reward_spec = Unbounded(1)

    def _reset(self, tensordict=None, **kwargs):
        return self.observation_spec.rand()

    def _step(self, tensordict):
        reward = tensordict["agents", "action"].sum(-1, keepdim=True).float()
        return self.observation_spec.rand().update(
            {"reward": reward, "done": torch.zeros(1, dtype=torch.bool)}
        )

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def test_qmixer_loss_runs_for_several_agents():
    env = Team()
    spec = env.full_action_spec["agents", "action"]
    keys = [("agents", key) for key in ("action", "action_value", "chosen_action_value")]
    network = modules.SafeSequential(
        TensorDictModule(nn.Linear(4, 2), [("agents", "observation")], [keys[1]]),
        modules.QValueModule(action_value_key=keys[1], out_keys=keys, spec=spec, strict_shape=False),
    )
    mixer = TensorDictModule(modules.VDNMixer(n_agents=3, device="cpu"), [keys[2]], ["chosen_action_value"])
    batch = next(iter(SyncDataCollector(env, network, frames_per_batch=8, total_frames=8)))
    check(objectives.QMixerLoss(network, mixer, action_space=spec), batch)


# These losses need data that no environment returns: sequences of returns, chunks of actions, latents of a world model,
# an expert's data in addition to the policy's, or advantages of several agents.
ELSEWHERE = {
    *("ACTLoss", "DTLoss", "DiffusionBCLoss", "DreamerActorLoss", "DreamerModelLoss", "DreamerV3ActorLoss"),
    *("DreamerV3Loss", "DreamerV3ModelLoss", "DreamerV3ValueLoss", "DreamerValueLoss"),
    *("ExponentialQuadraticCost", "GAILLoss", "IPPOLoss", "LossModule", "MAPPOLoss", "OnlineDTLoss"),
    "WorldModelLoss",
}


def test_every_loss_of_torchrl_is_listed():
    tried = {"QMixerLoss"} | {name.partition(" ")[0].rstrip(",") for name in (*VALUES, *CHOICES)}
    losses = {
        name
        for name, value in vars(objectives).items()
        if isinstance(value, type) and issubclass(value, objectives.LossModule)
    }
    assert losses - tried <= ELSEWHERE
