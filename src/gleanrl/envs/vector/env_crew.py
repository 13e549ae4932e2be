"""The worker processes of a `ParallelEnv`: who has which environments, and whose fault it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gleanrl.data.specs.locks import Changes
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.worker import MASKED, RUN_CODE, SEED, Share
from gleanrl.errors import WorkerError
from gleanrl.rollouts.faults import StepFault
from gleanrl.workers.crew import Answer, Crew
from gleanrl.workers.handle import Plan, Timeouts
from gleanrl.workers.segment import Segment

PRELOAD = ("gleanrl.envs",)
"""What the launcher imports: with it torch, tensordict and gymnasium."""


def split(num_envs: int, num_processes: int) -> list[range]:
    """Return the numbers of each process's environments: neighbours, as evenly as can be, the first ones more."""
    size, more = divmod(num_envs, num_processes)
    starts = [w * size + min(w, more) for w in range(num_processes + 1)]
    return [range(begin, end) for begin, end in zip(starts, starts[1:], strict=False)]


class EnvCrew:
    """Workers with their shares of the environments. One thread at a time.

    Every call is a barrier: it ends when all workers that were asked have answered. The loss of one worker ends all.

    Args:
        factories: one for each environment.
        num_processes: how many workers, at most as many as environments.
        timeouts: how long they may take.
        num_threads: torch threads of each.
        width: environments that each environment is itself (a batch in a batch), to count them in the flat batch.

    Attributes:
        is_started: whether all environments were made.
    """

    def __init__(
        self,
        factories: Sequence[Factory],
        num_processes: int,
        timeouts: Timeouts,
        num_threads: int,
        width: int,
    ) -> None:
        self.shares = split(len(factories), num_processes)
        self._factories, self._width = factories, width
        self._plan = Plan(timeouts, num_threads, PRELOAD, self._where)
        self._during = "construction"
        self._crew: Crew | None = None
        self.is_started = False

    def start(self) -> None:
        """Start the workers and let them make their environments.

        Raises:
            StepFault: if an environment couldn't be made; ``during`` is ``"construction"``.
        """
        given = self._factories
        try:
            self._crew = Crew(
                [Share(given[share.start : share.stop], share.start) for share in self.shares], self._plan
            )
            self._gather()
            self.is_started = True
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                self.close(0.0)
            raise

    @property
    def _running(self) -> Crew:
        assert self._crew is not None
        return self._crew

    @property
    def segment(self) -> Segment:
        """The memory shared with the workers."""
        return self._running.segment

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers."""
        return [worker.pid for worker in self._running.workers]

    def signal(self, code: bytes, during: str) -> None:
        """Send a signal to every worker and wait.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()  # a worker's environment may get a mask
        if not self._crew.signal(code):  # type: ignore[union-attr]  # it's called at every step
            self._gather()

    def run(self) -> None:
        """Let every worker take all steps of its block, and wait.

        The owner takes back the word of an earlier `break_off` here, before the workers can read it: then no
        interrupt of a clean-up can leave it to a later run.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        for worker in self._running.workers:
            worker.halt(False)
        self.signal(RUN_CODE, "step")

    def break_off(self) -> None:
        """End a run of steps that an interrupt kept its owner from waiting for."""
        crew = self._running
        for worker in crew.workers:
            worker.halt()
        crew.forget()

    def seed_redraws(self, seed: int | None) -> None:
        """Tell the workers the `redraw_seed` of the block that they bind next."""
        for worker in self._running.workers:
            worker.progress[SEED] = -1 if seed is None else seed

    def may_be_masked(self) -> bool:
        """Return whether a mask may restrict the actions of an environment at present; nobody is asked."""
        return any(worker.progress[MASKED] for worker in self._running.workers)

    def made(self) -> list[int]:
        """Return the steps of the block that each environment has made."""
        return self._made(())

    def confirm(self, num_steps: int) -> None:
        """Raise unless every worker has made so many steps of the block.

        Raises:
            WorkerError: naming the first worker that has made fewer, or more.
        """
        for worker in self._running.workers:
            if worker.step != num_steps:
                raise WorkerError(
                    f"worker {worker.index} (process {worker.pid}) made {worker.step} of the {num_steps} steps of the "
                    "block and answered that it was done; the batch is discarded, reset the environments before "
                    "the next one"
                )

    def ask(self, during: str, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of some workers' servants; return what each gave, by worker.

        Args:
            during: what the environments do, for the message.
            name: the method.
            arguments: its arguments, by worker.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()
        crew = self._running
        crew.forget()
        for worker, given in arguments.items():
            crew.post(worker, name, *given)
        return self._gather()

    def ask_all(self, during: str, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's servant; return what each gave."""
        everybody = dict.fromkeys(range(len(self.shares)), arguments)
        return list(self.ask(during, name, everybody).values())

    def each(self, answers: Sequence[Sequence[Any]]) -> list[Any]:
        """Return one list of what the workers' lists hold."""
        return [item for answer in answers for item in answer]

    def by_worker(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the items, one for each environment, as one list for each worker."""
        return [items[share.start : share.stop] for share in self.shares]

    @property
    def is_closed(self) -> bool:
        """Whether the workers were ended."""
        return self._running.closed

    @property
    def is_idle(self) -> bool:
        """Whether the workers live and have answered everything."""
        return self._running.is_idle

    def close(self, seconds: float | None = None) -> None:
        """End the workers; their environments are closed there first.

        Args:
            seconds: how long they have for that; None for what the timeouts say.

        Raises:
            Exception: what the close of an environment raised.
        """
        if self._crew is not None:
            self._crew.close(seconds)

    # ------------------------------------------------------------------ faults
    def _gather(self) -> dict[int, Any]:
        """Wait for what is due; return what the workers gave.

        Raises:
            StepFault: for a worker that ended or hung, which ends the crew; or for the first that raised.
        """
        answers = self._running.wait_all()
        failed = max((a for a in answers if a.error), key=lambda answer: answer.lost, default=None)
        if failed is None:
            return {answer.worker: answer.value for answer in answers}
        if failed.lost:
            lost = f"worker {failed.worker} was lost: {type(failed.error).__name__}"
            with suppress(Exception):  # what the others' ends raise matters less
                self._running.close(because=lost)
        raise self._fault(failed, answers)

    def _fault(self, answer: Answer, answers: Sequence[Answer]) -> StepFault:
        """Return the fault of an environment of the flat batch, with what all of them have made of the block."""
        error, worker = answer.error, self._running.workers[answer.worker]
        assert error is not None
        first, in_step = self.shares[answer.worker].start, self._during == "step"
        made = self._made(answers) if in_step else None
        if isinstance(error, StepFault):
            return error.counted_from(first * self._width, made)
        step = worker.step if answer.lost and in_step else 0
        return StepFault(step, (first + worker.place) * self._width, self._during, error, made)

    def _made(self, answers: Sequence[Answer]) -> list[int]:
        """Return the steps of the block that each environment has made: workers don't wait for the one that failed."""
        faults = {answer.worker: answer.error for answer in answers}
        made: list[int] = []
        for worker, share in zip(self._running.workers, self.shares, strict=True):
            fault = faults.get(worker.index)
            if isinstance(fault, StepFault):
                made += fault.made(len(share) * self._width)
            else:  # whoever was lost says by its place which of its environments had made the step
                made += [
                    worker.step + (i < worker.place) for i in range(len(share)) for _ in range(self._width)
                ]
        return made

    def _where(self, worker: int, place: int, step: int) -> str:
        env = self.shares[worker].start + place
        at = f", step {step} of the batch" if self._during == "step" else ""
        return f"during the {self._during} of environment {env}{at}"
