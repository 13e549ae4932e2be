"""A lost process takes its environments with it, and a reset starts them again."""

from __future__ import annotations

import os
import re
from functools import partial

import numpy as np
import pytest

from gleanrl.envs import AsyncEnvPool, ParallelEnv
from gleanrl.envs.vector.async_pool import affinity_masks
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    LengthError,
    WorkerCrashedError,
    WorkerError,
)
from tests.envs.vector.awkward import awkward, kill, leave
from tests.envs.vector.makers import oracle
from tests.fakes import FakeFailure
from tests.fakes_base import CountingEnv
from tests.leaks import Holdings


@pytest.fixture
def make():
    """Make pools in processes and close them; the test must leave no process or descriptor."""
    ParallelEnv(1, oracle).reset()
    before, made = Holdings.now(), []

    def build(*args, **kwargs):
        made.append(AsyncEnvPool(*args, backend="multiprocessing", **kwargs))
        return made[-1]

    yield build
    for pool in made:
        pool.close()
    before.check()


def with_one_that(act, at=1):
    return [partial(oracle, 0), partial(awkward, act, at, stream=1), partial(oracle, 2), partial(oracle, 3)]


def test_lost_process_is_replaced_at_a_reset(make):
    pool = make(with_one_that(kill))
    rows = pool.rand_action(pool.reset())
    before = pool.processes
    pool.async_step_send(rows)
    with pytest.raises(
        WorkerCrashedError, match=r"environment 1 .*killed by SIGKILL during the step"
    ) as caught:
        pool.async_step_recv(4)
    assert caught.value.env_index == 1
    assert list(pool.async_step_recv(3)["env_index"]) == [0, 2, 3]
    with pytest.raises(WorkerCrashedError, match="environment 1 is lost until it is reset"):
        pool.async_step_send(rows[:2])
    with pytest.raises(WorkerCrashedError, match="environment 1 is lost"):
        pool.step(rows)
    pool.async_step_send(rows[[0, 2, 3]])
    pool.async_reset_send(env_index=1)
    assert pool.async_reset_recv()["observation"].tolist() == [[1, 0, 0]]
    assert pool.async_step_recv(3)["next", "observation"][:, 2].tolist() == [2, 2, 2]
    after = pool.processes
    assert before[1] != after[1] and [before[i] for i in (0, 2, 3)] == [after[i] for i in (0, 2, 3)]


def test_environments_of_one_process_are_lost_together(make):
    pool = make(with_one_that(leave), envs_per_worker=2)
    assert pool.envs_per_worker == 2
    rows = pool.rand_action(pool.reset())
    assert len(pool.processes) == 2
    pool.async_step_send(rows)
    assert list(pool.async_step_recv(env_index=[2, 3])["env_index"]) == [2, 3]
    pool.async_step_recv(env_index=0)  # environment 0 was stepped before the process died
    with pytest.raises(WorkerCrashedError, match="exited with code 5 during the step of environment 1"):
        pool.async_step_recv()
    pool.async_reset_send(env_index=1)
    with pytest.raises(WorkerCrashedError, match="environment 0 is lost until it is reset"):
        pool.async_step_send(rows[0])
    pool.async_reset_send(env_index=0)
    assert pool.async_reset_recv(2)["observation"].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert pool.reset()["observation"][:, 1].tolist() == [1, 1, 1, 1]


def test_requests_of_environments_in_a_lost_process_are_lost_too(make):
    pool = make(
        [partial(awkward, kill, 1, stream=0), *[partial(oracle, stream) for stream in (1, 2)]],
        envs_per_worker=2,
    )
    pool.async_step_send(pool.rand_action(pool.reset()))
    with pytest.raises(WorkerCrashedError, match=r"environment 0 .*step of environment 0"):
        pool.async_step_recv(env_index=0)
    pool.async_reset_send(env_index=0)
    assert pool.async_reset_recv()["observation"].tolist() == [[0, 0, 0]]
    with pytest.raises(WorkerCrashedError, match=r"environment 1 .*step of environment 0"):
        pool.async_step_recv(2)
    assert list(pool.async_step_recv()["env_index"]) == [2]


def test_reset_restarts_lost_environments_of_a_batch(make):
    pool = make(with_one_that(kill, 2))
    with pytest.raises(WorkerCrashedError, match="environment 1"):
        pool.rollout(5, break_when_any_done=False)
    assert pool.reset()["observation"][1].tolist() == [1, 0, 0]


def test_failing_replacement_is_reported(make, tmp_path):
    there = tmp_path / "there"
    there.touch()

    def fails_later():
        if not there.exists():
            raise FakeFailure("not again")
        return awkward(kill, 1, stream=1)

    pool = make([oracle, fails_later])
    pool.async_step_send(pool.rand_action(pool.reset()))
    with pytest.raises(WorkerCrashedError):
        pool.async_step_recv(env_index=1)
    there.unlink()
    for _ in range(2):
        pool.async_reset_send(env_index=1)
        with pytest.raises(FakeFailure, match="environment 1 .*not again"):
            pool.async_reset_recv()
    there.touch()
    pool.async_reset_send(env_index=1)
    assert pool.async_reset_recv()["observation"].tolist() == [[1, 0, 0]]
    assert list(pool.async_step_recv()["env_index"]) == [0]


def test_unpicklable_requests_and_answers_are_reported(make):
    class Rooted:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            raise TypeError("it stays here")

    pool = make([CountingEnv] * 2)
    row = pool.rand_action(pool.reset())[0]
    row.set_non_tensor("rooted", Rooted())
    pool.async_step_send(row)
    with pytest.raises(WorkerError, match=r"(?s)environment 0 .*can't be sent"):
        pool.async_step_recv()
    pool.rollout(2)


def test_worker_affinity_binds_processes_to_processors(make):
    class Placed(CountingEnv):
        def cpus(self):
            return sorted(os.sched_getaffinity(0))

    ours = sorted(os.sched_getaffinity(0))
    assert make([Placed] * 2).cpus() == [ours, ours]
    assert make([Placed] * 2, worker_affinity=[[ours[0]], ours]).cpus() == [[ours[0]], ours]
    assert make([Placed] * 2, worker_affinity=lambda worker: [ours[-1]]).cpus() == [[ours[-1]]] * 2


def test_affinity_masks_are_checked():
    assert affinity_masks(lambda worker: range(worker + 1), 2) == [[0], [0, 1]]
    with pytest.raises(LengthError, match="expected 3 entries"):
        affinity_masks([[0]], 3)
    for bad in ([], [-1], ["0"], [0.5], [True], 1, None):
        with pytest.raises(
            InvalidArgumentError, match=re.escape(f"process 1, for example [1], got {bad!r};")
        ):
            affinity_masks([[0], bad], 2)
    with pytest.raises(InvalidArgumentError, match=r"one list for each process, as in \[\[0\], \[1\]\]"):
        affinity_masks([1, 2], 2)
    with pytest.raises(InvalidTypeError, match="function of the process number that returns one, got 1"):
        affinity_masks(1, 2)


def test_affinity_masks_may_be_arrays_and_iterators():
    assert affinity_masks(np.array([[0, 1], [2, 3]]), 2) == [[0, 1], [2, 3]]
    assert affinity_masks(iter([iter([0]), {1}]), 2) == [[0], [1]]
