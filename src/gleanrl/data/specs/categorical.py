"""One choice among n, as an integer (`Categorical`) or as a vector with a single one (`OneHot`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.data.specs.base import DeviceLike
from gleanrl.data.specs.choices import CategoricalBox, ChoiceSpace
from gleanrl.data.specs.encodings import ChoiceSpec, IntegerSpec, OneHotSpec, ending_with, refuse_register
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


def checked_count(name: str, n: Any) -> int:
    """Return `n` as an int.

    Raises:
        InvalidTypeError: if it isn't an integer.
        InvalidArgumentError: if it is negative.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise InvalidTypeError(f"{name}: expected an integer, got {n!r}")
    if n < 0:
        raise InvalidArgumentError(f"{name}: expected at least 0, got {n}")
    return int(n)


class _OneChoice(ChoiceSpec):
    @property
    def n(self) -> int:
        """The number of choices."""
        return int(self._known.n)

    def _describe(self) -> str:
        return f"n={self.space.n}" + ("" if self.mask is None else ", masked")


class Categorical(_OneChoice, IntegerSpec):
    """Integers from 0 to `n` (excluded).

    With `n=-1` the number of choices isn't fixed: any integer from 0 is in the domain, and what needs the number raises
    until `set_provisional_n` has set it.

    Examples:
        >>> spec = Categorical(3, mask=torch.tensor([False, True, False]))
        >>> spec.rand((4,))
        tensor([1, 1, 1, 1])

    Args:
        n: the number of choices; -1 for any, 0 for a domain without values, from which nothing can be drawn.
        shape: of one value; each element is a choice of its own. None: `()`.
        device: where values are drawn; None: torch's default device.
        dtype: any real dtype that holds `n - 1`.
        mask: bool, expands to `(*shape, n)`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if `n` is negative or doesn't fit the dtype, or the mask doesn't fit.
    """

    _provisional: CategoricalBox | None = None

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = (),
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.long,
        mask: Tensor | None = None,
    ) -> None:
        count = -1 if n == -1 else checked_count("n", n)
        super().__init__(() if shape is None else shape, CategoricalBox(count), device, dtype)
        self.update_mask(mask)

    def set_provisional_n(self, n: int) -> None:
        """Set how many choices `rand`, `enumerate` and `to_one_hot` have; for specs made with -1.

        Raises:
            InvalidArgumentError: if `n` is negative.
        """
        self.require_own("set_provisional_n")
        self._provisional = CategoricalBox(checked_count("n", n))

    @property
    def _known(self) -> ChoiceSpace:
        if self.space.n != -1:
            return self.space
        if self._provisional is None:
            raise UnsupportedError("n: the number of choices isn't fixed; call set_provisional_n first")
        return self._provisional

    def update_mask(self, mask: Tensor | None) -> None:
        """Set which choices are allowed, in this object; see `ChoiceSpec.update_mask`."""
        if mask is not None and self.space.n == -1:
            raise InvalidArgumentError("mask: a mask needs a fixed number of choices, got n=-1")
        super().update_mask(mask)

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
        n: the number of choices; 0 for a domain without values, from which nothing can be drawn.
        shape: of one value, ending with `n`; None: `(n,)`.
        device: where values are drawn; None: torch's default device.
        dtype: any real dtype.
        use_register: must be False: choices are integers, never other values in the order of their coming.
        mask: bool, expands to `shape`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if `n` is negative, or the shape or the mask doesn't fit.
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        refuse_register(use_register)
        n = checked_count("n", n)
        super().__init__(ending_with("OneHot", n, shape), CategoricalBox(n), device, dtype)
        self.update_mask(mask)

    def _other_encoding(self) -> Categorical:
        return Categorical(self.n, self.batch_shape, self.device, mask=self.mask)
