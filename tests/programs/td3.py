"""TD3 on several gymnasium environments at once."""

import argparse
import functools

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss


class Steering(gymnasium.Env):
    """Keep an angle at zero; the reward is the negative squared angle minus the cost of steering."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.angle, self.drift = self.np_random.uniform(-1, 1), self.np_random.uniform(-0.3, 0.3)
        return self._observe(), {}

    def step(self, action):
        self.angle = float(np.clip(self.angle + 0.5 * action[0] + self.drift, -3, 3))
        return self._observe(), -(self.angle**2) - 0.01 * float(action[0] ** 2), False, False, {}

    def _observe(self):
        return np.array([np.sin(self.angle), np.cos(self.angle), self.drift], np.float32)


def make_env(max_steps):
    return TransformedEnv(GymWrapper(Steering()), Compose(StepCounter(max_steps), DoubleToFloat()))


def make_vector(args):
    env = TransformedEnv(
        SerialEnv(args.envs, functools.partial(make_env, args.max_steps)),
        Compose(InitTracker(), RewardSum()),
    )
    env.set_seed(args.seed)
    return env


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--total-frames", type=int, default=4_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)

    env = make_vector(args)
    check_env_specs(env)
    spec = env.full_action_spec_unbatched["action"] if hasattr(env, "full_action_spec_unbatched") else None

    actor = TensorDictSequential(
        TensorDictModule(
            MLP(in_features=3, out_features=1, num_cells=[64]), in_keys=["observation"], out_keys=["param"]
        ),
        TanhModule(in_keys=["param"], out_keys=["action"], low=-1.0, high=1.0),
    )
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[64, 64]), in_keys=["observation", "action"]
    )
    explore = TensorDictSequential(
        actor,
        AdditiveGaussianModule(
            spec=env.action_spec, sigma_init=0.5, sigma_end=0.1, annealing_num_steps=3_000
        ),
    )
    collector = Collector(
        env, explore, frames_per_batch=args.envs * 10, total_frames=args.total_frames, init_random_frames=400
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(args.total_frames), batch_size=args.batch_size)
    loss_fn = TD3Loss(actor, critic, bounds=(-1.0, 1.0), num_qvalue_nets=2)
    loss_fn.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss_fn, eps=0.98)
    optim_actor = torch.optim.Adam(list(loss_fn.actor_network_params.flatten_keys().values()), 2e-3)
    optim_critic = torch.optim.Adam(list(loss_fn.qvalue_network_params.flatten_keys().values()), 2e-3)

    updates = 0
    for batch in collector:
        explore[1].step(batch.numel())
        buffer.extend(batch.reshape(-1))
        if len(buffer) < 400:
            continue
        for _ in range(8):
            updates += 1
            sample = buffer.sample()
            critic_loss, *_ = loss_fn.value_loss(sample)
            critic_loss.backward()
            optim_critic.step()
            optim_critic.zero_grad()
            if updates % 2 == 0:
                actor_loss, *_ = loss_fn.actor_loss(sample)
                actor_loss.backward()
                optim_actor.step()
                optim_actor.zero_grad()
                target.step()
    collector.shutdown()

    test = make_vector(args)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        value = test.rollout(args.max_steps, actor)["next", "episode_reward"][:, -1].mean().item()
    test.close()
    print(f"return {value:.2f}")
    assert spec is None or spec.shape[-1] == 1


if __name__ == "__main__":
    main()
