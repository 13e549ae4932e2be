"""SAC with discrete actions: a walk in a corridor, one-hot actions drawn from OneHotCategorical."""

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, GymEnv, RewardSum, TransformedEnv, set_exploration_type
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor
from torchrl.objectives import DiscreteSACLoss, SoftUpdate

N = 7


class Corridor(gym.Env):
    """Walk to the right end; each step has a cost, and the end has a reward."""

    def __init__(self, frameskip=None):
        self.observation_space = gym.spaces.Box(0.0, 1.0, (N,), np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(N - 1))
        return np.eye(N, dtype=np.float32)[self.place], {}

    def step(self, action):
        self.place = int(np.clip(self.place + int(action) - 1, 0, N - 1))
        there = self.place == N - 1
        return np.eye(N, dtype=np.float32)[self.place], 1.0 if there else -0.1, there, False, {}


if "Corridor-v0" not in gym.registry:
    gym.register(id="Corridor-v0", entry_point=Corridor, max_episode_steps=30)


class Config(dict):
    """A dictionary with attribute access."""

    __getattr__ = dict.__getitem__


cfg = Config(frames=3_000, batch=25, warm_up=250, updates=12, gamma=0.95, lr=3e-3, seed=0)


def env_maker():
    return TransformedEnv(GymEnv("Corridor-v0"), RewardSum())


if __name__ == "__main__":
    torch.manual_seed(cfg.seed)
    env = env_maker()
    env.set_seed(cfg.seed)
    n = env.action_spec.space.n
    assert n == env.full_action_spec["action"].shape[-1] == 3

    actor = ProbabilisticActor(
        TensorDictModule(MLP(N, n, num_cells=[32]), in_keys=["observation"], out_keys=["logits"]),
        spec=env.action_spec,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategorical,
        return_log_prob=False,
    )
    qvalue = TensorDictModule(MLP(N, n, num_cells=[32]), in_keys=["observation"], out_keys=["action_value"])
    loss_fn = DiscreteSACLoss(
        actor,
        qvalue,
        action_space=env.action_spec,
        num_actions=n,
        num_qvalue_nets=2,
        alpha_init=0.02,
        target_entropy_weight=0.1,
    )
    loss_fn.make_value_estimator(gamma=cfg.gamma)
    target = SoftUpdate(loss_fn, tau=0.02)
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=cfg.lr)

    collector = Collector(
        env_maker, actor, frames_per_batch=cfg.batch, total_frames=cfg.frames, init_random_frames=cfg.warm_up
    )
    collector.set_seed(cfg.seed)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(cfg.frames), batch_size=64)
    for i, data in enumerate(collector):
        buffer.extend(data.reshape(-1))
        if (i + 1) * cfg.batch <= cfg.warm_up:
            continue
        for _ in range(cfg.updates):
            losses = loss_fn(buffer.sample())
            sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            target.step()
    collector.shutdown()

    with torch.no_grad(), set_exploration_type(ExplorationType.MODE):
        returns = [env.rollout(30, actor)["next", "episode_reward"][-1] for _ in range(20)]
    print(f"return {torch.stack(returns).mean():.2f}")
