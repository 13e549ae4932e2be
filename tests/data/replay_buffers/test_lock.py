"""The lock of a buffer is reentrant, can be shared and copied, and is free in forked processes."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Callable

import torch

from gleanrl._os import clock
from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
from gleanrl.data.replay_buffers.lock import BufferLock


def test_lock_is_reentrant():
    gate = BufferLock()
    with gate.lock, gate.lock:
        pass


def test_a_shared_gate_is_the_same_gate():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(torch.arange(4))
    with buffer.sampler.guard():
        buffer.share()
    gate = buffer.storage.gate
    assert type(gate) is BufferLock and gate.shared is buffer.storage
    assert gate.lock is not gate.lock, "each use is a hold of its own"
    with gate.lock, gate.lock:
        assert buffer.sample().shape == (2,)
    assert BufferLock().shared is None


def test_copies_have_separate_locks():
    gate = BufferLock()
    pair = [gate, gate]
    for other in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert other[0] is other[1] is not gate and other[0].lock is not gate.lock


def test_forked_process_continues_though_another_thread_held_the_lock():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(torch.arange(4))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with buffer.sampler.guard():
            held.set()
            done.wait(timeout=60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(timeout=60)
    child = os.fork()
    if child == 0:
        try:
            buffer.extend(torch.arange(4, 6))
            good = len(buffer) == 6 and buffer.sample().shape == (2,)
        except BaseException:
            good = False
        os._exit(int(not good))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    thread.join()
    assert code == 0


class _OthersTurn(clock.SystemClock):
    """A clock whose sleep runs another caller's action."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def sleep(self, seconds: float) -> None:
        self._act()


def test_waiting_draw_sets_the_asked_flag():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(torch.arange(4))
    assert not buffer._gate.learner_waits
    thread = threading.Thread(target=buffer.sample)
    with buffer.sampler.guard():
        thread.start()
        while not buffer._gate.learner_waits:
            time.sleep(0)  # lets the other thread run
    thread.join()
    assert not buffer._gate.learner_waits


def test_a_write_lets_a_draw_that_waits_in_first():
    buffer, found = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2), []
    buffer.extend(torch.arange(4))
    buffer._gate.learner_waits = True
    with clock.use(_OthersTurn(lambda: found.append((buffer.sample().shape, len(buffer))))):
        buffer.extend(torch.arange(4, 6))
    assert found == [((2,), 4)] and len(buffer) == 6


def test_give_way_waits_only_shortly_for_an_absent_draw():
    gate = BufferLock()
    gate.learner_waits = True
    with clock.use(clock.FakeClock()):
        before = clock.monotonic()
        gate.give_way()
        assert 0 < clock.monotonic() - before < 0.01
    assert not gate.learner_waits
