"""Base classes of the collectors: their public methods, settings as attributes, and iteration."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from gleanrl._arrays.results import html_parts, parts_text
from gleanrl.collectors.background import Background
from gleanrl.collectors.config import Settings
from gleanrl.collectors.delivery import BatchDelivery, Finish, Packed
from gleanrl.collectors.frame_accounting import CollectorStats
from gleanrl.collectors.policy_weights import chosen_weights
from gleanrl.collectors.source import Budget, BudgetSpent, Grants, Loading, Source
from gleanrl.collectors.weight_updaters import WeightUpdaterBase, made_updater
from gleanrl.errors import (
    ClosedError,
    EndlessError,
    EnvironmentFailure,
    MissingArgumentError,
    UnsupportedError,
    WorkerTimeoutError,
)


class DataCollectorBase(IterableDataset, ABC):  # type: ignore[type-arg]
    """Abstract collector: an iterable of batches. Not thread-safe: one caller at a time."""

    _own_iterator: Iterator[TensorDictBase] | None = None

    @abstractmethod
    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is spent."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Release the collector's resources. Further calls have no effect."""

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and return the last seed that was used."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Load a saved state."""

    @abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None, *, worker_ids: Any = None) -> None:
        """Copy weights into the policy that the collector runs."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Iterate over batches. A new iteration resumes where the last one stopped."""
        return self.iterator()

    def __next__(self) -> Any:
        """Return the next batch, for ``next(collector)``; raise `StopIteration` when the budget is spent.

        After another exception, the next call begins a new iteration.
        """
        if self._own_iterator is None:
            self._own_iterator = self.iterator()
        try:
            return next(self._own_iterator)
        except StopIteration:
            raise
        except BaseException:
            self._own_iterator = None  # a generator that raised can't be resumed, but the collector can
            raise

    def next(self) -> TensorDictBase | None:
        """Return the next batch with its ``device`` unset in place, or None when the budget is spent.

        After an exception, the next call begins a new iteration.
        """
        batch = next(self, None)
        return batch.clear_device_() if isinstance(batch, TensorDictBase) else batch

    def __class_getitem__(cls, item: Any) -> Any:
        """Raise an error: collectors aren't generic."""
        raise UnsupportedError(f"{cls.__name__}[{item!r}]: collectors can't be subscripted")

    def __getitem__(self, index: Any) -> Any:
        """Raise an error: batches come in order only."""
        raise UnsupportedError("a collector can't be indexed; iterate over it")

    def __getstate__(self) -> Any:
        """Raise an error: a running environment can't be copied."""
        raise UnsupportedError(
            f"{type(self).__name__} holds a running environment and can't be pickled or copied; save its state_dict()"
        )

    def __del__(self) -> None:
        """Release the resources when the last reference is dropped. No effect if the constructor failed."""
        if getattr(self, "_ready", False):
            self._abandoned()

    def _abandoned(self) -> None:
        """Release the collector's resources after the last reference was dropped."""
        self.shutdown()


class Setting:
    """A read-only attribute that returns a constructor argument from the collector's `Settings`."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the attribute's name."""
        self._name = name

    def __get__(self, collector: SourceCollector | None, owner: type) -> Any:
        """Return the setting, after the checks and conversions of `Settings.of`; for the class, this descriptor."""
        return self if collector is None else getattr(collector.settings, self._name)

    def __set__(self, collector: SourceCollector, value: Any) -> None:
        """Raise an error: a new value would have no effect."""
        raise UnsupportedError(
            f"{self._name}: it is fixed when the collector is made; make a new collector to change it"
        )


