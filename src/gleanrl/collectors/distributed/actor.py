"""How nodes are made.

What a node may collect: batches granted by the owner, who counts frames of all nodes.

What a Ray actor works on: a collector like any other, which collects what it is granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl import _util
from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import Path, as_key, iter_leaves
from gleanrl._os import clock
from gleanrl._os.clock import Deadline
from gleanrl._process.remote_errors import Report
from gleanrl._process.serialization import PickledBatch
from gleanrl._process.worker_main import seed_globals
from gleanrl.collectors import checkpoint
from gleanrl.collectors.base import SourceCollector
from gleanrl.collectors.batch_columns import IDS
from gleanrl.collectors.distributed.local_transport import (
    Lender,
    MemoryLocation,
    Message,
    Name,
    NodeEnd,
    Offer,
)
from gleanrl.collectors.frame_accounting import CollectorStats, Episode, Numbering
from gleanrl.collectors.single_source import RolloutSource
from gleanrl.collectors.source import Grant, Source
from gleanrl.collectors.workers.source import CrewSource
from gleanrl.collectors.workers.weights import fields_of
from gleanrl.collectors.workers.worker import Given
from gleanrl.errors import CapacityError, ClosedError, SchemaError, WorkerError


class Allowance:
    """A queue of grants, found by the frames that were collected since it was empty.

    A batch that holds fewer frames than it was granted (steps that turned out to be none) leaves the rest, which is
    granted again.

    Args:
        num_envs: environments that step at once.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._grants: list[tuple[int, Grant]] = []
        self._end = 0

    def clear(self, spent: int) -> None:
        """Forget what is left, after so many frames."""
        self._grants, self._end = [], spent

    def add(self, grants: Iterable[Grant], spent: int) -> None:
        """Add grants, and forget those that are used up after so many frames."""
        self._grants = [(end, grant) for end, grant in self._grants if end > spent]
        for grant in grants:
            self._end += self.frames(grant, self._num_envs)
            self._grants.append((self._end, grant))

    @staticmethod
    def frames(grant: Grant, num_envs: int) -> int:
        """Return how many frames a grant is for."""
        frames = grant.num_steps * num_envs
        return frames if grant.most is None else min(frames, grant.most)

    def left(self, spent: int) -> int:
        """Return the frames that are granted, after so many."""
        return max(self._end - spent, 0)

    def grant(self, frames: int) -> Grant | None:
        """Return what the next batch may hold, after so many frames; None if there is none."""
        for end, grant in self._grants:
            if end > frames:
                most = end - frames
                return Grant(min(grant.num_steps, -(-most // self._num_envs)), grant.random, most)
        return None


class Published(NamedTuple):
    """Weights of the policy, as they were sent to all nodes."""

    number: int = 0
    """Of this sending; 0 for none."""
    version: int = 0
    """What frames say of them."""
    refs: tuple[Any, ...] = ()
    """Where they are: one reference, to a `PickledBatch`, in a tuple, so that Ray fetches it on request. None
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
    place: MemoryLocation | None = None
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


class NodeAnswer(NamedTuple):
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


class CollectorActor:
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

    def start(self, recipe: NodeRecipe, given: Given) -> NodeAnswer:
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
            return NodeAnswer(
                NodeDescription(source.batch_size, source.done_paths, _weights_of(self._collector), name)
            )
        except Exception as error:
            return NodeAnswer(report=Report.of(error))

    def _offer(self, offer: Offer, source: Source) -> None:
        """Have memory to lend, if the machine has any, and a collection fill it as it is."""
        with suppress(CapacityError):
            self._lender = Lender(offer)
        if isinstance(source, RolloutSource):
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

    def collect(self, order: Order) -> tuple[Outcome, PickledBatch | None]:
        """Carry out an order; return what came of it, and the batch if there is one."""
        self._carry_out(lambda end: end.given_before(order.after))
        return self._collected(order)

    def _collected(self, order: Order) -> tuple[Outcome, PickledBatch | None]:
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
            source.push_weights(_util.ray().get(ref).view())
        else:
            source.policy_version = weights.version
        self._weights = weights
        if order.reset:
            source.reset()

    def _pack(self, batch: TensorDictBase, part: tuple[int, int]) -> tuple[PickledBatch | None, Contents]:
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
        return None if place else PickledBatch(batch), Contents(of_all, tuple(under_way), place)

    def ask(self, name: str, *arguments: Any, after: int = 0) -> NodeAnswer:
        """Call one of the methods below, by its name, after so many orders of those that come through the pipe."""
        self._carry_out(lambda end: end.given_before(after))
        try:
            method: Callable[..., Any] = getattr(self, name)
            return NodeAnswer(method(*arguments))
        except Exception as error:
            return NodeAnswer(report=Report.of(error))

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
        if isinstance(self._collector.source, RolloutSource):
            state = checkpoint.ahead(state)
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
    if isinstance(source, RolloutSource):
        return fields_of(source.weights.policy)
    assert isinstance(source, CrewSource)
    return source.description.weights


def _of_collector(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "first_id"}


def handed_out(stats: CollectorStats) -> int:
    """Return the frames of all batches."""
    return stats.delivered + stats.flagged


@dataclass(frozen=True)
class NodeMaker:
    """How a node's actor is made.

    Attributes:
        recipe: of its collector.
        given: where what its policy is made of stands in the object store.
        options: of the actor.
        num_lent: batches that it may have lent at once; 0 if all go through the object store.
    """

    recipe: NodeRecipe
    given: Any
    options: Mapping[str, Any]
    num_lent: int = 0

    def started(self, ray: Any, recipe: NodeRecipe, deadline: Deadline) -> Starting:
        """Have an actor made, and what it works on, by a recipe like this one's."""
        offer = Offer.of(self.num_lent) if self.num_lent else None
        actor = ray.remote(CollectorActor).options(**self.options).remote()
        return Starting(actor, actor.start.remote(replace(recipe, offer=offer), self.given), deadline, offer)


class Starting(NamedTuple):
    """A node that is being made."""

    actor: Any
    ref: Any
    """Where its answer will be."""
    deadline: Deadline
    """By when it must be there."""
    offer: Offer | None


def unlike(found: Mapping[int, NodeDescription], number: int) -> SchemaError | None:
    """Return the error if a node isn't like the others."""
    other = min(found)
    one, first = found[number], found[other]
    if one == first._replace(weights=one.weights, memory=one.memory):
        return None
    return SchemaError(
        f"create_env_fn: node {number} makes batches {tuple(one.batch_size)} with the flags {one.done_paths}, node "
        f"{other} {tuple(first.batch_size)} with {first.done_paths}; use a collector for each kind"
    )
