"""After an interrupt, a `ParallelEnv` continues with correct data or is closed, and leaves no resources behind."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import ParallelEnv, SerialEnv
from gleanrl.errors import ClosedError
from tests.envs.vector.makers import equal, oracle, streams
from tests.interrupts import double_interruptions, interruptions, trace
from tests.leaks import Holdings


@contextmanager
def told(place):
    """Add the place of the interrupt to an exception that is raised in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(str(place))
        raise


def batch(kind=ParallelEnv):
    return kind(
        3, oracle, create_env_kwargs=streams(3), **({"num_processes": 2} if kind is ParallelEnv else {})
    )


def rollout(env):
    torch.manual_seed(0)
    return env.rollout(12, break_when_any_done=False)


def check_goes_on(env):
    found = rollout(env)
    assert found.shape == (3, 12)
    check_rows(found)


def check_rows(found):
    """Check that every row holds its own stream and begins where the previous row ended."""
    roots, nexts = found["observation"], found["next", "observation"]  # (3, T, 3): stream, episode, step
    assert bool((roots[..., 0] == torch.arange(3)[:, None]).all())
    follows = (roots[:, 1:] == nexts[:, :-1]).all(-1)
    assert bool((follows | found["next", "done"][:, :-1, 0]).all())
    assert bool((nexts[..., 2] == roots[..., 2] + 1).all())


CALLS = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(env.rand_action(env.reset())),
    "rollout": rollout,
    "set_seed": lambda env: env.set_seed(3),
    "state_dict": lambda env: env.state_dict(),
    "load_state_dict": lambda env: env.load_state_dict(env.state_dict()),
}


@pytest.mark.parametrize("name", CALLS)
def test_batch_continues_after_an_interrupt(name):
    batch().close()
    env = batch()
    rollout(env)
    before = Holdings.now()
    for _, place in interruptions(lambda: env, CALLS[name], 25):
        with told(place):
            check_goes_on(env)
            before.check()
    env.close()


@pytest.mark.filterwarnings("ignore:ParallelEnv. it was stepped or reset outside")
@pytest.mark.parametrize("policy", [None, nn.Linear(3, 2)], ids=["random", "policy"])
def test_collector_continues_with_its_steppers_after_an_interrupt(policy):
    """A collector takes the workers back after a rollout. Workers never step into another block than it reads."""
    env = batch()
    collectors = []  # keep them alive, because a deleted collector closes the environment

    def collector():
        collectors.append(SyncDataCollector(env, policy, frames_per_batch=36, total_frames=-1))
        return collectors[-1]

    def collect(made):
        made.next()
        rollout(env)  # takes the workers
        made.next()

    collect(collector())  # one run first, so that lazy initialisation isn't traced
    made = collector()
    places, error = trace(lambda: collect(made))
    assert error is None
    mine = [place for place in places if place.file.endswith("vector/parallel.py")]
    first, last = {place.line: place for place in reversed(mine)}, {place.line: place for place in mine}
    interrupted = 0
    for place in sorted({*first.values(), *last.values()}):
        made = collector()
        _, error = trace(lambda made=made: collect(made), place.count)
        # False if answers arrived earlier, so that the call took another path.
        interrupted += error is not None
        error = None  # its traceback would keep the objects of the call alive
        with told(place):
            check_rows(made.next())
            check_rows(made.next())
    assert interrupted > 20
    env.close()


def test_interrupted_start_leaves_nothing():
    expected = rollout(serial := batch(SerialEnv))
    serial.close()
    batch().close()
    before = Holdings.now()
    for env, place in interruptions(batch, lambda env: env.start(), 25, close=lambda env: env.close()):
        with told(place):
            assert equal(rollout(env), expected), "as if nothing had happened"
            env.close()
            before.check()


@pytest.mark.parametrize(
    ("interrupted", "most"),
    [(interruptions, 20), pytest.param(double_interruptions, 10, marks=pytest.mark.timeout(1800))],
)
def test_interrupted_close_leaves_nothing(interrupted, most):
    batch().close()
    before = Holdings.now()

    def started():
        env = batch()
        env.start()
        return env

    for env, place in interrupted(started, lambda env: env.close(), most):
        with told(place):
            env.close()
            with pytest.raises(ClosedError):
                env.start()
            before.check()
