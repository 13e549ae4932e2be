"""REDQ: many updates per frame with an ensemble of critics, on a small gymnasium task."""

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, GymWrapper, RewardScaling, RewardSum, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import REDQLoss, SoftUpdate

UTD = 8


class Lift(gymnasium.Env):
    """Lift a weight to the height in the observation."""

    observation_space = gymnasium.spaces.Box(-3, 3, (2,), dtype=np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.height, self.goal = 0, 0.0, float(self.np_random.uniform(0.3, 1.5))
        return np.float32([self.height, self.goal]), {}

    def step(self, action):
        self.t += 1
        self.height = float(np.clip(self.height + 0.4 * action[0] - 0.1, -3, 3))
        reward = -abs(self.height - self.goal)
        return np.float32([self.height, self.goal]), reward, False, self.t >= 15, {}


def make_env():
    return TransformedEnv(GymWrapper(Lift(), device="cpu"), Compose(RewardSum(), RewardScaling(0.0, 2.0)))


torch.manual_seed(1)
env = make_env()
env.set_seed(1)

net = nn.Sequential(MLP(in_features=2, out_features=2, num_cells=[32]), NormalParamExtractor())
actor = ProbabilisticActor(
    TensorDictSequential(TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])),
    in_keys=["loc", "scale"],
    spec=env.action_spec,
    distribution_class=TanhNormal,
    distribution_kwargs={
        "low": env.action_spec_unbatched.space.low,
        "high": env.action_spec_unbatched.space.high,
    },
    return_log_prob=True,
)
qvalue = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[32]), in_keys=["observation", "action"])
loss_fn = REDQLoss(
    actor, qvalue, num_qvalue_nets=5, sub_sample_len=2, action_spec=env.action_spec, alpha_init=0.1
)
loss_fn.make_value_estimator(gamma=0.9)
target = SoftUpdate(loss_fn, tau=0.01)
optimizer = torch.optim.Adam(loss_fn.parameters(), 3e-3)

collector = Collector(env, actor, frames_per_batch=15, total_frames=900, init_random_frames=150)
buffer = ReplayBuffer(storage=LazyTensorStorage(900), batch_size=64, prefetch=3)
for i, data in enumerate(collector):
    buffer.extend(data)
    if i < 10:
        continue
    for _ in range(UTD * 2):
        losses = loss_fn(buffer.sample())
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
    collector.update_policy_weights_()

with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
    test = make_env()
    test.set_seed(9)
    values = [test.rollout(100, actor)["next", "episode_reward"][-1] for _ in range(8)]
print(f"return {torch.cat(values).mean().item():.2f}")
collector.shutdown()
