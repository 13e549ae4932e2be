"""A recurrent DQN on CartPole-v1 without velocities, trained on slices of stored episodes.

    python examples/recurrent_slices.py --seed 0

The agent sees the cart's position and the pole's angle, but not how they move, so it has to remember. The policy is a
GRU that keeps its state from step to step. It learns on slices of consecutive steps. Each slice begins with a zero
state, and its first steps only warm up the state. The program learns until the mean return of the last 100 episodes
passes 150. A policy without memory, which pushes to the side that the pole leans to, lasts for about 40 steps.
"""

import argparse
import copy
import time

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.functional import one_hot, smooth_l1_loss

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from gleanrl.envs import GymWrapper

GOAL = 150.0


class PositionsOnly(gym.Wrapper):
    """Removes the velocities from the observation, and adds a flag on the first observation of an episode."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Dict(
            observation=gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            is_init=gym.spaces.MultiBinary(1),
        )

    def reset(self, **options):
        full, info = self.env.reset(**options)
        return self._seen(full, 1), info

    def step(self, action):
        full, reward, terminated, truncated, info = self.env.step(action)
        return self._seen(full, 0), reward, terminated, truncated, info

    def _seen(self, full: np.ndarray, is_init: int) -> dict[str, np.ndarray]:
        # Scaled up, because the network has to distinguish small changes from step to step.
        seen = full[[0, 2]] * np.array([2, 20], np.float32)
        return {"observation": seen, "is_init": np.full(1, is_init, np.int8)}


class RecurrentQ(nn.Module):
    """Computes the values of both actions after each observation of a sequence: (N, T, 2) float32 -> (N, T, 2)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gru = nn.GRU(2, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, observations: torch.Tensor, state: torch.Tensor | None = None):
        """Return the values and the state after the last step. The first state is `state`; None means zeros."""
        features, state = self.gru(observations, state)
        return self.head(features), state


class Policy(nn.Module):
    """Acts step by step. It keeps the network's state, and resets it at the start of an episode."""

    def __init__(self, q_net: RecurrentQ) -> None:
        super().__init__()
        self.q_net = q_net
        self.epsilon = 1.0
        self.state: torch.Tensor | None = None

    def forward(self, observation: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
        if is_init:
            self.state = None
        value, self.state = self.q_net(observation.view(1, 1, 2), self.state)
        if torch.rand(()) < self.epsilon:
            return one_hot(torch.randint(2, ()), 2)
        return one_hot(value[0, 0].argmax(-1), 2)


def td_loss(
    q_net: RecurrentQ, target_net: RecurrentQ, slices: TensorDictBase, burn_in: int, gamma: float
) -> torch.Tensor:
    """Return the double DQN loss on slices [N, T] of episodes. Each slice begins with a zero state."""
    after = slices["next"]
    # Within a slice, the next observation is the observation of the following step, so T + 1 of them are enough.
    observations = torch.cat([slices["observation"][:, :1], after["observation"]], 1)  # (N, T + 1, 2)
    values, _ = q_net(observations)
    value = (values[:, :-1] * slices["action"]).sum(-1, keepdim=True)  # (N, T, 1)
    with torch.no_grad():
        choice = values[:, 1:].argmax(-1, keepdim=True)
        bootstrap = target_net(observations)[0][:, 1:].gather(-1, choice)
        target = after["reward"] + gamma * bootstrap * ~after["terminated"]
    # A zero state is correct only at the start of an episode. In other slices the first steps only warm up the state.
    time_step = torch.arange(slices.shape[1])
    counts = (time_step >= burn_in) | slices["is_init"][:, 0].bool()  # (N, T)
    counts = counts & slices["collector", "mask"]  # without padding
    return smooth_l1_loss(value[counts], target[counts])


def learn(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Run the training loop and return (frames, mean return of the last 100 episodes) for each batch."""
    torch.manual_seed(args.seed)
    q_net = RecurrentQ()
    target_net = copy.deepcopy(q_net)
    policy = Policy(q_net)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=args.lr, fused=True)

    env = GymWrapper(PositionsOnly(gym.make("CartPole-v1")))
    env.set_seed(args.seed)
    collector = SyncDataCollector(
        env,
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        progress=True,
    )
    # Episodes shorter than a slice are padded to its length. A mask marks the real steps.
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50_000),
        sampler=SliceSampler(slice_len=args.slice_len, strict_length=False, pad=True),
        batch_size=args.num_slices * args.slice_len,
    )

    curve, updates = [], 0
    for batch in collector:
        buffer.extend(batch)
        stats = collector.stats()
        policy.epsilon = max(0.02, 1.0 - stats.stepped / args.exploration_frames)
        if len(buffer) >= 1_000:
            for _ in range(args.updates_per_batch):
                slices = buffer.sample().reshape(args.num_slices, args.slice_len)
                loss = td_loss(q_net, target_net, slices, args.burn_in, gamma=0.99)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                if updates % 250 == 0:
                    target_net.load_state_dict(q_net.state_dict())
        curve.append((stats.stepped, stats.mean_return))
        if stats.episodes >= 100 and stats.mean_return > GOAL:
            break
    collector.shutdown()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=int, default=100_000, help="frames after which to stop")
    parser.add_argument("--frames-per-batch", type=int, default=50)
    parser.add_argument("--updates-per-batch", type=int, default=8)
    parser.add_argument(
        "--exploration-frames", type=int, default=8_000, help="frames over which epsilon falls"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--num-slices", type=int, default=32)
    parser.add_argument("--slice-len", type=int, default=16)
    parser.add_argument("--burn-in", type=int, default=4, help="steps of a slice that only warm up the state")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with small networks, more threads only cost time

    begin = time.perf_counter()
    frames, mean_return = learn(args)[-1]
    verdict = "solved" if mean_return > GOAL else "not solved"
    seconds = time.perf_counter() - begin
    print(f"{verdict}: mean return {mean_return:.1f} after {frames:,} frames, {seconds:.0f} s")


if __name__ == "__main__":
    main()
