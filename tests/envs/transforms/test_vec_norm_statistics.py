"""Running statistics keep exact moments, decay old values, and can be shared."""

from __future__ import annotations

import copy
import pickle

import torch

from gleanrl.envs.transforms.vec_norm import RunningSums

SHAPES = {"a": torch.Size((2,)), ("b", "c"): torch.Size(())}


def test_moments_without_decay_are_exact():
    sums = RunningSums(SHAPES)
    assert sums.moments("a") is None
    values = torch.randn(50, 2)
    for rows in values.split(7):
        sums.update("a", rows, 1.0)
    mean, variance = sums.moments("a")
    assert torch.allclose(mean, values.double().mean(0))
    assert torch.allclose(variance, values.double().var(0, unbiased=False))
    assert sums.moments(("b", "c")) is None


def test_decay_weighs_old_values_down():
    sums = RunningSums({"a": torch.Size()})
    sums.update("a", torch.tensor(0.0), 0.5)
    sums.update("a", torch.tensor(3.0), 0.5)
    mean, variance = sums.moments("a")
    assert float(mean) == 2
    assert float(variance) == 2


def test_large_means_keep_their_differences():
    sums = RunningSums({"a": torch.Size()})
    sums.update("a", torch.tensor([1e6 - 1, 1e6 + 1], dtype=torch.float64), 1.0)
    assert float(sums.moments("a")[1]) == 1


def test_members_have_separate_sums():
    sums = RunningSums({"a": torch.Size((2,))}, members=torch.Size((3,)))
    values, rows = torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, True])
    sums.update("a", values, 0.5, rows)
    mean, variance = sums.moments("a")
    assert mean.tolist() == [[0, 1], [0, 0], [4, 5]] and variance.tolist() == [[0, 0], [1, 1], [0, 0]]
    sums.update("a", values + 3, 0.5, ~rows)
    sums.update("a", values + 3, 0.5)
    alone = RunningSums({"a": torch.Size((2,))})
    for add in (0, 3):
        alone.update("a", values[2:] + add, 0.5)
    for mine, wanted in zip(sums.moments("a"), alone.moments("a"), strict=True):
        assert torch.equal(mine[2], wanted)
    assert sums.moments("a")[0][1].tolist() == [5, 6], "seen twice"
    for share in (False, True):
        copied = sums.copied(shared=share)
        copied.load_state_dict(sums.state_dict())
        assert torch.equal(copied.moments("a")[1], sums.moments("a")[1])


def test_copies_are_independent_unless_shared():
    for share in (False, True):
        one = RunningSums(SHAPES, shared=share)
        one.update("a", torch.ones(1, 2), 1.0)
        copies = [copy.deepcopy(one)] + ([pickle.loads(pickle.dumps(one))] if share else [])
        for other in copies:
            other.update("a", torch.full((1, 2), 3.0), 1.0)
        assert float(one.moments("a")[0][0]) == (7 / 3 if share else 1)


def test_state_is_a_copy():
    one, other = RunningSums(SHAPES), RunningSums(SHAPES)
    one.update("a", torch.ones(1, 2), 1.0)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.moments("a")[0], one.moments("a")[0])
    one.update("a", torch.ones(1, 2) * 5, 1.0)
    assert float(other.moments("a")[0][0]) == 1
