"""Options of a collection are checked, and interruptors cut batches."""

from __future__ import annotations

from typing import Any

import pytest

from gleanrl.collectors.source import CollectionOptions, stop_of
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"nonfinite": "drop"}, "nonfinite: .*'drop'"),
        ({"exploration_type": "random"}, "exploration_type: .*'random'"),
    ],
)
def test_unknown_choices_are_refused(choice: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        CollectionOptions(**choice)


def test_interruptor_is_asked_whether_to_stop() -> None:
    class Interruptor:
        def collection_stopped(self) -> bool:
            return True

    stop = stop_of(Interruptor())
    assert stop is not None and stop(0) and stop_of(None) is None
    with pytest.raises(InvalidTypeError, match="interruptor: .* got int"):
        stop_of(3)
