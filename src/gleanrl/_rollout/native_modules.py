"""Recognition of modules and distributions that the native core can compute.

A module is recognised by its exact type. A new layer needs an entry in `_LAYERS`, and a new distribution a function in
`sampled`. `native_forward` reads the `forward` of users' networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, set_interaction_type
from tensordict.nn.distributions import Delta, NormalParamExtractor, OneHotCategorical
from tensordict.nn.probabilistic import interaction_type
from tensordict.nn.utils import biased_softplus
from torch import nn
from torch.distributions import Categorical, Normal

from gleanrl._arrays.tensordicts import Path
from gleanrl._rollout.native_program import NotNative, ProgramBuilder, UnaryFunction, Value
from gleanrl._rollout.policies import Greedy
from gleanrl._rollout.policy_modules import (
    KeyedCall,
    Member,
    PlainCall,
    ProbabilisticCall,
    is_hooked,
    kind_of,
)
from gleanrl._util import is_native

_MACHINERY = ("__call__", "_call_impl", "__getattr__", "__getattribute__")
"""Methods that define a call of a module and a read of its attributes."""

Results = tuple[Value, ...]
"""The results of a module: one, or several as of a tuple."""


class Emitter:
    """Adds the operations of modules to a program.

    Args:
        builder: records the operations.
        read_forward: returns the results of a module of a user's class (see `native_forward.run_forward`).

    Attributes:
        modules: the modules that were visited, and the names of the attributes that matter; None for all. A change of
            one of them makes the program invalid.
        names: the global names that were read, with their namespaces.
        layers: the layers that were emitted, with their inputs and results.
    """

    def __init__(self, builder: ProgramBuilder, read_forward: Callable[..., Results]) -> None:
        self.builder, self._read_forward = builder, read_forward
        self.modules: dict[nn.Module, set[str] | None] = {}
        self.names: list[tuple[Mapping[str, Any], str]] = []
        self._sequences: list[set[int]] = []
        self.layers: list[tuple[nn.Module, Results, Results]] = []

    def call(self, module: Any, inputs: Sequence[Value], names: Sequence[str] | None = None) -> Results:
        """Return the results of ``module(*inputs)``.

        Args:
            module: the module.
            inputs: its arguments.
            names: the names of the arguments; None for positional ones.

        Raises:
            NotNative: the module isn't known, or does more than its class says.
        """
        self.visit(module)
        layer = _LAYERS.get(type(module))
        if layer is not None and _FORWARDS[type(module)] is not type(module).forward:
            layer = None  # the class was changed
        if layer is not None:
            self.modules[module] = None
        if layer is None and not _is_sequence_of_torchrl(module):
            # Other operations of this code may read a value that a layer changes in place.
            sequences, self._sequences = self._sequences, []
            results = self._read_forward(self, module, inputs, names)
            self._sequences = sequences
            return results
        if len(inputs) != 1 and (names is not None or layer is not _normal_parameters):
            raise NotNative(f"{type(module).__name__} with {len(inputs)} arguments")
        if layer is None or layer is Emitter._sequence:
            return self._sequence(module, *inputs)
        results = _as_tuple(layer(self, module, *inputs))
        if not self.builder.drawn.intersection(results):  # torch would draw other values
            self.layers.append((module, tuple(inputs), results))
        return results

    def visit(self, module: Any) -> None:
        """Note a module that the program depends on; raise `NotNative` if a call does more than its `forward`."""
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise NotNative(f"{name} isn't a module")
        if is_hooked(module) or "forward" in vars(module):
            raise NotNative(f"{name} has hooks, is compiled, or has another forward")
        if not is_native(module, *_MACHINERY, of=nn.Module):
            raise NotNative(f"{name} overrides how modules are called or how their parts are looked up")
        self.modules.setdefault(module, set())

    def _sequence(self, module: Any, *inputs: Value) -> Results:
        found: Results = inputs
        self._sequences.append({self.builder.root(one) for one in inputs})
        for layer in module:
            # A tuple of results is passed on as one argument.
            if len(found) != 1:
                raise NotNative(f"{type(layer).__name__} gets a tuple")
            found = self.call(layer, found)
        self._sequences.pop()
        return found

    def check_inplace(self, module: Any, x: Value) -> None:
        """Raise `NotNative` if a module changes a value in place that another operation may read.

        Between two layers of a Sequential, no other operation reads the value.
        """
        if not getattr(module, "inplace", False):
            return
        alone = (
            self._sequences
            and self.builder.owns_memory(x)
            and self.builder.root(x) not in self._sequences[-1]
        )
        if not alone:
            raise NotNative(f"{type(module).__name__}(inplace=True) changes its input")


def _as_tuple(found: Value | Results) -> Results:
    return found if isinstance(found, tuple) else (found,)


def parameter(module: nn.Module, name: str) -> Callable[[], Any]:
    """Return a function that returns the current parameter or buffer `name` of a module."""
    return partial(getattr, module, name)


def _number_of(module: nn.Module, name: str) -> float:
    """Return a numeric attribute; raise `NotNative` for a tensor or an array, which may change in place."""
    found = getattr(module, name)
    if not isinstance(found, (int, float)):
        raise NotNative(f"{type(module).__name__} with {name} of type {type(found).__name__}")
    return float(found)


def _linear(emit: Emitter, module: nn.Linear, x: Value) -> Value:
    bias = None if module.bias is None else parameter(module, "bias")
    return emit.builder.dense(x, parameter(module, "weight"), bias, module.in_features, module.out_features)


def _layer_norm(emit: Emitter, module: nn.LayerNorm, x: Value) -> Value:
    if len(module.normalized_shape) != 1:
        raise NotNative("a LayerNorm over several dimensions")
    weight, bias = (
        None if getattr(module, name) is None else parameter(module, name) for name in ("weight", "bias")
    )
    return emit.builder.norm(x, module.normalized_shape[0], weight, bias, _number_of(module, "eps"))


def _dropout(emit: Emitter, module: nn.Dropout, x: Value) -> Value:
    if module.training:
        raise NotNative("Dropout in training mode")
    return x


def _flatten(emit: Emitter, module: nn.Flatten, x: Value) -> Value:
    # Positive dimensions count the batch, whose size differs between a single environment and a batch.
    if module.end_dim != -1 or (module.start_dim >= 0 and x.shape):
        raise NotNative("Flatten of dimensions that are counted from the first one")
    start = max(module.start_dim + len(x.shape), 0)
    return emit.builder.reshape(x, (*x.shape[:start], prod(x.shape[start:])))


def _function(function: UnaryFunction, *names: str) -> Callable[[Emitter, Any, Value], Value]:
    """Return the emitter of an activation whose parameters are these attributes."""

    def emit_it(emit: Emitter, module: Any, x: Value) -> Value:
        emit.check_inplace(module, x)
        return emit.builder.unary(function, x, *(_number_of(module, name) for name in names))

    return emit_it


def _gelu(emit: Emitter, module: nn.GELU, x: Value) -> Value:
    return emit.builder.unary(
        UnaryFunction.GELU if module.approximate == "none" else UnaryFunction.GELU_TANH, x
    )


def chunk(emit: Emitter, x: Value, count: int) -> Results:
    """Return the counterpart of ``x.chunk(count, -1)``."""
    if not x.size or not x.shape or count < 1:
        raise NotNative("a value without dimensions is split")
    size = -(-x.shape[-1] // count)
    return tuple(
        emit.builder.narrow(x, first, min(size, x.shape[-1] - first)) for first in range(0, x.shape[-1], size)
    )


def _normal_parameters(emit: Emitter, module: NormalParamExtractor, x: Value, *others: Value) -> Results:
    parts = chunk(emit, x, 2)
    if len(parts) != 2:
        raise NotNative("NormalParamExtractor of a single number")
    mapping: Any = module.scale_mapping
    scale = parts[1]
    if type(mapping) is biased_softplus:
        emit.visit(mapping)
        emit.modules[mapping] = None
        scale = emit.builder.unary(UnaryFunction.ADD, scale, _number_of(mapping, "bias"))
        scale = emit.builder.unary(UnaryFunction.SOFTPLUS, scale, 1.0, 20.0)
        scale = emit.builder.unary(UnaryFunction.ADD, scale, _number_of(mapping, "min_val"))
    elif mapping is torch.nn.functional.softplus:
        scale = emit.builder.unary(UnaryFunction.SOFTPLUS, scale, 1.0, 20.0)
    elif mapping is torch.exp or mapping is torch.relu:
        scale = emit.builder.unary(UnaryFunction.EXP if mapping is torch.exp else UnaryFunction.RELU, scale)
    else:
        raise NotNative(f"NormalParamExtractor with the mapping {mapping!r:.40}")
    lower = _number_of(module, "scale_lb")
    return parts[0], emit.builder.unary(UnaryFunction.AT_LEAST, scale, lower), *others


def _greedy(emit: Emitter, module: Greedy, x: Value) -> Value:
    choice = emit.builder.argmax(x)
    if module.one_hot:
        choice = emit.builder.one_hot(choice, x.shape[-1])
    if not module.explores():
        return choice
    return emit.builder.explored(
        choice, emit.builder.constant(parameter(module, "epsilon"), ()), None, x.shape[-1]
    )


_LAYERS: dict[type[Any], Callable[..., Value | Results]] = {
    nn.Linear: _linear,
    nn.Identity: lambda emit, module, x: x,
    nn.Flatten: _flatten,
    nn.LayerNorm: _layer_norm,
    nn.Dropout: _dropout,
    nn.Tanh: _function(UnaryFunction.TANH),
    nn.ReLU: _function(UnaryFunction.RELU),
    nn.LeakyReLU: _function(UnaryFunction.LEAKY_RELU, "negative_slope"),
    nn.ELU: _function(UnaryFunction.ELU, "alpha"),
    nn.SiLU: _function(UnaryFunction.SILU),
    nn.GELU: _gelu,
    nn.Sigmoid: _function(UnaryFunction.SIGMOID),
    nn.Softplus: _function(UnaryFunction.SOFTPLUS, "beta", "threshold"),
    nn.Sequential: Emitter._sequence,
    NormalParamExtractor: _normal_parameters,
    Greedy: _greedy,
}


_FORWARDS = {cls: cls.forward for cls in _LAYERS}


def _is_sequence_of_torchrl(module: Any) -> bool:
    """Return whether `module` is TorchRL's MLP with one output; its `forward` is that of a Sequential."""
    cls = type(module)
    known = cls.__name__ == "MLP" and cls.__module__.startswith("torchrl.")
    return known and isinstance(module.out_features, int)


