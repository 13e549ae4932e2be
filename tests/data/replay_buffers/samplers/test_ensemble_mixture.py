"""A mixture chooses the member of each part of a batch."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.replay_buffers.samplers.ensemble import Mixture
from gleanrl.errors import InvalidArgumentError, SchemaError, UnsupportedError


def shares(mixture: Mixture, draws: int = 4000) -> torch.Tensor:
    chosen = torch.cat([mixture.choose() for _ in range(draws // mixture.num_buffer_sampled)])
    return chosen.bincount(minlength=mixture.members).double() / len(chosen)


@pytest.mark.parametrize(
    "p, expected",
    [
        (None, [1 / 3, 1 / 3, 1 / 3]),
        ([1, 1, 2], [0.25, 0.25, 0.5]),
        ([0.0, 5.0, 0.0], [0, 1, 0]),
        (torch.tensor([0.9, 0.0, 0.1]), [0.9, 0, 0.1]),
        ([0, 1e-300, 1e-300], [0, 0.5, 0.5]),
    ],
)
def test_members_are_chosen_by_their_probability(p, expected):
    mixture = Mixture(3, p, num_buffer_sampled=4, seed=0)
    found = shares(mixture)
    expected = torch.tensor(expected, dtype=torch.float64)
    # The tolerance is five standard deviations. A share of 0 is never drawn.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all()
    assert mixture.p is None or torch.allclose(mixture.p, expected)


def test_sample_from_all_chooses_members_in_order():
    mixture = Mixture(3, sample_from_all=True)
    assert mixture.choose().tolist() == [0, 1, 2] and mixture.num_buffer_sampled == 3


def test_parts_are_equal():
    assert Mixture(3).share(12) == 4
    assert Mixture(3, num_buffer_sampled=2).share(12) == 6
    for size in (13, 0, -3):
        with pytest.raises(ValueError, match="a multiple of 3"):
            Mixture(3).share(size)


def test_mixture_among_some_members_keeps_their_shares():
    mixture = Mixture(3, [1, 2, 6], num_buffer_sampled=2)
    some = mixture.among([0, 2])
    assert torch.allclose(some.p, torch.tensor([1, 6], dtype=torch.float64) / 7)
    assert some.num_buffer_sampled == 2
    assert Mixture(3).among([1]).num_buffer_sampled == 1
    assert Mixture(3, sample_from_all=True, num_buffer_sampled=3).among([0, 1]).choose().tolist() == [0, 1]
    with pytest.raises(InvalidArgumentError, match="not all 0"):
        Mixture(2, [0, 1]).among([0])


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"p": [1, 2]}, InvalidArgumentError, "p: expected 3 numbers"),
        ({"p": [1, 2, -1]}, InvalidArgumentError, "p: "),
        ({"p": [0, 0, 0]}, InvalidArgumentError, "not all 0"),
        ({"p": [1, 2, float("nan")]}, InvalidArgumentError, "p: "),
        ({"p": [1, 2, float("inf")]}, InvalidArgumentError, "p: "),
        ({"p": "abc"}, InvalidArgumentError, "p: "),
        ({"p": [1, 1, 1], "sample_from_all": True}, UnsupportedError, "give one"),
        ({"num_buffer_sampled": 0}, InvalidArgumentError, "num_buffer_sampled"),
        ({"num_buffer_sampled": 1.5}, InvalidArgumentError, "num_buffer_sampled"),
        ({"num_buffer_sampled": True}, InvalidArgumentError, "num_buffer_sampled"),
        ({"num_buffer_sampled": 2, "sample_from_all": True}, InvalidArgumentError, "expected 3, because"),
    ],
)
def test_arguments_that_cant_work(options, error, message):
    with pytest.raises(error, match=message):
        Mixture(3, **options)


@pytest.mark.parametrize("p", [None, [1, 2, 3]])
def test_restored_mixture_continues_with_the_same_choices(p):
    mixture, other = Mixture(3, p, seed=1), Mixture(3, p, seed=2)
    mixture.choose()
    other.load_state_dict(mixture.state_dict())
    for _ in range(5):
        assert torch.equal(mixture.choose(), other.choose())
    for broken in ({}, None):
        with pytest.raises(SchemaError):
            other.load_state_dict(broken)
    assert torch.equal(mixture.choose(), other.choose())
    mixture.set_seed(7)
    again = Mixture(3, p, seed=7)
    assert torch.equal(mixture.choose(), again.choose())
