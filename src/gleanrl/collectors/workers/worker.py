"""What a worker process of a collector works on: a collection that fills blocks of the shared memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import NestedKey, Path
from gleanrl._os import clock
from gleanrl._process.shared_columns import HALT, STEP, Region, SharedSegment
from gleanrl._process.worker_main import WorkerContext, seed_globals
from gleanrl.collectors import checkpoint
from gleanrl.collectors.build import Assembly, CollectorConfig, assemble
from gleanrl.collectors.frame_accounting import Numbering, TrajectoryIds
from gleanrl.collectors.policy_weights import made_policy
from gleanrl.collectors.workers.shared_counters import (
    BUSY,
    CUT,
    EPISODES,
    IDLE,
    NEXT_ID,
    PUBLISHED,
    SERVED,
    Share,
    SharedCounters,
)
from gleanrl.collectors.workers.weights import PulledWeights, fields_of
from gleanrl.envs.vector.factories import Factory
from gleanrl.errors import WorkerError

SERVE = b"c"
"""Serve the next grant, if there is one."""


@dataclass(frozen=True)
class Given:
    """What a collection's policy is made of, as bytes: it is pickled once for all workers.

    Attributes:
        data: the policy, or a callable that makes it.
        is_factory: which of the two.
    """

    data: bytes
    is_factory: bool

    @classmethod
    def of(cls, policy: Any, factory: Any, placed: bool = False) -> Given:
        """Return what is sent of a policy or a callable that makes one; `WorkerError` if it can't be.

        Args:
            policy: the policy; sent without a factory.
            factory: the callable.
            placed: whether the worker moves the policy to a given device. Its tensors are sent on the CPU then, so that
                the worker doesn't initialise the learner's device.
        """
        file = io.BytesIO()
        try:
            pickler = _PicklerOnCPU if placed and factory is None else cloudpickle.Pickler
            pickler(file).dump(policy if factory is None else factory)
            return cls(file.getvalue(), factory is not None)
        except Exception as cause:
            raise WorkerError(
                f"policy: {policy if factory is None else factory!r:.200} can't be sent to worker processes: {cause}; "
                "pass policy_factory=, a callable that makes it there"
            ) from cause

    def policy(self) -> Any:
        """Return the policy, in the worker."""
        found = cloudpickle.loads(self.data)
        return made_policy(None, found) if self.is_factory else found


class _PicklerOnCPU(cloudpickle.Pickler):
    """Pickles the tensors of other devices as tensors on the CPU; parameters are pickled by their data."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.is_leaf and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(2)
        return super().reducer_override(obj)


class Lists(NamedTuple):
    """What columns don't hold of a share; it's the answer to its signal."""

    number: int
    """Of the grant."""
    columns: Mapping[Path, ObjectColumn]


class Bound(NamedTuple):
    """Where a worker's shares go, and where its weights come from.

    Attributes:
        rows: the region of its blocks.
        place: which of the region's first dimension is the worker's.
        weights: the region of the weights of all workers; None if the policy has none.
        own_weights: the region of the worker's own; None if it has none.
    """

    rows: Region
    place: int
    weights: Region | None = None
    own_weights: Region | None = None


@dataclass(frozen=True)
class Description:
    """What a worker's collection is like, told to its owner."""

    schema: Schema
    batch_size: torch.Size
    device: torch.device | None
    """What batches say of their device while they are in the memory that processes share, the CPU's."""
    storing: torch.device | None
    """Where batches are delivered; None for where they are made."""
    done_keys: tuple[NestedKey, ...]
    done_paths: tuple[Path, ...]
    weights: Mapping[Path, Field] | None
    """Shapes and dtypes of the policy's; None if it has none."""


@dataclass(frozen=True)
class CollectorMaker:
    """Makes a worker's collection there.

    Attributes:
        factory: of its environment.
        given: its policy.
        recipe: how it collects.
        numbering: of its trajectories.
        num_slots: grants that can be under way.
        first_id: the first local id that may be used.
        seed: of its environment, and whether all of a batch get the same; None for none.
        bound: where shares go, if it's known already.
        prepare: called in the worker before anything is made.
    """

    factory: Factory
    given: Given
    recipe: CollectorConfig
    numbering: Numbering
    num_slots: int
    first_id: int = 0
    seed: tuple[int, bool] | None = None
    bound: Bound | None = None
    prepare: Callable[[], Any] | None = None

    def again(self, first_id: int, seed: tuple[int, bool] | None, bound: Bound | None) -> CollectorMaker:
        """Return what makes a worker that goes on where this one was lost."""
        return replace(self, first_id=first_id, seed=seed, bound=bound)

    def __call__(self, station: WorkerContext) -> CollectorWorker:
        """Make it."""
        words = SharedCounters(station.progress, self.num_slots)
        if self.prepare is not None:
            self.prepare()
        env = self.factory()
        try:
            stop = _Watch(station.progress)
            recipe = replace(self.recipe, options=replace(self.recipe.options, stop=stop))
            weights = partial(PulledWeights, words=station.progress)
            made = assemble(
                env, self.given.policy(), recipe, weights, numbering=self.numbering, first_id=self.first_id
            )
            servant = CollectorWorker(made, station.segment, words, stop)
            if self.seed is not None:
                servant.seed(*self.seed)
            if self.bound is not None:
                servant.bind(self.bound)
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                env.close()
            raise
        return servant


