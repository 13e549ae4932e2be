"""The storages of an ensemble of replay buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed
from gleanrl.data.replay_buffers.component_base import Part
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import members_at
from gleanrl.data.replay_buffers.truncate import end_trajectories
from gleanrl.data.replay_buffers.utils import load_all, loading_all, states_in
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


class StorageEnsemble(Checkpointed, Part):  # type: ignore[misc]
    """Several storages that are read by a storage's number and an index in it.

    It isn't a `Storage`, because it has no slots. Records are written to each storage through its buffer.

    Args:
        storages: one storage for each buffer.
        transforms: for each storage a callable that transforms records read from it, or None; None for no transforms.
            Modules are put into evaluation mode.

    Raises:
        InvalidArgumentError: there is no storage, or an argument isn't a storage.
        InvalidTypeError: `transforms` isn't a sequence, or its length differs from the number of storages.

    Examples:
        >>> import torch
        >>> from gleanrl.data.replay_buffers import TensorStorage
        >>> storages = StorageEnsemble(TensorStorage(torch.arange(3)), TensorStorage(torch.arange(10, 12)))
        >>> storages.get({"buffer_ids": [1, 0], "index": [[1, 0], [2, 2]]})
        [(1, tensor([11, 10])), (0, tensor([2, 2]))]
    """

    kind = "StorageEnsemble"

    def __init__(
        self, *storages: Storage, transforms: Sequence[Callable[[Any], Any] | None] | None = None
    ) -> None:
        for storage in storages:
            if not isinstance(storage, Storage):
                raise InvalidArgumentError(f"storages: expected Storages, got {storage!r}")
        if not storages:
            raise InvalidArgumentError("storages: expected at least one storage, got none")
        if transforms is not None and not isinstance(transforms, Sequence):
            raise InvalidTypeError(f"transforms: expected a list of callables, got {transforms!r}")
        if transforms is not None and len(transforms) != len(storages):
            raise InvalidTypeError(
                f"transforms: expected {len(storages)}, a callable or None for each storage, got {len(transforms)}"
            )
        for transform in transforms or ():
            if isinstance(transform, nn.Module):
                transform.eval()
        self._storages = storages
        self._transforms = tuple(transforms or (None,) * len(storages))

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages."""
        return self._storages

    @property
    def transforms(self) -> tuple[Callable[[Any], Any] | None, ...]:
        """The transform of each storage's records, or None."""
        return self._transforms

    def __len__(self) -> int:
        """Return the number of transitions in all storages."""
        return sum(len(storage) for storage in self._storages)

    def __iter__(self) -> Iterator[Storage]:
        """Yield the storages."""
        return iter(self._storages)

    def __getitem__(self, index: Any) -> Any:
        """Return the storage at an int, or an ensemble of the storages at a slice, list or tensor."""
        chosen = members_at(index, len(self._storages))
        if isinstance(chosen, int):
            return self._storages[chosen]
        return StorageEnsemble(
            *(self._storages[position] for position in chosen),
            transforms=[self._transforms[position] for position in chosen],
        )

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """Return the transformed records at an index: for each part the storage's number and its records.

        Single records are first collated to a batch.

        Args:
            index: a TensorDict or dictionary. ``"buffer_ids"`` has the storages' numbers, ``(parts,)`` or
                ``(parts, n)``, where only the first of each part is read. ``"index"`` has an index in the storage for
                each part (see `SamplerEnsemble.sample`).

        Raises:
            IndexRangeError: an index is outside the stored part of a storage.
        """
        found = []
        for numbers, inside in zip(index["buffer_ids"], index["index"], strict=True):
            number = int(torch.as_tensor(numbers).reshape(-1)[0])
            storage = self._storages[number]
            records = storage.get(inside)
            if storage.collate is not None:
                records = storage.collate(records)
            transform = self._transforms[number]
            found.append((number, records if transform is None else transform(records)))
        return found

    def set(self, *args: Any, **options: Any) -> NoReturn:
        """Raise `UnsupportedError`, because records are written to each storage through its buffer."""
        raise UnsupportedError("set: an ensemble of storages is only read; write to one of its members")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each storage."""
        return {"storages": [storage.state_dict() for storage in self._storages]}

    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state, with each storage's records in the form of its checkpointer."""
        return {
            "storages": [
                storage.checkpointer.packed_later(storage.checkpoint_dict()) for storage in self._storages
            ]
        }

    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Return a function that loads the result of `checkpointed_state`.

        Any checkpointers may have written the state. The returned function can't fail.
        """
        packed = states_in(state, "storages", len(self._storages))
        return loading_all(self._storages, [StorageCheckpointerBase.unpacked(part) for part in packed])

    def end_trajectories(self, ids: Collection[int]) -> None:
        """Mark the last stored step of trajectories that won't be continued as truncated and done."""
        for storage in self._storages:
            end_trajectories(storage, ids)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content of each storage by its saved state.

        Raises:
            SchemaError: the number of storages differs, or a state doesn't fit its storage. Nothing changed.
        """
        load_all(self._storages, states_in(state_dict, "storages", len(self._storages)))
