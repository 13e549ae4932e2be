"""TorchRL's actors and exploration modules work with gleanrl's specs and collectors (`make test-foreign`)."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

torchrl = pytest.importorskip("torchrl")

from tensordict.nn import TensorDictModule, TensorDictSequential, set_interaction_type  # noqa: E402
from torchrl import data as theirs  # noqa: E402
from torchrl import modules  # noqa: E402

from gleanrl._rollout.policy_modules import (  # noqa: E402
    ModuleSequence,
    PlainCall,
    calls_of,
    members_of,
)
from gleanrl.collectors import SyncDataCollector  # noqa: E402
from gleanrl.data import (  # noqa: E402
    Categorical,
    Composite,
    OneHot,
    Unbounded,
)
from gleanrl.envs import (  # noqa: E402
    Compose,
    GymEnv,
    InitTracker,
    TransformedEnv,
)
from tests.fakes_modules import check  # noqa: E402
from tests.foreign.torchrl_policies import gaussian  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


SIZE = torch.Size([5])


def cartpole():
    return GymEnv("CartPole-v1")


def categorical():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def pendulum():
    return GymEnv("Pendulum-v1")


def linear(out=2):
    return nn.Linear(4, out)


def q_actor(spec, **kwargs):
    return modules.QValueActor(linear(), in_keys=["observation"], spec=spec, **kwargs)


def q_module(spec):
    values = TensorDictModule(linear(), ["observation"], ["action_value"])
    return TensorDictSequential(values, modules.QValueModule(spec=spec))


def q_composite(spec):
    return q_actor(
        Composite(action=spec, action_value=None, chosen_action_value=None), action_space=one_of(spec)
    )


def one_of(spec):
    return "one_hot" if isinstance(spec, OneHot) else "categorical"


def distributional(spec):
    net = nn.Sequential(linear(10), nn.Unflatten(-1, (5, 2)))
    return modules.DistributionalQValueActor(
        net, in_keys=["observation"], spec=spec, support=torch.arange(5.0)
    )


def greedy(spec):
    return TensorDictSequential(q_actor(spec), modules.EGreedyModule(spec=spec))


def logits(spec):
    kind = modules.OneHotCategorical if isinstance(spec, OneHot) else torch.distributions.Categorical
    net = TensorDictModule(linear(), ["observation"], ["logits"])
    return modules.ProbabilisticActor(
        net, in_keys=["logits"], spec=spec, distribution_class=kind, return_log_prob=True
    )


def hooked(spec):
    net = nn.Linear(4, 2)
    net.register_forward_hook(modules.QValueHook(one_of(spec)))
    return modules.SafeModule(net, ["observation"], ["action", "action_value", "chosen_action_value"])


def uniform(spec):
    return modules.RandomPolicy(spec)


def actor(spec, **kwargs):
    return modules.Actor(nn.Linear(3, 1), in_keys=["observation"], spec=spec, **kwargs)


def safe_actor(spec):
    return actor(spec, safe=True)


def registered(spec):
    module = modules.SafeModule(nn.Linear(3, 1), ["observation"], ["action"])
    module.register_spec(safe=True, spec=spec)
    return module


def assigned(spec):
    module = modules.SafeModule(nn.Linear(3, 1), ["observation"], ["action"])
    module.spec = Composite(action=spec)
    return module


def in_dictionaries(spec):
    return modules.SafeModule(nn.Linear(3, 1), ["observation"], ["action"], spec=Composite({"action": spec}))


def tanh(spec):
    net = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    return TensorDictSequential(net, modules.TanhModule(in_keys=["action"], spec=spec))


def noisy(spec):
    return TensorDictSequential(actor(spec), modules.AdditiveGaussianModule(spec=spec))


def correlated(spec):
    return TensorDictSequential(actor(spec), modules.OrnsteinUhlenbeckProcessModule(spec=spec))


def from_env(spec):
    policy = TensorDictSequential(actor(spec), modules.AdditiveGaussianModule(spec=None))
    modules.set_exploration_modules_spec_from_env(policy, pendulum())
    return policy


CHOICES = [q_actor, q_module, q_composite, distributional, greedy, logits, hooked, uniform]
VALUES = [
    *(actor, safe_actor, registered, assigned, in_dictionaries, gaussian, tanh, noisy, correlated),
    *(from_env, uniform),
]


# Their actions may be out of bounds.
UNSAFE = (actor, assigned, in_dictionaries)


@pytest.mark.parametrize(
    ("make_env", "make_policy"),
    [(env, policy) for env in (cartpole, categorical) for policy in CHOICES]
    + [(pendulum, policy) for policy in VALUES],
    ids=lambda function: function.__name__,
)
def test_policies_use_the_spec_of_the_environment(make_env, make_policy):
    torch.manual_seed(0)
    env = make_env()
    spec = env.action_spec
    batches = list(SyncDataCollector(env, make_policy(spec), frames_per_batch=8, total_frames=16))
    assert [batch.numel() for batch in batches] == [8, 8]
    actions = torch.cat([batch["action"] for batch in batches])
    if make_policy not in UNSAFE:
        assert spec.is_in(actions.detach())


@pytest.mark.parametrize("kind", [None, "random", "deterministic"])
@pytest.mark.parametrize(
    ("make_env", "make_policy"),
    [(env, policy) for env in (cartpole, categorical) for policy in CHOICES if policy is not uniform]
    + [(pendulum, policy) for policy in VALUES if policy is not uniform],
    ids=lambda function: function.__name__,
)
def test_members_of_policies_equal_the_policy(make_env, make_policy, kind):
    env = make_env()
    outs = []
    for taken in (lambda policy: policy, lambda policy: ModuleSequence(members_of(policy, torch.Size([])))):
        torch.manual_seed(0)
        policy = make_policy(env.action_spec)
        env.set_seed(0)
        with torch.no_grad(), set_interaction_type(kind):
            outs.append([taken(policy)(env.reset()) for _ in range(5)])
        outs[-1].append(torch.rand(()))
    for left, right in zip(*outs, strict=True):
        assert isinstance(left, torch.Tensor) or set(left.keys(True, True)) == set(right.keys(True, True))
        assert bool((left == right).all())


@pytest.mark.parametrize("make_policy", [q_actor, actor, logits, gaussian])
def test_networks_of_actors_are_called_on_tensors(make_policy):
    env = pendulum() if make_policy in VALUES else cartpole()
    first, *_ = members_of(make_policy(env.action_spec), torch.Size([]))
    assert isinstance(first.call, PlainCall)


def drawing(kind, keys, **kwargs):
    net = nn.Sequential(nn.Linear(3, 4), modules.NormalParamExtractor() if len(keys) == 2 else nn.Identity())
    return modules.ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys), in_keys=keys, distribution_class=kind, **kwargs
    )


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("kind", ["random", "deterministic", None])
@pytest.mark.parametrize(
    ("distribution", "keys"),
    [
        *((getattr(modules, name), ["loc", "scale"]) for name in ("TanhNormal", "TruncatedNormal")),
        *((kind, ["loc", "scale"]) for kind in (modules.IndependentNormal, torch.distributions.Normal)),
        *((kind, ["logits"]) for kind in (modules.OneHotCategorical, torch.distributions.Categorical)),
        (modules.Delta, ["param"]),
    ],
)
def test_draws_on_tensors_equal_the_modules(distribution, keys, kind, scored):
    torch.manual_seed(0)
    policy = drawing(distribution, keys, return_log_prob=scored, default_interaction_type=kind or "random")
    with set_interaction_type(kind):
        assert calls_of(policy, SIZE) is not None
        check(policy, SIZE)


def test_module_that_projects_its_draws_is_called_whole():
    spec = pendulum().action_spec
    for safe in (False, True):
        policy = drawing(torch.distributions.Normal, ["loc", "scale"], spec=spec, safe=safe)
        assert (calls_of(policy, SIZE) is None) is safe


@pytest.mark.parametrize("kind", [modules.LSTMModule, modules.GRUModule])
def test_primers_of_recurrent_modules_are_used(kind):
    recurrent = kind(input_size=3, hidden_size=4, in_key="observation", out_key="embed")
    policy = TensorDictSequential(recurrent, TensorDictModule(nn.Linear(4, 1), ["embed"], ["action"]))
    env = TransformedEnv(pendulum(), Compose(InitTracker(), modules.get_primers_from_module(policy)))
    batch = next(iter(SyncDataCollector(env, policy, frames_per_batch=8, total_frames=8)))
    state = recurrent.in_keys[1]
    assert env.full_observation_spec[state].shape == batch[state].shape[1:] == (1, 4)
    assert not batch[state][0].any() and batch[state][1:].any()


def test_modules_convert_specs_to_torchrls():
    module = modules.EGreedyModule(spec=OneHot(3))
    assert isinstance(module.spec["action"], theirs.OneHot)
    whole = modules.AdditiveGaussianModule(spec=Composite(action=Unbounded(3)), action_key="action")
    assert isinstance(whole.spec, theirs.Composite) and isinstance(whole.spec["action"], theirs.Unbounded)
    assert isinstance(q_actor(Categorical(2)).spec["action"], theirs.Categorical)


def test_torchrl_specs_are_passed_unchanged():
    spec = theirs.Composite(action=theirs.Unbounded(3))
    module = modules.SafeModule(nn.Linear(3, 1), ["observation"], ["action"])
    module.spec = spec
    assert module.spec is spec


def test_signatures_of_modules_are_unchanged():
    assert "spec" in inspect.signature(modules.QValueActor).parameters
    assert inspect.signature(modules.EGreedyModule.__init__).parameters["spec"].name == "spec"


@pytest.mark.parametrize("first", ["gleanrl.data", "torchrl.modules", "torchrl.objectives"])
def test_torchrl_and_gleanrl_may_be_imported_in_any_order(first):
    code = f"""
import {first}
import torchrl.modules, torchrl.data
from gleanrl.data import OneHot
assert isinstance(torchrl.modules.EGreedyModule(spec=OneHot(3)).spec["action"], torchrl.data.OneHot)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
