"""What a Ray actor works on: a collector like any other, which collects what it is granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl import optional
from gleanrl.block import Block
from gleanrl.collectors import saving
from gleanrl.collectors.budget import Grant
from gleanrl.collectors.collection import Collection
from gleanrl.collectors.columns import IDS
from gleanrl.collectors.distributed.allowance import Allowance
from gleanrl.collectors.distributed.attending import Message, NodeEnd
from gleanrl.collectors.distributed.lending import Lender, Name, Offer, Place
from gleanrl.collectors.ledger import CollectorStats
from gleanrl.collectors.source import Source
from gleanrl.collectors.source_collector import SourceCollector
from gleanrl.collectors.tracking import Episode, Numbering
from gleanrl.collectors.workers.crew_source import CrewSource
from gleanrl.collectors.workers.servant import Given
from gleanrl.collectors.workers.weights import fields_of
from gleanrl.errors import CapacityError, ClosedError, WorkerError
from gleanrl.parcels import Parcel
from gleanrl.schema import Field, Schema
from gleanrl.system import clock
from gleanrl.tree import Path, as_key, iter_leaves
from gleanrl.workers.main import seed_globals
from gleanrl.workers.reports import Report


class Published(NamedTuple):
    """Weights of the policy, as they were sent to all nodes."""

    number: int = 0
    """Of this sending; 0 for none."""
    version: int = 0
    """What frames say of them."""
    refs: tuple[Any, ...] = ()
    """Where they are: one reference, to a `Parcel`, in a tuple, so that Ray fetches it only where it's asked for. None
    where the node has them, or an attendance brought them."""


class Order(NamedTuple):
    """What a node is told to collect: one batch."""

    number: int
    """Orders are numbered from 0; one that came before isn't carried out again."""
    grants: tuple[Grant, ...]
    """What may be collected beyond what was granted before."""
    weights: Published
    afresh: bool = False
    """Whether what was granted before, and is left, is forgotten."""
    reset: bool = False
    """Whether all environments are reset first."""
    wanted: int = 0
    """The first order whose batch may still be needed."""
    lend: bool = False
    """Whether the batch may stand in memory that the node lends."""
    after: int = 0
    """How many orders were given through the pipe before this one, which Ray brings."""


class Contents(NamedTuple):
    """What a batch holds, and where it is."""

    part: tuple[int, int] = (0, 1)
    """See `Collected.part`; of all nodes."""
    under_way: tuple[int, ...] = ()
    """Ids of the trajectories in the batch that don't end there."""
    place: Place | None = None
    """Where the batch stands in memory that the node lends; None if it goes through the object store."""


class Outcome(NamedTuple):
    """What came of an order."""

    number: int
    frames: int
    """In the batch."""
    flagged: int
    left: int
    """Frames that are granted and not collected, as far as orders were carried out."""
    next_id: int
    """The first local id that no frame has."""
    stats: CollectorStats
    """Of the node's collector."""
    idle_share: float
    weights: int
    """The number of the weights that it uses."""
    batch: Contents = Contents()
    report: Report | None = None
    """Of what collecting raised."""
    is_final: bool = False
    """Whether the node can't go on after that."""
    episodes: tuple[Episode, ...] = ()
    """Those that have ended since the order before, the last ones of them."""


class Answer(NamedTuple):
    """What came of a request."""

    value: Any = None
    report: Report | None = None


class NodeDescription(NamedTuple):
    """What a node's collector is like, told to its owner."""

    batch_size: torch.Size
    """Of a batch, without time."""
    done_paths: tuple[Path, ...]
    weights: Mapping[Path, Field] | None
    """Shapes and dtypes of the policy's; None if it has none."""
    memory: Name | None = None
    """That which it lends, if it can be seen by its owner."""


@dataclass(frozen=True)
class NodeRecipe:
    """How a node's collector is made.

    Attributes:
        collector: a class of ours.
        create_env_fn: its first argument.
        keywords: its others.
        numbering: which of the nodes it is.
        entropy: seeds the global generators of the actor's process.
        first_id: the first local id that may be used.
        seed: of its first environment, and whether all get the same; None for none.
        offer: what the owner would borrow; None for nothing.
    """

    collector: type[SourceCollector]
    create_env_fn: Any
    keywords: Mapping[str, Any]
    numbering: Numbering
    entropy: Sequence[int]
    first_id: int = 0
    seed: tuple[int, bool] | None = None
    offer: Offer | None = None

    def made(self, given: Given) -> SourceCollector:
        """Return the collector, with a policy or what makes it."""
        found, name = cloudpickle.loads(given.data), "policy_factory" if given.is_factory else "policy"
        return self.collector(self.create_env_fn, **self.keywords, **{name: found}, total_frames=-1)  # type: ignore[call-arg]


