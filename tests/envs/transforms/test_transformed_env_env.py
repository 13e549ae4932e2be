"""`TransformedEnv` has the interface and attributes of its base environment."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper, ParallelEnv, SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
)
from gleanrl.errors import ClosedError, ContainerError, InvalidTypeError, SchemaError, UnsupportedError
from tests.envs.transforms.ways import ENVS, SCRIPT, batched, collect_both_ways, joined, single, team
from tests.fakes import OracleEnv
from tests.fakes_base import CountingEnv


def several():
    return Compose(StepCounter(), RewardSum(), InitTracker())


@pytest.mark.parametrize("env", ENVS)
def test_transformed_specs_hold(env):
    check_env_specs(TransformedEnv(env(), several()))


def test_nested_transformed_environments_are_flattened():
    base = single()
    inner = TransformedEnv(base, StepCounter())
    outer = TransformedEnv(inner, RewardSum())
    assert outer.base_env is base
    assert [type(t) for t in outer.transform] == [StepCounter, RewardSum]
    assert outer.transform[0] is not inner.transform
    assert inner.rollout(2)["step_count"].flatten().tolist() == [0, 1]
    assert len(TransformedEnv(TransformedEnv(base, StepCounter())).transform) == 1


def test_transforms_can_be_added():
    env = TransformedEnv(single(), StepCounter())
    assert env.append_transform(RewardSum()) is env
    env.insert_transform(0, lambda td: td.set("observation", td["observation"] + 1))
    assert [type(t).__name__ for t in env.transform] == ["CallableTransform", "StepCounter", "RewardSum"]
    assert env.rollout(2)["observation"][0].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(InvalidTypeError):
        env.append_transform(3)
    with pytest.raises(ContainerError):
        env.append_transform(env.transform[1])


def test_append_transform_wraps_a_plain_environment():
    base = single()
    env = base.append_transform(StepCounter())
    assert isinstance(env, TransformedEnv)
    assert env.base_env is base


@pytest.mark.parametrize("given", ["CartPole-v1", single, CountingEnv, None])
def test_value_other_than_an_environment_is_refused(given):
    with pytest.raises(
        InvalidTypeError, match="env: expected an environment, got .*; call the function that makes it"
    ):
        TransformedEnv(given, RewardSum())


def test_attributes_come_from_the_base_environment():
    env = TransformedEnv(single(), StepCounter())
    assert env.unwrapped is env.base_env.unwrapped
    assert env.hello("you") == "hello you from 0"
    assert not hasattr(env, "nothing_like_it")
    with pytest.raises(AttributeError):
        env.batch_size = [3]
    with pytest.raises(UnsupportedError, match="follow"):
        TransformedEnv(single(), batch_size=[])
    env = TransformedEnv(CountingEnv(), StepCounter(), device="cpu")
    assert env.device == env.base_env.device == env.reset().device == torch.device("cpu")


def test_auto_unwrap_false_keeps_the_inner_environment():
    inner = TransformedEnv(single(), StepCounter(max_steps=3))
    env = TransformedEnv(inner, RewardSum(), auto_unwrap=False)
    assert env.base_env is inner and type(env.transform) is RewardSum
    data = env.rollout(7, break_when_any_done=False)
    apart = TransformedEnv(TransformedEnv(single(), StepCounter(max_steps=3)), RewardSum())
    assert isinstance(apart.base_env, type(inner.base_env)) and len(apart.transform) == 2
    assert (data.exclude("action") == apart.rollout(7, break_when_any_done=False).exclude("action")).all()


def test_seeds_pass_through():
    env = TransformedEnv(CountingEnv(None, (3,)), several())
    assert env.set_seed(7) == 9
    assert env.base_env.seeds == [7]


def test_specs_are_cached_unless_asked():
    env = TransformedEnv(single(), StepCounter())
    assert env.observation_spec is env.observation_spec
    env = TransformedEnv(single(), StepCounter(), cache_specs=False)
    assert env.observation_spec is not env.observation_spec
    env = TransformedEnv(CountingEnv(flags=("done", "terminated")), RewardSum())
    assert "truncated" not in env.done_keys
    assert "truncated" in env.add_truncated_keys().done_keys
    assert "truncated" in env.rollout(2)["next"].keys()


def test_closing_closes_the_environment_inside():
    env = TransformedEnv(single(), StepCounter())
    env.close()
    env.close()
    assert env.base_env.is_closed
    assert env.is_closed
    with pytest.raises(ClosedError):
        env.reset()


def test_state_dict_holds_the_state_of_the_transforms():
    env = TransformedEnv(
        batched(), Compose(VecNorm(in_keys=["observation"]), ObservationNorm(1.0, 2.0, ["reward"]))
    )
    other = TransformedEnv(
        batched(), Compose(VecNorm(in_keys=["observation"]), ObservationNorm(3.0, 4.0, ["reward"]))
    )
    del env.transform.transforms[1], other.transform.transforms[1]
    env.rollout(5, break_when_any_done=False)
    other.load_state_dict(copy.deepcopy(env.state_dict()))
    assert torch.equal(other.transform[0].loc["observation"], env.transform[0].loc["observation"])
    with pytest.raises(SchemaError, match="unexpected"):
        other.load_state_dict({"rubbish": 1})
    given = {"before": 1}
    assert env.state_dict(given, "env.") is given
    assert given.keys() == {"before", *(f"env.{name}" for name in env.state_dict())}


def test_copies_and_pickles_have_separate_parts():
    env = TransformedEnv(batched(), Compose(StepCounter(), CatFrames(2, -1, in_keys=["observation"])))
    env.rollout(3)
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert twin.transform.container is twin
        assert twin.transform[0].parent.base_env is twin.base_env
        batch = twin.rollout(5, break_when_any_done=False)
        assert torch.equal(batch["step_count"], batch["observation"][..., 5:].long())


@pytest.mark.parametrize("inside", [True, False])
def test_transforms_work_inside_and_around_a_batch(inside):
    def member():
        return TransformedEnv(single(), several()) if inside else single()

    env = SerialEnv(3, member)
    env = env if inside else TransformedEnv(env, several())
    batch = SyncDataCollector(env, frames_per_batch=36, total_frames=36).next()
    assert batch.shape == (3, 12)
    clock = batch["observation"][..., 2:]
    assert torch.equal(batch["step_count"], clock.long())
    assert torch.equal(batch["is_init"], clock == 0)
    assert torch.equal(batch["next", "observation"][..., 2:], clock + 1)
    assert torch.equal(batch["next", "episode_reward"], batch["episode_reward"] + batch["next", "reward"])


def test_transforms_work_around_worker_processes():
    parallel = ParallelEnv(2, single)
    try:
        env = TransformedEnv(parallel, Compose(StepCounter(3), ObservationNorm(0.0, 2.0, out_keys=["twice"])))
        batch = SyncDataCollector(env, frames_per_batch=20, total_frames=-1).next()
    finally:
        parallel.close()
    want = SyncDataCollector(
        TransformedEnv(SerialEnv(2, single), StepCounter(3)), frames_per_batch=20, total_frames=-1
    ).next()
    for key in (
        "observation",
        "step_count",
        ("next", "observation"),
        ("next", "done"),
        ("next", "step_count"),
    ):
        assert torch.equal(batch[key], want[key])
    assert torch.equal(batch["next", "twice"], batch["next", "observation"] * 2)


def test_worker_processes_share_statistics():
    shared = VecNorm.build_td_for_shared_vecnorm(single, ["observation"])

    def member():
        return TransformedEnv(single(), VecNorm(in_keys=["observation"], shared_td=shared, decay=1.0))

    env = ParallelEnv(2, member)
    try:
        env.rollout(6, break_when_any_done=False)
    finally:
        env.close()
    # The count covers each step and each reset of two environments.
    count = float(shared._view("observation")[0, 0])
    assert count >= 2 * 7


def test_a_batch_inside_and_outside_agree():
    def chain():
        return [StepCounter(4), CatFrames(2, -1, in_keys=["observation"], out_keys=["stack"])]

    batch = joined(collect_both_ways(lambda: SerialEnv(3, single), chain))
    assert torch.equal(batch["next", "stack"][..., 5], batch["next", "observation"][..., 2])


def test_collector_limit_truncates_transformed_environments():
    for transforms in ([RewardSum()], [RewardSum(), lambda td: td]):
        env = TransformedEnv(CountingEnv(), Compose(*transforms))
        batch = SyncDataCollector(env, frames_per_batch=40, total_frames=40, max_frames_per_traj=2).next()
        assert int(batch["next", "step_count"].max()) == 2
        first = batch["step_count"] == 0
        assert bool((batch["episode_reward"][first] == 0).all())


def test_by_hand_steps_agree_with_rollouts():
    torch.manual_seed(0)
    env = TransformedEnv(batched(), several())
    root, rows = env.reset(), []
    for _ in range(8):
        stepped, root = env.step_and_maybe_reset(env.rand_action(root))
        rows.append(stepped)
    by_hand = torch.stack(rows, 1)
    batch = joined(collect_both_ways(batched, lambda: [several()], sizes=(8,)))
    for key in ("observation", "step_count", "episode_reward", "is_init", "done"):
        assert torch.equal(by_hand[key], batch[key])
        assert torch.equal(by_hand["next", key], batch["next", key])


def test_rollout_continues_from_a_given_root():
    env = TransformedEnv(CountingEnv(None, (2,)), several())
    root = env.reset()
    root["step_count"] += 10
    batch = env.rollout(2, auto_reset=False, tensordict=root, break_when_any_done=False)
    assert batch["step_count"][:, 0].flatten().tolist() == [10, 10]
    assert int(batch["next", "step_count"][0, 0]) == 11


def test_use_outside_the_collector_is_noticed():
    env = TransformedEnv(single(), several())
    collector = SyncDataCollector(env, frames_per_batch=4, total_frames=-1)
    collector.next()
    env.reset()
    with pytest.warns(UserWarning, match="outside the collector"):
        batch = collector.next()
    assert int(batch["step_count"][0]) == 0


def test_agents_flags_reach_every_group():
    env = TransformedEnv(team(), StepCounter(2))
    assert {("agents", "step_count"), "step_count"} <= set(env.observation_spec.keys(True, True))
    assert isinstance(env.reset(), TensorDict)


class Updating:
    """Imitates another library: a reset writes into its argument and returns it."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, tensordict=None, **kwargs):
        fresh = self.env.reset(tensordict, **kwargs)
        if tensordict is None:
            return fresh
        return tensordict.update(fresh).exclude("_reset", inplace=True)


