"""Run a stepper block by block, as the owner of a rollout does."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import as_path, flatten
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Stepper
from gleanrl.envs.libs.gym import GymWrapper
from gleanrl.envs.libs.gym_stepper import GymStepper


def full_schema(stepper: Stepper, env: GymWrapper) -> Schema:
    """Return the schema of the stepper's columns and the action columns."""
    spec = env.full_action_spec
    actions = {as_path(k): Field(spec[k].shape, spec[k].dtype) for k in spec.keys(True, True)}
    return Schema({**stepper.schema().items(), **actions})


def run(
    stepper: Stepper,
    env: GymWrapper,
    sizes: list[int],
    *,
    ready: bool = True,
    seed: int = 0,
    stop_at: int | None = None,
) -> list[Any]:
    """Step through blocks of these sizes with seeded random actions. Each block is full of ones at first."""
    torch.manual_seed(seed)
    schema, batches = full_schema(stepper, env), []
    for size in sizes:
        block = Block(schema, (), size)
        for column in block.columns:
            column.fill_(1)
        for key, action in env.full_action_spec.rand((size,)).items(True, True):
            block.column(as_path(key)).copy_(action)
        stepper.bind(block, ready)
        steps = size if stop_at is None else min(size, stop_at)
        if ready and stop_at is None:
            stepper.run(block)
        else:
            for t in range(steps):
                stepper.step(t)
        if steps < size:
            stepper.stop(steps)
        batches.append(block.batch(steps))
    return batches


def stepper_of(env: GymWrapper, rules: EpisodeRules = FREELY) -> GymStepper:
    stepper = env.make_stepper(rules)
    assert isinstance(stepper, GymStepper)
    return stepper


def same(a: list[Any], b: list[Any]) -> None:
    for left, right in zip(a, b, strict=True):
        leaves, others = flatten(left), flatten(right)
        assert leaves.keys() == others.keys()
        for path, leaf in leaves.items():
            assert leaf.dtype is others[path].dtype and torch.equal(leaf, others[path]), path
