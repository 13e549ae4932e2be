"""The plan of a rollout: its actor, stepper and columns, chosen once before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.devices import columns_device, on_cpu, said_of, same_device
from gleanrl._arrays.ragged import Leaf, stack_leaves
from gleanrl._arrays.schema import Field, Schema, new_column
from gleanrl._arrays.tensordicts import FLAGS, Path, as_key, as_path, flatten, outermost
from gleanrl._rollout.actors import PolicyActor, RandomActor, RowLayout
from gleanrl._rollout.env_traits import Env, EnvTraits
from gleanrl._rollout.errors import StepFault, explain
from gleanrl._rollout.infer_outputs import OutputProbe, outputs_of, sizes_of_groups
from gleanrl._rollout.loop import with_gradients
from gleanrl._rollout.native_policies import Backend, NativePolicy
from gleanrl._rollout.policies import Compiler, OwnActions, drawing_policy, draws_all, only_draws, wrap_policy
from gleanrl._rollout.protocol import FREELY, Actor, EpisodeRules, Stepper
from gleanrl._rollout.tensordict_stepper import TensorDictStepper, make_stepper
from gleanrl._state.rng import CounterGenerator, OwnedTorchGenerator
from gleanrl.data.specs import from_torchrl, is_masked
from gleanrl.data.trajectories import MASK
from gleanrl.errors import PolicyError, UnsupportedError


class GraphBlock(Block):
    """A block whose rows are separate tensors, so that gradients flow through its values.

    Columns written in place can't carry gradients. So this block stacks each column when it is read, after its rows are
    written. Each step costs more, and each row keeps its graph.

    The arguments are the same as for `Block`.
    """

    keeps_graph = True

    def __init__(
        self, schema: Schema, batch_size: Sequence[int], num_steps: int, device: torch.device | None = None
    ) -> None:
        super().__init__(schema, batch_size, num_steps, columns=())
        self._rows = {
            path: tuple(new_column(batch_size, field, device) for _ in range(num_steps))
            for path, field in schema.items().items()
        }

    def column(self, path: Path) -> Leaf:
        """Return a copy of the column at `path`, with its graph."""
        return stack_leaves(self._rows[path], self.time_dim)

    def rows(self, path: Path) -> tuple[Leaf, ...]:
        """Return the T rows of the column at `path`."""
        return self._rows[path]

    def fill(self, path: Path, values: torch.Tensor) -> None:
        """Write all rows of the column at `path` from `values`, which have time first: ``(T, *batch, *leaf)``."""
        for row, value in zip(self._rows[path], values, strict=True):
            row.copy_(value)

    def batch(self, num_steps: int | None = None, device: torch.device | None = None) -> Any:
        """Return a TensorDict of copies; see `Block.batch`."""
        columns = [self.column(path) for path in self.schema.paths]
        block = Block(self.schema, self.batch_size[:-1], self.num_steps, columns=columns)
        return block.batch(num_steps, device)


@dataclass(frozen=True)
class Handling:
    """How a policy is called.

    Attributes:
        trusted: whether to call it on TensorDicts, regardless of its signature.
        compiler: compiles its callables; None for no compilation.
        backend: which code computes it.
        random: the random numbers of natively run policies.
    """

    trusted: bool = False
    compiler: Compiler | None = None
    backend: Backend = "torch"
    random: CounterGenerator | None = None


AS_IT_IS = Handling()


@dataclass(frozen=True, repr=False)
class RolloutPlan:
    """The parts of a rollout: actor, stepper, policy and columns."""

    stepper: Stepper
    actor: Actor
    make_random_actor: Callable[[], Actor]
    """A function that makes `random_actor`."""
    policy: Any
    """The policy in the form that the actor calls."""
    schema: Schema
    """The columns of a batch, without the collector's own columns."""
    batch_size: torch.Size
    device: torch.device | None
    """The device attribute of TensorDicts made from its blocks."""
    policy_paths: tuple[Path, ...]
    """The columns that the actor writes, actions first."""
    gradients: bool
    """Whether gradients flow through the rollout, so that its blocks keep their graph."""
    done_paths: tuple[Path, ...]
    """The outermost done flags below ``next``: of the environment, or else of each group of agents."""

    @cached_property
    def random_actor(self) -> Actor:
        """An actor that draws from the action spec and writes the same columns as `actor`.

        It is made at the first use, because a batch of environments in other processes must be asked for its masks.
        """
        return self.make_random_actor()

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
            schema: the columns; pass it if the owner adds its own columns to the plan's. Ignored with `gradients`.
            pool: allocates large columns; ignored with `gradients`.
        """
        if self.gradients:
            return GraphBlock(self.schema, self.batch_size, num_steps, self.stepper.device)
        return self.stepper.block(schema or self.schema, num_steps, pool)

    @property
    def rewrites_blocks(self) -> bool:
        """Whether blocks may be reused, unless a policy keeps views of them."""
        stepper = self.stepper
        return stepper.shows_nothing and not stepper.lends and not self.gradients and on_cpu(stepper.device)


def plan_rollout(
    env: Env,
    policy: Any,
    policy_device: torch.device | None = None,
    root: TensorDictBase | None = None,
    act_now: bool = False,
    rules: EpisodeRules = FREELY,
    generator: OwnedTorchGenerator | None = None,
    handling: Handling = AS_IT_IS,
    on_host: bool = False,
) -> RolloutPlan:
    """Choose the actor, the stepper and the columns for `env` and `policy`.

    Without `root`, a stepper without a carry resets the environment here. The rollout starts from that reset, so no
    reset is wasted. A `RandomPolicy` without a spec gets the environment's.

    Args:
        env: any environment with the protocol of `EnvBase`.
        policy: any policy that the collectors accept (see `wrap_policy`).
        policy_device: device of the policy; None leaves its input where the environment is.
        root: the root to start from instead of a reset.
        act_now: whether the rollout follows immediately. If so, and if the policy must be called to know its outputs,
            the call on the first root counts as its first action. Otherwise a copy of the policy is tried. With grad
            mode on, gradients flow through such a rollout if anything requires them.
        rules: when trajectories end and whether they are reset.
        generator: the generator of random actions; None for torch's global generator.
        handling: how the policy is called.
        on_host: see `make_stepper`; the policy's input is still on the environment's device.

    Raises:
        PolicyError: if the policy's outputs don't fit the environment.
        InvalidTypeError: if the policy isn't callable, or its parameters match no observations.
        EnvironmentFailure: if the reset raised; for some causes another error, see `explain`.
    """
    gradients = act_now and torch.is_grad_enabled()
    stepper = make_stepper(env, rules, on_host and not EnvTraits.of(env).own_actions)
    if policy_device is None and not same_device(stepper.device, env.device):
        policy_device = env.device
    # Only `TensorDictStepper` keeps the graph: arrays can't hold gradients.
    if gradients and (stepper.through_tensordicts or _requires_gradients(env, policy, root)):
        stepper = TensorDictStepper(env, rules)
    env_schema = _schema_from(stepper, env, root)
    actions = action_fields(env, len(env.batch_size))
    wrapped = policy
    if not (handling.trusted and callable(policy)):
        wrapped = wrap_policy(policy, env, list(env.observation_spec.keys(True, True)))
    if only_draws(wrapped) or isinstance(wrapped, OwnActions):
        policy_device = None
        if handling.backend == "native":
            raise random_with_native()
    traits = EnvTraits.of(env)  # only now: masks may appear in the first reset
    primed = traits.primed_paths
    trial = OutputProbe(stepper, env, policy_device, act_now, primed)
    wrapped, written = with_gradients(gradients, outputs_of, wrapped, policy, trial, actions)
    if gradients and not isinstance(stepper, TensorDictStepper):
        gradients = any(_on_graph(value) for value in (trial.first or {}).values())
        if gradients:  # a policy with gradients that isn't a module
            stepper = TensorDictStepper(env, rules)
            env_schema = _schema_from(stepper, env, trial.root())
    _check_written(written, env_schema, primed)
    fields = {**env_schema.items(), **written}
    sizes = sizes_of_groups(env, len(env.batch_size), fields)
    layout = _row_layout(env, stepper, tuple(actions), policy_device, sizes)

    def make_random_actor() -> Actor:
        if traits.own_actions:
            return PolicyActor(OwnActions(env, written), written, replace(layout, policy_device=None))
        return RandomActor(
            drawing_policy(env, traits), written, generator=generator, redrawn=stepper.may_mask
        )

    actor: Actor
    if only_draws(wrapped):
        # A mask in the policy's own spec that the environment lacks is the user's choice, so nothing is redrawn.
        redrawn = (
            stepper.may_mask and not is_masked(from_torchrl(wrapped.action_spec)) and draws_all(wrapped, env)
        )
        actor = RandomActor(wrapped, written, traits.actions_vary, generator, redrawn)
    else:
        native = None
        if handling.backend != "torch":
            roots = {path: env_schema[path] for path in layout.roots}
            random = handling.random or CounterGenerator()
            native = NativePolicy(handling.backend, random, roots, written, stepper.batch_size, policy_device)
        actor = PolicyActor(wrapped, written, layout, trial.first, handling.compiler, native)
    groups = outermost(p[:-1] for p in env_schema.paths if p[0] == "next" and p[-1] == "done")
    return RolloutPlan(
        stepper,
        actor,
        make_random_actor,
        wrapped,
        Schema(fields, sizes),
        stepper.batch_size,
        said_of(stepper.device, env.device),
        tuple(written),
        gradients,
        tuple((*group, "done") for group in groups),
    )


def _schema_from(stepper: Stepper, env: Env, root: TensorDictBase | None) -> Schema:
    """Return the environment's columns for a rollout from `root`; for None, a stepper without a carry resets."""
    if root is not None:
        stepper.load(root)
    try:
        return stepper.schema()
    except StepFault as fault:
        raise explain(fault, env) from fault.cause


