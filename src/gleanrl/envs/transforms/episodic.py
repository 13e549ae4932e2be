"""`Following`: transforms that carry something along with the episodes of an environment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl.data.specs import Composite, Unbounded
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.compose import flattened
from gleanrl.envs.transforms.row_view import Record, reset_rows
from gleanrl.errors import InvalidArgumentError, MissingKeyError, UnsupportedError


class OfEnvironment(Transform):
    """Acts on the steps and resets of an environment; in a replay buffer it can't be used."""

    def forward(self, tensordict: Any) -> Any:
        """Raise: it needs an environment."""
        raise UnsupportedError(
            f"{type(self).__name__} follows an environment's episodes; it can't be used in a replay buffer"
        )


class Following(OfEnvironment):
    """Follows the episodes of an environment; in a replay buffer it can't be used.

    What lives from step to step stands in `carried`, a tensor for all environments by key, and is never written in
    place: `renewed` begins it anew where a reset says so, a step replaces it.
    """

    on_rows = True
    reset_key: NestedKey | None = None  # the mask to go by; None for any of the environment's
    _changed_later: frozenset[NestedKey] | None

    def surroundings(self) -> Any:
        """Return the environment before this transform.

        Raises:
            UnsupportedError: if it is in none.
        """
        parent = self.parent
        if parent is None:
            raise UnsupportedError(
                f"{type(self).__name__}: expected to be part of an environment; put it into a TransformedEnv"
            )
        return parent

    def groups(self, *names: str) -> list[tuple[NestedKey, ...]]:
        """Return for each group of flags the key of done and those of `names` beside it."""
        done = [as_path(key) for key in self.surroundings().done_keys if as_path(key)[-1] == "done"]
        return [tuple(as_key((*path[:-1], name)) for name in ("done", *names)) for path in done]

    def empty_cache(self) -> None:
        """Forget what was found out about the environment and about later transforms."""
        super().empty_cache()
        self._changed_later = None

    @property
    def reset_keys(self) -> list[NestedKey]:
        """The masks that resets of the environment go by."""
        return list(self.surroundings().reset_keys)

    def asked(self, request: Record) -> Tensor | None:
        """Return which environments a reset is for, ``(*batch,)`` bool; None for all of them."""
        keys: Sequence[NestedKey] = (
            [self.reset_key] if self.reset_key is not None else self.surroundings().reset_keys
        )
        return reset_rows(request, keys)

    def last(self, root: Record, key: NestedKey, device: torch.device | None = None) -> Tensor:
        """Return what this transform left at `key` in the root.

        Where a later transform changes, renames or drops it, that is what is carried: the root's isn't its own.

        Args:
            root: of the step.
            key: of the entry.
            device: where what is carried has to be; None for where the root is.

        Raises:
            MissingKeyError: before the first reset.
        """
        changed = self._changed_later  # as in `own`, without a call of it in every step
        value = self.own(root, key) if changed is None or key in changed else root.get(key, None)
        if value is None:
            value = self.kept(key, root.device if device is None else device)
        if value is None:
            raise MissingKeyError(
                f"{type(self).__name__}: the root has no {key!r}; step from what reset returned"
            )
        return value

    def kept(self, key: NestedKey, device: torch.device | None) -> Tensor | None:
        """Return what is carried at `key`, on a device; collectors' rows may be elsewhere than those of rollouts."""
        value = self.carried.get(key)
        return value if value is None or device is None or value.device == device else value.to(device)

    def own(self, root: Record, key: NestedKey) -> Tensor | None:
        """Return what stands at `key` in the root; None if it isn't this transform's any more, or isn't there."""
        if self._changed_later is None:
            self._changed_later = self._find_changed_later()
        return None if key in self._changed_later else root.get(key, None)

    def _find_changed_later(self) -> frozenset[NestedKey]:
        chain = [] if self.container is None else flattened(self.container.transform)
        later = [*itertools.dropwhile(lambda transform: transform is not self, chain)][1:]
        if any(transform.writes_anything() for transform in later):
            return frozenset(self.written_keys())
        return frozenset(key for transform in later for key in transform.written_keys())

    def renewed(
        self, key: NestedKey, fresh: Tensor, mask: Tensor | None, before: Tensor | None = None
    ) -> Tensor:
        """Return, and carry on, `fresh` where `mask` is True, and what there was elsewhere.

        Args:
            key: where it is carried.
            fresh: the values at the beginning of an episode.
            mask: bool, it broadcasts with `fresh`; None for everywhere.
            before: what there was; None for what is carried.
        """
        before = self.kept(key, fresh.device) if before is None else before
        if mask is not None and before is not None:
            fresh = torch.where(mask, fresh, before)
        self.carried[key] = fresh
        return fresh


def reward_fields(follower: Following) -> dict[NestedKey, Field]:
    """Return fields for `out_keys` that are those of the environment's rewards at `in_keys`."""
    spec = follower.surroundings().full_reward_spec
    return {out_key: Field(spec[in_key].shape, spec[in_key].dtype) for in_key, out_key in follower.pairs()}


def with_carried(spec: Composite, follower: Following) -> Composite:
    """Return `spec` with what a transform carries."""
    out, device = spec.clone(), follower.home()
    for key, field in follower.carries().items():
        out[key] = Unbounded(field.shape, device=device, dtype=field.dtype)
    return out


def require_free(transform: Transform, spec: Composite, key: NestedKey, argument: str) -> None:
    """Raise unless the environment has no entry at the key that a transform adds.

    Args:
        transform: for the message.
        spec: the environment's observations.
        key: where the transform writes.
        argument: of the transform's constructor, which chooses `key`.

    Raises:
        InvalidArgumentError: there is one already.
    """
    if key in spec.keys(True, True):
        raise InvalidArgumentError(
            f"{type(transform).__name__}: the environment has a {key!r} already; choose another {argument}"
        )
