"""The policy's weights on their way to the workers: written twice over in shared memory, by turns.

The owner writes a version into the block that isn't in use, then publishes it by one store. A worker takes the
published version before a share, copies it, and looks whether the owner has begun to write that block again
meanwhile: if so, it copies the newer version. So an update is seen whole or not at all, at the latest in the worker's
next share, and neither side ever waits for the other.

A worker that was given weights of its own (``worker_ids=``) has two blocks of its own, until all get some again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.block import Field, Schema
from gleanrl.collectors.weights import (
    PolicyWeights,
    check_loads,
    copy_weights,
    matched_weights,
    weights_of,
)
from gleanrl.collectors.workers.words import MARKED, PUBLISHED, PULLED, WRITING, WRITING_OWN
from gleanrl.errors import PolicyError
from gleanrl.tree import Path, flatten
from gleanrl.workers.segment import Region, Rows, Segment

_WEIGHTS, _VERSION = "weights", "version"
_NUM_BLOCKS = 2
_OWN = 1


def fields_of(policy: Any) -> dict[Path, Field] | None:
    """Return shapes and dtypes of a policy's weights; None if it isn't a module, or has none."""
    if not isinstance(policy, torch.nn.Module):
        return None
    leaves = flatten(TensorDict.from_module(policy))
    return {path: Field(leaf.shape, leaf.dtype) for path, leaf in leaves.items()} or None


class _Copies:
    """One version's weights and the next one's, in a region of the segment."""

    def __init__(self, segment: Segment, region: Region) -> None:
        self.region = region
        self.records = [segment.block(region, number).record(0) for number in range(_NUM_BLOCKS)]
        self.number = 0
        """Of the copy that was published last; 0 for none."""

    @classmethod
    def laid_out(cls, segment: Segment, name: str, fields: Mapping[Path, Field]) -> _Copies:
        schema = Schema(
            {
                (_VERSION,): Field(torch.Size(), torch.int64),
                **{(_WEIGHTS, *path): field for path, field in fields.items()},
            }
        )
        return cls(segment, segment.region(name, Rows(schema, torch.Size(), 1), _NUM_BLOCKS))

    @property
    def current(self) -> Any:
        """The record that was published last."""
        return self.records[self.number % _NUM_BLOCKS]


class SharedWeights:
    """The owner's side. `push` may be called by one thread while another one calls `refresh`.

    Args:
        policy: the user's, whose current weights are followed; None if only the workers have one.
        fields: of the weights, as the workers have them.
        segment: shared with the workers.
        words: of each worker.
        by_hand: whether an update by the user ends the following, whatever it gives.
    """

    def __init__(
        self,
        policy: Any,
        fields: Mapping[Path, Field],
        segment: Segment,
        words: Sequence[memoryview],
        by_hand: bool,
    ) -> None:
        self._policy = policy if isinstance(policy, torch.nn.Module) else None
        self._fields, self._segment, self._words = fields, segment, list(words)
        self._follows, self._by_hand = self._policy is not None, by_hand
        self._all = _Copies.laid_out(segment, "weights", fields)
        self._own: dict[int, _Copies] = {}
        self._lock = threading.Lock()
        self._marked = 0
        self.version = 0
        """How often the policy got other weights by the user's hands."""

    @property
    def region(self) -> Region:
        """Where the weights of all workers stand."""
        return self._all.region

    def refresh(self) -> None:
        """Publish the current weights of the user's policy, if they are followed."""
        if self._follows and not any(weight.is_meta for weight in self._policy.parameters()):  # type: ignore[union-attr]
            with self._lock:
                self._write(None, self._policy)

    def stop_following(self) -> None:
        """Publish weights that are pushed only."""
        self._follows = False

    def push(self, given: Mapping[int | None, Any], version: int) -> None:
        """Publish weights; workers take them before their next share.

        Args:
            given: weights, see `PolicyWeights.push`: of workers with regions of their own, or, under None, of all.
            version: what frames say of them.

        Raises:
            PolicyError: there are none to take.
            SchemaError, InvalidTypeError: some don't fit; nothing has changed then.
        """
        if self._policy is None and any(weights is None for weights in given.values()):
            raise PolicyError(
                "update_policy_weights_: the policy was made in the workers: give the weights, a TensorDict of them, "
                "a module like it, or its state_dict()"
            )
        found = {
            worker: weights_of(self._policy if weights is None else weights)
            for worker, weights in given.items()
        }
        if len(found) > 1:  # one is checked as it's copied
            for weights in found.values():
                matched_weights(weights, self._all.current[_WEIGHTS])
        with self._lock:
            before, self.version = self.version, version
            try:
                for worker, weights in found.items():
                    self._write(worker, weights)
            except BaseException:
                self.version = before
                raise
        if self._by_hand or any(
            worker is not None or weights is not None for worker, weights in given.items()
        ):
            self._follows = False

    def load(self, states: Mapping[int, Any], strict: bool, arguments: Mapping[str, Any]) -> None:
        """Give the user's policy and the workers' saved weights.

        Args:
            states: by worker.
            strict: whether a missing or unexpected entry is an error.
            arguments: of the policy's `load_state_dict`.
        """
        first = next(iter(states.values()))
        given = {worker: weights_of(state) for worker, state in states.items()}
        if self._policy is not None:
            check_loads(self._policy, first, strict, arguments)
            self._policy.load_state_dict(first, strict=strict, **arguments)
        with self._lock:
            self._write(None, next(iter(given.values())))
            for worker in set(self.unlike(states)):
                self._write(worker, given[worker])

    @staticmethod
    def unlike(states: Mapping[int, Any]) -> list[int]:
        """Return the workers whose saved weights aren't those of the first one: they need a region of their own."""
        first = next(iter(states.values()))
        return [
            worker
            for worker, state in states.items()
            if any(name not in first or not torch.equal(first[name], value) for name, value in state.items())
        ]

    def mark(self, version: int) -> None:
        """Have frames say a later version of the same weights, since somebody else has sent others."""
        with self._lock:
            self.version = self._marked = version
            for words in self._words:
                words[MARKED] = version

    def _write(self, worker: int | None, given: Any) -> None:
        copies, begun = self._all, WRITING
        if worker is not None:
            copies, begun = self._own[worker], WRITING_OWN
        number = copies.number + 1
        told = self._words if worker is None else [self._words[worker]]
        for words in told:
            words[begun] = number
        record = copies.records[number % _NUM_BLOCKS]
        copy_weights(weights_of(given), record[_WEIGHTS])
        record[_VERSION].fill_(self.version)
        copies.number = number
        for words in told:
            words[PUBLISHED] = number * 2 + (worker is not None)

    def lay_out_own(self, workers: Iterable[int]) -> list[int]:
        """Lay out regions of their own for workers; return those that hadn't one and are to be told of it."""
        new = [worker for worker in workers if worker not in self._own]
        for worker in new:
            self._own[worker] = _Copies.laid_out(self._segment, f"weights of {worker}", self._fields)
        return new

    def own_region(self, worker: int) -> Region | None:
        """Return where the worker's own weights stand; None if it has none."""
        return self._own[worker].region if worker in self._own else None

    def tell(self, worker: int, own: bool) -> None:
        """Publish what a worker that was made anew is to use.

        Args:
            worker: its number.
            own: whether the former one used weights of its own.
        """
        words = self._words[worker]
        with self._lock:
            words[WRITING] = self._all.number
            words[WRITING_OWN] = self._own[worker].number if own else 0
            words[MARKED] = self._marked
            words[PUBLISHED] = self._own[worker].number * 2 + 1 if own else self._all.number * 2

    def behind(self, worker: int) -> int:
        """Return by how many versions, of those that were published, the worker's weights are older."""
        words = self._words[worker]
        published, pulled = words[PUBLISHED], words[PULLED]
        return 0 if published % 2 != pulled % 2 else (published - pulled) // 2

    def state_of(self, worker: int) -> dict[str, torch.Tensor] | None:
        """Return a copy of the weights that a worker is to use, by their names; None before any were published."""
        published = self._words[worker][PUBLISHED]
        with self._lock:
            copies = self._own[worker] if published % 2 == _OWN else self._all
            if not copies.number:
                return None
            return {".".join(path): leaf.clone() for path, leaf in flatten(copies.current[_WEIGHTS]).items()}


