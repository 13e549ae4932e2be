"""The plan of a rollout: which actor, which stepper, which columns. Made once, before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from gleanrl.block import Block, Field, GraphBlock, Schema
from gleanrl.data.boundaries import MASK
from gleanrl.devices import columns_device
from gleanrl.errors import (
    EnvironmentContractError,
    EnvironmentFailure,
    GleanError,
    PolicyError,
    WorkerError,
    failure_from,
)
from gleanrl.pool import BufferPool
from gleanrl.rollouts.actors import PolicyActor, RandomActor, RowLayout, probe, spare
from gleanrl.rollouts.loop import StepFault
from gleanrl.rollouts.modules import Values
from gleanrl.rollouts.policies import OwnActions, RandomPolicy, only_draws, wrap_policy
from gleanrl.rollouts.protocol import FREELY, Actor, EpisodeRules, Stepper
from gleanrl.rollouts.steppers import BATCH, TensorDictStepper, make_stepper
from gleanrl.rollouts.traits import Env, EnvTraits
from gleanrl.seeding import OwnedTorchGenerator
from gleanrl.tree import FLAGS, Layout, Path, as_key, as_path, flatten, group_sizes, outermost

_MOST_SHOWN = 200
"""Characters of an action in an error message."""


@dataclass(frozen=True, repr=False)
class RolloutPlan:
    """What a rollout is made of; `actor` and `stepper` name the choices that were made."""

    stepper: Stepper
    actor: Actor
    random_actor: Actor
    """Draws from the action spec and writes the same columns as `actor`."""
    policy: Any
    """The policy as the actor calls it."""
    schema: Schema
    """The columns of a batch, the collector's own not included."""
    batch_size: torch.Size
    env_device: torch.device | None
    policy_paths: tuple[Path, ...]
    """The columns that the actor writes, actions first."""
    gradients: bool
    """Whether gradients flow through the rollout: its blocks keep their graph."""
    done_paths: tuple[Path, ...]
    """The done flags under ``next`` that end an episode: those of the environment, or, where it has none, those of
    every group of agents."""

    def __repr__(self) -> str:
        """Show the choices by name."""
        parts = (self.stepper, self.actor, self.random_actor, self.policy)
        names = ("stepper", "actor", "random_actor", "policy")
        chosen = ", ".join(f"{name}={type(part).__name__}" for name, part in zip(names, parts, strict=True))
        return f"RolloutPlan({chosen}, batch_size={tuple(self.batch_size)}, schema={self.schema!r})"

    def block(self, num_steps: int, schema: Schema | None = None, pool: BufferPool | None = None) -> Block:
        """Return columns for `num_steps` steps: fresh ones, or borrowed ones (see `Block.owned`).

        Args:
            num_steps: T.
            schema: the columns, if the owner adds some of its own to this plan's.
            pool: where large columns come from.
        """
        if self.gradients:
            return GraphBlock(self.schema, self.batch_size, num_steps, self.stepper.device)
        return self.stepper.block(schema or self.schema, num_steps, pool)


