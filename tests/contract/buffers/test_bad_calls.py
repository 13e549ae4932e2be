"""About a thousand invalid calls are rejected with a typed error that names the mistake, and change nothing."""

from __future__ import annotations

import warnings

import pytest

from gleanrl.errors import GleanError
from tests.contract.buffers.bad_calls import SUBJECTS, Bad, names, state
from tests.contract.buffers.bad_constructors import CONSTRUCTORS
from tests.contract.buffers.bad_more import MORE_CALLS, MORE_CONSTRUCTORS
from tests.contract.buffers.bad_reads import CALLS
from tests.contract.buffers.bad_writes import WRITES

MADE = [*CONSTRUCTORS, *MORE_CONSTRUCTORS]
CALLED = [*WRITES, *CALLS, *MORE_CALLS]


def refused(row: Bad, subject: object = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(row.error, match=f"(?s){row.match}") as caught:
            row.call(subject)
    assert isinstance(caught.value, GleanError), f"not of our family: {caught.value!r}"
    assert len(str(caught.value)) > 20, "a message says what was expected, what came and what to do"


@pytest.mark.parametrize("row", MADE, ids=names(MADE))
def test_bad_constructor_arguments_are_refused(row: Bad) -> None:
    refused(row)


@pytest.mark.parametrize("row", CALLED, ids=names(CALLED))
def test_calls_that_change_nothing(row: Bad) -> None:
    buffer = SUBJECTS[row.subject]()
    before = state(buffer)
    refused(row, buffer)
    assert state(buffer) == before
    buffer.sample()


def test_tables_have_at_least_a_thousand_calls() -> None:
    assert len(MADE) + len(CALLED) >= 1000
