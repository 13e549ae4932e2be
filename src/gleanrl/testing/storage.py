"""`check_storage`: checks that a storage does what replay buffers rely on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.results import Selection
from gleanrl.data.replay_buffers import ReplayBuffer, Storage
from gleanrl.data.replay_buffers.change_log import touched
from gleanrl.data.replay_buffers.storages.adapter import as_storage
from gleanrl.data.replay_buffers.storages.base import Prepared
from gleanrl.errors import GleanError, InvalidArgumentError
from gleanrl.testing.report import PartReport, expect, made, part_report

Make = Callable[[], Storage]
_OWN_RULES = ("memory", "refusal", "copies")
Records = Callable[[int, int], Any]


def numbered(start: int, count: int) -> TensorDict:
    """Return records that hold their number: ``x`` ``(count,)`` int64, ``next.y`` ``(count, 2)`` float32."""
    x = torch.arange(start, start + count, device="cpu")
    return TensorDict({"x": x, "next": {"y": x[:, None].float().repeat(1, 2)}}, [count])


class _Trial:
    """A fresh storage in its own buffer, and the number of the record expected in each slot."""

    def __init__(self, rule: str, make: Make, records: Records) -> None:
        self.rule, self.records = rule, records
        self.make = lambda: as_storage(make())
        self.storage: Storage = as_storage(make())
        self.buffer = ReplayBuffer(storage=self.storage, batch_size=4)
        self.size = self.storage.max_size
        self.expected: list[int] = []
        self.clock = 0

    def extend(self, count: int) -> None:
        """Extend the buffer by records with new numbers, and expect them in the slots of a ring writer."""
        cursor = self.storage.end
        self.buffer.extend(self.records(self.clock, count))
        for offset in range(count):
            slot, number = (cursor + offset) % self.size, self.clock + offset
            if slot < len(self.expected):
                self.expected[slot] = number
            else:
                self.expected += [-1] * (slot - len(self.expected)) + [number]
        self.clock += count

    def prepared(self, count: int) -> Prepared:
        """Return prepared records with new numbers."""
        self.clock += count
        return self.storage.prepare_selection(
            self.records(self.clock - count, count), torch.Size([count]), "check_storage"
        )

    def row(self, number: int) -> list[Any]:
        """Return the leaves of the record with a number."""
        data = self.records(number, 1)
        return _parts(
            self.storage.collate(data) if isinstance(data, list) and self.storage.collate else data, 0
        )

    def check(self, where: str, storage: Storage | None = None, expected: list[int] | None = None) -> None:
        """Check that a storage holds the expected records."""
        storage, expected = storage or self.storage, self.expected if expected is None else expected
        self.expect(
            len(storage) == storage.num_steps == len(expected),
            where,
            f"{len(expected)} records",
            f"{len(storage)}",
        )
        if not expected:
            return
        slots = torch.tensor([*range(len(expected))][::-1] + [0, 0], device="cpu")
        self.compare(where, storage.fetch(slots), [expected[slot] for slot in slots.tolist()], storage)

    def compare(self, where: str, fetched: Any, numbers: list[int], storage: Storage) -> None:
        """Check that fetched records, after the storage's `collate`, are the ones with the given numbers, in order."""
        batch = fetched if storage.collate is None else storage.collate(fetched)
        for position, number in enumerate(numbers):
            got, wanted = _parts(batch, position), self.row(number)
            same = len(got) == len(wanted) and all(map(_same, got, wanted))
            self.expect(same, f"{where}, row {position}", f"record {number}: {wanted}", f"{got}")

    def expect(self, holds: bool, where: str, expected: str, got: str) -> None:
        """Raise `ConformanceError` unless `holds` is True."""
        expect(self.rule, where, holds, expected, got)


def _parts(batch: Any, position: int) -> list[Any]:
    if is_tensor_collection(batch):
        return [batch.get(key)[position] for key in sorted(batch.keys(True, True), key=str)]
    return [leaf[position] for leaf in _pytree.tree_leaves(batch)]


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor):
        return got.dtype == wanted.dtype and torch.equal(got.cpu(), wanted.cpu())
    return bool(got == wanted)


