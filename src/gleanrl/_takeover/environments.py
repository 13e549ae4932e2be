"""Adapter that lets TorchRL collectors without a counterpart in gleanrl run gleanrl environments.

The constructors of TorchRL's collector classes are wrapped in place. The wrapper replaces each gleanrl environment, or
function that makes one, by a TorchRL environment that resets and steps it. Other environments are passed unchanged.
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
    """Wrap the constructors of a TorchRL module's collector classes in place, so that they accept gleanrl environments.

    A class that defines no constructor isn't changed.
    """
    for cls in vars(collectors).values():
        init = vars(cls).get("__init__") if inspect.isclass(cls) else None
        names = [*inspect.signature(init).parameters] if init is not None else []
        for word in _WORDS:
            if word in names:
                cls.__init__ = _converting(init, word, names.index(word))


def as_torchrl(source: Any) -> Any:
    """Return the environment argument of a TorchRL collector with each gleanrl environment in a TorchRL adapter.

    Args:
        source: an environment, a function that makes one, or a list or tuple of these, which becomes a list. A function
            becomes a picklable one that adapts the environment it makes. Other objects are returned unchanged.
    """
    if isinstance(source, (list, tuple)):
        return [as_torchrl(one) for one in source]
    if isinstance(source, EnvBase):
        return _housing()(source)
    return source if isinstance(source, _torchrl_base()) or not callable(source) else _Maker(source)


class _Maker:
    """A picklable function that makes an environment by another function, and wraps it for TorchRL.

    Collectors call it in their workers, so that the environment is created there.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return as_torchrl(self._make(*args, **kwargs))


def _converting(init: Any, word: str, position: int) -> Any:
    @functools.wraps(init)
    def converting(*args: Any, **kwargs: Any) -> None:
        if word in kwargs:
            kwargs[word] = as_torchrl(kwargs[word])
        elif len(args) > position:
            args = (*args[:position], as_torchrl(args[position]), *args[position + 1 :])
        init(*args, **kwargs)

    return converting


def _torchrl_base() -> Any:
    return importlib.import_module("torchrl.envs").EnvBase


@functools.cache
def _housing() -> Any:
    """Return the adapter class, a TorchRL environment around a gleanrl environment.

    The class is made at the first use, because its base class needs an import of TorchRL.
    """

    class Housing(_torchrl_base()):  # type: ignore[misc]
        """A TorchRL environment that resets and steps a gleanrl environment."""

        def __init__(self, ours: EnvBase) -> None:
            super().__init__(device=ours.device, batch_size=ours.batch_size)
            self.__dict__["ours"] = ours  # `setattr` would register it as a submodule
            for role in _ROLES:
                name = f"full_{role}_spec" if role != "observation" else "observation_spec"
                setattr(self, name, to_torchrl(getattr(ours, name)))

        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            # A copy, because `reset` of gleanrl writes into its argument
            request = None if tensordict is None else tensordict.copy()
            return self.ours.reset(request, **kwargs)

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            return self.ours.step(tensordict.copy())["next"]

        def _set_seed(self, seed: int | None) -> None:
            self.ours.set_seed(seed)

        def close(self, **kwargs: Any) -> None:
            if not self.ours.was_closed:
                self.ours.close()
            super().close(**kwargs)

    return Housing
