"""Grants, shares, losses and requests: the owner's dealings with its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from gleanrl.block import Block
from gleanrl.collectors.budget import Grant
from gleanrl.collectors.ledger import Ledger
from gleanrl.collectors.workers.servant import SERVE, CollectorMaker, Description
from gleanrl.collectors.workers.team import PRELOAD, Team, require_alike
from gleanrl.collectors.workers.words import (
    BUSY,
    CUT,
    EPISODES,
    FRAMES,
    GRANTED,
    IDLE,
    NEXT_ID,
    PUBLISHED,
    SERVED,
    Words,
)
from gleanrl.data.boundaries import MASK
from gleanrl.errors import WorkerError
from gleanrl.system import clock
from gleanrl.system.clock import Deadline
from gleanrl.workers.crew import Answer, Crew
from gleanrl.workers.handle import Plan
from gleanrl.workers.segment import Region, Segment

LOST = "worker"
"""Why frames of a worker that was lost are discarded."""
COUNTERS = (FRAMES, EPISODES, BUSY, IDLE)
"""The words that count what a worker has done since its start."""


class Standing(NamedTuple):
    """Where the collection stands. It goes from one to the next by one assignment, which no interrupt can cut."""

    ledger: Ledger
    taken: tuple[int, ...]
    """Shares of each worker that were delivered or discarded."""
    unwanted: tuple[str, ...]
    """Why the shares that a worker has under way will be discarded; nothing if they are wanted."""
    resets: tuple[bool, ...]
    """Whether a worker's next share begins with a reset."""

    def with_worker(self, worker: int, **changes: Any) -> Standing:
        """Return it with other values for one worker."""
        fresh: dict[str, Any] = {}
        for name, value in changes.items():
            entries = list(getattr(self, name))
            entries[worker] = value
            fresh[name] = tuple(entries)
        return self._replace(**fresh)


@dataclass
class _Down:
    """A worker that was lost, until another one is in its place."""

    until: Deadline
    served: int
    next_id: int
    own_weights: bool


