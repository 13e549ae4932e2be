"""`check_sampler` accepts right samplers, and each rule detects a violation."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.replay_buffers import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
)
from gleanrl.errors import ConformanceError, InvalidArgumentError, InvalidTypeError
from gleanrl.testing import check_sampler
from gleanrl.testing.sampler import RULES

OURS = {
    "RandomSampler": RandomSampler,
    "SamplerWithoutReplacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "PrioritizedSampler": lambda: PrioritizedSampler(24, 0.7, 0.5),
    "SliceSampler": lambda: SliceSampler(slice_len=4),
    "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "PrioritizedSliceSampler": lambda: PrioritizedSliceSampler(24, 0.7, 0.5, slice_len=4),
    "ConsumingSampler": lambda: ConsumingSampler(1000),
    "StalenessAwareSampler": lambda: StalenessAwareSampler(version_key="episode"),
}


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_library_samplers_pass_all_rules(make):
    assert check_sampler(make).passed == tuple(RULES)


class Untamed(Sampler):
    """Draws slots outside the stored rows."""

    def _draw(self, storage, batch_size):
        return RandomSampler._draw(RandomSampler(0), storage, batch_size)._replace(
            slots=self.random.integers(storage.max_size, batch_size)
        )


class Sharing(Sampler):
    """Returns its internal order."""

    def __init__(self):
        super().__init__()
        self.order = None

    def sample(self, storage, batch_size):
        if self.order is None:
            self.order = self.random.permutation(len(storage))
        return self.order[:batch_size] % len(storage), {"order": self.order[:batch_size]}


class Global(Sampler):
    """Draws from the global generator."""

    def sample(self, storage, batch_size):
        return torch.randint(len(storage), (batch_size,)), {}


class Counting(Sampler):
    """Counts draws, and its state lacks the count."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def sample(self, storage, batch_size):
        self.count += 1
        return (torch.arange(batch_size) + self.count) % len(storage), {}


class Forward(SamplerWithoutReplacement):
    """Never returns to an earlier place, except by loading a state."""

    def draw_position(self):
        return super().draw_position()._replace(running=None)

    def adopt(self, value):
        if value.running is not None:
            super().adopt(value)


class Stubborn(RandomSampler):
    """Keeps overwritten rows in a draw, with their old generations."""

    def _redraw(self, storage, draw, stale):
        return draw


class Remembering(RandomSampler):
    """Draws from the number of rows at its last notice or first draw."""

    size = None

    def follow(self, storage):
        self.size = len(storage)

    def _draw(self, storage, batch_size):
        self.size = self.size or len(storage)
        return super()._draw(storage, batch_size)._replace(slots=self.random.integers(self.size, batch_size))


class Trusting(RandomSampler):
    """Accepts any state."""

    def parse(self, state):
        try:
            return super().parse(state)
        except Exception:
            return self.snapshot()


BROKEN = [
    (Untamed, "stored"),
    (Sharing, "aliasing"),
    (Global, "seed"),
    (Counting, "state"),
    (Forward, "place"),
    (Stubborn, "redraw"),
    (Remembering, "behind its back"),
    (Trusting, "failed load"),
]


@pytest.mark.parametrize(("make", "rule"), BROKEN, ids=lambda part: getattr(part, "__name__", part))
def test_each_rule_detects_its_violation(make, rule):
    earlier = list(RULES)[: list(RULES).index(rule)]
    with pytest.raises(ConformanceError) as caught:
        check_sampler(make, skip=earlier)
    assert caught.value.rule == rule


def test_every_rule_has_a_violation():
    assert [rule for _, rule in BROKEN] == list(RULES)


def test_invalid_arguments_raise():
    with pytest.raises(InvalidTypeError, match="expected it to return a Sampler"):
        check_sampler(lambda: 3)
    with pytest.raises(InvalidArgumentError, match="expected names of"):
        check_sampler(RandomSampler, skip=["nothing"])
