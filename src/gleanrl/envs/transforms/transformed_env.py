"""`TransformedEnv`: an environment with a transform between it and its user.

`takes_rows` decides whether it can step into rows of a block, `may_be_on_host` whether these may be on the CPU.
`undeclared_entries` finds entries that a user's transform adds without a spec.
"""

from __future__ import annotations

import random
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.devices import columns_device, on_cpu, same_device
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path, flatten, is_private
from gleanrl._rollout.env_traits import EnvTraits, extra, is_closed, live_actions, seed_env
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Stepper, Usage
from gleanrl._rollout.tensordict_stepper import TensorDictStepper, declared, make_stepper
from gleanrl._state.rng import new_seed, torch_rng_preserved
from gleanrl._util import is_native, is_ours, overridden
from gleanrl.data.specs import Composite, TensorSpec, Unbounded, contains_lazy_spec, from_torchrl, is_masked
from gleanrl.envs.base import BEHIND_TRANSFORM, REPLACED, EnvBase
from gleanrl.envs.env_specs import EnvSpecs
from gleanrl.envs.env_state import adopt_state, parse_state
from gleanrl.envs.outcomes import with_unstepped_rows
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.compose import Compose, as_transform, flattened
from gleanrl.envs.transforms.row_columns import lists_pass
from gleanrl.envs.transforms.row_view import reset_rows
from gleanrl.envs.transforms.stepper import TransformedStepper
from gleanrl.envs.vector.factories import know_truncated, require_environment
from gleanrl.errors import (
    ClosedError,
    EnvironmentContractError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)


def takes_rows(env: Any, within: Transform | None) -> bool:
    """Return whether rollouts can use the base environment's stepper, and run the transforms on rows.

    They can't in any of these cases:

    - A transform needs a TensorDict.
    - The environment reads states, in addition to actions.
    - It resets members in the step after an end, although it could reset them at once.
    - A transform changes the keys of reset masks.
    - A transform may change entries that are kept in lists.

    Args:
        env: a `TransformedEnv`.
        within: the transform of its base environment, if that is a `TransformedEnv` too.
    """
    base, traits = env.base_env, env.traits
    waits = traits.masks_frames and traits.resets_some
    # An inner transform that needs TensorDicts may read entries that the outer transforms add.
    rows = env.transform.takes_rows() and (within is None or within.takes_rows())
    same_resets = set(env.reset_keys) == set(base.reset_keys)  # the base stepper resets by its own masks
    return rows and not base.state_keys and not waits and same_resets and lists_pass(env)


def may_be_on_host(transform: Transform) -> bool:
    """Return whether all transforms of a chain may run on the CPU, although the environment has another device.

    They must be this library's, declare `Transform.on_host`, and have no method replaced on the object.
    """
    return all(is_ours(type(part)) and part.on_host and not _patched(part) for part in flattened(transform))


def _patched(transform: Transform) -> bool:
    return any(callable(value) and hasattr(type(transform), name) for name, value in vars(transform).items())


def undeclared_entries(transform: Transform, output_spec: Composite) -> dict[NestedKey, TensorSpec]:
    """Return specs of the entries that a user's `_call` adds to an outcome without declaring them; warn of them.

    A copy of the transform is called once, on zeros, with the global random generators restored afterwards. If the call
    fails, no entries are found; the first step of a rollout then raises an error that names the key. A transform that
    accepts rows or overrides `_step` isn't called, and yields no entries.

    Args:
        transform: one transform of a chain.
        output_spec: the spec of its outputs, as it declares them.
    """
    if not transform.writes_anything() or transform.takes_rows():
        return {}
    if overridden(transform, "_step", of=Transform):
        return {}  # an overridden `_step` may need a root and a live environment
    outcome = TensorDict({}, output_spec.shape, device=output_spec.device)
    for role in ("observation", "reward", "done"):
        outcome.update(output_spec[f"full_{role}_spec"].zero())
    known = set(outcome.keys(True, True))
    try:
        with _undisturbed(), torch.no_grad():
            made = transform.tried(outcome)
        found = {key: made.get(key) for key in made.keys(True, True) if key not in known}
    except Exception:  # a user's transform may raise any error on zeros, or when it's copied
        return {}
    added: dict[NestedKey, TensorSpec] = {
        as_key(as_path(key)): Unbounded(value.shape, dtype=value.dtype, device=value.device)
        for key, value in found.items()
        if isinstance(value, torch.Tensor) and not is_private(as_path(key))
    }
    if added:
        warnings.warn(
            f"{transform!r} adds {list(added)}, which no spec declares: taken as observations that are zero after a "
            "reset if it doesn't add them there; declare them in transform_observation_spec",
            stacklevel=2,
        )
    return added


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the global random generators of Python, NumPy and torch on exit."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch_rng_preserved():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


