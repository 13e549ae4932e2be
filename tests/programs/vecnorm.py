"""A2C over processes that share the statistics of their observations; statistics and weights are saved and loaded."""

import pathlib
import tempfile

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    EnvCreator,
    ExplorationType,
    GymEnv,
    ParallelEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
    set_exploration_type,
)
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

WORKERS = 2


def make_env():
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter(200)))


def make_normalised(count, norm):
    env = ParallelEnv(count, EnvCreator(make_env)) if count > 1 else make_env()
    return TransformedEnv(env, norm)


def main():
    torch.manual_seed(0)
    norm = VecNorm(in_keys=["observation"], decay=0.999)
    env = make_normalised(WORKERS, norm)
    env.set_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64]), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64]), in_keys=["observation"])
    gae = GAE(gamma=0.97, lmbda=0.95, value_network=critic, average_gae=True)
    loss_fn = A2CLoss(actor, critic, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss_fn.parameters(), 5e-3)
    collector = Collector(env, actor, frames_per_batch=160, total_frames=9_600)
    for data in collector:
        gae(data)
        losses = loss_fn(data.reshape(-1))
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.pt"
        torch.save({"actor": actor.state_dict(), "norm": norm.state_dict()}, path)
        collector.shutdown()
        saved = torch.load(path)

    # another program begins here
    frozen = VecNorm(in_keys=["observation"], decay=1.0)
    fresh = make_normalised(1, frozen)
    fresh.set_seed(1)
    fresh.reset()
    frozen.load_state_dict(saved["norm"])
    frozen.freeze()
    for parameter in actor.parameters():
        torch.nn.init.zeros_(parameter)
    actor.load_state_dict(saved["actor"])
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        values = [fresh.rollout(200, actor)["next", "episode_reward"][-1] for _ in range(4)]
    print(f"return {torch.cat(values).mean().item():.1f}")


if __name__ == "__main__":
    main()
