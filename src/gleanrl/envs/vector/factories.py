"""Factories of environments, made from the user's `create_env_fn`, and the metadata of their environments.

The metadata is read from an environment that is closed afterwards, or from an existing environment.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import gymnasium
import torch

from gleanrl._arrays.tensordicts import Path, as_path
from gleanrl._rollout.env_traits import Env, EnvTraits, extra, is_closed
from gleanrl._util import positive
from gleanrl.data.specs import TensorSpec, from_torchrl, has_choices, stack_specs
from gleanrl.envs.env_specs import ROLES
from gleanrl.envs.libs.gym import GymEnv, GymWrapper
from gleanrl.envs.libs.gym_backend import advice
from gleanrl.errors import ClosedError, InvalidArgumentError, InvalidTypeError, LengthError, UnsupportedError


@dataclass(frozen=True)
class Factory:
    """Makes one environment. It is pickled by cloudpickle, so it may hold lambdas.

    Attributes:
        source: a callable that makes an environment, or an unused environment.
        kwargs: keyword arguments of the callable, or of the environment's `update_kwargs`.
        truncated: whether to add a truncated flag to an environment that has none; see `know_truncated`.
        model: an environment of which copies are made; None to call `source`. It is set if the callable returns the
            same environment every time.
    """

    source: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    model: Any = None

    @property
    def is_instance(self) -> bool:
        """Whether `source` is an environment."""
        return is_environment(self.source)

    def __call__(self) -> Any:
        """Return a new environment, or `source` itself if that is an environment; copies of `model` come first.

        `update_kwargs` of an existing environment is called with `kwargs`. With `truncated`, flags are added; see
        `know_truncated`.

        Raises:
            InvalidTypeError: if the callable returned another kind of object.
            ClosedError, InvalidArgumentError: if an existing environment was closed or used before.
            UnsupportedError: if a truncated flag can't be added.
        """
        env = self._made()
        if self.truncated:
            know_truncated(env)
        return env

    def _made(self) -> Any:
        if self.model is not None:
            return copy.deepcopy(self.model)
        if not self.is_instance:
            made = as_source(self.source(**self.kwargs))
            if not is_environment(made):
                raise InvalidTypeError(
                    f"create_env_fn: expected a callable that makes an environment, {self.source!r} made "
                    f"{type(made).__name__}{advice(made)}"
                )
            return made
        require_unused(self.source)
        if self.kwargs:
            self.source.update_kwargs(self.kwargs)
        return self.source

    def probed(self) -> tuple[Factory, Any]:
        """Return a factory whose environments share nothing with other code, and an environment of it to inspect.

        A callable may return an existing environment, and the same one at each call (``lambda: env``). The returned
        factory then makes copies of its present state instead. To find out, the callable may be called twice; a second
        environment is closed. The caller closes the returned environment.

        Raises:
            ClosedError, InvalidArgumentError: if such an environment was closed or used before.
        """
        made, alone = self(), object()
        # A callable that can return the same environment again keeps a reference to it, so the count is higher than
        # that of a new object. Few callables do, so few are called twice, which may be slow.
        if self.is_instance or sys.getrefcount(made) == sys.getrefcount(alone):
            return self, made
        if not self._repeats(made):
            return self, made
        require_unused(made)
        copies = replace(self, model=copy.deepcopy(made))
        return copies, copies()

    def _repeats(self, made: Any) -> bool:
        try:
            again = self()
        except Exception:  # a second environment may be impossible while the first one holds a resource
            return False
        if again is made:
            return True
        if not is_closed(again):
            again.close()
        return False

    def own_copy(self) -> Factory:
        """Return a factory for a deep copy of `source` if that is an environment; otherwise this factory."""
        return replace(self, source=copy.deepcopy(self.source)) if self.is_instance else self

    def alike(self, other: Factory) -> bool:
        """Return whether `other` has the same source and keyword arguments, and therefore the same specs."""
        if self.source is not other.source or self.kwargs.keys() != other.kwargs.keys():
            return False
        return all(value is other.kwargs[name] for name, value in self.kwargs.items())

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        """Pickle by value, including lambdas and functions of the user's main module."""
        return _unpickled, (cloudpickle.dumps((self.source, dict(self.kwargs), self.truncated, self.model)),)


def _unpickled(data: bytes) -> Factory:
    return Factory(*cloudpickle.loads(data))


def know_truncated(env: Any) -> None:
    """Add a truncated flag to every group of done flags that has none; in a batch, to its members' groups.

    Raises:
        UnsupportedError: if the environment can't add the flag. That is so for a started batch, and for a batch of
            another library.
    """
    try:
        (extra(env, "_know_truncated") or env.add_truncated_keys)()
    except UnsupportedError:
        raise
    except Exception as cause:
        raise UnsupportedError(
            f"the {type(env).__name__} has no 'truncated' flag to set at a limit of steps, and can't add one: {cause}; "
            "let the callable of its members add it: lambda: make_env().add_truncated_keys()"
        ) from cause


