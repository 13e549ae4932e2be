"""The worker processes of a `ParallelEnv`: who has which environments, and whose fault it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.worker import PackedFault, Share
from gleanrl.rollouts.loop import StepFault
from gleanrl.workers.crew import Crew, WorkerFault
from gleanrl.workers.handle import Timeouts
from gleanrl.workers.segment import Segment


def split(num_envs: int, num_processes: int) -> list[range]:
    """Return the numbers of each process's environments: neighbours, as evenly as can be, the first ones more."""
    size, more = divmod(num_envs, num_processes)
    starts = [w * size + min(w, more) for w in range(num_processes + 1)]
    return [range(begin, end) for begin, end in zip(starts, starts[1:], strict=False)]


class EnvCrew:
    """Workers with their shares of the environments. One thread at a time.

    Args:
        factories: one for each environment.
        num_processes: how many workers, at most as many as environments.
        timeouts: how long they may take.
        num_threads: torch threads of each.
        width: environments that each environment is itself (a batch in a batch), to count them in the flat batch.

    Raises:
        StepFault: if an environment couldn't be made; ``during`` is ``"construction"``.
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
        self._width = width
        self._during = "construction"
        makers = [Share(factories[share.start : share.stop], share.start) for share in self.shares]
        self._crew = self._guarded(lambda: Crew(makers, timeouts, num_threads, self._where))

    @property
    def segment(self) -> Segment:
        """The memory shared with the workers."""
        return self._crew.segment

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers."""
        return [worker.pid for worker in self._crew.workers]

    def signal(self, code: bytes, during: str) -> None:
        """Send a signal to every worker and wait.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        try:
            self._crew.signal(code)
        except WorkerFault as fault:
            raise self._translated(fault) from None

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
        return self._guarded(lambda: self._crew.request(name, arguments))

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
        return self._crew.closed

    @property
    def is_idle(self) -> bool:
        """Whether the workers live and have answered everything."""
        return self._crew.is_idle

    def close(self) -> None:
        """End the workers; their environments are closed there first.

        Raises:
            Exception: what the close of an environment raised.
        """
        self._crew.close()

    # ------------------------------------------------------------------ faults
    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except WorkerFault as fault:
            raise self._translated(fault) from None

    def _translated(self, fault: WorkerFault) -> StepFault:
        """Return the fault of an environment of the flat batch."""
        first = self.shares[fault.worker].start
        if isinstance(fault.cause, PackedFault):
            return fault.cause.fault(first * self._width)
        step = self._crew.workers[fault.worker].step if fault.lost and self._during == "step" else 0
        return StepFault(step, (first + fault.place) * self._width, self._during, fault.cause)

    def _where(self, worker: int, place: int, step: int) -> str:
        env = self.shares[worker].start + place
        at = f", step {step} of the batch" if self._during == "step" else ""
        return f"during the {self._during} of environment {env}{at}"
