"""Independent PPO of several agents in a group on a meeting game, with a critic that sees all agents."""

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import (
    Bounded,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.data.tensor_specs import Categorical
from torchrl.envs import EnvBase, MarlGroupMapType, RewardSum, TransformedEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators

AGENTS, LIMIT, WORLDS = 3, 12, 8


class Meeting(EnvBase):
    """Agents on a line, in many worlds, should meet; each sees its position and the mean position of the rest."""

    def __init__(self):
        super().__init__(batch_size=[WORLDS])
        self.group_map = MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(
            [f"agent_{k}" for k in range(AGENTS)]
        )
        (self.group,) = self.group_map
        group, lead = (WORLDS, AGENTS), (WORLDS,)
        flag = lambda: Categorical(2, shape=(WORLDS, 1), dtype=torch.bool)  # noqa: E731
        self.observation_spec = Composite(
            {self.group: Composite({"observation": Unbounded((*group, 2))}, shape=group)}, shape=lead
        )
        self.full_action_spec = Composite(
            {self.group: Composite({"action": Bounded(-1, 1, (*group, 1))}, shape=group)}, shape=lead
        )
        self.full_reward_spec = Composite(
            {self.group: Composite({"reward": Unbounded((*group, 1))}, shape=group)}, shape=lead
        )
        self.full_done_spec = Composite(done=flag(), terminated=flag(), truncated=flag(), shape=lead)

    def _observe(self):
        mean = self.places.mean(1, keepdim=True).expand(-1, AGENTS)
        return TensorDict({"observation": torch.stack([self.places, mean], -1)}, [WORLDS, AGENTS])

    def _reset(self, tensordict=None):
        again = torch.ones(WORLDS, 1, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            again = tensordict["_reset"].view(WORLDS, 1)
        fresh = torch.rand(WORLDS, AGENTS) * 2 - 1
        self.places = torch.where(again, fresh, self.places) if hasattr(self, "places") else fresh
        self.time = torch.where(again, 0, self.time) if hasattr(self, "time") else torch.zeros(WORLDS, 1)
        flag = torch.zeros(WORLDS, 1, dtype=torch.bool)
        return TensorDict(
            {
                self.group: self._observe(),
                "done": flag,
                "terminated": flag.clone(),
                "truncated": flag.clone(),
            },
            [WORLDS],
        )

    def _step(self, tensordict):
        self.places = self.places + 0.3 * tensordict[self.group, "action"].squeeze(-1)
        self.time = self.time + 1
        spread = (self.places - self.places.mean(1, keepdim=True)).abs()
        group = self._observe()
        group["reward"] = -spread.unsqueeze(-1)
        end = self.time >= LIMIT
        return TensorDict(
            {self.group: group, "done": end, "terminated": torch.zeros_like(end), "truncated": end.clone()},
            [WORLDS],
        )

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def make_env():
    base = Meeting()
    return TransformedEnv(
        base, RewardSum(in_keys=[(base.group, "reward")], out_keys=[(base.group, "episode_reward")])
    )


def main():
    torch.manual_seed(0)
    env = make_env()
    check_env_specs(env)
    group = env.group
    assert env.reward_keys == [(group, "reward")]

    net = torch.nn.Sequential(
        MultiAgentMLP(2, 2, n_agents=AGENTS, centralised=False, share_params=True, depth=1, num_cells=32),
        NormalParamExtractor(),
    )
    policy = ProbabilisticActor(
        TensorDictModule(net, in_keys=[(group, "observation")], out_keys=[(group, "loc"), (group, "scale")]),
        spec=env.full_action_spec[env.action_key],
        in_keys=[(group, "loc"), (group, "scale")],
        out_keys=[env.action_key],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -1.0, "high": 1.0},
        return_log_prob=True,
        log_prob_key=(group, "sample_log_prob"),
    )
    critic = TensorDictModule(
        MultiAgentMLP(2, 1, n_agents=AGENTS, centralised=True, share_params=True, depth=1, num_cells=32),
        in_keys=[(group, "observation")],
        out_keys=[(group, "state_value")],
    )
    frames = WORLDS * LIMIT * 8
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=frames * 30)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(frames), sampler=SamplerWithoutReplacement(), batch_size=frames // 3
    )
    loss_fn = ClipPPOLoss(policy, critic, clip_epsilon=0.2, entropy_coeff=1e-3, normalize_advantage=False)
    loss_fn.set_keys(
        reward=env.reward_key,
        action=env.action_key,
        sample_log_prob=(group, "sample_log_prob"),
        value=(group, "state_value"),
        done=(group, "done"),
        terminated=(group, "terminated"),
    )
    loss_fn.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    optimizer = torch.optim.Adam(loss_fn.parameters(), 5e-3)

    for data in collector:
        shape = data.get_item_shape(("next", env.reward_key))
        for name in ("done", "terminated"):
            data.set(("next", group, name), data["next", name].unsqueeze(-1).expand(shape).contiguous())
        with torch.no_grad():
            loss_fn.value_estimator(
                data, params=loss_fn.critic_network_params, target_params=loss_fn.target_critic_network_params
            )
        buffer.extend(data.reshape(-1))
        for _ in range(4):
            for _ in range(3):
                losses = loss_fn(buffer.sample())
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(loss_fn.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        collector.update_policy_weights_()
    collector.shutdown()

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        rollout = make_env().rollout(LIMIT, policy)
    print(f"return {rollout['next', group, 'episode_reward'][:, -1].mean().item():.2f}")


if __name__ == "__main__":
    main()
