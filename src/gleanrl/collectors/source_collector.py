"""A collector is a source, a budget and a delivery."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDictBase

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.budget import Budget
from gleanrl.collectors.delivery import Delivery
from gleanrl.collectors.ledger import CollectorStats
from gleanrl.collectors.progress import CollectorProgress
from gleanrl.collectors.source import Collected, Source
from gleanrl.errors import ClosedError, EnvironmentFailure


class BudgetSpent(Exception):
    """There is no further batch."""


class SourceCollector(DataCollectorBase):
    """What all collectors of ours do; they differ in their sources. One caller at a time."""

    _source: Source
    _budget: Budget
    _delivery: Delivery
    _progress: CollectorProgress | None = None
    closed = False
    """Whether the collector was shut down."""

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch, after rounding."""
        return self._budget.frames_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames of a batch as they were asked for."""
        return self._budget.requested_frames_per_batch

    @property
    def total_frames(self) -> int | float:
        """Frames of the collector's life, after rounding; infinity for endless."""
        return math.inf if self._budget.total_frames is None else self._budget.total_frames

    @property
    def init_random_frames(self) -> int:
        """Random frames at the beginning, after rounding."""
        return self._budget.random_frames

    def stats(self) -> CollectorStats:
        """Return the counters at this moment."""
        return self._source.stats()

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is spent, then shut down.

        An exception ends neither the iterator nor the collector: what follows is the next batch.

        Raises:
            ClosedError: if the collector was shut down before.
        """
        return _Batches(self)

    def next(self) -> TensorDictBase | None:
        """Return the next batch, without a device of its own, or None when the budget is spent."""
        try:
            return self.take(TensorDictBase.clear_device_)
        except BudgetSpent:
            return None

    def take(self, finish: Callable[[TensorDictBase], Any] | None = None) -> TensorDictBase:
        """Return the next batch.

        Args:
            finish: called on the batch before it's handed out.

        Raises:
            BudgetSpent: there is none; the collector is shut down.
        """
        if self._budget.grant(self._source.spent) is None:
            self.shutdown()
            raise BudgetSpent
        return self._hand_over(lambda: self._source.next(self._budget), finish)

    def _hand_over(
        self, collect: Callable[[], Collected], finish: Callable[[TensorDictBase], Any] | None = None
    ) -> TensorDictBase:
        """Return what is made of a batch.

        It's counted as delivered as the very last thing: an interrupt comes before that, and the batch is lost and
        counted as discarded, or it comes when the caller has the batch. So nothing may follow in any of the callers.
        """
        self._check_open()
        self._show_progress()
        try:
            collected = collect()
            return self._source.deliver(collected, self._finished(collected.batch, finish))
        except BaseException:
            self._source.lose("interrupted")
            raise

    def _finished(
        self, batch: TensorDictBase, finish: Callable[[TensorDictBase], Any] | None
    ) -> TensorDictBase:
        try:
            batch = self._delivery(batch)
            if finish is not None:
                finish(batch)
            return batch
        except Exception:
            self._source.lose("postproc")
            raise

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments; their next frames belong to new trajectories.

        Args:
            index: which environments of a batch, anything that indexes the batch dimensions; None for all.
            **kwargs: passed to the environment's `reset`; only without `index`.
        """
        self._check_open()
        self._source.reset(index, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments, and what random actions are drawn with, and reset.

        Args:
            seed: of the first environment; number i gets ``seed + i``.
            static_seed: whether all get `seed` itself.

        Returns:
            The last seed that was used: `seed` itself for one environment.
        """
        self._check_open()
        return self._source.set_seed(seed, static_seed)

    def update_policy_weights_(self, policy_weights: TensorDictBase | None = None) -> None:
        """Copy weights into the collector's own policy, in place.

        Args:
            policy_weights: what ``TensorDict.from_module`` gives of the policy that the collector was made with,
                or of `collector.policy`, which may be a wrapper around it; None for its current weights. Unless
                the policy had to move to its device, that is the very policy that runs, and nothing needs to be
                copied. Of one that had to, weights are copied by this method only from its first call on.

        Raises:
            SchemaError: if the weights don't fit; nothing is copied then.
        """
        self._source.push_weights(policy_weights)

    def shutdown(self) -> None:
        """End what the collector runs; calling it again does nothing. `state_dict` and `stats` still work."""
        self.closed = True
        self._show_progress(last=True)
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """Return policy and environment state, the counters, and what keeps trajectory ids unique.

        Simulators aren't part of it: a restored collector begins new trajectories.
        """
        return self._source.save()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, **kwargs: Any) -> None:
        """Take over a saved state; the environments are reset before the next batch.

        Args:
            state_dict: from `state_dict`.
            strict: whether a missing or unexpected entry is an error.
            **kwargs: passed to the policy's `load_state_dict`.

        Raises:
            MissingKeyError: if an entry is missing; nothing has changed then.
            SchemaError: if an entry is unexpected (a policy's weights without such a policy) or doesn't fit; likewise.
        """
        self._source.load(state_dict, strict, **kwargs)

    def _show_progress(self, last: bool = False) -> None:
        if self._progress is not None:
            self._progress.update(self._source.spent, self.stats())
            if last:
                self._progress.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the collector was shut down, or its budget is spent; make a new one")


class _Batches(Iterator[TensorDictBase]):
    """The batches of a collector. No generator, which an exception would end."""

    def __init__(self, collector: SourceCollector) -> None:
        self._collector = collector

    def __next__(self) -> TensorDictBase:
        try:
            return self._collector.take()
        except BudgetSpent:
            raise StopIteration from None
        except StopIteration as failure:  # an environment's: a loop would take it for the end of the budget
            raise EnvironmentFailure(str(failure)) from failure.__cause__