# ------------------------------------------------------------------------------------------------- TorchRL's modules
def keyed(emit: Emitter, module: Any, inputs: Sequence[Value], kind: InteractionType | None) -> Results:
    """Return the results of a TorchRL module that reads and writes its keys, in the order of its out_keys.

    Args:
        emit: emits the operations.
        module: a QValueModule or an EGreedyModule.
        inputs: the values of its inputs; a mask comes last.
        kind: the exploration type.

    Raises:
        NotNative: it is another module, or has options that the core doesn't compute.
    """
    emit.modules[module] = None
    name = type(module).__name__
    if name == "QValueModule":
        return _chosen_by_value(emit, module, inputs)
    if name == "EGreedyModule":
        return (_explored(emit, module, inputs, kind),)
    raise NotNative(f"{name} isn't known")


def _chosen_by_value(emit: Emitter, module: Any, inputs: Sequence[Value]) -> Results:
    space = module.action_space
    if (
        space not in ("one_hot", "categorical")
        or len(inputs) != 1
        or module.safe
        or len(module.out_keys) != 3
    ):
        raise NotNative(f"QValueModule with the action space {space!r}, a mask or a projection")
    (x,) = inputs
    index = emit.builder.argmax(
        x, strict=True
    )  # its one-hot vector marks all largest values, and none for NaN
    action = emit.builder.one_hot(index, x.shape[-1]) if space == "one_hot" else index
    return action, x, emit.builder.gather(x, index)


