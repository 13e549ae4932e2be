"""`Following`: the base class of transforms that carry values from step to step within an episode."""

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


class EnvTransform(Transform):
    """A transform for an environment's steps and resets; in a replay buffer, sampling raises `UnsupportedError`."""

    def forward(self, tensordict: Any) -> Any:
        """Raise `UnsupportedError`: the transform works in an environment only."""
        raise UnsupportedError(
            f"{type(self).__name__} follows an environment's episodes; it can't be used in a replay buffer"
        )


class Following(EnvTransform):
    """Carries values from step to step within the episodes of an environment.

    `carried` holds one tensor for all environments by key. A step replaces the tensor, and `renewed` sets initial
    values after a reset. Neither writes it in place, because rows and TensorDicts refer to the same tensor.
    """

    on_rows = True
    # The ``"_reset"`` mask that begins episodes; None for any of the environment's.
    reset_key: NestedKey | None = None
    _changed_later: frozenset[NestedKey] | None

    def surroundings(self) -> Any:
        """Return the parent environment.

        Raises:
            UnsupportedError: if the transform is in no environment.
        """
        parent = self.parent
        if parent is None:
            raise UnsupportedError(
                f"{type(self).__name__}: expected to be part of an environment; put it into a TransformedEnv"
            )
        return parent

    def groups(self, *names: str) -> list[tuple[NestedKey, ...]]:
        """Return for each group of flags the key of done, followed by the keys of `names` in the same group."""
        done = [as_path(key) for key in self.surroundings().done_keys if as_path(key)[-1] == "done"]
        return [tuple(as_key((*path[:-1], name)) for name in ("done", *names)) for path in done]

    def empty_cache(self) -> None:
        """Forget keys and specs derived from the environment and from later transforms."""
        super().empty_cache()
        self._changed_later = None

    @property
    def reset_keys(self) -> list[NestedKey]:
        """The keys of the environment's ``"_reset"`` masks."""
        return list(self.surroundings().reset_keys)

    def reset_mask(self, request: Record) -> Tensor | None:
        """Return which environments a request resets, ``(*batch,)`` bool; None for all of them."""
        keys: Sequence[NestedKey] = (
            [self.reset_key] if self.reset_key is not None else self.surroundings().reset_keys
        )
        return reset_rows(request, keys)

    def last(self, root: Record, key: NestedKey, device: torch.device | None = None) -> Tensor:
        """Return the value that this transform wrote at `key` in the root.

        If the root lacks it, or a later transform may have changed it, this is the carried value.

        Args:
            root: root of the step.
            key: key of the entry.
            device: device for the carried value; None for the root's device.

        Raises:
            MissingKeyError: before the first reset.
        """
        changed = self._changed_later  # inlined from `own`: a call in every step would cost more
        value = self.own(root, key) if changed is None or key in changed else root.get(key, None)
        if value is None:
            value = self.carried_value(key, root.device if device is None else device)
        if value is None:
            raise MissingKeyError(
                f"{type(self).__name__}: key {key!r} not found in the root; step from the result of reset"
            )
        return value

    def carried_value(self, key: NestedKey, device: torch.device | None) -> Tensor | None:
        """Return the carried value at `key` on `device`; None if there is none.

        It may have to move, because collectors and `rollout` may use rows on different devices.
        """
        value = self.carried.get(key)
        return value if value is None or device is None or value.device == device else value.to(device)

    def own(self, root: Record, key: NestedKey) -> Tensor | None:
        """Return the value at `key` in the root; None if it is absent, or if a later transform may have changed it."""
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
        self, key: NestedKey, initial: Tensor, mask: Tensor | None, before: Tensor | None = None
    ) -> Tensor:
        """Return `initial` where `mask` is True and the value before elsewhere; the result becomes the carried value.

        Without a value before, the result is `initial` everywhere.

        Args:
            key: key of the carried value.
            initial: values at the beginning of an episode.
            mask: bool, broadcasts with `initial`; None for everywhere.
            before: the values before; None for the carried ones.
        """
        before = self.carried_value(key, initial.device) if before is None else before
        if mask is not None and before is not None:
            initial = torch.where(mask, initial, before)
        self.carried[key] = initial
        return initial


def reward_fields(follower: Following) -> dict[NestedKey, Field]:
    """Return a field for each of `out_keys`, with shape and dtype of the reward at the matching one of `in_keys`."""
    spec = follower.surroundings().full_reward_spec
    return {out_key: Field(spec[in_key].shape, spec[in_key].dtype) for in_key, out_key in follower.pairs()}


def with_carried(spec: Composite, follower: Following) -> Composite:
    """Return a copy of `spec` with an unbounded spec for each value that `follower` carries."""
    out, device = spec.clone(), follower.home()
    for key, field in follower.carries().items():
        out[key] = Unbounded(field.shape, device=device, dtype=field.dtype)
    return out


def require_free(transform: Transform, spec: Composite, key: NestedKey, argument: str) -> None:
    """Raise if the environment already has an entry at a key that a transform adds.

    Args:
        transform: the transform, for the message.
        spec: the environment's observation spec.
        key: the key that the transform adds.
        argument: name of the constructor's argument that chooses `key`, for the message.

    Raises:
        InvalidArgumentError: if `spec` has the key.
    """
    if key in spec.keys(True, True):
        raise InvalidArgumentError(
            f"{type(transform).__name__}: the environment has a {key!r} already; choose another {argument}"
        )
