"""Splitting TensorDict modules, so that a rollout can call the functions inside directly on tensors.

A module is called directly only if it does no more than "read in_keys, call, write out_keys". A module with another
`forward`, hooks, selected outputs or extra keywords is called as a whole, on a TensorDict. A sequence is split into its
members under the same conditions. Members that need a TensorDict then get one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torch.distributions import Distribution
from torch.nn.modules import module as torch_module

from gleanrl._arrays.tensordicts import (
    Path,
    TensorDictBuilder,
    as_key,
    as_path,
    leaf_at,
    put_leaf,
    stand_apart,
)
from gleanrl._rollout.policies import Compiler
from gleanrl._util import is_native
from gleanrl.errors import PolicyError

_NUMBERS = (np.ndarray, np.generic, bool, int, float)
"""Types that modules may return instead of tensors; their values are converted."""

_ONE = torch.Size()

CALL = ("__call__", "forward")
"""The methods that run when a module is called."""

Values = dict[Path, torch.Tensor]
"""The tensors by path that a chain of calls reads and extends."""


_READING_IN_KEYS = frozenset({"QValueModule", "EGreedyModule", "AdditiveGaussianModule"})
"""TorchRL modules that read only their in_keys and a mask. Other modules may read any entry."""


class HasKeys(Protocol):
    """An object with the paths that it reads and the paths that it writes."""

    @property
    def inputs(self) -> list[Path]:
        """The paths that it reads."""

    @property
    def outputs(self) -> list[Path]:
        """The paths that it writes."""


class Keys(NamedTuple):
    """See `HasKeys`."""

    inputs: list[Path]
    outputs: list[Path]


class PlainCall:
    """Calls the function inside a plain TensorDictModule.

    Args:
        module: a TensorDictModule for which `_is_plain` is true.
        compiler: compiles the wrapped callable; None for no compilation.
    """

    def __init__(self, module: TensorDictModule, compiler: Compiler | None = None) -> None:
        self.inputs: list[Path] = [as_path(key) for key in module.in_keys]
        self.outputs: list[Path] = [as_path(key) for key in module.out_keys]
        self.names: list[str] | None = module._kwargs
        self.function: Callable[..., Any] = module.module
        self.compiled = compiler is not None
        self._call: Callable[..., Any] = module.module if compiler is None else compiler(module.module)

    def __call__(self, values: Values) -> None:
        """Read the inputs from `values` and add the outputs; arrays and numbers become tensors.

        Raises:
            PolicyError: if the number of outputs isn't that of the out_keys.
            KeyError: if an input is absent.
        """
        arguments = map(values.__getitem__, self.inputs)
        if self.names is None:
            out = self._call(*arguments)
        else:
            out = self._call(**dict(zip(self.names, arguments, strict=True)))
        if len(self.outputs) == 1 and isinstance(out, torch.Tensor):
            values[self.outputs[0]] = out
        else:
            self._write(values, out)

    def _write(self, values: Values, out: Any) -> None:
        if not isinstance(out, tuple):  # tested first, because the test for a TensorDict is slow
            named: tuple[Any, ...] = (None,)
            if isinstance(out, (dict, TensorDictBase)):
                named = tuple(out.get(as_key(path), None) for path in self.outputs)
            out = (out,) if any(value is None for value in named) else named
        if len(out) != len(self.outputs):
            keys = [as_key(path) for path in self.outputs]
            raise PolicyError(
                f"policy: expected an output for each of the {len(keys)} out_keys {keys}, got {len(out)}"
            )
        for path, value in zip(self.outputs, out, strict=True):
            plain = isinstance(value, torch.Tensor) or not isinstance(value, _NUMBERS)
            values[path] = value if plain else torch.as_tensor(value)


class ProbabilisticCall:
    """Samples from the distribution that a ProbabilisticTensorDictModule makes of its inputs.

    Args:
        module: the module; the interaction type decides how it samples.
        batch_size: the batch size of a row.
    """

    def __init__(self, module: ProbabilisticTensorDictModule, batch_size: torch.Size) -> None:
        keys: Any = module.in_keys, module.out_keys
        self.inputs: list[Path] = [as_path(key) for key in keys[0]]
        self.outputs: list[Path] = [as_path(key) for key in keys[1]]
        self.module = module
        self._batch_size = batch_size
        self._record = TensorDictBuilder(dict.fromkeys(self.inputs))
        names = [key[-1] if isinstance(key, tuple) else key for key in module.dist_keys]
        self.parameters = list(zip(names, self.inputs, strict=True))
        self._scores = bool(module.return_log_prob)
        # The calls on tensors make one sample, and its score. `distribution` also refuses a composite of one member.
        self.on_tensors = (
            getattr(module, "_generator", None) is None and len(self.outputs) == 1 + self._scores
        )
        self._known: type[Distribution] | None = None  # the last class that was checked
        known = hasattr(module.distribution_class, "rsample_and_log_prob")
        self._draws_with_score = self._scores and known and _safe_class(module) is not None

    def __call__(self, values: Values) -> None:
        """Sample from the distribution of the inputs and add the outputs to `values`."""
        self.of_type(interaction_type())(values)

    def of_type(self, kind: InteractionType | None) -> Callable[[Values], None]:
        """Return the call for the interaction type `kind`, which must be the one that is set.

        A rollout gets this call once per block, because a lookup of the type takes as long as a draw.
        """
        if not self.on_tensors:
            return self._on_batch
        random = (kind or self.module.default_interaction_type) is InteractionType.RANDOM
        drawn_key, score_key = self.outputs[0], self.outputs[-1]

        def draw(values: Values) -> None:
            distribution: Any = self.distribution(values)
            if distribution is None:
                self._on_batch(values)
                return
            if random and self._draws_with_score:
                values[drawn_key], values[score_key] = _draw_with_score(distribution)
                return
            if random:
                drawn = (distribution.rsample if distribution.has_rsample else distribution.sample)(_ONE)
            else:
                drawn = self.module._dist_sample(distribution, interaction_type=kind)
            values[drawn_key] = drawn
            if self._scores:
                values[score_key] = distribution.log_prob(drawn)

        return draw

    def _on_batch(self, values: Values) -> None:
        _call_on_batch(self.module.forward, self._record, self._batch_size, values, self.outputs)

    def distribution(self, values: Values) -> Distribution | None:
        """Return the distribution that the module would make; None if it isn't a distribution over tensors."""
        module = self.module
        parameters = {name: values[path] for name, path in self.parameters}
        try:
            found: Distribution = module.distribution_class(**parameters, **module.distribution_kwargs)
        except TypeError:  # the module itself explains it
            return None
        if found.__class__ is not self._known:
            if not isinstance(found, Distribution) or isinstance(found, CompositeDistribution):
                return None
            self._known = found.__class__
        return found


