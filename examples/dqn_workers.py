"""DQN on CartPole-v1: worker processes collect while plain PyTorch learns.

    python examples/dqn_workers.py --seed 0

Each worker collects at its own pace, at most two batches ahead of the learner. So the policy of a batch is a few
updates old, which an off-policy learner tolerates. The program learns until the mean return of the last 100 episodes
passes 195. It prints the number of frames and the age of the oldest policy.
"""

import argparse
import copy
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

from gleanrl.collectors import MultiaSyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import Greedy, GymEnv

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


def learn(args: argparse.Namespace) -> tuple[int, float, int]:
    """Run the training loop and return frames, mean return of the last 100 episodes, and the oldest policy's age."""
    torch.manual_seed(args.seed)
    q_net = make_q_net()
    target_net = copy.deepcopy(q_net)
    explore = Greedy(one_hot=True, epsilon=1.0)  # workers get epsilon with the weights
    policy = nn.Sequential(q_net, explore)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=5e-4, fused=True)
    collector = MultiaSyncDataCollector(
        [lambda: GymEnv("CartPole-v1")] * args.workers,
        policy,
        frames_per_batch=50,
        total_frames=args.total_frames,
        track_policy_version=True,
    )
    collector.set_seed(args.seed)
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=128)

    updates = oldest = 0
    for batch in collector:
        buffer.extend(batch)
        stats = collector.stats()
        oldest = max(oldest, collector.policy_version - int(batch["policy_version"].min()))
        explore.epsilon.fill_(max(0.02, 1.0 - stats.stepped / 8_000))
        if len(buffer) >= 1_000:
            for _ in range(25):
                loss = td_loss(q_net, target_net, buffer.sample(), gamma=0.99)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                if updates % 250 == 0:
                    target_net.load_state_dict(q_net.state_dict())
        collector.update_policy_weights_()
        if stats.episodes >= 100 and stats.mean_return > SOLVED:
            break
    collector.shutdown()
    return stats.stepped, stats.mean_return, oldest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--total-frames", type=int, default=100_000, help="frames after which to stop")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with small networks, more threads only cost time

    begin = time.perf_counter()
    frames, mean_return, oldest = learn(args)
    verdict = "solved" if mean_return > SOLVED else "not solved"
    seconds = time.perf_counter() - begin
    print(f"{verdict}: mean return {mean_return:.1f} after {frames:,} frames, {seconds:.0f} s")
    print(f"The oldest policy that collected a batch was {oldest} versions old")


if __name__ == "__main__":
    main()
