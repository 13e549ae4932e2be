"""The Ray actor of a node: its collector, the orders that it carries out, and their outcomes.

The owner process grants frames to nodes and counts the frames of all nodes together.
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
    MemoryLocation,
    Message,
    Name,
    NodeEnd,
    Offer,
    SharedBlockPool,
)
from gleanrl.collectors.frame_accounting import CollectorStats, Episode, Numbering
from gleanrl.collectors.single_source import RolloutSource
from gleanrl.collectors.source import Grant, Source
from gleanrl.collectors.workers.source import WorkerSource
from gleanrl.collectors.workers.weights import fields_of
from gleanrl.collectors.workers.worker import PickledPolicy
from gleanrl.errors import CapacityError, ClosedError, SchemaError, WorkerError


class Allowance:
    """A queue of grants, each with the number of collected frames at which it is used up.

    A batch may hold fewer frames than were granted, if some steps were no frames. The missing frames stay granted.

    Args:
        num_envs: number of environments that step at once.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._grants: list[tuple[int, Grant]] = []
        self._end = 0

    def clear(self, spent: int) -> None:
        """Drop all grants. Later ones count from `spent` frames on."""
        self._grants, self._end = [], spent

    def add(self, grants: Iterable[Grant], spent: int) -> None:
        """Add grants, and drop grants that are used up after `spent` frames."""
        self._grants = [(end, grant) for end, grant in self._grants if end > spent]
        for grant in grants:
            self._end += self.frames(grant, self._num_envs)
            self._grants.append((self._end, grant))

    @staticmethod
    def frames(grant: Grant, num_envs: int) -> int:
        """Return the number of frames of a grant."""
        frames = grant.num_steps * num_envs
        return frames if grant.most is None else min(frames, grant.most)

    def left(self, spent: int) -> int:
        """Return the number of granted frames that are left after `spent` frames."""
        return max(self._end - spent, 0)

    def grant(self, frames: int) -> Grant | None:
        """Return the grant of the next batch, after `frames` collected frames; None if nothing is granted."""
        for end, grant in self._grants:
            if end > frames:
                most = end - frames
                return Grant(min(grant.num_steps, -(-most // self._num_envs)), grant.random, most)
        return None


class Published(NamedTuple):
    """One version of the policy's weights, as sent to the nodes."""

    number: int = 0
    """Counts the publications; 0 for none."""
    version: int = 0
    """The policy version that frames carry."""
    refs: tuple[Any, ...] = ()
    """A one-element tuple with the Ray reference to a `PickledBatch`. Ray resolves top-level references of a call at
    once; inside a tuple the node fetches the weights only if it needs them. Empty if the node already has the weights,
    or gets them with an `attend` call."""


class Order(NamedTuple):
    """An order to a node to collect one batch."""

    number: int
    """Orders are numbered from 0. A node carries out each number once, even if the order is sent again."""
    grants: tuple[Grant, ...]
    """Grants in addition to earlier ones."""
    weights: Published
    afresh: bool = False
    """Whether earlier grants that are left are dropped."""
    reset: bool = False
    """Whether all environments are reset first."""
    wanted: int = 0
    """The first order whose batch may still be needed."""
    lend: bool = False
    """Whether the batch may use memory that the node lends."""
    after: int = 0
    """For an order through Ray: how many pipe orders were sent before it."""


class Contents(NamedTuple):
    """Contents and location of a batch."""

    part: tuple[int, int] = (0, 1)
    """See `Collected.part`; counted over all nodes."""
    under_way: tuple[int, ...] = ()
    """Ids of the trajectories that continue after the batch."""
    location: MemoryLocation | None = None
    """Location of the batch in memory that the node lends; None if it goes through the object store."""


class Outcome(NamedTuple):
    """The result of an order."""

    number: int
    frames: int
    """Frames of the batch, flagged ones included; 0 if there is no batch."""
    flagged: int
    """Frames of the batch that are marked as not finite."""
    left: int
    """Frames that are granted and not collected yet, by the orders carried out so far."""
    next_id: int
    """The first unused local id."""
    stats: CollectorStats
    """Counters of the node's collector."""
    idle_share: float
    weights: int
    """Number of the publication of the weights that the node uses."""
    batch: Contents = Contents()
    report: Report | None = None
    """The exception of the collection, if there was one."""
    is_final: bool = False
    """Whether the exception ended the node's collector."""
    episodes: tuple[Episode, ...] = ()
    """The episodes that have ended since the previous outcome; of more than `NUM_RECENT`, the last ones."""


class NodeAnswer(NamedTuple):
    """The result of a request."""

    value: Any = None
    report: Report | None = None


class NodeDescription(NamedTuple):
    """Properties of a node's collector, sent to the owner."""

    batch_size: torch.Size
    """Batch dimensions of a batch, without time."""
    done_paths: tuple[Path, ...]
    weights: Mapping[Path, Field] | None
    """Shapes and dtypes of the policy's weights; None if it has none."""
    memory: Name | None = None
    """Name of the memory that the node lends; None if it lends none."""


@dataclass(frozen=True)
class NodeRecipe:
    """Config of a node's collector.

    Attributes:
        collector: a collector class of this library.
        create_env_fn: its first argument.
        keywords: its other arguments.
        numbering: the node's index and the number of nodes.
        entropy: seeds the global generators of the actor's process.
        first_id: the first local id that may be used.
        seed: seed of the first environment, and whether all environments get the same seed; None leaves them unseeded.
        offer: the owner's offer to borrow memory; None to lend none.
    """

    collector: type[SourceCollector]
    create_env_fn: Any
    keywords: Mapping[str, Any]
    numbering: Numbering
    entropy: Sequence[int]
    first_id: int = 0
    seed: tuple[int, bool] | None = None
    offer: Offer | None = None

    def made(self, policy: PickledPolicy) -> SourceCollector:
        """Make and return the collector, with the given policy or policy factory and an endless budget."""
        found, name = cloudpickle.loads(policy.data), "policy_factory" if policy.is_factory else "policy"
        return self.collector(self.create_env_fn, **self.keywords, **{name: found}, total_frames=-1)  # type: ignore[call-arg]


class CollectorActor:
    """The Ray actor of a node. Ray calls one method at a time, in the owner's order.

    A batch stays in the memory where it was collected. The node either lends this memory to the owner, or Ray pickles
    the batch after `collect` has returned. Ray does so before the next call, so the memory is not overwritten before it
    is pickled.
    """

    def __init__(self) -> None:
        self._next_order = 0
        self._block_pool: SharedBlockPool | None = None
        self._lends = False
        self._sent = Published()
        self._episodes = 0  # number of ended episodes already reported to the owner

    def start(self, recipe: NodeRecipe, policy: PickledPolicy) -> NodeAnswer:
        """Seed the process, make the collector and return its `NodeDescription`; or return a `Report` of the exception.

        If `recipe` offers to borrow memory, but the machine lacks it, the node lends none.
        """
        try:
            seed_globals(recipe.entropy)
            self._numbering, self._first_id, self._next_id = (
                recipe.numbering,
                recipe.first_id,
                recipe.first_id,
            )
            self._collector = recipe.made(policy)
            if recipe.seed is not None:
                self.seed(*recipe.seed)
            source = self._collector.source
            if recipe.offer is not None:
                self._offer(recipe.offer, source)
            self._allowance = Allowance(source.num_envs)
            self._weights = Published()
            self._begun, self._busy_s = clock.monotonic(), 0.0
            name = None if self._block_pool is None else self._block_pool.name
            return NodeAnswer(
                NodeDescription(source.batch_size, source.done_paths, _weights_of(self._collector), name)
            )
        except Exception as error:
            return NodeAnswer(report=Report.of(error))

    def _offer(self, offer: Offer, source: Source) -> None:
        """Create memory to lend, if the machine has enough, and let a single-process source write to it directly."""
        with suppress(CapacityError):
            self._block_pool = SharedBlockPool(offer)
        if isinstance(source, RolloutSource):
            source.target = self._target

    def _target(self, schema: Schema, batch_size: torch.Size, num_steps: int) -> Block | None:
        """Return the memory for the next batch; None to use the source's own."""
        return (
            self._block_pool.block(schema, batch_size, num_steps)
            if self._block_pool and self._lends
            else None
        )

    def attend(self, attendance: int, weights: Published) -> None:
        """Carry out the orders in the pipe; see `NodeEnd.attend`.

        Args:
            attendance: number of this call.
            weights: the weights for orders in the pipe, which carry no references.
        """
        self._sent = weights
        self._carry_out(lambda end: end.attend(attendance))

    def _carry_out(self, orders: Callable[[NodeEnd], Iterator[Message]]) -> None:
        """Carry out the orders that `orders` reads from the pipe, if the node has one."""
        if self._block_pool is None:
            return
        end = self._block_pool.end
        for ticket, order in orders(end):
            try:
                end.answer(Message(ticket, self._collected(order)))
            except Exception as error:
                # The batch can't be pickled; the next outcome's counters include its frames.
                end.answer(Message(ticket, Report.of(error)))

    def collect(self, order: Order) -> tuple[Outcome, PickledBatch | None]:
        """Carry out an order that came through Ray, after the pipe orders sent before it.

        Return its outcome, and the batch if there is one to send. An exception of the collection is in the outcome.
        """
        self._carry_out(lambda end: end.orders_before(order.after))
        return self._collected(order)

    def _collected(self, order: Order) -> tuple[Outcome, PickledBatch | None]:
        """Carry out an order, once; return its outcome, and the batch if there is one to send.

        An exception is not raised but returned in the outcome.
        """
        collector, begun = self._collector, clock.monotonic()
        before, packed, report, is_final = collector.stats(), None, None, False
        # If an interrupt hid from the owner that it had sent an order, it sends the order again. Each order is carried
        # out once. The second outcome reports no frames, and the owner finds the missing ones in the counters.
        if order.number >= self._next_order:
            self._next_order = order.number + 1
            try:
                self._prepare(order)
                packed = collector.serve(self._allowance, self._pack)
            except Exception as error:
                report = Report.of(error)
                is_final = isinstance(error, (WorkerError, ClosedError))
        ended = clock.monotonic()
        self._busy_s += ended - begun
        stats = collector.stats()
        pickled, contents = packed or (None, Contents())
        num_new, self._episodes = stats.episodes - self._episodes, stats.episodes
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
            episodes=tuple(collector.source.recent_episodes()[-num_new:]) if num_new else (),
        )
        return outcome, pickled

    def _prepare(self, order: Order) -> None:
        """Reclaim lent blocks, add grants, load weights and reset, as an order requires."""
        source = self._collector.source
        self._number, self._lends = order.number, order.lend
        if self._block_pool is not None:
            self._block_pool.reclaim(order.wanted)
        if order.afresh:
            self._allowance.clear(source.spent)
        self._allowance.add(order.grants, source.spent)
        weights = order.weights
        if weights.number != self._weights.number:
            # `push_weights` increments the version.
            source.policy_version = weights.version - 1
            (ref,) = weights.refs or self._sent.refs
            source.push_weights(_util.ray().get(ref).view())
        else:
            source.policy_version = weights.version
        self._weights = weights
        if order.reset:
            source.reset()

    def _pack(self, batch: TensorDictBase, part: tuple[int, int]) -> tuple[PickledBatch | None, Contents]:
        """Write ids that are unique over nodes into a batch, moved to the CPU.

        Return the batch, or None if it is lent, and its `Contents`.
        """
        if any(leaf.device.type != "cpu" for _, leaf in iter_leaves(batch) if isinstance(leaf, torch.Tensor)):
            batch = batch.to("cpu")
        ids = batch.get(as_key(IDS)).numpy()
        is_frame, local = ids >= 0, ids + self._first_id
        self._next_id = max(self._next_id, int(local.max()) + 1)
        np.copyto(ids, self._numbering(local), where=is_frame)  # in place: nothing else reads the ids here
        (worker, num_workers), (node, num_nodes) = part, self._numbering
        of_all = ((worker + self._first_id) % num_workers * num_nodes + node, num_workers * num_nodes)
        under_way = {*ids[is_frame].tolist()}
        for path in self._collector.source.done_paths:
            flag = batch.get(as_key(path)).numpy().reshape(*ids.shape, -1).any(-1)
            under_way.difference_update(ids[flag].tolist())
        location = self._block_pool.lend(self._number, batch) if self._block_pool and self._lends else None
        return None if location else PickledBatch(batch), Contents(of_all, tuple(under_way), location)

    def ask(self, name: str, *arguments: Any, after: int = 0) -> NodeAnswer:
        """Call one of the methods below by name, after the first `after` orders of the pipe.

        Its exception is returned as a report.
        """
        self._carry_out(lambda end: end.orders_before(after))
        try:
            method: Callable[..., Any] = getattr(self, name)
            return NodeAnswer(method(*arguments))
        except Exception as error:
            return NodeAnswer(report=Report.of(error))

    def seed(self, seed: int, static_seed: bool) -> int:
        """Seed environments, random actions and global generators, and reset. Return the last seed that was used."""
        seed_globals([seed])
        return self._collector.set_seed(seed, static_seed)

    def reset(self, kwargs: Mapping[str, Any]) -> None:
        """Reset the environments."""
        self._collector.reset(**kwargs)

    def save(self) -> dict[str, Any]:
        """Return the collector's state, which is ahead of the owner's state by the batches under way."""
        state = self._collector.state_dict()
        if isinstance(self._collector.source, RolloutSource):
            state = checkpoint.ahead(state)
        return {**state, "first_id": self._first_id}

    def parse(self, state: Mapping[str, Any], strict: bool) -> None:
        """Check a saved state; raise an error if it doesn't fit."""
        self._collector.source.loading(_of_collector(state), strict)

    def load(self, state: Mapping[str, Any], strict: bool) -> tuple[CollectorStats, tuple[Episode, ...]]:
        """Load a saved state. Return the counters and the last ended episodes.

        Earlier grants are dropped, and the next order loads its weights again. From now on, `first_id` is the larger
        one of the node and the state.
        """
        self._collector.load_state_dict(_of_collector(state), strict=strict)
        self._first_id = max(self._first_id, int(state.get("first_id", 0)))
        self._weights = Published()  # the loaded weights belong to no publication
        self._allowance.clear(self._collector.source.spent)
        stats, recent = self._collector.stats(), self._collector.source.recent_episodes()
        self._episodes = stats.episodes
        return stats, tuple(recent)

    def close(self) -> None:
        """Shut the collector down."""
        self._collector.shutdown()


def _weights_of(collector: SourceCollector) -> Mapping[Path, Field] | None:
    source = collector.source
    if isinstance(source, RolloutSource):
        return fields_of(source.weights.policy)
    assert isinstance(source, WorkerSource)
    return source.description.weights


def _of_collector(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "first_id"}


def handed_out(stats: CollectorStats) -> int:
    """Return the number of delivered frames, flagged ones included."""
    return stats.delivered + stats.flagged


@dataclass(frozen=True)
class NodeMaker:
    """Config of a node's Ray actor.

    Attributes:
        recipe: config of its collector.
        policy_ref: Ray reference to the pickled policy or policy factory.
        options: Ray options of the actor.
        num_shared_blocks: how many batches the node may have lent at once; 0 sends all through the object store.
    """

    recipe: NodeRecipe
    policy_ref: Any
    options: Mapping[str, Any]
    num_shared_blocks: int = 0

    def started(self, ray: Any, recipe: NodeRecipe, deadline: Deadline) -> Starting:
        """Start an actor and its collector, configured by `recipe`, and return without waiting for them."""
        offer = Offer.of(self.num_shared_blocks) if self.num_shared_blocks else None
        actor = ray.remote(CollectorActor).options(**self.options).remote()
        return Starting(
            actor, actor.start.remote(replace(recipe, offer=offer), self.policy_ref), deadline, offer
        )


class Starting(NamedTuple):
    """A node that is starting."""

    actor: Any
    ref: Any
    """Reference to the answer of `CollectorActor.start`."""
    deadline: Deadline
    """Deadline for this answer."""
    offer: Offer | None


def unlike(found: Mapping[int, NodeDescription], number: int) -> SchemaError | None:
    """Return an error if a node's batch size or done flags differ from the first described node's, else None.

    Other keys, shapes and dtypes aren't compared.
    """
    other = min(found)
    one, first = found[number], found[other]
    if one == first._replace(weights=one.weights, memory=one.memory):
        return None
    return SchemaError(
        f"create_env_fn: node {number} makes batches {tuple(one.batch_size)} with the flags {one.done_paths}, node "
        f"{other} {tuple(first.batch_size)} with {first.done_paths}; use a collector for each kind"
    )
