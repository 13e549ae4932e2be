"""The specs of one environment: what it reads and writes, with the flags completed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from gleanrl.data.specs import Categorical, Composite, TensorSpec, Unbounded
from gleanrl.data.specs.locks import Changes, Lockable
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.errors import EnvironmentContractError, InvalidTypeError, MissingKeyError, UnsupportedError
from gleanrl.tree import FLAGS, NestedKey, Path, as_key, as_path

ROLES = ("observation", "action", "reward", "done", "state")

Form = tuple[Path, torch.Size, torch.dtype | None]


class EnvSpecs:
    """The five composite specs of an environment, by role.

    A leaf given for action, reward or done stands under the key of that name. Whatever the environment
    declares of done, terminated and truncated, each group of flags gets both ``done`` and ``terminated``.

    They can be declared before the batch size is known, which `settle` then checks them against. Reward and flags are
    one of each until they are declared otherwise.

    Attributes:
        batch_size: leading dimensions that every leaf must have.
        device: where the specs live; None leaves them as they are.
        locked: whether the composites refuse to be written into; a whole spec can be replaced at any time.
    """

    def __init__(self, batch_size: Sequence[int] = (), device: torch.device | None = None) -> None:
        self.batch_size, self.device, self.locked = torch.Size(batch_size), device, False
        self._specs: dict[str, Composite] = {role: self._empty() for role in ROLES}
        self._declared: set[str] = set()
        self._known: dict[str, tuple[Composite, object, dict[NestedKey, Any]]] = {}
        self._groups: tuple[Any, tuple[Path, ...]] | None = None
        self._forms: dict[str, tuple[Any, list[Form]]] = {}
        self._set_defaults()

    def _set_defaults(self) -> None:
        shape = (*self.batch_size, 1)
        flag = Categorical(2, shape=shape, dtype=torch.bool, device=self.device)
        for role, spec in (("reward", Unbounded(shape, device=self.device)), ("done", flag)):
            if role not in self._declared:
                self._specs[role] = self._checked(role, spec)

    def _empty(self) -> Composite:
        return Composite({}, shape=self.batch_size, device=self.device)

    def settle(self, batch_size: torch.Size, device: torch.device | None) -> None:
        """Give the environment a batch size and a device, which everything declared before must have, or get.

        Raises:
            EnvironmentContractError: if a leaf lacks the environment's batch dimensions.
        """
        self.batch_size, self.device = batch_size, device
        self._set_defaults()
        for role, spec in self._specs.items():
            self._specs[role] = self._checked(role, self._empty() if spec.is_empty() else spec)

    def set(self, role: str, spec: TensorSpec | None) -> None:
        """Replace the spec of `role`.

        Raises:
            EnvironmentContractError: if a leaf lacks the environment's batch dimensions.
            InvalidTypeError: if `spec` isn't a spec, or is a leaf where keys are needed.
        """
        self._specs[role] = self._checked(role, self._empty() if spec is None else spec)
        self._declared.add(role)
        Changes.note()

    def set_unbatched(self, role: str, spec: TensorSpec | None) -> None:
        """Replace the spec of `role` by that of a batch of such values."""
        self.set(role, None if spec is None else spec.expand(*self.batch_size, *spec.shape))

    def without_batch(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of one of the batch's values."""
        one: TensorSpec = spec[(0,) * len(self.batch_size)] if self.batch_size else spec
        return one

    def set_groups(self, specs: Composite) -> None:
        """Replace the specs that ``"full_action_spec"`` and the like name in an input or an output spec."""
        for role in ROLES:
            if (name := f"full_{role}_spec") in specs:
                self.set(role, specs[name])

    def _checked(self, role: str, spec: TensorSpec) -> Composite:
        """Return the composite for a spec of `role`."""
        if not isinstance(spec, TensorSpec):
            raise InvalidTypeError(f"{role}_spec: expected a spec, got {type(spec).__name__}")
        if spec.is_part:
            spec = spec.clone()
        leaves: dict[NestedKey, TensorSpec | None] = {role: spec}
        if isinstance(spec, SpecMapping):
            leaves = {key: spec[key] for key in spec.keys(True, True)}
        elif role in ("observation", "state"):
            raise InvalidTypeError(f"{role}_spec: expected a Composite, which names its keys, got {spec!r}")
        for key, leaf in leaves.items():
            if leaf is not None and tuple(leaf.shape[: len(self.batch_size)]) != tuple(self.batch_size):
                raise EnvironmentContractError(
                    f"{role}_spec: {key!r} has shape {tuple(leaf.shape)}, which doesn't begin with the "
                    f"environment's batch size {tuple(self.batch_size)}; {role}_spec_unbatched takes a spec "
                    "without batch dimensions"
                )
        if not isinstance(spec, SpecMapping):
            spec = Composite({role: spec}, shape=self.batch_size, device=self.device)
        # A stack of unlike composites has the methods of one.
        spec = _of_shape(spec, self.batch_size)
        found = cast(Composite, spec if self.device is None else spec.to(self.device))
        found = self._complete(found.clone()) if role == "done" else found
        return found.lock_() if self.locked else found

    def lock(self, mode: bool) -> None:
        """Forbid, or allow, writing into the composites."""
        self.locked = mode
        change = Composite.lock_ if mode else _unlocked
        self._specs = {role: change(spec) for role, spec in self._specs.items()}

    def full(self, role: str) -> Composite:
        """Return the composite spec of `role`."""
        return self._specs[role]

    def short(self, role: str) -> TensorSpec:
        """Return the leaf of `role` if there is none but that of its own name, otherwise the composite."""
        spec = self._specs[role]
        return spec[role] if self.keys(role) == [role] else spec

    def leaves(self, role: str) -> dict[NestedKey, Any]:
        """Return the leaves of `role` by key, the shallow ones first; to be looked at only."""
        spec = self._specs[role]
        known, locks, leaves = self._known.get(role, (None, None, {}))
        if known is not spec or locks is not Lockable.all_locks:
            found = sorted(map(as_path, spec.keys(True, True)), key=len)
            leaves = {as_key(path): spec[path] for path in found}
            if spec.is_fixed:  # what can't change is looked up once
                self._known[role] = (spec, Lockable.all_locks, leaves)
        return leaves

    def forms(self, role: str) -> list[Form]:
        """Return path, shape and dtype of the leaves of `role`; None for the flags', which may differ."""
        leaves = self.leaves(role)
        known, found = self._forms.get(role, (None, []))
        if known is not leaves:
            found = [
                (as_path(k), spec.shape, None if role == "done" else spec.dtype) for k, spec in leaves.items()
            ]
            self._forms[role] = leaves, found
        return found

    def keys(self, role: str) -> list[NestedKey]:
        """Return the leaves' keys of `role`, the shallow ones first."""
        return list(self.leaves(role))

    def only_key(self, role: str) -> NestedKey:
        """Return the only key of `role`.

        Raises:
            MissingKeyError: if there are none or several (also a KeyError).
        """
        keys = self.keys(role)
        if role == "done":
            keys = [key for key in keys if as_path(key)[-1] == "done"]
        if len(keys) != 1:
            raise MissingKeyError(
                f"{role}_key: expected exactly one, the environment has {keys}; use {role}_keys"
            )
        return keys[0]

    def groups(self) -> list[Path]:
        """Return the prefixes under which flags stand; ``()`` is the root."""
        flags = self.leaves("done")
        if self._groups is None or self._groups[0] is not flags:
            self._groups = (flags, tuple(dict.fromkeys(as_path(key)[:-1] for key in flags)))
        return list(self._groups[1])

    def add_truncated(self) -> None:
        """Add a truncated flag to every group of flags that has none."""
        spec = self._specs["done"].clone()
        for group in self.groups():
            done = spec[as_key((*group, "done"))]
            if (*group, "truncated") not in {as_path(key) for key in spec.keys(True, True)}:
                spec[as_key((*group, "truncated"))] = done.clone()
        self.set("done", spec)

    def _complete(self, spec: Composite) -> Composite:
        found = [as_path(key) for key in spec.keys(True, True)]
        for group in dict.fromkeys(path[:-1] for path in found):
            known = next((group + (flag,) for flag in FLAGS if (*group, flag) in found), None)
            if known is None:
                raise EnvironmentContractError(
                    f"done_spec: {[as_key(path) for path in found]} are none of done, terminated, truncated"
                )
            for flag in ("done", "terminated"):
                if (*group, flag) not in found:
                    spec[as_key((*group, flag))] = spec[as_key(known)].clone()
        return spec


