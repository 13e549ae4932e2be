"""The specs of an environment by role, the metaclass of environments, and specs derived from data."""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase, is_tensorclass

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.tensordicts import (
    FLAGS,
    NestedKey,
    Path,
    as_key,
    as_path,
    empty_groups,
    flatten,
    iter_leaves,
)
from gleanrl._rollout.loop import with_gradients
from gleanrl.data.specs import Categorical, Composite, NonTensor, TensorSpec, Unbounded
from gleanrl.data.specs.mapping import Changes, SpecMapping
from gleanrl.errors import EnvironmentContractError, InvalidTypeError, MissingKeyError, UnsupportedError

# Builder of an environment that doesn't reset itself from one that does: called with (environment, `replace`).
# `envs.transforms` registers it here, because importing the builder would be a cycle: it derives from `EnvBase`.
RESETTING_ITSELF: list[Callable[[Any, bool], Any]] = []
# Builder of an environment with a fixed batch size from one that accepts any: called with (environment, batch size).
RESIZED: list[Callable[[Any, Sequence[int]], Any]] = []
# Builder of an environment with entries for the state of a recurrent policy: called with (environment, policy, policy
# device). Both are registered like the first builder.
KEEPING_STATE: list[Callable[[Any, Any, Any], Any]] = []


class EnvType(ABCMeta):
    """The metaclass of environments: every constructor accepts three more keywords than its class declares."""

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
            *args: arguments of the class's constructor.
            spec_locked: whether to lock the composite specs after construction. None for the value that the constructor
                passes to `EnvBase`.
            auto_reset: whether the environment resets itself in the step that ends a trajectory. If so, an
                `AutoResetEnv` around it is returned. None for the value that the constructor passes to `EnvBase`.
            auto_reset_replace: see `AutoResetTransform`.
            **kwargs: keyword arguments of the class's constructor.

        Returns:
            The environment. If the class's ``__new__`` returns something else than an `EnvBase`, the three keywords
            have no effect.
        """
        env = super().__call__(*args, **kwargs)
        if not isinstance(type(env), EnvType):
            return env
        own = isinstance(env, cls)  # the constructor of another class has applied the defaults already
        if own or spec_locked is not None:
            env.set_spec_lock_(env.wants_lock if spec_locked is None else spec_locked)
        if (own and env.resets_itself) if auto_reset is None else auto_reset:
            return RESETTING_ITSELF[0](env, auto_reset_replace)
        return env

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor; without this, `inspect` would show the signature of `__call__`."""
        init: Any = cls.__init__  # type: ignore[misc]
        signature = inspect.signature(init)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def make_composite_from_td(
    data: TensorDictBase, unsqueeze_null_shapes: bool = True, *, dynamic_shape: bool = False
) -> Composite:
    """Return a spec with an Unbounded leaf for every tensor of `data`, of its shape, dtype and device.

    A value that isn't a tensor becomes a `NonTensor` with the first value as example. A tensorclass becomes a composite
    of its class. Tensors whose sizes differ within a lazy stack become a leaf with dimensions of any size. Nested
    TensorDicts keep their batch size.

    Args:
        data: the TensorDict; its batch size becomes the spec's shape.
        unsqueeze_null_shapes: whether leaves of shape ``()`` are declared as ``(1,)``.
        dynamic_shape: whether the last dimension of every leaf may have any size.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> spec = make_composite_from_td(TensorDict({"x": torch.zeros(3), "y": torch.tensor(1)}, []))
        >>> spec["x"].shape, spec["y"].shape
        (torch.Size([3]), torch.Size([1]))
    """
    kind = type(data) if is_tensorclass(data) else None
    leaves = iter_leaves(data)
    entries: dict[str, TensorSpec] = {}
    for (name, *below), leaf in leaves:
        if name in entries:
            continue
        if below:
            group = data.get(name)
            entries[name] = make_composite_from_td(group, unsqueeze_null_shapes, dynamic_shape=dynamic_shape)
        else:
            entries[name] = _leaf_spec(leaf, unsqueeze_null_shapes, dynamic_shape)
    for path in empty_groups(data):
        if len(path) == 1:
            entries[path[0]] = Composite(shape=data.get(path[0]).batch_size)
    return Composite(entries, shape=data.batch_size, data_cls=kind)


