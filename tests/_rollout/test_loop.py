"""The loop alternates actor and stepper, stops when its callback says so, and leaves a correct count."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.loop import collect
from gleanrl._rollout.protocol import Stepper
from gleanrl.errors import PolicyError

T = 4


class Recorder:
    """Actor and stepper in one: records the calls, and raises `error` at the call `at`."""

    def __init__(self, ready: bool = False, at: Any = None, error: BaseException | None = None) -> None:
        self.ready, self.at, self.error = ready, at, error
        self.calls: list[Any] = []
        self.primed = [("next", "x")]
        self.seen: list[Any] | None = [("x",)]
        self.overwrites = False
        self.deferred: list[Any] = []
        self.wrong: Exception | None = None

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if call == self.at and self.error is not None:
            raise self.error

    def act(self, t: int) -> None:
        self.note("act", t)

    def step(self, t: int) -> None:
        self.note("step", t)

    def stop(self, num_steps: int) -> None:
        self.note("stop", num_steps)

    def confirm(self, num_steps: int) -> None:
        assert num_steps == self.calls[-1][-1] + (self.calls[-1][0] == "step")

    def defer(self, seen: Any) -> None:
        self.deferred.append(seen)

    def settle(self) -> None:
        self.deferred.append("settled")

    def run(self, block: Block) -> None:
        Stepper.run(self, block)  # type: ignore[arg-type]

    def bind(self, block: Block, *ready: Any) -> Any:
        self.note("bind", *ready[:1])
        assert ready[1:] == ((self.primed,) if ready else ())
        return None if self.ready else self.act

    def check(self) -> None:
        if self.wrong is not None:
            raise self.wrong


def make_block() -> Block:
    return Block(Schema({("done",): Field(torch.Size([1]), torch.bool)}), (), T)


def rows(stop: int, ready: bool) -> list[Any]:
    return [call for t in range(stop) for call in ([] if ready else [("act", t)]) + [("step", t)]]


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("watched", [False, True])
def test_whole_block_is_filled(ready: bool, watched: bool) -> None:
    part, block, seen = Recorder(ready), make_block(), []

    def stop(t: int) -> bool:
        seen.append((t, block.num_complete))
        return False

    assert collect(part, part, block, stop if watched else None) == T == block.num_complete
    assert part.calls == [("bind",), ("bind", ready), *rows(T, ready)]
    assert seen == ([(t, t + 1) for t in range(T)] if watched else [])


@pytest.mark.parametrize("error", [None, RuntimeError("act")], ids=["whole", "failed"])
def test_unwatched_rows_may_be_written_at_the_end(error: Exception | None) -> None:
    part, hidden, writing, watched = (Recorder(at=("act", 2), error=error) for _ in range(4))
    hidden.seen, writing.overwrites = None, True
    for actor, stop in ((part, None), (hidden, None), (writing, None), (watched, lambda t: False)):
        with contextlib.suppress(RuntimeError):
            collect(actor, actor, make_block(), stop)
    assert part.deferred == [[("x",)], "settled"]
    assert hidden.deferred == [None, "settled"]
    assert writing.deferred == watched.deferred == ["settled"]


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("last", range(T))
def test_stop_callback_ends_the_block(ready: bool, last: int) -> None:
    part, block = Recorder(ready), make_block()
    assert collect(part, part, block, lambda t: t == last) == last + 1 == block.num_complete
    ended = [("stop", last + 1)] if last < T - 1 else []  # a full block needs no early end
    assert part.calls[2:] == [*rows(last + 1, ready), *ended]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("at", "error", "whole"),
    [
        (("bind",), KeyError(), 0),
        (("bind", False), KeyError(), 0),
        (("act", 0), KeyError(), 0),
        (("act", 2), KeyError(), 2),
        (("step", 0), StepFault(0, 0, "step", KeyError()), 0),
        (("step", 2), StepFault(2, 0, "step", KeyError()), 2),
        (("step", 2), StepFault(2, 0, "reset", KeyError()), 3),
        (("step", 2), KeyboardInterrupt(), 2),
    ],
)
def test_failures_leave_the_count_of_whole_steps(
    at: Any, error: BaseException, whole: int, watched: bool
) -> None:
    part, block = Recorder(at=at, error=error), make_block()
    block.num_complete = 99
    with pytest.raises(type(error)) as caught:
        collect(part, part, block, (lambda t: False) if watched else None)
    assert caught.value is error and part.calls[-1] == at
    assert block.num_complete == whole


@pytest.mark.parametrize("error", [KeyError(), KeyboardInterrupt()])
def test_a_run_leaves_the_count_of_whole_steps(error: BaseException) -> None:
    part, block = Recorder(ready=True, at=("step", 2), error=error), make_block()
    with pytest.raises(type(error)):
        collect(part, part, block)
    assert block.num_complete == 2


def test_actions_that_changed_are_found_at_the_end_and_explain_a_fault() -> None:
    part, block = Recorder(), make_block()
    part.wrong = PolicyError("changed")
    for stop, count in ((None, T), (lambda t: t == 1, 2)):
        with pytest.raises(PolicyError, match="changed"):
            collect(part, part, block, stop)
        assert block.num_complete == count
    part.at, part.error = ("step", 2), StepFault(2, 0, "reset", KeyError(), [2, 3])
    with pytest.raises(StepFault) as caught:
        collect(part, part, block)
    assert (caught.value.cause, caught.value.made(2), block.num_complete) == (part.wrong, [2, 3], 3)


def test_a_stop_that_raises_leaves_its_step_whole() -> None:
    part, block = Recorder(), make_block()
    with pytest.raises(ZeroDivisionError):
        collect(part, part, block, lambda t: bool(1 // (2 - t)) and False)
    assert block.num_complete == 3


@pytest.mark.parametrize("stop", [None, lambda t: False])
def test_error_of_a_policy_is_the_cause_of_the_error_for_an_earlier_action(stop: Any) -> None:
    part = Recorder(at=("act", 2), error=KeyError("policy"))
    part.wrong = PolicyError("changed")
    with pytest.raises(PolicyError, match="changed") as caught:
        collect(part, part, make_block(), stop)
    assert caught.value.__cause__ is part.error


@pytest.mark.parametrize("error", [KeyError("policy"), StepFault(2, 0, "step", ValueError("env"))])
def test_check_that_fails_otherwise_keeps_the_error_of_the_block(error: Exception) -> None:
    part = Recorder(at=("act" if isinstance(error, KeyError) else "step", 2), error=error)
    part.wrong = ZeroDivisionError("check")
    with pytest.raises(type(error)) as caught:
        collect(part, part, make_block())
    assert caught.value is error
