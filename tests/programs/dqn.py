"""The smallest DQN: CartPole, a uniform buffer, a constant epsilon."""

import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn, optim
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, HardUpdate

torch.manual_seed(0)
env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
env.set_seed(0)

value_mlp = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, env.action_spec.shape[-1]))
value_net = Mod(value_mlp, in_keys=["observation"], out_keys=["action_value"])
policy = Seq(value_net, QValueModule(spec=env.action_spec))
exploration = EGreedyModule(env.action_spec, annealing_num_steps=4_000, eps_init=0.5, eps_end=0.02)
policy_explore = Seq(policy, exploration)

collector = Collector(env, policy_explore, frames_per_batch=50, total_frames=7_000, init_random_frames=1_000)
rb = TensorDictReplayBuffer(storage=LazyTensorStorage(7_000), batch_size=128)
loss = DQNLoss(value_network=policy, action_space=env.action_spec, delay_value=True)
loss.make_value_estimator(gamma=0.98)
optim = optim.Adam(loss.parameters(), lr=2e-3)
updater = HardUpdate(loss, value_network_update_interval=100)

longest = []
for i, data in enumerate(collector):
    rb.extend(data)
    longest.append(rb[:]["next", "step_count"].max().item())
    if len(rb) > 1_000:
        for _ in range(10):
            sample = rb.sample()
            loss_vals = loss(sample)
            loss_vals["loss"].backward()
            optim.step()
            optim.zero_grad()
            updater.step()
        exploration.step(data.numel())
    if i % 40 == 0:
        print(f"longest episode {longest[-1]}, {len(rb)} frames in the buffer", flush=True)
print(f"return {longest[-1]:.0f}")
