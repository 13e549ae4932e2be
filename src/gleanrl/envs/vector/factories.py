"""Recipes for environments: what a user passes as `create_env_fn` and its keyword arguments.

What environments declare: read from one that is thrown away, or never built if it exists already.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import torch

from gleanrl._arrays.tensordicts import Path, as_path
from gleanrl._rollout.env_traits import Env, EnvTraits, extra, is_closed
from gleanrl._util import positive
from gleanrl.data.specs import TensorSpec, from_torchrl, has_choices, stack_specs
from gleanrl.envs.env_specs import ROLES
from gleanrl.errors import ClosedError, InvalidArgumentError, InvalidTypeError, LengthError, UnsupportedError


@dataclass(frozen=True)
class Factory:
    """How one environment is made. It can be pickled whatever it holds (by cloudpickle).

    Attributes:
        source: a callable that makes an environment, or an environment that nobody has used yet.
        kwargs: keyword arguments for the callable; for an environment, those of its `update_kwargs`.
        truncated: whether the environment gets a truncated flag where it has none; see `know_truncated`.
        model: what copies are made of, instead of a call, where the callable returns the same environment every time;
            None where it makes one.
    """

    source: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    model: Any = None

    @property
    def is_instance(self) -> bool:
        """Whether the environment exists already."""
        return is_environment(self.source)

    def __call__(self) -> Any:
        """Return the environment.

        Raises:
            InvalidTypeError: if the callable made something else.
            ClosedError, InvalidArgumentError: if the environment was closed or used before.
        """
        env = self._made()
        if self.truncated:
            know_truncated(env)
        return env

    def _made(self) -> Any:
        if self.model is not None:
            return copy.deepcopy(self.model)
        if not self.is_instance:
            made = self.source(**self.kwargs)
            if not is_environment(made):
                raise InvalidTypeError(
                    f"create_env_fn: expected a callable that makes an environment, {self.source!r} made "
                    f"{type(made).__name__}; wrap a gymnasium environment in GymWrapper"
                )
            return made
        require_unused(self.source)
        if self.kwargs:
            self.source.update_kwargs(self.kwargs)
        return self.source

    def probed(self) -> tuple[Factory, Any]:
        """Return an environment to look at, and the factory that makes the others, of which none is somebody else's.

        If a callable returns an environment that somebody else holds (``lambda: env``), and again the same one, then
        copies are made of it, as it is now.

        Raises:
            ClosedError, InvalidArgumentError: if such an environment was closed or used before.
        """
        made, alone = self(), object()
        # Whoever could return it again holds it. Nearly no callable does, so that nearly none is called twice.
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
        except Exception:  # there can be only one at a time
            return False
        if again is made:
            return True
        if not is_closed(again):
            again.close()
        return False

    def own_copy(self) -> Factory:
        """Return a factory for an equal environment that shares nothing with this one's."""
        return replace(self, source=copy.deepcopy(self.source)) if self.is_instance else self

    def alike(self, other: Factory) -> bool:
        """Return whether `other` surely makes environments with the same specs."""
        if self.source is not other.source or self.kwargs.keys() != other.kwargs.keys():
            return False
        return all(value is other.kwargs[name] for name, value in self.kwargs.items())

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        """Pickle by value, functions of the user's main module and lambdas included."""
        return _unpickled, (cloudpickle.dumps((self.source, dict(self.kwargs), self.truncated, self.model)),)


def _unpickled(data: bytes) -> Factory:
    return Factory(*cloudpickle.loads(data))


def know_truncated(env: Any) -> None:
    """Add a truncated flag to every group of flags of an environment that has none; of a batch, to the members'.

    Raises:
        UnsupportedError: if the members of a batch exist already, or are another library's.
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
    """Return whether `candidate` keeps EnvBase's public protocol."""
    names = ("step", "reset", "batch_size", "full_action_spec")
    return not isinstance(candidate, type) and all(_has(candidate, name) for name in names)


def _has(candidate: Any, name: str) -> bool:
    """Return whether an object has an attribute, also if its class has a property that would raise."""
    return inspect.getattr_static(candidate, name, None) is not None or hasattr(candidate, name)


def require_environment(candidate: Any) -> None:
    """Raise InvalidTypeError unless `candidate` is an environment."""
    if not is_environment(candidate):
        raise InvalidTypeError(
            f"env: expected an environment, got {type(candidate).__name__}; call what makes one, wrap gymnasium's in "
            "GymWrapper"
        )


def require_unused(env: Any) -> None:
    """Raise if `env` was closed or used: copies would all go on from the same state.

    Raises:
        ClosedError: if it was closed.
        InvalidArgumentError: if it was stepped, reset or started.
    """
    usage = extra(env, "usage")
    if usage is None:  # a foreign environment: it doesn't say
        return
    if env.was_closed:
        raise ClosedError(
            f"create_env_fn: the {type(env).__name__} was closed; pass a callable that makes it"
        )
    if usage.started or extra(env, "is_started", False):
        raise InvalidArgumentError(
            f"create_env_fn: the {type(env).__name__} was started already; "
            "pass a callable that makes it, or one that nobody has used"
        )