def _empty(trial: _Trial) -> None:
    found = (len(trial.storage), trial.storage.num_steps, trial.storage.end)
    trial.expect(found == (0, 0, 0), "a fresh storage", "length, steps and end 0", f"{found}")


def _ring(trial: _Trial) -> None:
    for count in (1, trial.size - 2, 3, trial.size, 2 * trial.size + 1):
        trial.extend(count)
        trial.check(f"extend({count} records)")


def _memory(trial: _Trial) -> None:
    trial.extend(2)
    data = trial.records(trial.clock, 1)
    trial.expected.append(trial.clock)
    trial.clock += 1
    trial.buffer.extend(data)
    for leaf in _tensors(data):
        leaf.zero_()
    trial.check("after the written tensors changed")
    fetched = trial.storage.fetch(torch.tensor([0, 1], device="cpu"))
    if trial.storage.collate is None:
        for leaf in _tensors(fetched):
            leaf.zero_()
        trial.check("after a fetched batch changed")


def _tensors(batch: Any) -> list[torch.Tensor]:
    leaves = batch.values(True, True) if is_tensor_collection(batch) else _pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _slots(trial: _Trial) -> None:
    trial.extend(trial.size)
    first, end = trial.clock, trial.storage.end
    trial.storage.write_slots(trial.prepared(3), torch.tensor([2, 0, 2], device="cpu"))
    trial.expected[0], trial.expected[2] = first + 1, first + 2
    trial.check("write_slots([2, 0, 2]): the last of equal slots wins")
    trial.expect(trial.storage.end == end, "write_slots", f"end {end}", f"{trial.storage.end}")
    first = trial.clock
    chosen = torch.tensor([1, 3], device="cpu")
    trial.storage.write_selected(trial.prepared(3), Selection(chosen - 1, chosen, chosen, trial.size))
    trial.expected[1], trial.expected[3] = first, first + 2
    trial.check("write_selected(rows [0, 2] to slots [1, 3])")


def _versions(trial: _Trial) -> None:
    trial.extend(trial.size - 1)
    storage, every = trial.storage, torch.arange(trial.size, device="cpu")

    def change(where: str, call: Callable[[], Any], slots: list[int]) -> None:
        version, before = storage.version, storage.generation(every)
        call()
        changed = touched(every, storage.changed_since(version))[slots]
        counted = (storage.generation(every) > before)[slots]
        trial.expect(
            bool(changed.all()), where, f"changed_since to name the slots {slots}", f"{changed.tolist()}"
        )
        trial.expect(bool(counted.all()), where, f"higher generations of {slots}", f"{counted.tolist()}")

    change("extend", lambda: trial.extend(2), [trial.size - 1, 0])
    change(
        "write_slots", lambda: storage.write_slots(trial.prepared(1), torch.tensor([1], device="cpu")), [1]
    )
    change("clear", storage.clear, every.tolist())


def _clear(trial: _Trial) -> None:
    trial.extend(3)
    trial.buffer.empty()
    trial.expected = []
    trial.check("empty()")
    trial.extend(2)
    trial.check("extend after empty()")


def _refusal(trial: _Trial) -> None:
    trial.extend(3)
    nothing: list[Any] = [[], None, {}]
    for bad in nothing:
        try:
            trial.buffer.extend(bad)
        except GleanError:
            trial.check(f"extend({bad!r}), which raised")
        except Exception as error:
            trial.expect(False, f"extend({bad!r})", "a GleanError", repr(error))
        else:
            trial.expect(False, f"extend({bad!r})", "an error, because this is no record", "none")


def _state(trial: _Trial) -> None:
    trial.extend(trial.size + 1)
    state, expected = trial.storage.state_dict(), list(trial.expected)
    trial.extend(2)
    trial.check("after state_dict()")
    for storage, where in ((trial.make(), "a fresh storage"), (trial.storage, "the storage itself")):
        storage.load_state_dict(state)
        trial.check(f"load_state_dict of {where}", storage, expected)
        end = (trial.size + 1) % trial.size
        trial.expect(storage.end == end, where, f"end {end}", f"{storage.end}")
    trial.expected = expected
    for name in state:
        try:
            trial.storage.load_state_dict({key: value for key, value in state.items() if key != name})
        except GleanError:
            trial.check(f"load_state_dict without {name!r}, which raised")
        else:
            trial.expect(False, f"load_state_dict without {name!r}", "a SchemaError", "none")