class SourceCollector(DataCollectorBase):
    """Base of all collectors of this library. Subclasses differ in their sources. One caller thread at a time.

    Args:
        settings: the collector's settings.
        budget: how many frames the collector delivers.
        delivery: hands batches to the user; see `Settings.delivery`.
        weight_updater: sends weights in place of the collector, or a callable that makes such an updater; None lets the
            collector send them.
        policy: the policy whose weights are sent.
    """

    max_frames_per_traj = Setting()
    reset_at_each_iter = Setting()
    reset_when_done = Setting()
    exploration_type = Setting()
    interruptor = Setting()
    set_truncated = Setting()
    postproc = Setting()
    split_trajs = Setting()
    replay_buffer = Setting()
    extend_buffer = Setting()
    trajs_per_batch = Setting()
    trajs_per_write = Setting()
    traj_format = Setting()
    pre_collect_hook = Setting()
    post_collect_hook = Setting()

    _weight_updater: WeightUpdaterBase | None = None

    def __init__(
        self,
        settings: Settings,
        budget: Budget,
        delivery: BatchDelivery,
        weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None,
        policy: Any,
    ) -> None:
        self.settings, self._budget = settings, budget
        self._delivery = delivery
        self.weight_updater = made_updater(weight_updater, policy)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the collector's replay buffer; raise `AttributeError` without a buffer."""
        return getattr(self.replay_buffer, attr)

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch over all its environments, after rounding up."""
        return self._budget.frames_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames of a batch as requested, before rounding."""
        return self._budget.requested_frames_per_batch

    @property
    def total_frames(self) -> int | float:
        """Frames that the collector delivers in total, after rounding; infinity for an endless collector."""
        return math.inf if self._budget.total_frames is None else self._budget.total_frames

    @property
    def init_random_frames(self) -> int:
        """Frames with random actions at the beginning, after rounding."""
        return self._budget.random_frames

    def __len__(self) -> int:
        """Return the number of batches, if all of them but the last are full. Delivered batches count, too.

        Raises:
            EndlessError: the budget is endless, or batches have no fixed length (``trajs_per_batch``).
        """
        if self._budget.total_frames is None or not self.source.steady:
            raise EndlessError(
                "len(): the number of batches is unknown without total_frames, or with trajs_per_batch; iterate instead"
            )
        return -(-self._budget.total_frames // self._budget.frames_per_batch)

    def __bool__(self) -> bool:
        """Return True. Without this method Python would call `__len__`, which an endless collector doesn't have."""
        return True

    def repr_parts(self) -> dict[str, object]:
        """Return the parts that the repr shows, by name: here the budget."""
        total = "endless" if self.total_frames == math.inf else self.total_frames
        return {"frames_per_batch": self.frames_per_batch, "total_frames": total}

    def __repr__(self) -> str:
        """Return the parts and the budget, one on a line."""
        return parts_text(type(self).__name__, self.repr_parts())

    def _repr_html_(self) -> str:
        return html_parts(type(self).__name__, self.repr_parts())

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down, by the user or at the end of the budget. Setting it releases nothing."""
        return self._delivery.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._delivery.closed = closed

    def stats(self) -> CollectorStats:
        """Return a snapshot of the counters."""
        return self.source.stats()

    @property
    def source(self) -> Source:
        """The source that makes the batches."""
        return self._delivery.source

    def serve(
        self, grants: Grants, pack: Callable[[TensorDictBase, tuple[int, int]], Packed]
    ) -> Packed | None:
        """Collect a batch for another component, such as a Ray node. Return None if `grants` grants no batch.

        The batch is post-processed and counted as delivered, but not written to the collector's replay buffer.

        Args:
            grants: replaces the collector's own budget.
            pack: called with the batch and `Collected.part`. Its result is returned, and must be read before the next
                call.

        Raises:
            ClosedError: the collector was shut down.
        """
        return self._delivery.serve(grants, pack)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is spent, then shut down. With a replay buffer, yield None for each batch.

        An exception ends neither the iterator nor the collector: the following ``next`` yields the next batch. The
        errors below are raised by ``next``.

        Raises:
            ClosedError: the collector was shut down before its budget was spent.
            UnsupportedError: the collector is collecting in the background.
            EnvironmentFailure: an environment raised `StopIteration`, which would end a loop.
            Exception: further errors of `take`.
        """
        return _Batches(self)

    def __next__(self) -> Any:
        """Return the next batch of the iteration; see `iterator`, also for the errors."""
        return next(self.iterator())  # it has no state, and a kept one would keep the collector alive

    def next(self) -> TensorDictBase | None:
        """Return the next batch with its ``device`` unset, or None when the budget is spent.

        With a replay buffer the batch is written there, and None is returned. The end of the budget shuts the collector
        down. The errors are the ones of `take`, except `BudgetSpent`.
        """
        try:
            return self.take(TensorDictBase.clear_device_)
        except BudgetSpent:
            return None

    def take(self, finish: Finish | None = None) -> TensorDictBase | None:
        """Return the next batch. With a replay buffer, write it there and return None.

        Args:
            finish: called on the batch before it is handed out; not called with a replay buffer.

        Raises:
            BudgetSpent: there is no further batch. The collector is shut down.
            ClosedError: the collector was shut down before its budget was spent.
            UnsupportedError: the collector is collecting in the background.
            Exception: an error of the environment, the policy, post-processing or the buffer. The batch is lost, unless
                the buffer has stored it. Also the exception that ended background collection.
        """
        background = self._delivery.background
        if background is not None and background.running:
            raise UnsupportedError(
                "the collector is collecting in the background: sample from its replay buffer, or call stop() first"
            )
        return self._take(finish)

    def _take(self, finish: Finish | None = None) -> TensorDictBase | None:
        try:
            return self._delivery.next(finish)
        except BudgetSpent:
            self.shutdown()
            raise

    def reset(self, index: Any = None, *, reset_idx: Any = None, **kwargs: Any) -> None:
        """Reset the environments. Their next frames belong to new trajectories.

        Args:
            index: which environments of a batch to reset: any index of the batch dimensions. A collector with workers
                expects a list of bools, one for each worker. None resets all environments.
            reset_idx: another name of `index`, with precedence.
            **kwargs: passed to the environment's `reset`. Without workers or nodes, they exclude `index`.

        Raises:
            ClosedError: the collector was shut down.
            InvalidArgumentError: `index` was passed for a single environment; or a list of bools has another length
                than the number of workers or nodes.
            UnsupportedError: both `index` and `kwargs` were passed.
            EnvironmentFailure, EnvironmentContractError: the reset failed. The next batch begins with another one.
        """
        with self.pause():
            self._delivery.require_open()
            self.source.reset(index if reset_idx is None else reset_idx, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and the generator of random actions, and reset.

        Args:
            seed: seed of the first environment. Environment i gets ``seed + i``.
            static_seed: whether every environment gets `seed` unchanged.

        Returns:
            The last seed that was used: `seed` for one environment.

        Raises:
            ClosedError: the collector was shut down.
            EnvironmentFailure, EnvironmentContractError: the reset failed. The next batch begins with another one.
        """
        with self.pause():
            self._delivery.require_open()
            return self.source.set_seed(seed, static_seed)

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, **named: Any
    ) -> None:
        """Copy weights into the policy that the collector runs, in place. With a `weight_updater`, call that instead.

        Background collection changes the weights between two batches, so each batch is collected with one version of
        them.

        A policy that did not have to move to its device is the one that the collector runs. Nothing needs to be copied
        then. A policy that had to move is copied, and its current weights go to the copy before every batch. The first
        call of this method ends that: from then on only this method changes the weights of the copy. For
        collectors with workers or nodes, see `WorkersCollector`.

        Args:
            policy_or_weights: the weights. Accepted are the module itself, its ``state_dict()`` and the result of
                ``TensorDict.from_module``. The module is the policy that the collector was constructed with, or
                `collector.policy`, which may wrap it. None copies the current weights of the user's policy.
            worker_ids: which workers get the weights. It is for collectors with workers or with a `weight_updater`,
                which receives it.
            **named: other names of `policy_or_weights`: ``policy_weights``, ``weights`` and ``policy``; or
                ``weights_dict``, a dictionary with the one entry ``"policy"``. ``model_id`` can only be ``"policy"``.

        Raises:
            SchemaError: the weights don't fit the policy. Nothing was copied.
            InvalidTypeError: `worker_ids` was given, but the collector has no workers; or the value can't be weights.
            InvalidArgumentError: the weights were passed under several names, or for another policy than ``"policy"``.
            PolicyError, InvalidTypeError: weights were passed, but the policy is not a module.
            IndexRangeError: `worker_ids` names no worker.
            ClosedError: the workers or nodes have ended.
        """
        weights = chosen_weights(policy_or_weights, named) if named else policy_or_weights
        if self._weight_updater is None:
            self.send_weights(weights, worker_ids)
            return
        with self.pause():
            before = self.source.policy_version
            self._weight_updater.push_weights(weights, worker_ids)
            if self.source.policy_version == before:
                # The updater didn't send the weights through the collector.
                self.increment_version()

    def send_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Send weights as `update_policy_weights_` does without a `weight_updater`; for use by updaters.

        Background collection is suspended meanwhile, unless the source accepts weights at any time.
        """
        with self._apart(worker_ids is None):
            self.source.push_weights(weights, worker_ids)

    def _apart(self, for_all: bool) -> AbstractContextManager[None]:
        """Return a context in which weights may be pushed.

        Args:
            for_all: whether the weights are for all workers.
        """
        if for_all and self.source.pushes_anytime:
            return nullcontext()
        background = self._delivery.background
        if for_all and self.source.pushes_between and background is not None:
            return background.apart()
        return self.pause()

    @property
    def policy_version(self) -> int:
        """The version of the policy, which each `update_policy_weights_` increments; see ``track_policy_version=``.

        If workers have different versions, this is the lowest one. For example,
        ``update_policy_weights_(worker_ids=[0])`` leaves the versions of all other workers unchanged.
        """
        return self.source.oldest_version

    def get_policy_version(self) -> int:
        """Return `policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Increment the policy's version, after its weights were changed other than by `update_policy_weights_`.

        If workers have different versions, all of them get the one after the highest.
        """
        self.source.policy_version += 1

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The updater that `update_policy_weights_` calls; None if the collector copies weights itself. Can be set.

        Setting an updater registers the collector with it, and permanently ends the copying of the user's current
        weights. It raises `InvalidArgumentError` if the updater belongs to another collector.
        """
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, updater: WeightUpdaterBase | None) -> None:
        if updater is not None:
            updater.register_collector(self)
            self.source.stop_following()
        self._weight_updater = updater

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call `init` of the `weight_updater`, if the collector has one."""
        if self._weight_updater is not None:
            self._weight_updater.init(*args, **kwargs)

    # --------------------------------------------------- background collection
    def start(self) -> None:
        """Start to collect into the replay buffer in a thread, until `stop`, `shutdown` or the end of the budget.

        Sample from the buffer meanwhile. Methods that use the environments or their state, such as `reset` and
        `state_dict`, wait for the current batch. Iterating and `next` raise `UnsupportedError`. An error of the thread
        is raised once, by the next method that checks, pauses or stops the thread. Then the collector can be started
        again.

        Raises:
            MissingArgumentError: the collector has no replay buffer.
            UnsupportedError: it is already collecting in the background.
            ClosedError: the collector was shut down.
            Exception: the exception that ended background collection before. Nothing is started.
        """
        if self._delivery.sink is None:
            raise MissingArgumentError(
                "start: the collector has no buffer to collect into; make it with replay_buffer="
            )
        self._delivery.require_open()
        if self._delivery.background is None:
            self._delivery.background = Background(self._make_batch)
        self._delivery.background.start()

    def _make_batch(self) -> bool:
        try:
            self._take()
        except BudgetSpent:
            return False
        return True

    def stop(self, timeout: float | None = None) -> None:
        """Stop background collection after the current batch. `start` resumes it.

        No effect without background collection. Within the background thread, for example in a hook, it does not wait.

        Args:
            timeout: how many seconds to wait for the current batch; None waits without limit.

        Raises:
            WorkerTimeoutError: the batch did not end in time. It is still the last one.
            Exception: the exception that ended background collection.
        """
        if self._delivery.background is not None:
            self._delivery.background.stop(timeout)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Suspend background collection within a ``with`` block. No effect without background collection.

        Collection resumes after the block, even if the block raises, unless the block calls `stop` or `shutdown`. An
        exception that has ended background collection is raised before the block.
        """
        background = self._delivery.background
        with nullcontext() if background is None else background.paused():
            yield

    def is_running(self) -> bool:
        """Return whether batches are being collected in the background. Raise the exception that ended it, once."""
        background = self._delivery.background
        return background is not None and background.running

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the environments, workers or nodes of the collector. Further calls have no effect.

        `state_dict` and `stats` work after a shutdown, too. Workers and nodes save their state before they end. If one
        is lost or does not end its current work within a second, `state_dict` raises `ClosedError` afterwards.

        Args:
            timeout: how many seconds to wait for the current background batch; None waits without limit.
            close_env: whether the environment is closed, too. Otherwise it stays usable, for example for evaluation.

        Raises:
            WorkerTimeoutError: the batch did not end in time. It is the last one. The environment is still open, until
                another call closes it.
            Exception: the exception that ended background collection, or an error of closing.
        """
        self.closed = True
        try:
            with suppress(ClosedError):
                # The workers have ended, and that error was already raised to the caller.
                self.stop(timeout)
        except WorkerTimeoutError:
            raise
        except BaseException:
            with suppress(Exception):  # an error of closing would hide the first error, which is the cause
                self._close(close_env)
            raise
        self._close(close_env)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut the collector down and wait for it; an alias of `shutdown`."""
        self.shutdown(timeout, close_env)

    def _close(self, close_env: bool) -> None:
        self._delivery.show_progress(last=True)
        self.source.close(close_env)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the policy and of the environments, the counters, ids and random generators.

        ``torch.load(weights_only=True)`` can load the result. The state leaves out environments in worker processes,
        and environments whose state can't be read (see the page on checkpoints).

        Raises:
            ClosedError: the workers or nodes have ended without saving their state.
        """
        with self.pause():
            return self.source.save()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, **kwargs: Any) -> None:
        """Load a saved state. The next batches are the ones that would have followed the save.

        Collection resumes in the middle of episodes, and the global generators of torch, NumPy and Python are restored.
        If the state of an environment is missing or doesn't fit, all environments are reset before the next batch. The
        open trajectories then end where they were saved, and `stats` counts them as ``cut``. Collectors with workers or
        nodes always reset their environments.

        This collector may have delivered other frames of the same trajectories meanwhile. A replay buffer may still
        hold those frames, so the resumed trajectories get new ids. `gleanrl.Checkpoint` restores buffers, too, and
        keeps the ids.

        Args:
            state_dict: a result of `state_dict`.
            strict: whether a missing or unexpected entry is an error. Otherwise missing parts stay unchanged.
            **kwargs: passed to the policy's `load_state_dict`.

        Raises:
            MissingKeyError: an entry is missing. Nothing has changed.
            SchemaError: an entry is unexpected (for example weights, but no such policy), or doesn't fit. Nothing has
                changed.
            ClosedError: the collector was shut down and its environment is closed.
        """
        with self.pause():
            self.loading(state_dict, strict, **kwargs).change()

    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Check a saved state and return the change that loads it; see `Source.loading`.

        Raises:
            ClosedError: the collector was shut down.
        """
        self._delivery.require_open()
        return self.source.loading(state, strict, keep_ids, **kwargs)


class _Batches(Iterator[TensorDictBase]):
    """Iterator over a collector's batches. It is a class because an exception would end a generator."""

    def __init__(self, collector: SourceCollector) -> None:
        self._collector = collector

    def __next__(self) -> Any:
        try:
            return self._collector.take()
        except BudgetSpent:
            raise StopIteration from None
        except StopIteration as failure:
            # Raised by an environment; a for loop would take it for the end of the budget.
            raise EnvironmentFailure(str(failure)) from failure.__cause__
