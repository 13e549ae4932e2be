"""Fixtures of the contract tests: collectors whose ledger of frames is checked after the test."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gleanrl.collectors import SyncDataCollector
from tests.contract.helpers import check_ledger


@pytest.fixture
def make_collector() -> Iterator[Callable[..., SyncDataCollector]]:
    """Create collectors; after the test, check that each one's ledger balances, and shut it down.

    Warnings about rounding are suppressed unless the test passes `quiet=False`.
    """
    made: list[SyncDataCollector] = []

    def make(env: Any, policy: Any = None, *, quiet: bool = True, **kwargs: Any) -> SyncDataCollector:
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            made.append(SyncDataCollector(env, policy, **kwargs))
        return made[-1]

    yield make
    for collector in made:
        check_ledger(collector)
        collector.shutdown()
        check_ledger(collector)
