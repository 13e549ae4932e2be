"""`check_writer` accepts right writers, and each rule detects a violation."""

from __future__ import annotations

import pytest
import torch

from gleanrl._arrays.results import Selection
from gleanrl.data.replay_buffers import (
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
from gleanrl.errors import ConformanceError, InvalidArgumentError, InvalidTypeError
from gleanrl.testing import check_writer
from gleanrl.testing.writer import RULES


@pytest.mark.parametrize("make", [RoundRobinWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter])
def test_library_writers_pass_all_rules(make):
    assert check_writer(make).passed == tuple(RULES)


class Restless(RoundRobinWriter):
    """Moves its position whenever it is called."""

    asked = 0

    def place(self, prepared):
        self.asked += 1
        return super().place(prepared)._replace(start=self.asked % 2)


class Lying(TensorDictMaxValueWriter):
    """Returns an index that doesn't match the records."""

    def place(self, prepared):
        placed = super().place(prepared)
        return placed._replace(returned=placed.returned.flip(0))


class Counting(Writer):
    """Keeps a private position."""

    position = 0

    def place(self, prepared):
        self.position = max(self.position, len(self.storage))
        kept = min(10 - self.position, prepared.num_steps)
        slots = torch.arange(self.position, self.position + kept)
        returned = torch.full((prepared.num_steps,), -1)
        returned[:kept] = slots
        return Selection(torch.arange(kept), slots, returned, self.position + kept)


class Forgetful(RoundRobinWriter):
    """Chooses slots by a value that its state lacks."""

    def __init__(self):
        super().__init__()
        self.began = None

    def place(self, prepared):
        self.began = len(self.storage) if self.began is None else self.began
        if len(self.storage) < 10 or self.began:
            return super().place(prepared)
        kept = min(10, prepared.num_steps)
        returned = torch.full((prepared.num_steps,), -1)
        returned[:kept] = torch.arange(kept)
        return Selection(torch.arange(kept), torch.arange(kept), returned, 10)


class Careless(RoundRobinWriter):
    """Accepts any state."""

    def parse(self, state, stored=None):
        return super().parse(state if isinstance(state, dict) else {"cursor": self.cursor}, stored)


BROKEN = {
    "place": Restless,
    "index": Lying,
    "behind its back": Counting,
    "state": Forgetful,
    "failed load": Careless,
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_detects_its_violation(rule):
    with pytest.raises(ConformanceError) as error:
        check_writer(BROKEN[rule], skip=[name for name in RULES if name != rule])
    assert error.value.rule == rule


def test_invalid_arguments_raise():
    with pytest.raises(InvalidTypeError, match="make"):
        check_writer(lambda: 3)
    with pytest.raises(InvalidArgumentError, match="expected names of"):
        check_writer(RoundRobinWriter, skip=["nothing"])


class Familiar(Writer):
    """A ring with the protocol of other releases."""

    cursor = 0

    def _taken(self, count):
        steps = (self.cursor + torch.arange(count)) % 10
        self.cursor = int(steps[-1] + 1) % 10
        return steps

    def add(self, data):
        (step,) = self._taken(1).tolist()
        self._storage.set(step, data)
        return step

    def extend(self, data):
        steps = self._taken(len(data))[-10:]
        self._storage.set(steps, data[-10:])
        return steps

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state):
        self.cursor = state["cursor"]


class Elsewhere(Familiar):
    """Returns another index."""

    def extend(self, data):
        return super().extend(data).flip(0)


def test_writer_of_another_release_passes_the_applicable_rules():
    report = check_writer(Familiar)
    assert report.passed == ("index", "state") and "by itself" in report.skipped["place"]
    with pytest.raises(ConformanceError, match="index"):
        check_writer(Elsewhere)
