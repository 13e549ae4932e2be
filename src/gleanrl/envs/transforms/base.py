"""`Transform`: what stands between an environment, or a replay buffer, and its user.

`Contained`: a transform's place in a chain, and the environment that it sees from there.

The lists of keys that transforms read and write.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
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


Keys = NestedKey | Sequence[NestedKey]


class KeyList:
    """A list of a transform's keys: what it was set to, or, as long as that is None, the transform's default."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, transform: Any, owner: type | None = None) -> list[NestedKey]:
        if transform is None:
            return self  # type: ignore[return-value]
        given: list[NestedKey] | None = getattr(transform, f"_{self._name}")
        return getattr(transform, f"_default_{self._name}")() if given is None else given

    def __set__(self, transform: Any, keys: Keys | None) -> None:
        setattr(transform, f"_{self._name}", as_keys(self._name, keys))
        transform.empty_cache()


def as_keys(name: str, keys: Keys | None) -> list[NestedKey] | None:
    """Return `keys` as a list of keys in their shortest spelling; a string or a tuple of strings is one key."""
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
    """Return keys pair by pair; there must be as many of both."""
    if len(ins) != len(outs):
        raise InvalidArgumentError(
            f"{type(transform).__name__}: expected as many {out_name} as {name}, got {outs} for {ins}"
        )
    return list(zip(ins, outs, strict=True))


def missing_key(transform: Any, key: NestedKey, record: Record) -> MissingKeyError:
    """Return the error of a transform that doesn't find `key` in what it was given."""
    return MissingKeyError(
        f"{type(transform).__name__}: key {key!r} not found; there are {sorted(map(str, record.keys()))}"
    )


_HOOKS = ("_call", "_step", "_reset", "_inv_call", "inv", "_reset_env_preprocess")


