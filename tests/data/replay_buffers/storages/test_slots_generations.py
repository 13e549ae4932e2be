"""Counters of slots take their memory at the first write, and grow with the storage."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from gleanrl.data.replay_buffers.storages.slots import Generations


def test_memory_is_taken_when_a_counter_is_needed():
    generations = Generations()
    assert generations.of_all().tolist() == [0] and generations.at == 0, "nobody knows how many there are"
    generations.resize(5)
    assert generations.counters is None and generations.at == 0
    counters = generations.of_all()
    assert counters.tolist() == [0] * 5 and counters.dtype == torch.int64
    assert generations.of_all(5) is counters and generations.at == counters.data_ptr()


@pytest.mark.parametrize("size", [None, 5000])
def test_counters_stay_when_the_memory_grows(size):
    generations = Generations()
    generations.resize(None)
    generations.of_all(3)[:3] = torch.tensor([1, 2, 3])
    generations.resize(size)
    grown = generations.of_all(5000)
    assert len(grown) >= 5000 and grown.sum() == 6 and grown[:3].tolist() == [1, 2, 3]
    assert generations.at == grown.data_ptr()


def test_given_memory_is_counted_in():
    given = torch.tensor([4, 0])
    assert Generations(given).of_all(2) is given
    generations = Generations()
    generations.hold(given)
    assert generations.at == given.data_ptr()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_count_for_themselves(copied):
    generations = Generations(torch.tensor([4, 0]))
    other = copied(generations)
    other.of_all()[0] += 1
    assert other.at == other.counters.data_ptr() != generations.at
    assert other.of_all().tolist() == [5, 0] and generations.of_all().tolist() == [4, 0]
    assert copied(Generations()).at == 0


def test_counters_of_slots_that_were_emptied():
    generations = Generations(torch.tensor([3, 2, 2, 1, 0, 0, 0]))
    for rows, left in ((0, [3, 2, 2, 1]), (3, [1]), (4, []), (7, [])):
        assert generations.vacated(rows).tolist() == left
    left = generations.vacated(2)
    generations.of_all()[2] += 1
    assert left.tolist() == [2, 1], "a copy"
    assert Generations().vacated(0).tolist() == []