def _explored(emit: Emitter, module: Any, inputs: Sequence[Value], kind: InteractionType | None) -> Value:
    if kind not in (InteractionType.RANDOM, None):
        return inputs[0]
    spec = module.spec[module.action_key]
    cls = type(spec).__name__
    if cls not in ("OneHot", "Categorical") or not type(spec).__module__.startswith("torchrl."):
        raise NotNative(f"EGreedyModule with the spec {cls}")
    emit.names.append((vars(spec), "mask"))
    if spec.mask is not None:
        raise NotNative("EGreedyModule with a mask in its spec")
    mask = inputs[1] if len(inputs) > 1 else None
    if mask is not None and mask.dtype is not torch.bool:
        raise NotNative(f"a mask of {mask.dtype}")
    probability = emit.builder.constant(parameter(module, "eps"), ())
    return emit.builder.explored(inputs[0], probability, mask, int(spec.space.n))


# ---------------------------------------------------------------------------------------------------- distributions
def sampled(
    emit: Emitter,
    module: ProbabilisticTensorDictModule,
    parameters: Mapping[str, Value],
    kind: InteractionType,
) -> tuple[Value, Value | None]:
    """Return the sample that `module` writes, and its log-probability if it writes one.

    Args:
        emit: emits the operations.
        module: the module.
        parameters: the distribution's parameters by name.
        kind: how it samples.

    Raises:
        NotNative: the distribution isn't known, or not with these arguments.
    """
    emit.modules[module] = None
    cls = module.distribution_class
    if not isinstance(cls, type):
        raise NotNative(f"the distribution {cls!r:.60} isn't a class")
    name, ours = cls.__name__, cls.__module__.startswith("torchrl.")
    if cls is Delta or (ours and name == "Delta"):
        return _delta(module, parameters)
    if cls in (Categorical, OneHotCategorical) or (ours and name in _CHOICES):
        return _choice(emit, module, parameters, kind)
    if cls is Normal or (ours and name in ("IndependentNormal", "TanhNormal")):
        return _normal(emit, module, parameters, kind)
    raise NotNative(f"the distribution {name}")


