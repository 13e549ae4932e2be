"""One table of leaf specs for the tests of shared behaviour, and two composites."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gleanrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    StackedComposite,
    TensorSpec,
    Unbounded,
    UnboundedDiscrete,
)

INF = float("inf")
INT64 = torch.iinfo(torch.int64)


def bools(text: str) -> torch.Tensor:
    """Read a mask from ones and zeros; spaces separate rows."""
    rows = [[c == "1" for c in row] for row in text.split()]
    return torch.tensor(rows if len(rows) > 1 else rows[0])


def plain() -> Composite:
    """Return a composite with a group, an empty group and an empty entry."""
    return Composite({"x": Unbounded((2, 3)), "y": None}, a={"b": Categorical(3, (2,)), "c": {}}, shape=(2,))


def stacked() -> StackedComposite:
    """Return a stack of two such composites, one of which has an additional entry."""
    return StackedComposite(
        Composite({"x": Unbounded((3,)), "y": None}, a={"b": Categorical(3), "c": {}}, only=Unbounded()),
        Composite({"x": Bounded(0, 1, (3,)), "y": None}, a={"b": Categorical(4), "c": {}}),
    )


# Each function makes a fresh spec.
LEAVES: dict[str, Callable[[], TensorSpec]] = {
    "bounded": lambda: Bounded(-2, 2, (1,)),
    "bounded scalar": lambda: Bounded(0.1, 0.3),
    "bounded by element": lambda: Bounded(torch.tensor([[-1.0, 0.0], [5.0, -9.0]]), torch.tensor([9.0, 6.0])),
    "bounded half open": lambda: Bounded(torch.tensor([-INF, 0, -INF, 1]), torch.tensor([0, INF, INF, 1])),
    "bounded huge": lambda: Bounded(-3e38, 3e38, (2,)),
    "bounded double": lambda: Bounded(-1e308, 1e308, (2, 1), dtype=torch.float64),
    "bounded half": lambda: Bounded(-6e4, 6e4, (3,), dtype=torch.float16),
    "bounded uint8": lambda: Bounded(0, 255, (2, 3), dtype=torch.uint8),
    "bounded int8": lambda: Bounded(-128, 127, (3,), dtype=torch.int8),
    "bounded uint16": lambda: Bounded(7, 65535, (3,), dtype=torch.uint16),
    "bounded uint32": lambda: Bounded(torch.tensor([0, 1]), 2**32 - 1, dtype=torch.uint32),
    "bounded int64": lambda: Bounded(INT64.min, INT64.max, (3,), dtype=torch.int64),
    "bounded int by element": lambda: Bounded(
        torch.tensor([INT64.min, 0, INT64.min, 3]), torch.tensor([INT64.max, 3, 1, 3]), dtype=torch.int64
    ),
    "unbounded": lambda: Unbounded((3,)),
    "unbounded scalar": lambda: Unbounded((), dtype=torch.float64),
    "unbounded int": lambda: UnboundedDiscrete((2,)),
    "unbounded uint8": lambda: Unbounded((2,), dtype=torch.uint8),
    "unbounded bool": lambda: Unbounded((2, 2), dtype=torch.bool),
    "one-hot": lambda: OneHot(3),
    "one-hot of one": lambda: OneHot(1),
    "one-hot batch": lambda: OneHot(3, (2, 1, 3), dtype=torch.int64),
    "one-hot masked": lambda: OneHot(4, (2, 4), dtype=torch.float32, mask=bools("1001 0100")),
    "categorical": lambda: Categorical(5),
    "categorical batch": lambda: Categorical(4, (2, 1), dtype=torch.int32),
    "categorical bool": lambda: Categorical(2, (1,), dtype=torch.bool),
    "categorical masked": lambda: Categorical(3, (2,), mask=bools("101 010")),
    "multi-categorical": lambda: MultiCategorical([3, 1, 4]),
    "multi-categorical batch": lambda: MultiCategorical([3, 2], (4, 2), dtype=torch.uint8),
    "multi-categorical varying": lambda: MultiCategorical([[3, 2], [1, 5]]),
    "multi-categorical masked": lambda: MultiCategorical([3, 2], (2, 2), mask=bools("10101 01111")),
    "multi-one-hot": lambda: MultiOneHot([3, 1, 2]),
    "multi-one-hot batch": lambda: MultiOneHot([2, 3], (2, 5), dtype=torch.uint8),
    "multi-one-hot masked": lambda: MultiOneHot([2, 3], mask=bools("10110")),
    "binary": lambda: Binary(4),
    "binary scalar": lambda: Binary(shape=()),
    "binary bool": lambda: Binary(shape=(2, 1), dtype=torch.bool),
    "stacked": lambda: torch.stack([Bounded(0, 1, (2,)), Bounded(5, 7, (2,))]),
    "stacked last": lambda: torch.stack([OneHot(3, (2, 3)), OneHot(3, (2, 3), mask=bools("011"))], 1),
}

COMPOSITES: dict[str, Callable[[], TensorSpec]] = {
    "empty": lambda: Composite(),
    "flat": lambda: Composite(x=Bounded(-1, 1, (3,)), action=OneHot(3), unspecified=None),
    "nested": lambda: Composite(
        a={"b": Categorical(3, (2,)), "c": {"d": Bounded(0, 1, (2, 3))}}, e=Binary(shape=(2, 4)), shape=(2,)
    ),
    "with a stack": lambda: Composite(
        a=torch.stack([Bounded(0, 1, (2,)), Bounded(5, 7, (2,))]), text=NonTensor((2,)), shape=(2,)
    ),
    "stacked": lambda: torch.stack(
        [Composite(x=Bounded(0, 1, (2,))), Composite(x=Bounded(2, 3, (2,)), y=Categorical(2))]
    ),
}
