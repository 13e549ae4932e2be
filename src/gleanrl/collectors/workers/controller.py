"""`WorkerController`, the owner's side of a collector's worker pool: grants, shares, losses and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

from gleanrl._arrays.block import Block
from gleanrl._arrays.tensordicts import as_key
from gleanrl._os import clock
from gleanrl._os.clock import Deadline
from gleanrl._process.shared_columns import Region, SharedSegment
from gleanrl._process.worker import Timeouts, WorkerPlan
from gleanrl._process.worker_pool import WorkerAnswer, WorkerPool
from gleanrl.collectors.source import Grant
from gleanrl.collectors.workers.progress import Progress, Restarts
from gleanrl.collectors.workers.shared_counters import CUT, GRANTED, NEXT_ID, SERVED, SharedCounters
from gleanrl.collectors.workers.weights import FollowedWeights
from gleanrl.collectors.workers.worker import SERVE, CollectorMaker, Description, Lists
from gleanrl.data.trajectories import MASK
from gleanrl.errors import SchemaError, WorkerError

PRELOAD = ("gleanrl.envs", "gleanrl.collectors.workers.worker")
"""Modules that the fork server imports before it forks workers; they import torch, tensordict and gymnasium."""


@dataclass(frozen=True)
class PoolConfig:
    """Configuration of a collector's worker pool.

    Attributes:
        makers: make the workers' collections, one for each worker.
        timeouts: how long workers may take.
        num_threads: torch threads of each worker.
        restarts: the rules for replacing lost workers.
        policy: the user's policy, whose weights the workers follow; None if the workers make it.
        following: until when workers follow its weights.
        enough: number of finished shares that ends the remaining ones; None for no such end.
        truncated: whether the last step of every share is marked as truncated.
    """

    makers: Sequence[CollectorMaker]
    timeouts: Timeouts
    num_threads: int
    restarts: Restarts
    policy: Any
    following: FollowedWeights
    enough: int | None = None
    truncated: bool = False


def require_alike(descriptions: Sequence[Description]) -> None:
    """Check that all workers' collections have the same columns and batch size.

    Raises:
        SchemaError: naming the worker and the differing keys.
    """
    first = descriptions[0]
    for worker, other in enumerate(descriptions):
        if other.batch_size != first.batch_size:
            raise SchemaError(
                f"create_env_fn: expected environments of one batch size, got {tuple(first.batch_size)} from worker 0 "
                f"and {tuple(other.batch_size)} from worker {worker}; use a collector for each kind"
            )
        if other.schema != first.schema:
            expected, found = first.schema.items(), other.schema.items()
            unlike = sorted(
                str(as_key(path)) for path in {*expected, *found} if expected.get(path) != found.get(path)
            )
            raise SchemaError(
                f"create_env_fn: expected equal keys, shapes and dtypes from all workers, but worker {worker} and "
                f"worker 0 differ in {unlike}; use a collector for each kind"
            )


LOST = "worker"
"""The reason for discarding frames of a lost worker."""
UNFINISHED = "unfinished"
"""The reason for discarding frames of shares under way at the end."""


class WorkerController:
    """Grants shares to workers, takes the finished ones, and replaces lost workers. One thread at a time may use it.

    All that must survive an interrupt is in the shared counters and in `now`. After an interrupt the next call
    continues from these: it sends missing signals again, and doesn't depend on answers that were dropped.

    The constructor starts the workers. If it raises, all of them have ended.

    Args:
        config: configuration of the workers.
        made_again: returns the maker of a replacement. It gets the worker's number, the number of its predecessors,
            and the first trajectory id that it may use. The method is held weakly, since its object holds the
            controller.

    Raises:
        SchemaError: the workers' collections differ; see `require_alike`.
        CapacityError, LaunchError: see `WorkerPool`.
        WorkerError: a worker was lost or too slow at its start, and isn't replaced.
        Exception: the error of a worker's construction.

    Attributes:
        now: the present state of the collection.
        counters: the shared counters of each worker.
        blocks: the blocks of all workers together, one for each slot.
        parts: for each slot, the block of each worker.
        descriptions: description of each worker's collection.
        description: description of the first worker's collection. All workers have the same columns.
    """

    def __init__(self, config: PoolConfig, made_again: Callable[[int, int, int], CollectorMaker]) -> None:
        self._restarts, self._made_again = config.restarts, WeakMethod(made_again)
        count = self.num_workers = len(config.makers)
        self.now = Progress.begin(count)
        self.counters: list[SharedCounters] = []
        self.blocks: list[Block] = []
        self.parts: list[list[Block]] = []
        self._answers: dict[int, WorkerAnswer | None] = {}  # by number of a request that `ask` waits for
        self._raising: set[int] = set()  # workers whose failed share was seen before its error arrived
        # For each worker, by slot: the share whose object columns have arrived.
        self._listed: list[dict[int, int]] = [{} for _ in range(count)]
        self._pool = WorkerPool(
            config.makers, WorkerPlan(config.timeouts, config.num_threads, PRELOAD, self._where)
        )
        try:
            slots = config.makers[0].num_slots
            self.counters += [SharedCounters(worker.progress, slots) for worker in self._pool.workers]
            self.descriptions: list[Description] = self.ask("describe")
            require_alike(self.descriptions)
            self.description = self.descriptions[0]
        except BaseException:
            with suppress(Exception):  # the error of the start matters more than one of the clean-up
                self._pool.close(0.0)
            raise

    @property
    def segment(self) -> SharedSegment:
        """The memory shared with the workers."""
        return self._pool.segment

    def use(self, region: Region) -> None:
        """Take shares from the blocks of a region from now on. Their first dimension is the worker."""
        self.blocks = [self.segment.block(region, slot) for slot in range(region.num_blocks)]
        self.parts = [[block.part(worker) for worker in range(self.num_workers)] for block in self.blocks]

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._pool.workers]

    def generation(self, worker: int) -> int:
        """Return how often a worker was replaced."""
        return self._pool.workers[worker].generation

    def check(self) -> None:
        """Raise `ClosedError` if the workers have ended, or if this process is a fork of their owner."""
        self._pool.check()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the workers' owner."""
        return self._pool.is_foreign

    @property
    def closed(self) -> bool:
        """Whether the workers have ended."""
        return self._pool.closed

    def close(self, because: str = "") -> None:
        """End the workers and discard all shares that aren't taken. No effect in a fork of their owner.

        Args:
            because: the reason, for the message of later calls.

        Raises:
            Exception: the first error of a worker's clean-up; all workers have ended nevertheless.
        """
        try:
            self._pool.close(because=because)
        finally:
            if self._pool.ended:
                self._write_off()

    def _write_off(self) -> None:
        """Count the frames of shares that were under way in workers that have ended."""
        for worker in range(len(self.counters)):
            self.discard(worker, UNFINISHED)
            if not self.is_down(worker):
                made, now = self._frames_made(worker), self.now
                before = now.losses[worker]
                losses = before._replace(number=before.number + 1, frames=before.frames + made)
                self.now = now.losing(worker, made, UNFINISHED, losses)

    # ----------------------------------------------------------------- grants
    def grant(self, worker: int, grant: Grant) -> None:
        """Grant a share to a worker, which must not be down.

        The share begins with a reset if an earlier call required one.

        Raises:
            ClosedError: the workers have ended, or this process is a fork of their owner.
        """
        self.check()
        self.counters[worker].grant(grant, self.now.resets[worker])
        if self.now.resets[worker]:
            self.now = self.now.with_worker(worker, resets=False)
        self._pool.send(worker, SERVE)  # last: if an interrupt prevents it, `_attend` sends it

    def is_down(self, worker: int) -> bool:
        """Return whether a worker was lost and isn't replaced yet."""
        return self.now.losses[worker].number > self._pool.workers[worker].generation

    def under_way(self, worker: int) -> int:
        """Return the number of a worker's shares that were granted and aren't taken.

        Of a worker that is down, only finished shares count.
        """
        return (
            self.counters[worker].words[SERVED if self.is_down(worker) else GRANTED]
            - self.now.num_consumed[worker]
        )

    def ready(self, worker: int) -> bool:
        """Return whether a worker's next share is finished and wanted; discard failed and unwanted ones before it.

        The result is False until the error of an earlier share, or the share's object columns, have arrived. If an
        interrupt dropped the object columns, the controller discards all shares of the worker that aren't taken; see
        `discard`.

        Raises:
            WorkerError: the share has fewer steps than were granted, and wasn't cut. The controller first discards all
                shares of the worker that aren't taken.
        """
        self._sweep(worker)
        number, counters = self.now.num_consumed[worker], self.counters[worker]
        if counters.num_served <= number or self.now.unwanted[worker] or self.raises(worker):
            return False
        if counters.is_short(number):
            made, granted = counters.share(number).num_steps, counters.granted_steps(number)
            self.discard(worker, "error")
            raise WorkerError(
                f"worker {worker} (process {self.processes[worker]}) made {made} of the {granted} steps that it was "
                "granted and answered that it was done; its share is discarded, its environments are reset before "
                "the next one"
            )
        if not self.description.schema.lists or self._listed[worker].get(self._slot(number)) == number:
            return True
        if max(self._listed[worker].values(), default=-1) > number or not self._pool.signals_due(worker):
            self.discard(worker, "interrupted")  # an interrupt dropped the answer with the object columns
        return False

    def raises(self, worker: int) -> bool:
        """Return whether the error of a failed share hasn't arrived yet. No later share is taken before it.

        The failure is visible in shared memory before the answer with the error arrives through the pipe.
        """
        if worker in self._raising and not self._pool.signals_due(worker):  # an interrupt dropped it
            self._raising.discard(worker)
        return worker in self._raising

    def _slot(self, number: int) -> int:
        return number % len(self.blocks)

    def _sweep(self, worker: int) -> None:
        """Discard a worker's next finished shares while they are unwanted or failed."""
        counters = self.counters[worker]
        while (number := self.now.num_consumed[worker]) < counters.num_served:
            if not (self.now.unwanted[worker] or counters.has_failed(number)):
                return
            if not self.now.unwanted[worker]:
                self._raising.add(worker)
            self.now = self.now.without(worker, counters.share(number))
        # The error of an unwanted share arrives with its answer. The share is unwanted until then, so that the error
        # isn't raised.
        if self.now.unwanted[worker] and not self.under_way(worker) and not self._pool.signals_due(worker):
            self.now = self.now.with_worker(worker, unwanted="", resets=True)

    def cut(self, worker: int, below: int) -> None:
        """Let a worker end its shares with numbers less than `below` after the present step."""
        self.counters[worker].words[CUT] = below

    def discard_all(self, reason: str) -> None:
        """Discard all shares that aren't taken; see `discard`."""
        for worker in range(len(self.counters)):
            self.discard(worker, reason)

    def discard(self, worker: int, reason: str) -> None:
        """Discard a worker's shares that aren't taken; its next one begins with a reset.

        Shares under way are cut, and discarded when they are finished. If they were unwanted already, their first
        reason stays. No effect without such shares, or in a fork of the owner.
        """
        if self.under_way(worker) and not self.is_foreign:
            if not self.now.unwanted[worker]:
                self.now = self.now.with_worker(worker, unwanted=reason)
            self.cut(worker, self.counters[worker].words[GRANTED])
            self._sweep(worker)

    def were_reset(self, workers: Iterable[int]) -> None:
        """Record that workers were reset by a request, so that their next shares need no reset."""
        for worker in workers:
            self.now = self.now.with_worker(worker, resets=False)

    def settle(self, deadline: Deadline | None = None) -> None:
        """Wait until no unwanted share is under way, or until the deadline; raise the errors of `wait`."""
        while any(self.now.unwanted):
            for worker in range(self.num_workers):
                self._sweep(worker)
            if not any(self.now.unwanted) or (deadline is not None and deadline.passed()):
                return
            self.wait(deadline)

    # ---------------------------------------------------------------- waiting
    def look(self) -> None:
        """Process all answers that have arrived, without waiting; see `wait`."""
        self.check()
        self._attend()
        while (answer := self._pool.wait_any(Deadline(0.0))) is not None:
            self._note(answer)

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait for one answer and process it. Replace lost workers that are due.

        The wait ends without an answer if none is due, at the deadline, or when the next lost worker is due to be
        replaced.

        Raises:
            Exception: the error that a worker raised in a wanted share.
            WorkerError: a worker was lost and isn't replaced. All workers have ended.
            ClosedError: the workers have ended, or this process is a fork of their owner.
        """
        self.check()
        dues = self._attend()
        if deadline is not None:
            dues.append(deadline)
        soonest = min(dues, key=lambda due: due.remaining() or 0.0) if dues else None
        answer = self._pool.wait_any(soonest)
        if answer is not None:
            self._note(answer)
        elif soonest is not None:
            clock.sleep(soonest.remaining() or 0.0)

    def _attend(self) -> list[Deadline]:
        """Replace the lost workers that are due, and return the deadlines of the remaining ones.

        It also sends signals that an interrupt has kept from being sent. A surplus signal does nothing, since the
        worker finds no grant.
        """
        dues: list[Deadline] = []
        for worker, counters in enumerate(self.counters):
            if not self.is_down(worker):
                missing = counters.words[GRANTED] - counters.words[SERVED]
                if missing:
                    for _ in range(missing - self._pool.signals_due(worker)):
                        self._pool.send(worker, SERVE)
                continue
            due = self._due(worker)
            if due.passed():
                counters.go_on()
                count, next_id = self.now.losses[worker].number, counters.words[NEXT_ID]
                made_again = self._made_again()
                assert made_again is not None, "the owner of the controller calls it"
                self._pool.replace(worker, made_again(worker, count, next_id))
            else:
                dues.append(due)
        return dues

    def _note(self, answer: WorkerAnswer) -> None:
        """Process an answer; drop it if its request was given up."""
        worker, error = answer.worker, answer.error
        if error is not None and (answer.lost or not self._pool.workers[worker].is_made):
            self._lost(worker, error)
        elif answer.request in self._answers:
            self._answers[answer.request] = answer
        elif not answer.request and error is not None:
            self._failed(worker, error)
        elif not answer.request and answer.value is not None:
            self._take_lists(worker, answer.value)

    def _take_lists(self, worker: int, lists: Lists) -> None:
        """Copy the object columns of a share into the block. They travel with the answer, not in shared memory."""
        block = self.blocks[self._slot(lists.number)]
        for path, objects in lists.columns.items():
            rows = block.column(path)[worker]
            rows.narrow(block.time_dim - 1, 0, objects.shape[block.time_dim - 1]).copy_(objects)
        self._listed[worker][self._slot(lists.number)] = lists.number

    def _failed(self, worker: int, error: BaseException) -> None:
        """Discard a failed share, and raise its error unless the share is unwanted."""
        unwanted = self.now.unwanted[worker]
        self._sweep(worker)
        self._raising.discard(worker)
        if not unwanted:
            raise error

    # ----------------------------------------------------------------- losses
    def _where(self, worker: int, item: int, step: int) -> str:
        """Return the worker's present activity as text for error messages."""
        if worker >= len(self.counters) or not self._pool.workers[worker].is_made:
            return "during its construction"
        counters = self.counters[worker]
        return f"in step {counters.under_way} of its share" if counters.is_at_work else "between two shares"

    def _lost(self, worker: int, error: BaseException) -> None:
        """Record the loss of a worker; raise its error and end all workers unless the worker will be replaced."""
        self._raising.discard(worker)
        if not self.is_down(worker):  # after an interrupt, the loss may have been counted already
            self._sweep(worker)  # the shares that it finished while they were unwanted
            made, now = self._frames_made(worker), self.now
            losses = self._restarts.after_loss(now.losses, worker, self.counters[worker].words[SERVED], made)
            self.now = now.losing(worker, made, LOST, losses)
        verdict = self.now.losses[worker].verdict
        if isinstance(verdict, str):
            with suppress(Exception):  # the loss matters more than errors of closing the other workers
                self.close(f"worker {worker} was lost: {type(error).__name__}")
            raise _with_advice(error, verdict)

    def _frames_made(self, worker: int) -> int:
        """Return the number of frames in the unfinished share of a lost worker."""
        counters = self.counters[worker]
        steps = counters.under_way
        if not steps:  # also before `description` and `blocks` exist
            return 0
        if MASK not in self.description.schema:
            return steps * max(1, self.description.batch_size.numel())
        block = self.blocks[self._slot(counters.words[SERVED])]
        return int(block.column(MASK)[worker].narrow(block.time_dim - 1, 0, steps).sum())

    def _due(self, worker: int) -> Deadline:
        """Return the deadline for the replacement of a worker that is down."""
        verdict = self.now.losses[worker].verdict
        if isinstance(verdict, str):  # an interrupt came before the error was raised
            self._lost(worker, WorkerError(f"worker {worker} was lost"))
        assert isinstance(verdict, Deadline)
        return verdict

    # --------------------------------------------------------------- requests
    def ask(self, name: str, arguments: Mapping[int, tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of workers' services; return the results in worker order.

        Workers answer between two shares. If a worker is lost meanwhile, its replacement is asked again. All workers
        have answered before the error of one is raised, the first one in worker order.

        Args:
            name: the method of `CollectorWorker`.
            arguments: its arguments, by worker; None to ask all workers without arguments.

        Raises:
            Exception: the error that a worker raised, in the method or in a share that was under way.
            WorkerError: a worker was lost and isn't replaced. All workers have ended.
        """
        requests = dict.fromkeys(range(self.num_workers), ()) if arguments is None else dict(arguments)
        numbers: dict[int, int] = {}
        try:
            missing = list(requests)
            while missing:
                for worker in missing:
                    if not self.is_down(worker) and not self._is_requested(worker, numbers.get(worker, -1)):
                        self._answers.pop(numbers.get(worker, -1), None)
                        numbers[worker] = self._pool.post(worker, name, *requests[worker])
                        self._answers[numbers[worker]] = None
                self.wait()  # a replacement can be asked after its first answer, that it was made
                missing = [worker for worker in missing if not self._answers.get(numbers.get(worker, -1))]
            answers = [self._answers[numbers[worker]] for worker in requests]
        finally:
            for number in numbers.values():
                self._answers.pop(number, None)
        for answer in answers:
            assert answer is not None
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers if answer is not None]

    def _is_requested(self, worker: int, number: int) -> bool:
        """Return whether a request was answered or is under way; it isn't if its worker was lost."""
        return self._answers.get(number) is not None or number in self._pool.workers[worker].due


def _with_advice(error: BaseException, advice: str) -> BaseException:
    """Return the error of a lost worker with advice in its message."""
    if not isinstance(error, WorkerError):
        return error
    advised = type(error)(f"{error}; {advice}")
    advised.__cause__ = error.__cause__
    return advised
