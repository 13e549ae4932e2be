"""PPO on CartPole-v1: two worker processes collect, plain PyTorch learns.

    python examples/ppo_workers.py --seed 0

Every batch has steps of each worker, collected with the learner's current weights. The program learns until the mean
return of the last 100 episodes passes 195, and prints the number of frames.
"""

import argparse
import time

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from gleanrl.collectors import MultiSyncDataCollector
from gleanrl.envs import GymEnv

SOLVED = 195.0
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def make_policy() -> TensorDictSequential:
    """Return a policy: observation (4,) -> logits (2,) -> a random action and its log-probability."""
    return TensorDictSequential(
        TensorDictModule(make_net(2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=Categorical,
            return_log_prob=True,
            log_prob_key="log_prob",
        ),
    )


def advantages(batch, critic: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalised advantages and the targets of the critic, both `[workers, T]`."""
    with torch.no_grad():
        value = critic(batch["observation"]).squeeze(-1)
        after = critic(batch["next", "observation"]).squeeze(-1)
    reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
    # Bootstrap truncated episodes too: only a terminated one has no future reward.
    delta = reward + GAMMA * after * ~batch["next", "terminated"].squeeze(-1) - value
    found, advantage = torch.zeros_like(delta), torch.zeros(len(delta))
    for t in reversed(range(delta.shape[-1])):
        advantage = delta[:, t] + GAMMA * LAMBDA * ~done[:, t] * advantage
        found[:, t] = advantage
    return found, found + value


def improve(policy, critic, optimizer, batch, epochs: int, minibatch: int) -> None:
    """Optimize the clipped objective over a batch `[workers, T]` for some epochs."""
    advantage, target = (part.reshape(-1) for part in advantages(batch, critic))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    observation, action = batch["observation"].reshape(-1, 4), batch["action"].reshape(-1)
    before = batch["log_prob"].reshape(-1)
    for _ in range(epochs):
        for rows in torch.randperm(len(action)).split(minibatch):
            drawn = Categorical(logits=policy[0].module(observation[rows]))
            ratio = (drawn.log_prob(action[rows]) - before[rows]).exp()
            gain = torch.min(
                ratio * advantage[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[rows]
            ).mean()
            error = (critic(observation[rows]).squeeze(-1) - target[rows]).square().mean()
            optimizer.zero_grad()
            (0.5 * error - gain - ENTROPY * drawn.entropy().mean()).backward()
            nn.utils.clip_grad_norm_([*policy.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


def learn(args: argparse.Namespace) -> tuple[int, float]:
    """Run the training loop and return frames and mean return of the last 100 episodes."""
    torch.manual_seed(args.seed)
    policy, critic = make_policy(), make_net(1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=1e-3)
    collector = MultiSyncDataCollector(
        [make_env] * args.workers,
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        cat_results="stack",
        policy_backend=args.policy_backend,
    )
    collector.set_seed(args.seed)
    for batch in collector:
        stats = collector.stats()
        if stats.episodes >= 100 and stats.mean_return > SOLVED:
            break
        improve(policy, critic, optimizer, batch, epochs=10, minibatch=256)
    collector.shutdown()
    return stats.stepped, stats.mean_return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--total-frames", type=int, default=200_000, help="frames after which to stop")
    parser.add_argument("--frames-per-batch", type=int, default=2_000)
    parser.add_argument("--policy-backend", choices=("auto", "torch", "native"), default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with small networks, more threads only cost time

    begin = time.perf_counter()
    frames, mean_return = learn(args)
    verdict = "solved" if mean_return > SOLVED else "not solved"
    seconds = time.perf_counter() - begin
    print(f"{verdict}: mean return {mean_return:.1f} after {frames:,} frames, {seconds:.0f} s")


if __name__ == "__main__":
    main()
