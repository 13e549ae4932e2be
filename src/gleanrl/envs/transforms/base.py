"""`Transform`: the base class of all transforms.

`KeyList` holds the keys that a transform reads and writes.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path, did_you_mean
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl._state.state import Stateful
from gleanrl._util import is_ours, overridden
from gleanrl.data.specs import Composite, TensorSpec
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.envs.module_state import StatefulModule
from gleanrl.envs.transforms.row_view import Record
from gleanrl.envs.transforms.spec_tools import map_leaves, rename_leaves
from gleanrl.errors import (
    ContainerError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    UnsupportedError,
)

Keys = NestedKey | Sequence[NestedKey]


class KeyList:
    """Descriptor for a list of keys: the list that was set, or the transform's default while that is None.

    Setting it calls the transform's `empty_cache`.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, transform: Any, owner: type | None = None) -> list[NestedKey]:
        if transform is None:
            return self  # type: ignore[return-value]
        keys: list[NestedKey] | None = getattr(transform, f"_{self._name}")
        return getattr(transform, f"_default_{self._name}")() if keys is None else keys

    def __set__(self, transform: Any, keys: Keys | None) -> None:
        setattr(transform, f"_{self._name}", as_keys(self._name, keys))
        transform.empty_cache()


def as_keys(name: str, keys: Keys | None) -> list[NestedKey] | None:
    """Return `keys` as a list of keys in their shortest spelling. A string, or a tuple of strings, is one key.

    None stays None.

    Raises:
        InvalidTypeError: if `keys` is neither a key nor a sequence.
    """
    if keys is None:
        return None
    if isinstance(keys, str) or (isinstance(keys, tuple) and keys and all(isinstance(k, str) for k in keys)):
        keys = [keys]
    if not isinstance(keys, Sequence):
        raise InvalidTypeError(f"{name}: expected a list of keys, got {keys!r}")
    return [as_key(as_path(key)) for key in keys]


def paired(
    transform: Any, name: str, ins: list[NestedKey], out_name: str, outs: list[NestedKey]
) -> list[tuple[NestedKey, NestedKey]]:
    """Return the keys pair by pair.

    Raises:
        InvalidArgumentError: if the lists have different lengths.
    """
    if len(ins) != len(outs):
        raise InvalidArgumentError(
            f"{type(transform).__name__}: expected as many {out_name} as {name}, got {outs} for {ins}"
        )
    return list(zip(ins, outs, strict=True))


def missing_key(transform: Any, key: NestedKey, record: Record) -> MissingKeyError:
    """Return the error for a `record` without `key`, which a transform needs."""
    names = sorted(map(str, record.keys()))
    hint = did_you_mean(key, names)
    return MissingKeyError(
        f"{type(transform).__name__}: key {key!r} not found among {names}; correct the transform's keys{hint}"
    )


_HOOKS = ("_call", "_step", "_reset", "_inv_call", "inv", "_reset_env_preprocess")