def _leaf_spec(leaf: Leaf, unsqueeze_null_shapes: bool, dynamic_shape: bool) -> TensorSpec:
    """Return the spec of one leaf; see `make_composite_from_td`."""
    if isinstance(leaf, ObjectColumn):
        blank = leaf.blank
        if blank is not None:  # tensors of different shapes: declare any size
            return Unbounded((*leaf.shape, *[-1] * blank.ndim), device=blank.device, dtype=blank.dtype)
        values = leaf.array.reshape(-1)
        return NonTensor(leaf.shape, example_data=values[0] if len(values) else None, batched=bool(leaf.ndim))
    shape = (1,) if unsqueeze_null_shapes and not leaf.shape else tuple(leaf.shape)
    shape = (*shape[:-1], -1) if dynamic_shape else shape
    return Unbounded(shape, device=leaf.device, dtype=leaf.dtype)


def make_tensordict(env: Any, policy: Any = None) -> TensorDictBase:
    """Return a step's TensorDict filled with zeros: the environment's entries and the outputs of `policy`.

    The policy is called once on these zeros, without gradients.
    """
    fake: TensorDictBase = env.fake_tensordict()
    if policy is None:
        return fake
    written = with_gradients(False, policy, fake.exclude("next").clone())
    out: TensorDictBase = written.apply(torch.zeros_like).set("next", fake.get("next"))
    return out


def learn_specs(
    env: Any, policy: Any, root: TensorDictBase, keys: Mapping[str, NestedKey | list[NestedKey] | None]
) -> dict[str, Composite]:
    """Step `env` once with `policy` and return the specs of that step, by role; see `EnvBase.auto_specs_`.

    The step is written into `root`.
    """
    root_paths = [path for path in flatten(root) if path[0] != "next"]
    stepped = env.step(policy(root))
    after = stepped.get("next")
    outcome = set(flatten(after))
    named = {role: _paths(key) for role, key in keys.items() if key is not None}
    named.setdefault("done", [path for path in sorted(outcome) if path[-1] in FLAGS])
    expected = {path for role, paths in named.items() if role != "action" for path in paths}
    if outcome - expected or expected - outcome:
        raise MissingKeyError(
            f"auto_specs_: a step returned {sorted(map(as_key, outcome), key=str)}, but the arguments name "
            f"{sorted(map(as_key, expected), key=str)}; pass observation_key, reward_key and done_key to match"
        )
    named["state"] = [path for path in root_paths if path not in expected]
    sources = dict.fromkeys(named, after) | {"action": stepped, "state": stepped}
    return {
        role: make_composite_from_td(sources[role].select(*map(as_key, paths)), unsqueeze_null_shapes=False)
        for role, paths in named.items()
    }


def _paths(keys: NestedKey | list[NestedKey]) -> list[Path]:
    return [as_path(key) for key in (keys if isinstance(keys, list) else [keys])]


ROLES = ("observation", "action", "reward", "done", "state")

Form = tuple[Path, torch.Size, torch.dtype | None]


