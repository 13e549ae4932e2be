"""The policy's weights in shared memory: the owner writes them, and workers copy them before a share.

There are two copies, which the owner writes alternately. It writes a version into the copy that isn't published, then
publishes it by one store. A worker copies the published version. If the owner has meanwhile begun to write to the same
memory, the worker copies the newer version instead. So a worker has all of an update or none of it, and neither side
waits. An update takes effect at the worker's next share at the latest.

A worker that gets separate weights (``worker_ids=``) has two more copies. It uses them until all workers get weights
again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import Path, flatten
from gleanrl._os.interrupts import to_the_end
from gleanrl._os.shared_memory import fence
from gleanrl._process.shared_columns import Region, SharedRows, SharedSegment
from gleanrl.collectors.policy_weights import (
    PolicyWeights,
    WeightCopier,
    check_loads,
    copy_weights,
    matched_weights,
    weights_of,
)
from gleanrl.collectors.workers.shared_counters import MARKED, PUBLISHED, PULLED, WRITING, WRITING_OWN
from gleanrl.errors import PolicyError

_WEIGHTS, _VERSION = "weights", "version"
_NUM_BLOCKS = 2
_OWN = 1


def fields_of(policy: Any) -> dict[Path, Field] | None:
    """Return shapes and dtypes of a policy's weights; None if it isn't a module, or has none."""
    if not isinstance(policy, torch.nn.Module):
        return None
    leaves = flatten(TensorDict.from_module(policy))
    return {path: Field(leaf.shape, leaf.dtype) for path, leaf in leaves.items()} or None


class FollowedWeights(Enum):
    """Until when the current weights of the user's policy are published before every batch."""

    ALWAYS = "always"
    UNTIL_REPLACED = "until the user gives other weights"
    UNTIL_UPDATED = "until the user's first update, whatever it gives"


class _Copies:
    """The two copies of the weights, in a region of the shared memory."""

    def __init__(self, segment: SharedSegment, region: Region) -> None:
        self.region = region
        blocks = [segment.block(region, number) for number in range(_NUM_BLOCKS)]
        self._weights = [block.record(0)[_WEIGHTS] for block in blocks]
        self._versions = [block.array((_VERSION,)) for block in blocks]
        self.number = 0
        """Number of the copy that was published last; 0 for none."""

    @classmethod
    def laid_out(cls, segment: SharedSegment, name: str, fields: Mapping[Path, Field]) -> _Copies:
        schema = Schema(
            {
                (_VERSION,): Field(torch.Size(), torch.int64),
                **{(_WEIGHTS, *path): field for path, field in fields.items()},
            }
        )
        return cls(segment, segment.region(name, SharedRows(schema, torch.Size(), 1), _NUM_BLOCKS))

    def weights(self, number: int) -> Any:
        """Return the memory of the weights of copy `number`."""
        return self._weights[number % _NUM_BLOCKS]

    def version(self, number: int) -> np.ndarray[Any, Any]:
        """Return the memory of their version, ``(1,)`` int64."""
        return self._versions[number % _NUM_BLOCKS]


