"""`check_storage` accepts right storages, and each rule detects a violation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.data.replay_buffers import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
)
from gleanrl.errors import ConformanceError, InvalidArgumentError, InvalidTypeError
from gleanrl.testing import check_storage
from gleanrl.testing.storage import RULES, numbered


def objects(start: int, count: int) -> list[int]:
    return [*range(start, start + count)]


def tree(start: int, count: int) -> dict[str, Any]:
    n = torch.arange(start, start + count)
    return {"n": n, "deep": (n[:, None].repeat(1, 2).bfloat16(),)}


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage, CompressedListStorage])
@pytest.mark.parametrize("records", [numbered, tree, objects])
def test_library_storages_pass_all_rules(kind, records):
    if records is objects and not issubclass(kind, ListStorage):
        pytest.skip("only a list storage keeps objects")
    report = check_storage(lambda: kind(9), records=records)
    assert report.passed == tuple(RULES) and report.name == kind.__name__


class Holding(ListStorage):
    """Isn't empty at first."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.set(0, [1])


class Straight(ListStorage):
    """Doesn't wrap at its end."""

    def _copy_span(self, rows: list[Any], skipped: int, start: int, count: int) -> None:
        super()._copy_span(rows, skipped, start, min(count, self.max_size - start))


class Lending(LazyTensorStorage):
    """Returns its own memory."""

    def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
        whole = self.get(slice(None))
        return whole[: len(slots)] if slots.tolist() == [*range(len(slots))] else super().fetch(slots, paths)


class FirstWins(ListStorage):
    """Keeps the first of several records for one slot."""

    def _copy_slots(self, rows: list[Any], slots: torch.Tensor) -> None:
        super()._copy_slots(rows[::-1], slots.flip(0))


class Silent(ListStorage):
    """Doesn't report changes."""

    def changed_since(self, version: Any) -> Any:
        return []


class Lasting(ListStorage):
    """Ignores `clear`."""

    def clear(self) -> None:
        """Do nothing."""


class Tolerant(ListStorage):
    """Accepts any data."""

    def prepare(self, data: Any, **options: Any) -> Any:
        return super().prepare(data if data is not None and len(data) else [0], **options)


class Trusting(ListStorage):
    """Accepts any state."""

    def parse(self, state: Any) -> Any:
        return super().parse({**super().state_dict(), **state})


class Shallow(LazyTensorStorage):
    """Shares its columns with its copies."""

    def __deepcopy__(self, memo: Any) -> Any:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other


class Shifted(ListStorage):
    """Reads with an index that is off by one."""

    def fetch(self, slots: torch.Tensor, paths: Any = None) -> list[Any]:
        return super().fetch(slots)

    def get(self, index: Any) -> Any:
        return super().get(index - 1 if isinstance(index, int) else index)


BROKEN: dict[str, type[Storage]] = {
    "empty": Holding,
    "ring": Straight,
    "memory": Lending,
    "slots": FirstWins,
    "versions": Silent,
    "clear": Lasting,
    "refusal": Tolerant,
    "state": Trusting,
    "copies": Shallow,
    "served": Shifted,
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_detects_its_violation(rule):
    broken = BROKEN[rule]
    with pytest.raises(ConformanceError, match=f"rule '{rule}'"):
        check_storage(lambda: broken(8), skip=set(RULES) - {rule})


def test_invalid_arguments_raise():
    with pytest.raises(InvalidArgumentError, match="expected names of .*, got .'x'."):
        check_storage(lambda: ListStorage(8), skip=["x"])
    with pytest.raises(InvalidArgumentError, match="ndim=1 for 5"):
        check_storage(lambda: ListStorage(4))
    with pytest.raises(InvalidTypeError, match="expected it to return a Storage"):
        check_storage(lambda: None)
    assert dict(check_storage(lambda: ListStorage(8), skip=["ring"]).skipped) == {
        "ring": "left out by the caller"
    }
