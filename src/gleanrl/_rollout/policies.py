"""Random policies, action masks, compiled policies, and the rules that turn a callable into a policy."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass
from tensordict.nn import CudaGraphModule, InteractionType, TensorDictModule, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch._dynamo.exc import TorchDynamoException

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path, did_you_mean, flatten
from gleanrl._rollout.env_traits import Env, EnvTraits, live_actions, masked_now
from gleanrl._rollout.step_mdp import paths_of
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl._util import is_native
from gleanrl.data.specs import Composite, OneHot, from_torchrl, is_masked, without_masks
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.mapping import Changes, SpecMapping
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, PolicyError, UnsupportedError


class Compiler:
    """Compiles the callables of a policy with `torch.compile` or as CUDA graphs, each of them once.

    It compiles the callables that an actor calls. For TensorDict modules that are called on tensors, these are the
    functions inside; any other policy is compiled as a whole. The user's policy isn't changed.

    Args:
        compiling: keyword arguments of `torch.compile`; None for no compilation.
        capturing: keyword arguments of `CudaGraphModule`; None for no CUDA graphs.

    Raises:
        UnsupportedError: for CUDA graphs on a machine without CUDA.
    """

    def __init__(self, compiling: Mapping[str, Any] | None, capturing: Mapping[str, Any] | None) -> None:
        if capturing is not None and not torch.cuda.is_available():
            raise UnsupportedError(
                "cudagraph_policy: CUDA graphs need a CUDA device, and torch finds none here"
            )
        self._compiling, self._capturing = compiling, capturing
        self._made: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a faster callable with the same behaviour as `call`; it is cached by the identity of `call`.

        With `torch.compile`, a call of the result raises `UnsupportedError` if the compilation fails.
        """
        if id(call) not in self._made:
            # The entry keeps `call` alive, so that no other object gets its id.
            self._made[id(call)] = call, self._faster(call)
        return self._made[id(call)][1]

    def _faster(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if self._compiling is not None:
            call = _compiled(call, self._compiling)
        return call if self._capturing is None else CudaGraphModule(call, **self._capturing)


def compiler_of(compile_policy: Any, cudagraph_policy: Any) -> Compiler | None:
    """Return the compiler that a collector's arguments ask for; None if they ask for none.

    Args:
        compile_policy: None, a bool, or keyword arguments of `torch.compile`.
        cudagraph_policy: None, a bool, or keyword arguments of `CudaGraphModule`.

    Raises:
        InvalidTypeError: if an argument is anything else.
        UnsupportedError: for CUDA graphs on a machine without CUDA.
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
                "backend needs a working C++ compiler (CXX), or Triton on a GPU: install one, choose another backend "
                f'(for example compile_policy={{"backend": "aot_eager"}}), or leave compile_policy out. {cause}'
            ) from cause

    return run


class RandomPolicy:
    """Draws actions from a spec.

    A collector draws all actions of a batch in one call, unless the allowed actions may change between steps. A direct
    call draws from torch's global generator; a collector uses its own generator.

    Args:
        action_spec: the spec to draw from, with batch dimensions. A composite spec sets each of its keys. None for the
            action spec of the first environment that the policy acts in.
        action_key: key of the action if `action_spec` is a leaf.

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
        """Use the action spec of `env` from now on, if the policy was made without a spec."""
        if self.action_spec is None:
            self.action_spec = env.full_action_spec

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write an action into `td` and return `td`; raise `PolicyError` if there is no spec."""
        if self.action_spec is None:
            raise PolicyError("RandomPolicy: no action_spec; give it one, or call set_action_spec_from_env")
        drawn = self.action_spec.rand(())
        if isinstance(drawn, TensorDictBase):
            return td.update(drawn)
        return td.set(self.action_key, drawn)

    def draw(
        self, shape: Sequence[int], generator: OwnedTorchGenerator | None = None
    ) -> dict[Path, torch.Tensor]:
        """Return the actions by path; the dimensions `shape` come before the spec's own.

        Args:
            shape: leading dimensions.
            generator: the random generator; None for torch's global generator.
        """
        spec, lead = self.action_spec, tuple(shape)
        if generator is None:
            drawn = spec.rand(lead)
        elif _is_flat(spec):  # the same draws, without a TensorDict
            return {(name,): leaf.rand(lead, generator=generator.get()) for name, leaf in spec.items()}
        elif _takes_generator(type(spec).rand):
            drawn = spec.rand(lead, generator=generator.get())
        else:  # a spec of another library
            with generator.as_global():
                drawn = spec.rand(lead)
        if isinstance(drawn, TensorDictBase):
            return flatten(drawn)
        return {as_path(self.action_key): drawn}

    def draw_indices(
        self, count: int, path: Path, field: Field, generator: OwnedTorchGenerator
    ) -> torch.Tensor | None:
        """Return the chosen indices of `count` one-hot actions, int64 on the CPU: the same choices as `draw` makes.

        Return None, without drawing, unless the action is a single one-hot vector of this path and field on the CPU.
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


class Greedy(torch.nn.Module):
    """Chooses the action with the highest score: the last module of a network that scores all choices.

    Args:
        one_hot: whether the action is a one-hot vector instead of an index. It must match the environment's encoding
            (``categorical_action_encoding=True`` for an index).
        epsilon: the probability of a random action, for each environment and step; None for none. It becomes the
            buffer `epsilon`, float32 of shape ``()``, which workers get with the weights: change it by
            ``head.epsilon.fill_(value)``. It is used while the exploration type is ``RANDOM``, as in collectors by
            default, or none is set.

    Raises:
        InvalidArgumentError: `epsilon` isn't in [0, 1].

    Examples:
        >>> import torch
        >>> Greedy()(torch.tensor([0.1, 0.7, 0.2]))
        tensor(1)
        >>> Greedy(one_hot=True)(torch.tensor([0.1, 0.7, 0.2]))
        tensor([0, 1, 0])
    """

    epsilon: torch.Tensor

    def __init__(self, one_hot: bool = False, epsilon: float | None = None) -> None:
        super().__init__()
        self.one_hot = one_hot
        if epsilon is not None:
            if not 0 <= epsilon <= 1:
                raise InvalidArgumentError(f"epsilon: expected a number from 0 to 1, got {epsilon!r}")
            self.register_buffer("epsilon", torch.tensor(float(epsilon)))

    def explores(self) -> bool:
        """Return whether an action may be random: with `epsilon`, and exploration of the type ``RANDOM`` or none."""
        return "epsilon" in self._buffers and interaction_type() in (InteractionType.RANDOM, None)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the first index of the highest score, ``(*batch,)`` int64, or its one-hot vector, ``(*batch, n)``.

        With `epsilon`, some of them are random, independently of each other.

        Args:
            scores: ``(*batch, n)``.
        """
        index, n = scores.argmax(-1), scores.shape[-1]
        if self.explores():
            is_random = torch.rand(index.shape, device=index.device) < self.epsilon
            index = torch.where(is_random, torch.randint_like(index, n), index)
        return torch.nn.functional.one_hot(index, n) if self.one_hot else index


def drawing_device(spec: Any) -> torch.device:
    """Return the device on which a spec's `rand` creates its values."""
    for leaf in spec.values(True, True):
        if leaf.device is not None:
            return torch.device(leaf.device)
    return default_device()


def default_device() -> torch.device:
    """Return the device of new tensors. torch 2.6 can't tell it once it was set to None."""
    return torch.empty(0).device


def only_draws(policy: Any) -> bool:
    """Return whether a policy acts exactly like `RandomPolicy`, so that a batch can be drawn in one call."""
    return is_native(policy, "__call__", "draw", of=RandomPolicy)


class AllowedActions(RandomPolicy):
    """Draws from the action spec of an environment with changing masks, with the masks at the time of each draw.

    Args:
        env: the environment.
    """

    def __init__(self, env: Env) -> None:
        self._env, self.action_key = env, "action"

    @property
    def action_spec(self) -> Any:
        """The full action spec with its current masks."""
        return live_actions(self._env)


class MaskWatch:
    """Reports whether a mask restricts an environment's actions.

    If it found no mask and the environment notes masks (see `EnvTraits`), it looks again only after a change of any
    spec.

    Args:
        env: any environment.
    """

    def __init__(self, env: Env) -> None:
        self._env, self._notes = env, EnvTraits.of(env).notes_masks
        self._without: object = None  # the last change after which no mask was found

    def present(self) -> bool:
        """Return whether there is currently a mask."""
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

    All actions were drawn uniformly, without a mask. An allowed action is kept, and a forbidden one is redrawn from the
    allowed ones; so the result is uniform over the allowed actions. Each environment of a batch has its own generator,
    so that the draws don't depend on how processes share the batch.

    Args:
        env: the environment with the masks.
        block: the block with the actions; `Block.redraw_seed` seeds the generators.
    """

    def __init__(self, env: Env, block: Block) -> None:
        assert block.redraw_seed is not None
        self._env, self._seed, self._mask = env, block.redraw_seed, MaskWatch(env)
        self._indices = list(np.ndindex(*env.batch_size))
        paths = sorted(paths_of(env.action_keys))  # the order of a set differs between processes
        self._rows: list[tuple[Path, Any]] = [(path, block.rows(path)) for path in paths]
        self._generators: dict[int, torch.Generator] = {}

    def prepare(self, t: int) -> None:
        """Redraw the actions of row `t` that are currently forbidden, in place."""
        if not self._mask.present():
            return
        spec = from_torchrl(live_actions(self._env))
        for path, rows in self._rows:
            leaf, row = spec[as_key(path)], rows[t]
            if not is_masked(leaf) or leaf.is_in(row.to(leaf.device)):
                continue
            for number, index in enumerate(self._indices):
                one, action = (leaf[index], row[index]) if index else (leaf, row)
                if not one.is_in(action.to(one.device)):
                    action.copy_(one.rand((), generator=self._generator(number, one.device)))

    def _generator(self, number: int, device: torch.device | None) -> torch.Generator:
        generator = self._generators.get(number)
        if generator is None:
            target = default_device() if device is None else device
            generator = torch.Generator(target).manual_seed(self._seed + number)
            self._generators[number] = generator
        return generator


class OwnActions:
    """Random actions from an environment's own `rand_action`, if that does more than draw from the spec.

    Args:
        env: the environment.
        fields: the columns to write, without batch dimensions. Columns that `rand_action` doesn't write are set to
            zero. None for the actions only.
    """

    def __init__(self, env: Env, fields: Mapping[Path, Field] | None = None) -> None:
        self._env = env
        self._rest = {p: f for p, f in (fields or {}).items() if as_key(p) not in env.action_keys}

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write an action into `td` and return `td`."""
        td.update(self._env.rand_action(td.copy()).select(*self._env.action_keys))
        for path, field in self._rest.items():
            td.set(as_key(path), torch.zeros((*td.batch_size, *field.shape), dtype=field.dtype))
        return td


def random_policy(env: Env) -> RandomPolicy | OwnActions:
    """Return the policy that draws random actions for `env`.

    The environment must have been reset before, because its masks may appear only after a reset.
    """
    traits = EnvTraits.of(env)
    return OwnActions(env) if traits.own_actions else drawing_policy(env, traits)


def drawing_policy(env: Env, traits: EnvTraits) -> RandomPolicy:
    """Return the policy that draws from the action spec of `env`, with the current masks if it has any."""
    if traits.actions_vary or is_masked(from_torchrl(live_actions(env))):
        return AllowedActions(env)
    return RandomPolicy(env.full_action_spec)


def _obeying(policy: RandomPolicy, env: Env) -> RandomPolicy:
    """Return `policy`, or the policy that obeys the masks of `env` if `policy` draws from all actions of `env`."""
    masked = drawing_policy(env, EnvTraits.of(env)) if only_draws(policy) else policy
    return masked if isinstance(masked, AllowedActions) and draws_all(policy, env) else policy


def draws_all(policy: RandomPolicy, env: Env) -> bool:
    """Return whether `policy` draws from all actions of `env`, including actions that are currently masked."""
    spec = from_torchrl(policy.action_spec)
    if not isinstance(spec, SpecMapping):
        spec = Composite({policy.action_key: spec})
    declared = from_torchrl(env.full_action_spec)
    return _unmasked_leaves(spec) == _unmasked_leaves(declared)


def unmasked(policy: RandomPolicy) -> RandomPolicy:
    """Return a policy that draws from all actions of `policy`, including masked ones."""
    spec = from_torchrl(policy.action_spec)
    return RandomPolicy(without_masks(spec), policy.action_key) if is_masked(spec) else policy


def _unmasked_leaves(spec: SpecMapping) -> dict[Path, Any]:
    leaves = {as_path(key): spec[key] for key in spec.keys(True, True)}
    return {path: without_masks(leaf) for path, leaf in leaves.items() if leaf is not None}


def wrap_policy(policy: Any, env: Env, observation_keys: Sequence[NestedKey]) -> Any:
    """Return `policy` as a callable on TensorDicts.

    - None, `env.rand_step` and `env.rand_action` give a random policy.
    - A `RandomPolicy` without a spec gets the environment's, in place. If it draws from all actions of an environment
      with masks, it is replaced by a policy that draws only allowed ones.
    - A TensorDict module, or a callable with one TensorDict parameter, is returned unchanged.
    - Any other callable is wrapped in a TensorDictModule. Its inputs are the parameters that have names of
      observations (see `_names_of`). If there are none, its only required parameter gets the only observation.

    Args:
        policy: the user's policy.
        env: the environment; its action keys become the output keys.
        observation_keys: the keys of the environment's observations.

    Raises:
        InvalidTypeError: if `policy` isn't callable, or the parameters can't be matched with observations (also a
            TypeError).
        PolicyError: if an object with one parameter has in_keys and out_keys but isn't a TensorDict module (also a
            RuntimeError). With another number of parameters this is an `InvalidTypeError`.
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
    """Return whether `rand` of a spec only draws a tensor for each leaf, at the top level, with a given generator."""
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
    offered = _names_of(observation_keys)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p for p in named if p.default is p.empty]
    # An optional parameter keeps its default unless it has the name of an observation at the top level.
    at_top = {name for name, path in offered.items() if len(path) == 1 and path[0] in observation_keys}
    matched = [p for p in named if p.name in (offered if p.default is p.empty else at_top)]
    unmatched = [p.name for p in required if p.name not in offered]
    out_keys = list(env.action_keys)
    one = len(required) == 1 or (not required and any(p.kind is p.VAR_POSITIONAL for p in parameters))
    if one and len(observation_keys) == 1 and not any(p.name in at_top for p in named):
        return TensorDictModule(policy, in_keys=list(observation_keys), out_keys=out_keys)
    if matched and not unmatched:
        # By keyword if possible, because optional parameters without an observation may come in between.
        kinds = {p.kind for p in matched}
        if inspect.Parameter.POSITIONAL_ONLY not in kinds:
            in_keys = {p.name: offered[p.name] for p in matched}
            return TensorDictModule(policy, in_keys=in_keys, out_keys=out_keys, out_to_in_map=True)
        return TensorDictModule(policy, in_keys=[offered[p.name] for p in matched], out_keys=out_keys)
    name, names = getattr(policy, "__name__", type(policy).__name__), [p.name for p in parameters]
    hint = next(filter(None, (did_you_mean(missing, offered) for missing in unmatched)), "")
    raise InvalidTypeError(
        f"policy: can't match the parameters {names} of {name} with the observations {list(observation_keys)}; name "
        f"the parameters {', '.join(offered)}, or pass a TensorDictModule{hint}"
    )


def _names_of(observation_keys: Sequence[NestedKey]) -> dict[str, Path]:
    """Return the observations and groups of observations by the names that a parameter may have.

    The name is the last part of the key. If several keys end with it, it denotes the one at the top level, if any.
    """
    found: dict[str, Path] = {}
    ambiguous: set[str] = set()
    for key in observation_keys:
        path = (key,) if isinstance(key, str) else key
        for end in range(1, len(path) + 1):
            name, prefix = path[end - 1], path[:end]
            if found.setdefault(name, prefix) != prefix:
                ambiguous.add(name)
                if end == 1:
                    found[name] = prefix
    for name in ambiguous:
        if len(found[name]) > 1:
            del found[name]
    return found
