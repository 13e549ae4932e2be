"""Orders and answers cross pipes within one process, and a wait covers pipes and Ray together."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gleanrl._os import clock
from gleanrl._os.files import Descriptors
from gleanrl.collectors.distributed.local_transport import Arrivals, Line, Message, NodeEnd


class Actor:
    """Imitates a Ray actor handle and records the calls of `attend`."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any]] = []

    @property
    def attend(self) -> Actor:
        return self

    def remote(self, attendance: int, weights: Any) -> str:
        self.asked.append((attendance, weights))
        return f"attendance {attendance}"


@pytest.fixture
def ends() -> tuple[NodeEnd, Line]:
    node = NodeEnd()
    return node, Line(Descriptors(), os.getpid(), node.names)


def test_node_attends_until_it_is_ordered_to_leave(ends):
    (node, line), actor = ends, Actor()
    line.attend(actor, "weights")
    line.attend(actor, "weights")
    line.attend(actor)
    assert actor.asked == [(1, "weights")] and line.attendance == "attendance 1"
    tickets = [line.send_order("first"), line.send_order("second")]
    assert line.leave() == line.leave() == 2
    later = line.send_order("third")
    for message in node.attend(1):
        node.answer(Message(message.ticket, message.value.upper()))
    line.pull()
    found = []
    while (message := line.first()) is not None:
        assert line.first() == message, "until it's dropped"
        found.append(message)
        line.drop()
    assert found == [Message(tickets[0], "FIRST"), Message(tickets[1], "SECOND")]
    assert [*node.attend(1)] == [], "it was ended before it began"
    assert [*node.orders_before(3)] == [Message(later, "third")] and [*node.orders_before(3)] == []
    line.attend(actor)
    assert actor.asked[1:] == [(2, "weights")], "those that it was given last"


def test_orders_and_calls_of_ray_keep_their_sequence(ends):
    (node, line), actor = ends, Actor()
    line.attend(actor, None)
    line.send_order("before")
    count = line.leave()
    line.attend(actor)
    line.send_order("after")
    assert [message.value for message in node.orders_before(count)] == ["before"]
    assert [*node.orders_before(count)] == []
    assert [*node.attend(1)] == [], "the call of Ray was in between"
    line.leave()
    assert [message.value for message in node.attend(2)] == ["after"]


def test_new_weights_start_another_attendance(ends):
    (node, line), actor = ends, Actor()
    line.attend(actor, "old")
    before = line.send_order("with the old ones")
    line.attend(actor, "new")
    after = line.send_order("with the new ones")
    assert actor.asked == [(1, "old"), (2, "new")]
    assert [message.ticket for message in node.attend(1)] == [before]
    line.leave()
    assert [message.ticket for message in node.attend(2)] == [after]


def test_unrecorded_attendance_ends_with_the_next_one(ends):
    node, line = ends

    class Interrupted(Actor):
        def remote(self, attendance: int, weights: Any) -> str:
            super().remote(attendance, weights)
            raise KeyboardInterrupt

    actor = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        line.attend(actor, "weights")
    actor = Actor()
    line.attend(actor, "weights")
    line.send_order("order")
    line.leave()
    assert [*node.attend(1)] == [], "it finds that it's to leave"
    assert [message.value for message in node.attend(2)] == ["order"]


def test_a_node_leaves_by_itself_after_a_while_and_when_its_owner_ends(ends):
    (node, line), actor = ends, Actor()
    line.attend(actor, None)
    line.send_order("order")
    fake = clock.FakeClock()
    with clock.use(fake):
        orders = node.attend(1)
        assert next(orders).value == "order"
        line.send_order("left in the pipe")
        fake.advance(10.0)
        assert [*orders] == []
    assert [message.value for message in node.orders_before(2)] == ["left in the pipe"]
    line.ended()
    line.attend(actor)
    assert actor.asked == [(1, None), (2, None)]


def test_unpicklable_answer_leaves_the_pipe_empty(ends):
    node, line = ends
    with pytest.raises(TypeError):
        node.answer(Message(0, Unsendable()))
    node.answer(Message(1, "whole"))
    line.pull()
    assert line.first() == Message(1, "whole")


class Unsendable:
    """Can't be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def test_line_ends_with_its_node():
    node = NodeEnd()
    line = Line(Descriptors(), os.getpid(), node.names)
    node.answer(Message(0, "last words"))
    assert [*node.orders_before(1)] == []
    names = node.names
    del node
    line.send_order("to nobody")
    line.pull()
    assert line.first() == Message(0, "last words")
    line.drop()
    line.pull()
    assert line.first() is None
    with pytest.raises(OSError):
        Line(Descriptors(), os.getpid(), names)


def test_references_and_answers_are_waited_for_at_once(ray_session):
    node = NodeEnd()
    line, arrivals = Line(Descriptors(), os.getpid(), node.names), Arrivals(ray_session)
    pending, there = ray_session.remote(num_cpus=0, max_retries=0)(wait).remote(), ray_session.put(1)
    assert arrivals.wait([line], [pending, there], None) == [there]
    assert arrivals.wait([line], [pending, there], None) == [there], "for as long as it's asked for"
    node.answer(Message(0, "answer"))
    while line.first() is None:
        assert arrivals.wait([line], [pending], 10.0) == []
    assert arrivals.wait([], [pending, there], None) == [there]
    assert arrivals.wait([line], [pending], 0.0) == []
    ray_session.cancel(pending, force=True)
    while not (found := arrivals.wait([line], [pending], None)):
        pass  # it may wake up early
    assert found == [pending], "one that failed is there as well"


def wait() -> None:
    """Wait for ever."""
    clock.sleep(1e6)
