"""One choice among n, as an integer (`Categorical`) or as a vector with a single one (`OneHot`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.data.specs.base import DeviceLike
from gleanrl.data.specs.choices import ChoiceSpace
from gleanrl.data.specs.encodings import ChoiceSpec, IntegerSpec, OneHotSpec, ending_with
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


def checked_count(name: str, n: Any) -> int:
    """Return `n` as an int.

    Raises:
        InvalidTypeError: if it isn't an integer.
        InvalidArgumentError: if it isn't positive.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise InvalidTypeError(f"{name}: expected an integer, got {n!r}")
    if n < 1:
        raise InvalidArgumentError(f"{name}: expected at least 1, got {n}")
    return int(n)


class _OneChoice(ChoiceSpec):
    @property
    def n(self) -> int:
        """The number of choices."""
        return int(self.space.n)

    def _describe(self) -> str:
        return f"n={self.n}" + ("" if self.mask is None else ", masked")


class Categorical(_OneChoice, IntegerSpec):
    """Integers from 0 to `n` (excluded).

    Examples:
        >>> spec = Categorical(3, mask=torch.tensor([False, True, False]))
        >>> spec.rand((4,))
        tensor([1, 1, 1, 1])

    Args:
        n: the number of choices, at least 1.
        shape: of one value; each element is a choice of its own.
        device: where values are drawn; None: torch's default device.
        dtype: integer or boolean; it must hold `n - 1`.
        mask: bool, expands to `(*shape, n)`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if `n` isn't positive or doesn't fit the dtype, or the mask doesn't fit.
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int = (),
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.long,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__(shape, ChoiceSpace(checked_count("n", n)), device, dtype)
        self.update_mask(mask)

    def _other_encoding(self) -> OneHot:
        return OneHot(self.n, (*self.shape, self.n), self.device, mask=self.mask)


class OneHot(_OneChoice, OneHotSpec):
    """Vectors of length `n` with a single one.

    `encode` takes integers, `to_numpy` gives integers: they are what environments use. `project` picks the
    largest element that the mask allows.

    Examples:
        >>> OneHot(3).encode(1)
        tensor([False,  True, False])

    Args:
        n: the number of choices, at least 1.
        shape: of one value, ending with `n`; None: `(n,)`.
        device: where values are drawn; None: torch's default device.
        dtype: any real dtype.
        mask: bool, expands to `shape`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if `n` isn't positive, or the shape or the mask doesn't fit.
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.bool,
        mask: Tensor | None = None,
    ) -> None:
        n = checked_count("n", n)
        super().__init__(ending_with("OneHot", n, shape), ChoiceSpace(n), device, dtype)
        self.update_mask(mask)

    def _other_encoding(self) -> Categorical:
        return Categorical(self.n, self.batch_shape, self.device, mask=self.mask)
