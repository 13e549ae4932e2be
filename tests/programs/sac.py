"""SAC on the program's own small gymnasium environment."""

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, DoubleToFloat, GymEnv, RewardScaling, RewardSum, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.modules.distributions import NormalParamExtractor
from torchrl.objectives import SACLoss, SoftUpdate

FRAMES_PER_BATCH, TOTAL_FRAMES, WARM_UP, UPDATES = 50, 2_000, 200, 25


class Tracking(gym.Env):
    """A cart without friction that should rest at zero."""

    observation_space = gym.spaces.Box(-5.0, 5.0, (2,), np.float64)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, frameskip=1):
        self.frameskip = frameskip

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.np_random.uniform([-1.0, -0.2], [1.0, 0.2])
        return self.state.copy(), {}

    def step(self, action):
        position, speed = self.state
        speed = np.clip(0.9 * speed + 0.3 * float(action[0]), -1, 1)
        position = np.clip(position + 0.5 * speed, -5, 5)
        self.state = np.array([position, speed])
        return self.state.copy(), -abs(position), False, False, {}


gym.register("Tracking-v0", Tracking, max_episode_steps=25)


def make_env():
    return TransformedEnv(
        GymEnv("Tracking-v0"),
        Compose(DoubleToFloat(), RewardSum(), RewardScaling(loc=0.0, scale=1.0)),
    )


def evaluate(policy, episodes=5):
    env = make_env()
    env.set_seed(1)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        returns = [env.rollout(25, policy)["next", "episode_reward"][-1].item() for _ in range(episodes)]
    env.close()
    return sum(returns) / episodes


torch.manual_seed(0)
np.random.seed(0)

env = make_env()
env.set_seed(0)
n_obs, n_act = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]

actor = ProbabilisticActor(
    TensorDictModule(
        torch.nn.Sequential(
            MLP(in_features=n_obs, out_features=2 * n_act, num_cells=[32, 32]), NormalParamExtractor()
        ),
        in_keys=["observation"],
        out_keys=["loc", "scale"],
    ),
    in_keys=["loc", "scale"],
    spec=env.action_spec,
    distribution_class=TanhNormal,
    distribution_kwargs={
        "low": env.action_spec.space.low,
        "high": env.action_spec.space.high,
        "tanh_loc": False,
    },
    default_interaction_type=ExplorationType.RANDOM,
)
qvalue = ValueOperator(
    MLP(in_features=n_obs + n_act, out_features=1, num_cells=[32, 32]), in_keys=["observation", "action"]
)
loss_fn = SACLoss(actor, qvalue, num_qvalue_nets=2, action_spec=env.action_spec)
loss_fn.make_value_estimator(gamma=0.95)
target = SoftUpdate(loss_fn, tau=0.01)
optimizers = {
    "loss_actor": torch.optim.Adam(list(loss_fn.actor_network_params.flatten_keys().values()), lr=2e-3),
    "loss_qvalue": torch.optim.Adam(list(loss_fn.qvalue_network_params.flatten_keys().values()), lr=2e-3),
    "loss_alpha": torch.optim.Adam([loss_fn.log_alpha], lr=2e-3),
}

collector = Collector(
    env,
    actor,
    init_random_frames=WARM_UP,
    frames_per_batch=FRAMES_PER_BATCH,
    total_frames=TOTAL_FRAMES,
    exploration_type=ExplorationType.RANDOM,
)
buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(TOTAL_FRAMES), batch_size=64, prefetch=2)

frames = 0
for batch in collector:
    frames += batch.numel()
    buffer.extend(batch)
    if frames < WARM_UP:
        continue
    for _ in range(UPDATES):
        losses = loss_fn(buffer.sample().clone())
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            losses[name].backward(retain_graph=name != "loss_alpha")
        for optimizer in optimizers.values():
            optimizer.step()
        target.step()
    collector.update_policy_weights_()

print(f"return {evaluate(actor):.2f}")
collector.shutdown()
