"""A2C with separate networks for policy and value, evaluated at intervals and after the last batch.

Run as a module: ``python -m a2c --frames 12000``.
"""

import argparse
import sys

import torch
import torchrl.data
import torchrl.envs as envs
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE


def build_env(seed):
    base = envs.GymEnv("CartPole-v1", categorical_action_encoding=True, device="cpu")
    env = envs.TransformedEnv(base, envs.Compose(envs.InitTracker(), envs.RewardSum(), envs.StepCounter(200)))
    env.set_seed(seed)
    return env


def build_actor():
    net = MLP(in_features=4, out_features=2, num_cells=[64], activation_class=torch.nn.Tanh)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


@torch.no_grad()
def evaluate(env, actor, episodes=4):
    actor.eval()
    with envs.set_exploration_type(envs.ExplorationType.DETERMINISTIC):
        total = 0.0
        for _ in range(episodes):
            rollout = env.rollout(200, actor, break_when_any_done=True)
            total += rollout["next", "episode_reward"][-1].item()
    actor.train()
    return total / episodes


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=24_000)
    parser.add_argument("--batch", type=int, default=160)
    opts = parser.parse_args(argv)
    torch.manual_seed(0)

    train_env, test_env = build_env(0), build_env(1000)
    actor = build_actor()
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[64]), in_keys=["observation"])
    assert isinstance(train_env.action_spec, torchrl.data.Categorical)

    collector = Collector(
        create_env_fn=train_env,
        policy=actor,
        frames_per_batch=opts.batch,
        total_frames=opts.frames,
        split_trajs=False,
        reset_at_each_iter=False,
    )
    advantage = GAE(gamma=0.97, lmbda=0.95, value_network=critic, average_gae=True)
    loss_fn = A2CLoss(actor, critic, entropy_coeff=0.01, critic_coeff=1.0, loss_critic_type="smooth_l1")
    actor_optim = torch.optim.Adam(actor.parameters(), 5e-3)
    critic_optim = torch.optim.Adam(critic.parameters(), 1e-2)

    best = 0.0
    for i, data in enumerate(collector):
        advantage(data)
        losses = loss_fn(data)
        (losses["loss_objective"] + losses["loss_entropy"]).backward()
        losses["loss_critic"].backward()
        torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), 1.0)
        for optimizer in (actor_optim, critic_optim):
            optimizer.step()
            optimizer.zero_grad()
        collector.update_policy_weights_()
        if i % 25 == 24:
            best = max(best, evaluate(test_env, actor))
            print(f"batch {i}: {best:.0f}", flush=True)
    collector.shutdown()
    best = max(best, evaluate(test_env, actor))
    print(f"return {best:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
