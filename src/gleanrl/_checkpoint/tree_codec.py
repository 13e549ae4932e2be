"""States as plain values: a JSON tree, with the tensors in separate byte arrays.

Only these values can be saved: None, booleans, integers, floats, strings, bytes, lists, tuples, dictionaries, tensors,
`torch.Size`, dtypes, devices, and TensorDicts. A TensorDict may contain non-tensor data of these kinds. Any other value
is refused with its path and type. Reading creates values of these kinds only, and never executes code.

The JSON of checkpoints is restricted: finite numbers, 64-bit integers, no duplicate keys, no spaces.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._checkpoint.row_segments import (
    Array,
    Segmented,
    SegmentLayout,
    Unread,
    bytes_of,
    rows_of,
)
from gleanrl.errors import CheckpointError, CorruptCheckpointError

_LARGEST_INTEGER = 2**63


def encoded(tree: Any) -> bytes:
    """Return the JSON bytes of a tree of null, booleans, finite numbers, strings, lists and dictionaries."""
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()


def decoded(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in some bytes.

    Args:
        data: untrusted bytes.
        name: a name of the bytes for messages.

    Raises:
        CorruptCheckpointError: the bytes aren't a JSON object with the restrictions above.
    """
    try:
        found = json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_int,
            parse_float=_float,
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as cause:
        raise CorruptCheckpointError(f"{name}: expected the JSON of a checkpoint: {cause}") from cause
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{name}: expected a JSON object, got a {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.30} isn't finite")
    return number


def _int(text: str) -> int:
    if len(text) > 20 or not -_LARGEST_INTEGER <= (number := int(text)) < _LARGEST_INTEGER:
        raise ValueError(f"{text:.30} doesn't fit into 64 bits")
    return number


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.uint16, torch.uint32, torch.uint64),
    )
}
_MOST_DEPTH = 64
ATTACHED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.h5")
"""Valid names of attachments. They can't lead out of a folder."""
_LARGEST = 2**63
_SCALARS = frozenset((int, str, bool, float, type(None)))
LARGE_BYTES = 1 << 20
"""An array of this size or more has separate extents, so that unchanged parts need not be written again."""
_IDENTITY = re.compile(r"[0-9a-f]{32}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in checkpoints; raise `CheckpointError` for one that can't be saved."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"tensors of {dtype} can't be saved")
    return name


class Attachment:
    """Bytes that become a separate file of a checkpoint, for other programs to read.

    Args:
        name: the name of the file, see `ATTACHED`. If it is taken, a number is put before it.
        content: ``(n,)`` uint8, or a function that writes the file. It receives an empty file that can be read and
            written at any position.
    """

    def __init__(self, name: str, content: Array | Callable[[BinaryIO], object]) -> None:
        self.name, self.content = name, content

    @cached_property
    def data(self) -> Array:
        """The bytes, in memory; a function as the content is called at the first access only."""
        if not callable(self.content):
            return self.content
        file = io.BytesIO()
        self.content(file)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the name and the bytes for pickle."""
        return Attachment, (self.name, self.data)


class ArrayPieces:
    """A tensor whose bytes are made piece by piece during the write, by several threads.

    Args:
        dtype: the dtype of the tensor.
        shape: its shape, with the rows first.
        make: returns the bytes of rows ``[start, stop)``, ``(rows, bytes of a row)`` uint8.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], make: Callable[[int, int], Array]) -> None:
        self.dtype, self.shape, self.make = dtype, tuple(shape), make

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def cut(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges ``[start, stop)`` of about `size` bytes that cover all rows."""
        rows = max(size // max(self.width, 1), 1)
        for start in range(0, self.shape[0], rows):
            yield start, min(start + rows, self.shape[0])

    def tensor(self) -> torch.Tensor:
        """Return the whole tensor in new CPU memory, after calls of `make` for all rows in this thread."""
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if made.numel():
            data = rows_of(made)
            for start, stop in self.cut(LARGE_BYTES):
                data[start:stop] = self.make(start, stop)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the whole tensor."""
        return torch.Tensor.detach, (self.tensor(),)


class Later(ABC):
    """A value that is derived from another one when it is written.

    Args:
        source: the value to derive it from.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    @abstractmethod
    def make(self) -> Any:
        """Return the derived value."""


class Items(Later):
    """A list of objects that other code may still use. Other processes receive it as a plain list."""

    def make(self) -> list[Any]:
        """Return the list."""
        found: list[Any] = self.source
        return found

    def own(self) -> None:
        """Copy the objects, so that other code may change its objects while these are written."""
        self.source = copy.deepcopy(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the list."""
        return list, (self.source,)


def sources_in(state: Any) -> Iterator[CowSnapshot]:
    """Yield the snapshots of rows in a state, in no particular order."""
    return (part for part in _parts_in(state) if isinstance(part, CowSnapshot))


def items_in(state: Any) -> Iterator[Items]:
    """Yield the `Items` in a state, in no particular order."""
    return (part for part in _parts_in(state) if isinstance(part, Items))


def _parts_in(state: Any) -> Iterator[CowSnapshot | Items]:
    left, seen = [state], set[int]()
    while left:
        part = left.pop()
        # Most values are scalars, and this test is the cheapest.
        if type(part) in _SCALARS or id(part) in seen:
            continue
        seen.add(id(part))  # A container may contain itself.
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, (list, tuple)):
            left += part
        elif isinstance(part, (CowSnapshot, Items)):
            yield part
        elif isinstance(part, Later):
            left.append(part.source)


