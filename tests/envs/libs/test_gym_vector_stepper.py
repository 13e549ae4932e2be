"""Vector environments equal the oracle in every autoreset mode: last observations, frames, ids and frame counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.utils import split_trajectories
from gleanrl.envs import SerialEnv
from gleanrl.envs.libs.gym import GymEnv, GymWrapper
from gleanrl.envs.libs.gym_vector_stepper import VectorGymStepper
from gleanrl.envs.transforms import Compose, RewardSum, StepCounter, TransformedEnv
from gleanrl.errors import NonFiniteError, SchemaError, UnsupportedError
from tests.contract.helpers import IDS, MASK, Constant, check_ledger, check_stream, same, snapshot, valid_rows
from tests.envs.libs.vectors import MODES, SCRIPT, MaskedOracle, NativeOracle, vector
from tests.fakes import (
    DictEnv,
    InfoEnv,
    NonFiniteEnv,
    RaisingEnv,
    ReusingEnv,
    Script,
    TupleEnv,
)

NEVER = Script(ending="never")
MAKERS: dict[str, Callable[[], Any]] = {
    **{mode.name: lambda mode=mode: vector(mode) for mode in MODES},
    **{f"{mode.name}-in-place": lambda mode=mode: vector(mode, copy=False) for mode in MODES},
    "DISABLED-reusing": lambda: vector(AutoresetMode.DISABLED, kind=ReusingEnv, copy=False),
    "NEXT_STEP-reusing": lambda: vector(AutoresetMode.NEXT_STEP, kind=ReusingEnv, copy=False),
    "native": NativeOracle,
    "native-reusing": lambda: NativeOracle(reuse=True),
    "masked": lambda: MaskedOracle(reuse=True),
    "one": lambda: vector(num_envs=1),
}


def collector(env: Any, **kwargs: Any) -> SyncDataCollector:
    return SyncDataCollector(GymWrapper(env), kwargs.pop("policy", None), **kwargs)


@pytest.mark.parametrize("policy", [None, Constant()], ids=["random", "module"])
@pytest.mark.parametrize("name", MAKERS)
def test_every_frame_is_the_oracles(name: str, policy: Any) -> None:
    made = collector(MAKERS[name](), policy=policy, frames_per_batch=21, total_frames=105)
    batches = list(made)
    check_stream(batches, SCRIPT)
    check_ledger(made)
    stats = made.stats()
    assert sum(valid_rows(batch) for batch in batches) == 105 == stats.delivered
    assert stats.stepped - 105 == stats.reasons.get("budget", 0) < batches[0].shape[0]
    assert all(batch.batch_size[0] == len(batches[0]) for batch in batches)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_asynchronous_vector_environments_equal_the_oracle(mode: AutoresetMode, shared_memory: bool) -> None:
    env = vector(mode, 2, asynchronous=True, copy=False, shared_memory=shared_memory)
    made = collector(env, frames_per_batch=20, total_frames=40)
    check_stream(list(made), SCRIPT)
    check_ledger(made)


def test_rows_use_the_fast_path_and_batches_are_copies() -> None:
    made = collector(NativeOracle(reuse=True), frames_per_batch=12, total_frames=-1)
    assert isinstance(made.plan.stepper, VectorGymStepper)
    batches = iter(made)
    first = next(batches)
    frozen = snapshot(first)
    next(batches)
    assert same(first, frozen)


class TestNextStep:
    """Rows that only reset are no frames."""

    @pytest.mark.parametrize("make", [lambda: vector(AutoresetMode.NEXT_STEP), NativeOracle])
    def test_reset_rows_are_masked_and_not_counted(self, make: Any) -> None:
        made = collector(make(), frames_per_batch=12, total_frames=60)
        batches = list(made)
        whole = torch.cat([batch[MASK] for batch in batches], 1)
        ids = torch.cat([batch[IDS] for batch in batches], 1)
        done = torch.cat([batch["next", "done"][..., 0] for batch in batches], 1)
        assert torch.equal(ids < 0, ~whole) and bool((ids[~whole] == -1).all())
        # One reset follows each end, and no other row is a reset. The budget may cut off the last step.
        assert torch.equal(~whole[:, 1:-1], done[:, :-2]) and int(whole.sum()) == 60
        assert not done[~whole].any()

    def test_a_batch_has_the_mask_even_if_all_are_frames(self) -> None:
        batch = next(iter(collector(NativeOracle(script=NEVER), frames_per_batch=6)))
        assert batch[MASK].all() and MASK not in next(iter(collector(vector(), frames_per_batch=6))).keys(
            True
        )

    def test_frames_beyond_the_budget_in_the_last_step_are_discarded(self) -> None:
        made = collector(NativeOracle(2, Script(lengths=(2,))), frames_per_batch=4, total_frames=12)
        batches = list(made)
        assert sum(map(valid_rows, batches)) == 12 == made.stats().stepped
        uneven = collector(NativeOracle(2, Script(lengths=(2, 5))), frames_per_batch=8, total_frames=8)
        batches = list(uneven)
        stats = uneven.stats()
        assert sum(map(valid_rows, batches)) == stats.delivered == 8
        assert stats.reasons == {"budget": 1} and stats.stepped == 9
        check_ledger(uneven)

    def test_split_trajectories_leaves_reset_rows_out(self) -> None:
        batch = next(iter(collector(NativeOracle(), frames_per_batch=30)))
        split = split_trajectories(batch)
        assert int(split["collector", "mask"].sum()) == valid_rows(batch)
        steps = split["next", "observation"][..., 2] - split["observation"][..., 2]
        assert bool((steps[split["collector", "mask"]] == 1).all())

    def test_step_counts_skip_reset_rows(self) -> None:
        env = vector(AutoresetMode.NEXT_STEP, script=Script(lengths=(6, 2)))
        made = collector(env, frames_per_batch=15, total_frames=60, max_frames_per_traj=4)
        batches = list(made)
        for batch in batches:
            mask = batch[MASK]
            assert torch.equal(batch["step_count"][..., 0][mask], batch["observation"][..., 2][mask].long())
        check_stream(batches, Script(lengths=(6, 2)), limit=4)

    def test_native_vector_environment_refuses_limits_and_partial_resets(self) -> None:
        with pytest.raises(UnsupportedError, match="max_episode_steps=4"):
            collector(NativeOracle(), frames_per_batch=15, max_frames_per_traj=4)
        made = collector(NativeOracle(), frames_per_batch=15)
        with pytest.raises(UnsupportedError, match=r"GymEnv\(name, num_envs=...\)"):
            made.reset(0)
        check_stream([next(iter(made))], SCRIPT, first_step=0)

    def test_discarded_frames_exclude_reset_rows(self) -> None:
        env = vector(AutoresetMode.NEXT_STEP, 2, Script(lengths=(2,)), RaisingEnv, at=5)
        made = collector(env, frames_per_batch=20)
        with pytest.raises(Exception, match="broke on purpose"):
            next(iter(made))
        assert made.stats().discarded == 2 * 2 * 2  # two episodes of two steps in two environments
        check_ledger(made)

    def test_rollouts_have_the_mask(self) -> None:
        data = GymWrapper(NativeOracle(script=Script(lengths=(2,)))).rollout(6, break_when_any_done=False)
        assert data[MASK][0].tolist() == [True, True, False] * 2
        assert GymWrapper(NativeOracle(script=Script(lengths=(2,)))).rollout(6).shape == (3, 2)


@pytest.mark.parametrize("mode", MODES)
class TestEveryMode:
    def test_limits_reset_the_rows_that_reached_them(self, mode: AutoresetMode) -> None:
        made = collector(vector(mode), frames_per_batch=30, total_frames=90, max_frames_per_traj=3)
        check_stream(list(made), SCRIPT, limit=3)

    def test_a_partial_reset_leaves_the_other_rows(self, mode: AutoresetMode) -> None:
        made = collector(vector(mode, script=NEVER), frames_per_batch=9)
        batches = iter(made)
        first = next(batches)
        made.reset(1)
        second = next(batches)
        check = [row["observation"][0].tolist() for row in second.unbind(0)]
        assert check == [[0, 0, 3], [1, 1, 0], [2, 0, 3]]
        assert second[IDS][:, 0].tolist() == [0, 3, 2] and first[IDS][:, 0].tolist() == [0, 1, 2]

    def test_seeds_chain_and_are_used_once(self, mode: AutoresetMode) -> None:
        env = vector(mode)
        made = collector(env, frames_per_batch=9)
        assert made.set_seed(5) == 7
        next(iter(made))
        assert [[s for s, _ in one.resets if s is not None] for one in env.envs] == [[5], [6], [7]]

    def test_observations_with_several_leaves_stay_together(self, mode: AutoresetMode) -> None:
        for kind, key in ((DictEnv, "observation"), (TupleEnv, "observation")):
            made = collector(vector(mode, kind=kind), frames_per_batch=21, total_frames=63)
            batches = list(made)
            if kind is TupleEnv:
                assert batches[0]["observation"].shape[2:] == (2, 3)
                for batch in batches:
                    assert torch.equal(batch["observation"][..., 1, :], batch["observation"][..., 0, :] + 1)
                    for where in (batch, batch["next"]):
                        where["observation"] = where["observation"][..., 0, :]
            else:
                after = batches[0]["next", "goal"][..., 0, 0] * 1024
                assert torch.equal(after, batches[0]["next", key][..., 2])
            check_stream(batches, SCRIPT, obs_key=key)

    def test_info_entries_belong_to_their_step(self, mode: AutoresetMode) -> None:
        env = GymWrapper(vector(mode, kind=InfoEnv)).auto_register_info_dict()
        assert env.observation_spec["velocity"].shape == (3, 2)
        for batch in SyncDataCollector(env, frames_per_batch=30, total_frames=60):
            assert isinstance(env.make_stepper(), VectorGymStepper)
            keep = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool))
            for data in (batch[keep], batch["next"][keep]):
                assert torch.equal(data["velocity"], data["observation"][:, 1:])
                assert torch.equal(data["count"].float(), data["observation"][:, 2])

    def test_non_finite_values_raise(self, mode: AutoresetMode) -> None:
        made = collector(vector(mode, kind=NonFiniteEnv, at=4, script=NEVER), frames_per_batch=18)
        with pytest.raises(NonFiniteError, match="observation"):
            next(iter(made))
        check_ledger(made)

    def test_rollout_continues_from_the_last_root(self, mode: AutoresetMode) -> None:
        env = GymWrapper(vector(mode, script=Script(lengths=(4,))))
        first = env.rollout(9)
        assert first.shape == (3, 4) and first["next", "done"][:, -1].all()
        root = env.maybe_reset(first[:, -1]["next"].exclude("reward"))
        assert root["observation"].tolist() == [[0, 1, 0], [1, 1, 0], [2, 1, 0]]
        second = env.rollout(9, auto_reset=False, tensordict=root)
        assert second["observation"][:, 0].tolist() == root["observation"].tolist() and second.shape == (3, 4)


@pytest.mark.parametrize("name", ["DISABLED", "SAME_STEP", "SAME_STEP-in-place", "DISABLED-reusing"])
@pytest.mark.parametrize("limit", [None, 3])
def test_both_paths_store_the_same(name: str, limit: int | None) -> None:
    batches = []
    for path in ("fast", "tensordict"):
        env = GymWrapper(MAKERS[name]())
        if path == "tensordict":
            env.make_stepper = lambda rules, env=env: TensorDictStepper(env, rules)  # type: ignore[method-assign, misc]
        torch.manual_seed(0)
        made = SyncDataCollector(env, frames_per_batch=30, total_frames=60, max_frames_per_traj=limit)
        assert isinstance(made.plan.stepper, TensorDictStepper) is (path == "tensordict")
        batches.append(list(made))
    for fast, slow in zip(*batches, strict=True):
        assert same(fast, snapshot(slow))


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([3, 4], start=[1, 0]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, (2, 2)),
        spaces.Dict({"arm": spaces.Box(-1, 1, (2,)), "hand": spaces.Discrete(3)}),
        spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3))),
    ],
    ids=str,
)
@pytest.mark.parametrize("categorical", [False, True])
def test_actions_are_members_of_the_space(action_space: Any, categorical: bool) -> None:
    inner = vector(script=NEVER, action_space=action_space)
    env = GymWrapper(inner, categorical)
    env.rollout(3, env.rand_action)
    env.rollout(3, lambda td: env.rand_action(td))
    data = env.rollout(3)
    for p, one in enumerate(inner.envs):
        last = [np.atleast_1d(a) for a in one.actions[-3:]]
        assert len(last) == 3
        if isinstance(action_space, spaces.Discrete):
            chosen = data["action"][p] if categorical else data["action"][p].argmax(-1)
            assert (chosen + action_space.start).tolist() == [int(a[0]) for a in last]
        if isinstance(action_space, spaces.Box):
            assert np.array_equal(data["action"][p].numpy(), np.stack(last))


@pytest.mark.parametrize("mode", MODES)
def test_vector_environments_work_in_a_serial_environment(mode: AutoresetMode) -> None:
    env = SerialEnv(2, lambda: GymWrapper(vector(mode)))
    made = SyncDataCollector(env, frames_per_batch=60, total_frames=120)
    batches = list(made)
    for k in range(2):
        check_stream([batch[k] for batch in batches], SCRIPT)
    check_ledger(made)
    assert batches[0].shape == (2, 3, 10) and made.stats().delivered == 120
    assert GymWrapper(vector(mode)).traits.masks_frames is (mode is AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_steps", [None, 3])
def test_transforms_work_around_vector_environments(mode: AutoresetMode, max_steps: int | None) -> None:
    env = TransformedEnv(GymWrapper(vector(mode)), Compose(StepCounter(max_steps), RewardSum()))
    batches = list(SyncDataCollector(env, frames_per_batch=30, total_frames=60))
    check_stream(batches, SCRIPT, limit=max_steps)
    for batch in batches:
        frames = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool))
        assert torch.equal(batch["step_count"][..., 0][frames], batch["observation"][..., 2][frames].long())


def test_partial_reset_replaces_only_its_rows() -> None:
    made = collector(MaskedOracle(script=NEVER, reuse=True), frames_per_batch=9)
    batches = iter(made)
    next(batches)
    made.reset(1)
    assert next(batches)["observation"][:, 0].tolist() == [[0, 0, 3], [1, 1, 0], [2, 0, 3]]


def test_flags_of_a_loaded_root_affect_one_row_only() -> None:
    env = GymWrapper(vector(script=NEVER))
    root = env.reset()
    root["done"][1] = root["truncated"][1] = True
    stepper = env.make_stepper()
    stepper.load(root)
    assert stepper.root()["done",].flatten().tolist() == [False, True, False]
    schema = Schema({**stepper.schema().items(), ("action",): Field(torch.Size((2,)), torch.float32)})
    for first in (True, False):
        block = Block(schema, (3,), 2)
        block.column(("action",)).zero_()
        stepper.bind(block, actions_ready=True)
        stepper.step(0)
        stepper.step(1)
        assert block.column(("done",))[..., 0].tolist() == [[False] * 2, [first, False], [False] * 2]


def test_loading_a_root_of_another_shape_raises() -> None:
    stepper = GymWrapper(vector()).make_stepper()
    with pytest.raises(SchemaError, match="'observation'"):
        stepper.load(GymWrapper(vector(num_envs=2)).reset())


def test_gym_env_with_num_envs_is_collected() -> None:
    made = SyncDataCollector(GymEnv("CartPole-v1", num_envs=4), frames_per_batch=200, total_frames=400)
    for batch in made:
        assert batch.shape == (4, 50)
        same_step = batch[IDS][:, 1:] == batch[IDS][:, :-1]
        assert torch.equal(
            batch["observation"][:, 1:][same_step], batch["next", "observation"][:, :-1][same_step]
        )
        last = batch["next", "observation"][batch["next", "terminated"][..., 0]]
        assert len(last) and bool(((last[:, 0].abs() > 2.4) | (last[:, 2].abs() > 0.2094)).all())
