"""How environments are made: what holds for every class of them, whatever its constructor takes."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any

# How an environment that resets itself becomes one that doesn't; `envs.transforms` fills this in, as the base class
# can't import those who derive from it.
RESETTING_ITSELF: list[Callable[[Any, bool], Any]] = []
# How an environment that takes any batch size gets one, for the same reason.
OF_ANY_SIZE: list[Callable[[Any, Sequence[int]], Any]] = []
# How an environment gets entries for the state of a recurrent policy, for the same reason.
KEEPING_STATE: list[Callable[[Any, Any, Any], Any]] = []


class EnvType(ABCMeta):
    """The type of environment classes: their constructors take three keywords more than they name."""

    def __call__(
        cls,
        *args: Any,
        spec_locked: bool | None = None,
        auto_reset: bool | None = None,
        auto_reset_replace: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Make an environment.

        Args:
            *args: of the class's constructor.
            spec_locked: whether its composite specs can't be written into once it stands; None for what its constructor
                passes on to `EnvBase`.
            auto_reset: whether it resets itself, in the step that ends an episode: an `AutoResetEnv` around it is
                returned. None for what its constructor passes on to `EnvBase`.
            auto_reset_replace: see `AutoResetTransform`.
            **kwargs: of the class's constructor.
        """
        env = super().__call__(*args, **kwargs)
        if not isinstance(env, cls):  # `__new__` chose another class, which has been here already
            return env
        env.set_spec_lock_(env.wants_lock if spec_locked is None else spec_locked)
        if env.resets_itself if auto_reset is None else auto_reset:
            return RESETTING_ITSELF[0](env, auto_reset_replace)
        return env

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's own: `inspect` would show that of `__call__`."""
        init: Any = cls.__init__  # type: ignore[misc]
        whole = inspect.signature(init)
        return whole.replace(parameters=list(whole.parameters.values())[1:])