class Encoder:
    """Converts values to a JSON tree.

    Args:
        store: receives the bytes of a tensor; returns the reference for the tree.
        attach: the same for attachments; None if there can't be any.
        segments: the same for rows, see `FileWriter.segments`.
        pieces: the same for `ArrayPieces`; None to make such tensors at once.
    """

    def __init__(
        self,
        store: Callable[[Array], Any],
        attach: Callable[[Attachment], Any] | None = None,
        segments: Callable[[CowSnapshot], int] | None = None,
        pieces: Callable[[ArrayPieces], Any] | None = None,
    ) -> None:
        self._store, self._attach, self._segments, self._pieces = store, attach, segments, pieces

    def tree(self, value: Any, where: str = "state", depth: int = 0) -> Any:
        """Return the tree of a value.

        Args:
            value: the value to save.
            where: its path, for messages.
            depth: the depth of nesting.

        Raises:
            CheckpointError: the value can't be saved. The message names its path and type; for a tensor only its dtype,
                or its device and layout. Tensors before it were stored already.
        """
        if depth > _MOST_DEPTH:
            raise CheckpointError(f"{where[:100]}…: it's nested more than {_MOST_DEPTH} times")
        if type(value) is dict:  # First, because most values are dictionaries.
            return self._mapping(value, where, depth + 1)
        if isinstance(value, list):
            return self._list(value, where, depth + 1)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            if not -_LARGEST <= value < _LARGEST:
                raise CheckpointError(f"{where}: {value} doesn't fit into 64 bits")
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, ArrayPieces):
            return self._made(value)
        if isinstance(value, Attachment) and self._attach is not None:
            places = self._attach(value)
            return {"$file": places, "name": value.name, "size": sum(size for _, _, size in places)}
        if isinstance(value, Later):
            return self.tree(value.make(), where, depth)
        if isinstance(value, CowSnapshot) and self._segments is not None:
            return self._rows(value, self._segments(value))
        if type(value) is NonTensorData:
            return {"$data": self.tree(value.data, where, depth + 1), "batch_size": list(value.batch_size)}
        if type(value) is NonTensorStack:
            return {"$stack": self._list(value.tensordicts, where, depth + 1), "dim": value.stack_dim}
        if isinstance(value, TensorDictBase):
            return self._encoded_tensordict(value, where, depth + 1)
        if isinstance(value, torch.dtype):
            return {"$dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if type(value) is tuple:
            return {"$tuple": self._list(value, where, depth + 1)}
        if isinstance(value, Mapping):
            return self._mapping(value, where, depth + 1)
        raise CheckpointError(f"{where}: a {type(value).__name__} can't be saved: {value!r:.100}")

    def _list(self, value: Sequence[Any], where: str, depth: int) -> list[Any]:
        return [self.tree(part, f"{where}[{i}]", depth) for i, part in enumerate(value)]

    def _mapping(self, value: Mapping[Any, Any], where: str, depth: int) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.tree(part, f"{where}[{key!r}]", depth) for key, part in value.items()}
        pairs = [
            [self.tree(key, where, depth), self.tree(part, f"{where}[{key!r}]", depth)]
            for key, part in value.items()
        ]
        return {"$map": pairs}

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_meta or tensor.layout is not torch.strided:
            raise CheckpointError(f"a tensor on {tensor.device} of layout {tensor.layout} can't be saved")
        dtype = dtype_name(tensor.dtype)
        return {"$tensor": self._store(bytes_of(tensor)), "dtype": dtype, "shape": list(tensor.shape)}

    def _made(self, value: ArrayPieces) -> Any:
        if self._pieces is None or value.width * value.shape[0] < LARGE_BYTES:
            return self._tensor(value.tensor())
        dtype = dtype_name(value.dtype)
        return {"$tensor": self._pieces(value), "dtype": dtype, "shape": list(value.shape)}

    @staticmethod
    def _rows(source: CowSnapshot, first: int) -> Any:
        layout = source.layout
        fields = [[dtype_name(dtype), list(shape)] for dtype, shape in layout.fields]
        return {
            "$rows": first,
            "id": source.identity,
            "rows": layout.rows,
            "step": layout.step,
            "fields": fields,
        }

    def _encoded_tensordict(self, value: TensorDictBase, where: str, depth: int) -> Any:
        if type(value) is not TensorDict:
            raise CheckpointError(f"{where}: a {type(value).__name__} can't be saved; make it a TensorDict")
        parts = {key: self.tree(part, f"{where}[{key!r}]", depth) for key, part in value.items()}
        device = None if value.device is None else str(value.device)
        names = list(value.names) if any(name is not None for name in value.names) else None
        return {"$tensordict": parts, "batch_size": list(value.batch_size), "device": device, "names": names}


