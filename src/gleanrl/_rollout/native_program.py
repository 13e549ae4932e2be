"""Programs of the native core: a policy as a list of operations on the rows of a block.

`ProgramBuilder` records operations on symbolic values, as a policy's modules would do them on tensors. A new operation
needs a kind in ``cpp/core/actor.h`` and a method here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

import torch
from torch import Tensor

from gleanrl._arrays.block import Block
from gleanrl._arrays.native import ActorProgram
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path, as_key


class NotNative(Exception):
    """A policy, or a part of it, can't run natively; the text says why."""

    position = 0
    """The position of the part among the adjacent members that were tried together."""


class _Kind(IntEnum):
    """`Kind` in ``cpp/core/actor.h``."""

    (
        INPUT,
        CONSTANT,
        DENSE,
        NORM,
        UNARY,
        BINARY,
        COPY,
        ARGMAX,
        ONE_HOT,
        CATEGORICAL,
        GATHER,
        EXPLORE,
        NORMAL,
    ) = range(13)


class UnaryFunction(IntEnum):
    """`Unary` in ``cpp/core/layers.h``."""

    TANH, RELU, LEAKY_RELU, ELU, SILU, GELU, GELU_TANH, SIGMOID, SOFTPLUS, EXP, LOG, ABS, SQRT, NEGATE = (
        range(14)
    )
    AT_LEAST, AT_MOST, ADD, MULTIPLY, DIVIDE, SUBTRACT_FROM, DIVIDE_INTO = range(14, 21)


class BinaryFunction(IntEnum):
    """`Binary` in ``cpp/core/actor.h``."""

    ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM = range(6)


_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)
"""The dtypes of columns, in the order of `Dtype` in ``cpp/core/actor.h``."""


@dataclass(frozen=True)
class Value:
    """A value of a program: the counterpart of a tensor ``(*batch, *shape)``."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    """The dtype that torch gives the value. The program computes all values in float32; integers are exact."""

    @property
    def size(self) -> int:
        """The number of its elements in one environment."""
        return prod(self.shape)


@dataclass(frozen=True)
class Weights:
    """Parameters or buffers of a program, looked up anew for each block, so that an exchanged one takes effect."""

    look_up: Callable[[], Any]
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the tensor, contiguous.

        Raises:
            NotNative: it isn't a plain float32 tensor of this shape in the CPU's memory.
        """
        found = self.look_up()
        plain = type(found) is torch.nn.Parameter or type(found) is Tensor
        if not plain or found.dtype is not torch.float32 or tuple(found.shape) != self.shape:
            said = f"{type(found).__name__} {tuple(getattr(found, 'shape', ()))}, {getattr(found, 'dtype', None)}"
            raise NotNative(f"a parameter is {said} instead of a float32 tensor {self.shape}")
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(found)
        if not found.is_cpu or found.layout is not torch.strided or found.is_neg() or wrapped:
            raise NotNative(
                f"a parameter is no plain tensor in the CPU's memory, but {found.layout} on {found.device}"
            )
        last = found.storage_offset() + sum(
            (size - 1) * stride for size, stride in zip(found.shape, found.stride(), strict=True)
        )
        if found.numel() and found.untyped_storage().nbytes() <= last * found.itemsize:
            raise NotNative("the memory of a parameter was freed")
        if found.grad_fn is not None:
            raise NotNative("a parameter is the result of a computation")
        return found.detach().contiguous()


