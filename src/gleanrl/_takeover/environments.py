"""Our environments inside of what stays torchrl's: its collectors that have no counterpart here.

The constructors of torchrl's collector classes are wrapped, in place, so that what they are given as environments, or
as what makes them, is torchrl's in the end: an environment of ours stands inside of one of torchrl's, which resets and
steps it. Other environments pass as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tensordict import TensorDictBase

from gleanrl.data.specs import to_torchrl
from gleanrl.envs import EnvBase

_WORDS = ("create_env_fn", "env")
_ROLES = ("observation", "state", "action", "reward", "done")


def adapt(collectors: ModuleType) -> None:
    """Let the collector classes of a module of torchrl's take our environments."""
    for cls in vars(collectors).values():
        init = vars(cls).get("__init__") if inspect.isclass(cls) else None
        names = [*inspect.signature(init).parameters] if init is not None else []
        for word in _WORDS:
            if word in names:
                cls.__init__ = _converting(init, word, names.index(word))


def as_torchrl(given: Any) -> Any:
    """Return what a collector of torchrl's makes environments of, with ours inside of torchrl's.

    Args:
        given: an environment, what makes one, or several of these; what is neither is returned as it is.
    """
    if isinstance(given, (list, tuple)):
        return [as_torchrl(one) for one in given]
    if isinstance(given, EnvBase):
        return _housing()(given)
    return given if isinstance(given, _theirs()) or not callable(given) else _Maker(given)


class _Maker:
    """Makes what another callable makes, where it's needed."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return as_torchrl(self._make(*args, **kwargs))


def _converting(init: Any, word: str, place: int) -> Any:
    @functools.wraps(init)
    def converting(*args: Any, **kwargs: Any) -> None:
        if word in kwargs:
            kwargs[word] = as_torchrl(kwargs[word])
        elif len(args) > place:
            args = (*args[:place], as_torchrl(args[place]), *args[place + 1 :])
        init(*args, **kwargs)

    return converting


def _theirs() -> Any:
    return importlib.import_module("torchrl.envs").EnvBase


@functools.cache
def _housing() -> Any:
    """Return the class of torchrl's environments that hold one of ours."""

    class Housing(_theirs()):  # type: ignore[misc]
        """Resets and steps an environment of ours."""

        def __init__(self, ours: EnvBase) -> None:
            super().__init__(device=ours.device, batch_size=ours.batch_size)
            self.__dict__["ours"] = ours  # not a submodule
            for role in _ROLES:
                name = f"full_{role}_spec" if role != "observation" else "observation_spec"
                setattr(self, name, to_torchrl(getattr(ours, name)))

        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            given = None if tensordict is None else tensordict.copy()  # ours would fill what it's given
            return self.ours.reset(given, **kwargs)

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            return self.ours.step(tensordict.copy())["next"]

        def _set_seed(self, seed: int | None) -> None:
            self.ours.set_seed(seed)

        def close(self, **kwargs: Any) -> None:
            if not self.ours.was_closed:
                self.ours.close()
            super().close(**kwargs)

    return Housing
