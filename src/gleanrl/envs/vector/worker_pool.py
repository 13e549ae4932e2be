"""`EnvWorkerPool`, the worker processes of a batch of environments.

It distributes the environments over workers, and attributes an error to its environment. A `ParallelEnv` sends requests
to all environments and waits for all. An `AsyncEnvPool` sends them to single environments and waits for any.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gleanrl._os.clock import Deadline
from gleanrl._process.shared_columns import SharedSegment
from gleanrl._process.worker import Timeouts, WorkerPlan
from gleanrl._process.worker_pool import WorkerAnswer, WorkerPool
from gleanrl._rollout.errors import StepFault
from gleanrl.data.specs.mapping import Changes
from gleanrl.envs.vector.async_requests import ReceivedAnswer
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.worker import MASKED, RUN_CODE, SEED, MemberShare, packed
from gleanrl.errors import WorkerError

_PRELOAD = ("gleanrl.envs",)
"""Modules that the fork server imports before it forks workers; they import torch, tensordict and gymnasium."""


def split(num_envs: int, num_processes: int) -> list[range]:
    """Return the environment numbers of each process: consecutive, sizes differ by one at most, larger ones first."""
    size, more = divmod(num_envs, num_processes)
    starts = [w * size + min(w, more) for w in range(num_processes + 1)]
    return [range(begin, end) for begin, end in zip(starts, starts[1:], strict=False)]


class EnvWorkerPool:
    """Workers with their shares of the environments. One thread at a time may use it.

    `ask` and the calls for blocks wait for all addressed workers. If one of them is lost, all workers are ended, since
    the environments of a batch step together. `post` and `wait` are the calls of a `RequestHost`. They don't end the
    pool: if a worker is lost, all of its environments are lost. The first reset of one of them starts a new worker,
    which makes all of them. The other environments stay lost until they are reset, too, since their episodes are gone.

    Args:
        factories: one for each environment.
        num_processes: number of workers, at most one for each environment.
        timeouts: how long workers may take.
        num_threads: torch threads of each worker.
        width: number of environments in each environment, more than 1 if these are batches. Errors count environments
            in the flattened batch.
        affinity: the processors of each worker; None for all processors.

    Attributes:
        shares: the environment numbers of each worker.
        is_started: whether all environments were made. It stays True after `close`.
    """

    def __init__(
        self,
        factories: Sequence[Factory],
        num_processes: int,
        timeouts: Timeouts,
        num_threads: int = 1,
        width: int = 1,
        affinity: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.shares = split(len(factories), num_processes)
        masks = [None] * num_processes if affinity is None else affinity
        self._makers = [
            MemberShare(factories[share.start : share.stop], share.start, cpus)
            for share, cpus in zip(self.shares, masks, strict=True)
        ]
        self._places = [
            (worker, env - share.start) for worker, share in enumerate(self.shares) for env in share
        ]
        self._width = width
        self._plan = WorkerPlan(timeouts, num_threads, _PRELOAD, self._where)
        self._during = "construction"
        self._numbers = itertools.count(1)
        self._pool: WorkerPool | None = None
        self.is_started = False
        # By environment: the method of the last `post`.
        self._doing: dict[int, str] = {}
        # By the worker pool's request number: the environment and the number of a `post`.
        self._posted: dict[int, tuple[int, int]] = {}
        # By the worker pool's request number: a new worker that is making its environments.
        self._making: dict[int, int] = {}
        # By worker: the error of a new worker that couldn't make its environments.
        self._unmade: dict[int, BaseException] = {}
        # By environment: the loss of its former worker, until the environment itself is renewed.
        self._orphans: dict[int, WorkerError] = {}

    def start(self) -> None:
        """Start the workers and wait until they have made their environments; after an error, end all workers.

        Raises:
            StepFault: an environment can't be made, or its worker ended or hung; ``during`` is ``"construction"``.
            CapacityError, UnsupportedError, LaunchError: see `WorkerPool`.
        """
        try:
            self._pool = WorkerPool(self._makers, self._plan)
            self._gather()
            self.is_started = True
        except BaseException:
            with suppress(Exception):  # the error of the start matters more than one of the clean-up
                self.close(0.0)
            raise

    @property
    def _running(self) -> WorkerPool:
        assert self._pool is not None
        return self._pool

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers; empty before the start."""
        return [] if self._pool is None else [worker.pid for worker in self._pool.workers]

    @property
    def is_closed(self) -> bool:
        """Whether the workers were ended."""
        return self._running.closed

    @property
    def is_idle(self) -> bool:
        """Whether the workers live and have answered everything."""
        return self._running.is_idle

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask may restrict an environment's actions, or another one's in its worker.

        The workers report this with their answers.
        """
        return bool(self._running.workers[self._places[env][0]].progress[MASKED])

    def close(self, seconds: float | None = None) -> None:
        """Close the environments and end the workers.

        Args:
            seconds: how long workers may take for it; None for the limit of the timeouts.

        Raises:
            Exception: the error that an environment raised when it was closed.
        """
        if self._pool is not None:
            self._pool.close(seconds)

    # ------------------------------------------------- requests to all workers
    def ask(
        self, name: str, requests: Mapping[int, tuple[Any, ...]], during: str | None = None
    ) -> dict[int, Any]:
        """Call a method of some environments, wait for all of them, and return the results by environment.

        Args:
            name: the method of `EnvMember`.
            requests: its arguments, by environment.
            during: the operation, for messages; None for `name`.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        number, messages = next(self._numbers), {}
        for worker, share in enumerate(self.shares):
            own = {env - share.start: requests[env] for env in share if env in requests}
            if own:
                messages[worker] = number, name, packed(name, own)
        answers = self.call(during or name, "answer", messages)
        return {
            self.shares[worker].start + index: value
            for worker, found in answers.items()
            for index, value in found.items()
        }

    def call(self, during: str, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of the services of some workers; return the results by worker.

        Args:
            during: the operation, for messages.
            name: the method of `EnvService`.
            arguments: its arguments, by worker.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()  # a worker's environment may set a mask: cached conclusions about specs become invalid
        pool = self._running
        pool.forget()  # answers that an earlier, interrupted call didn't take
        for worker, args in arguments.items():
            pool.post(worker, name, *args)
        return self._gather()

    def call_all(self, during: str, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's service with the same arguments; return the results. See `call`."""
        return list(self.call(during, name, dict.fromkeys(range(len(self.shares)), arguments)).values())

    # ---------------------------------------------------------------- blocks
    @property
    def segment(self) -> SharedSegment:
        """The memory shared with the workers."""
        return self._running.segment

    def signal(self, code: bytes, during: str) -> None:
        """Send a one-byte signal to every worker and wait for all answers.

        Args:
            code: one of the codes in `worker`.
            during: the operation, for messages.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()  # a worker's environment may set a mask: cached conclusions about specs become invalid
        if not self._pool.signal(code):  # type: ignore[union-attr]  # called at every step, so no property
            self._gather()

    def run(self) -> None:
        """Let every worker make all steps of its block, and wait for all workers.

        The halt flag of an earlier `break_off` is cleared here, before any worker reads it. `break_off` itself
        couldn't clear it reliably: an interrupt could skip that, and the next run would end early.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        for worker in self._running.workers:
            worker.halt(False)
        self.signal(RUN_CODE, "step")

    def break_off(self) -> None:
        """Stop the workers of an interrupted `run` after their present step, and drop their answers."""
        pool = self._running
        for worker in pool.workers:
            worker.halt()
        pool.forget()

    def seed_redraws(self, seed: int | None) -> None:
        """Set the `redraw_seed` of the block that the workers bind next."""
        for worker in self._running.workers:
            worker.progress[SEED] = -1 if seed is None else seed

    def made(self) -> list[int]:
        """Return the number of steps of the block that each environment has made."""
        return self._made(())

    def confirm(self, num_steps: int) -> None:
        """Check that every worker has made all steps of the block.

        An answer alone doesn't show how many steps the worker made, so its step counter is compared.

        Raises:
            WorkerError: naming the first worker with another number of steps.
        """
        for worker in self._running.workers:
            if worker.step != num_steps:
                raise WorkerError(
                    f"worker {worker.index} (process {worker.pid}) made {worker.step} of the {num_steps} steps of the "
                    "block and answered that it was done; the batch is discarded, reset the environments before "
                    "the next one"
                )

    # ------------------------------------------- requests to single environments
    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Send an environment's worker a request; see `RequestHost.post`."""
        worker, index = self._places[env]
        self._doing[env] = name
        posted = self._running.post(worker, "answer", number, name, packed(name, {index: arguments}))
        self._posted[posted] = env, number

    def wait(self, deadline: Deadline) -> ReceivedAnswer | None:
        """Return the next answer; see `RequestHost.wait`."""
        while (answer := self._running.wait_any(deadline)) is not None:
            if answer.request in self._making:
                worker = self._making.pop(answer.request)
                if answer.error is not None:
                    self._unmade[worker] = answer.error
            elif answer.request in self._posted:
                env, number = self._posted.pop(answer.request)
                if answer.error is None:
                    return ReceivedAnswer(env, number, *answer.value.values())
                # A worker ends if it can't make its environments: the error of that explains its loss.
                error = self._unmade.get(answer.worker, answer.error) if answer.lost else answer.error
                return ReceivedAnswer(env, number, None, error)
        return None

    def loss(self, env: int) -> WorkerError | None:
        """Return the error of an environment's loss; None if it isn't lost."""
        return self._running.workers[self._places[env][0]].loss or self._orphans.get(env)

    def renew(self, env: int) -> None:
        """Let a lost environment accept requests again.

        The first environment of a lost worker starts a new one, which makes all of its environments.
        """
        worker, _ = self._places[env]
        loss = self._running.workers[worker].loss
        if loss is not None:
            self._orphans.update(dict.fromkeys(self.shares[worker], loss))
            self._doing.update(dict.fromkeys(self.shares[worker], "construction"))
            self._running.replace(worker, self._makers[worker])
            # The first request of a new worker is to make its environments; `wait` consumes that answer.
            self._making[self._running.workers[worker].due[0]] = worker
            self._unmade.pop(worker, None)
        self._orphans.pop(env, None)

    # ------------------------------------------------------------------ faults
    def _gather(self) -> dict[int, Any]:
        """Wait for all answers; return the values by worker.

        Raises:
            StepFault: for a lost worker, after the other workers were ended; otherwise for the first environment that
                raised.
        """
        answers = self._running.wait_all()
        # A loss takes precedence over an exception: it ends the pool.
        failed = max((a for a in answers if a.error), key=lambda answer: answer.lost, default=None)
        if failed is None:
            return {answer.worker: answer.value for answer in answers}
        if failed.lost:
            lost = f"worker {failed.worker} was lost: {type(failed.error).__name__}"
            with suppress(Exception):  # the loss matters more than errors of closing the other workers
                self._running.close(because=lost)
        raise self._fault(failed, answers)

    def _fault(self, answer: WorkerAnswer, answers: Sequence[WorkerAnswer]) -> StepFault:
        """Return a worker's error as a fault of an environment in the flattened batch.

        A fault during a step also holds the number of steps that each environment has made of the block.
        """
        error, worker = answer.error, self._running.workers[answer.worker]
        assert error is not None
        first, in_step = self.shares[answer.worker].start, self._during == "step"
        made = self._made(answers) if in_step else None
        if isinstance(error, StepFault):
            return error.counted_from(first * self._width, made)
        step = worker.step if answer.lost and in_step else 0
        return StepFault(step, (first + worker.item) * self._width, self._during, error, made)

    def _made(self, answers: Sequence[WorkerAnswer]) -> list[int]:
        """Return the number of steps of the block that each environment has made.

        The numbers differ after an error, since workers don't wait for one another within a step or a run.
        """
        faults = {answer.worker: answer.error for answer in answers}
        made: list[int] = []
        for worker, share in zip(self._running.workers, self.shares, strict=True):
            fault = faults.get(worker.index)
            if isinstance(fault, StepFault):
                made += fault.made(len(share) * self._width)
            else:  # a lost worker's progress shows its last step, and which of its environments had made it
                made += [
                    worker.step + (i < worker.item) for i in range(len(share)) for _ in range(self._width)
                ]
        return made

    def _where(self, worker: int, index: int, step: int) -> str:
        env = self.shares[worker].start + index
        if env in self._doing:
            return f"during the {self._doing[env]} of environment {env}"
        at = f", step {step} of the batch" if self._during == "step" else ""
        return f"during the {self._during} of environment {env}{at}"