def _draw_with_score(distribution: Any) -> Any:
    """Return a sample and its log-probability from a TorchRL distribution that computes both together.

    The log-probability is computed from the value before the distribution's transformation.
    """
    reparametrised = distribution.has_rsample
    return (distribution.rsample_and_log_prob if reparametrised else distribution.sample_and_log_prob)(_ONE)


class KeyedCall:
    """Calls a module that reads only its in_keys (see `keys_of`) on a TensorDict of its inputs.

    Args:
        module: the module.
        keys: its keys.
        batch_size: the batch size of a row.
    """

    def __init__(self, module: Any, keys: Keys, batch_size: torch.Size) -> None:
        self.module = module
        self.inputs, self.outputs = keys
        self._batch_size = batch_size
        self._record = TensorDictBuilder(dict.fromkeys(self.inputs))

    def __call__(self, values: Values) -> None:
        """Read the inputs from `values` and add the outputs."""
        _call_on_batch(self.module, self._record, self._batch_size, values, self.outputs)


def _call_on_batch(
    call: Callable[[Any], Any],
    record: TensorDictBuilder,
    batch_size: torch.Size,
    values: Values,
    outputs: Sequence[Path],
) -> None:
    """Call a module on a TensorDict of the values that `record` names, and add the outputs to `values`."""
    found = call(record.build([values[path] for path in record.paths], batch_size))
    for path in outputs:
        values[path] = found.get(as_key(path))


