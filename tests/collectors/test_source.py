"""A collector and its source follow one protocol for budgets."""

from __future__ import annotations

from gleanrl.collectors.source import Budget, BudgetSpent
from gleanrl.errors import GleanError
from tests.collectors.helpers import SCRIPT, collection
from tests.fakes_base import CountingEnv


def test_more_is_true_while_the_budget_grants_frames() -> None:
    source, budget = collection(CountingEnv(SCRIPT)), Budget(1, 4, 8)
    for _ in range(2):
        assert source.more(budget)
        collected = source.next(budget)
        assert source.deliver(collected, collected.batch) is collected.batch
    assert not source.more(budget) and source.more(Budget(1, 4, -1)) and source.steady


def test_the_end_of_the_budget_is_no_error_of_the_users() -> None:
    assert not issubclass(BudgetSpent, GleanError)
