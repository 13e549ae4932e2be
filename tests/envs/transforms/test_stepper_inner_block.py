"""The inner block of a transformed environment shares unchanged columns with the outer block."""

from __future__ import annotations

import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Schema
from gleanrl._rollout.plan import action_fields
from gleanrl.envs.transforms import Compose, ObservationNorm, RewardScaling, StepCounter, TransformedEnv
from gleanrl.envs.transforms.stepper import InnerBlocks
from tests.envs.transforms.ways import batched

PATH = ("observation",)


def made(*transforms, inverts=False, changed=frozenset(), summed=frozenset()):
    """Return a maker of inner blocks, and an outer block of three steps."""
    env = TransformedEnv(batched(), Compose(*transforms))
    stepper, base = env.make_stepper(), env.base_env.make_stepper()
    schema = Schema({**stepper.schema().items(), **action_fields(env, 1)})
    return InnerBlocks(env, base, set(changed), inverts, set(summed)), Block(schema, env.batch_size, 3)


def is_shared(inner: Block, outer: Block, path) -> bool:
    return inner.column(path).data_ptr() == outer.column(path).data_ptr()


def test_unchanged_columns_are_shared_with_the_outer_block():
    blocks, outer = made(StepCounter(3), changed={("step_count",)})
    inner = blocks.within(outer)
    assert ("step_count",) not in inner.schema
    assert all(is_shared(inner, outer, path) for path in inner.schema.paths)


def test_changed_columns_have_one_row_and_flags_have_all():
    changed = {PATH, ("reward",), ("done",)}
    blocks, outer = made(
        ObservationNorm(0.0, 2.0, in_keys=["observation"]), RewardScaling(0.0, 2.0), changed=changed
    )
    inner = blocks.within(outer)
    for path in (PATH, ("next", *PATH), ("next", "reward"), ("next", "done")):
        assert not is_shared(inner, outer, path)
    column = inner.column(("next", *PATH))
    column.select(1, 0).fill_(7)
    assert torch.equal(column.select(1, 2), column.select(1, 0))
    flags = inner.column(("next", "done"))
    flags.select(1, 0).fill_(True)
    assert not flags.select(1, 2).any()
    assert set(blocks.required) == {"observation", "reward", "done"}


def test_summed_rewards_have_all_rows():
    blocks, outer = made(RewardScaling(0.0, 2.0), changed={("reward",)}, summed={("reward",)})
    rewards = blocks.within(outer).column(("next", "reward"))
    rewards.select(1, 0).fill_(7)
    assert not rewards.select(1, 2).any()


def test_actions_are_shared_unless_a_transform_inverts_them():
    for inverts in (False, True):
        blocks, outer = made(inverts=inverts)
        inner = blocks.within(outer)
        assert blocks.actions == (("action",),)
        assert is_shared(inner, outer, ("action",)) is not inverts


def test_inner_blocks_of_equal_outer_schemas_share_a_schema():
    blocks, outer = made()
    first, second = blocks.within(outer), blocks.within(outer)
    assert first.schema is second.schema
    assert blocks.within(Block(outer.schema, outer.batch_size[:-1], 5)).schema is first.schema