class PulledWeights(PolicyWeights):
    """The worker's side: the policy that collects there.

    Args:
        policy: the worker's copy.
        device: where it runs.
        words: of the worker.
    """

    def __init__(self, policy: Any, device: torch.device | None, words: memoryview) -> None:
        super().__init__(policy, device)
        self._words, self._pulled = words, 0
        self._sources: list[list[Any]] = [[], []]

    def bind(self, segment: Segment, region: Region | None, own: bool = False) -> None:
        """Take weights from a region: that of all workers, or the worker's own."""
        if region is not None:
            self._sources[own] = [segment.block(region, number).record(0) for number in range(_NUM_BLOCKS)]

    def refresh(self) -> None:
        """Take the published weights, if they are others.

        Raises:
            PolicyError: the policy has none of its own, and none were published.
        """
        published = self._words[PUBLISHED]
        self.version = max(self.version, self._words[MARKED])
        if published == self._pulled:
            if not published:
                super().refresh()
            return
        while True:
            number, own = divmod(published, 2)
            record = self._sources[own][number % _NUM_BLOCKS]
            copy_weights(record[_WEIGHTS], TensorDict.from_module(self.policy))
            version = int(record[_VERSION])
            if self._words[WRITING_OWN if own else WRITING] < number + _NUM_BLOCKS:
                break
            published = self._words[PUBLISHED]
        self._pulled = self._words[PULLED] = published
        self.version = max(version, self._words[MARKED])
        self.received()