class Decoder:
    """Converts a JSON tree to values.

    Args:
        fetch: returns the bytes of an array, from its reference in the tree and its size; a tensor may be unread.
        rows: returns rows, from the number of their first extent, their layout and their identity; None if there can't
            be any.
    """

    def __init__(
        self,
        fetch: Callable[[Any, int], Array | Unread],
        rows: Callable[[int, SegmentLayout, str], Segmented] | None = None,
    ) -> None:
        self._fetch, self._rows = fetch, rows

    def value(self, tree: Any, depth: int = 0) -> Any:
        """Return the value of a tree.

        Raises:
            CorruptCheckpointError: the tree doesn't describe a value.
        """
        if depth > _MOST_DEPTH:
            raise CorruptCheckpointError(f"the state is nested more than {_MOST_DEPTH} times")
        if tree is None or isinstance(tree, (bool, str, int, float)):
            return tree
        if isinstance(tree, list):
            return [self.value(part, depth + 1) for part in tree]
        if not isinstance(tree, dict):
            raise CorruptCheckpointError(f"a {type(tree).__name__} isn't a kind of value")
        kind = next((key for key in tree if key.startswith("$")), None)
        if kind is None:
            return {key: self.value(part, depth + 1) for key, part in tree.items()}
        maker, keys = _MAKERS.get(kind, (None, None))
        if maker is None or tree.keys() != keys:
            raise CorruptCheckpointError(f"{kind!r:.100} isn't a kind of value")
        try:
            return maker(self, tree, depth + 1)
        except CorruptCheckpointError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as cause:
            raise CorruptCheckpointError(f"a broken value of kind {kind!r}: {cause}") from cause

    def _tensor(self, tree: dict[str, Any], depth: int) -> torch.Tensor | Unread:
        dtype, shape = _DTYPES[tree["dtype"]], _sizes(tree["shape"])
        data = self._fetch(tree["$tensor"], math.prod(shape) * dtype.itemsize)
        if isinstance(data, Unread):
            return replace(data, dtype=dtype, shape=tuple(shape))
        if not data.size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(data).view(dtype).reshape(shape)

    def _segmented(self, tree: dict[str, Any], depth: int) -> Segmented:
        if self._rows is None:
            raise CorruptCheckpointError("rows in segments, which this file can't contain")
        layout, first, identity = layout_of(tree)
        return self._rows(first, layout, identity)

    def _attachment(self, tree: dict[str, Any], depth: int) -> Attachment:
        data = self._fetch(tree["$file"], *_sizes([tree["size"]]))
        if isinstance(data, Unread):
            raise CorruptCheckpointError("an attachment in the place of a column")
        return Attachment(str(tree["name"]), data)

    def _decoded_tensordict(self, tree: dict[str, Any], depth: int) -> TensorDict:
        device = tree["device"]
        parts = {key: self.value(part, depth) for key, part in _object(tree["$tensordict"]).items()}
        names = tree["names"]
        return TensorDict(parts, _sizes(tree["batch_size"]), device=device, names=names)

    def _non_tensor(self, tree: dict[str, Any], depth: int) -> NonTensorData:
        return NonTensorData(data=self.value(tree["$data"], depth), batch_size=_sizes(tree["batch_size"]))

    def _non_tensors(self, tree: dict[str, Any], depth: int) -> NonTensorStack:
        parts = [self.value(part, depth) for part in _list(tree["$stack"])]
        if not parts or not all(type(part) in (NonTensorData, NonTensorStack) for part in parts):
            raise CorruptCheckpointError("a stack of something else than non-tensor data")
        return NonTensorStack(*parts, stack_dim=_sizes([tree["dim"]])[0])

    def _pairs(self, tree: dict[str, Any], depth: int) -> dict[Any, Any]:
        found = {}
        for key_tree, part in _list(tree["$map"]):
            key = self.value(key_tree, depth)
            if key in found or key != key:
                raise CorruptCheckpointError("a key occurs twice, or isn't equal to itself")
            found[key] = self.value(part, depth)
        return found


