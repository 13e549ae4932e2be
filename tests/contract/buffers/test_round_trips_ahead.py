"""Copies of prefetching buffers continue with the same batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.buffers.test_round_trips import KINDS, alike, go_on, used


@pytest.mark.parametrize("prefetch", [2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))], ids=["copy", "pickle"]
)
def test_copies_of_prefetching_buffers_continue_with_the_same_batches(
    copier: Callable[[Any], Any], kind: str, prefetch: int | None
) -> None:
    buffer, tape = used(kind, prefetch=prefetch)
    other = copier(buffer)
    assert other.stats() == buffer.stats()
    alike(go_on(buffer, tape, kind), go_on(other, tape, kind))
