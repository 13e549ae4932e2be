"""Where a collection on nodes stands, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gleanrl.collectors.distributed.actor import Outcome, handed_out
from gleanrl.collectors.frame_accounting import NUM_RECENT, Episode, FrameCounts
from gleanrl.collectors.workers.progress import Consumed, Losses


class Call(NamedTuple):
    """An order on its way."""

    number: int
    frames: int
    """That it grants."""
    outcome: Any
    """Where the outcome will be: a reference, or the ticket of an order that went through a pipe."""
    batch: Any
    """Where the batch will be, unless it is lent or comes with the outcome."""


class ReceivedShare(NamedTuple):
    """An outcome with a batch that is wanted."""

    outcome: Outcome
    batch: Any
    """Where it is: a reference, or the share itself, which is lent."""


class Unwanted(NamedTuple):
    """Orders whose batches are discarded as they arrive."""

    reason: str
    before: int
    """The first order whose batch is wanted again."""


NOTHING = Outcome(-1, 0, 0, 0, 0, FrameCounts().stats(), 0.0, 0)
"""What came of orders that nobody gave."""


class NodeState(NamedTuple):
    """Where one node stands."""

    asked: int = 0
    """Orders that were given to its actor."""
    calls: tuple[Call, ...] = ()
    """Those that are under way, in order."""
    ready: tuple[ReceivedShare, ...] = ()
    """What has arrived and wasn't handed out."""
    unwanted: Unwanted | None = None
    reset: bool = False
    """Whether its next order begins with a reset."""
    afresh: bool = False
    """Whether its next order begins with forgetting what is left of earlier grants."""
    next_id: int = 0
    """The first local id that no frame has."""
    served: int = 0
    """Batches that it has made, whatever actor it had."""
    outcome: Outcome = NOTHING
    """The last one of its actor."""
    former: tuple[int, int] = (0, 0)
    """Frames and episodes of the actors that it had before."""
    losses: Losses = Losses()
    down: bool = True
    """Whether it has no actor that is ready for orders."""

    @property
    def owed(self) -> int:
        """Frames that it was granted and that haven't arrived."""
        return (0 if self.afresh else self.outcome.left) + sum(call.frames for call in self.calls)

    @property
    def wanted(self) -> int:
        """The first order whose batch may still be needed."""
        # Maybe of an actor that was lost: no harm done.
        here = [arrival.outcome.number for arrival in self.ready]
        return min([self.asked, *here, *(call.number for call in self.calls)])

    @property
    def coming(self) -> int:
        """Frames of it that are on their way to the user, at most."""
        return (0 if self.unwanted else self.owed) + sum(arrival.outcome.frames for arrival in self.ready)


class NodeProgress(NamedTuple):
    """Where a collection stands. It goes from one to the next by one assignment, which no interrupt can cut."""

    ledger: FrameCounts
    nodes: tuple[NodeState, ...]
    under_way: Mapping[tuple[int, int], tuple[int, ...]] = MappingProxyType({})
    """The trajectories that don't end in what was handed out last, by node and part of its batches."""
    recent: tuple[Episode, ...] = ()
    """The last episodes that have ended, of all nodes, in the order of their arrival."""

    def with_node(self, number: int, **changes: Any) -> NodeProgress:
        """Return it with other values for one node."""
        node = self.nodes[number]._replace(**changes)
        return self._replace(nodes=(*self.nodes[:number], node, *self.nodes[number + 1 :]))

    def arriving(self, number: int, outcome: Outcome, batch: Any) -> NodeProgress:
        """Return it after the outcome of a node's first order under way has arrived; see `ReceivedShare.batch`.

        Batches that the node has made and that nobody can find any more, since an interrupt came between an order and
        its note, are discarded, and what follows them: it would have a hole before it.
        """
        node, ledger = self.nodes[number], self.ledger
        call, calls, before = node.calls[0], node.calls[1:], node.outcome.stats
        for reason, frames in outcome.stats.reasons.items():
            ledger = ledger.discarding(frames - before.reasons.get(reason, 0), reason)
        missing = handed_out(outcome.stats) - handed_out(before) - outcome.frames
        unwanted = node.unwanted.reason if node.unwanted and call.number < node.unwanted.before else ""
        reason = unwanted or ("interrupted" if missing else "")
        ready = node.ready
        if reason:
            ledger = ledger.discarding(outcome.frames + missing, reason)
        elif outcome.frames:
            ready = (*ready, ReceivedShare(outcome, batch))
        others = bool(node.unwanted and calls and calls[0].number < node.unwanted.before)
        recent = (*self.recent, *outcome.episodes)[-NUM_RECENT:]
        after = self._replace(ledger=ledger, recent=recent).with_node(
            number,
            calls=calls,
            ready=ready,
            unwanted=node.unwanted if others else None,
            next_id=max(node.next_id, outcome.next_id),
            served=node.served + bool(outcome.frames),
            outcome=outcome,
        )
        return after.discarding(number, reason) if missing and not unwanted else after

    def discarding(self, number: int, reason: str) -> NodeProgress:
        """Return it with all that a node has collected discarded, and all that is under way unwanted."""
        node = self.nodes[number]
        frames = sum(arrival.outcome.frames for arrival in node.ready)
        after = self._replace(ledger=self.ledger.discarding(frames, reason))
        unwanted = Unwanted(reason, node.asked) if node.calls else None
        return after.with_node(number, ready=(), unwanted=unwanted, reset=True, afresh=True)

    def losing(self, number: int, frames: int, reason: str, losses: Losses) -> NodeProgress:
        """Return it after a node's actor was lost, with so many frames; whoever comes next begins afresh."""
        node = self.nodes[number]
        stats = node.outcome.stats
        fresh = NodeState(
            ready=node.ready,
            next_id=node.next_id,
            served=node.served,
            former=(node.former[0] + stats.stepped + frames, node.former[1] + stats.episodes),
            losses=losses,
        )
        after = self._replace(ledger=self.ledger.discarding(frames, reason))
        return after.with_node(number, **fresh._asdict())

    def delivering(self, taken: Consumed) -> NodeProgress:
        """Return it after a batch was handed out; the same if it was already."""
        for number, batch in taken.shares.items():
            ready = self.nodes[number].ready
            if not ready or ready[0].batch != batch:
                return self
        ledger = self.ledger.delivering(taken.frames, taken.flagged, taken.counted, taken.seconds)
        after = self._replace(ledger=ledger.discarding(taken.excess, "budget"))
        under_way = dict(self.under_way)
        for number in taken.shares:
            ready = self.nodes[number].ready
            batch = ready[0].outcome.batch
            under_way[number, batch.part[0]] = batch.under_way
            after = after.with_node(number, ready=ready[1:])
        return after._replace(under_way=under_way)
