"""Host of an `AsyncEnvPool` that runs the environments in worker processes, one or several in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._os.proc import run_on
from gleanrl._process.shared_columns import ITEM
from gleanrl._process.worker import Timeouts, WorkerPlan
from gleanrl._process.worker_main import WorkerContext
from gleanrl._process.worker_pool import WorkerPool
from gleanrl._rollout.errors import StepFault
from gleanrl._util import non_negative
from gleanrl.envs.vector.async_requests import PoolMember, ReceivedAnswer
from gleanrl.envs.vector.factories import Factory, with_own_copies
from gleanrl.envs.vector.independence import require_independent
from gleanrl.envs.vector.members import close_all
from gleanrl.envs.vector.parallel import PRELOAD
from gleanrl.envs.vector.worker import MASKED, pack, unpack
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, LengthError, WorkerError


@dataclass(frozen=True)
class PoolShare:
    """Makes the service of one worker, in the worker.

    Attributes:
        factories: of the worker's environments.
        cpus: the processors that the worker may run on; None for all.
    """

    factories: Sequence[Factory]
    cpus: Sequence[int] | None = None

    def __call__(self, context: WorkerContext) -> PoolService:
        """Make the environments and return their service."""
        context.progress[MASKED] = True  # unknown before the first answer, and True is safe: the owner asks
        if self.cpus is not None:
            run_on(self.cpus)
        members = [PoolMember(factory) for factory in with_own_copies(self.factories)]
        try:
            for index, member in enumerate(members):
                context.progress[ITEM] = index
                member.construct()
            require_independent([member.env for member in members])
        except BaseException:
            with suppress(Exception):  # the error of the construction matters more than one of the clean-up
                close_all([member.close for member in members])
            raise
        return PoolService(members, context.progress)


class PoolService:
    """Answers requests to the environments of one worker, one after the other.

    Args:
        members: the environments.
        progress: the worker's entries in shared memory; `ITEM` and `MASKED` are written here.
    """

    def __init__(self, members: Sequence[PoolMember], progress: memoryview) -> None:
        self._members, self._progress = members, progress

    def signal(self, code: bytes) -> None:
        """Raise `WorkerError`, since pools use requests only."""
        raise WorkerError(f"there's no signal {code!r}")

    def answer(self, index: int, number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        """Pass a request to environment `index` of this worker and return its answer; see `PoolMember.answer`."""
        self._progress[ITEM] = index
        value = self._members[index].answer(number, name, arguments)
        self._progress[MASKED] = any(member.masked for member in self._members)
        return parcelled(value)

    def close(self) -> None:
        """Close every environment."""
        close_all([member.close for member in self._members])


@dataclass(frozen=True)
class PoolMessage:
    """A TensorDict that is pickled as arrays, by `pack`, and unpickled as a TensorDict."""

    batch: TensorDictBase

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (pack(self.batch),)


def parcelled(value: Any) -> Any:
    """Return `value` with its TensorDicts wrapped for pickling."""
    if type(value) is tuple:  # a NamedTuple or torch.Size would lose its type
        return tuple(parcelled(item) for item in value)
    return PoolMessage(value) if isinstance(value, TensorDictBase) else value


class ProcessHost:
    """A `RequestHost` of environments in worker processes.

    If a worker is lost, all of its environments are lost. The first reset of one of them starts a new worker, which
    makes all of them. The other environments stay lost until they are reset, too, since their episodes are gone.

    Args:
        makers: one factory for each environment.
        shares: the environment numbers of each worker.
        timeouts: how long workers may take.
        affinity: the processors of each worker; None for all processors.
    """

    def __init__(
        self,
        makers: Sequence[Factory],
        shares: Sequence[range],
        timeouts: Timeouts,
        affinity: Sequence[Sequence[int]] | None,
    ) -> None:
        self._shares = shares
        masks = [None] * len(shares) if affinity is None else affinity
        self._makers = [
            PoolShare(makers[share.start : share.stop], cpus)
            for share, cpus in zip(shares, masks, strict=True)
        ]
        self._plan = WorkerPlan(timeouts, 1, PRELOAD, self._where)
        self._doing = ["construction"] * len(makers)
        # By the worker pool's request number: the environment and its request number.
        self._requests: dict[int, tuple[int, int]] = {}
        # By the worker pool's request number: a new worker that is making its environments.
        self._making: dict[int, int] = {}
        # By worker: the error of a new worker that couldn't make its environments.
        self._unmade: dict[int, BaseException] = {}
        # By environment: the loss of its former worker, until the environment itself is renewed.
        self._orphans: dict[int, WorkerError] = {}
        self._pool: WorkerPool | None = None

    @property
    def _running(self) -> WorkerPool:
        assert self._pool is not None
        return self._pool

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers; empty before the start."""
        return [] if self._pool is None else [worker.pid for worker in self._pool.workers]

    def start(self) -> None:
        """Start the workers and wait until they have made their environments; after an error, end all workers.

        Raises:
            StepFault: an environment can't be made, or its worker ended or hung; ``during`` is ``"construction"``.
            CapacityError, UnsupportedError, LaunchError: see `WorkerPool`.
        """
        try:
            self._pool = WorkerPool(self._makers, self._plan)
            answers = self._pool.wait_all()
            failed = max((a for a in answers if a.error), key=lambda answer: answer.lost, default=None)
            if failed is not None:
                assert failed.error is not None
                env = self._shares[failed.worker].start + self._pool.workers[failed.worker].item
                raise StepFault(0, env, "construction", failed.error)
        except BaseException:
            with suppress(Exception):  # the error of the start matters more than one of the clean-up
                self.close(0.0)
            raise

    def post(self, env: int, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Send an environment's worker a request to call a method of its `PoolMember`."""
        worker, index = self._at(env)
        self._doing[env] = name
        posted = self._running.post(worker, "answer", index, number, name, parcelled(arguments))
        self._requests[posted] = env, number

    def _at(self, env: int) -> tuple[int, int]:
        """Return the worker of an environment, and the environment's position there."""
        worker = next(w for w, share in enumerate(self._shares) if env in share)
        return worker, env - self._shares[worker].start

    def wait(self, deadline: Deadline) -> ReceivedAnswer | None:
        """Return the next answer; see `RequestHost.wait`."""
        while (answer := self._running.wait_any(deadline)) is not None:
            if answer.request in self._making:
                worker = self._making.pop(answer.request)
                if answer.error is not None:
                    self._unmade[worker] = answer.error
            elif answer.request in self._requests:
                env, number = self._requests.pop(answer.request)
                # A worker ends if it can't make its environments: the error of that explains its loss.
                error = self._unmade.get(answer.worker, answer.error) if answer.lost else answer.error
                return ReceivedAnswer(env, number, answer.value, error)
        return None

    def loss(self, env: int) -> WorkerError | None:
        """Return the error of an environment's loss; None if it isn't lost."""
        worker, _ = self._at(env)
        return self._running.workers[worker].loss or self._orphans.get(env)

    def may_be_masked(self, env: int) -> bool:
        """Return whether a mask may restrict the actions of an environment or of another one in its worker."""
        worker, _ = self._at(env)
        return bool(self._running.workers[worker].progress[MASKED])

    def renew(self, env: int) -> None:
        """Let a lost environment accept requests again.

        The first environment of a lost worker starts a new one, which makes all of its environments.
        """
        worker, _ = self._at(env)
        loss = self._running.workers[worker].loss
        if loss is not None:
            self._orphans.update(dict.fromkeys(self._shares[worker], loss))
            for other in self._shares[worker]:
                self._doing[other] = "construction"
            self._running.replace(worker, self._makers[worker])
            # The first request of a new worker is to make its environments; `wait` consumes that answer.
            self._making[self._running.workers[worker].due[0]] = worker
            self._unmade.pop(worker, None)
        self._orphans.pop(env, None)

    def close(self, seconds: float | None = None) -> None:
        """Close the environments and end the workers.

        Args:
            seconds: how long they may take for it; None for the limit of the timeouts.

        Raises:
            Exception: the error that an environment raised when it was closed.
        """
        if self._pool is not None:
            self._pool.close(seconds)

    def _where(self, worker: int, index: int, step: int) -> str:
        env = self._shares[worker].start + index
        return f"during the {self._doing[env]} of environment {env}"


def affinity_masks(affinity: Any, num_workers: int) -> list[list[int]]:
    """Return the processors of each worker.

    Args:
        affinity: a sequence for each worker, or a function of the worker's number that returns one.
        num_workers: number of workers.

    Raises:
        LengthError: if the number of sequences isn't `num_workers`.
        InvalidTypeError: if `affinity` is neither a sequence nor a function.
        InvalidArgumentError: if an entry isn't a sequence, is empty, or holds anything but processor numbers.
    """
    masks = [affinity(w) for w in range(num_workers)] if callable(affinity) else affinity
    if not isinstance(masks, Iterable):
        raise InvalidTypeError(
            "worker_affinity: expected a list of processor numbers for each process, for example [[0], [1]], or a "
            f"function of the process number that returns one, got {masks!r}"
        )
    masks = list(masks)
    if len(masks) != num_workers:
        raise LengthError(
            f"worker_affinity: expected {num_workers} entries, one for each process, got {len(masks)}"
        )
    return [_processors(worker, mask) for worker, mask in enumerate(masks)]


def _processors(worker: int, mask: Any) -> list[int]:
    """Return the processors of one worker as a list.

    Raises:
        InvalidArgumentError: if `mask` isn't a sequence, is empty, or holds anything but processor numbers.
    """
    with suppress(TypeError, InvalidArgumentError):
        if found := [non_negative("worker_affinity", cpu) for cpu in mask]:
            return found
    raise InvalidArgumentError(
        f"worker_affinity: expected a list of processor numbers for process {worker}, for example [{worker}], got "
        f"{mask!r}; pass one list for each process, as in [[0], [1]]"
    )
