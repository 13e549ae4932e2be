"""Descriptors are closed by their owner, once."""

from __future__ import annotations

import os
import socket

import pytest

from gleanrl._os.files import Descriptors, memory, pipe, pipe_of, sent_over
from tests.leaks import Holdings


@pytest.fixture(autouse=True)
def nothing_left():
    before = Holdings.now()
    yield
    before.check()


def test_descriptors_are_closed_once_and_with_their_owner():
    held = Descriptors()
    reading, writing = held.take(pipe())
    (kept,) = held.take(memory("kept"))
    os.write(writing, b"x")
    assert os.read(reading, 1) == b"x"
    held.close(writing, reading)
    held.close(writing, 12345)
    with pytest.raises(OSError):
        os.fstat(writing)
    assert os.fstat(kept).st_size == 0
    del held
    with pytest.raises(OSError):
        os.fstat(kept)


def test_pipe_ends_when_the_last_process_closes_it():
    held, own = Descriptors(), Descriptors()
    reading, writing = held.take(pipe())
    (far,) = own.take(pipe_of(os.getpid(), writing, os.O_WRONLY))
    os.write(far, b"x")
    held.close(writing)
    assert os.read(reading, 2) == b"x"
    own.close()
    assert os.read(reading, 1) == b""
    with pytest.raises(OSError):
        own.take(pipe_of(os.getpid(), writing, os.O_RDONLY))


def test_sent_descriptor_is_received_as_a_copy():
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held = Descriptors()
    reading, writing = held.take(pipe())
    socket.send_fds(mine, [b"hello"], [reading])
    mine.send(b"you")
    packet = bytearray(5)
    (copy,) = held.take(sent_over(theirs, packet))
    assert packet == b"hello" and os.path.sameopenfile(copy, reading) and not os.get_inheritable(copy)
    assert held.take(sent_over(theirs, packet)) == [] and packet == b"youlo"
    for link in (mine, theirs):
        link.close()