class ProgramBuilder:
    """Records a policy's operations.

    Args:
        fields: the root columns that the policy may read.

    Each method returns the counterpart of what torch returns, and raises `NotNative` for operands that the core doesn't
    compute.
    """

    def __init__(self, fields: Mapping[Path, Field]) -> None:
        self._fields = fields
        self._sizes: list[int] = []
        self._operations: list[tuple[int, int, list[int], list[int], list[float]]] = []
        self.inputs: dict[Path, Value] = {}
        self.weights: list[Weights] = []
        self.has_exact_gelu = False
        """Whether torch's results for infinite numbers depend on their position in a tensor."""
        self.scores: dict[int, Value] = {}
        """For the slot of a choice: the value that it is the first maximum of."""
        self._roots: dict[int, int] = {}
        """For the slot of a value that torch would return as a view: the slot of the value that it shows."""
        self._shared: set[int] = set()
        """Slots of columns and parameters, which must not change."""
        self.drawn: set[Value] = set()
        """Random choices of `explored`."""
        self._indices: dict[int, Value] = {}
        """For the slot of a one-hot vector: its index."""

    # ---------------------------------------------------------------- values
    def input(self, path: Path) -> Value:
        """Return the value of a root column."""
        if path not in self.inputs:
            field = self._fields.get(path)
            if field is None or field.is_list or field.dtype not in (torch.float32, torch.bool):
                said = "no column" if field is None else "a list" if field.is_list else str(field.dtype)
                raise NotNative(f"the input {as_key(path)!r} is {said}, not float32")
            value = self._new(tuple(field.shape), field.dtype)
            self._add(_Kind.INPUT, value, [], [len(self.inputs), _DTYPES.index(field.dtype)])
            self._shared.add(value.slot)
            self.inputs[path] = value
        return self.inputs[path]

    def constant(self, look_up: Callable[[], Any], shape: Sequence[int]) -> Value:
        """Return the value of a parameter or buffer."""
        value = self._new(tuple(shape))
        self._add(_Kind.CONSTANT, value, [], [self._weight(look_up, shape), value.size])
        self._shared.add(value.slot)
        return value

    # ------------------------------------------------------------ operations
    def dense(
        self, x: Value, weight: Callable[[], Any], bias: Callable[[], Any] | None, inner: int, outer: int
    ) -> Value:
        """Return the counterpart of ``linear(x, weight, bias)``."""
        self._floats(x)
        if not x.shape or x.shape[-1] != inner or outer < 1:
            raise NotNative(f"a linear layer with {inner} inputs gets a value of shape {x.shape}")
        y = self._new((*x.shape[:-1], outer))
        numbers = [self._weight(weight, (outer, inner)), -1 if bias is None else self._weight(bias, (outer,))]
        self._add(_Kind.DENSE, y, [x], [*numbers, inner, outer, prod(x.shape[:-1])])
        return y

    def norm(
        self,
        x: Value,
        size: int,
        weight: Callable[[], Any] | None,
        bias: Callable[[], Any] | None,
        eps: float,
    ) -> Value:
        """Return the counterpart of ``layer_norm`` over the last dimension."""
        self._floats(x)
        if not x.shape or x.shape[-1] != size:
            raise NotNative(f"a layer norm of {size} numbers gets a value of shape {x.shape}")
        numbers = [-1 if one is None else self._weight(one, (size,)) for one in (weight, bias)]
        y = self._new(x.shape)
        self._add(_Kind.NORM, y, [x], [*numbers, size, prod(x.shape[:-1])], [eps])
        return y

    def unary(self, function: UnaryFunction, x: Value, a: float = 0.0, b: float = 0.0) -> Value:
        """Return ``function(x)``, element by element."""
        self._floats(x)
        self.has_exact_gelu |= function is UnaryFunction.GELU
        y = self._new(x.shape)
        self._add(_Kind.UNARY, y, [x], [function], [float(a), float(b)])
        return y

    def binary(self, function: BinaryFunction, a: Value, b: Value) -> Value:
        """Return ``function(a, b)``, element by element, of values of one shape or with one element."""
        self._floats(a, b)
        shape = torch.broadcast_shapes(a.shape, b.shape)
        if any(one.size not in (1, prod(shape)) for one in (a, b)):
            raise NotNative(f"values of shapes {a.shape} and {b.shape} are broadcast")
        y = self._new(tuple(shape))
        self._add(_Kind.BINARY, y, [a, b], [function])
        return y

    def cat(self, parts: Sequence[Value]) -> Value:
        """Return the parts, joined in the last dimension."""
        self._floats(*parts)
        if not parts or any(not one.shape or one.shape[:-1] != parts[0].shape[:-1] for one in parts):
            raise NotNative("values of different shapes are joined")
        y = self._new((*parts[0].shape[:-1], sum(one.shape[-1] for one in parts)))
        bounds = [number for one in parts for number in (0, one.shape[-1], one.shape[-1])]
        self._add(_Kind.COPY, y, list(parts), [prod(y.shape[:-1]), *bounds])
        return y

    def narrow(self, x: Value, first: int, count: int) -> Value:
        """Return a part of the last dimension."""
        self._floats(x)
        y = self._new((*x.shape[:-1], count))
        self._add(_Kind.COPY, y, [x], [prod(x.shape[:-1]), first, count, x.shape[-1]])
        self._roots[y.slot] = self.root(x)
        return y

    def root(self, x: Value) -> int:
        """Return the slot of the value whose memory `x` would have in torch: its own, or that of the shown value."""
        return self._roots.get(x.slot, x.slot)

    def owns_memory(self, x: Value) -> bool:
        """Return whether torch would return `x` in new memory, or as a view of such a value."""
        return self.root(x) not in self._shared

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Return the same numbers in another shape."""
        if prod(shape) != x.size:
            raise NotNative(f"a value of shape {x.shape} is reshaped to {tuple(shape)}")
        return Value(x.slot, tuple(shape), x.dtype)

    def argmax(self, x: Value, strict: bool = False) -> Value:
        """Return the first index of the largest number in the last dimension; NaN counts as the largest.

        With `strict`, torch computes rows with NaN or several largest numbers.
        """
        self._floats(x)
        if not x.shape or not x.shape[-1]:
            raise NotNative("argmax of a value without a dimension")
        y = self._new(x.shape[:-1], torch.int64)
        self._add(_Kind.ARGMAX, y, [x], [x.shape[-1], y.size, strict])
        self.scores[y.slot] = x
        return y

    def one_hot(self, index: Value, count: int, dtype: torch.dtype = torch.int64) -> Value:
        """Return the one-hot vector of a single index."""
        if index.shape != () or index.dtype is not torch.int64:
            raise NotNative(f"a one-hot vector of {index.dtype} with shape {index.shape}")
        y = self._new((count,), dtype)
        self._add(_Kind.ONE_HOT, y, [index], [count])
        self._indices[y.slot] = index
        if index.slot in self.scores:
            self.scores[y.slot] = self.scores[index.slot]
        return y

    def gather(self, x: Value, index: Value) -> Value:
        """Return ``x[index]`` with a dimension of size one."""
        self._floats(x)
        if len(x.shape) != 1 or not x.size or index.size != 1:
            raise NotNative(f"a choice among a value of shape {x.shape}")
        y = self._new((1,))
        self._add(_Kind.GATHER, y, [x, index], [])
        return y

    def explored(self, choice: Value, probability: Value, mask: Value | None, count: int) -> Value:
        """Return a choice, or with a probability a random one of `count` choices.

        Args:
            choice: an index, or a one-hot vector that the program made of one.
            probability: a single number.
            mask: the allowed choices, bool; None for all.
            count: the number of choices.
        """
        index = self._indices.get(choice.slot, choice)
        if (
            index.shape != ()
            or index.dtype is not torch.int64
            or (mask is not None and mask.shape != (count,))
        ):
            raise NotNative(f"exploration among choices of shape {choice.shape}")
        y = self._new((), torch.int64)
        sources = [index.slot, probability.slot, -1 if mask is None else mask.slot]
        self._operations.append((int(_Kind.EXPLORE), y.slot, sources, [count], []))
        found = y if index is choice else self.one_hot(y, count, choice.dtype)
        self.drawn.add(found)
        return found

    def categorical(
        self, x: Value, mask: Value | None, probabilities: bool, random: bool, scored: bool
    ) -> tuple[Value, Value | None]:
        """Return a choice and, with `scored`, its log-probability.

        Args:
            x: logits or probabilities.
            mask: the allowed choices, bool; None for all.
            probabilities: whether `x` holds probabilities.
            random: whether to draw; otherwise the first most likely choice is taken.
            scored: whether to compute the log-probability.
        """
        self._floats(x)
        if len(x.shape) != 1 or not x.size or (mask is not None and mask.shape != x.shape):
            raise NotNative(f"a categorical distribution over a value of shape {x.shape}")
        y, score = self._new((), torch.int64), self._new(()) if scored else None
        numbers = [x.size, probabilities, random, -1 if score is None else score.slot]
        sources = [x.slot, -1 if mask is None else mask.slot]
        self._operations.append((_Kind.CATEGORICAL, y.slot, sources, [int(one) for one in numbers], []))
        if not random:
            self.scores[y.slot] = x
        return y, score

    def normal(
        self,
        loc: Value,
        scale: Value,
        random: bool,
        scored: bool,
        summed: bool,
        squashed: tuple[float, float] | None = None,
    ) -> tuple[Value, Value | None]:
        """Return a sample of a normal distribution and, with `scored`, its log-probability.

        Args:
            loc: the mean.
            scale: the standard deviation.
            random: whether to draw; otherwise the mean is taken.
            scored: whether to compute the log-probability.
            summed: whether the log-probability is a sum over the last dimension.
            squashed: the bounds that the hyperbolic tangent is mapped to; None for no tangent.
        """
        self._floats(loc, scale)
        shape = tuple(torch.broadcast_shapes(loc.shape, scale.shape))
        if any(one.size not in (1, prod(shape)) for one in (loc, scale)) or (summed and len(shape) != 1):
            raise NotNative(f"a normal distribution with parameters of shapes {loc.shape} and {scale.shape}")
        y, score = self._new(shape), None
        if scored:
            score = self._new(() if summed else shape)
        low, high = squashed or (0.0, 0.0)
        numbers = [random, squashed is not None, summed, -1 if score is None else score.slot]
        self._add(_Kind.NORMAL, y, [loc, scale], [int(one) for one in numbers], [low, high])
        return y, score

    # ------------------------------------------------------------------ made
    def built(self, outputs: Sequence[tuple[Value, torch.dtype]]) -> ActorProgram:
        """Return the program that writes these values into columns of these dtypes."""
        found = [(value.slot, _DTYPES.index(dtype)) for value, dtype in outputs]
        return ActorProgram(self._sizes, self._operations, found, len(self.inputs), len(self.weights))

    def fits(self, value: Value, field: Field, is_action: bool) -> bool:
        """Return whether a program can write `value` into a column of `field`, as a rollout would convert it.

        Only actions are converted: to a shape with or without a last dimension of size one, and to a dtype that keeps
        all values.
        """
        shape, dtype = tuple(field.shape), field.dtype
        if dtype not in _DTYPES or field.is_list:
            return False
        if value.shape == shape and value.dtype is dtype:
            return True
        reshaped = value.shape == shape or value.shape == (*shape, 1) or shape == (*value.shape, 1)
        # An index fits into 32 bits; zeros and ones fit into everything.
        wide = dtype.is_floating_point or dtype.itemsize >= 4 or value.slot in self._indices
        exact = dtype.is_floating_point or value.dtype is not torch.float32
        return is_action and reshaped and exact and wide

    def _new(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Value:
        self._sizes.append(prod(shape))
        return Value(len(self._sizes) - 1, tuple(shape), dtype)

    def _weight(self, look_up: Callable[[], Any], shape: Sequence[int]) -> int:
        self.weights.append(Weights(look_up, tuple(shape)))
        self.weights[-1].read()
        return len(self.weights) - 1

    def _add(
        self,
        kind: _Kind,
        to: Value,
        sources: Sequence[Value],
        sizes: list[int],
        numbers: Sequence[float] = (),
    ) -> None:
        slots = [one.slot for one in sources]
        self._operations.append((int(kind), to.slot, slots, [int(n) for n in sizes], list(numbers)))

    @staticmethod
    def _floats(*values: Value) -> None:
        for value in values:
            if value.dtype is not torch.float32:
                raise NotNative(f"arithmetic on a value of {value.dtype}")


def position_of(block: Block, path: Path) -> tuple[int, int, int] | None:
    """Return a column's address, the bytes to the next environment, and the bytes to the next step.

    None if the column isn't on the CPU, or environments or numbers of a row aren't at equal distances.
    """
    column = block.column(path) if block.columns and not block.keeps_graph else None
    if not isinstance(column, Tensor) or not column.is_cpu:
        return None
    if not column.numel():
        return 0, 0, 0
    flat = block.flat(path)
    if not isinstance(flat, Tensor) or flat.data_ptr() != column.data_ptr() or not flat[0, 0].is_contiguous():
        return None
    return flat.data_ptr(), flat.stride(0) * flat.itemsize, flat.stride(1) * flat.itemsize


def bind_row(
    program: ActorProgram,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    batch_size: torch.Size,
    key: int,
    step: int,
) -> None:
    """Let `program` read and write the contiguous tensors of one row, ``(*batch, *leaf)``; ``act(0)`` computes them."""
    parts = batch_size.numel()

    def places(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
        return [(one.data_ptr(), one.nbytes // max(parts, 1), 0) for one in tensors]

    program.bind(places(sources), places(targets), parts, 1, key, step, 0)
