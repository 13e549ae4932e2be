"""`EnvCreator`: an environment factory that caches metadata and lets its environments share statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gleanrl._os.interrupts import to_the_end
from gleanrl._rollout.env_traits import Env, is_closed
from gleanrl.envs.transforms.vec_norm import SharesStatistics
from gleanrl.envs.vector.factories import EnvMetaData, Factory, factories, is_environment
from gleanrl.errors import SchemaError


class EnvCreator:
    """Creates environments in any process. It can be pickled even if the callable can't.

    The constructor builds one environment and closes it. It keeps the environment's metadata, so that batches of
    environments needn't build another one to read it.

    It also moves the statistics of transforms that can share them (`VecNorm`) to shared memory. All environments of the
    creator update these statistics and normalise with them. The shared memory lives as long as the process that made
    the creator.

    Args:
        create_env_fn: a callable that makes an environment, or the name of a gymnasium environment. An unused
            environment is copied at each call.
        create_env_kwargs: its keyword arguments.
        share_memory: whether to share statistics.
        **kwargs: further keyword arguments of the callable.

    Attributes:
        meta_data: specs, batch size and device of the environments.

    Examples:
        >>> from gleanrl.envs import GymEnv, SerialEnv
        >>> creator = EnvCreator(lambda: GymEnv("CartPole-v1"))
        >>> creator.meta_data.specs["action"]["action"].shape
        torch.Size([2])
        >>> SerialEnv(2, creator).batch_size
        torch.Size([2])
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        create_env_kwargs: Mapping[str, Any] | None = None,
        share_memory: bool = True,
        **kwargs: Any,
    ) -> None:
        self._factory: Factory = factories(1, create_env_fn, {**(create_env_kwargs or {}), **kwargs})[0]
        if self._factory.is_instance:
            env = self._factory.own_copy()()
        else:
            self._factory, env = self._factory.probed()
        try:
            self.meta_data = EnvMetaData.of(env)
            self._shared = [part.share_statistics() for part in _sharing(env)] if share_memory else []
        finally:
            env.close()

    def __call__(self, **kwargs: Any) -> Any:
        """Return a new environment, which uses the shared statistics.

        Args:
            **kwargs: further keyword arguments of the callable, for this environment only.

        Raises:
            ValueError: if it has another number of transforms that share statistics than the first environment.
        """
        env = self._with(kwargs).own_copy()()
        for part, statistics in zip(_sharing(env), self._shared, strict=bool(self._shared)):
            part.use_statistics(statistics)
        return env

    def make_variant(self, **kwargs: Any) -> EnvCreator:
        """Return a creator with other keyword arguments, but the same metadata and the same shared statistics.

        Args:
            **kwargs: added to the keyword arguments; they replace arguments of the same name.
        """
        variant = copy.copy(self)
        variant._factory = self._with(kwargs)
        return variant

    def _with(self, kwargs: Mapping[str, Any]) -> Factory:
        factory = self._factory
        return replace(factory, kwargs={**factory.kwargs, **kwargs}, model=None) if kwargs else factory

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the shared statistics, by ``"0"``, ``"1"``, …; empty without `share_memory`."""
        return {str(index): part.state_dict() for index, part in enumerate(self._shared)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the shared statistics from a saved state, for all environments that use them.

        Raises:
            SchemaError: if the state doesn't fit; then nothing has changed.
        """
        names = [str(index) for index in range(len(self._shared))]
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(names):
            got = (
                f"the keys {list(state_dict)}" if isinstance(state_dict, Mapping) else repr(type(state_dict))
            )
            raise SchemaError(
                f"load_state_dict: expected the state of an EnvCreator, a dictionary with the keys {names}, got {got}"
            )
        parsed = [part.parse(state_dict[name]) for part, name in zip(self._shared, names, strict=True)]

        def adopt() -> None:
            for part, value in zip(self._shared, parsed, strict=True):
                part.adopt(value)

        to_the_end(adopt)  # an interrupt must not leave half of the statistics loaded

    def __repr__(self) -> str:
        """Show the environments' class and batch size."""
        return f"{type(self).__name__}({self.meta_data.name}, batch_size={tuple(self.meta_data.batch_size)})"


def _sharing(env: Env) -> list[SharesStatistics]:
    """Return the transforms of an environment that can share statistics, in order."""
    transform = getattr(env, "transform", None) if hasattr(type(env), "append_transform") else None
    modules = getattr(transform, "modules", None)
    return [] if modules is None else [part for part in modules() if isinstance(part, SharesStatistics)]


def env_creator(create_env_fn: Any) -> EnvCreator:
    """Return an `EnvCreator` for a callable, which builds one environment; return an `EnvCreator` unchanged."""
    return create_env_fn if isinstance(create_env_fn, EnvCreator) else EnvCreator(create_env_fn)


def get_env_metadata(env_or_creator: Any, kwargs: Mapping[str, Any] | None = None) -> EnvMetaData:
    """Return the metadata of an environment: specs, batch size, device.

    Args:
        env_or_creator: an environment, an `EnvCreator`, or a callable that makes an environment. The callable's
            environment is built and closed, as is that of an `EnvCreator` with `kwargs`.
        kwargs: keyword arguments of the callable; ignored for an environment.
    """
    if is_environment(env_or_creator):
        return EnvMetaData.of(env_or_creator)
    if isinstance(env_or_creator, EnvCreator) and not kwargs:
        return env_or_creator.meta_data
    env = env_or_creator(**(kwargs or {}))
    try:
        return EnvMetaData.of(env)
    finally:
        if not is_closed(env):
            env.close()