_CHOICES = ("OneHotCategorical", "MaskedCategorical", "MaskedOneHotCategorical")


def _delta(
    module: ProbabilisticTensorDictModule, parameters: Mapping[str, Value]
) -> tuple[Value, Value | None]:
    if module.return_log_prob or set(parameters) != {"param"} or module.distribution_kwargs:
        raise NotNative("Delta with arguments or a log-probability")
    return parameters["param"], None


def _choice(
    emit: Emitter,
    module: ProbabilisticTensorDictModule,
    parameters: Mapping[str, Value],
    kind: InteractionType,
) -> tuple[Value, Value | None]:
    name, kwargs = module.distribution_class.__name__, module.distribution_kwargs
    masked = name.startswith("Masked")
    names = set(parameters)
    found = names & {"logits", "probs"}
    if kwargs or len(found) != 1 or names - found - ({"mask"} if masked else set()):
        raise NotNative(f"{name} with the arguments {sorted(names | set(kwargs))}")
    # torch.distributions.Categorical has no deterministic_sample, but a registered substitute: its mode.
    if kind not in (InteractionType.RANDOM, InteractionType.MODE, InteractionType.DETERMINISTIC):
        raise NotNative(f"{name} with {kind}")
    (source,) = found
    x, mask = parameters[source], parameters.get("mask")
    if mask is not None and mask.dtype is not torch.bool:
        raise NotNative(f"a mask of {mask.dtype}")
    one_hot = name.endswith("OneHotCategorical")
    if one_hot and x.shape[-1:] == (1,):
        raise NotNative("a one-hot choice among one")
    random, scored = kind is InteractionType.RANDOM, bool(module.return_log_prob)
    index, score = emit.builder.categorical(x, mask, source == "probs", random, scored)
    return (emit.builder.one_hot(index, x.size) if one_hot else index), score


_TYPES_OF_NORMALS = (
    InteractionType.RANDOM,
    InteractionType.DETERMINISTIC,
    InteractionType.MODE,
    InteractionType.MEAN,
)


def _normal(
    emit: Emitter,
    module: ProbabilisticTensorDictModule,
    parameters: Mapping[str, Value],
    kind: InteractionType,
) -> tuple[Value, Value | None]:
    name, kwargs = module.distribution_class.__name__, module.distribution_kwargs
    known = {"Normal": set(), "IndependentNormal": {"tanh_loc"}, "TanhNormal": {"tanh_loc", "low", "high"}}[
        name
    ]
    if set(parameters) != {"loc", "scale"} or set(kwargs) - known:
        raise NotNative(f"{name} with the arguments {sorted({*parameters, *kwargs})}")
    if kwargs.get("tanh_loc"):
        raise NotNative(f"{name} with tanh_loc")
    # The mode and the mean of a squashed distribution have no closed form.
    if kind not in (_TYPES_OF_NORMALS[:2] if name == "TanhNormal" else _TYPES_OF_NORMALS):
        raise NotNative(f"{name} with {kind}")
    squashed = None
    if name == "TanhNormal":
        squashed = _number(kwargs.get("low", -1.0)), _number(kwargs.get("high", 1.0))
        if not squashed[0] < squashed[1]:
            raise NotNative("TanhNormal with empty bounds")
    loc, scale = parameters["loc"], parameters["scale"]
    if name != "Normal" and not loc.shape:
        raise NotNative(f"{name} of a single number")
    random, scored = kind is InteractionType.RANDOM, bool(module.return_log_prob)
    return emit.builder.normal(loc, scale, random, scored, name != "Normal", squashed)