class Node:
    """A Ray actor's object. Ray calls one method at a time, in the owner's order.

    The batch of an order is lent, where it was collected; or it is pickled, straight from there, after `collect` has
    returned and before the next call: until then nobody writes there.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._lender: Lender | None = None
        self._lends = False
        self._sent = Published()
        self._episodes = 0  # those that were told of

    def start(self, recipe: NodeRecipe, given: Given) -> Answer:
        """Make the collector; answer with its `NodeDescription`."""
        try:
            seed_globals(recipe.entropy)
            self._numbering, self._first_id, self._next_id = (
                recipe.numbering,
                recipe.first_id,
                recipe.first_id,
            )
            self._collector = recipe.made(given)
            if recipe.seed is not None:
                self.seed(*recipe.seed)
            source = self._collector.source
            if recipe.offer is not None:
                self._offer(recipe.offer, source)
            self._allowance = Allowance(source.num_envs)
            self._weights = Published()
            self._begun, self._busy_s = clock.monotonic(), 0.0
            name = None if self._lender is None else self._lender.name
            return Answer(
                NodeDescription(source.batch_size, source.done_paths, _weights_of(self._collector), name)
            )
        except Exception as error:
            return Answer(report=Report.of(error))

    def _offer(self, offer: Offer, source: Source) -> None:
        """Have memory to lend, if the machine has any, and a collection fill it as it is."""
        with suppress(CapacityError):
            self._lender = Lender(offer)
        if isinstance(source, Collection):
            source.target = self._target

    def _target(self, schema: Schema, batch_size: torch.Size, num_steps: int) -> Block | None:
        """Return the memory that the next batch is to stand in."""
        return self._lender.block(schema, batch_size, num_steps) if self._lender and self._lends else None

    def attend(self, attendance: int, weights: Published) -> None:
        """Carry out the orders that come through the pipe; see `NodeEnd.attend`.

        Args:
            attendance: its number.
            weights: those that are asked for meanwhile.
        """
        self._sent = weights
        self._carry_out(lambda end: end.attend(attendance))

    def _carry_out(self, orders: Callable[[NodeEnd], Iterator[Message]]) -> None:
        """Carry out orders of the pipe, if there is one."""
        if self._lender is None:
            return
        end = self._lender.end
        for ticket, order in orders(end):
            try:
                end.answer(Message(ticket, self._collected(order)))
            except Exception as error:  # the batch can't be sent: the next outcome tells of its frames
                end.answer(Message(ticket, Report.of(error)))

    def collect(self, order: Order) -> tuple[Outcome, Parcel | None]:
        """Carry out an order; return what came of it, and the batch if there is one."""
        self._carry_out(lambda end: end.given_before(order.after))
        return self._collected(order)

    def _collected(self, order: Order) -> tuple[Outcome, Parcel | None]:
        collector, begun = self._collector, clock.monotonic()
        before, packed, report, is_final = collector.stats(), None, None, False
        if order.number >= self._asked:
            self._asked = order.number + 1
            try:
                self._prepare(order)
                packed = collector.serve(self._allowance, self._pack)
            except Exception as error:
                report = Report.of(error)
                is_final = isinstance(error, (WorkerError, ClosedError))
        ended = clock.monotonic()
        self._busy_s += ended - begun
        stats = collector.stats()
        parcel, contents = packed or (None, Contents())
        fresh, self._episodes = stats.episodes - self._episodes, stats.episodes
        outcome = Outcome(
            number=order.number,
            frames=handed_out(stats) - handed_out(before),
            flagged=stats.flagged - before.flagged,
            left=self._allowance.left(collector.source.spent),
            next_id=self._next_id,
            stats=stats,
            idle_share=1 - self._busy_s / max(ended - self._begun, 1e-9),
            weights=self._weights.number,
            batch=contents,
            report=report,
            is_final=is_final,
            episodes=tuple(collector.source.recent_episodes()[-fresh:]) if fresh else (),
        )
        return outcome, parcel

    def _prepare(self, order: Order) -> None:
        source = self._collector.source
        self._number, self._lends = order.number, order.lend
        if self._lender is not None:
            self._lender.take_back(order.wanted)
        if order.afresh:
            self._allowance.clear(source.spent)
        self._allowance.add(order.grants, source.spent)
        weights = order.weights
        if weights.number != self._weights.number:
            source.policy_version = weights.version - 1
            (ref,) = weights.refs or self._sent.refs
            source.push_weights(optional.ray().get(ref).view())
        else:
            source.policy_version = weights.version
        self._weights = weights
        if order.reset:
            source.reset()

    def _pack(self, batch: TensorDictBase, part: tuple[int, int]) -> tuple[Parcel | None, Contents]:
        """Return a batch with ids that no other node uses, ready to be sent."""
        if any(leaf.device.type != "cpu" for _, leaf in iter_leaves(batch) if isinstance(leaf, torch.Tensor)):
            batch = batch.to("cpu")
        ids = batch.get(as_key(IDS)).numpy()
        is_frame, local = ids >= 0, ids + self._first_id
        self._next_id = max(self._next_id, int(local.max()) + 1)
        np.copyto(ids, self._numbering(local), where=is_frame)  # where it stands: nobody else reads it there
        (worker, num_workers), (node, num_nodes) = part, self._numbering
        of_all = ((worker + self._first_id) % num_workers * num_nodes + node, num_workers * num_nodes)
        under_way = {*ids[is_frame].tolist()}
        for path in self._collector.source.done_paths:
            flag = batch.get(as_key(path)).numpy().reshape(*ids.shape, -1).any(-1)
            under_way.difference_update(ids[flag].tolist())
        place = self._lender.lend(self._number, batch) if self._lender and self._lends else None
        return None if place else Parcel(batch), Contents(of_all, tuple(under_way), place)

    def ask(self, name: str, *arguments: Any, after: int = 0) -> Answer:
        """Call one of the methods below, by its name, after so many orders of those that come through the pipe."""
        self._carry_out(lambda end: end.given_before(after))
        try:
            method: Callable[..., Any] = getattr(self, name)
            return Answer(method(*arguments))
        except Exception as error:
            return Answer(report=Report.of(error))

    def seed(self, seed: int, static_seed: bool) -> int:
        """Seed environments, random actions and what policies draw with, and reset; return the last seed used."""
        seed_globals([seed])
        return self._collector.set_seed(seed, static_seed)

    def reset(self, kwargs: Mapping[str, Any]) -> None:
        """Reset the environments."""
        self._collector.reset(**kwargs)

    def save(self) -> dict[str, Any]:
        """Return the collector's state: that after what is under way, which the owner's state lacks."""
        state = self._collector.state_dict()
        if isinstance(self._collector.source, Collection):
            state = saving.ahead(state)
        return {**state, "first_id": self._first_id}

    def parse(self, state: Mapping[str, Any], strict: bool) -> None:
        """Check a saved state."""
        self._collector.source.loading(_of_collector(state), strict)

    def load(self, state: Mapping[str, Any], strict: bool) -> tuple[CollectorStats, tuple[Episode, ...]]:
        """Go on from a saved state; return the counters, and the last episodes that have ended."""
        self._collector.load_state_dict(_of_collector(state), strict=strict)
        self._first_id = max(self._first_id, int(state.get("first_id", 0)))
        self._weights = Published()  # those of the state are others
        self._allowance.clear(self._collector.source.spent)
        stats, recent = self._collector.stats(), self._collector.source.recent_episodes()
        self._episodes = stats.episodes
        return stats, tuple(recent)

    def close(self) -> None:
        """End the collector."""
        self._collector.shutdown()


def _weights_of(collector: SourceCollector) -> Mapping[Path, Field] | None:
    source = collector.source
    if isinstance(source, Collection):
        return fields_of(source.weights.policy)
    assert isinstance(source, CrewSource)
    return source.description.weights


def _of_collector(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "first_id"}


def handed_out(stats: CollectorStats) -> int:
    """Return the frames of all batches."""
    return stats.delivered + stats.flagged
