"""Tensor storage in memory-mapped files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from gleanrl.data.replay_buffers.storages.memory import FileAllocator, file_of
from gleanrl.data.replay_buffers.storages.tabled import TabledStorage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


class LazyMemmapStorage(TensorStorage):
    """A tensor storage in memory-mapped files, made at the first write with their space reserved on the disk.

    The operating system keeps the pages in use in memory and the rest on the disk, so that a storage may be
    larger than memory.

    Args:
        max_size: transitions that fit.
        scratch_dir: where the files stay, ``next/reward.memmap`` for ``("next", "reward")``. None for
            nameless files in the system's temporary directory, which vanish with the storage. Existing files
            are refused, unless `existsok`.
        device: the CPU; mapped files live nowhere else.
        ndim: leading batch dimensions of the data that are slots; the first is time.
        existsok: whether files that exist in `scratch_dir` are replaced at the first write. What they hold is
            lost; a storage that still has them mapped keeps its own.
        compilable: has no effect, see `ListStorage`.

    The tensors of ``storage._storage`` have an attribute `filename`, which is None for nameless files.

    Raises:
        InvalidArgumentError: a device other than the CPU.

    Examples:
        >>> import torch
        >>> storage = LazyMemmapStorage(10)
        >>> storage.set(range(3), torch.arange(3.0))
        >>> storage.get(2)
        tensor(2.)
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
    ) -> None:
        if str(device).partition(":")[0] != "cpu":
            raise InvalidArgumentError(
                f"device: memory-mapped files live on the CPU, got {device!r}; use LazyTensorStorage"
            )
        if scratch_dir is not None and not isinstance(scratch_dir, (str, os.PathLike)):
            raise InvalidTypeError(f"scratch_dir: expected a path, got {scratch_dir!r}")
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        allocator = FileAllocator(self.scratch_dir, existsok)
        TabledStorage.__init__(self, max_size, allocator, torch.device("cpu"), ndim)

    @property
    def _storage(self) -> Any:
        """All slots as one live view, whose tensors say which file they are in; None before the first write."""
        whole = super()._storage
        if whole is not None:
            form = self.format
            for path, leaf in zip(form.schema.paths, form.read(whole, self.ndim, "storage")[1], strict=True):
                if isinstance(leaf, torch.Tensor):
                    named = None if self.scratch_dir is None else str(file_of(self.scratch_dir, path))
                    leaf.filename = named  # type: ignore[attr-defined]
        return whole
