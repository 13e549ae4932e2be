"""DQN on CartPole with prioritized replay, three-step returns and a schedule for epsilon, evaluated while it learns."""

import argparse

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, MultiStep, TensorDictPrioritizedReplayBuffer
from torchrl.envs import Compose, ExplorationType, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate


def make_env():
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))


def evaluate(env, policy, episodes=3):
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        returns = [env.rollout(500, policy)["next", "episode_reward"][-1].item() for _ in range(episodes)]
    return sum(returns) / episodes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=8_000)
    parser.add_argument("--frames-per-batch", type=int, default=64)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    env = make_env()
    env.set_seed(args.seed)
    eval_env = make_env()
    eval_env.set_seed(args.seed + 100)

    network = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[64, 64]),
        in_keys=["observation"],
        spec=env.action_spec,
    )
    explore = EGreedyModule(env.action_spec, eps_init=0.6, eps_end=0.05, annealing_num_steps=3_000)
    policy = TensorDictSequential(network, explore)

    collector = Collector(
        env,
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        init_random_frames=512,
        postproc=MultiStep(gamma=args.gamma, n_steps=3),
    )
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.5,
        priority_key="td_error",
        storage=LazyTensorStorage(8_000),
        batch_size=64,
    )
    loss_fn = DQNLoss(network, action_space=env.action_spec, delay_value=True)
    loss_fn.make_value_estimator(gamma=args.gamma)
    target = SoftUpdate(loss_fn, eps=0.98)
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=1e-3)

    frames, best = 0, 0.0
    for batch in collector:
        frames += batch.numel()
        explore.step(batch.numel())
        buffer.extend(batch.reshape(-1))
        if frames <= 512:
            continue
        for _ in range(args.updates):
            sample = buffer.sample()
            loss = loss_fn(sample)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            target.step()
            buffer.update_tensordict_priority(sample)
        collector.update_policy_weights_()
        if frames % 1_024 == 0:
            best = max(best, evaluate(eval_env, network))
            print(f"{frames} frames: best so far {best:.0f}, epsilon {explore.eps.item():.2f}", flush=True)
            if best > 300:
                break
    collector.shutdown()
    print(f"return {best:.1f}")


if __name__ == "__main__":
    main()
