"""`Contained`: a transform's place in a chain, and the environment that it sees from there."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from gleanrl.envs.module_state import StatefulModule
from gleanrl.errors import ContainerError


class Contained(StatefulModule):
    """Belongs to one container, a `Compose` or a `TransformedEnv`, which it doesn't keep alive.

    What it sees of the environment, the base one with the transforms before it, is looked up once and forgotten by
    `empty_cache`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._holder: weakref.ref[Any] | None = None  # a chain that nobody else keeps is gone
        self._parent_found: list[Any] | None = None

    @property
    def holder(self) -> Any:
        """The `Compose` or `TransformedEnv` that the transform stands in directly; None if it's in none."""
        return None if self._holder is None else self._holder()

    @property
    def container(self) -> Any:
        """The `TransformedEnv` around all that the transform is in; None if there is none."""
        return None if self.holder is None else self.holder.container

    def set_container(self, container: Any) -> None:
        """Put the transform into `container`, a `Compose` or a `TransformedEnv`.

        Raises:
            ContainerError: if it is in another one already (also an AttributeError).
        """
        holder = self.holder
        if holder not in (None, container) and not (holder.container is None and holder.lends):
            raise ContainerError(
                f"{type(self).__name__} is part of another Compose or TransformedEnv already; use transform.clone()"
            )
        self._holder = weakref.ref(container)
        self.empty_cache()
        self.enter()

    def enter(self) -> None:
        """Go into evaluation mode if this is in an environment, where everything is in it but what learns there."""
        if self.container is not None and not self.learns:
            self.eval()

    def reset_parent(self) -> None:
        """Take the transform out of its container."""
        self._holder = None
        self.empty_cache()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with what holds the transform: copies and pickles of that know their own."""
        return {**self.__dict__, "_holder": self.holder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes of a copy."""
        super().__setstate__(state)
        holder = self.__dict__["_holder"]
        self._holder = None if holder is None else weakref.ref(holder)

    @property
    def parent(self) -> Any:
        """The environment as this transform sees it: the base one with the transforms before it; None outside one."""
        if self._parent_found is None and self.holder is not None:
            self._parent_found = [self.holder.environment_before(self)]
        return self._parent_found[0] if self._parent_found else None

    @property
    def collector(self) -> Any:
        """The collector that uses the environment; None if there is none."""
        return None if self.container is None else self.container.collector

    def home(self) -> torch.device | str | None:
        """Return the device of what is carried: the environment's; None outside one."""
        return None if self.parent is None else self.parent.device or "cpu"

    def clone(self) -> Any:
        """Return an independent copy that is in no container."""
        holder, self._holder = self._holder, None
        self.empty_cache()
        try:
            return copy.deepcopy(self)
        finally:
            self._holder = holder

    def twin(self) -> Any:
        """Return a clone that sees the same environment before it."""
        parent, twin = self.parent, self.clone()
        twin._parent_found = [parent]
        return twin

    def empty_cache(self) -> None:
        """Forget what was found in the environment."""
        self._parent_found = None