def _row_layout(
    env: Env,
    stepper: Stepper,
    actions: tuple[Path, ...],
    policy_device: torch.device | None,
    sizes: Mapping[Path, tuple[int, ...]],
) -> RowLayout:
    """Return the columns that a policy on this device finds in a row."""
    schema = stepper.schema()
    roots = tuple(path for path in schema.paths if path[0] != "next" and path != MASK)
    moved = policy_device if policy_device != columns_device(stepper.device) else None
    device = (
        policy_device if policy_device is not None and moved is None else said_of(stepper.device, env.device)
    )
    return RowLayout(roots, actions, stepper.batch_size, device, moved, sizes, frozenset(schema.lists))


def _on_graph(leaf: Leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _requires_gradients(env: Env, policy: Any, root: TensorDictBase | None) -> bool:
    """Return whether the root, the environment or the policy has tensors that require gradients."""
    if root is not None and any(_on_graph(leaf) for leaf in flatten(root).values()):
        return True
    modules = [part for part in (env, policy) if isinstance(part, torch.nn.Module)]
    return any(weight.requires_grad for module in modules for weight in module.parameters())


def _check_written(written: Mapping[Path, Field], env_schema: Schema, primed: frozenset[Path]) -> None:
    """Raise `PolicyError` if the policy writes a flag, a collector entry, or a path below ``next`` outside `primed`.

    An environment's entry that it overwrites must keep its dtype and shape.
    """
    for path, field in written.items():
        if (
            path[0] == "collector"
            or (path[0] == "next" and path not in primed)
            or (path in env_schema and path[-1] in FLAGS)
        ):
            raise PolicyError(
                f"policy: it writes {as_key(path)!r}, which only the environment or the collector may write; "
                "leave it out of the policy's outputs"
            )
        if path in env_schema and field != env_schema[path]:
            raise PolicyError(
                f"policy: it overwrites {as_key(path)!r} with {field}, "
                f"the environment writes {env_schema[path]}"
            )


def random_with_native() -> UnsupportedError:
    """Return the error for ``policy_backend="native"`` with a policy that only draws random actions."""
    return UnsupportedError(
        "policy_backend='native': random actions are drawn in one call anyway, without a policy to compute; leave "
        "policy_backend out, or pass 'auto'"
    )


def action_fields(env: Env, dims: int) -> dict[Path, Field]:
    """Return the action columns that `env` declares, without the first `dims` batch dimensions of each shape."""
    spec = env.full_action_spec
    return {
        as_path(key): Field(torch.Size(spec[key].shape[dims:]), spec[key].dtype) for key in env.action_keys
    }
