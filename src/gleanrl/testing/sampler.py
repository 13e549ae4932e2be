"""`check_sampler`: checks that a sampler does what replay buffers rely on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyTensorStorage, Sampler
from gleanrl.data.replay_buffers.samplers.adapter import as_sampler
from gleanrl.errors import ConformanceError, SchemaError
from gleanrl.testing.report import PartReport, expect, made, part_report

_CAPACITY, _LENGTH = 24, 6  # rows, and steps of a trajectory
_BATCH = 8
_OWN_RULES = ("aliasing", "seed", "state", "place", "failed load")


def check_sampler(make: Callable[[], Sampler], *, seed: int = 0, skip: Iterable[str] = ()) -> PartReport:
    """Check a sampler with a storage of 24 rows: trajectories of six steps, with flags and ids, in batches of eight.

    - `stored`: a draw holds only slots of the stored part, with their present generations.
    - `aliasing`: a caller that writes to a draw changes nothing in the sampler.
    - `seed`: `set_seed` starts the same sequence each time.
    - `state`: a sampler that loads a saved state continues with the same draws, and so does a copy.
    - `place`: after `adopt(place)` the same draws are repeated.
    - `redraw`: overwritten rows are replaced by rows that are stored now.
    - `behind its back`: it draws stored rows, although no call reports writes, clearings and loads to it.
    - `failed load`: a state that lacks a field, and any other object, raises a SchemaError and changes nothing.

    A sampler by the protocol of other releases is checked against `stored`, `redraw` and `behind its back` only. It
    owns its random numbers and its state (see the page on samplers).

    Args:
        make: makes the sampler, a fresh one at each call, for a storage of 24 rows.
        seed: seed of the sequences.
        skip: names of rules to leave out.

    Returns:
        The rules that were checked, and the rules that weren't.

    Raises:
        ConformanceError: the first broken rule (also an AssertionError).
        InvalidArgumentError: `skip` names an unknown rule.
        InvalidTypeError: `make` doesn't return a sampler.

    Examples:
        >>> from gleanrl.data.replay_buffers import SliceSampler
        >>> print(check_sampler(lambda: SliceSampler(slice_len=4), skip=["seed"]).passed[:2])
        ('stored', 'aliasing')
    """

    def seeded() -> Sampler:
        sampler: Sampler = as_sampler(make())
        sampler.set_seed(seed)
        return sampler

    first = made(lambda: as_sampler(make()), Sampler)
    unknown = (
        {}
        if first.draws_ahead or first.unwrapped is first
        else dict.fromkeys(_OWN_RULES, "a sampler of another release keeps its own state")
    )
    return part_report(type(first).__name__, RULES, lambda rule: seeded, skip, unknown)


def _rows(first: int, count: int) -> TensorDict:
    t = torch.arange(first, first + count)
    done = (t % _LENGTH == _LENGTH - 1)[:, None]
    return TensorDict(
        {"t": t, "episode": t // _LENGTH, "next": {"done": done, "terminated": done.clone()}}, [count]
    )


def _storage(count: int = _CAPACITY) -> LazyTensorStorage:
    storage = LazyTensorStorage(_CAPACITY)
    storage.set(range(count), _rows(0, count))
    return storage


def _drawn(rule: str, where: str, sampler: Sampler, storage: LazyTensorStorage) -> torch.Tensor:
    """Draw, check the slots and their generations, and return the slots."""
    drawn = sampler.draw(storage, _BATCH, generations=True)
    _look_at(rule, where, drawn.slots, drawn.generation, storage)
    return drawn.slots


def _look_at(
    rule: str, where: str, slots: torch.Tensor, generation: torch.Tensor | None, storage: LazyTensorStorage
) -> None:
    size = len(storage)
    expect(
        rule,
        where,
        slots.dtype == torch.int64 and slots.ndim == 1 and bool(slots.numel()),
        "slots, (n,) int64, n >= 1",
        f"{tuple(slots.shape)} {slots.dtype}",
    )
    inside = (slots >= 0) & (slots < size)
    expect(rule, where, bool(inside.all()), f"slots in [0, {size})", slots.tolist())
    now = storage.generation(slots)
    fine = generation is not None and torch.equal(generation, now)
    expect(rule, where, fine, f"the generations {now.tolist()}", generation)


def _sequence(sampler: Sampler, storage: LazyTensorStorage, count: int = 5) -> list[list[int]]:
    return [sampler.draw(storage, _BATCH).slots.tolist() for _ in range(count)]


def _stored(make: Callable[[], Sampler]) -> None:
    for count in (_CAPACITY, 2 * _LENGTH):
        sampler, storage = make(), _storage(count)
        for _ in range(8):
            _drawn("stored", f"a storage with {count} rows", sampler, storage)


def _aliasing(make: Callable[[], Sampler]) -> None:
    sampler, other, storage = make(), make(), _storage()
    for number in range(6):
        drawn, same = sampler.draw(storage, _BATCH), other.draw(storage, _BATCH).slots.tolist()
        expect("aliasing", f"draw {number}", drawn.slots.tolist() == same, f"{same}", drawn.slots.tolist())
        drawn.slots.zero_()
        for value in drawn.extras.values():
            value.zero_()


def _seed(make: Callable[[], Sampler]) -> None:
    one, other = _sequence(make(), _storage()), _sequence(make(), _storage())
    expect("seed", "set_seed", one == other, f"the sequence {one}", other)


def _state(make: Callable[[], Sampler]) -> None:
    for drawn in (0, 1, 2):
        sampler, storage = make(), _storage()
        _sequence(sampler, storage, drawn)
        sampler.follow(storage)
        state = sampler.state_dict()
        copied = copy.deepcopy(sampler)
        expected = _sequence(sampler, storage)
        # The state is loaded twice: draws of the first sampler that loaded it must not change it.
        for how in ("a copy", "loaded", "loaded again"):
            if how != "a copy":
                copied = make()
                copied.load_state_dict(state)
            got = _sequence(copied, storage)
            expect("state", f"{how}, after {drawn} draws", got == expected, f"{expected}", got)


def _check_position(make: Callable[[], Sampler]) -> None:
    sampler, storage = make(), _storage()
    for number in range(4):
        position = sampler.draw_position()
        expected = _sequence(sampler, storage)
        sampler.adopt(position)
        got = _sequence(sampler, storage)
        expect("place", f"after {5 * number} draws", got == expected, f"{expected}", got)


def _redraw(make: Callable[[], Sampler]) -> None:
    sampler, storage = make(), _storage()
    for number in range(4):
        drawn = sampler.draw(storage, _BATCH, generations=True)
        storage.set(range(_CAPACITY), _rows(_CAPACITY * (number + 1), _CAPACITY))
        stale = torch.arange(drawn.slots.shape[0]) % 2 == 0
        again = sampler.redraw(storage, drawn, stale, generations=True)
        _look_at("redraw", f"redraw {number}", again.slots, again.generation, storage)


def _behind(make: Callable[[], Sampler]) -> None:
    # Users may write to, clear and load a buffer's storage directly, and no call tells the sampler.
    sampler, storage = make(), _storage()
    saved = _storage(2 * _LENGTH).state_dict()
    _sequence(sampler, storage, 2)
    changes: dict[str, Callable[[], None]] = {
        "a write": lambda: storage.set(slice(_LENGTH, 2 * _LENGTH), _rows(_CAPACITY, _LENGTH)),
        "clearing": storage.clear,
        "fewer rows than before": lambda: storage.set(slice(2 * _LENGTH), _rows(0, 2 * _LENGTH)),
        "more rows": lambda: storage.set(slice(2 * _LENGTH, 4 * _LENGTH), _rows(2 * _LENGTH, 2 * _LENGTH)),
        "loading": lambda: storage.load_state_dict(saved),
    }
    for name, change in changes.items():
        change()
        for _ in range(3 if len(storage) else 0):
            _drawn("behind its back", name, sampler, storage)


def _failed_load(make: Callable[[], Sampler]) -> None:
    sampler, other, storage = make(), make(), _storage()
    _sequence(sampler, storage, 1)
    _sequence(other, storage, 1)
    state = sampler.state_dict()
    fields = [name for name, value in state.items() if value is not None]
    broken = {f"without {name!r}": {k: v for k, v in state.items() if k != name} for name in fields}
    for how, bad in {**broken, "None": None, "a list": [1]}.items():
        try:
            sampler.load_state_dict(bad)
        except SchemaError:
            continue
        raise ConformanceError("failed load", how, "a SchemaError", "nothing")
    one, same = _sequence(sampler, storage), _sequence(other, storage)
    expect("failed load", "the draws that follow", one == same, f"{same}", one)


RULES: dict[str, Callable[[Callable[[], Sampler]], None]] = {
    "stored": _stored,
    "aliasing": _aliasing,
    "seed": _seed,
    "state": _state,
    "place": _check_position,
    "redraw": _redraw,
    "behind its back": _behind,
    "failed load": _failed_load,
}
"""The rules by name, in the order of their checks."""
