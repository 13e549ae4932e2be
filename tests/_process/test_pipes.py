"""Messages cross the pipes complete and in order."""

from __future__ import annotations

import os
import threading

import pytest

from gleanrl._os.clock import Deadline
from gleanrl._os.files import Descriptors, pipe
from gleanrl._process.pipes import (
    DONE,
    MESSAGE,
    ChannelClosed,
    ChannelFull,
    OwnerEnd,
    WorkerEnd,
    decode,
    encode,
)
from gleanrl.errors import WorkerError


@pytest.fixture
def held():
    """Own the descriptors of both ends."""
    owned = Descriptors()
    yield owned
    owned.close()


@pytest.fixture
def ends(held):
    """Return the owner's end and the worker's end."""
    (a, b), (c, d) = held.take(pipe()), held.take(pipe())
    return OwnerEnd(c, b), WorkerEnd(a, d)


def test_signals_and_messages_arrive_in_order(ends):
    owner, worker = ends
    os.write(owner.writing, b"s")
    owner.send(b"some bytes")
    owner.send(b"")
    assert worker.next_code() == b"s"
    assert (worker.next_code(), worker.message()) == (MESSAGE, b"some bytes")
    assert (worker.next_code(), worker.message()) == (MESSAGE, b"")


def test_answers_are_complete_for_every_fragmentation(ends):
    owner, worker = ends
    worker.send(b"first")
    os.write(worker.writing, DONE)
    worker.send(b"")
    owner.pull()
    stream = b"".join(owner.inbox)
    expected = [(MESSAGE, b"first"), (DONE, b""), (MESSAGE, b"")]
    for size in range(1, len(stream) + 1):
        owner.inbox.clear()
        taken = []
        for begin in range(0, len(stream), size):
            owner.inbox.append(stream[begin : begin + size])
            while (answer := owner.take()) is not None:
                taken.append(answer)
        assert taken == expected and owner.inbox == []
    assert owner.take() is None


def test_messages_longer_than_the_pipe_are_sent_in_pieces(ends):
    owner, worker = ends
    data = bytes(range(256)) * 40_000

    def echo():
        worker.next_code()
        worker.send(worker.message())

    thread = threading.Thread(target=echo)
    thread.start()
    owner.send(data, Deadline(30))
    while (answer := owner.take()) is None:
        owner.pull()
    thread.join()
    assert answer == (MESSAGE, data)


def test_full_pipe_without_a_reader_raises(ends):
    owner, _ = ends
    with pytest.raises(ChannelFull):
        owner.send(bytes(1 << 20), Deadline(0.0))


def test_messages_before_the_end_are_received(ends, held):
    owner, worker = ends
    os.write(worker.writing, DONE + MESSAGE + (100).to_bytes(8, "little") + b"half")
    owner.pull()
    held.close(worker.reading, worker.writing)
    owner.pull()
    assert owner.take() == (DONE, b"")
    assert owner.has_ended
    with pytest.raises(ChannelClosed):
        owner.take()


def test_closed_other_end_raises(ends, held):
    owner, worker = ends
    held.close(worker.reading, worker.writing)
    with pytest.raises(ChannelClosed):
        owner.send(b"x")
    (a, b), (c, d) = held.take(pipe()), held.take(pipe())
    lonely = WorkerEnd(a, d)
    held.close(b, c)
    with pytest.raises(ChannelClosed):
        lonely.next_code()
    with pytest.raises(ChannelClosed):
        lonely.message()
    with pytest.raises(ChannelClosed):
        lonely.send(b"x")


def test_values_are_sent_by_value():
    number = 4
    assert decode(encode(lambda: number))() == 4
    with pytest.raises(WorkerError, match="can't be sent"):
        encode(threading.Lock())