class SharedWeights:
    """The owner's side. One thread may call `push` while another one calls `refresh`.

    Args:
        policy: the user's policy, whose current weights workers follow; None if only the workers have one.
        fields: shapes and dtypes of the workers' weights.
        segment: the memory shared with the workers.
        words: shared counters of each worker.
        following: until when workers follow `policy`.
    """

    def __init__(
        self,
        policy: Any,
        fields: Mapping[Path, Field],
        segment: SharedSegment,
        words: Sequence[memoryview],
        following: FollowedWeights,
    ) -> None:
        self._policy = policy if isinstance(policy, torch.nn.Module) else None
        self._linked = None if self._policy is None else WeightCopier(self._policy)
        self._fields, self._segment, self._words = fields, segment, list(words)
        self._follows, self._following = self._policy is not None, following
        self._all = _Copies.laid_out(segment, "weights", fields)
        self._own: dict[int, _Copies] = {}
        self._lock = threading.Lock()
        """Held while weights are written or published, and while a decision depends on `_follows` or `version`.

        `push` and `refresh` may run in different threads.
        """
        self.version = 0
        """How often the user has updated the weights: the latest version that was published for a worker."""

    @property
    def oldest_version(self) -> int:
        """The lowest version of the weights that are published for a worker."""
        with self._lock:
            return min(self._version_of(worker) for worker in range(len(self._words)))

    def _version_of(self, worker: int) -> int:
        """Return the version of the weights that are published for a worker."""
        words = self._words[worker]
        number, own = divmod(words[PUBLISHED], 2)
        copies = self._copies(worker if own == _OWN else None)
        return max(int(copies.version(number)[0]) if number else 0, words[MARKED])

    @property
    def region(self) -> Region:
        """The region of the weights for all workers."""
        return self._all.region

    def refresh(self) -> None:
        """Publish the current weights of the user's policy, if workers follow them.

        No effect before the first publication while all its parameters are on the meta device.
        """
        with self._lock:
            if self._follows and (self._all.number or not self._linked.lacking):  # type: ignore[union-attr]
                self._publish({None: self._policy}, self.version)

    def stop_following(self) -> None:
        """Publish only pushed weights from now on."""
        with self._lock:
            self._follows = False

    def push(self, by_worker: Mapping[int | None, Any], version: int) -> None:
        """Publish weights, which workers copy before their next share. It may end the following; see `FollowedWeights`.

        Args:
            by_worker: weights by worker, each worker with its own region; the key None means all workers. See
                `PolicyWeights.push` for the form of the weights.
            version: the version that frames made with them carry.

        Raises:
            PolicyError: if the current weights of the user's policy are asked for, but only the workers have a policy.
            SchemaError, InvalidTypeError: if some weights don't fit; nothing has changed then.
        """
        if self._policy is None and any(weights is None for weights in by_worker.values()):
            raise PolicyError(
                "update_policy_weights_: expected weights, got none, and the policy exists in the workers only; pass a "
                "TensorDict of weights, a module like the policy, or its state_dict()"
            )
        found = {
            worker: self._policy if weights is None else weights for worker, weights in by_worker.items()
        }
        # Any push ends `UNTIL_UPDATED`. Only weights other than the user's policy end `UNTIL_REPLACED`.
        replaces_policy = set(by_worker) != {None} or by_worker[None] is not None
        ends = FollowedWeights.UNTIL_REPLACED if replaces_policy else FollowedWeights.UNTIL_UPDATED
        with self._lock:
            self._publish(
                found, version, self._follows and self._following not in (ends, FollowedWeights.UNTIL_UPDATED)
            )

    def mark(self, version: int) -> None:
        """Let frames carry a later version, after the weights were changed other than by `push`."""
        with self._lock:

            def change() -> None:
                self.version = version
                mark_frames(self._words, version)

            to_the_end(change)

    def _publish(
        self, by_worker: Mapping[int | None, Any], version: int, follows: bool | None = None
    ) -> None:
        """Write weights, then publish all of them at once. The caller holds the lock.

        The order of the stores matters. `WRITING` comes first, so that a worker that is copying from the same memory
        notices. `PUBLISHED` comes last, so that a worker that sees it finds the weights complete. The fences keep this
        order on every processor.

        Args:
            by_worker: weights by worker; the key None means all workers.
            version: their version.
            follows: whether workers follow the user's policy from now on; None for no change.
        """
        for worker, weights in by_worker.items():
            copies = self._copies(worker)
            number = copies.number + 1
            for words in self._counters_of(worker):
                words[WRITING if worker is None else WRITING_OWN] = number
            fence()
            if self._linked is not None and weights is self._policy:
                self._linked.write(copies.weights(number))
            else:
                copy_weights(weights_of(weights), copies.weights(number))
            copies.version(number)[0] = version
        fence()
        numbers = {worker: self._copies(worker).number + 1 for worker in by_worker}

        def change() -> None:
            for worker, number in numbers.items():
                self._copies(worker).number = number
                for words in self._counters_of(worker):
                    words[PUBLISHED] = number * 2 + (worker is not None)
            self.version = version
            if follows is not None:
                self._follows = follows

        to_the_end(change)

    def _copies(self, worker: int | None) -> _Copies:
        return self._all if worker is None else self._own[worker]

    def _counters_of(self, worker: int | None) -> Sequence[memoryview]:
        """Return the counters of the workers that `worker` addresses: its own, or all for None."""
        return self._words if worker is None else [self._words[worker]]

    def own_region(self, worker: int, new: bool = False) -> Region | None:
        """Return the region of a worker's separate weights; None if it has none.

        Args:
            worker: its number.
            new: whether to allocate the region if there is none.
        """
        if new and worker not in self._own:
            self._own[worker] = _Copies.laid_out(self._segment, f"weights of {worker}", self._fields)
        return self._own[worker].region if worker in self._own else None

    def behind(self, worker: int) -> int:
        """Return the number of publications that the worker hasn't copied yet.

        It is 0 while a change from common to separate weights, or back, is published but not copied.
        """
        words = self._words[worker]
        published, pulled = words[PUBLISHED], words[PULLED]
        return 0 if published % 2 != pulled % 2 else (published - pulled) // 2

    # ------------------------------------------------------------------- state
    def state_of(self, worker: int) -> dict[str, torch.Tensor] | None:
        """Return a copy of the weights published for a worker, by name; None before the first ones."""
        with self._lock:
            copies = self._copies(worker if self._words[worker][PUBLISHED] % 2 == _OWN else None)
            if not copies.number:
                return None
            leaves = flatten(copies.weights(copies.number))
            return {".".join(path): leaf.clone() for path, leaf in leaves.items()}

    def parse(self, states: Mapping[int, Any], strict: bool, arguments: Mapping[str, Any]) -> LoadedWeights:
        """Return the checked weights of a saved state; change nothing.

        Args:
            states: saved weights by worker.
            strict: whether a missing or unexpected entry is an error.
            arguments: arguments of the policy's `load_state_dict`.

        Raises:
            SchemaError, InvalidTypeError: they don't fit.
        """
        current = self.state_of(next(iter(states)))
        names = {".".join(path) for path in self._fields}
        needed, policy_state = names, dict[str, Any]()
        if self._policy is not None:
            current = current or _by_name(self._policy)
            needed = set(self._policy.state_dict())  # without non-persistent buffers, which keep their values
            first = next(iter(states.values()))
            policy_state = {
                name: value for name, value in first.items() if name in needed or name not in names
            }
            check_loads(self._policy, policy_state, strict, arguments)
        by_worker = {}
        for worker, state in states.items():
            missing = names - set(state) - (needed if strict else set())
            complete = {**state, **{name: (current or {})[name] for name in missing & set(current or {})}}
            if not strict:
                complete = {name: value for name, value in complete.items() if name in names}
            by_worker[worker] = weights_of(complete)
            matched_weights(by_worker[worker], self._all.weights(0))
        own = _unlike(by_worker) if len(by_worker) == len(self._words) else list(by_worker)
        return LoadedWeights(by_worker, own, policy_state, strict, arguments)

    def adopt(self, loaded: LoadedWeights) -> None:
        """Load parsed weights into the user's policy if worker 0 has some, and publish them under the last version."""
        if self._policy is not None and 0 in loaded.by_worker:
            self._policy.load_state_dict(loaded.policy_state, strict=loaded.strict, **loaded.arguments)
        by_worker: dict[int | None, Any] = {worker: loaded.by_worker[worker] for worker in loaded.own}
        if len(loaded.by_worker) == len(self._words):
            by_worker = {None: loaded.by_worker[0], **by_worker}
        with self._lock:
            self._publish(by_worker, self.version, self._follows and not loaded.own)


