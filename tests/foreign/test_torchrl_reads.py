"""Some TorchRL modules are known to read their in_keys only, and they do so (`make test-foreign`)."""

from __future__ import annotations

import pytest
import torch

torchrl = pytest.importorskip("torchrl")

from tensordict import TensorDict  # noqa: E402
from tensordict.base import NO_DEFAULT  # noqa: E402
from tensordict.nn import TensorDictModule, TensorDictSequential, set_interaction_type  # noqa: E402
from torchrl import modules  # noqa: E402

from gleanrl._rollout.policy_modules import (  # noqa: E402
    keys_of,
    members_of,
    reads_of,
)
from gleanrl.collectors import SyncDataCollector  # noqa: E402
from gleanrl.data import (  # noqa: E402
    Categorical,
    Composite,
    Unbounded,
)
from gleanrl.envs import (  # noqa: E402
    Compose,
    EnvBase,
    InitTracker,
    StepCounter,
    TransformedEnv,
)
from tests.foreign.test_torchrl_modules import (  # noqa: E402
    VALUES,
    cartpole,
    correlated,
    distributional,
    from_env,
    greedy,
    noisy,
    pendulum,
    q_actor,
    q_module,
)

pytestmark = pytest.mark.filterwarnings("default")


def masked(spec):
    return TensorDictSequential(
        q_actor(spec, action_mask_key="action_mask"),
        modules.EGreedyModule(spec=spec, action_mask_key="action_mask"),
    )


class Recording(TensorDict):
    """Records the entries that are read by name, and raises if all entries are read at once."""

    seen: list

    def _get_str(self, key, default=NO_DEFAULT, **kwargs):
        self.seen.append(key)
        return super()._get_str(key, default, **kwargs)

    def keys(self, *args, **kwargs):
        raise AssertionError("all entries were looked at")

    values = items = keys


@pytest.mark.parametrize("kind", [None, "random", "deterministic"])
@pytest.mark.parametrize("make_policy", [q_actor, q_module, greedy, masked, noisy, from_env])
def test_listed_modules_read_their_in_keys_only(make_policy, kind):
    env = pendulum() if make_policy in VALUES else cartpole()
    policy = make_policy(env.action_spec)
    members = members_of(policy, torch.Size([]))
    assert reads_of(members) == [("observation",), *([("action_mask",)] if make_policy is masked else [])]
    known = [member.module for member in members if keys_of(member.module) is not None]
    assert known
    root = env.reset().set("action_mask", torch.ones(2, dtype=torch.bool))
    for module in known:
        row = Recording(dict(policy(root.clone()).items()), [])
        row.seen = []
        for module_given in (module.eval(), module.train()):
            with set_interaction_type(kind):
                module_given(row)
        assert {*row.seen} <= {*module.in_keys, *module.out_keys}
        module.register_forward_hook(lambda *_: None)
        assert keys_of(module) is None


def test_exploration_is_drawn_for_each_agent_without_group_reads():
    drawn = []
    for known in (True, False):
        torch.manual_seed(0)
        choices = Composite(agents=Composite(action=Categorical(5, shape=AGENTS), shape=AGENTS), shape=(4,))
        values = TensorDictModule(lambda state: torch.zeros(AGENTS), ["state"], [("agents", "action_value")])
        pick = TensorDictModule(
            lambda value: value.long(), [("agents", "action_value")], [("agents", "action")]
        )
        explore = modules.EGreedyModule(
            spec=choices[0], eps_init=0.5, eps_end=0.5, action_key=("agents", "action")
        )
        if not known:
            explore.register_forward_hook(lambda *_: None)
        policy = TensorDictSequential(values, pick, explore)
        collector = SyncDataCollector(
            Team(choices), policy, frames_per_batch=400, total_frames=400, policy_backend="torch"
        )
        drawn.append((next(iter(collector))["agents", "action"] != 0).sum(-1).flatten().bincount())
    assert torch.equal(*drawn)
    assert len(drawn[0]) == 4
    assert min(drawn[0][1:3]) > drawn[0][3]  # one or two of three agents explore more often than all of them


AGENTS = (4, 3)


class Team(EnvBase):
    """Has a state at the root and a group of agents."""

    def __init__(self, choices):
        super().__init__(batch_size=[4])
        agents = Composite(observation=Unbounded((4, 3, 2)), shape=AGENTS)
        self.observation_spec = Composite(state=Unbounded((4, 2)), agents=agents, shape=(4,))
        self.action_spec, self.reward_spec = choices, Unbounded((4, 1))

    def _reset(self, tensordict=None, **kwargs):
        out = self.observation_spec.zero()
        return out.update({key: torch.zeros(4, 1, dtype=torch.bool) for key in ("done", "terminated")})

    def _step(self, tensordict):
        return self._reset().set("reward", torch.zeros(4, 1))

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("make_policy", [q_actor, greedy, distributional, noisy, correlated])
def test_batches_do_not_depend_on_known_reads(make_policy):
    batches = []
    for known in (True, False):
        env = TransformedEnv(
            pendulum() if make_policy in VALUES else cartpole(), Compose(StepCounter(15), InitTracker())
        )
        env.set_seed(0)
        torch.manual_seed(0)
        policy = make_policy(env.action_spec)
        if not known:
            policy.register_forward_hook(lambda *_: None)
            assert reads_of(members_of(policy, torch.Size([]))) is None
        collector = SyncDataCollector(
            env, policy, frames_per_batch=20, total_frames=60, policy_backend="torch"
        )
        batches.append(torch.cat([*collector]))
    assert bool((batches[0] == batches[1]).all())
