"""An ensemble can be sampled while threads write, exchange and use its members."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gleanrl.data import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictMaxValueWriter,
)
from tests.data.replay_buffers.oracle import clock, ted

ROUNDS = 60


def test_rows_are_whole_while_members_are_written():
    ring = ReplayBuffer(storage=LazyTensorStorage(64))
    drawn = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(64))
    best = ReplayBuffer(storage=LazyTensorStorage(64), writer=TensorDictMaxValueWriter())
    members = [ring, drawn, best]
    for number, member in enumerate(members):
        member.extend(ted(32, start=70_000 * number))
    ensembles = [
        ReplayBufferEnsemble(ring, drawn, best, batch_size=48, sample_from_all=True, seed=0),
        ReplayBufferEnsemble(best, drawn, ring, batch_size=48, sample_from_all=True, seed=1),
    ]
    failures: list[BaseException] = []
    done = threading.Event()

    def work(step: Any) -> None:
        try:
            turn = 0
            while not done.is_set() and turn < ROUNDS:
                step(turn)
                turn += 1
        except BaseException as failure:
            failures.append(failure)
            done.set()

    def write(number: int) -> Any:
        return lambda turn: members[number].extend(ted(24, start=70_000 * number + 24 * turn))

    def sample(ensemble: ReplayBufferEnsemble, order: list[int]) -> Any:
        def step(turn: int) -> None:
            batch, info = ensemble.sample(return_info=True)
            assert (clock(batch) // 70_000 == torch.tensor(order)[:, None]).all()
            ensemble.update_priority(info["index"], torch.rand(3, 16), info["generation"])

        return step

    threads = [threading.Thread(target=work, args=(write(number),), daemon=True) for number in range(3)]
    for ensemble, order in zip(ensembles, ([0, 1, 2], [2, 1, 0]), strict=True):
        threads.append(threading.Thread(target=work, args=(sample(ensemble, order),), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    assert not any(thread.is_alive() for thread in threads)
    assert clock(best[:]).min() == 140_000 + 24 * (ROUNDS - 1) + 24 - 64
    best.writer.check_valid()
