"""Errors of rules about data name the place. `test_env.py` shows that each rule detects its violation."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import Bounded, Unbounded
from gleanrl.errors import ConformanceError
from gleanrl.testing.env import as_declared, flags
from gleanrl.testing.runs import Runs, Subject
from tests.fakes_marl import SurvivorEnv
from tests.testing.broken import Walk

SPECS = {("a",): Unbounded((2,)), ("b", "c"): Bounded(-1.0, 1.0, (1,))}
GOOD = {("a",): torch.zeros(2), ("b", "c"): torch.zeros(1)}


def check(leaves: dict[tuple[str, ...], torch.Tensor], *besides: tuple[str, ...]) -> None:
    as_declared("specs", "step 3", leaves, SPECS, besides)  # type: ignore[arg-type]


def test_declared_leaves_pass() -> None:
    check(GOOD)
    check({**GOOD, ("more",): torch.zeros(1)}, ("more",))


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({("a",): torch.zeros(2)}, r"step 3: expected the keys .* got no"),
        ({**GOOD, ("more",): torch.zeros(1)}, r"got \['more'\] in addition"),
        (
            {**GOOD, ("a",): torch.zeros(3)},
            r"'a' of step 3: expected \(2,\) torch.float32, got \(3,\) torch.float32",
        ),
        ({**GOOD, ("a",): torch.zeros(2, dtype=torch.int64)}, "got .* torch.int64"),
        (
            {**GOOD, ("b", "c"): torch.ones(1) * 2},
            r"\('b', 'c'\) of step 3: expected a value of .*, got \[2.0\]",
        ),
    ],
)
def test_undeclared_leaves_raise(leaves: dict[tuple[str, ...], torch.Tensor], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check(leaves)


def test_flags_of_every_group_are_looked_at() -> None:
    class Undead(SurvivorEnv):
        def _step(self, tensordict):  # type: ignore[no-untyped-def]
            out = super()._step(tensordict)
            out["blue", "done"] = ~out["blue", "terminated"]
            return out

    flags(Runs(Subject(SurvivorEnv(batch_size=(2,)), 10), 0))
    with pytest.raises(ConformanceError, match=r"\('blue', 'done'\) of step 0"):
        flags(Runs(Subject(Undead(batch_size=(2,)), 10), 0))


def test_done_after_a_reset_may_be_meant() -> None:
    class Late(Walk):
        def _reset(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super()._reset(*args, **kwargs).set("terminated", self.shaped(torch.ones(self.rows) > 0))

    flags(Runs(Subject(Late(allow_done_after_reset=True), 3), 0))
