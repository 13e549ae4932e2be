"""`TensorDictPrimer`: adds entries at the beginning of episodes, such as the state of a recurrent policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl.data.specs import Composite, TensorSpec
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.row_view import Record, reset_rows, trailing
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


class TensorDictPrimer(Transform):
    """Adds entries at each reset of an environment, or to sampled batches of a buffer that lack them.

    In a step, the environment may return such an entry itself. If it doesn't, the outcome gets the value that the
    policy wrote below ``"next"``, or else the value in the root. If there is neither, it gets an initial value.

    Args:
        primers: the specs of the entries, as a composite spec or a mapping by key. They are for a single environment,
            unless the composite has the environment's batch size.
        random: whether values are drawn from the specs.
        default_value: initial value of all entries, or a mapping from keys to values. A function without arguments is
            called for each entry at each reset, and returns a value for all environments. None for zero.
        reset_key: the ``"_reset"`` mask that renews the entries; None for any of the environment's.
        expand_specs: whether specs of a single environment get the environment's batch dimensions; None for yes.
        single_default_value: whether a function as `default_value` is called once for all entries at each reset. It may
            take ``reset=mask``, the environments that are reset, ``(*batch,)`` bool. It returns a TensorDict or a
            dictionary for all environments, for the reset ones, or, without batch dimensions, for each of them.
        call_before_env_reset: whether the entries are made before the environment is reset, and are in its request.
        seed: seed of random values; None draws one from torch's global generator at the first use.
        **kwargs: more specs of entries, by key.

    Raises:
        InvalidArgumentError: if `random` and `default_value` are both given. At use, if `default_value` lacks an entry,
            or the specs don't fit the environment's batch.
        InvalidTypeError: at use, if an initial value is neither a number nor a tensor.
    """

    on_rows = True

    def __init__(
        self,
        primers: Mapping[Any, TensorSpec] | Composite | None = None,
        random: bool | None = None,
        default_value: Any = None,
        reset_key: NestedKey | None = None,
        expand_specs: bool | None = None,
        single_default_value: bool = False,
        call_before_env_reset: bool = False,
        seed: int | None = None,
        **kwargs: TensorSpec,
    ) -> None:
        if random and default_value is not None:
            raise InvalidArgumentError("TensorDictPrimer: give random=True or default_value, not both")
        spec = primers.clone() if isinstance(primers, Composite) else Composite(dict(primers or {}))
        for key, leaf in kwargs.items():
            spec[key] = leaf
        super().__init__()
        self.single_default_value, self.call_before_env_reset = single_default_value, call_before_env_reset
        self.primers, self.random, self.reset_key = spec, bool(random), reset_key
        self.default_value: Any = 0.0 if default_value is None else default_value
        self.expand_specs = True if expand_specs is None else expand_specs
        self.generator = OwnedTorchGenerator(seed) if random else None
        self._expanded: Composite | None = None

    def _default_out_keys(self) -> list[NestedKey]:
        return keys_of(self.primers)

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return an empty list: entries are added, none is mapped."""
        return []

    def written_keys(self) -> list[NestedKey]:
        """Return the keys of the entries."""
        return self.out_keys

    def primed_keys(self) -> list[NestedKey]:
        """Return the keys of the entries: a recurrent policy writes its state there, below ``"next"``."""
        return self.out_keys

    def empty_cache(self) -> None:
        """Forget the specs with the environment's batch dimensions."""
        super().empty_cache()
        self._expanded = None

    def _specs(self) -> Composite:
        """Return the entries' specs with the environment's batch dimensions, on its device."""
        if self._expanded is None:
            parent = self.parent
            size = torch.Size() if parent is None else torch.Size(parent.batch_size)
            out = Composite({}, shape=size)
            for key in keys_of(self.primers):
                out[key] = self._batched_spec(key, self.primers[key], size)
            device = None if parent is None else parent.device
            self._expanded = out if device is None else out.to(device)
        return self._expanded

    def _batched_spec(self, key: NestedKey, leaf: TensorSpec, size: torch.Size) -> TensorSpec:
        """Return an entry's spec with the environment's batch dimensions."""
        if not size or torch.Size(self.primers.shape) == size:
            return leaf
        if self.expand_specs and not self.primers.shape:
            return leaf.expand((*size, *leaf.shape))
        if self.expand_specs or leaf.shape[: len(size)] != size:
            raise InvalidArgumentError(
                f"primers: {key!r} has shape {tuple(leaf.shape)}, in a composite spec of shape "
                f"{tuple(self.primers.shape)}, which isn't that of the environment's batch, {tuple(size)}; give the "
                "specs of one environment, and leave expand_specs on"
            )
        return leaf

    def _initial(self, key: NestedKey, spec: TensorSpec, lead: tuple[int, ...] = ()) -> Tensor:
        if self.generator is not None:
            # Drawn on the CPU, so that a seed yields the same values on every device.
            drawn = spec.to("cpu").rand(lead, generator=self.generator.get())
            return drawn.to(spec.device)
        value = self.default_value
        if isinstance(value, Mapping):
            paths = {as_path(k): v for k, v in value.items()}
            if as_path(key) not in paths:
                raise InvalidArgumentError(
                    f"default_value: expected a value for each entry, got nothing for {key!r}; it has {list(value)}"
                )
            value = paths[as_path(key)]
        made = _value(value)
        shape = torch.Size((*lead, *spec.shape))
        return torch.as_tensor(made, dtype=spec.dtype, device=spec.device).expand(shape).clone()

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for key in self.out_keys:
            if next_tensordict.get(key, None) is None:
                value = tensordict.get(("next", *as_path(key)), None)  # the policy's new state
                value = tensordict.get(key, None) if value is None else value
                next_tensordict.set(
                    key, self._initial(key, self._specs()[key]) if value is None else value.clone()
                )
        return next_tensordict

    def takes_rows(self) -> bool:
        """Return whether rows suffice. With `call_before_env_reset` they don't: the request must be a TensorDict."""
        return super().takes_rows() and not self.call_before_env_reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        tensordict = super()._reset_env_preprocess(tensordict)
        if not self.call_before_env_reset:
            return tensordict
        if tensordict is None:
            tensordict = TensorDict({}, self.parent.batch_size, device=self.parent.device)
        return self._primed(tensordict, tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        if not self.call_before_env_reset:
            return self._primed(tensordict, tensordict_reset)
        for key in self.out_keys:
            tensordict_reset.set(key, tensordict.get(key))
        return tensordict_reset

    def _single(self, size: torch.Size, mask: Tensor | None = None) -> Any:
        """Return the values of all entries, ``(*size,)``, from one call of `default_value`.

        Args:
            size: batch size of the result.
            mask: the environments that are reset, bool of that size; None for all.

        Returns:
            None unless `single_default_value` applies.
        """
        if not (self.single_default_value and callable(self.default_value)):
            return None
        rows = torch.ones(size, dtype=torch.bool) if mask is None else mask
        takes_mask = "reset" in inspect.signature(self.default_value).parameters
        made = self.default_value(reset=rows) if takes_mask else self.default_value()
        made = made if isinstance(made, TensorDictBase) else TensorDict(dict(made), [])
        if torch.Size(made.batch_size) == size:
            return made
        if not made.batch_size:
            return made.expand(size).clone()
        values = self._specs().zero()
        values[rows] = made.select(*self.out_keys)
        return values

    def _primed(self, tensordict: Record, tensordict_reset: Record) -> Record:
        """Set the entries in `tensordict_reset`: initial values where `tensordict` asks for a reset.

        Elsewhere they keep their values in `tensordict`, if it has them.
        """
        specs = self._specs()
        keys = self.parent.reset_keys if self.reset_key is None else [self.reset_key]
        mask = reset_rows(tensordict, keys)
        single = self._single(torch.Size(self.parent.batch_size), mask)
        for key in self.out_keys:
            value = self._initial(key, specs[key]) if single is None else single.get(key)
            before = tensordict.get(key, None)
            if mask is not None and before is not None:
                value = torch.where(trailing(mask, value), value, before)
            tensordict_reset.set(key, value)
        return tensordict_reset

    def forward(self, tensordict: Any) -> Any:
        """Add the entries that a sampled batch lacks, with one value for each record, in place; return the batch."""
        missing = [key for key in self.out_keys if tensordict.get(key, None) is None]
        single = self._single(tensordict.batch_size) if missing else None
        for key in missing:
            made = (
                self._initial(key, self.primers[key], tensordict.batch_size)
                if single is None
                else single.get(key)
            )
            tensordict.set(key, made)
        return tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return a copy of the spec with the entries' specs.

        Raises:
            InvalidArgumentError: if the environment declares one of the entries differently.
        """
        out = observation_spec.clone()
        specs = self._specs()
        for key in self.out_keys:
            if key in observation_spec.keys(True, True) and observation_spec[key] != specs[key]:
                raise InvalidArgumentError(
                    f"primers: the environment has a {key!r} already, with another spec; choose another key"
                )
            out[key] = specs[key].clone()
        return out

    def extra_repr(self) -> str:
        """Show the keys."""
        return f"primers={[as_key(as_path(key)) for key in self.out_keys]}, random={self.random}"


def _value(value: Any) -> Any:
    function: Callable[[], Any] | None = value if callable(value) else None
    made = function() if function is not None else value
    if not isinstance(made, (int, float, bool, Tensor)):
        raise InvalidTypeError(f"default_value: expected a number or a tensor, got {made!r}")
    return made