class _Watch:
    """Says after every step how far the share is, and whether it is to end there."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.number = 0
        """Of the grant that is served."""

    def __call__(self, t: int) -> bool:
        words = self._words
        words[STEP] = t + 1
        return words[CUT] > self.number or words[HALT] != 0


class CollectorWorker:
    """Serves grants, one after the other, and what the owner asks for in between.

    Args:
        assembly: what collects.
        segment: the memory shared with the owner.
        words: the worker's.
        watch: told which grant is served.
    """

    def __init__(
        self, assembly: Assembly, segment: SharedSegment, words: SharedCounters, watch: _Watch
    ) -> None:
        self._collection, self._storing = assembly.collection, assembly.devices.storing
        self._segment, self._words, self._watch = segment, words, watch
        self._blocks: list[Block] = []
        self._ended = clock.monotonic()
        self._before: dict[int, TrajectoryIds] = {}
        """Where trajectories stood before the latest shares, by their numbers' slots."""
        self._episodes_before = words.words[EPISODES]
        """Those of the workers that had this one's place."""

    def signal(self, code: bytes) -> Lists | None:
        """Serve the next grant, if there is one; return what columns don't hold of it, if there is anything.

        Raises:
            Exception: what collecting raised; the share failed.
        """
        if code != SERVE:
            raise WorkerError(f"there's no signal {code!r}")
        given = self._words.begin()
        if given is None:
            return None
        number, grant, reset = given
        self._watch.number = number
        begun = clock.monotonic()
        collection, before = self._collection, self._collection.ledger
        slot = number % len(self._blocks)
        block, self._before[slot] = self._blocks[slot].leading(grant.num_steps), collection.trajectories
        try:
            if reset:
                collection.reset()
            filled = collection.fill(grant, block)
            collection.become(filled.after)
        except BaseException:
            lost = collection.ledger.discarded - before.discarded
            reason = next(
                (
                    reason
                    for reason, frames in collection.ledger.discards.items()
                    if frames != before.discards.get(reason, 0)
                ),
                "error",
            )
            self._finish(number, Share(True, 0, lost, 0, 0, reason), begun)
            raise
        done = filled.done
        self._finish(
            number, Share(False, filled.num_steps, done.frames, done.flagged, done.excess, ""), begun
        )
        block = block.leading(filled.num_steps)
        lists = {path: block.column(path) for path in block.schema.lists}
        return Lists(number, lists) if lists else None

    def _finish(self, number: int, share: Share, begun: float) -> None:
        words, ended = self._words.words, clock.monotonic()
        words[IDLE] += int((begun - self._ended) * 1e9)
        words[BUSY] += int((ended - begun) * 1e9)
        self._ended = ended
        self._tell(begun)
        self._words.finish(number, share)

    def _tell(self, begun: float | None = None, anew: bool = False) -> None:
        """Say where the trajectories stand.

        Args:
            begun: when the latest share began; None for the last second.
            anew: whether episodes that were told before don't count any more.
        """
        words, now, ended = self._words.words, self._collection.trajectories, clock.monotonic()
        words[NEXT_ID] = now.next_id
        count = self._episodes_before + now.num_ended
        fresh = now.num_ended if anew else count - words[EPISODES]
        if fresh or anew:
            told = now.recent[-fresh:] if fresh else []
            self._words.note_episodes(count, told, ended - 1.0 if begun is None else begun, ended)

    # --------------------------------------------------------------- requests
    def describe(self) -> Description:
        """Return what the collection is like."""
        collection, plan = self._collection, self._collection.plan
        shown = collection.device
        return Description(
            collection.columns.schema,
            plan.batch_size,
            shown if shown is None or shown.type == "cpu" else torch.device("cpu"),
            self._storing,
            tuple(collection.env.done_keys),
            plan.done_paths,
            fields_of(collection.weights.policy),
        )

    def bind(self, bound: Bound) -> None:
        """Fill these blocks from now on, and take weights from there."""
        numbers = range(bound.rows.num_blocks)
        self._blocks = [self._segment.block(bound.rows, number).part(bound.place) for number in numbers]
        weights = self._collection.weights
        assert isinstance(weights, PulledWeights)
        weights.bind(self._segment, bound.weights)
        weights.bind(self._segment, bound.own_weights, own=True)
        self._tell()

    def seed(self, seed: int, static_seed: bool) -> int:
        """Seed environment, random actions and what policies draw with, and reset; return the last seed used."""
        seed_globals([seed])
        last = self._collection.set_seed(seed, static_seed)
        self._tell()
        return last

    def reset(self, index: Any, kwargs: Mapping[str, Any]) -> None:
        """Reset the environments."""
        self._collection.reset(index, **kwargs)
        self._tell()

    def save(self, taken: int) -> dict[str, Any]:
        """Return the state, but for the policy's weights, if the owner has them.

        It's that after the shares under way, which the owner's state lacks: trajectories can't go on from there.

        Args:
            taken: shares that the owner has delivered or discarded.
        """
        handed_out = self._collection.trajectories
        if (
            taken < self._words.words[SERVED]
        ):  # the owner of a lost worker may have taken more than this one made
            handed_out = self._before.get(taken % len(self._blocks), handed_out)
        state = checkpoint.ahead(self._collection.save(), handed_out)
        if self._words.words[PUBLISHED]:
            state.pop("policy_state_dict", None)
        return state

    def parse(self, state: Mapping[str, Any], strict: bool) -> tuple[int, ...]:
        """Check a saved state; return the ids of trajectories that were under way in it, which can't go on."""
        return checkpoint.parse(self._collection, state, strict).cut

    def adopt(self, state: Mapping[str, Any], strict: bool) -> None:
        """Go on from a saved state, which was checked."""
        checkpoint.adopt(self._collection, checkpoint.parse(self._collection, state, strict))
        self._episodes_before = 0
        self._tell(anew=True)

    def close(self) -> None:
        """Close the environment."""
        self._collection.close()