def _unlocked(spec: Composite) -> Composite:
    try:
        return spec.unlock_()
    except UnsupportedError:  # locked with a group that showed it: a copy isn't
        return spec.clone()


def _of_shape(spec: TensorSpec, size: torch.Size) -> TensorSpec:
    """Return a composite with the batch dimensions that all of its leaves have, whatever its own shape is."""
    if not isinstance(spec, Composite) or spec.shape[: len(size)] == size:
        return spec
    parts = {key: None if part is None else _of_shape(part, size) for key, part in spec.items()}
    return Composite(parts, shape=size, device=spec.device)


def complete_flags(flags: dict[str, Any], zeros: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all flags of one group, the missing ones derived from those that the environment gave.

    Only ``done`` gives ``terminated := done``; only ``terminated`` gives ``done := terminated |
    truncated``; none at all gives zeros.

    Args:
        flags: the flags that came, by name.
        zeros: a False tensor for each flag that the group must have.

    Raises:
        EnvironmentContractError: if done and truncated came without terminated: which is it?
    """
    out = dict(flags)
    if "done" in out and "terminated" not in out:
        if "truncated" in out:
            raise EnvironmentContractError(
                "the environment returned done and truncated without terminated; return terminated too"
            )
        out["terminated"] = out["done"].clone()
    elif "done" not in out and ("terminated" in out or "truncated" in out):
        terminated = out.setdefault("terminated", zeros["terminated"].clone())
        out["done"] = terminated | out["truncated"] if "truncated" in out else terminated.clone()
    for name, value in zeros.items():
        if name not in out:
            out[name] = value.clone()
    return out
