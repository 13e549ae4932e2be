"""PPO on a continuous task; the environment is written in torch and moves several points at once."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


@dataclass
class Config:
    """The settings of a run."""

    points: int = 4
    limit: int = 25
    frames_per_batch: int = 1_000
    total_frames: int = 30_000
    epochs: int = 5
    minibatch: int = 250
    lr: float = 3e-3
    gamma: float = 0.95
    lmbda: float = 0.9
    clip: float = 0.2
    entropy: float = 1e-3
    seed: int = 1


class Reach(EnvBase):
    """Points on a line that are pushed towards a target; the reward is the negative distance."""

    batch_locked = True

    def __init__(self, points, device=None):
        super().__init__(device=device, batch_size=torch.Size([points]))
        self.observation_spec = Composite(
            position=Unbounded((points, 1)), target=Unbounded((points, 1)), shape=(points,)
        )
        self.action_spec = Bounded(-1.0, 1.0, (points, 1))
        self.reward_spec = Unbounded((points, 1))
        self._generator = torch.Generator()

    def _draw(self):
        return torch.rand((*self.batch_size, 1), generator=self._generator) * 2 - 1

    def _reset(self, tensordict=None):
        position, target = self._draw(), self._draw()
        if tensordict is not None and "_reset" in tensordict.keys():
            again = tensordict["_reset"].reshape(*self.batch_size, 1)
            if not again.all():
                position = torch.where(again, position, tensordict["position"])
                target = torch.where(again, target, tensordict["target"])
        done = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        return TensorDict(
            {"position": position, "target": target, "done": done, "terminated": done.clone()},
            self.batch_size,
        )

    def _step(self, tensordict):
        position = (tensordict["position"] + 0.3 * tensordict["action"].clamp(-1, 1)).clamp(-2, 2)
        done = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        return TensorDict(
            {
                "position": position,
                "target": tensordict["target"],
                "reward": -(position - tensordict["target"]).abs(),
                "done": done,
                "terminated": done.clone(),
            },
            self.batch_size,
        )

    def _set_seed(self, seed):
        self._generator.manual_seed(0 if seed is None else seed)


def make_env(config):
    return TransformedEnv(
        Reach(config.points),
        Compose(
            DoubleToFloat(),
            ObservationNorm(loc=0.0, scale=1.5, in_keys=["position"], standard_normal=True),
            StepCounter(max_steps=config.limit),
            RewardSum(),
        ),
    )


class Both(nn.Module):
    """A network of two inputs."""

    def __init__(self, out, head=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, out))
        self.head = nn.Identity() if head is None else head

    def forward(self, position, target):
        return self.head(self.layers(torch.cat([position, target], -1)))


def main(config):
    torch.manual_seed(config.seed)
    env = make_env(config)
    env.set_seed(config.seed)
    check_env_specs(env)

    actor = ProbabilisticActor(
        TensorDictModule(
            Both(2, NormalParamExtractor()),
            in_keys=["position", "target"],
            out_keys=["loc", "scale"],
        ),
        spec=env.action_spec,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": env.action_spec.space.low[0], "high": env.action_spec.space.high[0]},
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    critic = ValueOperator(Both(1), in_keys=["position", "target"])

    collector = Collector(
        env, actor, frames_per_batch=config.frames_per_batch, total_frames=config.total_frames, device="cpu"
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(max_size=config.frames_per_batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=config.minibatch,
    )
    advantage = GAE(
        gamma=config.gamma, lmbda=config.lmbda, value_network=critic, average_gae=True, time_dim=1
    )
    loss_fn = ClipPPOLoss(
        actor, critic, clip_epsilon=config.clip, entropy_coeff=config.entropy, critic_coeff=0.5
    )
    optimizer = torch.optim.Adam(loss_fn.parameters(), config.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, config.total_frames // config.frames_per_batch, 1e-4
    )

    for batch in collector:
        for _ in range(config.epochs):
            advantage(batch)
            buffer.extend(batch.reshape(-1))
            for _ in range(config.frames_per_batch // config.minibatch):
                losses = loss_fn(buffer.sample())
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        test = make_env(config)
        test.set_seed(0)
        rollout = test.rollout(config.limit, actor)
    print(f"return {rollout['next', 'episode_reward'][:, -1].mean().item():.2f}")
    collector.shutdown()


if __name__ == "__main__":
    main(Config())
