"""DDPG with Ornstein-Uhlenbeck noise on a task with one state."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import (
    BoundedContinuous,
    Composite,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    UnboundedContinuous,
)
from torchrl.envs import EnvBase, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, OrnsteinUhlenbeckProcessModule, TanhModule, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate


class Thermostat(EnvBase):
    """Heat or cool a room whose temperature drifts towards the outdoor temperature."""

    def __init__(self, seed=None, device="cpu"):
        super().__init__(device=device, batch_size=[])
        self.observation_spec = Composite(
            observation=Composite(
                inside=UnboundedContinuous(shape=(1,)), outside=UnboundedContinuous(shape=(1,))
            )
        )
        self.action_spec = BoundedContinuous(low=-2, high=2, shape=(1,))
        self.reward_spec = UnboundedContinuous(shape=(1,))
        self.rng = torch.manual_seed(0 if seed is None else seed)

    def _set_seed(self, seed):
        self.rng = torch.manual_seed(seed)

    def _reset(self, tensordict):
        weather = torch.empty(2).uniform_(-1, 1, generator=self.rng)
        return TensorDict({"observation": {"inside": weather[:1], "outside": weather[1:]}}, [])

    def _step(self, tensordict):
        inside, outside = tensordict["observation", "inside"], tensordict["observation", "outside"]
        inside = inside + 0.3 * (outside - inside) + 0.3 * tensordict["action"]
        return TensorDict(
            {
                "observation": {"inside": inside, "outside": outside.clone()},
                "reward": -inside.square(),
                "done": torch.zeros(1, dtype=torch.bool),
                "terminated": torch.zeros(1, dtype=torch.bool),
            },
            [],
        )


def make_env(seed=None):
    env = TransformedEnv(Thermostat(seed))
    env.append_transform(InitTracker())
    env.append_transform(StepCounter(max_steps=20))
    env.append_transform(RewardSum(in_keys=[env.reward_key]))
    return env


def main():
    torch.manual_seed(3)
    env = make_env(3)
    keys = [("observation", "inside"), ("observation", "outside")]
    actor = TensorDictSequential(
        TensorDictModule(
            MLP(in_features=2, out_features=1, num_cells=[32]), in_keys=keys, out_keys=["param"]
        ),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=env.action_spec),
    )
    critic = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[32, 32]), in_keys=[*keys, "action"])
    noise = OrnsteinUhlenbeckProcessModule(
        spec=env.action_spec, annealing_num_steps=1_000, sigma=0.4, is_init_key="is_init"
    )
    explore = TensorDictSequential(actor, noise)

    collector = Collector(
        lambda: make_env(3), explore, frames_per_batch=40, total_frames=1_600, device="cpu", split_trajs=False
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(2_000), sampler=RandomSampler(), batch_size=64)
    loss_fn = DDPGLoss(actor, critic, delay_actor=True, delay_value=True)
    loss_fn.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss_fn, eps=0.97)
    actor_optim = torch.optim.Adam(actor.parameters(), 3e-3)
    critic_optim = torch.optim.Adam(critic.parameters(), 5e-3)

    for batch in collector:
        noise.step(batch.numel())
        buffer.extend(batch.exclude("collector").reshape(-1))
        if len(buffer) < 200:
            continue
        for _ in range(20):
            losses = loss_fn(buffer.sample())
            (losses["loss_actor"] + losses["loss_value"]).backward()
            actor_optim.step()
            actor_optim.zero_grad()
            critic_optim.step()
            critic_optim.zero_grad()
            target.step()
    collector.shutdown()

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        returns = [env.rollout(20, actor)["next", "episode_reward"][-1].item() for _ in range(10)]
    print(f"return {sum(returns) / 10:.2f}")


if __name__ == "__main__":
    main()
