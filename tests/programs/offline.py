"""CQL and IQL on data of a mediocre policy, in a buffer that is only read."""

import argparse
import tempfile

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import (
    Bounded,
    Composite,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import EnvBase, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose, DoubleToFloat
from torchrl.envs.utils import ExplorationType, RandomPolicy, set_exploration_type
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import CQLLoss, IQLLoss, SoftUpdate


class Point(EnvBase):
    """A point that is rewarded for being near zero, in double precision."""

    batch_locked = False

    def __init__(self):
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((2,), dtype=torch.float64))
        self.action_spec = Bounded(low=-torch.ones(2), high=torch.ones(2))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict=None):
        return TensorDict({"observation": torch.rand(2, dtype=torch.float64) * 2 - 1}, [])

    def _step(self, tensordict):
        observation = (tensordict["observation"] + 0.4 * tensordict["action"].double()).clamp(-2, 2)
        return TensorDict(
            {
                "observation": observation,
                "reward": -observation.norm().float().view(1),
                "terminated": torch.tensor([False]),
                "done": torch.tensor([False]),
            },
            [],
        )

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def make_env():
    return TransformedEnv(Point(), Compose(DoubleToFloat(), StepCounter(12), RewardSum()))


def record(folder, frames):
    env = make_env()
    env.set_seed(0)
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(frames, scratch_dir=folder),
        sampler=SamplerWithoutReplacement(shuffle=True),
        writer=RoundRobinWriter(),
        batch_size=128,
    )
    policy = RandomPolicy(env.action_spec)
    buffer.extend(env.rollout(frames, policy, break_when_any_done=False))
    return buffer.storage


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=["cql", "iql"], default="iql")
    parser.add_argument("--updates", type=int, default=500)
    opts = parser.parse_args()
    torch.manual_seed(0)
    env = make_env()
    env.set_seed(1)

    net = torch.nn.Sequential(MLP(2, 4, num_cells=[32]), NormalParamExtractor(scale_lb=0.05))
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": env.action_spec.space.low, "high": env.action_spec.space.high},
        default_interaction_type=ExplorationType.RANDOM,
    )
    qvalue = ValueOperator(MLP(4, 1, num_cells=[32, 32]), in_keys=["observation", "action"])
    value = ValueOperator(MLP(2, 1, num_cells=[32]), in_keys=["observation"])
    if opts.algorithm == "cql":
        loss_fn = CQLLoss(actor, qvalue, action_spec=env.action_spec, temperature=1.0, num_random=4)
    else:
        loss_fn = IQLLoss(actor, qvalue, value_network=value, temperature=5.0, expectile=0.8)
    loss_fn.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss_fn, eps=0.98)
    optimizer = torch.optim.Adam(loss_fn.parameters(), 3e-3)

    with tempfile.TemporaryDirectory() as folder:
        buffer = TensorDictReplayBuffer(
            storage=record(folder, 3_000),
            writer=ImmutableDatasetWriter(),
            sampler=SamplerWithoutReplacement(),
            batch_size=128,
        )
        try:
            buffer.extend(buffer.sample(2))
        except RuntimeError as error:
            print(f"nothing is added: {error}")
        for _ in range(opts.updates):
            losses = loss_fn(buffer.sample())
            sum(loss for name, loss in losses.items() if name.startswith("loss_")).backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        returns = [env.rollout(12, actor)["next", "episode_reward"][-1] for _ in range(10)]
    print(f"return {torch.cat(returns).mean().item():.2f}")


if __name__ == "__main__":
    main()
