"""DQN with prioritized replay on CartPole-v1.

    python examples/per_dqn_cartpole.py --seed 0

Only the buffer differs from `examples/dqn_cartpole.py`. It draws transitions in proportion to a power of their last
temporal-difference error. Importance weights in the loss correct for that. The program learns until the mean return of
the last 100 episodes passes 195.
"""

import argparse
import copy
import time

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictPrioritizedReplayBuffer
from gleanrl.envs import Greedy, GymEnv

SOLVED = 195.0


def make_q_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def td_error(q_net: nn.Module, target_net: nn.Module, batch: TensorDictBase, gamma: float) -> torch.Tensor:
    """Return the difference (B,) of each value from its double DQN target."""
    value = (q_net(batch["observation"]) * batch["action"]).sum(-1, keepdim=True)  # (B, 1)
    after = batch["next"]
    with torch.no_grad():
        choice = q_net(after["observation"]).argmax(-1, keepdim=True)
        bootstrap = target_net(after["observation"]).gather(-1, choice)
        # Bootstrap truncated episodes too: only a terminated one has no future reward.
        target = after["reward"] + gamma * bootstrap * ~after["terminated"]
    return (value - target).squeeze(-1)


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
    # A new transition gets the largest priority so far, so that it is likely to be drawn soon.
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=args.alpha,
        beta=args.beta,
        eps=1e-2,
        storage=LazyTensorStorage(50_000),
        batch_size=128,
    )
    assert isinstance(buffer.sampler, PrioritizedSampler)  # for type checkers, because `beta` changes below

    curve, updates = [], 0
    for batch in collector:
        buffer.extend(batch)
        stats = collector.stats()
        explore.epsilon.fill_(max(0.02, 1.0 - stats.stepped / args.exploration_frames))
        # The correction by importance weights is complete (beta 1) at the end of the run.
        buffer.sampler.beta = args.beta + (1.0 - args.beta) * stats.stepped / args.total_frames
        if len(buffer) >= 1_000:
            for _ in range(args.updates_per_batch):
                sample = buffer.sample()
                error = td_error(q_net, target_net, sample, gamma=0.99)
                loss = (sample["_weight"] * error.square()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sample["td_error"] = error.detach().abs()
                buffer.update_tensordict_priority(sample)
                updates += 1
                if updates % 250 == 0:
                    target_net.load_state_dict(q_net.state_dict())
        curve.append((stats.stepped, stats.mean_return))
        if stats.episodes >= 100 and stats.mean_return > SOLVED:
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
    parser.add_argument("--updates-per-batch", type=int, default=25)
    parser.add_argument(
        "--exploration-frames", type=int, default=8_000, help="frames over which epsilon falls"
    )
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument(
        "--alpha", type=float, default=0.4, help="exponent of priorities: 0 draws uniformly, 1 in proportion"
    )
    parser.add_argument(
        "--beta", type=float, default=0.4, help="first exponent of importance weights; it grows to 1"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # with small networks, more threads only cost time

    begin = time.perf_counter()
    frames, mean_return = learn(args)[-1]
    verdict = "solved" if mean_return > SOLVED else "not solved"
    seconds = time.perf_counter() - begin
    print(f"{verdict}: mean return {mean_return:.1f} after {frames:,} frames, {seconds:.0f} s")


if __name__ == "__main__":
    main()
