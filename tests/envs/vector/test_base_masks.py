"""Random actions of batches keep to the masks of their members."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gleanrl.collectors import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RandomPolicy,
    SyncDataCollector,
)
from gleanrl.envs import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv
from gleanrl.envs.custom import TicTacToeEnv
from gleanrl.envs.transforms import (
    Compose,
    RenameTransform,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)
from tests.fakes_masks import ENCODINGS, SOURCES, check_allowed, masked

STEPS = 120


def makers(encoding, source="spec", keys="plain"):
    clocks = (0, 1) if source == "mid_spec" else (0, 5)  # for "mid_spec", both begin without a mask
    return [partial(masked, encoding, source, keys, clock) for clock in clocks]


def serial_of_parallel(each):
    return SerialEnv(2, [partial(ParallelEnv, 2, each)] * 2)


def parallel_of_serial(each):
    return ParallelEnv(2, [partial(SerialEnv, 2, each)] * 2)


def transformed(each):
    return TransformedEnv(SerialEnv(2, each), Compose(RewardSum(), StepCounter()))


BATCHES = {
    "serial": partial(SerialEnv, 2),
    "parallel": partial(ParallelEnv, 2),
    "serial_of_parallel": serial_of_parallel,
    "parallel_of_serial": parallel_of_serial,
    "transformed": transformed,
    "transformed_parallel": lambda each: TransformedEnv(ParallelEnv(2, each), StepCounter()),
    "pool": AsyncEnvPool,
    "process_pool": partial(AsyncEnvPool, backend="multiprocessing"),
}


def flat(batch):
    return batch.reshape(-1, batch.batch_size[-1])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_random_rollouts_keep_to_the_masks_of_the_members_for_each_encoding(encoding, source):
    env = SerialEnv(2, makers(encoding, source))
    check_allowed(env.rollout(STEPS, break_when_any_done=False), encoding)
    env.close()


@pytest.mark.parametrize("keys", ["two", "nested"])
@pytest.mark.parametrize("source", SOURCES)
def test_random_rollouts_keep_to_the_masks_of_several_and_of_nested_actions(source, keys):
    env = SerialEnv(2, makers("one_hot", source, keys))
    check_allowed(env.rollout(STEPS, break_when_any_done=False), "one_hot", keys)
    env.close()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("batch", BATCHES)
def test_random_actions_keep_to_the_masks_of_the_members_in_each_kind_of_batch(batch, source):
    env = BATCHES[batch](makers("multi_categorical", source, "nested"))
    rolled = flat(env.rollout(STEPS, break_when_any_done=False))
    check_allowed(rolled, "multi_categorical", "nested")
    check_allowed(
        flat(env.rollout(30, RandomPolicy(env.full_action_spec), break_when_any_done=False)),
        "multi_categorical",
        "nested",
        everything=False,
    )
    root, rows = env.reset(), []
    for _ in range(12):
        stepped = env.rand_step(root)
        rows.append(stepped.clone())
        root = env.maybe_reset(env.step_mdp(stepped))
    check_allowed(flat(torch.stack(rows, -1)), "multi_categorical", "nested", everything=False)
    env.close()


@pytest.mark.parametrize("source", SOURCES)
def test_serial_parallel_and_nested_draw_the_same_allowed_actions(source):
    drawn = []
    for kind in (SerialEnv, ParallelEnv, lambda n, each: SerialEnv(1, [partial(ParallelEnv, n, each)])):
        torch.manual_seed(3)
        env = kind(2, makers("one_hot", source))
        drawn.append(env.rollout(40, break_when_any_done=False)["action"].reshape(2, 40, -1))
        env.close()
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_member_whose_first_mask_comes_later_than_that_of_another_member_is_asked():
    env = SerialEnv(2, [partial(masked, "one_hot", "mid_spec", "plain", clock) for clock in (0, 4)])
    check_allowed(env.rollout(STEPS, break_when_any_done=False), "one_hot")
    env.close()


class MasksCart(Transform):
    """Allows only pushes to the left from the third step after a reset."""

    def _step(self, tensordict, next_tensordict):
        self.count += 1
        mask = torch.tensor([True, False]) if self.count > 2 else None
        self.container.base_env.full_action_spec["action"].update_mask(mask)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        self.count = 0
        self.container.base_env.full_action_spec["action"].update_mask(None)
        return tensordict_reset


@pytest.mark.parametrize("batched", [False, True])
def test_masks_that_a_transform_of_the_user_sets_in_the_middle_of_a_rollout_are_kept(batched):
    def make():
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), MasksCart()))

    env = SerialEnv(2, make) if batched else make()
    batch = env.rollout(200, break_when_any_done=False)
    late = batch["step_count"].squeeze(-1) > 2
    pushed_right = batch["action"][..., 1].bool()
    assert bool(late.any())
    assert not bool((pushed_right & late).any())
    assert bool(pushed_right.any())
    env.close()


@pytest.mark.parametrize("source", ["mid_spec", "transform"])
def test_transform_that_renames_the_action_keeps_the_masks_of_the_members(source):
    rename = RenameTransform([], [], ["action"], ["act"])
    env = TransformedEnv(SerialEnv(2, makers("categorical", source)), rename)
    batch = env.rollout(STEPS, break_when_any_done=False)
    check_allowed(batch.set("action", batch["act"]), "categorical")
    env.close()


@pytest.mark.parametrize("policy", [None, "random"])
@pytest.mark.parametrize("source", SOURCES)
def test_collectors_keep_to_the_masks_of_the_members(source, policy):
    if policy is not None:
        policy = RandomPolicy(SerialEnv(2, makers("categorical", source)).action_spec)
    env = SerialEnv(2, makers("categorical", source))
    collector = SyncDataCollector(env, policy, frames_per_batch=100, total_frames=300)
    for batch in collector:
        check_allowed(batch, "categorical", everything=False)
    collector.shutdown()


@pytest.mark.parametrize("source", ["late_spec", "mid_spec"])
@pytest.mark.parametrize("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_random_frames_of_workers_keep_to_the_masks_of_the_members(kind, source):
    def policy(td):
        return td.set("action", td["action_mask"].long().argmax(-1))

    make = partial(SerialEnv, 2, makers("categorical", source))
    collector = kind([make] * 2, policy, frames_per_batch=80, total_frames=160, init_random_frames=160)
    for batch in collector:
        check_allowed(flat(batch) if batch.ndim > 1 else batch.unsqueeze(0), "categorical", everything=False)
    collector.shutdown()


@pytest.mark.parametrize("source", ["late_spec", "mid_spec"])
@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_asynchronous_pool_draws_allowed_actions_for_the_rows_that_came(backend, source):
    pool = AsyncEnvPool(makers("one_hot", source), backend=backend)
    roots, rows = pool.reset(), []
    pool.async_step_and_maybe_reset_send(pool.rand_action(roots))
    for _ in range(40):
        stepped, roots = pool.async_step_and_maybe_reset_recv(min_get=1, max_get=1)
        rows.append(stepped.select("action", "action_mask"))
        pool.async_step_and_maybe_reset_send(pool.rand_action(roots))
    check_allowed(torch.cat(rows).unsqueeze(0), "one_hot", everything=False)
    pool.async_step_and_maybe_reset_recv(min_get=2)
    pool.close()


@pytest.mark.parametrize("batch", BATCHES)
def test_members_that_override_rand_action_are_asked(batch):
    env = BATCHES[batch]([TicTacToeEnv] * 2)
    rolled = env.rollout(40, break_when_any_done=False)
    assert bool(rolled["mask"].gather(-1, rolled["action"].unsqueeze(-1)).all())
    root = env.rand_action(env.reset())
    assert root["action"].shape == env.batch_size
    env.close()


def test_every_action_of_a_batch_is_allowed_by_the_members():
    env = SerialEnv(2, [partial(masked, "categorical", "late_spec")] * 2)
    env.reset()
    assert env.all_actions()["action"].tolist() == [[0, 0], [2, 2]]
    env.close()


def test_members_without_masks_are_asked_once_and_then_drawn_for_in_one_call():
    env = SerialEnv(2, [partial(masked, "categorical", "transform")] * 2)
    assert env.live_action_spec() is env.full_action_spec  # before the start
    env.close()
    plain = SerialEnv(2, [TicTacToeEnv] * 2)
    plain.reset()
    assert plain.live_action_spec() is plain.full_action_spec
    plain.close()