class EnvSpecs:
    """The five composite specs of an environment, by role.

    A leaf assigned for action, reward or done gets the role's name as its key. Each group of flags gets both ``done``
    and ``terminated``, even if the environment declares only one flag. The default is one reward and one group of
    flags.

    Specs can be declared before the batch size is known; `settle` then checks them against it.

    Attributes:
        batch_size: leading dimensions that every leaf must have.
        device: device of the specs; None leaves each spec on its own device.
        locked: whether writing into the composites is an error. Replacing a whole spec is always allowed.
    """

    def __init__(self, batch_size: Sequence[int] = (), device: torch.device | None = None) -> None:
        self.batch_size, self.device, self.locked = torch.Size(batch_size), device, False
        self._specs: dict[str, Composite] = {role: self._empty() for role in ROLES}
        self._declared: set[str] = set()
        self._known: dict[str, tuple[Composite, object, dict[NestedKey, Any]]] = {}
        self._groups: tuple[Any, tuple[Path, ...]] | None = None
        self._forms: dict[str, tuple[Any, list[Form]]] = {}
        self._set_defaults()

    def _set_defaults(self) -> None:
        shape = (*self.batch_size, 1)
        flag = Categorical(2, shape=shape, dtype=torch.bool, device=self.device)
        for role, spec in (("reward", Unbounded(shape, device=self.device)), ("done", flag)):
            if role not in self._declared:
                self._specs[role] = self._checked(role, spec)

    def _empty(self) -> Composite:
        return Composite({}, shape=self.batch_size, device=self.device)

    def settle(self, batch_size: torch.Size, device: torch.device | None) -> None:
        """Set the batch size and the device; check the declared specs against the size and move them to the device.

        Raises:
            EnvironmentContractError: if a leaf lacks the environment's batch dimensions; then nothing changes.
        """
        new = copy.copy(self)
        new.batch_size, new.device, new._specs = batch_size, device, {**self._specs}
        new._set_defaults()
        for role, spec in new._specs.items():
            sized = Composite({}, shape=batch_size, device=device) if spec.is_empty() else spec
            new._specs[role] = new._checked(role, sized)
        self.batch_size, self.device, self._specs = batch_size, device, new._specs

    def set(self, role: str, spec: TensorSpec | None) -> None:
        """Replace the spec of `role`; None removes its entries. A part of another spec is copied.

        Raises:
            EnvironmentContractError: if a leaf lacks the environment's batch dimensions. For done, also if a group of
                keys has no done, terminated or truncated.
            InvalidTypeError: if `spec` isn't a spec, or is a leaf for a role that needs a Composite (observation,
                state).
        """
        self._specs[role] = self._checked(role, self._empty() if spec is None else spec)
        self._declared.add(role)
        Changes.note()

    def set_unbatched(self, role: str, spec: TensorSpec | None) -> None:
        """Replace the spec of `role` by `spec` with the environment's batch dimensions added."""
        self.set(role, None if spec is None else spec.expand(*self.batch_size, *spec.shape))

    def without_batch(self, spec: TensorSpec) -> TensorSpec:
        """Return `spec` without the environment's batch dimensions."""
        one: TensorSpec = spec[(0,) * len(self.batch_size)] if self.batch_size else spec
        return one

    def set_groups(self, specs: Composite) -> None:
        """Replace the specs that `specs` holds under ``"full_action_spec"`` and similar keys; keep the other specs."""
        for role in ROLES:
            if (name := f"full_{role}_spec") in specs:
                self.set(role, specs[name])

    def _checked(self, role: str, spec: TensorSpec) -> Composite:
        """Return `spec` as a composite for `role`, with the batch size, device, flags and lock of this object."""
        if not isinstance(spec, TensorSpec):
            raise InvalidTypeError(f"{role}_spec: expected a spec, got {type(spec).__name__}")
        # A part of another spec refuses changes, so it is copied.
        if spec.is_part:
            spec = spec.clone()
        leaves: dict[NestedKey, TensorSpec | None] = {role: spec}
        if isinstance(spec, SpecMapping):
            leaves = {key: spec[key] for key in spec.keys(True, True)}
        elif role in ("observation", "state"):
            raise InvalidTypeError(f"{role}_spec: expected a Composite, which names its keys, got {spec!r}")
        for key, leaf in leaves.items():
            if leaf is not None and tuple(leaf.shape[: len(self.batch_size)]) != tuple(self.batch_size):
                raise EnvironmentContractError(
                    f"{role}_spec: {key!r} has shape {tuple(leaf.shape)}, which doesn't begin with the "
                    f"environment's batch size {tuple(self.batch_size)}; {role}_spec_unbatched takes a spec "
                    "without batch dimensions"
                )
        if not isinstance(spec, SpecMapping):
            spec = Composite({role: spec}, shape=self.batch_size, device=self.device)
        # A stack of different composites also supports the methods of a Composite.
        spec = _with_batch_size(spec, self.batch_size)
        found = cast(Composite, spec if self.device is None else spec.to(self.device))
        found = self._complete(found.clone()) if role == "done" else found
        return found.lock_() if self.locked else found

    def lock(self, mode: bool) -> None:
        """Forbid or allow writing into the composites, including those set later."""
        self.locked = mode
        change = Composite.lock_ if mode else _unlocked
        self._specs = {role: change(spec) for role, spec in self._specs.items()}

    def full(self, role: str) -> Composite:
        """Return the composite spec of `role`."""
        return self._specs[role]

    def short(self, role: str) -> TensorSpec:
        """Return the leaf of `role` if its key is the role's name and it is the only leaf; otherwise the composite."""
        spec = self._specs[role]
        return spec[role] if self.keys(role) == [role] else spec

    def leaves(self, role: str) -> dict[NestedKey, Any]:
        """Return the leaves of `role` by key, sorted by path length; the caller must not change the result.

        Without a change of locks, a fixed spec keeps its entries; so its leaves are cached until the next such change.
        """
        spec = self._specs[role]
        known, locks, leaves = self._known.get(role, (None, None, {}))
        if known is not spec or locks is not SpecMapping.all_locks:
            found = sorted(map(as_path, spec.keys(True, True)), key=len)
            leaves = {as_key(path): spec[path] for path in found}
            if spec.is_fixed:  # only a fixed spec: others may gain or lose entries
                self._known[role] = (spec, SpecMapping.all_locks, leaves)
        return leaves

    def forms(self, role: str) -> list[Form]:
        """Return the path, shape and dtype of each leaf of `role`. The dtype of a flag is None: it may differ."""
        leaves = self.leaves(role)
        known, found = self._forms.get(role, (None, []))
        if known is not leaves:
            found = [
                (as_path(k), spec.shape, None if role == "done" else spec.dtype) for k, spec in leaves.items()
            ]
            self._forms[role] = leaves, found
        return found

    def keys(self, role: str) -> list[NestedKey]:
        """Return the keys of the leaves of `role`, sorted by path length."""
        return list(self.leaves(role))

    def only_key(self, role: str) -> NestedKey:
        """Return the only key of `role`; for done, the only key that ends in ``"done"``.

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
        """Return the path prefix of each group of flags; ``()`` for flags at the top level."""
        flags = self.leaves("done")
        if self._groups is None or self._groups[0] is not flags:
            self._groups = (flags, tuple(dict.fromkeys(as_path(key)[:-1] for key in flags)))
        return list(self._groups[1])

    def add_truncated(self) -> None:
        """Add a truncated flag to every group of flags that has none."""
        spec = self._specs["done"].clone()
        for group in self.groups():
            done = spec[as_key((*group, "done"))]
            if (*group, "truncated") not in {as_path(key) for key in spec.keys(True, True)}:
                spec[as_key((*group, "truncated"))] = done.clone()
        self.set("done", spec)

    def _complete(self, spec: Composite) -> Composite:
        found = [as_path(key) for key in spec.keys(True, True)]
        for group in dict.fromkeys(path[:-1] for path in found):
            known = next((group + (flag,) for flag in FLAGS if (*group, flag) in found), None)
            if known is None:
                raise EnvironmentContractError(
                    f"done_spec: expected keys that end in done, terminated or truncated, "
                    f"got {[as_key(path) for path in found]}"
                )
            for flag in ("done", "terminated"):
                if (*group, flag) not in found:
                    spec[as_key((*group, flag))] = spec[as_key(known)].clone()
        return spec


def _unlocked(spec: Composite) -> Composite:
    try:
        return spec.unlock_()
    except UnsupportedError:  # locked as part of a group; a copy isn't
        return spec.clone()


def _with_batch_size(spec: TensorSpec, size: torch.Size) -> TensorSpec:
    """Return a composite with the batch dimensions `size`, which all of its leaves have; return a leaf unchanged."""
    if not isinstance(spec, Composite) or spec.shape[: len(size)] == size:
        return spec
    parts = {key: None if part is None else _with_batch_size(part, size) for key, part in spec.items()}
    return Composite(parts, shape=size, device=spec.device)


def complete_flags(flags: dict[str, Any], zeros: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all flags of one group; missing flags are derived from the flags that the environment returned.

    With only ``done``, ``terminated := done``. With only ``terminated`` (and ``truncated``), ``done := terminated |
    truncated``. Without any flag, all are False.

    Args:
        flags: the flags that the environment returned, by name.
        zeros: a False tensor for each flag that the group must have.

    Raises:
        EnvironmentContractError: if done and truncated came without terminated. A done step could then be either.
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