def _number(bound: Any) -> float:
    if not isinstance(bound, (int, float, torch.Tensor)):
        raise NotNative(f"a bound of {type(bound).__name__}")
    value = torch.as_tensor(bound)
    if value.numel() != 1:
        raise NotNative("bounds that differ between actions")
    return float(value)


# --------------------------------------------------------------------------------------------------------- policies
class MemberResults(NamedTuple):
    """The results of a native member."""

    outputs: dict[Path, Value]
    score: Path | None
    """The path of the log-probability of a sample."""
    layers: list[tuple[nn.Module, Results, Results]]
    """Its layers, with their inputs and results."""


@dataclass(frozen=True)
class Segment:
    """Adjacent members of a policy that run natively, in one program."""

    emit: Emitter
    members: list[MemberResults]

    @property
    def inputs(self) -> dict[Path, Value]:
        """The values that the segment reads."""
        return self.emit.builder.inputs

    @property
    def shares_memory(self) -> bool:
        """Whether an output would be a view of an input or of another output in torch."""
        builder = self.emit.builder
        roots = [builder.root(value) for value in {**self.inputs, **self.outputs}.values()]
        return len(set(roots)) < len(roots) or not all(map(builder.owns_memory, self.outputs.values()))

    @cached_property
    def outputs(self) -> dict[Path, Value]:
        """The values that the segment writes; of a path that several members write, the last one."""
        return {path: value for member in self.members for path, value in member.outputs.items()}


def name_of(member: Member) -> str:
    """Return the class of a member's module, for messages."""
    call, module = member.call, member.module
    if isinstance(call, PlainCall):
        module = call.function
    elif isinstance(call, (ProbabilisticCall, KeyedCall)):
        module = call.module
    return type(module).__name__


def emitted(members: Sequence[Member], emit: Emitter) -> Segment:
    """Return the operations of members; raise `NotNative` with the position of the first one that isn't recognised."""
    found: list[MemberResults] = []
    made: dict[Path, Value] = {}
    for position, member in enumerate(members):
        num_layers = len(emit.layers)
        try:
            outputs, score = _emitted_member(member, emit, made)
        except NotNative as cause:
            cause.position = position
            raise
        made.update(outputs)
        found.append(MemberResults(outputs, score, emit.layers[num_layers:]))
    return Segment(emit, found)


def _emitted_member(
    member: Member, emit: Emitter, made: Mapping[Path, Value]
) -> tuple[dict[Path, Value], Path | None]:
    """Return the outputs of a member, and the path of its sample's log-probability.

    Args:
        member: the member.
        emit: emits its operations.
        made: the outputs of earlier members.
    """

    def read(path: Path) -> Value:
        return made[path] if path in made else emit.builder.input(path)

    call = member.call
    if isinstance(call, ProbabilisticCall):
        if not call.on_tensors:
            raise NotNative("a sampling module with a generator or several samples")
        parameters = {name: read(path) for name, path in call.parameters}
        sample, score = sampled(emit, call.module, parameters, kind_of(member.kind, call.module))
        outputs = {call.outputs[0]: sample}
        return (outputs, None) if score is None else ({**outputs, call.outputs[-1]: score}, call.outputs[-1])
    if isinstance(call, PlainCall):
        if call.compiled:
            raise NotNative("the policy is compiled")
        with set_interaction_type(member.kind or interaction_type()):
            results = emit.call(call.function, [read(path) for path in call.inputs], call.names)
    elif isinstance(call, KeyedCall):
        kind = member.kind or interaction_type()
        results = keyed(emit, call.module, [read(path) for path in call.inputs], kind)
    else:
        raise NotNative(f"{name_of(member)} is only known as a module on TensorDicts")
    if len(results) != len(call.outputs):
        raise NotNative(f"{name_of(member)} returns {len(results)} values for {len(call.outputs)} keys")
    return dict(zip(call.outputs, results, strict=True)), None
