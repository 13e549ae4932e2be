"""DQN on CartPole-v1 with Ray: collectors and replay buffer in separate processes, on this machine or a cluster.

    python examples/ray_dqn.py --seed 0
    python examples/ray_dqn.py --address auto --collectors 16    # on a cluster that was started with `ray start`

Collectors send their batches directly to the buffer's actor. This process prefetches samples from it, learns, and sends
weights to the collectors. After every thousand frames it runs 20 episodes without exploration. It stops when their mean
return passes 195, after about 5,000 frames and less than a minute on two cores.
"""

import argparse
import copy
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

from gleanrl.collectors.distributed import RayCollector
from gleanrl.data import LazyTensorStorage, RayReplayBuffer
from gleanrl.envs import Greedy, GymEnv

SOLVED = 195.0
EPISODES = 20
TRIED_EVERY = 1_000
"""Frames between two trials without exploration."""


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


def greedy_return(q_net: nn.Module) -> float:
    """Return the mean return of episodes without exploration, in this process."""
    greedy = nn.Sequential(q_net, Greedy(one_hot=True))
    env = GymEnv("CartPole-v1")
    env.set_seed(1)
    with torch.no_grad():
        return (
            sum(env.rollout(500, greedy)["next", "reward"].sum().item() for _ in range(EPISODES)) / EPISODES
        )


def learn(args: argparse.Namespace) -> tuple[int, float]:
    """Run the training loop and return frames and the mean return of the last trial."""
    torch.manual_seed(args.seed)
    q_net = make_q_net()
    target_net = copy.deepcopy(q_net)
    explore = Greedy(one_hot=True, epsilon=1.0)  # collectors get epsilon with the weights
    policy = nn.Sequential(q_net, explore)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=5e-4, fused=True)
    ray = {"include_dashboard": False} if args.address is None else {"address": args.address}
    buffer = RayReplayBuffer(
        storage=LazyTensorStorage(50_000), batch_size=128, prefetch=16, seed=args.seed, ray_init_config=ray
    )
    collector = RayCollector(
        lambda: GymEnv("CartPole-v1"),
        policy,
        num_collectors=args.collectors,
        frames_per_batch=50,
        total_frames=args.total_frames,
        replay_buffer=buffer,
    )
    collector.set_seed(args.seed)

    updates, trials, found = 0, 0, 0.0
    for _ in collector:  # each item means that a batch has been written to the buffer
        stats = collector.stats()
        explore.epsilon.fill_(max(0.02, 1.0 - stats.delivered / 8_000))
        if stats.delivered >= 1_000:
            for _ in range(25):
                loss = td_loss(q_net, target_net, buffer.sample(), gamma=0.99)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                if updates % 250 == 0:
                    target_net.load_state_dict(q_net.state_dict())
        collector.update_policy_weights_()
        if stats.delivered // TRIED_EVERY > trials:
            trials, found = stats.delivered // TRIED_EVERY, greedy_return(q_net)
            if found > SOLVED:
                break
    collector.shutdown()
    buffer.shutdown()
    return stats.delivered, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collectors", type=int, default=2)
    parser.add_argument(
        "--address", help="address of a cluster, or 'auto'; by default Ray starts on this machine"
    )
    parser.add_argument("--total-frames", type=int, default=100_000, help="frames after which to stop")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with small networks, more threads only cost time

    begin = time.perf_counter()
    frames, mean_return = learn(args)
    verdict = "solved" if mean_return > SOLVED else "not solved"
    seconds = time.perf_counter() - begin
    print(f"{verdict}: mean return {mean_return:.1f} after {frames:,} frames, {seconds:.0f} s")


if __name__ == "__main__":
    main()
