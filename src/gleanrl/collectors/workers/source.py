"""`WorkerSource`, the common base of the sources whose batches are made in worker processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._os.interrupts import to_the_end
from gleanrl._process.shared_columns import Region, SharedRows
from gleanrl._rollout.infer_outputs import is_unmade
from gleanrl._rollout.plan import plan_rollout
from gleanrl._state.state import plain
from gleanrl.collectors import checkpoint
from gleanrl.collectors.frame_accounting import (
    NUM_RECENT,
    CollectorStats,
    Episode,
    FrameCounts,
    WorkerStats,
    means_of,
    texts_of_workers,
)
from gleanrl.collectors.source import Collected, Loading, Source
from gleanrl.collectors.workers.controller import UNFINISHED, PoolConfig, WorkerController
from gleanrl.collectors.workers.progress import Consumed
from gleanrl.collectors.workers.shared_counters import BUSY, EPISODES, IDLE, MARKED, SharedTexts
from gleanrl.collectors.workers.weights import SharedWeights, mark_frames
from gleanrl.collectors.workers.worker import Bound, CollectorMaker
from gleanrl.envs.vector.factories import Factory
from gleanrl.errors import ClosedError, IndexRangeError, InvalidTypeError, LengthError

SIBLING = "sibling"
"""The reason for discarding the shares of an incomplete batch, after another worker's share failed."""
_SETTLE_S = 1.0


