"""A batch's worker pool knows which worker has which environment, and names the failing one."""

from __future__ import annotations

import pytest

from gleanrl._process.shared_columns import STEP
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.loop import collect
from gleanrl._rollout.plan import plan_rollout
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl.envs import ParallelEnv, StepCounter, TransformedEnv
from gleanrl.envs.vector.factories import factories
from gleanrl.envs.vector.worker_pool import EnvWorkerPool, split
from gleanrl.errors import WorkerError
from tests.envs.vector.awkward import awkward, kill
from tests.envs.vector.makers import counting, oracle, streams
from tests.fakes import FakeFailure


def test_workers_get_even_consecutive_shares():
    assert split(5, 2) == [range(0, 3), range(3, 5)]
    assert split(4, 4) == [range(i, i + 1) for i in range(4)]
    assert split(3, 1) == [range(0, 3)]
    for envs in range(1, 12):
        for processes in range(1, envs + 1):
            shares = split(envs, processes)
            assert [i for share in shares for i in share] == list(range(envs))
            assert {len(share) for share in shares} <= {envs // processes, -(-envs // processes)}


@pytest.fixture(scope="module")
def crew():
    """Return three environments in two processes."""
    made = EnvWorkerPool(factories(3, oracle, streams(3)), 2, Timeouts(), 1, 1)
    made.start()
    yield made
    made.close()


def test_run_after_an_interrupted_clean_up_makes_all_steps():
    env = ParallelEnv(3, oracle, create_env_kwargs=streams(3), num_processes=2)
    env.rollout(5, break_when_any_done=False)
    for worker in env.runner._running.workers:
        worker.halt()  # as if an interrupt had stopped the owner before it cleared this flag
    found = env.rollout(5, break_when_any_done=False)
    steps = found["next", "observation"][..., 2] - found["observation"][..., 2]
    assert bool((steps == 1).all()) and env.runner.made() == [5] * 3
    env.close()


def test_a_worker_that_made_fewer_steps_than_it_answered_for_is_named():
    env = ParallelEnv(3, oracle, create_env_kwargs=streams(3), num_processes=2)
    env.rollout(5, break_when_any_done=False)
    env.runner.confirm(5)
    with pytest.raises(WorkerError, match="worker 0 .* made 5 of the 6 steps"):
        env.runner.confirm(6)
    env.close()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_worker_whose_count_differs_from_the_block_fails_the_batch(wrapped):
    batch = ParallelEnv(3, oracle, create_env_kwargs=streams(3), num_processes=2)
    env = TransformedEnv(batch, StepCounter()) if wrapped else batch

    def stop(t):
        batch.runner._running.workers[1].progress[STEP] -= t == 2
        return False

    plan = plan_rollout(env, None, rules=EpisodeRules())
    block = plan.block(3)
    with pytest.raises(WorkerError, match="worker 1 .* made 2 of the 3 steps"):
        collect(plan.actor, plan.stepper, block, stop)
    assert collect(plan.actor, plan.stepper, block, lambda t: t == 1) == 2, (
        "a run that was stopped is no short one"
    )
    env.close()


def test_requests_are_split_by_worker_and_answers_joined_again(crew):
    asked = crew.ask("attribute", dict.fromkeys(range(3), ("stream",)))
    assert asked == {0: (False, 0), 1: (False, 1), 2: (False, 2)}
    assert crew.ask("attribute", {2: ("stream",)}) == {2: (False, 2)}
    assert len(crew.processes) == 2 and not crew.is_closed


def test_exception_of_a_request_names_the_environment(crew):
    with pytest.raises(StepFault) as caught:
        crew.ask("attribute", dict.fromkeys(range(3), ("nothing_of_the_kind",)), "lookup")
    assert (caught.value.env, caught.value.during) == (0, "lookup")
    assert isinstance(caught.value.cause, AttributeError)


def test_faults_count_in_the_flat_batch():
    def fails():
        raise FakeFailure

    with pytest.raises(StepFault) as caught:
        EnvWorkerPool(factories(3, [counting, counting, fails], None), 2, Timeouts(), 1, 2).start()
    assert (caught.value.env, caught.value.during) == (4, "construction")
    crew = EnvWorkerPool(factories(2, [oracle, lambda: awkward(kill, 1, "reset")], None), 1, Timeouts(), 1, 1)
    crew.start()
    with pytest.raises(StepFault, match="WorkerCrashedError") as caught:
        crew.ask("reset", dict.fromkeys(range(2), (None, {})))
    assert caught.value.env == 1 and crew.is_closed
