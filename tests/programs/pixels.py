"""DQN from pixels with stacked frames: catch a falling dot, whose direction only the stack shows."""

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import (
    CatFrames,
    Compose,
    ExplorationType,
    GrayScale,
    GymWrapper,
    RewardSum,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import ConvNet, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

SIDE = 8


class Catch(gym.Env):
    """A dot falls sideways; a paddle at the bottom should be where it lands."""

    observation_space = gym.spaces.Dict(pixels=gym.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(SIDE))
        self.drift = int(self.np_random.integers(-1, 2))
        self.paddle = SIDE // 2
        return self._image(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + int(action) - 1, 0, SIDE - 1))
        self.row += 1
        self.column = int(np.clip(self.column + self.drift, 0, SIDE - 1))
        end = self.row == SIDE - 1
        reward = 0.0 if not end else (1.0 if abs(self.paddle - self.column) <= 1 else -1.0)
        return self._image(), reward, end, False, {}

    def _image(self):
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        image[self.row, self.column] = 255
        image[SIDE - 1, self.paddle] = 128
        return {"pixels": image}


def make_env():
    env = TransformedEnv(GymWrapper(Catch()))
    env.append_transform(ToTensorImage(in_keys=["pixels"]))
    env.append_transform(GrayScale(in_keys=["pixels"]))
    env.append_transform(CatFrames(N=2, dim=-3, in_keys=["pixels"]))
    env.append_transform(Compose(RewardSum(), StepCounter()))
    return env


def main():
    torch.manual_seed(0)
    env = make_env()
    env.set_seed(0)
    assert env.observation_spec["pixels"].shape == (2, SIDE, SIDE)
    # No strides, because the exact position of the dot matters.
    cnn = ConvNet(
        in_features=2, num_cells=[16, 16], kernel_sizes=[3, 3], strides=[1, 1], activation_class=nn.ReLU
    )
    with torch.no_grad():
        flat = cnn(torch.zeros(1, 2, SIDE, SIDE)).shape[-1]
    net = nn.Sequential(cnn, nn.Linear(flat, 64), nn.ReLU(), nn.Linear(64, 3))
    actor = QValueActor(net, in_keys=["pixels"], spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, annealing_num_steps=4_000, eps_init=1.0, eps_end=0.2)
    policy = TensorDictSequential(actor, explore)

    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(12_000), batch_size=64, pin_memory=False, prefetch=2
    )
    collector = Collector(env, policy, frames_per_batch=70, total_frames=10_500, init_random_frames=700)
    loss_fn = DQNLoss(actor, delay_value=True, loss_function="smooth_l1")
    loss_fn.make_value_estimator(gamma=0.95)
    target = SoftUpdate(loss_fn, eps=0.98)
    optimizer = torch.optim.Adam(loss_fn.parameters(), 1e-3)
    seen = 0
    for data in collector:
        seen += data.numel()
        explore.step(data.numel())
        buffer.extend(data.reshape(-1))
        if seen <= 700:
            continue
        for _ in range(12):
            loss = loss_fn(buffer.sample())["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()
    collector.shutdown()

    test = make_env()
    test.set_seed(1)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        values = [test.rollout(SIDE, actor)["next", "episode_reward"][-1] for _ in range(30)]
    print(f"return {torch.cat(values).mean().item():.2f}")


if __name__ == "__main__":
    main()
