"""`AsyncEnvPool` reports failures, survives interrupts, closes, and checks its options."""

from __future__ import annotations

import copy
import gc
import os
import signal

import pytest

from gleanrl.envs import (
    AsyncEnvPool,
    GymEnv,
    GymWrapper,
    ProcessorAsyncEnvPool,
    ThreadingAsyncEnvPool,
    Timeouts,
)
from gleanrl.errors import ClosedError, EnvironmentFailure, InvalidArgumentError, InvalidTypeError
from tests.envs.vector.awkward import open_gate
from tests.envs.vector.makers import SCRIPT, oracle
from tests.envs.vector.pools import BACKENDS, gated, ids, three, with_actions
from tests.fakes import RaisingEnv


# ------------------------------------------------------------------- failures
def test_exception_is_raised_by_the_receiving_call(make_pool):
    makers = three()
    makers[1] = lambda: GymWrapper(RaisingEnv(1, stream=1, script=SCRIPT))
    pool = make_pool(makers)
    pool.async_step_send(with_actions(pool))
    assert ids(pool.async_step_recv(env_index=[0])) == [0]
    with pytest.raises(EnvironmentFailure) as caught:
        pool.async_step_recv(2)
    words = (
        f"environment 1 ({type(pool).__name__}): step raised FakeFailure: the fake broke on purpose (action ["
    )
    assert words in str(caught.value) and caught.value.env_index == 1
    assert type(caught.value.__cause__).__name__ == "FakeFailure"
    assert ids(pool.async_step_recv()) == [2]
    pool.async_reset_send(env_index=1)
    assert pool.async_reset_recv()["observation"].tolist() == [[1, 1, 0]]
    pool.rollout(5)


def test_exception_of_a_batch_call_names_the_environment(make_pool):
    makers = three()
    makers[1] = lambda: GymWrapper(RaisingEnv(1, stream=1, script=SCRIPT))
    pool = make_pool(makers)
    with pytest.raises(EnvironmentFailure, match=r"environment 1 .*: step raised FakeFailure.* \(action \["):
        pool.step(with_actions(pool))
    assert pool.rollout(4, break_when_any_done=False).shape == (3, 4)


def test_failing_construction_is_reported(make_pool):
    built = []

    def fails():
        if built:
            raise ValueError("only once")
        built.append(1)
        return oracle()

    pool = make_pool([oracle, fails])
    with pytest.raises(ValueError, match=r"environment 1 \(.*\): construction raised ValueError: only once"):
        pool.reset()
    assert not pool.is_started


def test_hanging_environment_is_reported_and_replaced(make_pool, gate):
    pool = make_pool(gated(gate), timeouts=Timeouts(work_s=1.0, close_s=20.0))
    row = with_actions(pool)[1]
    pool.async_step_send(pool.rand_action(pool.reset()))
    assert ids(pool.async_step_recv(2)) == [0, 2]
    with pytest.raises(TimeoutError, match=r"environment 1 .*(got on|made no progress) for 1 s") as caught:
        pool.async_step_recv()
    assert caught.value.env_index == 1 and "in pass_through" in str(caught.value)
    with pytest.raises(TimeoutError, match="environment 1 is lost until it is reset"):
        pool.async_step_send(pool.rand_action(row))
    with pytest.raises(TimeoutError, match="lost until it is reset"):
        pool.set_seed(3)
    if make_pool.backend == "threading":
        open_gate(gate)  # so that its thread can end
    pool.async_reset_send()
    assert pool.async_reset_recv(3)["observation"].tolist() == [[0, 2, 0], [1, 0, 0], [2, 2, 0]]


def test_interrupted_wait_can_be_repeated(make_pool, gate):
    def interrupt(*_):
        raise KeyboardInterrupt

    pool = make_pool(gated(gate))
    rows = with_actions(pool)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        pool.async_step_send(rows)
        for receive in (lambda: pool.async_step_recv(3), lambda: pool.async_step_recv(env_index=1)):
            with pytest.raises(KeyboardInterrupt):
                # Repeated, in case garbage collection drops the exception.
                signal.setitimer(signal.ITIMER_REAL, 0.02, 20.0)
                receive()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    open_gate(gate)
    assert pool.async_step_recv(3)["next", "observation"][:, 2].tolist() == [1, 1, 1]


