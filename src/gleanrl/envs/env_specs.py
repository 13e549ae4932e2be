"""The specs of one environment: what it reads and writes, with the flags completed."""

from __future__ import annotations

from typing import Any, cast

import torch

from gleanrl.data.specs import Categorical, Composite, TensorSpec, Unbounded
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.errors import EnvironmentContractError, InvalidTypeError, MissingKeyError
from gleanrl.tree import FLAGS, NestedKey, Path, as_key, as_path

ROLES = ("observation", "action", "reward", "done", "state")


class EnvSpecs:
    """The five composite specs of an environment, by role.

    A leaf given for action, reward or done stands under the key of that name. Whatever the environment
    declares of done, terminated and truncated, each group of flags gets both ``done`` and ``terminated``.

    Args:
        batch_size: leading dimensions that every leaf must have.
        device: where the specs live; None leaves them as they are.
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None) -> None:
        self.batch_size = batch_size
        self.device = device
        self._specs: dict[str, Composite] = {role: self._empty() for role in ROLES}
        self.set("reward", Unbounded(shape=(*batch_size, 1), device=device))
        self.set("done", self._flag((*batch_size, 1)))

    def _empty(self) -> Composite:
        return Composite({}, shape=self.batch_size, device=self.device)

    def _flag(self, shape: tuple[int, ...]) -> Categorical:
        return Categorical(2, shape=shape, dtype=torch.bool, device=self.device)

    def set(self, role: str, spec: TensorSpec | None) -> None:
        """Replace the spec of `role`.

        Raises:
            EnvironmentContractError: if a leaf lacks the environment's batch dimensions.
            InvalidTypeError: if `spec` isn't a spec, or is a leaf where keys are needed.
        """
        if spec is None:
            spec = self._empty()
        if not isinstance(spec, TensorSpec):
            raise InvalidTypeError(f"{role}_spec: expected a spec, got {type(spec).__name__}")
        leaves: dict[NestedKey, TensorSpec | None] = {role: spec}
        if isinstance(spec, SpecMapping):
            leaves = {key: spec[key] for key in spec.keys(True, True)}
        elif role in ("observation", "state"):
            raise InvalidTypeError(f"{role}_spec: expected a Composite, which names its keys, got {spec!r}")
        for key, leaf in leaves.items():
            if leaf is not None and tuple(leaf.shape[: len(self.batch_size)]) != tuple(self.batch_size):
                raise EnvironmentContractError(
                    f"{role}_spec: {key!r} has shape {tuple(leaf.shape)}, which doesn't begin with the "
                    f"environment's batch size {tuple(self.batch_size)}"
                )
        if not isinstance(spec, SpecMapping):
            spec = Composite({role: spec}, shape=self.batch_size, device=self.device)
        # A stack of unlike composites has the methods of one.
        found = cast(Composite, spec if self.device is None else spec.to(self.device))
        self._specs[role] = self._complete(found) if role == "done" else found

    def full(self, role: str) -> Composite:
        """Return the composite spec of `role`."""
        return self._specs[role]

    def short(self, role: str) -> TensorSpec:
        """Return the only leaf of `role`, or the composite if there are several or none."""
        spec = self._specs[role]
        keys = self.keys(role)
        return spec[keys[0]] if len(keys) == 1 else spec

    def keys(self, role: str) -> list[NestedKey]:
        """Return the leaves' keys of `role`, the shallow ones first."""
        found = [as_key(as_path(key)) for key in self._specs[role].keys(True, True)]
        return sorted(found, key=lambda key: 1 if isinstance(key, str) else len(key))

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
        found: list[Path] = []
        for key in self.keys("done"):
            prefix = as_path(key)[:-1]
            if prefix not in found:
                found.append(prefix)
        return found

    def add_truncated(self) -> None:
        """Add a truncated flag to every group of flags that has none."""
        spec = self._specs["done"].clone()
        for group in self.groups():
            done = spec[as_key((*group, "done"))]
            if (*group, "truncated") not in {as_path(key) for key in spec.keys(True, True)}:
                spec[as_key((*group, "truncated"))] = done.clone()
        self._specs["done"] = spec

    def move(self, device: torch.device) -> None:
        """Move every spec to `device`."""
        self.device = device
        self._specs = {role: spec.to(device) for role, spec in self._specs.items()}

    def _complete(self, spec: Composite) -> Composite:
        spec = spec.clone()
        found = [as_path(key) for key in spec.keys(True, True)]
        for group in dict.fromkeys(path[:-1] for path in found):
            known = next(
                (group + (flag,) for flag in FLAGS if (*group, flag) in found),
                None,
            )
            if known is None:
                raise EnvironmentContractError(
                    f"done_spec: {[as_key(path) for path in found]} are none of done, terminated, truncated"
                )
            for flag in ("done", "terminated"):
                if (*group, flag) not in found:
                    spec[as_key((*group, flag))] = spec[as_key(known)].clone()
        return spec


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