def test_environment_that_returns_its_input_is_supported():
    env = TransformedEnv(Updating(CountingEnv(batch_size=(2,))), StepCounter(3))
    data = env.rollout(20, break_when_any_done=False)
    expected = TransformedEnv(CountingEnv(batch_size=(2,)), StepCounter(3))
    assert (data == expected.rollout(20, break_when_any_done=False).update(data.select("action"))).all()
    root = data[:, -1].exclude("next", "action").set("_reset", torch.tensor([[True], [False]]))
    before = root.clone()
    env.reset(root.copy())
    assert (root == before).all()


@pytest.mark.parametrize(
    "transform",
    [
        lambda: UnsqueezeTransform(-1, in_keys=["observation"]),
        lambda: CatFrames(3, -1, in_keys=["observation"]),
        lambda: RenameTransform(["observation"], ["seen"]),
    ],
    ids=["unsqueeze", "stack", "rename"],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_batches_whose_observations_change_in_place_are_reset_in_part(transform, depth):
    def members():
        env = SerialEnv(2, [lambda i=i: GymWrapper(OracleEnv(i, SCRIPT)) for i in range(2)])
        return env if depth == 1 else SerialEnv(2, [batched, batched])

    collect_both_ways(members, lambda: [transform()])


def test_an_environment_that_calls_itself_closed_before_its_first_reset():
    base = Updating(CountingEnv())
    closings = []
    base.is_closed, base.close = True, lambda: closings.append(1)
    env = TransformedEnv(base)
    env.reset()
    base.is_closed = False
    env.close()
    assert env.is_closed and closings == [1]
    with pytest.raises(ClosedError):
        env.reset()
    unused = TransformedEnv(Updating(CountingEnv()))
    unused.base_env.is_closed, unused.base_env.close = True, lambda: closings.append(2)
    unused.close()
    assert closings == [1]


class Halved(Transform):
    """Behaves differently in training mode and in evaluation mode."""

    def _apply_transform(self, value):
        return value if self.training else value / 2


def test_only_learning_transforms_are_in_training_mode():
    norm = VecNorm(in_keys=["observation"])
    env = TransformedEnv(single(), Compose(Halved(["reward"]), norm))
    assert not env.transform.training
    assert [transform.training for transform in env.transform] == [False, True]
    env.append_transform(Compose(StepCounter(), Halved(["reward"])))
    assert [transform.training for transform in env.transform[-1]] == [False, False]
    assert Halved(["reward"]).training
    env.transform[0].train()
    assert env.transform[-1].parent.transform[0].training  # reading a parent changes no mode
    assert not TransformedEnv(single(), Halved(["reward"])).transform.training


def test_the_first_transform_has_a_transformed_environment_as_its_parent():
    env = TransformedEnv(single(), StepCounter())
    assert env.transform.parent.base_env is env.base_env
    assert env.transform.parent.observation_spec == env.base_env.observation_spec


def test_second_transformed_environment_reports_a_closed_base():
    base = single()
    first, second = TransformedEnv(base, StepCounter()), TransformedEnv(base, StepCounter())
    first.rollout(2)
    first.close()
    with pytest.raises(
        ClosedError, match="in this TransformedEnv was closed.*give each TransformedEnv its own"
    ):
        second.rollout(2)
    with pytest.raises(ClosedError, match=r"^TransformedEnv was closed"):
        first.rollout(2)


class Faulty(Transform):
    """A user's transform with a `TypeError` in its spec method."""

    def _call(self, tensordict):
        return tensordict

    def transform_observation_spec(self, observation_spec):
        return observation_spec.spelled_wrongly


@pytest.mark.parametrize(
    "use",
    [
        lambda env: env.observation_spec,
        lambda env: env.rollout(2),
        lambda env: env.reset(),
        lambda env: SerialEnv(2, lambda: env).rollout(2),
        lambda env: SyncDataCollector(env, None, frames_per_batch=2, total_frames=2),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_attribute_error_in_a_spec_method_is_not_hidden(use, nested):
    env = TransformedEnv(single(), Compose(Faulty()) if nested else Faulty())
    with pytest.raises(AttributeError, match="spelled_wrongly"):
        use(env)