def factories(num_envs: Any, create_env_fn: Any, create_env_kwargs: Any) -> tuple[Factory, ...]:
    """Return one factory for each environment.

    Args:
        num_envs: how many.
        create_env_fn: a callable or an unused environment for all, or a sequence with one for each.
        create_env_kwargs: keyword arguments for all, or a sequence of them with one for each.

    Raises:
        InvalidArgumentError: if `num_envs` isn't a positive integer.
        LengthError: if a sequence has another length.
        InvalidTypeError: if something is neither callable nor an environment.
        UnsupportedError: for keyword arguments to an environment that doesn't take them.
    """
    num_envs = positive("num_workers", num_envs)
    sources = _spread("create_env_fn", create_env_fn, num_envs)
    kwargs = _spread("create_env_kwargs", create_env_kwargs, num_envs)
    return tuple(_factory(source, given) for source, given in zip(sources, kwargs, strict=True))


def _spread(name: str, given: Any, num_envs: int) -> Sequence[Any]:
    """Return one entry for each environment."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        return [given] * num_envs
    if len(given) != num_envs:
        raise LengthError(f"{name}: expected {num_envs} entries, one for each environment, got {len(given)}")
    return given


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


def with_own_copies(given: Sequence[Factory]) -> tuple[Factory, ...]:
    """Return `given` with a copy of every environment that stands in it for a second time."""
    seen: set[int] = set()
    out = []
    for factory in given:
        repeated = factory.is_instance and id(factory.source) in seen
        seen.add(id(factory.source))
        out.append(factory.own_copy() if repeated else factory)
    return tuple(out)


def existing(given: Sequence[Factory]) -> list[Any]:
    """Return the environments that exist already, each once."""
    return list({id(factory.source): factory.source for factory in given if factory.is_instance}.values())


@dataclass(frozen=True)
class EnvMetaData:
    """What one environment declares.

    Attributes:
        specs: the composite spec of each role: observation, action, reward, done, state.
        batch_size: its batch dimensions.
        device: its device; None for none.
        traits: what it does otherwise than others.
        name: its class.
    """

    specs: Mapping[str, Any]
    batch_size: torch.Size
    device: torch.device | None
    traits: EnvTraits
    name: str

    @classmethod
    def of(cls, env: Env) -> EnvMetaData:
        """Read them off an environment."""
        specs = {role: from_torchrl(getattr(env, f"full_{role}_spec")).clone() for role in ROLES}
        return cls(specs, torch.Size(env.batch_size), env.device, EnvTraits.of(env), type(env).__name__)

    @property
    def may_mask(self) -> bool:
        """Whether the action has choices, which a mask can restrict."""
        return has_choices(self.specs["action"])

    def fields(self, role: str) -> dict[Path, tuple[torch.Size, Any]]:
        """Return shape and dtype of each leaf of `role`."""
        spec = self.specs[role]
        leaves = {as_path(key): spec[key] for key in spec.keys(True, True)}
        return {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items() if leaf is not None}


def read_metadata(given: Sequence[Factory]) -> tuple[tuple[Factory, ...], tuple[EnvMetaData, ...]]:
    """Return the factory to go on with (see `Factory.probed`) and the metadata of its environment, for each factory.

    Factories that are surely alike share one throw-away environment; an environment that exists is read as it
    is; a factory that knows its metadata (`EnvCreator`) builds nothing.
    """
    found: list[tuple[Factory, EnvMetaData]] = []
    out = []
    for factory in given:
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
    """Return the batch size of every environment.

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
    """Return the device of every environment.

    Raises:
        InvalidArgumentError: if they differ.
    """
    devices = {metadata.device for metadata in each}
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"device: the environments live on {sorted(map(str, devices))}; say where the batch is to live"
        )
    return each[0].device


def alike(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments declare the same keys, shapes and dtypes."""
    return all(m.fields(role) == each[0].fields(role) for m in each[1:] for role in ROLES)


def stackable(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments' data can be stacked densely: all alike, and of fixed shapes."""
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
    """Return the spec of the batch: one with a new first dimension, or a stack of those that differ."""
    return stacked_on([metadata.specs[role] for metadata in each], device)


def stacked_on(specs: Sequence[TensorSpec], device: torch.device | None) -> TensorSpec:
    """Return the stack of the members' specs along a new first dimension, on a device if one is given."""
    if device is None:
        return _stacked(specs)
    here = [spec.to(torch.device("cpu")) for spec in specs]  # compared where that is possible
    return _stacked(here).to(device)


def _stacked(specs: Sequence[TensorSpec]) -> TensorSpec:
    stacked: TensorSpec = stack_specs(specs, 0)
    return stacked
