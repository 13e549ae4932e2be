"""`CollectorWorker`, the service in a collector's worker process: it fills blocks of the shared memory."""

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
    SharedTexts,
)
from gleanrl.collectors.workers.weights import PulledWeights, fields_of
from gleanrl.envs.vector.factories import Factory
from gleanrl.errors import WorkerError

SERVE = b"c"
"""Signal to serve the next grant, if there is one."""


@dataclass(frozen=True)
class PickledPolicy:
    """A policy, or a callable that makes one, as bytes, so that it is pickled once for all workers.

    Attributes:
        data: the pickled object.
        is_factory: whether it is a callable that makes the policy.
    """

    data: bytes
    is_factory: bool

    @classmethod
    def of(cls, policy: Any, factory: Any, placed: bool = False) -> PickledPolicy:
        """Return a pickled policy or policy factory.

        Args:
            policy: the policy; used if `factory` is None.
            factory: the callable.
            placed: whether the worker moves the policy to a device that the user chose. The policy's tensors are then
                sent on the CPU, so that the worker doesn't initialise the learner's device.

        Raises:
            WorkerError: if the object can't be pickled.
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

    def load(self) -> Any:
        """Return the policy, made by the factory if it is one; called in the worker."""
        found = cloudpickle.loads(self.data)
        return made_policy(None, found) if self.is_factory else found


class _PicklerOnCPU(cloudpickle.Pickler):
    """Pickles tensors of other devices as CPU tensors. Parameters are pickled by their data tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.is_leaf and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(2)
        return super().reducer_override(obj)


class Lists(NamedTuple):
    """The object columns of a share, which can't be in shared memory; sent as the answer to the signal."""

    number: int
    """Number of the grant."""
    columns: Mapping[Path, ObjectColumn]


class Bound(NamedTuple):
    """Regions of a worker's blocks and weights.

    Attributes:
        rows: region of the blocks of all workers.
        worker: the worker's index in the first dimension of the blocks.
        weights: region of the weights of all workers; None if the policy has none.
        own_weights: region of the worker's separate weights; None if it has none.
        texts: region of the texts of all workers; None with ``policy_backend="torch"``, which has none.
    """

    rows: Region
    worker: int
    weights: Region | None = None
    own_weights: Region | None = None
    texts: Region | None = None


@dataclass(frozen=True)
class Description:
    """The specs of a worker's collection, sent to its owner."""

    schema: Schema
    batch_size: torch.Size
    device: torch.device | None
    """Device of the batches' TensorDicts. Shared memory is on the CPU, so it is the CPU or None."""
    storing: torch.device | None
    """Device on which batches are delivered; None for the device on which they are made."""
    done_keys: tuple[NestedKey, ...]
    done_paths: tuple[Path, ...]
    weights: Mapping[Path, Field] | None
    """Shapes and dtypes of the policy's weights; None if it has none."""


@dataclass(frozen=True)
class CollectorMaker:
    """Makes a worker's collection, in the worker.

    Attributes:
        factory: makes the environment.
        policy: the policy.
        recipe: config of the collection.
        numbering: numbering of the trajectories, unique over all workers.
        num_slots: maximal number of grants under way.
        first_id: the first local trajectory id that may be used.
        seed: seed of the environment, and whether all environments of a batch get the same one; None for no seed.
        bound: regions of blocks and weights, if they are known already.
        prepare: called in the worker before anything is made.
    """

    factory: Factory
    policy: PickledPolicy
    recipe: CollectorConfig
    numbering: Numbering
    num_slots: int
    first_id: int = 0
    seed: tuple[int, bool] | None = None
    bound: Bound | None = None
    prepare: Callable[[], Any] | None = None

    def again(self, first_id: int, seed: tuple[int, bool] | None, bound: Bound | None) -> CollectorMaker:
        """Return the maker of a replacement for a lost worker."""
        return replace(self, first_id=first_id, seed=seed, bound=bound)

    def __call__(self, context: WorkerContext) -> CollectorWorker:
        """Make the collection and return its service. If that raises, the environment is closed."""
        counters = SharedCounters(context.progress, self.num_slots)
        if self.prepare is not None:
            self.prepare()
        env = self.factory()
        try:
            stop = _Watch(context.progress)
            recipe = replace(self.recipe, options=replace(self.recipe.options, stop=stop))
            weights = partial(PulledWeights, words=context.progress)
            made = assemble(
                env, self.policy.load(), recipe, weights, numbering=self.numbering, first_id=self.first_id
            )
            service = CollectorWorker(made, context.segment, counters, stop)
            if self.seed is not None:
                service.seed(*self.seed)
            if self.bound is not None:
                service.bind(self.bound)
        except BaseException:
            with suppress(Exception):  # the error of the construction matters more than one of the clean-up
                env.close()
            raise
        return service