def _takes_values(forward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a `forward` that takes either a batch or the values of its `in_keys`.

    Tensors by position belong to `in_keys` in order, and surplus ones are ignored. Keywords name further keys. The
    result is then the value at `out_keys`, or a tuple unless there is exactly one. After a batch, further arguments are
    ignored.
    """

    @functools.wraps(forward)
    def wrapped(self: Any, tensordict: Any = None, /, *values: Any, **entries: Any) -> Any:
        if tensordict is not None and not isinstance(tensordict, torch.Tensor):
            return forward(self, tensordict)
        batch, tensors = TensorDict({}, []), () if tensordict is None else (tensordict, *values)
        for key, value in (*zip(self.in_keys, tensors, strict=False), *entries.items()):
            batch.set(key, value)
        made = forward(self, batch)
        results = tuple(made.get(key) for key in self.out_keys)
        return results[0] if len(results) == 1 else results

    return wrapped


class Transform(StatefulModule):
    """Base class: changes the outputs and inputs of an environment, or the batches of a replay buffer.

    The outputs of an environment are observations, rewards and flags. Its inputs are actions and states. `in_keys` and
    `in_keys_inv` are the environment's keys, `out_keys` and `out_keys_inv` the user's.

    In an environment a step calls `_inv_call` with a shallow copy of the user's root. It then steps the environment,
    and calls `_step` with the outcome, whose keys have no ``"next"``. A reset calls `_reset` with the first
    observations.

    In a replay buffer `forward` transforms each batch that is sampled, and `inv` each batch that is written. Keys are
    used unchanged there: name ``("next", "observation")`` too if the transform should change it.

    A subclass overrides only the hooks that it needs. Each hook on a whole record returns the record. A hook on a `Row`
    must change the row itself, because rollouts ignore the result.

    - ``_apply_transform(value)`` maps one entry. It is called for each of `in_keys`; the result is written under the
      matching one of `out_keys`. An absent key raises `MissingKeyError`, except at a reset, or if absent keys are
      tolerated (`set_missing_tolerance`).
    - ``_inv_apply_transform(value)`` maps one input, from `out_keys_inv` to `in_keys_inv`.
    - ``_call(tensordict)`` transforms all outputs of a step. A reset doesn't call an override, unless `_reset` does or
      the class sets `call_on_reset`.
    - ``_inv_call(tensordict)`` transforms the inputs. A subclass may override `inv` instead.
    - ``_step(tensordict, next_tensordict)`` transforms an outcome; its first argument is the root.
    - ``_reset(tensordict, tensordict_reset)`` transforms the result of a reset; its first argument is the request. The
      ``"_reset"`` mask in the request marks the environments that are reset; without a mask all are. Results for other
      environments are ignored.
    - ``_reset_env_preprocess(tensordict)`` changes the request of a reset, None or a TensorDict, before the
      environment gets it.
    - ``transform_*_spec(spec)`` returns the transformed spec. An output that `_call` adds without a spec becomes an
      observation that is zero after a reset, with a warning.
    - ``close()`` is called when the environment is closed.

    In rollouts the hooks get a `Row`: the tensors of one row of a block. This isn't so if a transform of the chain
    overrides `_call`, `_step`, `_reset` or a hook for inputs. The whole chain then gets TensorDicts, which is slower. A
    class may declare ``on_rows = True`` if its hooks use only `get`, `set` and `pop`. They then get a `Row` too.

    A transform belongs to at most one container, a `Compose` or a `TransformedEnv`. Its parent environment is the base
    environment with the transforms before this one; it is cached until `empty_cache` is called. Not thread-safe.

    Args:
        in_keys: keys to read; None for the transform's default.
        out_keys: keys of the results; None for the same keys as `in_keys`.
        in_keys_inv: input keys that the environment reads.
        out_keys_inv: input keys that the user writes; None for the same keys as `in_keys_inv`.
    """

    # Whether the hooks that a class defines accept a `Row`. `takes_rows` looks at the class that defines each hook, so
    # a subclass with hooks must declare it again. The same is true of `by_keys`.
    on_rows: ClassVar[bool] = True
    # Whether rows may be on the CPU although the environment declares another device.
    on_host: ClassVar[bool] = False
    # Whether the hooks that a class defines do nothing without `in_keys` (or `in_keys_inv`).
    by_keys: ClassVar[bool] = True
    invertible: ClassVar[bool] = False  # whether inputs need an `_inv_apply_transform`
    # Whether `inv` also transforms the requests of resets: a user's states then have the keys of `out_keys_inv`.
    enable_inv_on_reset: bool = False
    call_on_reset: ClassVar[bool] = False  # whether an overridden `_call` also runs at resets
    actions_vary: ClassVar[bool] = False  # whether a step may change the mask of the action spec
    loses_last: bool = False  # whether it replaces the last observations of episodes by NaN
    runs_functions: ClassVar[bool] = False  # whether it passes values of entries to a user's function
    generator: OwnedTorchGenerator | None = None  # source of its random numbers
    shows: ClassVar[tuple[str, ...]] = ()  # names of the attributes that its repr shows

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ) -> None:
        super().__init__()
        self._holder: weakref.ref[Any] | None = None  # weak: it doesn't keep the container alive
        self._parent_found: list[Any] | None = None
        self.missing_tolerance = False
        self._pairs_found: list[tuple[NestedKey, NestedKey]] | None = None
        self._pairs_inv_found: list[tuple[NestedKey, NestedKey]] | None = None
        self.in_keys = in_keys
        self.out_keys = out_keys
        self.in_keys_inv = in_keys_inv
        self.out_keys_inv = out_keys_inv

    # ------------------------------------------------------------------ keys
    in_keys = KeyList("The output keys that the transform reads.")
    out_keys = KeyList("The keys of the results.")
    in_keys_inv = KeyList("The input keys that the environment reads.")
    out_keys_inv = KeyList("The input keys that the user writes.")

    def _default_in_keys(self) -> list[NestedKey]:
        return []

    def _default_out_keys(self) -> list[NestedKey]:
        return list(self.in_keys)

    def _default_in_keys_inv(self) -> list[NestedKey]:
        return []

    def _default_out_keys_inv(self) -> list[NestedKey]:
        return list(self.in_keys_inv)

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return `in_keys` with `out_keys`, pair by pair; raise `InvalidArgumentError` if their lengths differ."""
        if self._pairs_found is None:
            self._pairs_found = self._find_pairs()
        return self._pairs_found

    def _find_pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        return paired(self, "in_keys", self.in_keys, "out_keys", self.out_keys)

    def pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return `in_keys_inv` with `out_keys_inv`, pair by pair; raise as `pairs` does."""
        if self._pairs_inv_found is None:
            self._pairs_inv_found = self._find_pairs_inv()
        return self._pairs_inv_found

    def _find_pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        return paired(self, "in_keys_inv", self.in_keys_inv, "out_keys_inv", self.out_keys_inv)

    def written_keys(self) -> list[NestedKey]:
        """Return the output keys that the transform may write in a rollout."""
        return [out_key for _, out_key in self.pairs()]

    def writes_anything(self) -> bool:
        """Return whether a user's hook may write keys that `written_keys` doesn't name."""
        owners = (next(c for c in type(self).__mro__ if hook in vars(c)) for hook in ("_call", "_step"))
        return not all(is_ours(owner) for owner in owners)

    def primed_keys(self) -> list[NestedKey]:
        """Return the keys that a policy may write below ``"next"`` and that the transform copies into the outcome."""
        return []

    def set_missing_tolerance(self, mode: bool) -> None:
        """Set whether absent `in_keys` and `out_keys_inv` are skipped; otherwise they raise `MissingKeyError`."""
        self.missing_tolerance = mode

    # ----------------------------------------------------------------- hooks
    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _apply_transform")

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        if self.invertible:
            raise UnsupportedError(f"{type(self).__name__} doesn't define _inv_apply_transform")
        return value

    def _call(self, tensordict: Record) -> Record:
        for in_key, out_key in self._pairs_found or self.pairs():
            value = tensordict.get(in_key, None)
            if value is not None:
                tensordict.set(out_key, self._apply_transform(value))
            elif not self.missing_tolerance:
                raise missing_key(self, in_key, tensordict)
        return tensordict

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        return self._call(next_tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        """Transform the result of a reset with `_call`, if the result has one of `in_keys`; otherwise change nothing.

        An overridden `_call` also needs `call_on_reset`, and then needs no `in_keys`. Absent keys are skipped, because
        a reset returns no rewards.
        """
        if not self.call_on_reset and overridden(self, "_call", of=Transform):
            return tensordict_reset
        pairs = self._pairs_found or self.pairs()
        if not pairs and not self._goes_by_keys("_call"):
            return self._tolerantly(self._call, tensordict_reset)
        for key, _ in pairs:
            if tensordict_reset.get(key, None) is not None:
                return self._tolerantly(self._call, tensordict_reset)
        return tensordict_reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Return the request of a reset for the environment: `tensordict`, or with `enable_inv_on_reset` its `inv`."""
        if tensordict is None or not self.enable_inv_on_reset:
            return tensordict
        return self._tolerantly(self.inv, tensordict)

    def _tolerantly(self, hook: Callable[[Any], Any], record: Record) -> Record:
        before, self.missing_tolerance = self.missing_tolerance, True
        try:
            return hook(record)
        finally:
            self.missing_tolerance = before

    def _inv_call(self, tensordict: Record) -> Record:
        for in_key, out_key in self.pairs_inv():
            value = tensordict.get(out_key, None)
            if value is not None:
                tensordict.set(in_key, self._inv_apply_transform(value))
            elif not self.missing_tolerance:
                raise missing_key(self, out_key, tensordict)
        return tensordict

    # ------------------------------------------------------------ the caller's
    @_takes_values
    def forward(self, tensordict: Any) -> Any:
        """Return a batch that is sampled from a buffer, transformed; most transforms change the batch in place.

        Called with the values of `in_keys`, in order or by name, it returns the values of `out_keys`. An absent key
        raises `MissingKeyError`, unless it is tolerated.
        """
        return self._call(tensordict)

    def inv(self, tensordict: TensorDictBase) -> Any:
        """Return the batch to store instead of `tensordict`, which stays unchanged; None to store nothing yet."""
        return self._inv_call(tensordict.clone(recurse=False))

    def inverting(self) -> Callable[[Record], Any]:
        """Return the hook for inputs: `_inv_call`, or `inv` if a subclass overrides it. It may change its argument."""
        return self.inv if overridden(self, "inv", of=Transform) else self._inv_call

    def takes_rows(self) -> bool:
        """Return whether all hooks accept a `Row`: each class that defines a hook must declare ``on_rows = True``.

        False also if a hook was assigned to the object, and with `enable_inv_on_reset`.
        """
        if not self.__dict__.keys().isdisjoint(_HOOKS):
            return False  # a hook was assigned to this object, and may need a TensorDict
        owners = [next(c for c in type(self).__mro__ if hook in vars(c)) for hook in _HOOKS]
        return all(vars(owner).get("on_rows", False) for owner in owners) and not self.enable_inv_on_reset

    @property
    def shows_values(self) -> bool:
        """Whether a user's code gets values of entries, and may keep references to them."""
        return self.runs_functions or not is_ours(type(self))

    def stepping(self) -> tuple[Callable[..., Any], bool]:
        """Return the hook for a step's outcome, and whether its first argument is the root.

        The hook is `_step` if a subclass overrides it, else `_call`, which takes the outcome alone.
        """
        own = bool(overridden(self, "_step", of=Transform))
        return (self._step if own else self._call), own

    def idles(self) -> bool:
        """Return whether a step's outcome passes unchanged: there are no keys, and the hooks use nothing else."""
        return not self.pairs() and self._goes_by_keys("_step", "_call")

    def inverts(self) -> bool:
        """Return whether the transform may change inputs."""
        return bool(self.pairs_inv()) or not self._goes_by_keys("_inv_call", "inv")

    def _goes_by_keys(self, *hooks: str) -> bool:
        owners = (next(c for c in type(self).__mro__ if hook in vars(c)) for hook in hooks)
        return all(vars(owner).get("by_keys", False) for owner in owners)

    def keeps_first(self, rows: torch.Tensor | None) -> bool:
        """Return whether it has kept the first observations of environments that have just reset themselves.

        The default returns False.

        Args:
            rows: ``(*batch,)`` bool, the environments in question; None for all.
        """
        return False

    # ----------------------------------------------------------------- specs
    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the observation spec on the user's side.

        By default each new key of `out_keys` gets a copy of the spec at the matching one of `in_keys`.
        """
        return self._spec("observation", observation_spec)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Return the full reward spec on the user's side; by default `reward_spec` itself."""
        return self._spec("reward", reward_spec)

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Return the full done spec on the user's side; by default `done_spec` itself."""
        return self._spec("done", done_spec)

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Return the full action spec on the user's side; by default `out_keys_inv` replace `in_keys_inv`."""
        return self._spec("action", action_spec)

    def transform_state_spec(self, state_spec: Any) -> Any:
        """Return the full state spec on the user's side; by default `out_keys_inv` replace `in_keys_inv`."""
        return self._spec("state", state_spec)

    def _spec(self, role: str, spec: Any) -> Any:
        """Return the transformed spec of a role (``"observation"``, ``"action"``, …). A leaf is returned unchanged.

        The ``transform_*_spec`` methods call it, unless a subclass overrides them.
        """
        if not isinstance(spec, SpecMapping):
            return spec
        if role in ("action", "state"):
            renamed = [(i, o) for i, o in self.pairs_inv() if i != o]
            return rename_leaves(spec, renamed, lambda leaf: leaf.clone()) if renamed else spec
        added = (
            [(i, o) for i, o in self.pairs() if o not in spec.keys(True, True)]
            if role == "observation"
            else []
        )
        return map_leaves(spec, added, lambda leaf: leaf.clone()) if added else spec

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Return the spec of all outputs on the user's side: ``full_{observation,reward,done}_spec``."""
        return self._transformed(output_spec, "observation", "reward", "done")

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the spec of all inputs on the user's side: ``full_{action,state}_spec``."""
        return self._transformed(input_spec, "action", "state")

    def _transformed(self, specs: Composite, *roles: str) -> Composite:
        out = specs.clone()
        for role in roles:
            name, transform = f"full_{role}_spec", getattr(self, f"transform_{role}_spec")
            out[name] = _composite(role, transform(out[name]), out)
        return out

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        """Return the device on the user's side; by default `device` itself."""
        return device

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        """Return the batch size on the user's side; by default `batch_size` itself."""
        return batch_size

    # ------------------------------------------------------------------ rest
    def init(self, tensordict: TensorDictBase) -> None:
        """Do nothing. Subclasses may use it; this library never calls it."""

    def close(self) -> None:
        """Do nothing; called when the environment is closed."""

    def dump(self, **kwargs: Any) -> None:
        """Do nothing. Trainers call it after an evaluation, so that transforms write out their recordings."""

    def seeded(self) -> None:
        """Do nothing; called when the environment is seeded, after the transform's `generator`."""

    def parts(self) -> Mapping[str, Stateful[Any]]:
        """Return the parts of the state by name: the generator, if there is one."""
        return {} if self.generator is None else {"generator": self.generator}

    def extra_repr(self) -> str:
        """Return the attributes that `shows` names, as text for the repr."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shows)

    def tried(self, outcome: TensorDictBase) -> TensorDictBase:
        """Return a step's outcome, transformed by the `_call` of a clone with the same parent.

        The clone keeps the trial from changing this transform's state. `outcome` itself may be changed.
        """
        return self.twin()._call(outcome)

    def empty_cache(self) -> None:
        """Forget the parent environment, and keys and specs derived from it; called when they change."""
        self._parent_found = None
        self._pairs_found = self._pairs_inv_found = None

    @property
    def holder(self) -> Any:
        """The `Compose` or `TransformedEnv` that holds the transform directly; None if none does, or it was freed."""
        return None if self._holder is None else self._holder()

    @property
    def container(self) -> Any:
        """The outermost container if it is a `TransformedEnv`; None outside an environment."""
        return None if self.holder is None else self.holder.container

    def set_container(self, container: Any) -> None:
        """Record `container`, a `Compose` or a `TransformedEnv`, as the transform's container, and call `empty_cache`.

        In an environment, a transform that doesn't learn there switches to evaluation mode.

        Raises:
            ContainerError: if another container holds it (also an AttributeError). A `Compose.clone()` outside an
                environment gives its transforms away.
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
        """Switch to evaluation mode if the transform is in an environment and doesn't learn there."""
        if self.container is not None and not self.learns:
            self.eval()

    def reset_parent(self) -> None:
        """Forget the container, and call `empty_cache`. The container's chain and the mode don't change."""
        self._holder = None
        self.empty_cache()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with the holder itself in place of the weak reference.

        So the transforms in a copied or unpickled container refer to that container.
        """
        return {**self.__dict__, "_holder": self.holder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy; its reference to the holder is weak again."""
        super().__setstate__(state)
        holder = self.__dict__["_holder"]
        self._holder = None if holder is None else weakref.ref(holder)

    @property
    def parent(self) -> Any:
        """The base environment with the transforms before this one; None outside an environment.

        It is a `TransformedEnv` that shares the base environment: a step of it steps that one.
        """
        if self._parent_found is None and self.holder is not None:
            self._parent_found = [self.holder.environment_before(self)]
        return self._parent_found[0] if self._parent_found else None

    @property
    def collector(self) -> Any:
        """The collector that uses the environment; None if there is none."""
        return None if self.container is None else self.container.collector

    def home(self) -> torch.device | str | None:
        """Return the device of carried values: the parent environment's, or "cpu" if it has none.

        None outside an environment.
        """
        return None if self.parent is None else self.parent.device or "cpu"

    def clone(self) -> Any:
        """Return a deep copy that is in no container. The caches of this transform are emptied."""
        holder, self._holder = self._holder, None
        self.empty_cache()
        try:
            return copy.deepcopy(self)
        finally:
            self._holder = holder

    def twin(self) -> Any:
        """Return a clone with the same parent environment, in no container."""
        parent, twin = self.parent, self.clone()
        twin._parent_found = [parent]
        return twin


def _composite(role: str, spec: TensorSpec, parent: Composite) -> TensorSpec:
    """Return `spec` as a composite: a leaf is put under the key of its role."""
    if hasattr(spec, "keys"):
        return spec
    return Composite({role: spec}, shape=parent.shape, device=parent.device)
