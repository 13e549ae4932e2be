"""Asynchronous nodes make one batch each: exact budgets, unbroken trajectories, one copy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gleanrl.collectors.source import Budget
from gleanrl.errors import UnsupportedError
from tests.collectors.distributed.helpers import FATAL, check_rows, rows
from tests.fakes import FakeFailure


def mapped(what: str) -> list[tuple[int, int]]:
    """Return the begin and end addresses of this process's mappings of files with `what` in their name."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if what in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in (line.split()[0].split("-") for line in lines)]


def test_budgets_are_met_to_the_frame(apart):
    source = apart.source
    apart.reset()  # discards the frames that nodes collected ahead for other tests
    spent, batches = source.spent, []
    budget = Budget(1, 20, spent + 100, spent + 40)  # spent is a multiple of 20
    while source.more(budget):
        collected = source.next(budget)
        assert collected.part == (int(collected.batch["observation"][0, 0]), 2)
        batches.append(source.deliver(collected, collected.batch))
    assert source.spent == spent + 100
    assert [batch.shape for batch in batches] == [(20,)] * 5
    check_rows(batches)
    random = [len(batch["action"].unique()) > 1 for batch in batches]
    assert sum(random) == 2
    with pytest.raises(UnsupportedError, match="rollout"):
        source.collect(budget.extra_grant())


def test_viewed_batch_is_not_copied_and_delivered_batch_is_copied_once(apart):
    def stands_in(batch: Any, what: str) -> bool:
        place = batch["observation"].data_ptr()
        return any(begin <= place < end for begin, end in mapped(what))

    source, seen = apart.source, set[str]()

    def look() -> bool:
        collected = source.next(Budget(1, 20), lend=True)
        kind = "memfd:gleanrl" if collected.part[0] == 0 else "plasma"
        assert stands_in(collected.batch, kind)
        check_rows([collected.batch])
        source.deliver(collected, collected.batch)
        seen.add(kind)
        return len(seen) == 2

    until(look)
    for _ in range(4):
        batch = apart.next()
        assert not stands_in(batch, "memfd:gleanrl") and not stands_in(batch, "plasma")
        batch["observation"] += 1  # the batch belongs to the user


def test_exception_of_an_environment_is_raised_and_other_nodes_continue(apart):
    ledger = apart.stats
    before = ledger()
    apart.policy.become(FATAL)
    apart.update_policy_weights_()
    with pytest.raises(FakeFailure, match="broke on purpose"):
        until(lambda: apart.next() is None)
    apart.policy.become(1.0)
    apart.update_policy_weights_()
    batches: list = []

    def both_are_well() -> bool:
        try:
            batches.append(apart.next())
        except FakeFailure:  # raised by the other node
            return False
        return {0, 1} <= set(rows([batch for batch in batches if batch["action"].unique().tolist() == [1.0]]))

    until(both_are_well)
    after = ledger()
    assert after.stepped == after.delivered + after.discarded
    assert after.delivered > before.delivered


def test_undelivered_batch_and_its_successors_are_discarded(apart):
    source, before = apart.source, apart.stats().discarded
    collected = source.next(Budget(1, 20))
    (number,) = {int(collected.batch["observation"][0, 0])}
    source.lose("postproc")
    assert apart.stats().discarded >= before + 20
    batches: list = []
    until(lambda: batches.append(apart.next()) or number in rows(batches))
    check_rows(batches)
    first = rows(batches)[number][0]
    assert first[1] == 0 and first[2] not in collected.batch["collector", "traj_ids"].tolist()


def until(there: Callable[[], bool], most: int = 200) -> None:
    """Call a function until it returns True."""
    for number in count():
        if there():
            return
        assert number < most
