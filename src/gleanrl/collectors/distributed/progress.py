"""State of a collection on nodes, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gleanrl.collectors.distributed.actor import Outcome, handed_out
from gleanrl.collectors.frame_accounting import NUM_RECENT, Episode, FrameCounts
from gleanrl.collectors.workers.progress import Consumed, Losses


class Call(NamedTuple):
    """An order under way."""

    number: int
    frames: int
    """Number of frames that it grants."""
    outcome: Any
    """The future outcome: a Ray reference, or the ticket of a pipe order."""
    batch: Any
    """Ray reference to the future batch; unused if the batch is lent or comes with the outcome."""


class ReceivedShare(NamedTuple):
    """An outcome with a wanted batch."""

    outcome: Outcome
    batch: Any
    """A Ray reference, or the share itself if it is lent."""


class Unwanted(NamedTuple):
    """Marks orders whose batches are discarded on arrival."""

    reason: str
    before: int
    """The first order whose batch is wanted again."""


NOTHING = Outcome(-1, 0, 0, 0, 0, FrameCounts().stats(), 0.0, 0)
"""The outcome of a node that has carried out no order."""


class NodeState(NamedTuple):
    """State of one node."""

    num_orders: int = 0
    """Number of orders sent to its actor."""
    calls: tuple[Call, ...] = ()
    """Orders under way, in order."""
    ready: tuple[ReceivedShare, ...] = ()
    """Batches that have arrived and were not delivered."""
    unwanted: Unwanted | None = None
    reset: bool = False
    """Whether its next order begins with a reset."""
    afresh: bool = False
    """Whether its next order first drops earlier grants that are left."""
    next_id: int = 0
    """The first unused local id."""
    served: int = 0
    """Number of collected batches, over all its actors."""
    outcome: Outcome = NOTHING
    """The last outcome of its current actor."""
    former: tuple[int, int] = (0, 0)
    """Frames and episodes of its former actors."""
    losses: Losses = Losses()
    down: bool = True
    """Whether it has no actor that is ready for orders."""

    @property
    def owed(self) -> int:
        """Number of granted frames that have not arrived."""
        return (0 if self.afresh else self.outcome.left) + sum(call.frames for call in self.calls)

    @property
    def wanted(self) -> int:
        """The first order whose batch may still be needed."""
        # May belong to a lost actor. Its order numbers can only delay that blocks are reclaimed.
        here = [arrival.outcome.number for arrival in self.ready]
        return min([self.num_orders, *here, *(call.number for call in self.calls)])

    @property
    def coming(self) -> int:
        """Maximum number of its frames on their way to the user."""
        return (0 if self.unwanted else self.owed) + sum(arrival.outcome.frames for arrival in self.ready)


class NodeProgress(NamedTuple):
    """State of the collection. One assignment replaces it, so an interrupt can't leave it half changed."""

    counts: FrameCounts
    nodes: tuple[NodeState, ...]
    under_way: Mapping[tuple[int, int], tuple[int, ...]] = MappingProxyType({})
    """Trajectories that continue after the last delivered batch, by node and part of its batches."""
    recent: tuple[Episode, ...] = ()
    """The last ended episodes of all nodes, in the order of arrival."""

    def with_node(self, number: int, **changes: Any) -> NodeProgress:
        """Return a copy with changed values for one node."""
        node = self.nodes[number]._replace(**changes)
        return self._replace(nodes=(*self.nodes[:number], node, *self.nodes[number + 1 :]))

    def arriving(self, number: int, outcome: Outcome, batch: Any) -> NodeProgress:
        """Return the state after the outcome of a node's first order under way; for `batch` see `ReceivedShare.batch`.

        The node's counters may include a batch that never arrived, because an interrupt came between sending the order
        and recording it. That batch and all later ones are discarded; otherwise a trajectory would have a gap.
        """
        node, counts = self.nodes[number], self.counts
        call, calls, before = node.calls[0], node.calls[1:], node.outcome.stats
        for reason, frames in outcome.stats.reasons.items():
            counts = counts.discarding(frames - before.reasons.get(reason, 0), reason)
        # Frames in the node's counters that belong to no outcome received so far.
        missing = handed_out(outcome.stats) - handed_out(before) - outcome.frames
        unwanted = node.unwanted.reason if node.unwanted and call.number < node.unwanted.before else ""
        reason = unwanted or ("interrupted" if missing else "")
        ready = node.ready
        if reason:
            counts = counts.discarding(outcome.frames + missing, reason)
        elif outcome.frames:
            ready = (*ready, ReceivedShare(outcome, batch))
        more_unwanted = bool(node.unwanted and calls and calls[0].number < node.unwanted.before)
        recent = (*self.recent, *outcome.episodes)[-NUM_RECENT:]
        after = self._replace(counts=counts, recent=recent).with_node(
            number,
            calls=calls,
            ready=ready,
            unwanted=node.unwanted if more_unwanted else None,
            next_id=max(node.next_id, outcome.next_id),
            served=node.served + bool(outcome.frames),
            outcome=outcome,
        )
        return after.discarding(number, reason) if missing and not unwanted else after

    def discarding(self, number: int, reason: str) -> NodeProgress:
        """Return the state after all ready batches of a node are discarded and its orders under way are unwanted."""
        node = self.nodes[number]
        frames = sum(arrival.outcome.frames for arrival in node.ready)
        after = self._replace(counts=self.counts.discarding(frames, reason))
        unwanted = Unwanted(reason, node.num_orders) if node.calls else None
        return after.with_node(number, ready=(), unwanted=unwanted, reset=True, afresh=True)

    def losing(self, number: int, frames: int, reason: str, losses: Losses) -> NodeProgress:
        """Return the state after a node lost its actor. Its ready batches stay, its orders under way are dropped.

        Args:
            number: index of the node.
            frames: frames that are lost with the actor.
            reason: reason of their discard.
            losses: the node's losses, including this one.
        """
        node = self.nodes[number]
        stats = node.outcome.stats
        restarted = NodeState(
            ready=node.ready,
            next_id=node.next_id,
            served=node.served,
            former=(node.former[0] + stats.stepped + frames, node.former[1] + stats.episodes),
            losses=losses,
        )
        after = self._replace(counts=self.counts.discarding(frames, reason))
        return after.with_node(number, **restarted._asdict())

    def delivering(self, consumed: Consumed) -> NodeProgress:
        """Return the state after a batch was delivered.

        A batch that was already delivered changes nothing, so an interrupted call can be repeated.
        """
        for number, batch in consumed.shares.items():
            ready = self.nodes[number].ready
            if not ready or ready[0].batch != batch:
                return self
        counts = self.counts.delivering(consumed.frames, consumed.flagged, consumed.counted, consumed.seconds)
        after = self._replace(counts=counts.discarding(consumed.excess, "budget"))
        under_way = dict(self.under_way)
        for number in consumed.shares:
            ready = self.nodes[number].ready
            batch = ready[0].outcome.batch
            under_way[number, batch.part[0]] = batch.under_way
            after = after.with_node(number, ready=ready[1:])
        return after._replace(under_way=under_way)