def plan_rollout(
    env: Env,
    policy: Any,
    policy_device: torch.device | None = None,
    root: TensorDictBase | None = None,
    act_now: bool = False,
    rules: EpisodeRules = FREELY,
    generator: OwnedTorchGenerator | None = None,
) -> RolloutPlan:
    """Find out what `env` and `policy` read and write, and choose how they are run.

    The environment is reset if it never was; that reset is the first one of the rollout, none is lost.

    Args:
        env: anything that keeps EnvBase's protocol.
        policy: as in the collectors (see `wrap_policy`).
        policy_device: where the policy runs; None for where it is.
        root: where to start from instead of a reset.
        act_now: whether the rollout follows at once. A policy whose outputs can't be known without calling it
            is then called on the first root for real, and that call's output is its first; otherwise a copy
            of it is tried. With grad mode on, gradients flow through such a rollout if anything requires them.
        rules: what becomes of episodes.
        generator: what random actions are drawn with; None for torch's global generator.

    Raises:
        PolicyError: if the policy's output doesn't fit the environment.
        EnvironmentFailure: if the reset raised.
    """
    gradients = act_now and torch.is_grad_enabled()
    stepper = make_stepper(env, rules)
    if gradients and (stepper.through_tensordicts or _requires_gradients(env, policy, root)):
        stepper = TensorDictStepper(env, rules)
    if root is not None:
        stepper.load(root)
    try:
        env_schema = stepper.schema()
    except StepFault as fault:
        raise explain(fault, env) from fault.cause
    dims = len(env.batch_size)
    actions = action_fields(env, dims)
    keys = list(env.observation_spec.keys(True, True))
    wrapped = wrap_policy(policy, env, keys)
    moved = policy_device if policy_device != columns_device(stepper.device) else None
    if only_draws(wrapped) or isinstance(wrapped, OwnActions):
        moved = None
    traits = EnvTraits.of(env)
    trial = _Trial(stepper, env, moved, act_now)
    trial.primed = frozenset(("next", *as_path(key)) for key in traits.primed_keys)
    with torch.set_grad_enabled(gradients):
        wrapped, written = _outputs(wrapped, policy, trial, actions)
    if gradients and not isinstance(stepper, TensorDictStepper):
        gradients = any(value.requires_grad for value in (trial.first or {}).values())
        if gradients:  # a policy that isn't a module, and learns all the same
            start = trial.root()
            stepper = TensorDictStepper(env, rules)
            stepper.load(start)
            env_schema = stepper.schema()
    _check_written(written, env_schema, trial.primed)
    fields = {**env_schema.items(), **written}
    device = env.device
    roots = tuple(path for path in env_schema.paths if path[0] != "next" and path != MASK)
    sizes = _group_sizes(env, dims, fields)
    layout = RowLayout(roots, tuple(actions), stepper.batch_size, device, moved, sizes)
    vary = traits.actions_vary
    actor: Actor
    if only_draws(wrapped):
        actor = RandomActor(wrapped, written, vary, generator)
    else:
        actor = PolicyActor(wrapped, written, layout, trial.first)
    random_actor: Actor = RandomActor(RandomPolicy(env.full_action_spec), written, vary, generator)
    if traits.own_actions:
        random_actor = PolicyActor(OwnActions(env, written), written, replace(layout, policy_device=None))
    groups = outermost(p[:-1] for p in env_schema.paths if p[0] == "next" and p[-1] == "done")
    done_paths = tuple((*group, "done") for group in groups)
    return RolloutPlan(
        stepper,
        actor,
        random_actor,
        wrapped,
        Schema(fields, sizes),
        stepper.batch_size,
        device,
        tuple(written),
        gradients,
        done_paths,
    )


def _requires_gradients(env: Env, policy: Any, root: TensorDictBase | None) -> bool:
    """Return whether anything that is known before the first step requires gradients."""
    if root is not None and any(leaf.requires_grad for leaf in flatten(root).values()):
        return True
    modules = [part for part in (env, policy) if isinstance(part, torch.nn.Module)]
    return any(weight.requires_grad for module in modules for weight in module.parameters())


def _check_written(
    written: Mapping[Path, Field], env_schema: Schema, primed: frozenset[Path] = frozenset()
) -> None:
    """Raise if the policy writes what isn't its to write; `primed` is what it may write below ``next``."""
    for path, field in written.items():
        if (
            path[0] == "collector"
            or (path[0] == "next" and path not in primed)
            or (path in env_schema and path[-1] in FLAGS)
        ):
            raise PolicyError(f"policy: {as_key(path)!r} isn't a policy's to write")
        if path in env_schema and field != env_schema[path]:
            raise PolicyError(
                f"policy: it overwrites {as_key(path)!r} with {field}, "
                f"the environment writes {env_schema[path]}"
            )


def action_fields(env: Env, dims: int) -> dict[Path, Field]:
    """Return the action columns that `env` declares; `dims` batch dimensions are left out of each shape."""
    spec = env.full_action_spec
    return {
        as_path(key): Field(torch.Size(spec[key].shape[dims:]), spec[key].dtype) for key in env.action_keys
    }


def _group_sizes(env: Env, dims: int, fields: Mapping[Path, Field]) -> dict[Path, tuple[int, ...]]:
    """Return the dimensions that groups declare beyond the batch's, where all of their columns have them."""
    found: dict[Path, tuple[int, ...]] = {}
    for role in ("observation", "action", "reward", "done"):
        sizes = group_sizes(getattr(env, f"full_{role}_spec"), dims)
        found |= sizes | {("next", *group): size for group, size in sizes.items()}
    return {
        group: size
        for group, size in found.items()
        if all(f.shape[: len(size)] == size for path, f in fields.items() if path[: len(group)] == group)
    }


