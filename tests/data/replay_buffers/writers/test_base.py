"""All writers share this behaviour."""

from __future__ import annotations

import pytest

from gleanrl.data.replay_buffers import LazyTensorStorage, RoundRobinWriter
from gleanrl.data.replay_buffers.storages.base import Prepared
from gleanrl.errors import UnsupportedError


def test_writer_without_a_storage_raises():
    with pytest.raises(UnsupportedError, match="has no storage"):
        RoundRobinWriter().place(Prepared(None, 1))


def test_a_writer_writes_to_the_storage_registered_last():
    first, second = LazyTensorStorage(3), LazyTensorStorage(5)
    writer = RoundRobinWriter()
    writer.register_storage(first)
    writer.register_storage(second)
    assert writer.storage is second
    assert writer.place(Prepared(None, 1)).capacity == 5
