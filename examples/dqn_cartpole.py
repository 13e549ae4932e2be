"""DQN on CartPole-v1: gleanrl collects and stores data, plain PyTorch learns.

    python examples/dqn_cartpole.py --seed 0
    python examples/dqn_cartpole.py --resume  # kill it at any time; the same command resumes from the last checkpoint

The program first compares the speed of the collector with a hand-written loop. Then it learns until the mean return of
the last 100 episodes passes 195. It writes the learning curve to `out/dqn_cartpole.png`.
"""

import argparse
import copy
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import mse_loss

from gleanrl import Checkpoint
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import Greedy, GymEnv
from gleanrl.errors import IncompleteCheckpointError

SOLVED = 195.0


def make_q_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def td_loss(q_net: nn.Module, target_net: nn.Module, batch, gamma: float) -> torch.Tensor:
    """Return the double DQN loss: the online network chooses the next action, the target network values it."""
    value = (q_net(batch["observation"]) * batch["action"]).sum(-1, keepdim=True)  # (B, 1)
    after = batch["next"]
    with torch.no_grad():
        choice = q_net(after["observation"]).argmax(-1, keepdim=True)
        bootstrap = target_net(after["observation"]).gather(-1, choice)
        # Bootstrap truncated episodes too: only a terminated one has no future reward.
        target = after["reward"] + gamma * bootstrap * ~after["terminated"]
    return mse_loss(value, target)


def learn(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Run the training loop and return (frames, mean return of the last 100 episodes) for each batch."""
    torch.manual_seed(args.seed)
    q_net = make_q_net()
    target_net = copy.deepcopy(q_net)
    explore = Greedy(one_hot=True, epsilon=1.0)
    policy = nn.Sequential(q_net, explore)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=args.lr, fused=True)

    env = GymEnv("CartPole-v1")
    env.set_seed(args.seed)
    collector = SyncDataCollector(
        env,
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        progress=True,
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000, compact=args.compact), batch_size=128)
    buffer.set_seed(args.seed)

    progress: dict[str, Any] = {"updates": 0, "curve": []}
    checkpoint = Checkpoint(
        collector=collector, buffer=buffer, target_net=target_net, optimizer=optimizer, progress=progress
    )
    if args.resume:
        with suppress(IncompleteCheckpointError):  # the first run has no checkpoint
            checkpoint.load(args.checkpoints)
            print(f"Resuming after {collector.stats().stepped:,} frames")

    for batch in collector:
        buffer.extend(batch)
        stats = collector.stats()
        explore.epsilon.fill_(max(0.02, 1.0 - stats.stepped / args.exploration_frames))
        if len(buffer) >= 1_000:
            for _ in range(args.updates_per_batch):
                loss = td_loss(q_net, target_net, buffer.sample(), gamma=0.99)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress["updates"] += 1
                if progress["updates"] % 250 == 0:
                    target_net.load_state_dict(q_net.state_dict())
        progress["curve"].append((stats.stepped, stats.mean_return))
        if args.resume and stats.batches % args.save_every == 0:
            checkpoint.save(args.checkpoints)
        if not args.no_stop and stats.episodes >= 100 and stats.mean_return > SOLVED:
            break
    collector.shutdown()
    return progress["curve"]


def hand_written_loop(policy: nn.Module, frames: int, steps: int) -> float:
    """Return the frames per second of a hand-written loop that stores the same fields in new arrays for each batch."""
    env = gym.make("CartPole-v1", disable_env_checker=True)
    current, _ = env.reset(seed=0)
    episode, begin = 0, time.perf_counter()
    with torch.no_grad():
        for _ in range(frames // steps):
            obs = np.empty((steps, 4), np.float32)
            next_obs, action = np.empty_like(obs), np.zeros((steps, 2), np.int64)
            reward, flags = np.empty((steps, 1), np.float32), np.zeros((6, steps, 1), bool)
            ids = np.empty(steps, np.int64)
            for t in range(steps):
                obs[t], ids[t] = current, episode
                action[t] = policy(torch.from_numpy(current)).numpy()
                current, reward[t], terminated, truncated, _ = env.step(int(action[t].argmax()))
                next_obs[t] = current
                flags[0, t], flags[1, t], flags[2, t] = terminated or truncated, terminated, truncated
                if terminated or truncated:
                    current, _ = env.reset()
                    episode += 1
    return frames // steps * steps / (time.perf_counter() - begin)


def collector_speed(policy: nn.Module, frames: int, steps: int) -> float:
    """Return the frames per second of the collector with the same policy."""
    env = GymEnv("CartPole-v1")
    collector = SyncDataCollector(env, policy, frames_per_batch=steps, total_frames=frames)
    begin = time.perf_counter()
    for _ in collector:
        pass
    return frames / (time.perf_counter() - begin)


def compare_speed(rounds: int = 5, frames: int = 2_000) -> None:
    policy = nn.Sequential(make_q_net(), Greedy(one_hot=True, epsilon=0.05))
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(collector_speed(policy, frames, 200))
        theirs.append(hand_written_loop(policy, frames, 200))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(
        f"Collection: {statistics.median(ours):,.0f} frames/s; hand-written loop: "
        f"{statistics.median(theirs):,.0f} frames/s; ratio {ratio:.2f} (medians of {rounds} alternating rounds)"
    )


def draw(curve: list[tuple[int, float]], path: Path) -> None:
    frames, returns = zip(*curve, strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(frames, returns)
    axes.axhline(SOLVED, linestyle="--", linewidth=1, color="gray")
    axes.set(xlabel="frames", ylabel="mean return of the last 100 episodes", title="DQN on CartPole-v1")
    figure.savefig(path, dpi=120)
    print(f"Learning curve: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=int, default=100_000, help="frames after which to stop")
    parser.add_argument("--frames-per-batch", type=int, default=50)
    parser.add_argument("--updates-per-batch", type=int, default=25)
    parser.add_argument(
        "--exploration-frames", type=int, default=8_000, help="frames over which epsilon falls"
    )
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument(
        "--compact", action="store_true", help="store each observation once; the results are the same"
    )
    parser.add_argument("--no-stop", action="store_true", help="continue after the task is solved")
    parser.add_argument(
        "--resume", action="store_true", help="save checkpoints, and resume from the last one if it exists"
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("out/dqn_cartpole"), help="folder for checkpoints"
    )
    parser.add_argument("--save-every", type=int, default=20, help="batches between two checkpoints")
    parser.add_argument(
        "--out", type=Path, default=Path("out/dqn_cartpole.png"), help="file for the learning curve"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # with small networks, more threads only cost time

    compare_speed()
    begin = time.perf_counter()
    curve = learn(args)
    frames, mean_return = curve[-1]
    verdict = "solved" if mean_return > SOLVED else "not solved"
    seconds = time.perf_counter() - begin
    print(f"{verdict}: mean return {mean_return:.1f} after {frames:,} frames, {seconds:.0f} s")
    draw(curve, args.out)


if __name__ == "__main__":
    main()
