"""What happens to a batch between its source and the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.arguments import optional_callable
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.envs.rollout import mark_truncated
from gleanrl.errors import InvalidTypeError
from gleanrl.tree import NestedKey, as_path, is_private


class Delivery:
    """Marks, moves, splits and post-processes batches.

    Args:
        device: where batches are moved to; None for where they are.
        truncated: the done keys of the environment if the last step of every batch is marked as truncated.
        split: whether batches are split into padded trajectories.
        postproc: called last; its result is delivered.
        reuse: whether batches are moved into the same memory, each overwriting the last.
        hook: called on every batch, as it is delivered.

    Raises:
        InvalidTypeError: if `postproc` or `hook` can't be called.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        truncated: Sequence[NestedKey] = (),
        split: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        reuse: bool = False,
        hook: Callable[[TensorDictBase], Any] | None = None,
    ) -> None:
        self._hook = optional_callable("post_collect_hook", hook)
        optional_callable("postproc", postproc)
        self._device, self._truncated, self._split, self._postproc = device, list(truncated), split, postproc
        self._reuse = reuse
        self._same: TensorDictBase | None = None
        self._private: list[NestedKey] | None = None  # of all batches, since they have one structure

    @property
    def copies(self) -> bool:
        """Whether batches are moved to other memory before anybody sees them."""
        return self._device is not None and self._device.type != "cpu"

    @property
    def is_plain(self) -> bool:
        """Whether nobody sees a batch before it's delivered."""
        return not self._split and self._postproc is None and self._hook is None

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return what is handed out in place of a collected batch; private entries, ``"_noise"`` say, are left out."""
        if self._private is None:
            # What isn't here is a reference to a batch that was finished where it was collected.
            keys = batch.keys(True, True) if isinstance(batch, TensorDictBase) else ()
            self._private = [key for key in keys if is_private(as_path(key))]
        if self._private:
            batch = batch.exclude(*self._private)
        if self._truncated:
            mark_truncated(batch, self._truncated)
        if self._device is not None:
            batch = self._moved(batch.to(self._device))
        if self._split:
            batch = split_trajectories(batch, prefix="collector")
        if self._postproc is not None:
            batch = self._postproc(batch)
            if batch is None:
                raise InvalidTypeError(
                    f"postproc: expected the batch that is delivered, got None from {self._postproc!r}"
                )
        if self._hook is not None:
            self._hook(batch)
        return batch

    def _moved(self, batch: TensorDictBase) -> TensorDictBase:
        if not self._reuse:
            return batch
        if self._same is None or self._same.batch_size != batch.batch_size:
            self._same = batch
            return batch
        return self._same.copy_(batch)


def place_postproc(postproc: Any, device: torch.device | None) -> None:
    """Move a `postproc` that has a method ``to`` to where batches are delivered; None for where it is."""
    if postproc is not None and hasattr(postproc, "to") and device is not None:
        postproc.to(device)