def is_environment(candidate: Any) -> bool:
    """Return whether `candidate` has the public methods of an environment; a class has not."""
    names = ("step", "reset", "batch_size", "full_action_spec")
    return not isinstance(candidate, type) and all(_has(candidate, name) for name in names)


def as_source(create_env_fn: Any) -> Any:
    """Return gymnasium's forms of an environment as gleanrl's, and any other object unchanged.

    The name of a gymnasium environment gives a callable, which takes the keywords of `GymEnv`. A gymnasium environment
    or vector environment is wrapped in a `GymWrapper`.
    """
    if isinstance(create_env_fn, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        return GymWrapper(create_env_fn)
    return _by_name(create_env_fn) if isinstance(create_env_fn, str) else create_env_fn


@functools.cache
def _by_name(name: str) -> Callable[..., Any]:
    """Return the callable for a name, always the same one, so that its factories are `Factory.alike`."""
    return functools.partial(GymEnv, name)


def _has(candidate: Any, name: str) -> bool:
    """Return whether an object has an attribute, without evaluating a property of its class, which might raise."""
    return inspect.getattr_static(candidate, name, None) is not None or hasattr(candidate, name)


def require_environment(candidate: Any) -> None:
    """Raise `InvalidTypeError` unless `candidate` is an environment."""
    if not is_environment(candidate):
        raise InvalidTypeError(
            f"env: expected an environment, got {type(candidate).__name__}; call the function that makes it, or wrap a "
            "gymnasium environment in GymWrapper"
        )


def require_unused(env: Any) -> None:
    """Raise if `env` was closed or used, since its copies would all continue from the same state.

    Environments of other libraries don't tell whether they were used, and pass.

    Raises:
        ClosedError: if it was closed.
        InvalidArgumentError: if it was stepped, reset or started.
    """
    usage = extra(env, "usage")
    if usage is None:  # an environment of another library
        return
    if env.was_closed:
        raise ClosedError(
            f"create_env_fn: the {type(env).__name__} was closed; pass a callable that makes it"
        )
    if usage.started or extra(env, "is_started", False):
        raise InvalidArgumentError(
            f"create_env_fn: the {type(env).__name__} was started already; "
            "pass a callable that makes it, or an unused environment"
        )


def factories(num_envs: Any, create_env_fn: Any, create_env_kwargs: Any) -> tuple[Factory, ...]:
    """Return one factory for each environment.

    Args:
        num_envs: number of environments.
        create_env_fn: a callable or an unused environment for all, or a sequence with one for each. See also
            `as_source`.
        create_env_kwargs: keyword arguments for all, or a sequence of them with one for each.

    Raises:
        InvalidArgumentError: if `num_envs` isn't a positive integer, or an environment was used before.
        ClosedError: if an environment was closed.
        LengthError: if a sequence has another length.
        InvalidTypeError: if an entry is neither callable nor an environment, or keyword arguments aren't a mapping.
        UnsupportedError: if there are keyword arguments for an environment that has no `update_kwargs`.
    """
    num_envs = positive("num_workers", num_envs)
    entries = _spread("create_env_fn", create_env_fn, num_envs)
    # One wrapper for each environment, so that a repeated one is found.
    unique = {id(entry): as_source(entry) for entry in entries}
    sources = [unique[id(entry)] for entry in entries]
    kwargs = _spread("create_env_kwargs", create_env_kwargs, num_envs)
    return tuple(_factory(source, options) for source, options in zip(sources, kwargs, strict=True))


def is_several(argument: Any) -> bool:
    """Return whether an argument is a sequence with an entry for each environment; a name is one environment."""
    return isinstance(argument, Sequence) and not isinstance(argument, (str, bytes))


def _spread(name: str, argument: Any, num_envs: int) -> Sequence[Any]:
    """Return one entry for each environment, from a sequence of them or from one entry for all."""
    if not is_several(argument):
        return [argument] * num_envs
    if len(argument) != num_envs:
        raise LengthError(
            f"{name}: expected {num_envs} entries, one for each environment, got {len(argument)}"
        )
    return argument


def _factory(source: Any, kwargs: Any) -> Factory:
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, Mapping):
        raise InvalidTypeError(f"create_env_kwargs: expected a mapping, got {type(kwargs).__name__}")
    if is_environment(source):
        require_unused(source)
        if kwargs and not hasattr(source, "update_kwargs"):
            raise UnsupportedError(
                f"create_env_kwargs: the {type(source).__name__} exists already; pass a callable that makes it"
            )
    elif not callable(source):
        raise InvalidTypeError(
            f"create_env_fn: expected a callable or an environment, got {type(source).__name__}"
        )
    return Factory(source, dict(kwargs))


def with_own_copies(makers: Sequence[Factory]) -> tuple[Factory, ...]:
    """Return `makers` with every repeated environment instance replaced by a copy."""
    seen: set[int] = set()
    out = []
    for factory in makers:
        repeated = factory.is_instance and id(factory.source) in seen
        seen.add(id(factory.source))
        out.append(factory.own_copy() if repeated else factory)
    return tuple(out)


