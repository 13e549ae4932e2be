"""SAC on Pendulum-v1: gleanrl collects and stores data, plain PyTorch learns.

    python examples/sac_pendulum.py --seed 0

Every member of the policy runs in gleanrl's core: network, normal distribution and squashing. The program prints the
mean return of all episodes, so that a policy that learns earlier scores higher.
"""

import argparse
import copy
import math
import time

import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Normal
from torch.nn.functional import mse_loss, softplus

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv

TORQUE, GAMMA, TAU, ENTROPY = 2.0, 0.99, 0.005, -1.0


class Squash(nn.Module):
    """Limits raw actions to the torques of the environment: (..., 1) -> (..., 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = TORQUE  # the core reads numbers of the module, but no global names

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return self.limit * torch.tanh(raw)


def make_net(inputs: int, outputs: int, *last: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs), *last
    )


def make_policy() -> ProbabilisticTensorDictSequential:
    """Return a policy: observation (3,) -> mean and scale (1,) -> a raw action -> a torque in [-2, 2]."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(make_net(3, 2, NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["raw_action"], distribution_class=Normal),
        TensorDictModule(Squash(), ["raw_action"], ["action"]),
    )


class Critic(nn.Module):
    """Two independent estimates of the value of an action: (B, 3), (B, 1) -> (2, B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(make_net(4, 1) for _ in range(2))

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        both = torch.cat([observation, action / TORQUE], -1)
        return torch.stack([net(both) for net in self.nets])


def act(policy, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random actions with gradients, and their log-probabilities, both (B, 1)."""
    drawn = Normal(*policy[0].module(observation))
    raw = drawn.rsample()
    # log |d tanh(x) / dx| in a form that does not overflow
    squashing = 2 * (math.log(2) - raw - softplus(-2 * raw)) + math.log(TORQUE)
    return policy[2].module(raw), drawn.log_prob(raw) - squashing


class Learner:
    """Updates policy, critic and temperature."""

    def __init__(self, policy: ProbabilisticTensorDictSequential, lr: float) -> None:
        self.policy, self.critic = policy, Critic()
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.of_policy = torch.optim.Adam(policy.parameters(), lr, fused=True)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr, fused=True)
        self.of_alpha = torch.optim.Adam([self.log_alpha], lr)

    def update(self, batch) -> None:
        """Make one step of each optimizer with a batch of B transitions."""
        observation, after, alpha = batch["observation"], batch["next"], self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = act(self.policy, after["observation"])
            value = self.target(after["observation"], action).amin(0) - alpha * log_prob
            # Bootstrap truncated episodes too: only a terminated one has no future reward.
            goal = after["reward"] + GAMMA * value * ~after["terminated"]
        error = mse_loss(self.critic(observation, batch["action"]), goal.expand(2, -1, -1))
        self._step(self.of_critic, error)
        action, log_prob = act(self.policy, observation)
        self._step(self.of_policy, (alpha * log_prob - self.critic(observation, action).amin(0)).mean())
        self._step(self.of_alpha, -self.log_alpha * (log_prob.detach() + ENTROPY).mean())
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, TAU)

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def learn(args: argparse.Namespace) -> tuple[int, float]:
    """Run the training loop and return frames and mean return of the last 100 episodes."""
    torch.manual_seed(args.seed)
    policy = make_policy()
    learner = Learner(policy, args.lr)
    collector = SyncDataCollector(
        GymEnv("Pendulum-v1"),
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        init_random_frames=1_000,
        policy_backend=args.policy_backend,
    )
    collector.set_seed(args.seed)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=128)
    buffer.set_seed(args.seed)
    for batch in collector:
        buffer.extend(batch)
        if len(buffer) >= 1_000:
            for _ in range(args.updates_per_batch):
                learner.update(buffer.sample())
    stats = collector.stats()
    collector.shutdown()
    return stats.stepped, stats.mean_return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=int, default=12_000, help="frames after which to stop")
    parser.add_argument("--frames-per-batch", type=int, default=50)
    parser.add_argument("--updates-per-batch", type=int, default=25)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--policy-backend", choices=("auto", "torch", "native"), default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with small networks, more threads only cost time

    begin = time.perf_counter()
    frames, mean_return = learn(args)
    seconds = time.perf_counter() - begin
    print(f"mean return {mean_return:.1f} after {frames:,} frames, {seconds:.0f} s")


if __name__ == "__main__":
    main()
