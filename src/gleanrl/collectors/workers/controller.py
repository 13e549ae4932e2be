"""Grants, shares, losses and requests: the owner's dealings with its workers.

What a crew of collections is made of, and that its members are alike.
"""

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
"""What the launcher imports: with it torch, tensordict and gymnasium."""


@dataclass(frozen=True)
class Team:
    """What a crew of collections is made of.

    Attributes:
        makers: of the workers' collections.
        timeouts: how long workers may take.
        num_threads: torch threads of each.
        restarts: what becomes of lost ones.
        policy: the user's, whose weights are followed; None if it is made in the workers.
        following: until when.
        enough: how many shares end the others; None for all.
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
    """Raise unless all workers' collections have the same columns.

    Raises:
        SchemaError: naming the worker and what differs.
    """
    first = descriptions[0]
    for worker, other in enumerate(descriptions):
        if other.batch_size != first.batch_size:
            raise SchemaError(
                f"create_env_fn: worker {worker} has environments {tuple(other.batch_size)}, worker 0 "
                f"{tuple(first.batch_size)}; use a collector for each kind"
            )
        if other.schema != first.schema:
            mine, its = first.schema.items(), other.schema.items()
            unlike = sorted(str(as_key(path)) for path in {*mine, *its} if mine.get(path) != its.get(path))
            raise SchemaError(
                f"create_env_fn: worker {worker} and worker 0 differ in {unlike}; use a collector for each kind"
            )


LOST = "worker"
"""Why frames of a worker that was lost are discarded."""
UNFINISHED = "unfinished"
"""Why frames are discarded that were under way at the end."""


class WorkerController:
    """Gives grants to workers, takes their shares, and replaces those that are lost. One thread at a time.

    What counts stands in the shared words and in `now`. Wherever an interrupt comes, the next call goes on from there:
    signals that weren't sent are sent again, answers that were swallowed are missed by nobody.

    Args:
        team: what the workers are made of.
        made_again: makes a worker anew, given its number, how many had it before, and the first id that it may use; a
            method of whoever keeps the dispatcher, held weakly.

    Attributes:
        now: where the collection stands.
        words: of each worker.
        blocks: of all workers, one for each slot.
        parts: of each block, that of each worker.
        descriptions: what the workers' collections are like.
        description: that of all of them, what it says of devices that of the first.
    """

    def __init__(self, team: Team, made_again: Callable[[int, int, int], CollectorMaker]) -> None:
        self._restarts, self._made_again = team.restarts, WeakMethod(made_again)
        count = self.num_workers = len(team.makers)
        self.now = Progress.begin(count)
        self.words: list[SharedCounters] = []
        self.blocks: list[Block] = []
        self.parts: list[list[Block]] = []
        self._answers: dict[int, WorkerAnswer | None] = {}  # to requests that somebody waits for
        self._raising: set[int] = set()  # workers whose failed share was seen before its error
        self._listed: list[dict[int, int]] = [{} for _ in range(count)]  # whose lists are there, by slot
        self._crew = WorkerPool(
            team.makers, WorkerPlan(team.timeouts, team.num_threads, PRELOAD, self._where)
        )
        try:
            slots = team.makers[0].num_slots
            self.words += [SharedCounters(worker.progress, slots) for worker in self._crew.workers]
            self.descriptions: list[Description] = self.ask("describe")
            require_alike(self.descriptions)
            self.description = self.descriptions[0]
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                self._crew.close(0.0)
            raise

    @property
    def segment(self) -> SharedSegment:
        """The memory shared with the workers."""
        return self._crew.segment

    def use(self, region: Region) -> None:
        """Take shares from a region, one part of its first dimension for each worker."""
        self.blocks = [self.segment.block(region, slot) for slot in range(region.num_blocks)]
        self.parts = [[block.part(worker) for worker in range(self.num_workers)] for block in self.blocks]

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers."""
        return [worker.pid for worker in self._crew.workers]

    def generation(self, worker: int) -> int:
        """Return how often a worker was made anew."""
        return self._crew.workers[worker].generation

    def check(self) -> None:
        """Raise `ClosedError` if the workers have ended, or serve another process, which this one is a fork of."""
        self._crew.check()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a fork of the process whose workers they are."""
        return self._crew.is_foreign

    @property
    def closed(self) -> bool:
        """Whether the workers have ended."""
        return self._crew.closed

    def close(self, because: str = "") -> None:
        """End the workers; what they had under way is discarded."""
        try:
            self._crew.close(because=because)
        finally:
            if self._crew.ended:
                self._write_off()

    def _write_off(self) -> None:
        """Count what workers that have ended had under way."""
        for worker in range(len(self.words)):
            self.discard(worker, UNFINISHED)
            if not self.is_down(worker):
                made, now = self._frames_made(worker), self.now
                before = now.losses[worker]
                losses = before._replace(number=before.number + 1, frames=before.frames + made)
                self.now = now.losing(worker, made, UNFINISHED, losses)

    # ----------------------------------------------------------------- grants
    def grant(self, worker: int, grant: Grant) -> None:
        """Let a worker, which isn't down, collect a share."""
        self.check()
        self.words[worker].grant(grant, self.now.resets[worker])
        if self.now.resets[worker]:
            self.now = self.now.with_worker(worker, resets=False)
        self._crew.send(worker, SERVE)

    def is_down(self, worker: int) -> bool:
        """Return whether a worker was lost and isn't replaced yet."""
        return self.now.losses[worker].number > self._crew.workers[worker].generation

    def under_way(self, worker: int) -> int:
        """Return the shares of a worker that were granted, or, if it is down, finished, and aren't taken."""
        return self.words[worker].words[SERVED if self.is_down(worker) else GRANTED] - self.now.taken[worker]

    def ready(self, worker: int) -> bool:
        """Return whether a worker's next share is there, and wanted; those that failed are discarded on the way.

        Raises:
            WorkerError: the share has fewer steps than the worker was granted, and was not cut.
        """
        self._sweep(worker)
        number, words = self.now.taken[worker], self.words[worker]
        if words.words[SERVED] <= number or self.now.unwanted[worker] or self.raises(worker):
            return False
        if words.is_short(number):
            made, granted = words.share(number).num_steps, words.granted_steps(number)
            self.discard(worker, "error")
            raise WorkerError(
                f"worker {worker} (process {self.processes[worker]}) made {made} of the {granted} steps that it was "
                "granted and answered that it was done; its share is discarded, its environments are reset before "
                "the next one"
            )
        if not self.description.schema.lists or self._listed[worker].get(self._slot(number)) == number:
            return True
        if max(self._listed[worker].values(), default=-1) > number or not self._crew.signals_due(worker):
            self.discard(worker, "interrupted")  # which has swallowed the lists
        return False

    def raises(self, worker: int) -> bool:
        """Return whether the error of a failed share is on its way: it comes before any later share.

        A share's end is seen in shared memory, before the answer that has the error.
        """
        if worker in self._raising and not self._crew.signals_due(worker):  # an interrupt has swallowed it
            self._raising.discard(worker)
        return worker in self._raising

    def _slot(self, number: int) -> int:
        return number % len(self.blocks)

    def _sweep(self, worker: int) -> None:
        """Discard the next shares of a worker as long as they are unwanted, or failed."""
        words = self.words[worker]
        while (number := self.now.taken[worker]) < words.words[SERVED]:
            if not (self.now.unwanted[worker] or words.has_failed(number)):
                return
            if not self.now.unwanted[worker]:
                self._raising.add(worker)
            self.now = self.now.without(worker, words.share(number))
        # What an unwanted share raised arrives with its answer: it's unwanted until then.
        if self.now.unwanted[worker] and not self.under_way(worker) and not self._crew.signals_due(worker):
            self.now = self.now.with_worker(worker, unwanted="", resets=True)

    def cut(self, worker: int, below: int) -> None:
        """Let a worker end its shares with numbers below that after the step at hand."""
        self.words[worker].words[CUT] = below

    def discard_all(self, reason: str) -> None:
        """Discard every share that is under way or open; the workers' next ones begin with a reset."""
        for worker in range(len(self.words)):
            self.discard(worker, reason)

    def discard(self, worker: int, reason: str) -> None:
        """Discard a worker's shares that are under way or open; its next one begins with a reset."""
        if self.under_way(worker) and not self.is_foreign:
            if not self.now.unwanted[worker]:
                self.now = self.now.with_worker(worker, unwanted=reason)
            self.cut(worker, self.words[worker].words[GRANTED])
            self._sweep(worker)

    def were_reset(self, workers: Iterable[int]) -> None:
        """Note that workers were reset in another way: their next shares need not begin with it."""
        for worker in workers:
            self.now = self.now.with_worker(worker, resets=False)

    def settle(self, deadline: Deadline | None = None) -> None:
        """Wait for the shares that nobody wants."""
        while any(self.now.unwanted):
            for worker in range(self.num_workers):
                self._sweep(worker)
            if not any(self.now.unwanted) or (deadline is not None and deadline.passed()):
                return
            self.wait(deadline)

    # ---------------------------------------------------------------- waiting
    def look(self) -> None:
        """Note what has happened, without waiting for anything; see `wait`."""
        self.check()
        self._attend()
        while (answer := self._crew.wait_any(Deadline(0.0))) is not None:
            self._note(answer)

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait until something has happened, and note it.

        Raises:
            Exception: what a worker raised.
            WorkerError: one was lost, and isn't made anew.
        """
        self.check()
        dues = self._attend()
        if deadline is not None:
            dues.append(deadline)
        soonest = min(dues, key=lambda due: due.remaining() or 0.0) if dues else None
        answer = self._crew.wait_any(soonest)
        if answer is not None:
            self._note(answer)
        elif soonest is not None:
            clock.sleep(soonest.remaining() or 0.0)

    def _attend(self) -> list[Deadline]:
        """Make those workers anew whose time has come, and return when that of others comes.

        Signals that an interrupt has kept from being sent are sent; one too many does nothing.
        """
        dues: list[Deadline] = []
        for worker, view in enumerate(self.words):
            if not self.is_down(worker):
                missing = view.words[GRANTED] - view.words[SERVED]
                if missing:
                    for _ in range(missing - self._crew.signals_due(worker)):
                        self._crew.send(worker, SERVE)
                continue
            due = self._due(worker)
            if due.passed():
                view.go_on()
                count, next_id = self.now.losses[worker].number, view.words[NEXT_ID]
                made_again = self._made_again()
                assert made_again is not None, "whoever keeps the dispatcher calls it"
                self._crew.replace(worker, made_again(worker, count, next_id))
            else:
                dues.append(due)
        return dues

    def _note(self, answer: WorkerAnswer) -> None:
        """Note an answer; those to requests that were given up are dropped."""
        worker, error = answer.worker, answer.error
        if error is not None and (answer.lost or not self._crew.workers[worker].is_made):
            self._lost(worker, error)
        elif answer.request in self._answers:
            self._answers[answer.request] = answer
        elif not answer.request and error is not None:
            self._failed(worker, error)
        elif not answer.request and answer.value is not None:
            self._take_lists(worker, answer.value)

    def _take_lists(self, worker: int, lists: Lists) -> None:
        block = self.blocks[self._slot(lists.number)]
        for path, objects in lists.columns.items():
            rows = block.column(path)[worker]
            rows.narrow(block.time_dim - 1, 0, objects.shape[block.time_dim - 1]).copy_(objects)
        self._listed[worker][self._slot(lists.number)] = lists.number

    def _failed(self, worker: int, error: BaseException) -> None:
        """Raise what a worker raised while it collected, if its share is wanted."""
        unwanted = self.now.unwanted[worker]
        self._sweep(worker)
        self._raising.discard(worker)
        if not unwanted:
            raise error

    # ----------------------------------------------------------------- losses
    def _where(self, worker: int, place: int, step: int) -> str:
        """Say what a worker was doing, for error messages."""
        if worker >= len(self.words) or not self._crew.workers[worker].is_made:
            return "during its construction"
        words = self.words[worker]
        return f"in step {words.under_way} of its share" if words.is_at_work else "between two shares"

    def _lost(self, worker: int, error: BaseException) -> None:
        """Count what a lost worker had under way; raise, unless another one is to take its place."""
        self._raising.discard(worker)
        if not self.is_down(worker):
            self._sweep(worker)
            made, now = self._frames_made(worker), self.now
            losses = self._restarts.after_loss(now.losses, worker, self.words[worker].words[SERVED], made)
            self.now = now.losing(worker, made, LOST, losses)
        verdict = self.now.losses[worker].verdict
        if isinstance(verdict, str):
            with suppress(Exception):  # what the others' ends raise matters less
                self.close(f"worker {worker} was lost: {type(error).__name__}")
            raise _with_advice(error, verdict)

    def _frames_made(self, worker: int) -> int:
        """Return the frames of the share that a lost worker had begun."""
        words = self.words[worker]
        steps = words.under_way
        if not steps:  # also of a worker that nothing is known of yet
            return 0
        if MASK not in self.description.schema:
            return steps * max(1, self.description.batch_size.numel())
        block = self.blocks[self._slot(words.words[SERVED])]
        return int(block.column(MASK)[worker].narrow(block.time_dim - 1, 0, steps).sum())

    def _due(self, worker: int) -> Deadline:
        """Return when a worker that is down is to be replaced."""
        verdict = self.now.losses[worker].verdict
        if isinstance(verdict, str):  # an interrupt has kept it from being raised
            self._lost(worker, WorkerError(f"worker {worker} was lost"))
        assert isinstance(verdict, Deadline)
        return verdict

    # --------------------------------------------------------------- requests
    def ask(self, name: str, arguments: Mapping[int, tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of workers' servants; return what each gave, in worker order.

        Workers answer at a share's edge. One that is lost meanwhile is asked again once it was made anew.
        """
        given = dict.fromkeys(range(self.num_workers), ()) if arguments is None else dict(arguments)
        numbers: dict[int, int] = {}
        try:
            missing = list(given)
            while missing:
                for worker in missing:
                    if not self.is_down(worker) and not self._is_asked(worker, numbers.get(worker, -1)):
                        self._answers.pop(numbers.get(worker, -1), None)
                        numbers[worker] = self._crew.post(worker, name, *given[worker])
                        self._answers[numbers[worker]] = None
                self.wait()  # a lost worker's successor says that it was made: then it is asked
                missing = [worker for worker in missing if not self._answers.get(numbers.get(worker, -1))]
            answers = [self._answers[numbers[worker]] for worker in given]
        finally:
            for number in numbers.values():
                self._answers.pop(number, None)
        for answer in answers:
            assert answer is not None
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers if answer is not None]

    def _is_asked(self, worker: int, number: int) -> bool:
        """Return whether a request was answered, or is still to be: it isn't if it was lost with its worker."""
        return self._answers.get(number) is not None or number in self._crew.workers[worker].due


def _with_advice(error: BaseException, advice: str) -> BaseException:
    """Return a worker's end as an error that says what can be done."""
    if not isinstance(error, WorkerError):
        return error
    advised = type(error)(f"{error}; {advice}")
    advised.__cause__ = error.__cause__
    return advised
