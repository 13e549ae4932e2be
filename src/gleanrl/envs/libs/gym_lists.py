"""Spaces whose values have no single fixed shape: text, sequences, graphs, tuples of unlike elements.

Their leaves are lists (see `gleanrl.objects`): an `encode` returns the object of one record instead of an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gleanrl.data.specs import NonTensor
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.envs.libs.gym_codecs import Array, Codec
from gleanrl.errors import PolicyError, SpaceError
from gleanrl.tree import Path, as_key


class ListCodec(Codec):
    """One leaf whose values are objects; only observations have such."""

    is_list = True

    def decode(self, row: Array) -> Any:
        """Raise: actions are numbers."""
        raise PolicyError(f"action {as_key(self.key)!r}: expected numbers, it is {self.spec!r}")

    def batched(self, num_envs: int) -> Codec:
        """Raise: gymnasium's vectors batch such values in as many ways as there are spaces."""
        raise SpaceError(
            f"{as_key(self.key)!r}: a vector environment's values without a fixed shape can't be taken apart; step "
            "single environments in a SerialEnv or ParallelEnv"
        )


class ObjectCodec(ListCodec):
    """Values as they are: text, or what has no other form.

    Args:
        key: where the leaf stands.
        kind: what values are instances of; None for any.
        example: one of them.
    """

    def __init__(self, key: Path, kind: type[Any] | None, example: Any) -> None:
        self.key, self.spec = key, NonTensor(shape=(), example_data=example)
        self.shape, self.dtype, self.kind = (), np.dtype(object), kind

    def encode(self, value: Any) -> Any:
        """Return the value itself; NumPy's strings as Python's."""
        if self.kind is not None and not isinstance(value, self.kind):
            raise self.fail(value, f"a {self.kind.__name__}")
        return str(value) if self.kind is str else value


class SequenceCodec(ListCodec):
    """Any number of values of one kind, as one tensor ``(n, *leaf)``.

    Args:
        key: where the leaf stands.
        part: the codec of one value.
    """

    def __init__(self, key: Path, part: Codec) -> None:
        assert isinstance(part.spec, LeafSpec)
        self.key, self.part, self.spec = key, part, part.spec.unsqueeze(0).opened(0)
        self.shape, self.dtype = tuple(self.spec.shape), part.dtype

    def encode(self, value: Any) -> Any:
        """Return a new tensor of the values, which come as a tuple, or stacked in an array."""
        if value is None:
            value = ()
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise self.fail(value, f"a sequence of values of shape {self.part.shape} {self.dtype}")
        rows = [self.part.encode(item) for item in value]
        array = np.stack(rows) if rows else np.empty((0, *self.part.shape), self.dtype)
        return torch.from_numpy(np.array(array, self.dtype))


class TupleCodec(Codec):
    """A tuple of choices as one vector, encoded as that of a MultiDiscrete space.

    Args:
        key: where the leaf stands.
        inner: the vector's codec.
    """

    def __init__(self, key: Path, inner: Codec, count: int) -> None:
        super().__init__(key, inner.spec)
        self.inner, self.count = inner, count

    def encode(self, value: Any) -> Array:
        """Return the encoded vector of a tuple's elements."""
        if not isinstance(value, (tuple, list)) or len(value) != self.count:
            raise self.fail(value, f"a tuple of {self.count} values")
        try:
            vector = np.stack([np.asarray(item) for item in value], -1)
        except ValueError as cause:
            raise self.fail(value, f"a tuple of {self.count} choices") from cause
        return self.inner.encode(vector)

    def decode(self, row: Array) -> Any:
        """Return the elements as a tuple."""
        vector = self.inner.decode(row)
        return tuple(vector[..., i] for i in range(self.count))

    def batched(self, num_envs: int) -> TupleCodec:
        """Return the codec of a tuple of the environments' choices."""
        return TupleCodec(self.key, self.inner.batched(num_envs), self.count)


def tuple_entries(value: Any) -> Any:
    """Return a tuple as a dictionary by position; anything else as it is."""
    return {str(i): item for i, item in enumerate(value)} if isinstance(value, (tuple, list)) else value


def graph_entries(value: Any) -> Any:
    """Return a graph's nodes, edges and links as a dictionary; anything else as it is."""
    parts = ("nodes", "edges", "edge_links")
    if isinstance(value, Mapping) or not all(hasattr(value, part) for part in parts):
        return value
    found = {part: getattr(value, part) for part in parts}
    return {part: () if item is None else item for part, item in found.items()}