# ------------------------------------------------------------------- lifetime
def test_pool_is_started_copied_and_closed(make_pool):
    pool = make_pool(three())
    assert not pool.is_started and pool.num_envs == 3 and pool.min_get == 1 and pool.stack == "dense"
    twin = copy.deepcopy(pool)
    with pool as entered:
        assert entered is pool
        pool.async_step_send(with_actions(pool))
    assert pool.is_closed
    pool.close()
    pool.shutdown()
    for call in (
        lambda: pool.async_step_send(with_actions(twin)),
        pool.async_step_recv,
        pool.async_reset_send,
        lambda: pool.rand_step(twin.reset()),
    ):
        with pytest.raises(ClosedError):
            call()
    assert pool.reset().shape == (3,), "a reset opens it again"
    assert ids(pool.reset()) == [0, 1, 2]
    twin.close()


def test_existing_environment_is_copied(make_pool):
    pool = make_pool(GymEnv("CartPole-v1"))
    assert pool.batch_size == (1,) and pool.rollout(3).shape[0] == 1
    env = oracle()
    twice = make_pool([env, env])
    twice.rollout(2)
    assert twice.episode == [0, 0]


def test_close_does_not_wait_for_busy_environments(gate):
    for backend in BACKENDS:
        pool = AsyncEnvPool(gated(gate), backend=backend, timeouts=Timeouts(close_s=0.2))
        pool.async_step_send(with_actions(pool))
        pool.close()
        if backend == "threading":
            open_gate(gate)  # its thread then closes the environment and ends


def test_deleting_the_pool_ends_its_threads_and_processes(make_pool):
    pool = AsyncEnvPool(three(), backend=make_pool.backend)
    pool.async_step_send(with_actions(pool))
    processes = pool.processes if make_pool.backend == "multiprocessing" else []
    del pool
    gc.collect()
    for number in processes:
        with pytest.raises(ProcessLookupError):
            while True:  # the parent, another process, is about to reap it
                os.kill(number, 0)


def test_forked_process_refuses_the_pool(make_pool):
    pool = make_pool(three())
    pool.reset()
    child = os.fork()
    if child == 0:
        good = False
        try:
            pool.reset()
        except ClosedError as error:
            good = "not its forks" in str(error)
        finally:
            os._exit(int(not good))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.reset()


# -------------------------------------------------------------------- options
def test_backend_chooses_the_class():
    threads, processes = AsyncEnvPool(three()), AsyncEnvPool(three(), backend="multiprocessing")
    assert type(threads) is ThreadingAsyncEnvPool and threads.backend == "threading"
    assert type(processes) is ProcessorAsyncEnvPool and processes.backend == "multiprocessing"
    assert type(ThreadingAsyncEnvPool(three())) is ThreadingAsyncEnvPool
    assert ProcessorAsyncEnvPool(three(), exchange="shm").resolved_exchange == "queue"
    assert threads.exchange_keys == () and threads.stats(reset=True) == {} and threads.stats() == {}
    assert repr(threads) == "ThreadingAsyncEnvPool(GymWrapper, batch_size=(3,), device=None)"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("backend", {"backend": "asyncio"}),
        ("stack", {"stack": "loose"}),
        ("exchange", {"exchange": "pigeon"}),
        ("envs_per_worker", {"envs_per_worker": 2}),
        ("envs_per_worker", {"envs_per_worker": 0, "backend": "multiprocessing"}),
        ("worker_affinity", {"worker_affinity": [[0]]}),
        ("worker_affinity", {"worker_affinity": [[0]], "backend": "multiprocessing"}),
        ("worker_affinity", {"worker_affinity": lambda worker: [], "backend": "multiprocessing"}),
    ],
)
def test_invalid_options_are_refused(words, given):
    with pytest.raises(InvalidArgumentError, match=words):
        AsyncEnvPool(three(), **given)


def test_invalid_makers_and_timeouts_are_refused():
    with pytest.raises(InvalidArgumentError, match="at least one"):
        AsyncEnvPool([])
    with pytest.raises(InvalidTypeError, match="timeouts"):
        AsyncEnvPool(oracle, timeouts=3)
    with pytest.raises(InvalidArgumentError, match="expected 'multiprocessing' for a Processor"):
        ProcessorAsyncEnvPool(oracle, backend="threading")


def test_create_env_kwargs_reach_the_makers(make_pool):
    pool = make_pool([oracle, oracle], create_env_kwargs=[{"stream": 5}, {"stream": 6}])
    assert pool.stream == [5, 6]