_MAKERS: dict[str, tuple[Callable[[Decoder, dict[str, Any], int], Any], frozenset[str]]] = {
    kind: (maker, frozenset((kind, *keys)))
    for kind, maker, *keys in (
        ("$float", lambda decoder, tree, depth: _special(tree["$float"])),
        ("$bytes", lambda decoder, tree, depth: base64.b64decode(tree["$bytes"], validate=True)),
        ("$dtype", lambda decoder, tree, depth: _DTYPES[tree["$dtype"]]),
        ("$device", lambda decoder, tree, depth: torch.device(str(tree["$device"]))),
        ("$file", Decoder._attachment, "name", "size"),
        ("$size", lambda decoder, tree, depth: torch.Size(_sizes(tree["$size"]))),
        (
            "$tuple",
            lambda decoder, tree, depth: tuple(decoder.value(part, depth) for part in _list(tree["$tuple"])),
        ),
        ("$map", Decoder._pairs),
        ("$rows", Decoder._segmented, "id", "rows", "step", "fields"),
        ("$tensor", Decoder._tensor, "dtype", "shape"),
        ("$tensordict", Decoder._decoded_tensordict, "batch_size", "device", "names"),
        ("$data", Decoder._non_tensor, "batch_size"),
        ("$stack", Decoder._non_tensors, "dim"),
    )
}
"""For each kind of value, its function in `Decoder` and the keys of its JSON object."""


def layout_of(tree: Mapping[str, Any]) -> tuple[SegmentLayout, int, str]:
    """Return the layout of rows, the number of their first extent, and their identity.

    Raises:
        CorruptCheckpointError: the tree doesn't describe rows. A missing key, or another kind of value, may raise
            `LookupError`, `TypeError` or `ValueError` instead.
    """
    first, rows, step = _sizes([tree["$rows"], tree["rows"], tree["step"]])
    identity, fields = tree["id"], tree["fields"]
    if not step or not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise CorruptCheckpointError("rows without a valid identity, or in segments of 0 rows")
    return (
        SegmentLayout(tuple((_DTYPES[name], tuple(_sizes(shape))) for name, shape in fields), rows, step),
        first,
        identity,
    )


def _special(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise CorruptCheckpointError(f"expected 'nan', 'inf' or '-inf', got {text!r:.50}")
    return float(text)


def _sizes(sizes: Any) -> list[int]:
    if not isinstance(sizes, Sequence) or not all(
        type(size) is int and 0 <= size < _LARGEST for size in sizes
    ):
        raise CorruptCheckpointError(f"expected sizes, got {sizes!r:.100}")
    return list(sizes)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptCheckpointError(f"expected a list, got {value!r:.100}")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"expected an object, got {value!r:.100}")
    return value
