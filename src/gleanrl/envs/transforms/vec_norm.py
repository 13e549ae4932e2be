"""`VecNorm` and `VecNormV2`: normalization by running statistics.

`RunningSums` holds the statistics, in the memory of one process or in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from gleanrl._arrays.allocate import lasting
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl._os.shared_memory import SharedMemory
from gleanrl._rollout.env_traits import Env
from gleanrl._state.state import Stateful, StateReader
from gleanrl.data.specs import TensorSpec, Unbounded
from gleanrl.envs.transforms.base import Keys, as_keys, missing_key
from gleanrl.envs.transforms.compose import Compose
from gleanrl.envs.transforms.entrywise import EntryTransform
from gleanrl.envs.transforms.episodic import Following
from gleanrl.envs.transforms.normalization import ObservationNorm
from gleanrl.envs.transforms.row_view import Record, reset_rows, trailing
from gleanrl.envs.vector.factories import is_environment
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)

_DOUBLE = 8
_NONE = torch.Size()

Result = TypeVar("Result")

Sums = Mapping[NestedKey, Tensor]
"""For each key ``(m (1 + 2 n),)`` float64: count, sums and sums of squares of n elements, for each of m members."""


@runtime_checkable
class SharesStatistics(Protocol):
    """A transform with statistics that transforms of other environments can share; see `EnvCreator`."""

    def share_statistics(self) -> Any:
        """Move the statistics to memory that other processes can use, and return them."""

    def use_statistics(self, shared: Any, /) -> None:
        """Use the statistics that `share_statistics` of another transform returned."""


class RunningSums(Stateful[Sums]):
    """Count, sum and sum of squares of the values of each key, with exponential decay.

    The sums are float64, because a variance from squares of large values needs more digits than float32 has. An update
    is computed in temporary memory and copied in one call, under the lock if the sums are shared. A process that dies
    before the copy leaves complete sums. If it is killed within the copy, the decay removes the error over time, unless
    it is 1.

    Args:
        shapes: shape of the sums by key.
        shared: whether copies of this object (by pickle or deepcopy) share the memory.
        members: batch dimensions of the environments that have separate sums; ``()`` if all have the same sums.
    """

    def __init__(
        self, shapes: Mapping[NestedKey, torch.Size], shared: bool = False, members: torch.Size = _NONE
    ) -> None:
        self.shapes, self.members = dict(shapes), members
        size = sum(self._sizes().values())
        self._memory = SharedMemory(_DOUBLE * size) if shared else None
        self._local = None if shared else lasting(torch.zeros)(size, dtype=torch.float64)
        self._views: dict[NestedKey, Tensor] = {}

    @property
    def shared(self) -> bool:
        """Whether the sums are in memory that other processes can share."""
        return self._memory is not None

    def _sizes(self) -> dict[NestedKey, int]:
        """Return the number of float64 values of each key."""
        return {key: prod(self.members) * (1 + 2 * prod(shape)) for key, shape in self.shapes.items()}

    def copied(self, shared: bool = False) -> RunningSums:
        """Return an independent copy of the sums.

        Args:
            shared: whether other processes can share the copy.
        """
        copy = RunningSums(self.shapes, shared, self.members)
        copy.adopt(self.snapshot())
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the views; each copy makes its own."""
        return {**self.__dict__, "_views": {}}

    def _view(self, key: NestedKey) -> Tensor:
        """Return a view ``(m, 1 + 2 n)``: count, n sums and n sums of squares for each of m members."""
        if not self._views:
            flat = self._local
            if flat is None:
                assert self._memory is not None
                flat = lasting(torch.frombuffer)(self._memory.map, dtype=torch.float64)
            parts = zip(self.shapes, flat.split([*self._sizes().values()]), strict=True)
            self._views = {key: part.view(prod(self.members), -1) for key, part in parts}
        return self._views[key]

    def clear(self) -> None:
        """Set all sums to zero. If they are shared, they change in all processes."""
        self.adopt({key: torch.zeros(size, dtype=torch.float64) for key, size in self._sizes().items()})

    def _alone(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`, which runs under the lock of shared memory.

        The lock keeps an update of another process from coming between the read and the write of the sums. Local memory
        needs no lock, because a transform isn't thread-safe.
        """
        return call() if self._memory is None else self._memory.alone(call)

    def update(self, key: NestedKey, value: Tensor, decay: float, rows: Tensor | None = None) -> None:
        """Multiply the sums by `decay`, then add `value`.

        Args:
            key: key of the sums.
            value: ``(*members, *shape)``. If all environments have the same sums, any number of values,
                ``(..., *shape)``.
            decay: factor of the sums before.
            rows: the environments to add, ``(*batch,)`` bool; None for all. The sums of other members stay.
        """
        value = value.detach().to("cpu", torch.float64)
        rows = None if rows is None else rows.cpu()
        if rows is not None and not self.members:
            value, rows = value[rows], None
        each = value.reshape(-1, prod(self.members), prod(self.shapes[key]))
        number = each.new_full((each.shape[1], 1), len(each))
        seen = torch.cat([number, each.sum(0), each.square().sum(0)], -1)
        counted = slice(None) if rows is None else rows.flatten()

        def change() -> None:
            view = self._view(key)
            view[counted] = torch.add(seen, view, alpha=decay)[counted]

        self._alone(change)

    def moments(self, key: NestedKey) -> tuple[Tensor, Tensor] | None:
        """Return mean and variance, ``(*members, *shape)`` float64; None if there are no values yet.

        A member without values has mean 0 and variance 1.
        """
        size, shape = prod(self.shapes[key]), (*self.members, *self.shapes[key])
        count, total, squares = self._alone(lambda: self._view(key).clone()).split([1, size, size], -1)
        if not bool(count.any()):
            return None
        seen, mean = count > 0, total / count
        variance = (squares / count - mean.square()).clamp_min(0)
        return mean.where(seen, 0.0).reshape(shape), variance.where(seen, 1.0).reshape(shape)

    def snapshot(self) -> Sums:
        """Return a copy of all sums."""
        copies = self._alone(lambda: {key: self._view(key).clone().flatten() for key in self.shapes})
        return MappingProxyType(copies)

    def parse(self, state: Any) -> Sums:
        """Return copies of the sums in a saved state; raise `SchemaError` if they don't fit the shapes."""
        sums = checked_sums(state)
        sizes, found = self._sizes(), {key: len(numbers) for key, numbers in sums.items()}
        if found != sizes:
            raise SchemaError(f"statistics: expected as many numbers by key as {sizes}, got {found}")
        return sums

    def adopt(self, value: Sums) -> None:
        """Set the sums to `value`, which must fit. If they are shared, they change in all processes."""

        def change() -> None:
            for key, numbers in value.items():
                self._view(key).view(-1).copy_(numbers)

        self._alone(change)


def checked_sums(state: Any) -> Sums:
    """Return copies of the sums in a saved state, with any shapes.

    Raises:
        SchemaError: if `state` holds anything but one-dimensional, finite float64 tensors by key.
    """
    numbers = state.values() if isinstance(state, Mapping) else [None]
    fits = all(
        isinstance(n, Tensor) and n.dtype is torch.float64 and n.ndim == 1 and bool(n.isfinite().all())
        for n in numbers
    )
    if not fits:
        raise SchemaError(
            f"statistics: expected one-dimensional, finite float64 tensors by key, got {state!r:.100}"
        )
    return MappingProxyType({key: value.detach().to("cpu", copy=True) for key, value in state.items()})


class VecNorm(EntryTransform):
    """Normalizes entries by the mean and standard deviation of all values so far, the current value included.

    Each element of an entry has its own statistics, over all environments of the batch, all steps and all resets.
    Environments that a step leaves out (``"_step"``) aren't counted. In evaluation mode, or frozen, the statistics
    don't change. Before the first update values pass unchanged.

    If the environment is seeded before its first step, the values of earlier resets are dropped. A new collector resets
    the environment before the user calls `set_seed`, and results should depend on the seed alone. Shared statistics
    keep these values.

    As a module or in a buffer, the transform normalizes the entries that a batch has, and in training mode counts them.
    Without `shapes` the first batch determines the keys and shapes. A later batch with another of `in_keys` raises
    `MissingKeyError`.

    With `shared_td` every copy of the transform, in any process, updates the same statistics. The lock of a process
    that dies is released.

    Args:
        in_keys: entries to normalize; None for ``["observation", "reward"]``.
        out_keys: keys of the results; None for in place.
        shared_td: result of `build_td_for_shared_vecnorm`; None for statistics of this transform only.
        lock: no effect: shared statistics have their own lock.
        decay: factor of earlier values at each update, in (0, 1].
        eps: lower bound of the standard deviation.
        shapes: shape of the statistics for each key: the last dimensions of the entry. None for all dimensions except
            the batch dimensions.
        new_api: no effect; accepted for compatibility. See `VecNormV2`.

    Raises:
        InvalidTypeError: if `shared_td` is another object; at use, if an entry isn't floating-point.
        InvalidArgumentError: if `decay` or the number of `shapes` is wrong.
        MissingKeyError: if `shared_td` lacks one of `in_keys`; at use, if an entry is absent.

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(in_keys=["observation"]))
        >>> abs(env.rollout(100)["observation"].mean().item()) < 1
        True
    """

    on_rows = True
    on_host = False
    learns = True

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        shared_td: RunningSums | None = None,
        lock: Any = None,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shapes: Sequence[torch.Size] | None = None,
        new_api: bool | None = None,
    ) -> None:
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys)
        if shared_td is not None and not isinstance(shared_td, RunningSums):
            raise InvalidTypeError(
                f"shared_td: expected the result of VecNorm.build_td_for_shared_vecnorm, got {type(shared_td).__name__}"
            )
        if not 0.0 < decay <= 1.0:
            raise InvalidArgumentError(f"decay: expected a number in (0, 1], got {decay!r}")
        if shapes is not None and len(shapes) != len(self.in_keys):
            raise InvalidArgumentError(f"shapes: expected one for each of {self.in_keys}, got {shapes!r}")
        self.decay, self.eps = float(decay), float(eps)
        self.shapes = None if shapes is None else [torch.Size(shape) for shape in shapes]
        self.frozen = False
        # Whether only resets were counted since the transform was made; see `seeded`.
        self._untouched = shared_td is None
        self._sums = shared_td
        self._saved: Sums | None = None  # sums that were loaded before the shapes were known
        if shared_td is not None:
            missing = [key for key in self.in_keys if key not in shared_td.shapes]
            if missing:
                raise MissingKeyError(
                    f"shared_td: expected statistics for {missing}, got {list(shared_td.shapes)}; pass these keys "
                    "when building it"
                )

    @staticmethod
    def build_td_for_shared_vecnorm(
        env: Any, keys: Sequence[NestedKey] | None = None, memmap: bool = False
    ) -> RunningSums:
        """Return statistics that transforms in several processes can share.

        Pass the result as `shared_td` to the transform in each environment's factory. It can be pickled. Other
        processes must unpickle it while this process is running.

        Args:
            env: an environment with the same specs, or a factory of one, which is closed again.
            keys: entries to normalize; None for ``["observation", "reward"]``.
            memmap: no effect; accepted for compatibility.

        Raises:
            MissingKeyError: if a key is neither an observation nor a reward.
            InvalidTypeError: if an entry isn't floating-point.
        """
        made = env if is_environment(env) else env()
        found = as_keys("keys", list(keys) if keys is not None else ["observation", "reward"]) or []
        try:
            return RunningSums({key: _shape(made, key) for key in found}, shared=True)
        finally:
            if made is not env:
                made.close()

    def share_statistics(self) -> RunningSums:
        """Move the statistics to memory that other processes can share, and return them.

        The transform must be in an environment, have `shapes`, or have seen a batch; otherwise this raises
        `UnsupportedError`. Copies that are made later share the statistics.
        """
        before = self._statistics()
        if not before.shared:
            self._sums = before.copied(shared=True)
        return self._statistics()

    def use_statistics(self, sums: RunningSums) -> None:
        """Use the statistics that another transform's `share_statistics` returned, and drop the former ones."""
        self._sums, self._saved, self._untouched = sums, None, False

    # ----------------------------------------------------------------- hooks
    def shape_of(self, key: NestedKey, record: Record | None) -> torch.Size:
        """Return the shape of an entry's statistics, from the environment's spec or else from `record`.

        Raises:
            UnsupportedError: outside an environment, if `record` is None.
            InvalidTypeError: if the environment's entry isn't floating-point.
            MissingKeyError: if the environment has no such observation or reward.
        """
        if self.parent is not None:
            return _shape(self.parent, key)
        if record is None:
            raise UnsupportedError(
                "VecNorm: the shapes of the entries aren't known yet; call it on a batch first, or pass shapes"
            )
        return torch.Size(record.get(key).shape[len(record.batch_size) :])

    def _members(self, record: Record | None) -> torch.Size:
        """Return the batch dimensions of environments with separate statistics: none here."""
        return torch.Size()

    def _shapes(self, record: Record | None) -> dict[NestedKey, torch.Size]:
        """Return the shape of the statistics by key. Outside an environment these are the keys in `record`."""
        if self.shapes is not None:
            return dict(zip(self.in_keys, self.shapes, strict=True))
        keys = self.in_keys
        if self.parent is None and record is not None:
            keys = [key for key in keys if record.get(key, None) is not None]
        return {key: self.shape_of(key, record) for key in keys}

    def _statistics(self, record: Record | None = None) -> RunningSums:
        if self._sums is None:
            sums = RunningSums(self._shapes(record), members=self._members(record))
            if self._saved is not None:
                sums.adopt(sums.parse(self._saved))
            self._sums, self._saved = sums, None
        return self._sums

    def parts(self) -> dict[str, Stateful[Any]]:
        """Return the statistics, with whether they are frozen, as a part of the state."""
        return {"statistics": _Statistics(self)}

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        return self._normalise(next_tensordict, tensordict.get("_step", None))

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows = reset_rows(tensordict, self.parent.reset_keys)
        return self._normalise(tensordict_reset, rows, at_reset=True, required=False)

    def _call(self, tensordict: Record) -> Record:
        if all(tensordict.get(key, None) is None for key in self.in_keys):
            if self.in_keys and not self.missing_tolerance:
                raise missing_key(self, self.in_keys[0], tensordict)
            return tensordict
        return self._normalise(tensordict, None, required=False)

    def seeded(self) -> None:
        """Drop the values of resets before the first step: after seeding the environment is reset again.

        Shared statistics, or ones that have counted a step or were loaded, stay.
        """
        if self._untouched and self._sums is not None and not self._sums.shared:
            self._sums.clear()

    def _normalise(
        self, record: Record, rows: Tensor | None, at_reset: bool = False, required: bool = True
    ) -> Record:
        sums = self._statistics(record)
        if self._untouched and not at_reset:
            self._untouched = False
        for in_key, out_key in self.pairs():
            value = record.get(in_key, None)
            if value is None:
                if self.missing_tolerance or not required:
                    continue
                raise missing_key(self, in_key, record)
            if in_key not in sums.shapes:
                raise MissingKeyError(
                    f"{type(self).__name__}: {in_key!r} wasn't in the first batch, which determines the keys to "
                    "normalize; pass shapes"
                )
            if self.training and not self.frozen:
                sums.update(in_key, value, self.decay, rows)
            record.set(out_key, self._normalised(value, in_key))
        return record

    def _normalised(self, value: Tensor, key: NestedKey) -> Tensor:
        moments = self._statistics().moments(key)
        if moments is None:
            return value.clone()
        mean, deviation = moments[0], moments[1].sqrt().clamp_min(self.eps)
        return ((value - mean.to(value.device)) / deviation.to(value.device)).to(value.dtype)

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the statistics after a refused write to a buffer; see `Restorable`.

        It leaves shared statistics, which other processes update meanwhile.
        """
        sums, saved, untouched = self._sums, self._saved, self._untouched
        before = None if sums is None or sums.shared else sums.snapshot()

        def restore() -> None:
            self._sums, self._saved, self._untouched = sums, saved, untouched
            if sums is not None and before is not None:
                sums.adopt(before)

        return restore

    # ---------------------------------------------------------------- control
    def freeze(self) -> VecNorm:
        """Stop updates of the statistics; return the transform."""
        self.frozen = True
        return self

    def unfreeze(self) -> VecNorm:
        """Resume updates of the statistics; return the transform."""
        self.frozen = False
        return self

    def frozen_copy(self) -> Any:
        """Return a frozen copy with its own, unshared statistics, in no container. It is for an evaluation environment.

        Raises:
            UnsupportedError: if the shapes aren't known yet.
        """
        own, copy = self._statistics().copied(), self.clone()
        copy.use_statistics(own)
        return copy.freeze()

    @property
    def loc(self) -> TensorDict:
        """The means by key; keys without values are absent.

        They have the dtype of the observation if that is floating-point, else torch's default dtype.
        """
        return self._by_key(lambda mean, variance: mean)

    @property
    def scale(self) -> TensorDict:
        """The standard deviations by key, at least `eps`; dtype and keys as in `loc`."""
        return self._by_key(lambda mean, variance: variance.sqrt().clamp_min(self.eps))

    @property
    def initialized(self) -> bool:
        """Whether each key with statistics has had a value."""
        return all(self._statistics().moments(key) is not None for key, _ in self._followed())

    def _followed(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return the pairs of `in_keys` and `out_keys` with statistics."""
        return [pair for pair in self.pairs() if pair[0] in self._statistics().shapes]

    def _by_key(self, number: Callable[[Tensor, Tensor], Tensor]) -> TensorDict:
        found = TensorDict({}, [])
        for key, _ in self._followed():
            moments = self._statistics().moments(key)
            if moments is not None:
                found.set(key, number(*moments).to(self._dtype_of(key)))
        return found

    def _dtype_of(self, key: NestedKey) -> torch.dtype:
        """Return the dtype of an observation; torch's default for integers, rewards, and outside an environment."""
        spec = None if self.parent is None else self.parent.full_observation_spec.get(key, None)
        if spec is None or not spec.dtype.is_floating_point:
            return torch.get_default_dtype()
        return spec.dtype

    def to_observation_norm(self) -> ObservationNorm | Compose:
        """Return the current statistics as an `ObservationNorm`; for several keys, as a `Compose` of these.

        Raises:
            KeyError: if a key has no values yet.
        """
        loc, scale = self.loc, self.scale
        fixed = [
            ObservationNorm(
                loc=loc[in_key],
                scale=scale[in_key],
                in_keys=[in_key],
                out_keys=[out_key],
                standard_normal=True,
                eps=self.eps,
            )
            for in_key, out_key in self._followed()
        ]
        return fixed[0] if len(fixed) == 1 else Compose(*fixed)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        return Unbounded(spec.shape, device=spec.device, dtype=spec.dtype)

    def extra_repr(self) -> str:
        """Show decay, eps, the keys and whether the statistics are shared."""
        shared = self._sums is not None and self._sums.shared
        return f"decay={self.decay}, eps={self.eps}, in_keys={self.in_keys}, shared={shared}"


@dataclass(frozen=True)
class NormState:
    """The state of a `VecNorm`; `sums` is None while the shapes aren't known."""

    sums: Sums | None
    frozen: bool


class _Statistics(Stateful[NormState]):
    """The statistics of a `VecNorm` as a part of its state.

    They may be loaded before the shapes are known. They are then kept in `_saved`, and checked at the first use.
    """

    def __init__(self, norm: VecNorm) -> None:
        self._norm = norm

    def snapshot(self) -> NormState:
        sums, saved = self._norm._sums, self._norm._saved
        return NormState(saved if sums is None else sums.snapshot(), self._norm.frozen)

    def parse(self, state: Any) -> NormState:
        norm, reader = self._norm, StateReader(state, "VecNorm")
        known = norm._sums is not None or norm.shapes is not None or norm.parent is not None
        sums = reader.optional("sums", lambda name: checked_sums(reader.get(name)))
        if sums is not None and known:
            sums = norm._statistics().parse(sums)
        return NormState(sums, reader.flag("frozen"))

    def adopt(self, value: NormState) -> None:
        norm = self._norm
        norm.frozen, norm._untouched = value.frozen, value.sums is None
        if norm._sums is None:
            norm._saved = value.sums
        elif value.sums is not None:
            norm._sums.adopt(value.sums)
        else:
            norm._sums.clear()


def _shape(env: Env, key: NestedKey) -> torch.Size:
    """Return the shape of the entry at `key` without batch dimensions.

    Raises:
        InvalidTypeError: if the entry isn't floating-point.
        MissingKeyError: if the entry is neither an observation nor a reward.
    """
    for spec in (env.full_observation_spec, env.full_reward_spec):
        if key in spec.keys(True, True):
            leaf = spec[key]
            if not leaf.dtype.is_floating_point:
                raise InvalidTypeError(
                    f"VecNorm: key {as_key(as_path(key))!r} expected a floating-point dtype, got {leaf.dtype}; cast "
                    "it first"
                )
            return torch.Size(leaf.shape[len(env.batch_size) :])
    raise MissingKeyError(
        f"VecNorm: expected keys of observations or rewards of the environment, got {key!r}"
    )


_STATISTICS = ("_vecnorm_loc", "_vecnorm_var", "_vecnorm_count")


class VecNormV2(VecNorm):
    """`VecNorm` with separate statistics for each environment of a batch.

    Means and deviations are computed as by `VecNorm`. In a partial reset the statistics of other environments don't
    change.

    With ``stateful=False`` the root holds the statistics, and they restart with each episode. They are stored by entry
    in the groups ``"_vecnorm_loc"`` (mean), ``"_vecnorm_var"`` (variance) and ``"_vecnorm_count"`` (number of values,
    int64), each in the shape of the entry. Their keys begin with an underscore, so batches of rollouts leave them out.

    Args:
        in_keys: entries to normalize.
        out_keys: keys of the results; None for in place.
        lock: no effect.
        stateful: whether the transform holds the statistics; otherwise the root does.
        decay: see `VecNorm`.
        eps: lower bound of the standard deviation.
        shared_data: see `shared_td` of `VecNorm`.
        reduce_batch_dims: whether all environments of a batch share their statistics; needs `stateful`.

    Raises:
        UnsupportedError: if ``stateful=False`` is combined with `shared_data` or `reduce_batch_dims`, or used in a
            subclass.
    """

    def __new__(cls, *args: Any, stateful: bool = True, **options: Any) -> Any:
        """Return a `VecNormV2`, or with ``stateful=False`` an `_InRecords`."""
        return super().__new__(cls if stateful or cls is not VecNormV2 else _InRecords)

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys | None = None,
        *,
        lock: Any = None,
        stateful: bool = True,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shared_data: RunningSums | None = None,
        reduce_batch_dims: bool = False,
    ) -> None:
        if not stateful and (
            not isinstance(self, _InRecords) or shared_data is not None or reduce_batch_dims
        ):
            raise UnsupportedError(
                f"{type(self).__name__}: stateful=False goes without shared_data, reduce_batch_dims and subclasses, "
                "because each environment's records carry its statistics; leave them out"
            )
        super().__init__(in_keys, out_keys, shared_data, lock, decay, eps)
        self.stateful = bool(stateful)
        self.reduce_batch_dims = reduce_batch_dims

    def _members(self, record: Record | None) -> torch.Size:
        some: Any = record if self.parent is None else self.parent
        return torch.Size() if self.reduce_batch_dims else torch.Size(some.batch_size)


class _InRecords(VecNormV2, Following):
    """A `VecNormV2` with ``stateful=False``: its statistics are entries of the records.

    Each step reads them from the root and writes the updated ones into the outcome. `carried` keeps the latest, for
    roots that lack them.
    """

    on_rows = True

    def _statistics(self, record: Record | None = None) -> RunningSums:
        raise UnsupportedError(
            f"VecNormV2(stateful=False) keeps no statistics; read {', '.join(_STATISTICS)} in the records"
        )

    def _keys(self) -> list[NestedKey]:
        return [(name, *as_path(key)) for key in self.in_keys for name in _STATISTICS]

    def carries(self) -> dict[NestedKey, Field]:
        """Return fields of the statistics."""
        env = self.surroundings()
        found: list[Field] = []
        for key in self.in_keys:
            shape = torch.Size((*self._members(None), *self.shape_of(key, None)))
            leaf = (env.full_reward_spec if key in env.reward_keys else env.full_observation_spec)[key]
            found += [Field(shape, leaf.dtype), Field(shape, leaf.dtype), Field(shape, torch.int64)]
        return dict(zip(self._keys(), found, strict=True))

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for (in_key, out_key), keys in self._entries():
            value, before = next_tensordict.get(in_key), [self.last(tensordict, key) for key in keys]
            after = self._counted(value, *before)
            for key, statistic in zip(keys, after, strict=True):
                self.carried[key] = statistic
                next_tensordict.set(key, statistic)
            next_tensordict.set(out_key, self._scaled(value, *after))
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows, fields = self.reset_mask(tensordict), self.carries()
        for (in_key, out_key), keys in self._entries():
            value = tensordict_reset.get(in_key, None)  # a reset has no rewards
            statistics = [
                torch.zeros(fields[k].shape, dtype=fields[k].dtype, device=self.home()) for k in keys
            ]
            if value is not None:
                statistics = self._counted(value, *statistics)
                tensordict_reset.set(out_key, self._scaled(value, *statistics))
            for key, statistic in zip(keys, statistics, strict=True):
                mask = None if rows is None else trailing(rows, statistic)
                merged = self.renewed(key, statistic, mask, self.own(tensordict, key))
                tensordict_reset.set(key, merged)
        return tensordict_reset

    def _entries(self) -> list[tuple[tuple[NestedKey, NestedKey], list[NestedKey]]]:
        """Return the pair of keys of each entry, with the keys of its three statistics."""
        keys, count = self._keys(), len(_STATISTICS)
        return [(pair, keys[count * i : count * (i + 1)]) for i, pair in enumerate(self.pairs())]

    def _counted(self, value: Tensor, loc: Tensor, var: Tensor, count: Tensor) -> list[Tensor]:
        """Return mean, variance and count, updated by `value`.

        Each value has `decay` times the weight of the value after it. Frozen or in evaluation mode, nothing changes.
        """
        if self.frozen or not self.training:
            return [loc.clone(), var.clone(), count.clone()]
        count = count + 1
        n = count.double()  # 1 - decay**n needs more digits than float32 has
        weight = 1 / n if self.decay == 1.0 else (1 - self.decay) / (1 - self.decay**n)
        off = value.double() - loc
        mean, variance = loc + weight * off, (1 - weight) * (var + weight * off.square())
        return [mean.to(loc.dtype), variance.to(var.dtype), count]

    def _scaled(self, value: Tensor, loc: Tensor, var: Tensor, count: Tensor) -> Tensor:
        return torch.where(count > 0, (value - loc) / var.sqrt().clamp_min(self.eps), value)
