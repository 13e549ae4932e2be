"""DQN with a GRU on a memory task; it learns from slices of trajectories."""

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import (
    Compose,
    ExplorationType,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.envs.libs.gym import GymWrapper
from torchrl.modules import MLP, EGreedyModule, GRUModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate

LENGTH = 4


class Recall(gymnasium.Env):
    """Shows one of two cues at the first step only; the last action should name it."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        return np.eye(3, dtype=np.float32)[self.cue], {}

    def step(self, action):
        self.t += 1
        end = self.t == LENGTH
        return np.eye(3, dtype=np.float32)[2], float(end and action == self.cue), end, False, {}


def main():
    torch.manual_seed(0)
    gru = GRUModule(input_size=16, hidden_size=16, in_key="embed", out_key="memory")

    def make_env(seed):
        env = TransformedEnv(GymWrapper(Recall()), Compose(InitTracker(), StepCounter(), RewardSum()))
        env.append_transform(gru.make_tensordict_primer())
        env.set_seed(seed)
        return env

    env, test_env = make_env(0), make_env(1)

    embed = TensorDictModule(MLP(3, 16, num_cells=[]), in_keys=["observation"], out_keys=["embed"])
    value = TensorDictModule(MLP(16, 2, num_cells=[]), in_keys=["memory"], out_keys=["action_value"])
    network = TensorDictSequential(embed, gru, value, QValueModule(spec=env.action_spec))
    explore = EGreedyModule(env.action_spec, annealing_num_steps=1_000, eps_init=1.0, eps_end=0.1)
    policy = TensorDictSequential(network, explore)

    length, slices = LENGTH, 16
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(3_000),
        sampler=SliceSampler(slice_len=length, traj_key=("collector", "traj_ids"), strict_length=False),
        batch_size=length * slices,
    )
    collector = Collector(env, policy, frames_per_batch=50, total_frames=3_000, storing_device="cpu")
    loss_fn = DQNLoss(network, action_space=env.action_spec, delay_value=True, double_dqn=True)
    loss_fn.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss_fn, eps=0.95)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)

    seen = 0
    for data in collector:
        seen += data.numel()
        buffer.extend(data.reshape(-1))
        explore.step(data.numel())
        if seen < 300:
            continue
        for _ in range(6):
            sample = buffer.sample()
            with set_recurrent_mode(True):
                loss = loss_fn(sample)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            target.step()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        rollouts = [test_env.rollout(LENGTH, network) for _ in range(20)]
    print(f"return {sum(r['next', 'episode_reward'][-1].item() for r in rollouts) / 20:.2f}")


if __name__ == "__main__":
    main()