def kind_of(kind: InteractionType | None, module: ProbabilisticTensorDictModule) -> InteractionType:
    """Return how `module` samples: by `kind`, else by the type that is set, else by its default."""
    found: InteractionType = kind or interaction_type() or module.default_interaction_type
    return found


class ModuleCall(HasKeys, Protocol):
    """A call on the tensors of a row, which reads and extends them."""

    def __call__(self, values: Values) -> None:
        """Read the inputs from `values` and add the outputs."""


def call_of(policy: Any, batch_size: torch.Size, compiler: Compiler | None = None) -> ModuleCall | None:
    """Return a call with the same effect as `policy`; None if none is known.

    Args:
        policy: the callable that a rollout calls on a TensorDict.
        batch_size: the batch size of a row.
        compiler: see `PlainCall`.
    """
    if is_hooked(policy):
        return None
    if is_native(policy, *CALL, "_call_module", "_write_to_tensordict", of=TensorDictModule):
        return PlainCall(policy, compiler) if _is_plain(policy) else None
    drawing = ("get_dist", "log_prob", "_dist_sample", "_draw_dist_sample")
    if is_native(policy, *drawing, of=ProbabilisticTensorDictModule):
        known = is_native(policy, *CALL, of=_safe_class(policy) or ProbabilisticTensorDictModule)
        return ProbabilisticCall(policy, batch_size) if known and _only_samples(policy) else None
    return None


def keys_of(module: Any) -> Keys | None:
    """Return the keys of a module that is known to read nothing else; otherwise None."""
    cls = type(module)
    known = cls.__name__ in _READING_IN_KEYS and cls.__module__.startswith("torchrl.")
    if not known or cls.forward.__module__ != cls.__module__:
        return None
    if is_hooked(module) or not is_native(module, *CALL, of=cls):
        return None
    mask = getattr(module, "action_mask_key", None)  # may have been set after construction
    reads = dict.fromkeys([*module.in_keys, *([] if mask is None else [mask])])
    return Keys([as_path(key) for key in reads], [as_path(key) for key in module.out_keys])


def inputs_of(chain: Sequence[HasKeys]) -> list[Path]:
    """Return the paths that `chain` reads before any of its members has written them."""
    made: set[Path] = set()
    found: list[Path] = []
    for call in chain:
        found += [path for path in call.inputs if path not in made and path not in found]
        made.update(call.outputs)
    return found


def _is_plain(module: Any) -> bool:
    return (
        module.inplace is True
        and module.method is None
        and not module.method_kwargs
        and not module._get_kwargs
        and module.out_keys_source == module.out_keys
        and "_" not in module.out_keys
    )


def _only_samples(module: Any) -> bool:
    apart = stand_apart([as_path(key) for key in module.in_keys])
    return apart and getattr(module, "_generator_key", None) is None and module.num_samples is None


def _safe_class(module: Any) -> type[Any] | None:
    """Return TorchRL's SafeProbabilisticModule if `module` is one and doesn't project its samples; else None."""
    for cls in type(module).__mro__:
        if cls.__name__ == "SafeProbabilisticModule" and cls.__module__.startswith("torchrl."):
            return None if module.safe else cls
    return None