def _takes_values(forward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Let a `forward` take values instead of a batch of them."""

    @functools.wraps(forward)
    def wrapped(self: Any, tensordict: Any = None, /, *values: Any, **entries: Any) -> Any:
        if tensordict is not None and not isinstance(tensordict, torch.Tensor):
            return forward(self, tensordict)
        batch, given = TensorDict({}, []), () if tensordict is None else (tensordict, *values)
        for key, value in (*zip(self.in_keys, given, strict=False), *entries.items()):
            batch.set(key, value)
        made = forward(self, batch)
        results = tuple(made.get(key) for key in self.out_keys)
        return results[0] if len(results) == 1 else results

    return wrapped


class Transform(Contained):
    """Changes what comes out of an environment and what goes into it, or batches read from and written to a buffer.

    In an environment the keys on the environment's side are `in_keys` and `in_keys_inv`, those on the user's side
    `out_keys` and `out_keys_inv`. For each step the transform's `_inv_call` gets the user's root (a shallow copy),
    the environment is stepped, and `_step` gets what came out, not nested. `_reset` gets the first observations.
    In a buffer `forward` gets every batch that is read, `inv` every batch that is written; keys are taken as they
    are, so ``("next", "observation")`` must be named too if it is meant.

    A subclass overrides as little as it needs:

    - ``_apply_transform(value)``: one entry; called for each of `in_keys`, written under the matching `out_keys`;
    - ``_inv_apply_transform(value)``: the same for what goes in, from `out_keys_inv` to `in_keys_inv`;
    - ``_call(tensordict)``: all entries, after a step; not at a reset, unless `_reset` calls it;
    - ``_inv_call(tensordict)``: what goes in; or `inv`, which gets all of it;
    - ``_step(tensordict, next_tensordict)`` and ``_reset(tensordict, tensordict_reset)``: with the root, or with the
      request, whose ``"_reset"`` mask tells which environments are reset (rows of the others are dropped);
    - ``_reset_env_preprocess(tensordict)``: the request itself, None or a TensorDict, before the environment gets it;
    - the ``transform_*_spec`` methods: what becomes of the specs. A key that no spec declares becomes an observation
      that is zero after a reset, with a warning;
    - ``close()``: the environment was closed.

    Rollouts give transforms tensors of a block's row. Those that override `_call`, `_step`, `_reset` or what concerns
    inputs get a TensorDict instead, which costs more, unless their class declares ``on_rows = True``: then its hooks
    get a `Row` and use nothing but its `get`, `set` and `pop`.

    A transform belongs to one container (a `Compose` or a `TransformedEnv`). Not thread-safe.

    Args:
        in_keys: what is read; None for the transform's default.
        out_keys: where results are written; None for the same keys as `in_keys`.
        in_keys_inv: what the environment reads.
        out_keys_inv: what the user writes; None for the same keys as `in_keys_inv`.
    """

    on_rows: ClassVar[bool] = True  # whether the hooks of the class that says so take rows
    on_host: ClassVar[bool] = (
        False  # whether those rows may be on the CPU where the environment says another device
    )
    by_keys: ClassVar[bool] = (
        True  # whether those hooks do nothing where there are no `in_keys`, or `in_keys_inv`
    )
    invertible: ClassVar[bool] = False  # whether what goes in can't pass without an _inv_apply_transform
    enable_inv_on_reset: bool = False  # whether the requests of resets pass `inv`, too
    call_on_reset: ClassVar[bool] = False  # whether a `_call` of its own is for what resets return, too
    actions_vary: ClassVar[bool] = False  # whether a step changes what the action spec allows
    loses_last: bool = False  # whether it puts NaN in place of the last observations of episodes
    runs_functions: ClassVar[bool] = False  # whether functions of a user's get values of entries
    generator: OwnedTorchGenerator | None = None  # what random numbers are drawn from
    shows: ClassVar[tuple[str, ...]] = ()  # the attributes that its repr shows

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ) -> None:
        super().__init__()
        self.missing_tolerance = False
        self._pairs_found: list[tuple[NestedKey, NestedKey]] | None = None
        self._pairs_inv_found: list[tuple[NestedKey, NestedKey]] | None = None
        self.in_keys = in_keys
        self.out_keys = out_keys
        self.in_keys_inv = in_keys_inv
        self.out_keys_inv = out_keys_inv

    # ------------------------------------------------------------------ keys
    in_keys = KeyList("What is read of what comes out.")
    out_keys = KeyList("Where the results are written.")
    in_keys_inv = KeyList("What the environment reads of what goes in.")
    out_keys_inv = KeyList("What the user writes of what goes in.")

    def _default_in_keys(self) -> list[NestedKey]:
        return []

    def _default_out_keys(self) -> list[NestedKey]:
        return list(self.in_keys)

    def _default_in_keys_inv(self) -> list[NestedKey]:
        return []

    def _default_out_keys_inv(self) -> list[NestedKey]:
        return list(self.in_keys_inv)

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return `in_keys` with `out_keys`, pair by pair."""
        if self._pairs_found is None:
            self._pairs_found = self._find_pairs()
        return self._pairs_found

    def _find_pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        return paired(self, "in_keys", self.in_keys, "out_keys", self.out_keys)

    def pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return `in_keys_inv` with `out_keys_inv`, pair by pair."""
        if self._pairs_inv_found is None:
            self._pairs_inv_found = self._find_pairs_inv()
        return self._pairs_inv_found

    def _find_pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        return paired(self, "in_keys_inv", self.in_keys_inv, "out_keys_inv", self.out_keys_inv)

    def written_keys(self) -> list[NestedKey]:
        """Return the keys of what comes out that the transform may write in a rollout."""
        return [out_key for _, out_key in self.pairs()]

    def writes_anything(self) -> bool:
        """Return whether a hook that isn't this library's may write what `written_keys` doesn't name."""
        owners = (next(c for c in type(self).__mro__ if hook in vars(c)) for hook in ("_call", "_step"))
        return not all(is_ours(owner) for owner in owners)

    def primed_keys(self) -> list[NestedKey]:
        """Return the keys that a policy may write below ``"next"``, for the transform to take over."""
        return []

    def set_missing_tolerance(self, mode: bool) -> None:
        """Set whether absent `in_keys` are passed over; if not, they raise."""
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
        """Transform what a reset returned: a `_call` of a subclass's own isn't for it, unless it says `call_on_reset`.

        Rewards aren't there: absent keys are passed over.
        """
        if not self.call_on_reset and overridden(self, "_call", of=Transform):
            return tensordict_reset
        for key, _ in self._pairs_found or self.pairs():
            if tensordict_reset.get(key, None) is not None:
                return self._tolerantly(self._call, tensordict_reset)
        return tensordict_reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Return the request of a reset as the environment gets it."""
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
        """Transform a batch that is read from a buffer; changes and returns it.

        Given the values of `in_keys` instead, in order or by name, return those of `out_keys`.
        """
        return self._call(tensordict)

    def inv(self, tensordict: TensorDictBase) -> Any:
        """Return what is to be written of `tensordict`, which stays as it is; None holds it back."""
        return self._inv_call(tensordict.clone(recurse=False))

    def inverting(self) -> Callable[[Record], Any]:
        """Return the hook that gets what goes in, and may change it: `_inv_call`, or an `inv` of a subclass's own."""
        return self.inv if overridden(self, "inv", of=Transform) else self._inv_call

    def takes_rows(self) -> bool:
        """Return whether the hooks work on `Row` objects: each was written in a class that says so."""
        if not self.__dict__.keys().isdisjoint(_HOOKS):
            return False  # this very object has one of its own
        owners = [next(c for c in type(self).__mro__ if hook in vars(c)) for hook in _HOOKS]
        return all(vars(owner).get("on_rows", False) for owner in owners) and not self.enable_inv_on_reset

    @property
    def shows_values(self) -> bool:
        """Whether somebody else's code gets values of entries, and may keep them."""
        return self.runs_functions or not is_ours(type(self))

    def stepping(self) -> tuple[Callable[..., Any], bool]:
        """Return the hook that gets a step's outcome, and whether it gets the root before that: `_step` or `_call`."""
        own = bool(overridden(self, "_step", of=Transform))
        return (self._step if own else self._call), own

    def idles(self) -> bool:
        """Return whether a step's outcome passes unchanged: no keys, and no hook that would look for more."""
        return not self.pairs() and self._goes_by_keys("_step", "_call")

    def inverts(self) -> bool:
        """Return whether anything that goes in is changed."""
        return bool(self.pairs_inv()) or not self._goes_by_keys("_inv_call", "inv")

    def _goes_by_keys(self, *hooks: str) -> bool:
        owners = (next(c for c in type(self).__mro__ if hook in vars(c)) for hook in hooks)
        return all(vars(owner).get("by_keys", False) for owner in owners)

    def keeps_first(self, rows: torch.Tensor | None) -> bool:
        """Return whether it has the first observations of environments that have just reset themselves.

        Args:
            rows: ``(*batch,)`` bool, which environments; None for all.
        """
        return False

    # ----------------------------------------------------------------- specs
    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the observation spec on the user's side; by default new `out_keys` get a copy of their `in_keys`'."""
        return self._spec("observation", observation_spec)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Return the full reward spec on the user's side."""
        return self._spec("reward", reward_spec)

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Return the full done spec on the user's side."""
        return self._spec("done", done_spec)

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Return the full action spec on the user's side; by default keys of `out_keys_inv` replace `in_keys_inv`."""
        return self._spec("action", action_spec)

    def transform_state_spec(self, state_spec: Any) -> Any:
        """Return the full state spec on the user's side."""
        return self._spec("state", state_spec)

    def _spec(self, role: str, spec: Any) -> Any:
        """Return what becomes of the spec of a role that has no method of its own; a leaf stays."""
        if not isinstance(spec, SpecMapping):
            return spec
        if role in ("action", "state"):
            renamed = [(i, o) for i, o in self.pairs_inv() if i != o]
            return rename_leaves(spec, renamed, lambda leaf: leaf.clone()) if renamed else spec
        fresh = (
            [(i, o) for i, o in self.pairs() if o not in spec.keys(True, True)]
            if role == "observation"
            else []
        )
        return map_leaves(spec, fresh, lambda leaf: leaf.clone()) if fresh else spec

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Return the spec of all that comes out: ``full_{observation,reward,done}_spec``."""
        return self._transformed(output_spec, "observation", "reward", "done")

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the spec of all that goes in: ``full_{action,state}_spec``."""
        return self._transformed(input_spec, "action", "state")

    def _transformed(self, specs: Composite, *roles: str) -> Composite:
        out = specs.clone()
        for role in roles:
            name, transform = f"full_{role}_spec", getattr(self, f"transform_{role}_spec")
            out[name] = _composite(role, transform(out[name]), out)
        return out

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        """Return the device on the user's side."""
        return device

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        """Return the batch size on the user's side."""
        return batch_size

    # ------------------------------------------------------------------ rest
    def init(self, tensordict: TensorDictBase) -> None:
        """Do nothing; for subclasses' own use: nothing here calls it."""

    def close(self) -> None:
        """Do nothing; called when the environment is closed."""

    def dump(self, **kwargs: Any) -> None:
        """Do nothing; called by trainers after an evaluation, for transforms that write out what they recorded."""

    def seeded(self) -> None:
        """Do nothing; called when the environment is seeded."""

    def parts(self) -> Mapping[str, Stateful[Any]]:
        """Return the parts that have states of their own: the generator, if there is one."""
        return {} if self.generator is None else {"generator": self.generator}

    def extra_repr(self) -> str:
        """Return the attributes that `shows` names, for the repr."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shows)

    def tried(self, outcome: TensorDictBase) -> TensorDictBase:
        """Return what `_call` of a copy, which sees the same environment before it, makes of a step's outcome."""
        return self.twin()._call(outcome)

    def empty_cache(self) -> None:
        """Forget keys and specs that were found in the environment; called when the transforms before change."""
        super().empty_cache()
        self._pairs_found = self._pairs_inv_found = None


def _composite(role: str, spec: TensorSpec, parent: Composite) -> TensorSpec:
    """Return `spec`, a leaf under the key of its role."""
    if hasattr(spec, "keys"):
        return spec
    return Composite({role: spec}, shape=parent.shape, device=parent.device)