def _copies(trial: _Trial) -> None:
    trial.extend(3)
    expected, other = list(trial.expected), copy.deepcopy(trial.storage)
    trial.extend(trial.size)
    trial.check("the copy, after a write to the original", other, expected)
    trial.check("the original")


def _served(trial: _Trial) -> None:
    trial.extend(3)
    batch, info = trial.buffer.sample(return_info=True)
    for position, slot in enumerate(info["index"].tolist()):
        got, wanted = _parts(batch, position), trial.row(trial.expected[slot])
        trial.expect(all(map(_same, got, wanted)), f"sample(), slot {slot}", f"{wanted}", f"{got}")
    one, wanted = trial.storage.get(1), trial.row(trial.expected[1])
    keys = sorted(one.keys(True, True), key=str) if is_tensor_collection(one) else ()
    parts = [one.get(key) for key in keys] or _pytree.tree_leaves(one)
    trial.expect(all(map(_same, parts, wanted)), "get(1)", f"{wanted}", f"{parts}")


RULES: dict[str, Callable[[_Trial], None]] = {
    "empty": _empty,
    "ring": _ring,
    "memory": _memory,
    "slots": _slots,
    "versions": _versions,
    "clear": _clear,
    "refusal": _refusal,
    "state": _state,
    "copies": _copies,
    "served": _served,
}
"""The rules by name, in the order of their checks."""


def check_storage(make: Make, *, records: Records = numbered, skip: Iterable[str] = ()) -> PartReport:
    """Check a storage with one batch dimension against the rules below.

    - `empty`: a fresh storage holds nothing.
    - `ring`: written records are fetched in any order, also around the end; of a long write, the newest.
    - `memory`: neither written data nor fetched batches share memory with the stored records.
    - `slots`: records are stored in chosen slots; of equal slots the last one wins; the end doesn't move.
    - `versions`: `changed_since` contains every change, and each change raises the generations of its slots.
    - `clear`: a cleared storage is empty and can be written again.
    - `refusal`: data that are no record raise a `GleanError` and change nothing.
    - `state`: a saved state holds the records, loads into a fresh storage, and is refused if a field is missing.
    - `copies`: a deep copy is independent of the original.
    - `served`: a buffer samples the stored records, and `get` returns them.

    A storage by the protocol of other releases isn't checked against `memory`, `refusal` and `copies`: its own class
    defines these (see the page on storages).

    Args:
        make: makes the storage, a fresh and empty one at each call, for 5 to some hundred records.
        records: ``records(start, count)`` returns `count` records in a form that `extend` takes, numbered from `start`
            on. Each number has a different record. The suite may overwrite their tensors.
        skip: names of rules to leave out.

    Returns:
        The rules that were checked, and the rules that weren't.

    Raises:
        ConformanceError: the first broken rule (also an AssertionError).
        InvalidArgumentError: the storage has another `ndim` than 1 or a `max_size` below 5, or `skip` names an unknown
            rule.
        InvalidTypeError: `make` doesn't return a storage.

    Examples:
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage
        >>> print(check_storage(lambda: LazyTensorStorage(8), skip=["copies"]).passed[:3])
        ('empty', 'ring', 'memory')
    """
    first = made(lambda: as_storage(make()), Storage)
    if first.ndim != 1 or first.max_size < 5:
        raise InvalidArgumentError("make: expected a storage with ndim=1 for 5 records or more")
    unknown = (
        {}
        if first.unwrapped is first
        else dict.fromkeys(_OWN_RULES, "a storage of another release checks by itself")
    )
    return part_report(type(first).__name__, RULES, lambda rule: _Trial(rule, make, records), skip, unknown)
