"""`VecNorm`: normalisation by running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gleanrl.data.specs import TensorSpec, Unbounded
from gleanrl.envs.transforms.compose import Compose
from gleanrl.envs.transforms.keys import Keys, as_keys, missing_key
from gleanrl.envs.transforms.mapping import EntryTransform
from gleanrl.envs.transforms.normalization import ObservationNorm
from gleanrl.envs.transforms.rows import Record, reset_rows
from gleanrl.envs.transforms.statistics import RunningSums, Sums, checked_sums
from gleanrl.envs.vector.factories import is_environment
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, UnsupportedError
from gleanrl.rollouts.traits import Env
from gleanrl.state import Stateful, StateReader
from gleanrl.tree import NestedKey, as_key, as_path


class VecNorm(EntryTransform):
    """Normalises entries by the mean and deviation of what has come so far, this one included.

    Each element of an entry has its own statistics, over all environments of the batch and all steps and resets. In
    evaluation mode, or frozen, the statistics stay as they are; nothing is normalised before the first update.
    Resets before the first step are forgotten when the environment is seeded: those of collectors that are made come
    before `set_seed`. What is shared keeps them. Environments that a step leaves out (``"_step"``) aren't counted.

    As a module or in a buffer it normalises those entries that a batch has. Without `shapes` the first batch says what
    there are.

    Statistics are shared between processes by `shared_td`: every copy of the transform, in whatever process, then adds
    to the same numbers. A process that dies holds nobody up.

    Args:
        in_keys: what to normalise; None for ``["observation", "reward"]``.
        out_keys: where the results stand; None for in place.
        shared_td: what `build_td_for_shared_vecnorm` returned.
        lock: no effect: what is shared has a lock of its own.
        decay: by what the past is weighted down at each update, in (0, 1].
        eps: the least standard deviation.
        shapes: for each key the shape of its statistics, the last dimensions of the entry; None for all but the batch
            dimensions.
        new_api: no effect: there is one way here, see `VecNormV2`.

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
                f"shared_td: expected what VecNorm.build_td_for_shared_vecnorm returns, got {type(shared_td).__name__}"
            )
        if not 0.0 < decay <= 1.0:
            raise InvalidArgumentError(f"decay: expected a number in (0, 1], got {decay!r}")
        if shapes is not None and len(shapes) != len(self.in_keys):
            raise InvalidArgumentError(f"shapes: expected one for each of {self.in_keys}, got {shapes!r}")
        self.decay, self.eps = float(decay), float(eps)
        self.shapes = None if shapes is None else [torch.Size(shape) for shape in shapes]
        self.frozen = False
        # Whether nothing but resets was counted, since the transform was made.
        self._untouched = shared_td is None
        self._sums = shared_td
        self._saved: Sums | None = None  # what was loaded before the shapes were known
        if shared_td is not None:
            missing = [key for key in self.in_keys if key not in shared_td.shapes]
            if missing:
                raise MissingKeyError(f"shared_td: nothing for {missing}; it has {list(shared_td.shapes)}")

    @staticmethod
    def build_td_for_shared_vecnorm(
        env: Any, keys: Sequence[NestedKey] | None = None, memmap: bool = False
    ) -> RunningSums:
        """Return statistics to be shared by transforms in several processes.

        Pass the result as `shared_td` to the transform in each environment's factory; it can be pickled, and is opened
        by other processes while this one lives.

        Args:
            env: an environment like those that are to be normalised, or its factory.
            keys: what is normalised; None for ``["observation", "reward"]``.
            memmap: no effect; accepted for compatibility.
        """
        made = env if is_environment(env) else env()
        found = as_keys("keys", list(keys) if keys is not None else ["observation", "reward"]) or []
        try:
            return RunningSums({key: _shape(made, key) for key in found}, shared=True)
        finally:
            if made is not env:
                made.close()

    def share_statistics(self) -> RunningSums:
        """Keep the statistics in memory that other processes can share, from now on; return them.

        The transform is in an environment, or knows the shapes of what it normalises.
        """
        before = self._statistics()
        if not before.shared:
            self._sums = before.copied(shared=True)
        return self._statistics()

    def use_statistics(self, sums: RunningSums) -> None:
        """Use the statistics that another transform's `share_statistics` returned."""
        self._sums, self._saved, self._untouched = sums, None, False

    # ----------------------------------------------------------------- hooks
    def shape_of(self, key: NestedKey, record: Record | None) -> torch.Size:
        """Return the shape of an entry's statistics: as the environment declares it, or as it comes."""
        if self.parent is not None:
            return _shape(self.parent, key)
        if record is None:
            raise UnsupportedError("VecNorm: nothing is known of the entries yet; call it on a batch first")
        return torch.Size(record.get(key).shape[len(record.batch_size) :])

    def _members(self, record: Record | None) -> torch.Size:
        """Return the batch dimensions of environments with statistics of their own: none, all have the same."""
        return torch.Size()

    def _shapes(self, record: Record | None) -> dict[NestedKey, torch.Size]:
        """Return the shape of every entry's statistics; where nobody declares them, of those that came."""
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
        """Return the statistics, and whether they are frozen."""
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
        """Forget resets that came before everything else: they are drawn anew."""
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
                    f"{type(self).__name__}: {in_key!r} wasn't in the first batch, which said what there is to "
                    "normalise; give shapes"
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

    # ---------------------------------------------------------------- control
    def freeze(self) -> VecNorm:
        """Leave the statistics as they are from now on; returns the transform."""
        self.frozen = True
        return self

    def unfreeze(self) -> VecNorm:
        """Go on with updates; returns the transform."""
        self.frozen = False
        return self

    def frozen_copy(self) -> Any:
        """Return a copy with statistics of its own, which stay as they are now: for an environment to evaluate in."""
        own, copy = self._statistics().copied(), self.clone()
        copy.use_statistics(own)
        return copy.freeze()

    @property
    def loc(self) -> TensorDict:
        """The means by key, of what was seen; in the dtype of the observations."""
        return self._by_key(lambda mean, variance: mean)

    @property
    def scale(self) -> TensorDict:
        """The standard deviations by key, at least `eps`; in the dtype of the observations."""
        return self._by_key(lambda mean, variance: variance.sqrt().clamp_min(self.eps))

    @property
    def initialized(self) -> bool:
        """Whether something was seen at every key that there is."""
        return all(self._statistics().moments(key) is not None for key, _ in self._followed())

    def _followed(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return the pairs of keys that there are statistics for."""
        return [pair for pair in self.pairs() if pair[0] in self._statistics().shapes]

    def _by_key(self, number: Callable[[Tensor, Tensor], Tensor]) -> TensorDict:
        found = TensorDict({}, [])
        for key, _ in self._followed():
            moments = self._statistics().moments(key)
            if moments is not None:
                found.set(key, number(*moments).to(self._dtype_of(key)))
        return found

    def _dtype_of(self, key: NestedKey) -> torch.dtype:
        """Return the dtype of what is observed at a key; outside an environment, and of integers, torch's default."""
        spec = None if self.parent is None else self.parent.full_observation_spec.get(key, None)
        if spec is None or not spec.dtype.is_floating_point:
            return torch.get_default_dtype()
        return spec.dtype

    def to_observation_norm(self) -> ObservationNorm | Compose:
        """Return the present statistics as a fixed `ObservationNorm`, for several keys as a `Compose` of them."""
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
        """Show the numbers and the keys."""
        shared = self._sums is not None and self._sums.shared
        return f"decay={self.decay}, eps={self.eps}, in_keys={self.in_keys}, shared={shared}"


@dataclass(frozen=True)
class NormState:
    """What a `VecNorm` lives by; `sums` is None as long as nothing is known of them."""

    sums: Sums | None
    frozen: bool


class _Statistics(Stateful[NormState]):
    """The statistics of a `VecNorm`, which may be loaded before its environment says how large they are."""

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
    """Return the shape of the entry at `key` without batch dimensions."""
    for spec in (env.full_observation_spec, env.full_reward_spec):
        if key in spec.keys(True, True):
            leaf = spec[key]
            if not leaf.dtype.is_floating_point:
                raise InvalidTypeError(
                    f"VecNorm: {as_key(as_path(key))!r} has dtype {leaf.dtype}; cast it first"
                )
            return torch.Size(leaf.shape[len(env.batch_size) :])
    raise MissingKeyError(f"VecNorm: {key!r} is neither an observation nor a reward of the environment")
