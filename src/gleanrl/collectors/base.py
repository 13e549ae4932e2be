"""What every collector offers.

What a collector was made with, to be read as its attributes.

A collector is a source, a budget and a handover.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

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
        """Release what the collector holds; calling it again does nothing."""

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and return the last seed that was used."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Take over a saved state."""

    @abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None, *, worker_ids: Any = None) -> None:
        """Copy weights into the collector's own policy."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Iterate over batches; a new iteration goes on where the last one stopped."""
        return self.iterator()

    def next(self) -> TensorDictBase | None:
        """Return the next batch, without a device of its own, or None when the budget is spent."""
        if self._own_iterator is None:
            self._own_iterator = self.iterator()
        try:
            batch = next(self._own_iterator, None)
        except BaseException:
            self._own_iterator = None  # a generator that raised is spent; the collector isn't
            raise
        return batch.clear_device_() if isinstance(batch, TensorDictBase) else batch

    def __class_getitem__(cls, item: Any) -> Any:
        """Refuse: collectors aren't generic."""
        raise UnsupportedError(f"{cls.__name__}[{item!r}]: collectors can't be subscripted")

    def __getitem__(self, index: Any) -> Any:
        """Refuse: batches come in order only."""
        raise UnsupportedError("a collector can't be indexed; iterate over it")

    def __getstate__(self) -> Any:
        """Refuse: a running environment can't be copied."""
        raise UnsupportedError(
            f"{type(self).__name__} holds a running environment and can't be pickled or copied; save its state_dict()"
        )

    def __del__(self) -> None:
        """Shut down with the last reference."""
        if getattr(self, "_ready", False):
            self._abandoned()

    def _abandoned(self) -> None:
        """Release what the collector holds, now that nobody refers to it."""
        self.shutdown()


class Setting:
    """An argument of a collector's constructor, to be read as its attribute; see `Settings` for its form."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Note which one it is."""
        self._name = name

    def __get__(self, collector: ConfiguredCollector | None, owner: type) -> Any:
        """Return what the collector was made with."""
        return self if collector is None else getattr(collector.settings, self._name)

    def __set__(self, collector: ConfiguredCollector, value: Any) -> None:
        """Refuse: it would change nothing."""
        raise UnsupportedError(f"{self._name}: collectors are made with it; make another one to change it")