class _Watch:
    """Publishes the number of steps after each step, and returns whether the share ends there."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.number = 0
        """Number of the grant that is served."""

    def __call__(self, t: int) -> bool:
        words = self._words
        words[STEP] = t + 1
        return words[CUT] > self.number or words[HALT] != 0


class CollectorWorker:
    """Serves grants one after the other, and the owner's requests between them.

    Args:
        assembly: the collection and its parts.
        segment: the memory shared with the owner.
        counters: the worker's shared counters.
        watch: called by the collection after each step.
    """

    def __init__(
        self, assembly: Assembly, segment: SharedSegment, counters: SharedCounters, watch: _Watch
    ) -> None:
        self._collection, self._storing = assembly.collection, assembly.devices.storing
        self._segment, self._counters, self._watch = segment, counters, watch
        self._blocks: list[Block] = []
        self._texts: SharedTexts | None = None
        self._ended = clock.monotonic()
        self._before: dict[int, TrajectoryIds] = {}
        """The trajectories before each of the latest shares, by slot."""
        self._episodes_before = counters.words[EPISODES]
        """Number of episodes that ended in this worker's predecessors."""

    def signal(self, code: bytes) -> Lists | None:
        """Serve the next grant, if there is one; return the share's object columns, None if it has none.

        The result is written to shared memory even if collecting fails, before the error is sent. So the owner can
        count the frames of a failed share whether or not the error arrives.

        Raises:
            Exception: the error of the collection; the share failed. The next one begins with a reset.
            WorkerError: `code` is not `SERVE`.
        """
        if code != SERVE:
            raise WorkerError(f"there's no signal {code!r}")
        next_grant = self._counters.begin()
        if next_grant is None:
            return None
        number, grant, reset = next_grant
        self._watch.number = number
        begun = clock.monotonic()
        collection, before = self._collection, self._collection.counts
        slot = number % len(self._blocks)
        block, self._before[slot] = self._blocks[slot].leading(grant.num_steps), collection.trajectories
        try:
            if reset:
                collection.reset()
            filled = collection.fill(grant, block)
            collection.commit(filled.after)
        except BaseException:
            # The collection has counted the frames of this share as discarded, for a reason that the owner needs. It
            # has counted none if the reset failed, or the first step.
            lost = collection.counts.discarded - before.discarded
            reason = next(
                (
                    reason
                    for reason, frames in collection.counts.discards.items()
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
        """Write the result of a share, and add up the time spent on waiting and collecting.

        The result comes last: an owner that sees the share finished also sees its episodes and texts.
        """
        words, ended = self._counters.words, clock.monotonic()
        words[IDLE] += int((begun - self._ended) * 1e9)
        words[BUSY] += int((ended - begun) * 1e9)
        self._ended = ended
        if self._texts is not None:
            self._texts.write(self._collection.said_of_policy)
        self._publish_episodes(begun)
        self._counters.finish(number, share)

    def _publish_episodes(self, begun: float | None = None, anew: bool = False) -> None:
        """Publish the episodes that have ended, and the first unused trajectory id.

        Args:
            begun: when the latest share began; None for one second ago.
            anew: whether to forget the episodes that were published before, after a state was loaded.
        """
        words, now, ended = self._counters.words, self._collection.trajectories, clock.monotonic()
        words[NEXT_ID] = now.next_id
        count = self._episodes_before + now.num_ended
        num_new = now.num_ended if anew else count - words[EPISODES]
        if num_new or anew:
            episodes = now.recent[-num_new:] if num_new else []
            self._counters.note_episodes(count, episodes, ended - 1.0 if begun is None else begun, ended)

    # --------------------------------------------------------------- requests
    def describe(self) -> Description:
        """Return the description of the collection."""
        collection, plan = self._collection, self._collection.plan
        device = collection.device
        return Description(
            collection.columns.schema,
            plan.batch_size,
            device if device is None or device.type == "cpu" else torch.device("cpu"),
            self._storing,
            tuple(collection.env.done_keys),
            plan.done_paths,
            fields_of(collection.weights.policy),
        )

    def bind(self, bound: Bound) -> None:
        """Fill these blocks from now on, and copy weights from these regions; None keeps the former ones."""
        numbers = range(bound.rows.num_blocks)
        self._blocks = [self._segment.block(bound.rows, number).part(bound.worker) for number in numbers]
        if bound.texts is not None:
            texts = [self._segment.block(bound.texts, number).part(bound.worker) for number in range(2)]
            self._texts = SharedTexts(self._counters.words, texts)
        weights = self._collection.weights
        assert isinstance(weights, PulledWeights)
        weights.bind(self._segment, bound.weights)
        weights.bind(self._segment, bound.own_weights, own=True)
        self._publish_episodes()

    def seed(self, seed: int, static_seed: bool) -> int:
        """Seed environment, random actions and global generators, and reset; return the last seed that was used.

        Policies draw from the global generators.
        """
        seed_globals([seed])
        last = self._collection.set_seed(seed, static_seed)
        self._publish_episodes()
        return last

    def reset(self, index: Any, kwargs: Mapping[str, Any]) -> None:
        """Reset the environments."""
        self._collection.reset(index, **kwargs)
        self._publish_episodes()

    def save(self, num_consumed: int) -> dict[str, Any]:
        """Return the state, without the policy's weights if the owner has published some.

        The environments may be ahead of the frames that the owner has delivered, by the shares under way. The state
        therefore names the trajectories of the delivered frames, which can't continue from it.

        Args:
            num_consumed: number of shares that the owner has delivered or discarded.
        """
        handed_out = self._collection.trajectories
        if num_consumed < self._counters.words[SERVED]:
            # The default is for a replacement, which has no record of the shares that its predecessor finished.
            handed_out = self._before.get(num_consumed % len(self._blocks), handed_out)
        state = checkpoint.ahead(self._collection.save(), handed_out)
        if self._counters.words[PUBLISHED]:
            state.pop("policy_state_dict", None)
        return state

    def parse(self, state: Mapping[str, Any], strict: bool) -> tuple[int, ...]:
        """Check a saved state and change nothing; return the ids of its open trajectories, which can't continue."""
        return checkpoint.parse(self._collection, state, strict).cut

    def adopt(self, state: Mapping[str, Any], strict: bool) -> None:
        """Continue from a saved state, which was checked."""
        checkpoint.adopt(self._collection, checkpoint.parse(self._collection, state, strict))
        self._episodes_before = 0
        self._publish_episodes(anew=True)

    def close(self) -> None:
        """Close the environment."""
        self._collection.close()
