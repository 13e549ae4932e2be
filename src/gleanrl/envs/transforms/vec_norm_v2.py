"""`VecNormV2`: `VecNorm` for each environment by itself, its statistics in the transform or in the records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gleanrl.envs.transforms.following import Following
from gleanrl.envs.transforms.keys import Keys
from gleanrl.envs.transforms.rows import Record, trailing
from gleanrl.envs.transforms.statistics import RunningSums
from gleanrl.envs.transforms.vec_norm import VecNorm
from gleanrl.errors import UnsupportedError
from gleanrl.schema import Field
from gleanrl.tree import NestedKey, as_path

_STATISTICS = ("_vecnorm_loc", "_vecnorm_var", "_vecnorm_count")


class VecNormV2(VecNorm):
    """`VecNorm` whose statistics are for each environment of a batch by itself, unless they are put together.

    Mean and deviation are those of `VecNorm`. Where only some environments are reset, the others' statistics stay as
    they are.

    Args:
        in_keys: what to normalise.
        out_keys: where the results stand; None for in place.
        lock: no effect.
        stateful: whether the statistics are the transform's own. Otherwise `step` goes by those in the root that it is
            given, and they begin anew with each episode: below ``"_vecnorm_loc"``, ``"_vecnorm_var"`` and
            ``"_vecnorm_count"`` stand the mean, the variance and the number (int64) of the values so far, in the shape
            of each entry. As all keys that begin with an underscore they are left out of the batches of rollouts.
        decay: see `VecNorm`.
        eps: the least standard deviation.
        shared_data: see `shared_td` of `VecNorm`.
        reduce_batch_dims: whether the environments of a batch have one statistic; needs `stateful`.

    Raises:
        UnsupportedError: options of shared statistics without `stateful`.
    """

    def __new__(cls, *args: Any, stateful: bool = True, **options: Any) -> Any:
        """Make the one that keeps statistics, or the one that leaves them in the records."""
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
                f"{type(self).__name__}: stateful=False goes without shared_data and reduce_batch_dims, and without "
                "a subclass: each environment's records carry its statistics"
            )
        super().__init__(in_keys, out_keys, shared_data, lock, decay, eps)
        self.stateful = bool(stateful)
        self.reduce_batch_dims = reduce_batch_dims

    def _members(self, record: Record | None) -> torch.Size:
        some: Any = record if self.parent is None else self.parent
        return torch.Size() if self.reduce_batch_dims else torch.Size(some.batch_size)


class _InRecords(VecNormV2, Following):
    """A `VecNormV2` whose statistics are what the root says, and nothing else."""

    on_rows = True

    def _statistics(self, record: Record | None = None) -> RunningSums:
        raise UnsupportedError(
            f"VecNormV2(stateful=False) keeps no statistics: read {', '.join(_STATISTICS)} of the records"
        )

    def _keys(self) -> list[NestedKey]:
        return [(name, *as_path(key)) for key in self.in_keys for name in _STATISTICS]

    def carries(self) -> dict[NestedKey, Field]:
        """Return the statistics."""
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
        rows, fields = self.asked(tensordict), self.carries()
        for (in_key, out_key), keys in self._entries():
            value = tensordict_reset.get(in_key, None)  # rewards aren't there
            fresh = [torch.zeros(fields[k].shape, dtype=fields[k].dtype, device=self.home()) for k in keys]
            if value is not None:
                fresh = self._counted(value, *fresh)
                tensordict_reset.set(out_key, self._scaled(value, *fresh))
            for key, statistic in zip(keys, fresh, strict=True):
                mask = None if rows is None else trailing(rows, statistic)
                kept = self.renewed(key, statistic, mask, self.own(tensordict, key))
                tensordict_reset.set(key, kept)
        return tensordict_reset

    def _entries(self) -> list[tuple[tuple[NestedKey, NestedKey], list[NestedKey]]]:
        """Return input and result of each entry, with its three statistics."""
        keys, count = self._keys(), len(_STATISTICS)
        return [(pair, keys[count * i : count * (i + 1)]) for i, pair in enumerate(self.pairs())]

    def _counted(self, value: Tensor, loc: Tensor, var: Tensor, count: Tensor) -> list[Tensor]:
        """Return mean, variance and number with `value` counted, every earlier one `decay` times less than the next."""
        if self.frozen or not self.training:
            return [loc.clone(), var.clone(), count.clone()]
        count = count + 1
        n = count.double()  # 1 - 0.9999 ** n needs more digits than float32 has
        weight = 1 / n if self.decay == 1.0 else (1 - self.decay) / (1 - self.decay**n)
        off = value.double() - loc
        mean, variance = loc + weight * off, (1 - weight) * (var + weight * off.square())
        return [mean.to(loc.dtype), variance.to(var.dtype), count]

    def _scaled(self, value: Tensor, loc: Tensor, var: Tensor, count: Tensor) -> Tensor:
        return torch.where(count > 0, (value - loc) / var.sqrt().clamp_min(self.eps), value)