class WorkerSource(Source):
    """Base class of sources with worker processes.

    One thread at a time may use it. `push_weights` and `stats` may be called from another thread at any time.

    Args:
        config: configuration of the workers.
    """

    pushes_anytime = True

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._seed: tuple[int, bool] | None = None
        self._last_state: dict[str, Any] | None = None
        self._weights: SharedWeights | None = None
        self._notified: set[int] = set()  # workers that know the region of their separate weights
        self._region: Region | None = None
        self._text_region: Region | None = None
        self._texts: list[SharedTexts] = []
        self.controller = WorkerController(config, self._made_again)
        self.description = self.controller.description
        self.done_paths = self.description.done_paths
        self.num_workers = self.controller.num_workers

    def lay_out(self, num_steps: int) -> None:
        """Allocate every worker's blocks for batches of `num_steps` steps, and publish the weights; call it once."""
        described, segment, counters = self.description, self.controller.segment, self.controller.counters
        if described.weights is not None:
            progress = [entry.words for entry in counters]
            config = self._config
            self._weights = SharedWeights(
                config.policy, described.weights, segment, progress, config.following
            )
            self._weights.refresh()
        size = torch.Size((self.num_workers, *described.batch_size))
        rows = SharedRows(described.schema, size, max(self.steps(num_steps)))
        self._region = segment.region("rows", rows, self._config.makers[0].num_slots)
        self.controller.use(self._region)
        if self._config.makers[0].recipe.policy_backend != "torch":
            region = self._text_region = segment.region("texts", SharedTexts.rows(self.num_workers), 2)
            blocks = [segment.block(region, number) for number in range(2)]
            self._texts = [
                SharedTexts(entry.words, [block.part(worker) for block in blocks])
                for worker, entry in enumerate(counters)
            ]
        self.controller.ask("bind", {worker: (self._bound(worker),) for worker in range(self.num_workers)})

    def _bound(self, worker: int) -> Bound | None:
        """Return the regions of a worker's blocks and weights; None before `lay_out`, which sends them to workers."""
        weights = self._weights
        if self._region is None:
            return None
        if weights is None:
            return Bound(self._region, worker, texts=self._text_region)
        return Bound(self._region, worker, weights.region, weights.own_region(worker), self._text_region)

    def _made_again(self, worker: int, generation: int, first_id: int) -> CollectorMaker:
        """Return the maker of a worker's replacement, with the memory, the trajectory ids and a seed for it."""
        seed = self._seed_of(worker, generation)
        return self._config.makers[worker].again(first_id, seed, self._bound(worker))

    @abstractmethod
    def steps(self, num_steps: int) -> Sequence[int]:
        """Return the number of steps of each worker's share of a batch of `num_steps` steps."""

    @property
    def width(self) -> int:
        """Number of environments of each worker."""
        return max(1, self.description.batch_size.numel())

    def _seed_of(self, worker: int, generation: int = 0) -> tuple[int, bool] | None:
        """Return a worker's seed; None if `set_seed` wasn't called.

        A replacement gets another seed, so that it doesn't repeat the trajectories of its predecessor.
        """
        if self._seed is None:
            return None
        seed, static_seed = self._seed
        own = seed if static_seed else seed + worker * self.width
        if generation:
            own = int(np.random.SeedSequence([own, generation]).generate_state(1)[0]) >> 1
        return own, static_seed

    # ---------------------------------------------------------------- weights
    def refresh_weights(self) -> None:
        """Publish the current weights of the user's policy, if workers follow them."""
        self.controller.check()  # a fork shares the memory, and must not write to it
        if self._weights is not None:
            self._weights.refresh()

    @property
    def policy_version(self) -> int:
        """How often the user has updated the policy."""
        return self._marked if self._weights is None else self._weights.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if self._weights is None:
            to_the_end(lambda: mark_frames((entry.words for entry in self.controller.counters), version))
        else:
            self._weights.mark(version)

    @property
    def _marked(self) -> int:
        """The version of a policy without weights. Frames of all workers carry it from their next share on."""
        return self.controller.counters[0].words[MARKED]

    @property
    def oldest_version(self) -> int:
        """The lowest version of the policy in any worker."""
        return self._marked if self._weights is None else self._weights.oldest_version

    def push_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Publish weights, which workers copy before their next share.

        Args:
            weights: weights for all of `worker_ids`; without `worker_ids`, for all workers, or a dictionary of weights
                by worker.
            worker_ids: numbers of workers, or devices that their policies run on.

        Raises:
            InvalidTypeError: if weights by worker come with `worker_ids`, or if weights are passed for a policy without
                weights. Without both, only the version of such a policy is incremented.
            IndexRangeError: if there is no such worker or device.
            PolicyError: if no weights are passed, but the policy exists in the workers only.
            SchemaError: if weights don't fit. Nothing was published.
            ClosedError: if the workers have ended.
        """
        self.controller.check()
        by_worker: dict[int | None, Any]
        if isinstance(weights, dict) and weights and all(isinstance(key, int) for key in weights):
            if worker_ids is not None:
                raise InvalidTypeError(
                    "worker_ids: got worker_ids and a dictionary of weights by worker; pass one of the two"
                )
            by_worker = {worker: weights[worker] for worker in self._workers_named(weights)}
        elif worker_ids is None:
            by_worker = {None: weights}
        else:
            by_worker = dict.fromkeys(self._workers_named(worker_ids), weights)
        if self._weights is None:
            if weights is not None:
                raise InvalidTypeError("update_policy_weights_: the policy isn't a module and has no weights")
            if worker_ids is None:
                self.policy_version += 1
            return
        self._own_weights_for([worker for worker in by_worker if worker is not None])
        self._weights.push(by_worker, self.policy_version + 1)

    def _own_weights_for(self, workers: Sequence[int]) -> None:
        """Allocate separate weights for workers that have none yet, and send them the region."""
        assert self._weights is not None
        new = [worker for worker in workers if worker not in self._notified]
        for worker in new:
            self._weights.own_region(worker, new=True)
        self.controller.ask("bind", {worker: (self._bound(worker),) for worker in new})
        self._notified.update(new)

    def _workers_named(self, worker_ids: Any) -> list[int]:
        one = isinstance(worker_ids, (int, str, torch.device))
        named: list[int] = []
        for name in [worker_ids] if one else worker_ids:
            if isinstance(name, (str, torch.device)):
                found = [w for w, maker in enumerate(self._config.makers) if maker.recipe.runs_on(name)]
            else:
                found = [name] if name in range(self.num_workers) and name is not True else []
            if not found:
                raise IndexRangeError(
                    f"worker_ids: expected numbers below {self.num_workers}, or devices that policies were sent to, "
                    f"got {name!r}"
                )
            named += found
        return named

    def stop_following(self) -> None:
        """Publish only pushed weights from now on."""
        if self._weights is not None:
            self._weights.stop_following()

    # --------------------------------------------------------------- controls
    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments of all workers, or of the workers where `index`, a list of bools, is True.

        Shares of these workers that aren't delivered are discarded. `kwargs` go to each environment's `reset`.

        Raises:
            LengthError: if `index` has another length than the number of workers.
        """
        chosen = range(self.num_workers)
        if index is not None:
            flags = [bool(flag) for flag in index]
            if len(flags) != self.num_workers:
                raise LengthError(
                    f"reset: expected {self.num_workers} flags, one for each worker, got {len(flags)}"
                )
            chosen = [worker for worker, wanted in enumerate(flags) if wanted]  # type: ignore[assignment]
        self._begin_anew("reset", dict.fromkeys(chosen, (None, kwargs)))

    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environments of all workers and reset them; return the last seed that was used.

        The workers' global generators are seeded, too. Shares that aren't delivered are discarded. Replacements of lost
        workers get seeds that derive from this one.
        """
        self._seed = seed, static_seed
        arguments = {worker: self._seed_of(worker) for worker in range(self.num_workers)}
        last: int = self._begin_anew("seed", arguments)[-1]  # type: ignore[arg-type]
        return last

    def _begin_anew(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Send workers a request that resets them, after their shares that aren't taken were discarded."""
        for worker in arguments:
            self.controller.discard(worker, "reset")
        self.controller.settle()
        answers = self.controller.ask(name, arguments)
        self.controller.were_reset(arguments)
        return answers

    def save(self) -> dict[str, Any]:
        """Return the state of every worker under ``"worker0"`` and so on, without shares under way.

        After the end, return the state that `close` saved.

        Raises:
            ClosedError: `close` could not save the state.
        """
        if self.controller.closed:
            if self._last_state is None:
                raise ClosedError(
                    "state_dict: the workers have ended, and their state is lost; call it before shutdown()"
                )
            return self._last_state
        self.controller.settle()
        counts = self.controller.now.counts
        arguments = {worker: (count,) for worker, count in enumerate(self.controller.now.num_consumed)}
        state: dict[str, Any] = {"frames": counts.spent, "iter": counts.batches, "source": plain(counts)}
        for worker, found in enumerate(self.controller.ask("save", arguments)):
            weights = None if self._weights is None else self._weights.state_of(worker)
            state[f"worker{worker}"] = found if weights is None else {**found, "policy_state_dict": weights}
        return state

    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Return the loading of a saved state with as many workers.

        No trajectory continues from a saved state: every environment is reset, and no id is used again. The change
        raises if a worker is lost for good or can't adopt its part.
        """
        names = [f"worker{worker}" for worker in range(self.num_workers)]
        hint = f"this collector has {self.num_workers} workers"
        checkpoint.check_entries(state, {"frames", "iter", *names}, strict, hint)
        saved_counts = FrameCounts.read(state["source"]) if "source" in state else None
        counted = checkpoint.with_counts(
            saved_counts or self.controller.now.counts, state, type(self).__name__
        )
        parts = {worker: dict(state[name]) for worker, name in enumerate(names) if name in state}
        policies = {worker: part.pop("policy_state_dict", None) for worker, part in parts.items()}
        weights = {worker: found for worker, found in policies.items() if found is not None}
        arguments = {worker: (part, strict) for worker, part in parts.items()}
        # All parts are parsed before one changes, so that an error leaves everything unchanged.
        cut = sum(self.controller.ask("parse", arguments), ())
        loaded = self._weights.parse(weights, strict, kwargs) if weights and self._weights else None

        def change() -> None:
            self.controller.discard_all("state")
            self.controller.settle()
            if loaded is not None and self._weights is not None:
                self._own_weights_for(loaded.own)
                self._weights.adopt(loaded)
            self.controller.ask("adopt", arguments)
            self.controller.were_reset(arguments)
            counts = saved_counts or self.controller.now.counts  # read here: shares were discarded above
            counts = replace(counts, spent=counted.spent, batches=counted.batches).cutting(len(cut))
            self.controller.now = self.controller.now._replace(counts=counts)

        return Loading(change, cut)

    # ------------------------------------------------------------------ counts
    @property
    def spent(self) -> int:
        """Number of delivered frames that count against the budget."""
        return self.controller.now.counts.spent

    def stats(self) -> CollectorStats:
        """Return the present counters; the workers' counters and texts are read from shared memory."""
        found = self.controller.now.counts.stats()
        workers = tuple(self._worker_stats(worker) for worker in range(self.num_workers))
        mean_return, mean_length = means_of(self.recent_episodes())
        return replace(
            found,
            episodes=sum(worker.episodes for worker in workers),
            mean_return=mean_return,
            mean_length=mean_length,
            workers=workers,
            policy=texts_of_workers(texts.read() for texts in self._texts),
        )

    def recent_episodes(self) -> list[Episode]:
        """Return the last ended episodes of all workers, ordered by the time of their ends."""
        found = [one for counters in self.controller.counters for one in counters.recent_episodes()]
        return [episode for _, episode in sorted(found, key=lambda one: one[0])[-NUM_RECENT:]]

    def _worker_stats(self, worker: int) -> WorkerStats:
        counters = self.controller.counters[worker]
        words = counters.words
        under_way = 0 if self.controller.is_down(worker) else counters.under_way * self.width
        seconds = words[BUSY] / 1e9
        spanned = words[BUSY] + words[IDLE]
        mean_return, mean_length = means_of([episode for _, episode in counters.recent_episodes()])
        return WorkerStats(
            frames=counters.frames + under_way + self.controller.now.losses[worker].frames,
            episodes=words[EPISODES],
            mean_return=mean_return,
            mean_length=mean_length,
            frames_per_s=counters.frames / seconds if seconds else 0.0,
            idle_share=words[IDLE] / spanned if spanned else 0.0,
            versions_behind=0 if self._weights is None else self._weights.behind(worker),
            restarts=self.controller.generation(worker),
        )

    def deliver(self, collected: Collected, batch: TensorDictBase) -> TensorDictBase:
        """Count the open batch as delivered, and return `batch`, its final form."""
        # One expression, so that an interrupt comes before the assignment, or after the batch was returned. Otherwise
        # a batch could be counted that the caller never gets.
        return (batch, self._commit(collected.after))[0]

    def _commit(self, consumed: Consumed) -> Any:
        self.controller.now = self.controller.now.delivering(consumed)

    def close(self, close_env: bool = True) -> None:
        """End the workers and discard their shares under way; do nothing in a fork of their owner.

        The state is saved first, for `save` after the end. That is skipped if a share doesn't end within a second, if a
        worker is down, or if saving raises.
        """
        controller, workers = self.controller, range(self.num_workers)
        if controller.is_foreign:
            return
        try:
            if not controller.closed:
                with suppress(Exception):
                    controller.discard_all(UNFINISHED)
                    controller.settle(Deadline(_SETTLE_S))
                    if not any(
                        controller.under_way(worker) or controller.is_down(worker) for worker in workers
                    ):
                        self._last_state = self.save()
        finally:
            controller.close()


def initialised(policy: Any, factory: Factory) -> Any:
    """Return the policy with initialised parameters.

    Lazy parameters get their shapes in the first call. It is made here, before workers get copies, so that all workers
    have the same parameters.

    Args:
        policy: the user's policy; called once, on the first observation, if it has uninitialised parameters.
        factory: makes an environment for it, which is closed again.
    """
    if is_unmade(policy):
        _, env = factory.own_copy().probed()
        try:
            plan_rollout(env, policy)
        finally:
            env.close()
    return policy
