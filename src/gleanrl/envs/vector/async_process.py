"""A pool's environments in processes of their own, or several of them in one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._os.proc import run_on
from gleanrl._process.shared_columns import PLACE
from gleanrl._process.worker import Timeouts, WorkerPlan
from gleanrl._process.worker_main import WorkerContext
from gleanrl._process.worker_pool import WorkerPool
from gleanrl._rollout.errors import StepFault
from gleanrl.envs.vector.async_requests import PoolMember, ReceivedAnswer
from gleanrl.envs.vector.factories import Factory, with_own_copies
from gleanrl.envs.vector.independence import require_independent
from gleanrl.envs.vector.members import close_all
from gleanrl.envs.vector.parallel import PRELOAD
from gleanrl.envs.vector.worker import MASKED, pack, unpack
from gleanrl.errors import InvalidArgumentError, LengthError, WorkerError


@dataclass(frozen=True)
class PoolShare:
    """The environments of one worker: a function of its station makes what serves them.

    Attributes:
        factories: how they are made.
        cpus: the processors that it may run on; None for all.
    """

    factories: Sequence[Factory]
    cpus: Sequence[int] | None = None

    def __call__(self, station: WorkerContext) -> PoolService:
        """Make the environments."""
        station.progress[MASKED] = True  # unknown
        if self.cpus is not None:
            run_on(self.cpus)
        members = [PoolMember(factory) for factory in with_own_copies(self.factories)]
        try:
            for index, member in enumerate(members):
                station.progress[PLACE] = index
                member.construct()
            require_independent([member.env for member in members])
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                close_all([member.close for member in members])
            raise
        return PoolService(members, station.progress)


class PoolService:
    """Serves requests to several environments, one after the other.

    Args:
        members: the environments.
        progress: the worker's words.
    """

    def __init__(self, members: Sequence[PoolMember], progress: memoryview) -> None:
        self._members, self._progress = members, progress

    def signal(self, code: bytes) -> None:
        """Raise: there are none."""
        raise WorkerError(f"there's no signal {code!r}")

    def answer(self, place: int, number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        """Ask the environment number `place` of this worker; see `PoolMember.answer`."""
        self._progress[PLACE] = place
        value = self._members[place].answer(number, name, arguments)
        self._progress[MASKED] = any(member.masked for member in self._members)
        return parcelled(value)

    def close(self) -> None:
        """Close every environment."""
        close_all([member.close for member in self._members])


@dataclass(frozen=True)
class PoolMessage:
    """A TensorDict that travels packed and arrives as a TensorDict."""

    batch: TensorDictBase

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (pack(self.batch),)


def parcelled(value: Any) -> Any:
    """Return `value` with its TensorDicts ready to travel."""
    if type(value) is tuple:  # and no record or size
        return tuple(parcelled(item) for item in value)
    return PoolMessage(value) if isinstance(value, TensorDictBase) else value


class ProcessHost:
    """Environments in worker processes; see `Host`.

    The loss of a worker is the loss of its environments. The first of them that is renewed brings a new worker, in
    which all of them are made; the others stay lost until they are renewed, too.

    Args:
        given: one factory for each environment.
        shares: the numbers of each worker's environments.
        timeouts: how long workers may take.
        affinity: the processors of each worker; None for all of them.
    """

    def __init__(
        self,
        given: Sequence[Factory],
        shares: Sequence[range],
        timeouts: Timeouts,
        affinity: Sequence[Sequence[int]] | None,
    ) -> None:
        self._shares = shares
        masks = [None] * len(shares) if affinity is None else affinity
        self._makers = [
            PoolShare(given[share.start : share.stop], cpus)
            for share, cpus in zip(shares, masks, strict=True)
        ]
        self._plan = WorkerPlan(timeouts, 1, PRELOAD, self._where)
        self._doing = ["construction"] * len(given)
        self._asked: dict[int, tuple[int, int]] = {}  # environment and number by that of the crew's request
        self._making: dict[int, int] = {}  # workers whose environments are being made anew, likewise
        self._unmade: dict[int, BaseException] = {}  # why that failed
        self._orphans: dict[
            int, WorkerError
        ] = {}  # environments that were lost with a worker that has a successor
        self._crew: WorkerPool | None = None

    @property
    def _running(self) -> WorkerPool:
        assert self._crew is not None
        return self._crew

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers."""
        return [] if self._crew is None else [worker.pid for worker in self._crew.workers]

    def start(self) -> None:
        """Start the workers and let them make their environments."""
        try:
            self._crew = WorkerPool(self._makers, self._plan)
            answers = self._crew.wait_all()
            failed = max((a for a in answers if a.error), key=lambda answer: answer.lost, default=None)
            if failed is not None:
                assert failed.error is not None
                env = self._shares[failed.worker].start + self._crew.workers[failed.worker].place
                raise StepFault(0, env, "construction", failed.error)
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                self.close(0.0)
            raise

    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Have a method of a member called."""
        worker, place = self._at(env)
        self._doing[env] = name
        posted = self._running.post(worker, "answer", place, number, name, parcelled(arguments))
        self._asked[posted] = env, number

    def _at(self, env: int) -> tuple[int, int]:
        """Return an environment's worker, and its place there."""
        worker = next(w for w, share in enumerate(self._shares) if env in share)
        return worker, env - self._shares[worker].start

    def wait(self, deadline: Deadline) -> ReceivedAnswer | None:
        """Return what arrives next."""
        while (answer := self._running.wait_any(deadline)) is not None:
            if answer.request in self._making:
                worker = self._making.pop(answer.request)
                if answer.error is not None:
                    self._unmade[worker] = answer.error
            elif answer.request in self._asked:
                env, number = self._asked.pop(answer.request)
                error = self._unmade.get(answer.worker, answer.error) if answer.lost else answer.error
                return ReceivedAnswer(env, number, answer.value, error)
        return None

    def loss(self, env: int) -> WorkerError | None:
        """Return why an environment is lost."""
        worker, _ = self._at(env)
        return self._running.workers[worker].loss or self._orphans.get(env)

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask may restrict the actions of an environment, or of another one of its worker."""
        worker, _ = self._at(env)
        return bool(self._running.workers[worker].progress[MASKED])

    def renew(self, env: int) -> None:
        """Make an environment anew, and with it those that were lost together with it."""
        worker, _ = self._at(env)
        loss = self._running.workers[worker].loss
        if loss is not None:
            self._orphans.update(dict.fromkeys(self._shares[worker], loss))
            for other in self._shares[worker]:
                self._doing[other] = "construction"
            self._running.replace(worker, self._makers[worker])
            self._making[self._running.workers[worker].due[0]] = worker
            self._unmade.pop(worker, None)
        self._orphans.pop(env, None)

    def close(self, seconds: float | None = None) -> None:
        """End the workers; their environments are closed there first.

        Args:
            seconds: how long they have for that; None for what the timeouts say.
        """
        if self._crew is not None:
            self._crew.close(seconds)

    def _where(self, worker: int, place: int, step: int) -> str:
        env = self._shares[worker].start + place
        return f"during the {self._doing[env]} of environment {env}"


def affinity_masks(affinity: Any, num_workers: int) -> list[list[int]]:
    """Return the processors of each worker.

    Args:
        affinity: a sequence for each worker, or a function that returns one.
        num_workers: how many there are.

    Raises:
        LengthError: if there are more or fewer.
        InvalidArgumentError: for what aren't numbers of processors.
    """
    masks = [affinity(w) for w in range(num_workers)] if callable(affinity) else list(affinity)
    if len(masks) != num_workers:
        raise LengthError(
            f"worker_affinity: expected {num_workers} entries, one for each process, got {len(masks)}"
        )
    for mask in masks:
        if not mask or not all(isinstance(cpu, int) and cpu >= 0 for cpu in mask):
            raise InvalidArgumentError(f"worker_affinity: expected numbers of processors, got {mask!r}")
    return [list(mask) for mask in masks]
