"""All workers of one collector need equal specs."""

from __future__ import annotations

import pytest

from gleanrl.errors import SchemaError
from tests.collectors.workers.crews import Stream, collecting


def test_workers_that_differ_are_named() -> None:
    with (
        pytest.raises(SchemaError, match="worker 1"),
        collecting("sync", [Stream(0), Stream(0, batch_size=(2,))]),
    ):
        pass
