"""Storage for objects whose tensors are kept compressed."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl.arguments import integer, optional_callable
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError
from gleanrl.tree import Path

Packed = tuple[Any, list[torch.Tensor]]
"""A record in which each tensor is one number, expanded to its shape; and the bytes of each tensor."""


class CompressedListStorage(ListStorage):
    """A `ListStorage` whose records hold their tensors compressed: images that take a fraction of their memory so.

    Tensors are compressed at each write, before the buffer's records change, and decompressed at each read, outside of
    its lock: `prefetch` has threads do that. What isn't a tensor is kept as it is.

    Args:
        max_size: see `ListStorage`.
        compression_fn: maps a tensor to a tensor of bytes, ``(n,)`` uint8; None for zlib.
        decompression_fn: maps such bytes, and a dictionary with the tensor's ``"shape"`` and ``"dtype"``, if it takes
            one, to a tensor of that dtype with as many elements; None for zlib. Give both or none.
        compression_level: zlib's, 1 to 9, the smallest; larger ones, up to 22, mean 9.
        device: where the bytes are, and the tensors of batches.
        compilable: see `ListStorage`.

    Raises:
        InvalidArgumentError: a level out of range, or one function of the two.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=CompressedListStorage(100), batch_size=2)
        >>> index = buffer.extend(TensorDict({"pixels": torch.zeros(10, 3, 84, 84, dtype=torch.uint8)}, [10]))
        >>> buffer.sample()["pixels"].shape
        torch.Size([2, 3, 84, 84])
        >>> 10 * 3 * 84 * 84 // buffer.storage.bytes() > 100
        True
    """

    _compresses = True

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compression_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decompression_fn: Callable[..., torch.Tensor] | None = None,
        compression_level: int = 3,
        device: torch.device | str | int = "cpu",
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        self.compression_level = integer("compression_level", compression_level, 1)
        if self.compression_level > 22:
            raise InvalidArgumentError(f"compression_level: expected 1 to 22, got {compression_level}")
        if (compression_fn is None) != (decompression_fn is None):
            raise InvalidArgumentError("compression_fn, decompression_fn: give both or none")
        self._compress = optional_callable("compression_fn", compression_fn) or self._zipped
        self._decompress = optional_callable("decompression_fn", decompression_fn) or _unzipped
        self._informed = _takes_two(self._decompress)

    def bytes(self) -> int:
        """Return the bytes that the compressed tensors take."""
        stored = super().fetch(torch.arange(len(self), device="cpu"))
        return sum(packed.numel() for _, leaves in stored for packed in leaves)

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> list[Any]:
        """Return the objects in `slots`, their tensors decompressed."""
        return [self._unpacked(packed) for packed in super().fetch(slots, paths)]

    def _at(self, index: int | slice) -> Any:
        found = super()._at(index)
        if isinstance(index, slice):
            return [self._unpacked(packed) for packed in found]
        return self._unpacked(found)

    def _moved(self, items: list[Any]) -> list[Any]:
        return [self._packed(item) for item in super()._moved(items)]

    def _packed(self, item: Any) -> Packed:
        leaves: list[torch.Tensor] = []

        def take_out(leaf: Any) -> Any:
            if is_tensor_collection(leaf):
                return leaf.apply(take_out)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            packed = self._compress(leaf.detach())
            if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8 or packed.ndim != 1:
                raise InvalidTypeError(
                    f"compression_fn: expected a tensor of bytes, (n,) uint8, got {packed!r:.99}"
                )
            leaves.append(packed)
            return leaf.new_zeros(()).expand(leaf.shape)

        return _pytree.tree_map(take_out, item, is_leaf=is_tensor_collection), leaves

    def _unpacked(self, packed: Packed) -> Any:
        shell, leaves = packed
        coming = iter(leaves)

        def put_in(leaf: Any) -> Any:
            if is_tensor_collection(leaf):
                return leaf.apply(put_in)
            return self._restored(next(coming), leaf) if isinstance(leaf, torch.Tensor) else leaf

        return _pytree.tree_map(put_in, shell, is_leaf=is_tensor_collection)

    def _restored(self, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor of some bytes; `like` has its shape and dtype."""
        about = ({"shape": like.shape, "dtype": like.dtype},) if self._informed else ()
        made = self._decompress(packed, *about)
        fits = isinstance(made, torch.Tensor) and made.numel() == like.numel() and made.dtype == like.dtype
        if not fits:
            raise SchemaError(
                f"decompression_fn: expected a tensor {tuple(like.shape)} {like.dtype}, got {made!r:.99}"
            )
        return made.reshape(like.shape)

    def _zipped(self, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _bytes(zlib.compress(data, min(self.compression_level, 9))).to(tensor.device)


def _bytes(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor on the CPU, ``(n,)`` uint8, in memory of its own."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unzipped(packed: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
    return _bytes(zlib.decompress(packed.cpu().numpy().data)).view(about["dtype"]).to(packed.device)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function takes a second argument."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):  # a ValueError for one without a signature
        return False
    return True
