"""Parsing a state changes nothing; only its adoption does."""

from __future__ import annotations

import pytest

from gleanrl.collectors import checkpoint
from gleanrl.errors import MissingKeyError, SchemaError
from tests.collectors.helpers import collect, collection
from tests.fakes_base import CountingEnv


def test_parsing_changes_nothing_and_adopting_continues() -> None:
    first, other = collection(CountingEnv()), collection(CountingEnv())
    collect(first)
    state = checkpoint.saved(first)
    before = other.snapshot()
    found = checkpoint.parse(other, state, strict=True)
    assert other.snapshot() is not before and other.counts == before.ledger
    calls: list[int] = []
    checkpoint.adopt(other, found, lambda: calls.append(1))
    assert other.counts.spent == first.counts.spent and calls == [1]


def test_missing_and_unknown_entries_are_named() -> None:
    made = collection(CountingEnv())
    state = checkpoint.saved(made)
    with pytest.raises(SchemaError, match="unexpected \\['more'\\]"):
        checkpoint.parse(made, {**state, "more": 1}, strict=True)
    del state["iter"]
    with pytest.raises(MissingKeyError, match="missing \\['iter'\\]"):
        checkpoint.parse(made, state, strict=True)
    assert checkpoint.parse(made, state, strict=False).value.ledger.batches == 0