class Dispatcher:
    """Gives grants to workers, takes their shares, and replaces those that are lost. One thread at a time.

    Args:
        team: what the workers are made of.
        made_again: makes a worker anew, given its number, how many had it before, and the first id that it may use.
        told: tells such a worker about weights, given its number, and whether it had weights of its own.

    Attributes:
        now: where the collection stands.
        words: of each worker.
        blocks: of all workers, one for each slot.
        descriptions: what the workers' collections are like.
        description: that of all of them, what it says of devices that of the first.
        before: what workers' predecessors have counted.
    """

    def __init__(
        self,
        team: Team,
        made_again: Callable[[int, int, int], CollectorMaker],
        told: Callable[[int, bool], None],
    ) -> None:
        self._restarts, self._made_again, self._told = team.restarts, made_again, told
        count = self.num_workers = len(team.makers)
        self.now = Standing(Ledger(), (0,) * count, ("",) * count, (False,) * count)
        self.before = [dict.fromkeys(COUNTERS, 0) for _ in range(count)]
        self.words: list[Words] = []
        self.blocks: list[Block] = []
        self._answers: dict[int, Answer | None] = {}
        self._starting: set[int] = set(range(count))
        self._down: dict[int, _Down] = {}
        self._serving: dict[int, tuple[int, int]] = {}  # requests for shares with lists: worker and number
        self._listed = [0] * count  # shares of each worker whose lists have arrived
        self._crew = Crew(team.makers, Plan(team.timeouts, team.num_threads, PRELOAD, self._where))
        try:
            slots = team.makers[0].num_slots
            self.words += [Words(worker.progress, slots) for worker in self._crew.workers]
            self.descriptions: list[Description] = self.ask("describe")
            require_alike(self.descriptions)
            self.description = self.descriptions[0]
        except BaseException:
            self._crew.close(0.0)
            raise

    @property
    def segment(self) -> Segment:
        """The memory shared with the workers."""
        return self._crew.segment

    def use(self, region: Region) -> None:
        """Take shares from a region, one part of its first dimension for each worker."""
        self.blocks = [self.segment.block(region, slot) for slot in range(region.num_blocks)]

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers."""
        return [worker.pid for worker in self._crew.workers]

    def generation(self, worker: int) -> int:
        """Return how often a worker was made anew."""
        return self._crew.workers[worker].generation

    @property
    def closed(self) -> bool:
        """Whether the workers have ended."""
        return self._crew.closed

    def close(self) -> None:
        """End the workers."""
        self._crew.close()

    # ----------------------------------------------------------------- grants
    def grant(self, worker: int, grant: Grant) -> None:
        """Let a worker collect a share."""
        number = self.words[worker].words[GRANTED]
        self.words[worker].grant(grant, self.now.resets[worker])
        self.now = self.now.with_worker(worker, resets=False)
        self._wake(worker, number)

    def _wake(self, worker: int, number: int) -> None:
        if self.description.schema.lists:
            self._serving[self._crew.post(worker, "serve")] = worker, number
        else:
            self._crew.send(worker, SERVE)

    def is_down(self, worker: int) -> bool:
        """Return whether a worker was lost and isn't replaced yet."""
        return worker in self._down

    def under_way(self, worker: int) -> int:
        """Return the shares of a worker that were granted and aren't taken."""
        return self.words[worker].words[GRANTED] - self.now.taken[worker]

    def ready(self, worker: int) -> bool:
        """Return whether a worker's next share is there, and wanted; those that failed are discarded on the way."""
        self._discard_failed(worker)
        number = self.now.taken[worker]
        arrived = self.words[worker].words[SERVED] > number and (
            not self.description.schema.lists or self._listed[worker] > number
        )
        return arrived and not self.now.unwanted[worker]

    def _discard_failed(self, worker: int) -> None:
        """Discard the next shares of a worker as long as they are unwanted, or failed."""
        words = self.words[worker]
        while (number := self.now.taken[worker]) < words.words[SERVED]:
            share, unwanted = (
                words.share(number),
                self.now.unwanted[worker] or self._lacks_lists(worker, number),
            )
            if not (share.failed or unwanted):
                return
            ledger = self.now.ledger.discarding(share.frames, share.reason if share.failed else unwanted)
            after = self.now._replace(ledger=ledger.discarding(share.excess, "budget"))
            self.now = after.with_worker(worker, taken=number + 1)
        if self.now.unwanted[worker] and not self.under_way(worker):
            self.now = self.now.with_worker(worker, unwanted="", resets=True)

    def _lacks_lists(self, worker: int, number: int) -> str:
        """Return why a share that was served is of no use: an interrupt has swallowed its lists."""
        pending = (worker, number) in self._serving.values() and self._crew.workers[worker].due
        whole = not self.description.schema.lists or self._listed[worker] > number or pending
        return "" if whole else "interrupted"

    def cut(self, worker: int, below: int) -> None:
        """Let a worker end its shares with numbers below that after the step at hand."""
        self.words[worker].words[CUT] = below

    def discard_all(self, reason: str) -> None:
        """Discard every share that is under way or open; the workers' next ones begin with a reset."""
        for worker in range(len(self.words)):
            self.discard(worker, reason)

    def discard(self, worker: int, reason: str) -> None:
        """Discard a worker's shares that are under way or open; its next one begins with a reset."""
        if self.under_way(worker):
            self.now = self.now.with_worker(worker, unwanted=self.now.unwanted[worker] or reason)
            self.cut(worker, self.words[worker].words[GRANTED])
            self._discard_failed(worker)

    def settle(self, deadline: Deadline | None = None) -> None:
        """Wait for the shares that nobody wants."""
        while any(self.now.unwanted):
            for worker in range(self.num_workers):
                self._discard_failed(worker)
            if not any(self.now.unwanted) or (deadline is not None and deadline.passed()):
                return
            self.wait(deadline)

    # ---------------------------------------------------------------- waiting
    def look(self) -> None:
        """Note what has happened, without waiting for anything; see `wait`."""
        self._revive()
        while (answer := self._crew.wait_any(Deadline(0.0))) is not None:
            self._note(answer)

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait until something has happened, and note it.

        Raises:
            Exception: what a worker raised.
            WorkerError: one was lost, and isn't made anew.
        """
        self._revive()
        dues = [down.until for down in self._down.values()] + ([] if deadline is None else [deadline])
        soonest = min(dues, key=lambda due: due.remaining() or 0.0, default=None)
        answer = self._crew.wait_any(soonest)
        if answer is not None:
            self._note(answer)
        else:
            self._wake_all(soonest)

    def _wake_all(self, soonest: Deadline | None) -> None:
        """Wake workers whose wake-up an interrupt has swallowed; if there are none, wait for the next one's time."""
        asleep = [
            worker
            for worker, words in enumerate(self.words)
            if worker not in self._down
            and words.words[SERVED] < words.words[GRANTED]
            and not self._crew.workers[worker].due
        ]
        for worker in asleep:
            self._wake(worker, self.words[worker].words[SERVED])
        if not asleep and soonest is not None:
            clock.sleep(soonest.remaining() or 0.0)

    def _note(self, answer: Answer) -> None:
        worker = answer.worker
        if answer.lost or (answer.error is not None and worker in self._starting):
            self._starting.discard(worker)
            assert answer.error is not None
            self._lost(worker, answer.error)
        elif answer.request in self._answers:
            self._answers[answer.request] = answer
        elif answer.error is not None:
            self._serving.pop(answer.request, None)
            self._failed(worker, answer.error)
        elif answer.request in self._serving:
            self._take_lists(*self._serving.pop(answer.request), answer.value)
        else:
            self._starting.discard(worker)

    def _take_lists(self, worker: int, number: int, lists: Mapping[Any, Any]) -> None:
        block = self.blocks[number % len(self.blocks)]
        for path, objects in lists.items():
            rows = block.column(path)[worker]
            rows.narrow(block.time_dim - 1, 0, objects.shape[block.time_dim - 1]).copy_(objects)
        self._listed[worker] = number + 1

    def _failed(self, worker: int, error: BaseException) -> None:
        """Raise what a worker raised while it collected, if its share is wanted."""
        unwanted = self.now.unwanted[worker]
        self._discard_failed(worker)
        if not unwanted:
            raise error

    # ----------------------------------------------------------------- losses
    def _where(self, worker: int, place: int, step: int) -> str:
        """Say what a worker was doing, for error messages."""
        if worker not in range(len(self.words)) or worker in self._starting:
            return "during its construction"
        words = self.words[worker]
        return f"in step {words.under_way} of its share" if words.is_at_work else "between two shares"

    def _lost(self, worker: int, error: BaseException) -> None:
        """Count what a lost worker had under way, and have another one take its place; or raise."""
        words = self.words[worker].words
        if worker in self._down:
            return
        made = self._frames_made(worker)
        served = words[SERVED]
        words[GRANTED] = served
        self._serving = {n: share for n, share in self._serving.items() if share[0] != worker}
        self.now = self.now._replace(ledger=self.now.ledger.discarding(made, LOST))
        self._discard_failed(worker)
        self.now = self.now.with_worker(worker, unwanted="")
        verdict = self._restarts.after_loss(worker, served)
        if isinstance(verdict, str):
            with suppress(Exception):  # what the others' ends raise matters less
                self._crew.close(because=f"worker {worker} was lost: {type(error).__name__}")
            raise _with_advice(error, verdict)
        self._down[worker] = _Down(verdict, served, words[NEXT_ID], bool(words[PUBLISHED] % 2))
        for counter, so_far in self.before[worker].items():
            self.before[worker][counter] = so_far + words[counter]
        self._revive()

    def _frames_made(self, worker: int) -> int:
        """Return the frames of the share that a lost worker had begun."""
        words = self.words[worker]
        steps = words.under_way
        if not steps:  # also of a worker that nothing is known of yet
            return 0
        if MASK not in self.description.schema:
            return steps * max(1, self.description.batch_size.numel())
        block = self.blocks[words.words[SERVED] % len(self.blocks)]
        return int(block.column(MASK)[worker].narrow(block.time_dim - 1, 0, steps).sum())

    def _revive(self) -> None:
        """Make those workers anew whose time has come."""
        for worker, down in list(self._down.items()):
            if not down.until.passed():
                continue
            generation = self._crew.workers[worker].generation + 1
            self._crew.replace(worker, self._made_again(worker, generation, down.next_id))
            self.words[worker].begin_at(down.served, down.next_id)
            self._told(worker, down.own_weights)
            self._starting.add(worker)
            self.now = self.now.with_worker(worker, resets=False)
            del self._down[worker]

    # --------------------------------------------------------------- requests
    def ask(self, name: str, arguments: Mapping[int, tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of workers' servants; return what each gave, in worker order.

        Workers answer at a share's edge. One that is lost meanwhile is asked again once it was made anew.
        """
        given = dict.fromkeys(range(self.num_workers), ()) if arguments is None else dict(arguments)
        numbers: dict[int, int] = {}
        try:
            while True:
                self._revive()
                for worker, values in given.items():
                    number = numbers.get(worker)
                    if worker not in self._down and (number is None or self._is_gone(worker, number)):
                        self._answers.pop(numbers.get(worker, 0), None)
                        numbers[worker] = self._crew.post(worker, name, *values)
                        self._answers[numbers[worker]] = None
                if all(worker in numbers and self._answers[numbers[worker]] for worker in given):
                    break
                self.wait()
            answers = [self._answers[numbers[worker]] for worker in given]
        finally:
            for number in numbers.values():
                self._answers.pop(number, None)
        for answer in answers:
            assert answer is not None
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers if answer is not None]

    def _is_gone(self, worker: int, number: int) -> bool:
        """Return whether a request was lost with its worker."""
        return self._answers.get(number) is None and number not in self._crew.workers[worker].due


def _with_advice(error: BaseException, advice: str) -> BaseException:
    """Return a worker's end as an error that says what can be done."""
    if not isinstance(error, WorkerError):
        return error
    advised = type(error)(f"{error}; {advice}")
    advised.__cause__ = error.__cause__
    return advised
