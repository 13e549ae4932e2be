"""Transforms give the same rows on columns and on TensorDicts, bit for bit."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper, SerialEnv
from gleanrl.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)
from gleanrl.envs.transforms.stepper import TransformedStepper
from gleanrl.errors import EnvironmentFailure, UnsupportedError
from tests.envs.libs.vectors import NativeOracle
from tests.envs.transforms.ways import ENVS, SCRIPT, batched, batches, collect_both_ways, joined, single, team
from tests.fakes import DictEnv, RaisingEnv, ReusingEnv, Script
from tests.fakes_base import CountingEnv


def everything(env):
    key = ("agents", "observation") if env is team else "observation"
    stack = ("agents", "stack") if env is team else "stack"
    return [
        RewardScaling(1.0, 2.0),
        CatFrames(2, -1, in_keys=[key], out_keys=[stack]),
        StepCounter(3),
        RewardSum(),
        ObservationNorm(0.5, 3.0, in_keys=[key]),
        RenameTransform(["step_count"], ["n"]),
    ]


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("sizes", [(20,), (1,) * 9, (3, 4, 5)])
def test_long_chain_agrees_on_rows_and_tensordicts_for_all_batch_sizes(env, sizes):
    parts = collect_both_ways(env, lambda: everything(env), sizes=sizes)
    assert [part.shape[-1] for part in parts] == list(sizes)


@pytest.mark.parametrize("env", [single, batched])
def test_a_policy_sees_the_transformed_root(env):
    seen = []

    def act(stack):
        seen.append(stack.clone())
        return stack[..., :2].clamp(-1, 1)

    policy = TensorDictModule(act, in_keys=["stack"], out_keys=["action"])
    batch = joined(collect_both_ways(env, lambda: everything(env), policy=policy))
    count = batch.shape[-1]
    time = batch.ndim - 1
    assert torch.equal(torch.stack(seen[-count:], time), batch["stack"])


@pytest.mark.parametrize("env", [single, batched])
def test_policy_reads_transformed_values_of_its_row(env):
    def act(count, total):
        return torch.cat([torch.sin(count * 1.0), torch.cos(total)], -1)

    policy = TensorDictModule(act, in_keys=["step_count", "episode_reward"], out_keys=["action"])
    parts = collect_both_ways(env, lambda: [RewardSum(), StepCounter(3)], policy=policy, sizes=(7, 5))
    batch = joined(parts)
    assert torch.equal(batch["action"], act(batch["step_count"], batch["episode_reward"]))


class Backwards(Transform):
    """Negates actions in its own `inv`, which works on rows."""

    on_rows = True

    def __init__(self):
        super().__init__(in_keys_inv=["action"])

    def inv(self, tensordict):
        return tensordict.set("action", -tensordict.get("action"))


@pytest.mark.parametrize("chained", [False, True])
def test_user_defined_inv_is_called_in_and_outside_a_chain(chained):
    one = Backwards()
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(one) if chained else one)
    env.set_seed(0)
    batch = env.rollout(3)
    env.set_seed(0)
    root = env.reset()
    root["action"] = batch["action"][0]
    assert isinstance(env.make_stepper(), TransformedStepper)
    assert torch.equal(env.step(root)["next", "observation"], batch["next", "observation"][0])


@pytest.mark.parametrize("chain", [(RewardSum, StepCounter), (StepCounter, RewardSum)])
def test_values_overwritten_by_a_policy_are_recorded(chain):
    env = TransformedEnv(
        single(), Compose(*[make() for make in chain], StepCounter(3, step_count_key="short"))
    )
    policy = TensorDictModule(
        lambda seen, total: (seen[..., :2].clamp(-1, 1), total + 1),
        in_keys=["observation", "episode_reward"],
        out_keys=["action", "episode_reward"],
    )
    _, parts = batches(env, policy=policy)
    batch = joined(parts)
    assert torch.equal(batch["next", "episode_reward"], batch["episode_reward"] + batch["next", "reward"])


@pytest.mark.parametrize("kind", [ReusingEnv, DictEnv])
def test_environments_that_reuse_arrays_or_return_dictionaries(kind):
    key = "observation"

    def chain():
        return [CatFrames(2, -1, in_keys=[key], out_keys=["stack"]), StepCounter(4)]

    batch = joined(collect_both_ways(lambda: GymWrapper(kind(script=SCRIPT)), chain))
    assert torch.equal(batch["next", "stack"][:, 3:], batch["next", key])
    assert torch.equal(batch["next", "stack"][:, :3], batch[key])


def test_a_reset_of_some_environments_between_batches():
    env = TransformedEnv(batched(), Compose(*everything(batched)))
    collector = SyncDataCollector(env, frames_per_batch=6, total_frames=-1)
    first = collector.next()
    collector.reset(1)
    second = collector.next()
    assert int(second["n"][1, 0]) == 0
    going_on = ~first["next", "done"][:, -1, 0]
    going_on[1] = False
    assert torch.equal(second["n"][going_on, 0], first["next", "n"][going_on, -1])
    old = (second["observation"] - 0.5) / 3
    assert torch.equal(second["stack"][1, 0, :3], second["stack"][1, 0, 3:])
    assert torch.allclose(second["stack"][..., 3:], old, atol=1e-5)


def test_error_in_a_transform_names_its_place_and_the_next_batch_resets():
    calls = []

    def fail(td):
        calls.append(1)
        if len(calls) == 4:
            raise ArithmeticError("on purpose")
        return td

    class Failing(ObservationNorm):
        on_rows = True

        def _apply_transform(self, value):
            return fail(super()._apply_transform(value))

    env = TransformedEnv(single(), Compose(StepCounter(), Failing(0.0, 1.0, in_keys=["observation"])))
    collector = SyncDataCollector(env, frames_per_batch=6, total_frames=-1)
    with pytest.raises(ArithmeticError, match="episode 0, step 1: step raised"):
        collector.next()
    batch = collector.next()
    assert int(batch["step_count"][0]) == 0


def test_a_transform_may_return_the_same_tensor_again():
    class OneBuffer(Transform):
        """Returns the same tensor from every call."""

        def _apply_transform(self, value):
            self.buffer = value.clone() if not hasattr(self, "buffer") else self.buffer.copy_(value)
            return self.buffer

    env = TransformedEnv(single(), OneBuffer(in_keys=["observation"], out_keys=["same"]))
    _, parts = batches(env)
    batch = joined(parts)
    assert torch.equal(batch["same"], batch["observation"])
    assert torch.equal(batch["next", "same"], batch["next", "observation"])


@pytest.mark.parametrize("at", [2, 5])
def test_steps_before_an_error_are_complete(at):
    env = TransformedEnv(GymWrapper(RaisingEnv(at, script=SCRIPT)), Compose(StepCounter(), RewardSum()))
    collector = SyncDataCollector(env, frames_per_batch=9, total_frames=-1)
    with pytest.raises(EnvironmentFailure):
        collector.next()
    assert collector.stats().discarded == at - 1
    batch = collector.next()
    assert torch.equal(batch["step_count"], batch["observation"][:, 2:].long())


def test_an_error_in_the_environment_passes():
    env = TransformedEnv(GymWrapper(RaisingEnv(3, script=SCRIPT)), StepCounter())
    with pytest.raises(EnvironmentFailure, match="on purpose"):
        env.rollout(9, break_when_any_done=False)


@pytest.mark.parametrize("env", ENVS)
def test_a_rollout_stops_where_a_transform_ends_the_episode(env):
    batch = TransformedEnv(env(), StepCounter(2)).rollout(9)
    plain = env().rollout(9)
    assert batch.shape[-1] == min(2, plain.shape[-1])


def test_interrupted_batch_continues_in_the_next():
    class Once:
        asked = 0

        def collection_stopped(self):
            Once.asked += 1
            return Once.asked == 3

    env = TransformedEnv(batched(), Compose(StepCounter(), RewardSum()))
    collector = SyncDataCollector(env, frames_per_batch=18, total_frames=-1, interruptor=Once())
    first, second = collector.next(), collector.next()
    assert first.shape == (3, 3)
    going_on = ~first["next", "done"][:, -1, 0]
    assert torch.equal(second["step_count"][going_on, 0], first["next", "step_count"][going_on, -1])


def test_columns_without_transforms_are_written_in_place():
    env = TransformedEnv(single(), ObservationNorm(0.0, 2.0, in_keys=["observation"], out_keys=["twice"]))
    stepper, parts = batches(env, sizes=(5,))
    inner = stepper._inner
    outer = stepper._block
    assert inner.column(("observation",)).data_ptr() == outer.column(("observation",)).data_ptr()
    assert inner.column(("next", "reward")).data_ptr() == outer.column(("next", "reward")).data_ptr()


def test_next_step_autoreset_rows_are_transformed():
    stack = CatFrames(2, -1, in_keys=["observation"], out_keys=["stack"])
    env = TransformedEnv(
        GymWrapper(NativeOracle()), Compose(stack, StepCounter(), RewardSum(), InitTracker())
    )
    batch = SyncDataCollector(env, frames_per_batch=90, total_frames=-1).next()
    mask = batch["collector", "mask"]
    assert not bool(mask.all())
    clock = batch["observation"][..., 2:]
    assert torch.equal(batch["step_count"][mask], clock[mask].long())
    assert torch.equal(batch["is_init"][mask], clock[mask] == 0)
    assert torch.equal(batch["next", "stack"][mask][:, 3:], batch["next", "observation"][mask])
    assert torch.equal(batch["next", "stack"][mask][:, :3], batch["observation"][mask])
    first = ((clock == 0) & mask.unsqueeze(-1)).squeeze(-1)
    assert not bool(batch["episode_reward"][first].any())
    assert torch.equal(batch["stack"][first][:, :3], batch["stack"][first][:, 3:])


def test_step_limit_around_a_self_resetting_environment_is_refused():
    env = GymWrapper(NativeOracle(script=Script(lengths=(9, 2))))
    with pytest.raises(UnsupportedError, match="AutoresetMode"):
        TransformedEnv(env, StepCounter(4)).rollout(9, break_when_any_done=False)
    with pytest.raises(UnsupportedError, match="AutoresetMode"):
        SyncDataCollector(TransformedEnv(env), frames_per_batch=9, total_frames=-1, max_frames_per_traj=2)


def test_end_set_by_an_outer_limit_resets_only_that_member():
    """The members' own transforms continue in the other members, although the reset reaches the whole batch."""

    def member(limit):
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), StepCounter(limit)))

    members = SerialEnv(2, [lambda: member(3), lambda: member(None)])
    env = TransformedEnv(members, StepCounter(max_steps=4, step_count_key="since"))
    rows = env.rollout(12, break_when_any_done=False)
    assert rows["step_count"].squeeze(-1).tolist() == [[0, 1, 2] * 4, [0, 1, 2, 3] * 3]
    assert torch.equal(rows["is_init"], rows["step_count"] == 0)


def test_flags_of_transforms_survive_a_reset_of_other_rows():
    env = TransformedEnv(CountingEnv(Script(ending="never"), (3,)), StepCounter(3, update_done=False))
    collector = SyncDataCollector(env, None, frames_per_batch=12, total_frames=-1)
    assert collector.next()["next", "truncated"][:, -1].all()
    collector.reset(0)
    batch = collector.next()
    assert batch["step_count"][:, 0].flatten().tolist() == [0, 4, 4]
    assert batch["truncated"][:, 0].flatten().tolist() == [False, True, True]
    assert not batch["done"].any()