def mark_frames(words: Iterable[memoryview], version: int) -> None:
    """Let frames of the workers with these counters carry at least this version, from the next share on."""
    for counters in words:
        counters[MARKED] = version


class LoadedWeights(NamedTuple):
    """The checked weights of a saved state."""

    by_worker: Mapping[int, TensorDictBase]
    """Weights by worker."""
    own: Sequence[int]
    """Workers that need a separate region.

    If every worker has saved weights, these are the workers that differ from worker 0. Otherwise they are all workers
    with saved weights.
    """
    policy_state: Mapping[str, Any]
    strict: bool
    arguments: Mapping[str, Any]


def _unlike(by_worker: Mapping[int, TensorDictBase]) -> list[int]:
    """Return the workers whose weights differ from the weights of worker 0."""
    first = flatten(by_worker[0])
    return [
        worker
        for worker, weights in by_worker.items()
        if any(not torch.equal(first[path], value) for path, value in flatten(weights).items())
    ]


def _by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {".".join(path): leaf.detach() for path, leaf in flatten(TensorDict.from_module(module)).items()}


class PulledWeights(PolicyWeights):
    """The worker's side: the policy that collects there, and the copying of published weights into it.

    Args:
        policy: the worker's policy.
        device: device that it runs on.
        words: shared counters of the worker.
    """

    def __init__(self, policy: Any, device: torch.device | None, words: memoryview) -> None:
        super().__init__(policy, device)
        self._words, self._pulled = words, 0
        self._sources: dict[bool, _Copies] = {}
        self._linked = WeightCopier(self.policy) if isinstance(self.policy, torch.nn.Module) else None

    def bind(self, segment: SharedSegment, region: Region | None, own: bool = False) -> None:
        """Copy weights from a region: the region of all workers, or the worker's separate one (`own`).

        `refresh` does the copying. A region that is None has no effect.
        """
        if region is not None:
            self._sources[own] = _Copies(segment, region)

    def refresh(self) -> None:
        """Copy the published weights into the policy, if they are new, and update `version`.

        Raises:
            PolicyError: the policy has no weights, and none were published.
        """
        published = self._words[PUBLISHED]
        self.version = max(self.version, self._words[MARKED])
        if published == self._pulled:
            if not published:
                super().refresh()
            return
        assert self._linked is not None
        while True:
            number, own = divmod(published, 2)
            source = self._sources[own == _OWN]
            fence()  # the weights are read after `PUBLISHED`
            self._linked.read(source.weights(number))  # may read a copy that the owner has begun to overwrite
            version = int(source.version(number)[0])
            fence()  # and before `WRITING`
            # Copy `number + 2` overwrites this one. If its writing hasn't begun, the read was consistent.
            if self._words[WRITING_OWN if own else WRITING] < number + _NUM_BLOCKS:
                break
            published = self._words[PUBLISHED]
        self._pulled = self._words[PULLED] = published
        self.version = max(version, self._words[MARKED])
        self.received()