class TransformedEnv(EnvBase):
    """An environment with outputs and inputs that pass a transform.

    If `env` is a `TransformedEnv` itself, it is unwrapped: `base_env` is its base environment, and clones of its
    transforms come first in the chain. Attributes that this class lacks are looked up in `base_env`. The transforms may
    change batch size and device.

    Rollouts use the stepper of `base_env` and run the transforms on rows of tensors, if all transforms accept rows (see
    `Transform`). Otherwise they use TensorDicts, which is slower. Not thread-safe.

    Args:
        env: the environment; it is used, not copied, and `close` closes it. Two transformed environments around the
            same `env` would step and close it both, so give each its own.
        transform: a transform, a callable that takes a TensorDict, or None for an empty `Compose`.
        cache_specs: whether specs are derived once. Pass False for an environment with specs that change: then they are
            derived at each access.
        auto_unwrap: whether a transformed `env` is unwrapped; otherwise it is `base_env`.
        device: device to move `env` and `transform` to, in place; None doesn't move them.
        **kwargs: passed to `EnvBase` (`run_type_checks`, `allow_done_after_reset`).

    Raises:
        ContainerError: if `transform` is in another container (also an AttributeError).
        UnsupportedError: if `batch_size` is given.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> from gleanrl.envs.transforms import StepCounter
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=5))
        >>> env.rollout(100)["step_count"].flatten()
        tensor([0, 1, 2, 3, 4])
    """

    _derived: EnvSpecs | None
    _added: dict[NestedKey, TensorSpec]

    def __init__(
        self,
        env: Any,
        transform: Any = None,
        cache_specs: bool = True,
        *,
        auto_unwrap: bool = True,
        device: Any = None,
        **kwargs: Any,
    ) -> None:
        if "batch_size" in kwargs:
            raise UnsupportedError(
                "TransformedEnv: batch_size follows from the environment and its transforms; leave the argument out"
            )
        require_environment(env)
        if device is not None:
            env = env.to(device)
        kwargs.setdefault("allow_done_after_reset", EnvTraits.of(env).allow_done_after_reset)
        kwargs.setdefault("spec_locked", extra(env, "is_spec_locked", True))
        super().__init__(**kwargs)
        transform = Compose() if transform is None else as_transform(transform)
        if isinstance(env, TransformedEnv) and auto_unwrap:
            # An empty chain is dropped, so that `transform[0]` is a transform, not an empty `Compose`.
            inner = [t.clone() for t in flattened(env.transform)]
            last = [transform] if flattened(transform) else []
            env, transform = env.base_env, Compose(*inner, *last)
        self.cache_specs = cache_specs
        self.base_env: Any = env
        self.transform: Any = transform
        # Shared with the base environment: a rollout here must notice that a caller stepped or reset it directly.
        self.usage = extra(env, "usage") or Usage()
        if device is not None:
            transform.to(device)
        transform.set_container(self)

    # ----------------------------------------------------------------- specs
    @property
    def _specs(self) -> EnvSpecs:
        if self._derived is None or not self.cache_specs:
            self._derived = self._derive()
        return self._derived

    @_specs.setter
    def _specs(self, specs: EnvSpecs) -> None:
        self._derived = None  # EnvBase assigns empty specs; they are derived at the first access instead

    def _derive(self) -> EnvSpecs:
        base = self.base_env
        specs = EnvSpecs(self.batch_size, self.device)
        output = from_torchrl(base.output_spec).clone()
        self._added = {}
        for transform in flattened(self.transform):
            output = transform.transform_output_spec(output)
            added = undeclared_entries(transform, output)
            for key, leaf in added.items():
                output["full_observation_spec"][key] = leaf
            self._added |= added
        inputs = self.transform.transform_input_spec(from_torchrl(base.input_spec).clone())
        for role in ("observation", "reward", "done"):
            specs.set(role, output[f"full_{role}_spec"])
        for role in ("action", "state"):
            specs.set(role, inputs[f"full_{role}_spec"])
        specs.lock(extra(base, "is_spec_locked", True))
        return specs

    def set_spec_lock_(self, mode: bool = True) -> TransformedEnv:
        """Lock or unlock the composite specs of the base environment and of this one; return this one.

        Args:
            mode: True forbids changes of the specs, False allows them.
        """
        if extra(self.base_env, "set_spec_lock_") is not None:
            self.base_env.set_spec_lock_(mode)
        self.empty_cache()
        return self

    @property  # type: ignore[misc]
    def batch_size(self) -> torch.Size:
        """Batch dimensions on the user's side."""
        return self.transform.transform_env_batch_size(torch.Size(self.base_env.batch_size))

    @property  # type: ignore[misc]
    def device(self) -> torch.device | None:
        """Device of the user's TensorDicts."""
        return self.transform.transform_env_device(self.base_env.device)

    @property
    def any_size(self) -> bool:  # type: ignore[override]
        """Whether inputs may have any batch size, as for the base environment."""
        return not getattr(self.base_env, "batch_locked", True)

    @property
    def is_closed(self) -> bool:
        """Whether the environment or its base environment was closed, or the latter is a batch that isn't started."""
        # Other libraries' environments may report themselves closed until their first reset, so they aren't asked.
        return self._closed or (isinstance(self.base_env, EnvBase) and self.base_env.is_closed)

    @is_closed.setter
    def is_closed(self, closed: bool) -> None:
        self._closed = closed

    @property
    def was_closed(self) -> bool:
        """Whether the environment, or its base environment, was closed."""
        return self._closed or (isinstance(self.base_env, EnvBase) and self.base_env.was_closed)

    @property
    def is_started(self) -> bool:
        """The base environment's `is_started`, or False if it has none. For a batch, it stays True after `close`."""
        return bool(extra(self.base_env, "is_started", False))

    @property
    def traits(self) -> EnvTraits:
        """The `EnvTraits` of the base environment, as changed by the transforms."""
        chain, inner = flattened(self.transform), EnvTraits.of(self.base_env)
        return replace(
            inner,
            loses_last=inner.loses_last or any(transform.loses_last for transform in chain),
            actions_vary=inner.actions_vary or any(transform.actions_vary for transform in chain),
            own_actions=bool(overridden(self, "rand_action", of=TransformedEnv)) or self._passes_actions(),
            allow_done_after_reset=self.allow_done_after_reset,
            notes_masks=inner.notes_masks and is_native(self, "live_action_spec", of=TransformedEnv),
            primed_keys=(*inner.primed_keys, *(key for t in chain for key in t.primed_keys())),
        )

    def _passes_actions(self) -> bool:
        """Return whether the base environment has its own `rand_action`, and no transform changes actions."""
        return EnvTraits.of(self.base_env).own_actions and not self.transform.inverts()

    def empty_cache(self) -> None:
        """Forget specs and keys; they are derived again at the next access."""
        self._derived = None
        self.transform.empty_cache()

    def _check_open(self) -> None:
        if self.was_closed and not self._closed:
            raise ClosedError(
                f"the {type(self.base_env).__name__} in this {type(self).__name__} was closed, directly or by another "
                "TransformedEnv around it; give each TransformedEnv its own environment"
            )
        super()._check_open()

    def add_truncated_keys(self) -> TransformedEnv:
        """Add a truncated flag to every group of flags of the base environment that has none; return this one."""
        self.base_env.add_truncated_keys()
        self.empty_cache()
        return self

    def _know_truncated(self) -> None:
        know_truncated(self.base_env)
        self.empty_cache()

    def to(self, *args: Any, **kwargs: Any) -> TransformedEnv:
        """Move the base environment and the transforms to a device, in place; return this environment."""
        self.base_env = self.base_env.to(*args, **kwargs)
        self.transform.to(*args, **kwargs)
        self.empty_cache()
        return self

    # ------------------------------------------------------------- transforms
    def append_transform(self, transform: Any) -> TransformedEnv:
        """Add a transform, or a callable, at the end of the chain; see `insert_transform`."""
        return self.insert_transform(len(self._as_chain()), transform)

    def insert_transform(self, index: int, transform: Any) -> TransformedEnv:
        """Insert a transform, or a callable, before the one at `index`; return the environment.

        A single transform is put into a `Compose` first. Collectors that exist already don't use the new transform,
        because they planned their rollouts before.

        Raises:
            IndexError: if `index` is out of range.
            ContainerError: if the transform is in a container already (also an AttributeError).
        """
        self._as_chain().insert(index, transform)
        self.empty_cache()
        return self

    def _as_chain(self) -> Compose:
        if type(self.transform) is not Compose:
            only = self.transform
            only.reset_parent()
            self.transform = Compose(only)
            self.transform.set_container(self)
        return self.transform

    @property
    def _env(self) -> Any:
        """The simulator that the base environment wraps; programs read it by this name."""
        return self.base_env._env

    def register_collector(self, collector: Any) -> None:
        """Set the collector that uses the environment, held weakly; transforms find it by `Transform.collector`."""
        _COLLECTORS[self] = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The collector that uses the environment; None if there is none, or it was freed."""
        found = _COLLECTORS.get(self)
        return None if found is None else found()

    def environment_before(self, child: Transform, after: Sequence[Transform] = ()) -> Any:
        """Return the base environment with the transforms `after`; `child` has no effect here."""
        return TransformedEnv(self.base_env, Compose.uncontained(after), self.cache_specs)

    @property
    def container(self) -> TransformedEnv:
        """The environment itself: it is the outermost container of its transforms."""
        return self

    # -------------------------------------------------------------- protocol
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        inputs = tensordict.exclude("next")
        written = tensordict.get("next", None)  # the policy's new state
        if written is not None and (primed := EnvTraits.of(self.base_env).primed_keys):
            inputs.set("next", written.select(*primed, strict=False))
        inner = self.transform.inverting()(inputs)
        if inner is None:
            raise EnvironmentContractError(
                "step: expected a TensorDict from the inverse transforms, got None, which holds records back from a "
                "replay buffer; remove that transform from the environment"
            )
        mask = None if tensordict.get("_step", None) is not None else inner.get("_step", None)
        if mask is not None and not bool(mask.any()):  # a transform leaves the step out
            return with_unstepped_rows(self._nothing(), tensordict, mask, self._specs)
        root = tensordict if mask is None else tensordict.copy().set("_step", mask)
        outcome = self.transform._step(root, self.base_env.step(inner).get("next"))
        return outcome if mask is None else with_unstepped_rows(outcome, tensordict, mask, self._specs)

    def _nothing(self) -> TensorDictBase:
        """Return an outcome of zeros."""
        zeros = [self._specs.full(role).zero() for role in ("observation", "reward", "done")]
        return (
            TensorDict({}, self.batch_size, device=self.device)
            .update(zeros[0])
            .update(zeros[1])
            .update(zeros[2])
        )

    def state_request(self, set_state: bool) -> dict[str, bool]:
        """Return the keywords that pass `set_state` to the base environment's reset."""
        base = self.base_env
        return base.state_request(set_state) if isinstance(base, EnvBase) else {"set_state": set_state}

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        request = self._reset_env_preprocess(tensordict)
        if request is None:
            size = None if self.batch_locked else TensorDict({}, self.batch_size, device=self.device)
            root = self.base_env.reset(size, **kwargs)  # without batch lock the size must be passed
            request = TensorDict({}, self.batch_size, device=self.device)
            return self._filled(self.transform._reset(request, root))
        masks = [m for key in self.reset_keys if (m := request.get(key, None)) is not None]
        if masks and not any(bool(mask.any()) for mask in masks):
            return request.exclude("next", *self.reset_keys)
        root = self._base_reset(request, bool(masks), kwargs)
        return self._filled(self.transform._reset(request if tensordict is None else tensordict, root))

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        return self.transform._reset_env_preprocess(tensordict)

    def _filled(self, root: TensorDictBase) -> TensorDictBase:
        """Add zeros for entries that a transform adds to outcomes without a spec; see `undeclared_entries`."""
        if self._derived is None:
            self._derived = self._derive()
        for key, leaf in self._added.items():
            if root.get(key, None) is None:
                root.set(key, leaf.zero())
        return root

    def _base_reset(
        self, tensordict: TensorDictBase, partial: bool, kwargs: dict[str, Any]
    ) -> TensorDictBase:
        """Return the base environment's first observations; rows of environments that aren't reset are undefined.

        A partial reset calls the `_reset` of a base environment of this library, not `reset`. The latter copies the
        other rows from the request, which holds transformed observations.

        If a transform has kept these observations, a partial reset returns zeros and resets nothing.
        """
        base = self.base_env
        if not same_device(base.device, tensordict.device):
            tensordict = tensordict.to(columns_device(base.device))
        if partial:
            tensordict = self._with_base_entries(tensordict)
        if partial and self.transform.keeps_first(reset_rows(tensordict, self.reset_keys)):
            return base.full_observation_spec.zero().update(base.full_done_spec.zero())
        if not partial or not isinstance(base, EnvBase):
            # A copy, because a foreign environment may return its argument.
            return base.reset(tensordict.copy(), **kwargs)
        base.usage.direct()
        root = base._reset(tensordict, **kwargs)
        return base.completed_root(root.exclude(*base.reset_keys))

    def _with_base_entries(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a reset request with zeros for observations that lack the base environment's shape or dtype.

        Batches of environments merge kept rows with fresh ones, which needs equal keys and shapes.
        """
        spec = from_torchrl(self.base_env.output_spec)["full_observation_spec"]
        if tensordict.batch_size != spec.shape or contains_lazy_spec(spec):
            return tensordict
        request, found = tensordict.copy(), flatten(tensordict)
        fields = declared(spec, 0)
        for path, field in fields.items():
            value = found.get(path)
            if value is None or not (field.is_list or field == Field.of(value, 0)):
                request.set(as_key(path), spec[as_key(path)].zero())
        return request

    def live_action_spec(self) -> Any:
        """Return the full action spec with the current masks; see `EnvBase`.

        Masks of the base environment pass the transforms. The mask of an `ActionMask` in this chain replaces them.
        """
        live, declared = from_torchrl(live_actions(self.base_env)), self.full_action_spec
        masking = [transform for transform in flattened(self.transform) if transform.actions_vary]
        # Whether all of them write their masks into `declared`.
        in_spec = all(transform.container is self for transform in masking)
        if in_spec and not is_masked(live) and (masking or not is_masked(declared)):
            return declared
        inputs = from_torchrl(self.base_env.input_spec).clone()
        inputs["full_action_spec"] = live
        return self.transform.transform_input_spec(inputs)["full_action_spec"]

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions and return them, in `tensordict` or a new TensorDict.

        The base environment's own `rand_action` draws them if it has one, no transform changes actions, and
        `tensordict` is given.
        """
        if tensordict is not None and self._passes_actions():
            return tensordict.update(self.base_env.rand_action(tensordict.copy()).select(*self.action_keys))
        return super().rand_action(tensordict)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the base environment and the transforms that draw random numbers; return the last seed used.

        Each of these transforms gets its own seed, derived from `seed`, so that their draws are independent. Then
        `seeded` is called for every transform. See `EnvBase.set_seed` for the arguments.
        """
        random = torch.Generator("cpu").manual_seed(seed)
        for transform in flattened(self.transform):
            if transform.generator is not None:
                transform.generator.seed(new_seed(random))
            transform.seeded()
        return seed_env(self.base_env, seed, static_seed)

    def _reopen(self) -> None:
        if self.was_closed and isinstance(self.base_env, EnvBase):
            self.base_env._reopen()
            self._closed = self._closed and self.base_env.was_closed

    def close(self, **kwargs: Any) -> None:
        """Close the transforms, then the base environment. Parts that are closed already stay closed.

        Raises:
            Exception: the error of a transform or of the base environment; all parts are closed nevertheless.
        """
        try:
            if not self._closed:
                self.transform.close()
            self._closed = True
        except Exception:  # unlike after an interrupt, another call needn't close them again
            self._closed = True
            raise
        finally:
            if not is_closed(self.base_env):
                self.base_env.close(**kwargs)

    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Return the stepper for rows of a block; it uses TensorDicts if the transforms don't accept rows."""
        return TransformedStepper(self, rules) if self._takes_rows() else TensorDictStepper(self, rules)

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Return a stepper with rows on the CPU; None if a transform or the base environment needs the device."""
        if not (may_be_on_host(self.transform) and self._takes_rows()):
            return None
        base = make_stepper(self.base_env, rules, on_host=True)
        return TransformedStepper(self, rules, base) if on_cpu(base.device) else None

    def _takes_rows(self) -> bool:
        within = self.base_env.transform if isinstance(self.base_env, TransformedEnv) else None
        return is_native(self, *REPLACED, "_base_reset", of=TransformedEnv) and takes_rows(self, within)

    # ----------------------------------------------------------------- state
    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the transforms' state under ``"transform."`` and the base environment's under ``"base_env."``.

        Args:
            *args: `destination` and `prefix` by position, as torch allows.
            destination: dictionary to add the entries to; None for a new one.
            prefix: prefix of all names.
            keep_vars: no effect: tensors are copies.
        """
        destination, prefix = (*args, *(destination, prefix)[len(args) :])[:2]
        out = OrderedDict() if destination is None else destination
        for name, part in (("transform", self.transform), ("base_env", self.base_env)):
            for key, value in part.state_dict().items():
                out[f"{prefix}{name}.{key}"] = value
        return out

    def parse_state(self, state: Any, strict: bool = True) -> tuple[Any, ...]:
        """Return the checked values of a saved state: of the transforms, and of the base environment if it has entries.

        Args:
            state: the result of `state_dict`.
            strict: whether missing or unexpected entries are errors; otherwise they are skipped.

        Raises:
            MissingKeyError: with `strict`, if the base environment has a state and `state` has no entries for it.
            SchemaError: if `state` is no mapping, or an entry is wrong; with `strict` also if an entry is unexpected or
                a transform's entry is missing.
        """
        if not isinstance(state, Mapping):
            raise SchemaError(
                f"load_state_dict: expected the state of an environment, got {type(state).__name__}"
            )
        parts: dict[str, dict[str, Any]] = {"transform": {}, "base_env": {}}
        for key, entry in state.items():
            name, _, rest = str(key).partition(".")
            if name in parts:
                parts[name][rest] = entry
            elif strict:
                raise SchemaError(f"load_state_dict: unexpected entry {key!r}")
        transforms, base = self.transform.parse(parts["transform"], strict), parts["base_env"]
        if base:
            return transforms, parse_state(self.base_env, base, strict)
        if strict and len(self.base_env.state_dict()):
            raise MissingKeyError("load_state_dict: no entries of the base environment ('base_env.…')")
        return (transforms,)

    def adopt_state(self, value: tuple[Any, ...]) -> None:
        """Set the values that `parse_state` returned; this can't fail."""
        transforms, *base = value
        self.transform.adopt(transforms)
        for part in base:
            adopt_state(self.base_env, part)

    def _elsewhere(self, name: str) -> Any:
        """Return the attribute `name` of the base environment."""
        known = "base_env" in self.__dict__ or "base_env" in self.__dict__.get("_modules", {})
        return getattr(self.base_env, name) if known else super()._elsewhere(name)

    def __repr__(self) -> str:
        """Show the base environment and the transforms."""
        return f"{type(self).__name__}(\n    env={self.base_env!r},\n    transform={self.transform!r})"


BEHIND_TRANSFORM.append(TransformedEnv)

# Not an attribute of the environment: copies and pickles of the environment must not include the collector.
_COLLECTORS: WeakKeyDictionary[TransformedEnv, weakref.ref[Any]] = WeakKeyDictionary()