def is_hooked(module: Any) -> bool:
    """Return whether a call of the module does more than `forward`; also True for an object that is no module."""
    if not isinstance(module, torch.nn.Module):
        return True
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    backward = (module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or any(backward) or module._compiled_call_impl is not None


class Member:
    """One step of a policy: a module that isn't split any further.

    Args:
        module: the callable on a TensorDict.
        call: the equivalent call on tensors; None if none is known.
        kind: the interaction type for the call; None for the current one.
    """

    def __init__(
        self, module: Callable[..., Any], call: ModuleCall | None = None, kind: InteractionType | None = None
    ) -> None:
        self.module, self.call, self.kind = module, call, kind

    def on_values(self) -> Callable[[Values], Any]:
        """Return a function that reads the inputs from tensors by path and adds the outputs."""
        return self._typed(self._settled())

    def on_batch(self) -> Callable[[Any], Any]:
        """Return a function on TensorDicts; if `call` is known, it skips the checks of the module."""
        return self._typed(self.module if self.call is None else partial(self._run, self._settled()))

    def _settled(self) -> Callable[[Values], Any]:
        """Return the call for its interaction type, looked up once here because a lookup takes as long as a draw."""
        assert self.call is not None
        if isinstance(self.call, ProbabilisticCall):
            return self.call.of_type(self.kind or interaction_type())
        return self.call

    def _run(self, run: Callable[[Values], Any], batch: Any) -> Any:
        call, values = self.call, {}
        assert call is not None
        for path in call.inputs:
            leaf = leaf_at(batch, path)
            if leaf is None:  # no tensor: the module itself handles it
                return self.module(batch)
            values[path] = leaf
        run(values)
        for path in call.outputs:
            put_leaf(batch, path, values[path])
        return batch

    def _typed(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self.kind is None:
            return run

        def run_typed(values: Any) -> Any:
            with set_interaction_type(self.kind):
                return run(values)

        return run_typed


class ModuleSequence:
    """Calls the members of a policy in order on a TensorDict.

    Args:
        members: the steps.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._run = [member.on_batch() for member in members]

    def __call__(self, batch: Any) -> Any:
        """Return the result of the last member."""
        for run in self._run:
            batch = run(batch)
        return batch


GLOBAL_HOOKS = (
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
)
"""torch's registries of hooks on all modules; torch 2.6 has no function that looks at them."""


def members_of(policy: Any, batch_size: torch.Size, compiler: Compiler | None = None) -> list[Member]:
    """Return the steps of `policy` on a row. A policy that can't be split is the only step.

    Nothing is split while a global hook of modules or tensordict's ``skip_existing`` is active.

    Args:
        policy: the callable that a rollout calls on a TensorDict.
        batch_size: the batch size of a row.
        compiler: see `PlainCall`.
    """
    if skip_existing() or any(GLOBAL_HOOKS):
        return [Member(policy)]
    return _members(policy, batch_size, compiler)


def reads_of(members: Sequence[Member]) -> list[Path] | None:
    """Return the paths that the members read from the row itself; None if they can't be known."""
    keys: list[HasKeys | None] = [member.call or keys_of(member.module) for member in members]
    return None if None in keys else inputs_of([one for one in keys if one is not None])


def calls_of(
    policy: Any, batch_size: torch.Size, compiler: Compiler | None = None
) -> list[ModuleCall] | None:
    """Return the calls with the same effect as `policy`; None if one of its members needs a TensorDict."""
    found = [member.call for member in members_of(policy, batch_size, compiler)]
    return [call for call in found if call is not None] if None not in found else None


def _members(policy: Any, batch_size: torch.Size, compiler: Compiler | None) -> list[Member]:
    call = call_of(policy, batch_size, compiler)
    if call is None and not is_hooked(policy):
        return _of_sequence(policy, batch_size, compiler)
    return [Member(policy, call)]


def _of_sequence(policy: Any, batch_size: torch.Size, compiler: Compiler | None) -> list[Member]:
    own = (*CALL, "_run_module", "_module_iter")
    draws = is_native(policy, *own, "get_dist_params", of=ProbabilisticTensorDictSequential)
    if (
        not (draws or is_native(policy, *own, of=TensorDictSequential))
        or policy.inplace not in (None, True)  # both write into the input
        or policy.partial_tolerant
        or policy._select_before_return
        or (draws and not policy._requires_sample)
    ):
        return [Member(policy)]
    modules = list(policy._module_iter())
    found = [_members(module, batch_size, compiler) for module in modules]
    if draws and not policy.return_composite and interaction_type() is None:
        # all but the last use the last type that a member names
        kinds = [m.default_interaction_type for m in modules if hasattr(m, "default_interaction_type")]
        found[:-1] = [[Member(m.module, m.call, kinds[-1]) for m in members] for members in found[:-1]]
    if draws and isinstance(modules[-1], ProbabilisticTensorDictModule) and found[-1][0].call is None:
        found[-1] = [Member(partial(modules[-1], _requires_sample=True))]
    return [member for members in found for member in members]