def existing(makers: Sequence[Factory]) -> list[Any]:
    """Return the environments that exist already, each once."""
    return list({id(factory.source): factory.source for factory in makers if factory.is_instance}.values())


@dataclass(frozen=True)
class EnvMetaData:
    """Metadata of one environment.

    Attributes:
        specs: the composite spec of each role: observation, action, reward, done, state.
        batch_size: its batch dimensions.
        device: its device; None if its TensorDicts have none.
        traits: see `EnvTraits`.
        name: name of its class.
    """

    specs: Mapping[str, Any]
    batch_size: torch.Size
    device: torch.device | None
    traits: EnvTraits
    name: str

    @classmethod
    def of(cls, env: Env) -> EnvMetaData:
        """Return the metadata of an environment, with copies of its specs."""
        specs = {role: from_torchrl(getattr(env, f"full_{role}_spec")).clone() for role in ROLES}
        return cls(specs, torch.Size(env.batch_size), env.device, EnvTraits.of(env), type(env).__name__)

    @property
    def may_mask(self) -> bool:
        """Whether the action has discrete choices, which a mask can restrict."""
        return has_choices(self.specs["action"])

    def fields(self, role: str) -> dict[Path, tuple[torch.Size, Any]]:
        """Return shape and dtype of each leaf of the spec of `role`."""
        spec = self.specs[role]
        leaves = {as_path(key): spec[key] for key in spec.keys(True, True)}
        return {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items() if leaf is not None}


def read_metadata(makers: Sequence[Factory]) -> tuple[tuple[Factory, ...], tuple[EnvMetaData, ...]]:
    """Return, for each factory, the factory to use from now on (see `Factory.probed`) and the metadata.

    Making an environment may be slow. Equal factories share the metadata of one environment, and `EnvCreator` has read
    the metadata before. An environment that a callable makes is closed afterwards.
    """
    found: list[tuple[Factory, EnvMetaData]] = []
    out = []
    for factory in makers:
        known = next((each for each in found if factory.alike(each[0])), None)
        if known is None:
            known = _read(factory)
            found.append(known)
        out.append(known)
    return tuple(factory for factory, _ in out), tuple(metadata for _, metadata in out)


def _read(factory: Factory) -> tuple[Factory, EnvMetaData]:
    known = getattr(factory.source, "meta_data", None)
    if isinstance(known, EnvMetaData) and not factory.kwargs:
        return factory, known
    factory, env = factory.probed()
    try:
        return factory, EnvMetaData.of(env)
    finally:
        if not factory.is_instance and not is_closed(env):
            env.close()


def common_batch_size(each: Sequence[EnvMetaData]) -> torch.Size:
    """Return the batch size of the environments.

    Raises:
        InvalidArgumentError: if they differ.
    """
    sizes = {metadata.batch_size for metadata in each}
    if len(sizes) > 1:
        raise InvalidArgumentError(
            f"create_env_fn: expected environments of one batch size, got {sorted(map(tuple, sizes))}"
        )
    return each[0].batch_size


def common_device(each: Sequence[EnvMetaData]) -> torch.device | None:
    """Return the device of the environments.

    Raises:
        InvalidArgumentError: if they differ.
    """
    devices = {metadata.device for metadata in each}
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"device: expected environments on one device, got {sorted(map(str, devices))}; pass device=, the device "
            "of the batch"
        )
    return each[0].device


def alike(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments' specs have equal keys, shapes and dtypes."""
    return all(m.fields(role) == each[0].fields(role) for m in each[1:] for role in ROLES)


def stackable(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments' data can be stacked densely: equal keys and dtypes, equal and fixed shapes."""
    fixed = all(-1 not in shape for role in ROLES for shape, _ in each[0].fields(role).values())
    return fixed and alike(each)


def same_keys(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments' data have the same keys, dtypes and numbers of dimensions."""
    kinds = [
        {
            role: {path: (len(shape), dtype) for path, (shape, dtype) in metadata.fields(role).items()}
            for role in ROLES
        }
        for metadata in each
    ]
    return all(kind == kinds[0] for kind in kinds)


def stacked_spec(role: str, each: Sequence[EnvMetaData], device: torch.device | None) -> TensorSpec:
    """Return the spec of the batch for one role: the members' specs, stacked along a new first dimension."""
    return stacked_on([metadata.specs[role] for metadata in each], device)


def stacked_on(specs: Sequence[TensorSpec], device: torch.device | None) -> TensorSpec:
    """Return the members' specs stacked along a new first dimension, on `device` unless it is None."""
    if device is None:
        return _stacked(specs)
    # Stacking compares the specs' bounds and masks, which may be on different devices.
    here = [spec.to(torch.device("cpu")) for spec in specs]
    return _stacked(here).to(device)


def _stacked(specs: Sequence[TensorSpec]) -> TensorSpec:
    stacked: TensorSpec = stack_specs(specs, 0)
    return stacked
