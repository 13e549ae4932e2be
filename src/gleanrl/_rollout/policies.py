"""Policies: the random one, and the rules by which any callable becomes one on TensorDicts.

Policies that are compiled, or captured as CUDA graphs, where they are called.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass
from tensordict.nn import CudaGraphModule, TensorDictModule, TensorDictModuleBase
from torch._dynamo.exc import TorchDynamoException

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path, flatten
from gleanrl._rollout.env_traits import Env, EnvTraits, live_actions, masked_now
from gleanrl._rollout.step_mdp import paths_of
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl._util import is_native
from gleanrl.data.specs import Composite, OneHot, from_torchrl, is_masked, without_masks
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.mapping import Changes, SpecMapping
from gleanrl.errors import InvalidTypeError, PolicyError, UnsupportedError


class Compiler:
    """Makes faster callables of a policy's, each of them once.

    What is compiled is what an actor calls: the modules inside TensorDict modules that it takes apart, which see plain
    tensors; any other policy as a whole. The user's policy itself stays as it is.

    Args:
        compiling: keyword arguments of `torch.compile`; None for no compilation.
        capturing: keyword arguments of `CudaGraphModule`; None for no CUDA graphs.

    Raises:
        UnsupportedError: CUDA graphs on a machine without CUDA.
    """

    def __init__(self, compiling: Mapping[str, Any] | None, capturing: Mapping[str, Any] | None) -> None:
        if capturing is not None and not torch.cuda.is_available():
            raise UnsupportedError(
                "cudagraph_policy: CUDA graphs need a CUDA device, and torch finds none here"
            )
        self._compiling, self._capturing = compiling, capturing
        self._made: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does the same as `call`, faster."""
        if id(call) not in self._made:  # the callable is held, so that its id stays its own
            self._made[id(call)] = call, self._faster(call)
        return self._made[id(call)][1]

    def _faster(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if self._compiling is not None:
            call = _compiled(call, self._compiling)
        return call if self._capturing is None else CudaGraphModule(call, **self._capturing)


def compiler_of(compile_policy: Any, cudagraph_policy: Any) -> Compiler | None:
    """Return what the arguments of a collector ask for; None if nothing.

    Args:
        compile_policy: None, a bool, or keyword arguments of `torch.compile`.
        cudagraph_policy: None, a bool, or keyword arguments of `CudaGraphModule`.
    """
    compiling, capturing = (
        _options("compile_policy", compile_policy),
        _options("cudagraph_policy", cudagraph_policy),
    )
    return None if compiling is None and capturing is None else Compiler(compiling, capturing)


def _options(name: str, value: Any) -> Mapping[str, Any] | None:
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidTypeError(f"{name}: expected True, False or keyword arguments, got {value!r}")
    return value


def _compiled(call: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    fast: Any = torch.compile(call, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except TorchDynamoException as cause:
            raise UnsupportedError(
                f"compile_policy: torch.compile can't compile the policy here ({type(cause).__name__}); its default "
                "backend needs a working C++ compiler (CXX), or Triton on a GPU: install one, choose another backend, "
                f'compile_policy={{"backend": "aot_eager"}} say, or leave compile_policy out. {cause}'
            ) from cause

    return run


class RandomPolicy:
    """Draws actions from a spec; a collector draws those of a whole batch of steps in one call.

    Actions come from torch's global generator; a collector draws them with a generator of its own.

    Args:
        action_spec: the spec to draw from, batch dimensions included; a composite one sets each of its keys. None for
            that of the first environment which it acts in.
        action_key: where to write the action if `action_spec` is a leaf.

    Examples:
        >>> from gleanrl.data import Bounded
        >>> from tensordict import TensorDict
        >>> RandomPolicy(Bounded(-1.0, 1.0, (3,)))(TensorDict({}, []))["action"].shape
        torch.Size([3])
    """

    action_spec: Any = None

    def __init__(self, action_spec: Any = None, action_key: NestedKey = "action") -> None:
        self.action_spec = action_spec
        self.action_key = action_key

    def set_action_spec_from_env(self, env: Env) -> None:
        """Draw an environment's actions from now on, if the policy was made without a spec."""
        if self.action_spec is None:
            self.action_spec = env.full_action_spec

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write an action into `td` and return it."""
        if self.action_spec is None:
            raise PolicyError("RandomPolicy: no action_spec; give it one, or call set_action_spec_from_env")
        drawn = self.action_spec.rand(())
        if isinstance(drawn, TensorDictBase):
            return td.update(drawn)
        return td.set(self.action_key, drawn)

    def draw(
        self, shape: Sequence[int], generator: OwnedTorchGenerator | None = None
    ) -> dict[Path, torch.Tensor]:
        """Return actions for each action path, with the dimensions `shape` before those of the spec.

        Args:
            shape: leading dimensions.
            generator: what to draw with; None for torch's global generator.
        """
        spec, lead = self.action_spec, tuple(shape)
        if generator is None:
            drawn = spec.rand(lead)
        elif _is_flat(spec):  # what it would draw, without a TensorDict around it
            return {(name,): leaf.rand(lead, generator=generator.get()) for name, leaf in spec.items()}
        elif _takes_generator(type(spec).rand):
            drawn = spec.rand(lead, generator=generator.get())
        else:  # a spec of another library
            with generator.lent():
                drawn = spec.rand(lead)
        if isinstance(drawn, TensorDictBase):
            return flatten(drawn)
        return {as_path(self.action_key): drawn}

    def draw_indices(
        self, count: int, path: Path, field: Field, generator: OwnedTorchGenerator
    ) -> torch.Tensor | None:
        """Return where the ones of `count` actions stand, int64 on the CPU: those that `draw` would draw.

        None, and nothing is drawn, unless an action is one one-hot vector, of that path and field, drawn on the CPU.
        """
        spec = self.action_spec
        if not _is_flat(spec) or tuple(spec.keys()) != path:
            return None
        leaf, source = spec[path[0]], generator.get()
        alike = type(leaf) is OneHot and leaf.shape == field.shape and leaf.dtype is field.dtype
        if not alike or "rand" in vars(leaf) or source.device.type != "cpu":
            return None
        indices: torch.Tensor = leaf.rand_index((count,), source)
        return indices


def drawing_device(spec: Any) -> torch.device:
    """Return where a spec's `rand` makes its values."""
    for leaf in spec.values(True, True):
        if leaf.device is not None:
            return torch.device(leaf.device)
    return torch.get_default_device()


def only_draws(policy: Any) -> bool:
    """Return whether all that a policy does is what `RandomPolicy` does, so that a whole batch may be drawn at once."""
    return is_native(policy, "__call__", "draw", of=RandomPolicy)


class AllowedActions(RandomPolicy):
    """Draws from the action spec of an environment whose masks change, with the masks that hold at each draw.

    Args:
        env: the environment.
    """

    def __init__(self, env: Env) -> None:
        self._env, self.action_key = env, "action"

    @property
    def action_spec(self) -> Any:
        """The full action spec with its present masks."""
        return live_actions(self._env)


class MaskWatch:
    """Tells whether a mask restricts the actions of an environment; it looks only if a spec has changed since.

    Args:
        env: any environment.
    """

    def __init__(self, env: Env) -> None:
        self._env, self._notes = env, EnvTraits.of(env).notes_masks
        self._without: object = None  # the latest change after which there was no mask

    def present(self) -> bool:
        """Return whether there is a mask at present."""
        latest = Changes.latest
        if latest is self._without:
            return False
        if masked_now(self._env):
            return True
        if self._notes:
            self._without = latest
        return False


class AllowedRows:
    """Redraws forbidden actions of a block, row by row, before the environment takes them.

    The actions were drawn uniformly, without a mask. An allowed one is kept, a forbidden one is drawn again from the
    allowed ones: the result is uniform over the allowed actions. Each environment of a batch has its own generator, so
    that the draws don't depend on how the batch is divided among processes.

    Args:
        env: the environment that has the masks.
        block: its rows; `Block.redraw_seed` seeds the draws.
    """

    def __init__(self, env: Env, block: Block) -> None:
        assert block.redraw_seed is not None
        self._env, self._seed, self._mask = env, block.redraw_seed, MaskWatch(env)
        self._places = list(np.ndindex(*env.batch_size))
        paths = sorted(paths_of(env.action_keys))  # a set's order differs from process to process
        self._rows: list[tuple[Path, Any]] = [(path, block.rows(path)) for path in paths]
        self._generators: dict[int, torch.Generator] = {}

    def prepare(self, t: int) -> None:
        """Redraw the actions of row `t` that are forbidden at present."""
        if not self._mask.present():
            return
        spec = from_torchrl(live_actions(self._env))
        for path, rows in self._rows:
            leaf, row = spec[as_key(path)], rows[t]
            if not is_masked(leaf) or leaf.is_in(row.to(leaf.device)):
                continue
            for number, place in enumerate(self._places):
                one, action = (leaf[place], row[place]) if place else (leaf, row)
                if not one.is_in(action.to(one.device)):
                    action.copy_(one.rand((), generator=self._generator(number, one.device)))

    def _generator(self, number: int, device: torch.device | None) -> torch.Generator:
        generator = self._generators.get(number)
        if generator is None:
            place = torch.get_default_device() if device is None else device
            generator = torch.Generator(place).manual_seed(self._seed + number)
            self._generators[number] = generator
        return generator


class OwnActions:
    """Random actions by an environment's own `rand_action`, which is more than a draw from the spec.

    Args:
        env: the environment.
        fields: the columns to write, without batch dimensions; those that aren't drawn are zero. None for actions only.
    """

    def __init__(self, env: Env, fields: Mapping[Path, Field] | None = None) -> None:
        self._env = env
        self._rest = {p: f for p, f in (fields or {}).items() if as_key(p) not in env.action_keys}

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write an action into `td` and return it."""
        td.update(self._env.rand_action(td.copy()).select(*self._env.action_keys))
        for path, field in self._rest.items():
            td.set(as_key(path), torch.zeros((*td.batch_size, *field.shape), dtype=field.dtype))
        return td


def random_policy(env: Env) -> RandomPolicy | OwnActions:
    """Return the policy that draws random actions for `env`, which was reset: its masks may show then only."""
    traits = EnvTraits.of(env)
    return OwnActions(env) if traits.own_actions else drawing_policy(env, traits)


def drawing_policy(env: Env, traits: EnvTraits) -> RandomPolicy:
    """Return the policy that draws from the action spec of `env`, with the masks of each moment if it has any."""
    if traits.actions_vary or is_masked(from_torchrl(live_actions(env))):
        return AllowedActions(env)
    return RandomPolicy(env.full_action_spec)


def _obeying(policy: RandomPolicy, env: Env) -> RandomPolicy:
    """Return `policy`, or the policy that obeys the masks of `env` if `policy` draws from all actions of `env`."""
    masked = drawing_policy(env, EnvTraits.of(env)) if only_draws(policy) else policy
    return masked if isinstance(masked, AllowedActions) and draws_all(policy, env) else policy


def draws_all(policy: RandomPolicy, env: Env) -> bool:
    """Return whether `policy` draws from all actions of `env`, those that a mask forbids at present included."""
    spec = from_torchrl(policy.action_spec)
    if not isinstance(spec, SpecMapping):
        spec = Composite({policy.action_key: spec})
    declared = from_torchrl(env.full_action_spec)
    return _unmasked_leaves(spec) == _unmasked_leaves(declared)


def unmasked(policy: RandomPolicy) -> RandomPolicy:
    """Return a policy that draws from all actions of `policy`, those that a mask forbids included."""
    spec = from_torchrl(policy.action_spec)
    return RandomPolicy(without_masks(spec), policy.action_key) if is_masked(spec) else policy


def _unmasked_leaves(spec: SpecMapping) -> dict[Path, Any]:
    leaves = {as_path(key): spec[key] for key in spec.keys(True, True)}
    return {path: without_masks(leaf) for path, leaf in leaves.items() if leaf is not None}


def wrap_policy(policy: Any, env: Env, observation_keys: Sequence[NestedKey]) -> Any:
    """Return `policy` as a callable on TensorDicts, by the rules that the collectors document.

    None, `env.rand_step` and `env.rand_action` give a `RandomPolicy`; TensorDict modules and callables of
    one TensorDict are returned as they are; any other callable is wrapped in a TensorDictModule whose
    inputs are the parameters named like observations, or, failing that, its one required parameter for the
    one observation.

    Args:
        policy: what the user gave.
        env: the environment; its action keys become the output keys.
        observation_keys: the keys that the environment's reset offers.

    Raises:
        InvalidTypeError: if the parameters can't be matched with observations (also a TypeError).
        PolicyError: if the object has in_keys and out_keys but isn't a TensorDict module (also a
            RuntimeError).
    """
    if policy is None:
        return random_policy(env)
    if isinstance(policy, RandomPolicy):
        policy.set_action_spec_from_env(env)
        return _obeying(policy, env)
    if isinstance(policy, TensorDictModuleBase):
        return policy
    owner = getattr(policy, "__self__", None)
    if getattr(policy, "__name__", None) in ("rand_step", "rand_action") and hasattr(
        owner, "full_action_spec"
    ):
        return random_policy(env)
    if not callable(policy):
        raise InvalidTypeError(f"policy: expected a callable, got {type(policy).__name__}")
    parameters = _parameters(policy)
    if _takes_tensordict(policy, parameters):
        return policy
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        message = (
            f"{type(policy).__name__} has in_keys and out_keys but isn't a TensorDictModuleBase; "
            "derive it from TensorDictModuleBase, or name its parameter 'tensordict'"
        )
        raise PolicyError(message) if len(parameters) == 1 else InvalidTypeError(message)
    return _wrap(policy, parameters, env, observation_keys)


def _is_flat(spec: Any) -> bool:
    """Return whether a spec's values are those of its leaves, tensors all of them, with nothing else done to them."""
    return (
        type(spec) is Composite
        and "rand" not in vars(spec)
        and spec.data_cls is None
        and all(
            isinstance(leaf, LeafSpec)
            and spec.device in (None, leaf.device)
            and _takes_generator(type(leaf).rand)
            for leaf in spec.values()
        )
    )


@lru_cache
def _takes_generator(rand: Callable[..., Any]) -> bool:
    return "generator" in inspect.signature(rand).parameters


def _parameters(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    call = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return list(signature.parameters.values())


def _takes_tensordict(policy: Callable[..., Any], parameters: list[inspect.Parameter]) -> bool:
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    required = [p for p in named if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    candidates = required if len(required) == 1 else named
    if len(candidates) != 1:
        return False
    (parameter,) = candidates
    if parameter.name in ("tensordict", "td"):
        return True
    return _is_tensordict_type(_annotation(policy, parameter))


def _annotation(policy: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    annotation = parameter.annotation
    if not isinstance(annotation, str):
        return annotation
    call: Any = policy.forward if isinstance(policy, torch.nn.Module) else policy
    if not inspect.isroutine(call):
        call = type(call).__call__
    try:
        return typing.get_type_hints(call).get(parameter.name, annotation)
    except (NameError, TypeError, AttributeError):
        return annotation


def _is_tensordict_type(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.split(".")[-1] in ("TensorDict", "TensorDictBase")
    if not isinstance(annotation, type):
        return False
    return issubclass(annotation, TensorDictBase) or is_tensorclass(annotation)


def _wrap(
    policy: Callable[..., Any],
    parameters: list[inspect.Parameter],
    env: Env,
    observation_keys: Sequence[NestedKey],
) -> TensorDictModule:
    offered = {key: key for key in observation_keys if isinstance(key, str)}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p for p in named if p.default is p.empty]
    matched = [p for p in named if p.name in offered]
    unmatched = [p.name for p in required if p.name not in offered]
    out_keys = list(env.action_keys)
    if matched and not unmatched:
        if all(p.kind is not p.POSITIONAL_ONLY for p in matched):
            return TensorDictModule(policy, in_keys={p.name: p.name for p in matched}, out_keys=out_keys)
        return TensorDictModule(policy, in_keys=[p.name for p in matched], out_keys=out_keys)
    one = len(required) == 1 or (not required and any(p.kind is p.VAR_POSITIONAL for p in parameters))
    if one and not matched and len(observation_keys) == 1:
        return TensorDictModule(policy, in_keys=list(observation_keys), out_keys=out_keys)
    name, names = getattr(policy, "__name__", type(policy).__name__), [p.name for p in parameters]
    raise InvalidTypeError(
        f"policy: can't match the parameters {names} of {name} with the observations "
        f"{list(observation_keys)}; name the parameters like the observations, or pass a TensorDictModule"
    )
