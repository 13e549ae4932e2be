"""Buffers made of parts that lie side by side."""

from __future__ import annotations

import pytest

from gleanrl.data import ListStorage, RandomSampler, RoundRobinWriter, StorageEnsemble
from gleanrl.data.replay_buffers.members import assemble
from gleanrl.errors import InvalidArgumentError


def test_each_buffer_gets_its_parts():
    storages, samplers = [ListStorage(2), ListStorage(3)], [RandomSampler(), RandomSampler()]
    writers, collates = [RoundRobinWriter(), RoundRobinWriter()], [sum, None]
    held = StorageEnsemble(*storages, transforms=[None, lambda number: -number])
    buffers = assemble(held, samplers, writers, collates)
    for buffer, *parts in zip(buffers, storages, samplers, writers, strict=True):
        assert [buffer.storage, buffer.sampler, buffer.writer] == parts
        buffer.extend([5, 5])
    assert buffers[0].sample(2) == 10 and buffers[1].sample(2).tolist() == [-5, -5]


@pytest.mark.parametrize("name", ["samplers", "writers", "collate_fns"])
def test_parts_of_another_number(name):
    parts = {"samplers": [RandomSampler()], "writers": None, "collate_fns": None, name: []}
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected 1, one for each storage, got 0"):
        assemble([ListStorage(2)], **parts)


@pytest.mark.parametrize("missing", ["storages", "samplers"])
def test_parts_that_every_buffer_needs(missing):
    parts = {"storages": [ListStorage(2)], "samplers": [RandomSampler()], missing: None}
    with pytest.raises(InvalidArgumentError, match="storages= and samplers="):
        assemble(writers=None, collate_fns=None, **parts)
