"""PPO on CartPole with collectors in processes; every batch has a share of each worker."""

import argparse
from functools import partial

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    ExplorationType,
    GymEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def make_env(name):
    env = GymEnv(name, categorical_action_encoding=True)
    return TransformedEnv(env, Compose(DoubleToFloat(), RewardSum(), StepCounter()))


def mlp(out):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--frames-per-batch", type=int, default=1_000)
    parser.add_argument("--total-frames", type=int, default=14_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--minibatch", type=int, default=125)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    proof = make_env("CartPole-v1")
    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=proof.action_spec,
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    adv = GAE(gamma=0.98, lmbda=0.95, value_network=critic, average_gae=True)
    loss_fn = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.005, loss_critic_type="smooth_l1")
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=2e-3)

    collector = MultiSyncCollector(
        [partial(make_env, "CartPole-v1")] * args.workers,
        actor,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        cat_results="stack",
        device="cpu",
        storing_device="cpu",
    )
    collector.set_seed(args.seed)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(args.frames_per_batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=args.minibatch,
    )

    frames = 0
    for i, batch in enumerate(collector):
        assert batch.shape == (args.workers, args.frames_per_batch // args.workers), batch.shape
        frames += batch.numel()
        for _ in range(args.epochs):
            with torch.no_grad():
                adv(batch)
            buffer.extend(batch.reshape(-1))
            for minibatch in buffer:
                losses = loss_fn(minibatch)
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss_fn.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        collector.update_policy_weights_()
        if i % 5 == 0:
            ended = batch["next", "episode_reward"][batch["next", "done"]]
            print(f"{frames} frames, return of its episodes {ended.mean().item():.0f}", flush=True)
    collector.shutdown()
    assert frames == args.total_frames, frames

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        proof.set_seed(7)
        returns = [proof.rollout(500, actor)["next", "episode_reward"][-1].item() for _ in range(5)]
    print(f"return {sum(returns) / len(returns):.1f}")


if __name__ == "__main__":
    main()
