"""`FiniteTensorDictCheck`: no NaN, no infinity."""

from __future__ import annotations

import torch

from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.rows import Record, leaf_keys
from gleanrl.errors import NonFiniteError


class FiniteTensorDictCheck(Transform):
    """Raises where a number that comes out of an environment or a buffer, or goes in, is NaN or infinite.

    A collector checks its batches by itself, once a batch, which costs less.

    Raises:
        NonFiniteError: it names the keys (also a ValueError).
    """

    on_rows = True
    on_host = True

    def _call(self, tensordict: Record) -> Record:
        bad = [key for key in leaf_keys(tensordict) if _is_bad(tensordict.get(key))]
        if bad:
            raise NonFiniteError(f"FiniteTensorDictCheck: NaN or infinity under {bad}")
        return tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._call(tensordict_reset)


def check_finite(value: torch.Tensor) -> None:
    """Raise if a number is NaN or infinite.

    Raises:
        NonFiniteError: if one is (also a ValueError).
    """
    if _is_bad(value):
        raise NonFiniteError("check_finite: NaN or infinity")


def _is_bad(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    return not bool(value.isfinite().all())