class ConfiguredCollector(DataCollectorBase):
    """Abstract: a collector that knows its arguments; it derives from `settings`.

    Args:
        settings: the arguments that all collectors have in common.
        budget: those about frames.
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

    def __init__(self, settings: Settings, budget: Budget) -> None:
        self.settings, self._budget = settings, budget

    @property
    @abstractmethod
    def source(self) -> Source:
        """What makes the batches."""

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the buffer that batches go into."""
        return getattr(self.replay_buffer, attr)

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

    def __len__(self) -> int:
        """Return the number of batches, should all be full but the last one.

        Raises:
            EndlessError: the budget is endless.
        """
        if self._budget.total_frames is None or not self.source.steady:
            raise EndlessError(
                "a collector has a len() if it has total_frames, and if its batches aren't trajs_per_batch long"
            )
        return -(-self._budget.total_frames // self._budget.frames_per_batch)

    def __bool__(self) -> bool:
        """Return True: an endless collector, which has no length, is no less of one."""
        return True


def shown(collector: ConfiguredCollector, parts: str) -> str:
    """Return a collector's repr: its class, `parts` of it and the budget."""
    total = "endless" if collector.total_frames == math.inf else collector.total_frames
    frames = f"frames_per_batch={collector.frames_per_batch}, total_frames={total}"
    return f"{type(collector).__name__}({parts}, {frames})"


class SourceCollector(ConfiguredCollector):
    """What all collectors of ours do; they differ in their sources. One caller at a time.

    Args:
        settings: what the collector is made with.
        budget: how many frames it delivers.
        handover: how they get to the user; see `Settings.handover`.
        weight_updater: sends weights in place of the collector, or makes what does; None for the collector.
        policy: whose weights.
    """

    _weight_updater: WeightUpdaterBase | None = None

    def __init__(
        self,
        settings: Settings,
        budget: Budget,
        handover: BatchDelivery,
        weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None,
        policy: Any,
    ) -> None:
        super().__init__(settings, budget)
        self._handover = handover
        self.weight_updater = made_updater(weight_updater, policy)

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._handover.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._handover.closed = closed

    def stats(self) -> CollectorStats:
        """Return the counters at this moment."""
        return self.source.stats()

    @property
    def source(self) -> Source:
        """What makes the batches."""
        return self._handover.source

    def serve(
        self, grants: Grants, pack: Callable[[TensorDictBase, tuple[int, int]], Packed]
    ) -> Packed | None:
        """Collect a batch for somebody else, who grants it; None if nothing is granted.

        Args:
            grants: in place of the collector's own budget.
            pack: called on the batch and `Collected.part`; its result, which is returned, is read before the next call.
        """
        return self._handover.serve(grants, pack)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is spent, then shut down; with a replay buffer, None for each.

        An exception ends neither the iterator nor the collector: what follows is the next batch.

        Raises:
            ClosedError: if the collector was shut down before.
        """
        return _Batches(self)

    def next(self) -> TensorDictBase | None:
        """Return the next batch, without a device of its own, or None when the budget is spent.

        With a replay buffer the batch goes there, and None is returned.
        """
        try:
            return self.take(TensorDictBase.clear_device_)
        except BudgetSpent:
            return None

    def take(self, finish: Finish | None = None) -> TensorDictBase | None:
        """Return the next batch, or put it into the buffer and return None.

        Args:
            finish: called on the batch before it's handed out.

        Raises:
            BudgetSpent: there is none; the collector is shut down.
        """
        background = self._handover.background
        if background is not None and background.running:
            raise UnsupportedError(
                "the collector collects in the background: sample from its buffer, or stop() it"
            )
        return self._take(finish)

    def _take(self, finish: Finish | None = None) -> TensorDictBase | None:
        try:
            return self._handover.next(finish)
        except BudgetSpent:
            self.shutdown()
            raise

    def reset(self, index: Any = None, *, reset_idx: Any = None, **kwargs: Any) -> None:
        """Reset the environments; their next frames belong to new trajectories.

        Args:
            index: which environments of a batch, anything that indexes the batch dimensions; of collectors with
                workers a list of bools, one for each; None for all.
            reset_idx: another name of `index`.
            **kwargs: passed to the environment's `reset`; only without `index`.
        """
        with self.pause():
            self._handover.require_open()
            self.source.reset(index if reset_idx is None else reset_idx, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments, and what random actions are drawn with, and reset.

        Args:
            seed: of the first environment; number i gets ``seed + i``.
            static_seed: whether all get `seed` itself.

        Returns:
            The last seed that was used: `seed` itself for one environment.
        """
        with self.pause():
            self._handover.require_open()
            return self.source.set_seed(seed, static_seed)

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, **named: Any
    ) -> None:
        """Copy weights into the collector's own policy, in place; with a `weight_updater`, have that do it.

        Batches that are collected in the background have the weights of one moment: they change between two batches.

        Args:
            policy_or_weights: what ``TensorDict.from_module`` gives of the policy that the collector was made with,
                or of `collector.policy`, which may be a wrapper around it; such a module itself; its ``state_dict()``;
                or None for its current weights. Unless the policy had to move to its device, that is the very policy
                that runs, and nothing needs to be copied. Of one that had to, weights are copied by this method only
                from its first call on.
            worker_ids: which workers get them; for collectors with workers, or with a `weight_updater`, which is given
                them.
            **named: other names of `policy_or_weights`: ``policy_weights``, ``weights`` and ``policy``; or
                ``weights_dict``, a dictionary with the one entry ``"policy"``. ``model_id`` can only be ``"policy"``.

        Raises:
            SchemaError: if the weights don't fit; nothing is copied then.
            InvalidTypeError: `worker_ids` where there are no workers; or what can't be weights.
        """
        weights = chosen_weights(policy_or_weights, named) if named else policy_or_weights
        if self._weight_updater is None:
            self.send_weights(weights, worker_ids)
            return
        with self.pause():
            before = self.source.policy_version
            self._weight_updater.push_weights(weights, worker_ids)
            if self.source.policy_version == before:  # it didn't send them through the collector
                self.increment_version()

    def send_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Do what `update_policy_weights_` does without a `weight_updater`: for use in one."""
        with self._apart(worker_ids is None):
            self.source.push_weights(weights, worker_ids)

    def _apart(self, for_all: bool) -> AbstractContextManager[None]:
        """Return what weights may be pushed in, to `for_all` workers or some."""
        if for_all and self.source.pushes_anytime:
            return nullcontext()
        background = self._handover.background
        if for_all and self.source.pushes_between and background is not None:
            return background.apart()
        return self.pause()

    @property
    def policy_version(self) -> int:
        """The version of the policy, which `update_policy_weights_` counts up; see ``track_policy_version=``.

        The lowest one, where workers have unlike versions: after ``update_policy_weights_(worker_ids=[0])`` the others
        keep theirs.
        """
        return self.source.oldest_version

    def get_policy_version(self) -> int:
        """Return `policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Count the policy's version up, for who gives it weights otherwise than by `update_policy_weights_`."""
        self.source.policy_version += 1

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """What `update_policy_weights_` calls instead of copying by itself; None for nothing. Can be set."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, updater: WeightUpdaterBase | None) -> None:
        if updater is not None:
            updater.register_collector(self)
            self.source.stop_following()
        self._weight_updater = updater

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call `init` of the `weight_updater`, if there is one."""
        if self._weight_updater is not None:
            self._weight_updater.init(*args, **kwargs)

    # ------------------------------------------------------- in the background
    def start(self) -> None:
        """Begin to collect into the replay buffer in a thread, until `stop`, `shutdown` or the end of the budget.

        Sample from the buffer meanwhile. An error of the thread is raised by the next call of a method here; then the
        collector can be started again. All other methods wait for the batch at hand.

        Raises:
            MissingArgumentError: there is no replay buffer.
            UnsupportedError: it was started already.
        """
        if self._handover.feed is None:
            raise MissingArgumentError("start: the collector needs a buffer to collect into, replay_buffer=")
        self._handover.require_open()
        if self._handover.background is None:
            self._handover.background = Background(self._turn)
        self._handover.background.start()

    def _turn(self) -> bool:
        try:
            self._take()
        except BudgetSpent:
            return False
        return True

    def stop(self, timeout: float | None = None) -> None:
        """End what `start` began, after the batch at hand; `start` goes on from there.

        Args:
            timeout: how many seconds to wait for that; None for as long as it takes.

        Raises:
            WorkerTimeoutError: it took longer; there will be no further batch.
        """
        if self._handover.background is not None:
            self._handover.background.stop(timeout)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Collect nothing in the background within a ``with`` block; without anything in the background, no effect."""
        background = self._handover.background
        with nullcontext() if background is None else background.paused():
            yield

    def is_running(self) -> bool:
        """Return whether batches are being collected in the background."""
        background = self._handover.background
        return background is not None and background.running

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End what the collector runs; calling it again does nothing. `state_dict` and `stats` still work.

        Args:
            timeout: how many seconds a batch in the background may take to end; None for as long as it takes.
            close_env: whether the environment is closed, too; else it stays as it is, to evaluate in, say.

        Raises:
            WorkerTimeoutError: the batch took longer; the environment is still open then.
            Exception: what a batch in the background raised.
        """
        self.closed = True
        try:
            with suppress(ClosedError):  # its workers have ended, and whoever lost them was told
                self.stop(timeout)
        except WorkerTimeoutError:
            raise
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                self._close(close_env)
            raise
        self._close(close_env)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down what collects in the background; the same as `shutdown`."""
        self.shutdown(timeout, close_env)

    def _close(self, close_env: bool) -> None:
        self._handover.show_progress(last=True)
        self.source.close(close_env)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the policy and of the environments, the counters, ids and random generators.

        It's safe for ``torch.load(weights_only=True)``. The state of environments that can't be told (see the page on
        checkpoints), and of those in worker processes, isn't part of it.
        """
        with self.pause():
            return self.source.save()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, **kwargs: Any) -> None:
        """Go on from a saved state, in the middle of the episodes, with what batches would have followed there.

        The generators of torch, NumPy and Python go on, too. Where the environments' state wasn't told, or doesn't fit
        these, they're reset before the next batch: trajectories that were under way end where they were saved, others
        follow, and `stats` counts the former as ``cut``. A collector that has handed out other frames of the same
        trajectories gives them other ids: what holds those frames may not go back. `gleanrl.Checkpoint`, which has
        buffers go back, too, keeps the ids.

        Args:
            state_dict: from `state_dict`.
            strict: whether a missing or unexpected entry is an error.
            **kwargs: passed to the policy's `load_state_dict`.

        Raises:
            MissingKeyError: if an entry is missing; nothing has changed then.
            SchemaError: if an entry is unexpected (a policy's weights without such a policy) or doesn't fit; likewise.
            ClosedError: there is nothing to go on with: the environment is closed.
        """
        with self.pause():
            self.loading(state_dict, strict, **kwargs).change()

    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Return what goes on from a saved state; see `Source.loading`."""
        self._handover.require_open()
        return self.source.loading(state, strict, keep_ids, **kwargs)


class _Batches(Iterator[TensorDictBase]):
    """The batches of a collector. No generator, which an exception would end."""

    def __init__(self, collector: SourceCollector) -> None:
        self._collector = collector

    def __next__(self) -> Any:
        try:
            return self._collector.take()
        except BudgetSpent:
            raise StopIteration from None
        except StopIteration as failure:  # an environment's: a loop would take it for the end of the budget
            raise EnvironmentFailure(str(failure)) from failure.__cause__