class _Trial:
    """One call of the policy on the first root, to learn what it puts out."""

    def __init__(self, stepper: Stepper, env: Env, device: torch.device | None, act_now: bool) -> None:
        self.stepper, self.env, self.device, self.act_now = stepper, env, device, act_now
        self.first: Values | None = None
        self.primed: frozenset[Path] = frozenset()

    def root(self) -> TensorDictBase:
        """Return the first root."""
        leaves = self.stepper.root()
        dims = len(self.stepper.batch_size)
        sizes = _group_sizes(self.env, dims, {p: Field(v.shape[dims:], v.dtype) for p, v in leaves.items()})
        return Layout(leaves, sizes).build(list(leaves.values()), self.stepper.batch_size, self.env.device)

    def given(self) -> TensorDictBase:
        """Return the first root, where the policy wants it."""
        return self.root() if self.device is None else self.root().to(self.device)

    def run(self, policy: Any, actions: Mapping[Path, Field]) -> dict[Path, Field]:
        """Return the columns that `policy` writes."""
        if not self.act_now:
            with torch.random.fork_rng(devices=[]):
                return probe(spare(policy), self.given(), actions, self.primed)[0]
        fields, self.first = probe(policy, self.given(), actions, self.primed)
        return fields

    def run_wrapped(
        self, module: TensorDictModule, actions: Mapping[Path, Field]
    ) -> tuple[TensorDictModule, dict[Path, Field]]:
        """Call what `module` wraps, once.

        Returns:
            The module with out_keys ``output1``, ``output2``, … for the outputs beyond its actions, and its
            columns.
        """
        names, root = module._kwargs, self.given().clone()  # in-place changes must not reach the carry
        inputs = [root.get(key, None) for key in module.in_keys]
        with nullcontext() if self.act_now else torch.random.fork_rng(devices=[]):
            call = module.module if self.act_now else spare(module.module)
            out = call(*inputs) if names is None else call(**dict(zip(names, inputs, strict=True)))
        if out is None:
            raise PolicyError(f"policy: expected {list(module.out_keys)}, it returned None")
        extra = (len(out) if isinstance(out, tuple) else 1) - len(module.out_keys)
        out_keys = [*module.out_keys, *(f"output{i + 1}" for i in range(extra))]
        in_keys: Any = module.in_keys if names is None else dict(zip(names, module.in_keys, strict=True))
        replay = TensorDictModule(lambda *args, **kwargs: out, in_keys=in_keys, out_keys=out_keys)
        fields, first = probe(replay, root, actions, self.primed)
        if self.act_now:
            self.first = first
        return TensorDictModule(module.module, in_keys=in_keys, out_keys=out_keys), fields


def _outputs(
    wrapped: Any, given: Any, trial: _Trial, actions: dict[Path, Field]
) -> tuple[Any, dict[Path, Field]]:
    """Return the policy and the columns that it writes; it's called only if they can't be known otherwise."""
    if only_draws(wrapped) or isinstance(wrapped, OwnActions):
        return wrapped, actions
    if isinstance(wrapped, TensorDictModuleBase):
        promised = {as_path(key) for key in wrapped.out_keys}
        if any(path[0] == "next" and path not in trial.primed for path in promised):
            raise PolicyError(
                f"policy: out_keys {wrapped.out_keys} contain 'next': a policy writes actions only"
            )
        missing = [as_key(path) for path in actions if path not in promised]
        if missing:
            raise PolicyError(
                f"policy: out_keys {list(wrapped.out_keys)} lack the environment's action keys {missing}"
            )
        if isinstance(wrapped, TensorDictModule) and wrapped is not given:
            return trial.run_wrapped(wrapped, actions)
        if promised == set(actions) and not torch.is_grad_enabled():
            return wrapped, actions
    return wrapped, trial.run(wrapped, actions)


def explain(
    fault: StepFault,
    env: Env,
    episode: int | None = None,
    step: int | None = None,
    action: torch.Tensor | None = None,
) -> GleanError:
    """Return the error that tells a user what `fault` was: which environment, episode and step, and why.

    Args:
        fault: what happened.
        env: the environment, or the batch of them.
        episode: the trajectory's id.
        step: steps of the trajectory before this one.
        action: the action that the environment had been given.
    """
    place = type(env).__name__
    if fault.env != BATCH:
        place = f"environment {fault.env} ({place})"
    if episode is not None:
        place += f", episode {episode}"
    if step is not None:
        place += f", step {step}"
    given = "" if action is None else f" (action {_shown(action)})"
    cause = fault.cause
    if isinstance(cause, (EnvironmentContractError, PolicyError, EnvironmentFailure, WorkerError)):
        error = type(cause)(f"{place}: {cause}{given}")
        error.__cause__ = cause
        return error
    return failure_from(cause, f"{place}: {fault.during} raised {type(cause).__name__}: {cause}{given}")


def _shown(action: torch.Tensor) -> str:
    text = str(action.tolist())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
