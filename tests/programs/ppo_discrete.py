"""PPO on CartPole: one trunk for policy and value, several environments, minibatches without replacement."""

from dataclasses import dataclass, field

import torch
from tensordict.nn import TensorDictModule
from torch.distributions import OneHotCategorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import EnvCreator, ExplorationType, ParallelEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.libs.gym import GymEnv
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import MLP, ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.advantages import GAE


@dataclass
class Optim:
    lr: float = 3e-3
    max_grad_norm: float = 0.5


@dataclass
class Args:
    env_name: str = "CartPole-v1"
    num_envs: int = 2
    frames_per_batch: int = 800
    total_frames: int = 16_000
    epochs: int = 6
    minibatch: int = 200
    seed: int = 2
    optim: Optim = field(default_factory=Optim)


def make_env(name):
    env = TransformedEnv(GymEnv(name))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter())
    return env


def make_model(proof_env):
    trunk = TensorDictModule(
        MLP(
            in_features=4,
            out_features=64,
            num_cells=[64],
            activation_class=torch.nn.Tanh,
            activate_last_layer=True,
        ),
        in_keys=["observation"],
        out_keys=["hidden"],
    )
    policy = ProbabilisticActor(
        TensorDictModule(torch.nn.Linear(64, 2), in_keys=["hidden"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        spec=proof_env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    value = ValueOperator(torch.nn.Linear(64, 1), in_keys=["hidden"])
    operator = ActorValueOperator(trunk, policy, value)
    with torch.no_grad():
        td = proof_env.fake_tensordict().expand(10)
        actor = operator.get_policy_operator()
        actor(td)
        operator.get_value_operator()(td)
    return operator


def main(args):
    torch.manual_seed(args.seed)
    actor_critic = make_model(make_env(args.env_name))
    actor, critic = actor_critic.get_policy_operator(), actor_critic.get_value_operator()
    creator = EnvCreator(lambda: make_env(args.env_name))
    collector = Collector(
        ParallelEnv(args.num_envs, creator, serial_for_single=True, mp_start_method="spawn"),
        actor,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        device="cpu",
        storing_device="cpu",
        max_frames_per_traj=-1,
    )
    collector.set_seed(args.seed)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(args.frames_per_batch, device="cpu"),
        sampler=SamplerWithoutReplacement(drop_last=True),
        batch_size=args.minibatch,
    )
    adv = GAE(gamma=0.98, lmbda=0.9, value_network=critic, average_gae=False)
    loss_fn = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        loss_critic_type="l2",
        entropy_coeff=0.01,
        critic_coeff=0.25,
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss_fn.parameters(), lr=args.optim.lr, eps=1e-5)

    last = 0.0
    updates, total = 0, args.total_frames // args.frames_per_batch * args.epochs
    for data in collector:
        ended = data["next", "episode_reward"][data["next", "terminated"]]
        if len(ended):
            last = ended.mean().item()
        for _ in range(args.epochs):
            with torch.no_grad():
                data = adv(data)
            buffer.extend(data.reshape(-1))
            for group in optimizer.param_groups:
                group["lr"] = args.optim.lr * (1 - updates / total)
            updates += 1
            for batch in buffer:
                loss = loss_fn(batch)
                (loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), args.optim.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        collector.update_policy_weights_()
    collector.shutdown()
    print(f"mean return of the last batch's episodes: {last:.0f}")

    test = make_env(args.env_name)
    test.set_seed(5)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        values = [
            test.rollout(500, actor, auto_cast_to_device=True)["next", "episode_reward"][-1] for _ in range(3)
        ]
    print(f"return {torch.cat(values).mean().item():.1f}")


if __name__ == "__main__":
    main(Args())
