"""Ctrl-C at any line of a call that changes a buffer leaves the whole change or none, and the buffer works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.cases import EPOCHS, SLICES, make_buffer, make_sampler, make_storage
from tests.contract.buffers.tape import Tape
from tests.interrupts import Interruptions, in_another_thread, in_turn, interruptions, trace

pytestmark = pytest.mark.slow

CAPACITY, BATCH = 12, 4
TAPE = Tape((3, 4))
WIDE = Tape((3, 4), (2,))
SAMPLERS = ["random", "once", "prioritized", *SLICES]
MOST = 120  # number of lines to try in one call

# State that an interrupted write may have moved, and state that depends on memory addresses.
PASSING = {"generations", "vacated", "generation", "generator", "mark", "max_seen", "version", "content"}


class Other(parts.LazyTensorStorage):
    """A distinguishable storage."""


def buffer(sampler: str, written: int = 9, storage: str = "tensor", tape: Tape = TAPE, **options: Any) -> Any:
    """Return a buffer with `written` time steps of the tape."""
    size = CAPACITY * tape.streams
    slices = {"num_slices": 2} if sampler in SLICES else {}
    made = make_buffer(
        options.pop("kind", "plain"),
        make_storage(storage, CAPACITY, tape),
        options.pop("made", None) or make_sampler(sampler, size, **slices),
        batch_size=BATCH,
        **options,
    )
    made.extend(tape.rows(0, written))
    if sampler.startswith("prioritized"):
        index = torch.arange(min(written, CAPACITY))
        made.update_priority(index if tape is TAPE else torch.stack([index, index % 2], -1), 1.0 + index)
    return made


def life(subject: Any) -> dict[str, Any]:
    """Return a buffer's states and parts, flattened, without state that an interrupted call may have moved."""
    found: dict[str, Any] = {
        "storage": type(subject.storage).__name__,
        "sampler": type(subject.sampler).__name__,
        "writer": type(subject.writer).__name__,
        "transforms": len(subject.state_dict()["_transforms"]),
        "dropped": subject.stats().priorities_dropped,
    }

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key not in PASSING:
                    walk(f"{path}/{key}", part)
        elif isinstance(value, (list, tuple)):
            for place, part in enumerate(value):
                walk(f"{path}[{place}]", part)
        elif hasattr(value, "keys"):
            walk(path, value.to_dict())
        else:
            found[path] = value.tolist() if isinstance(value, torch.Tensor) else value

    walk("", subject.state_dict())
    return found


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def check_goes_on(subject: Any, tape: Tape, sampler: str) -> None:
    """Write and sample from this thread and from another one, and check the batches."""
    if len(subject):
        assert subject.verify().ok
        served(subject, tape, sampler)
        in_another_thread(lambda: served(subject, tape, sampler))
    in_another_thread(lambda: subject.extend(tape.rows(70, 75)))
    for _ in range(4):
        served(subject, tape, sampler)
    if sampler in ("prioritized", "prioritized_slices"):
        raw = subject.state_dict()["_sampler"]["priorities"]["raw"]
        assert raw.shape[0] == len(subject), "records without a priority"
        if sampler == "prioritized":
            assert bool((raw > 0).all()), "records that are never drawn"
    check_valid(subject)


def served(subject: Any, tape: Tape, sampler: str) -> None:
    batch, info = subject.sample(return_info=True)
    cut = info["next", "truncated"][..., 0] if sampler in SLICES else None
    stream, t = tape.check(batch, cut if sampler in SLICES and "index" in batch.keys() else None)
    if sampler in SLICES:
        pairs = t.view(-1, 2), stream.view(-1, 2)
        assert (pairs[0][:, 1] == pairs[0][:, 0] + 1).all(), f"a slice crosses an end: {t.tolist()}"
        episode = tape.episode(stream, t)[0].view(-1, 2)
        assert (episode[:, 0] == episode[:, 1]).all(), f"a slice crosses an end: {t.tolist()}"
    index = info["index"]
    index = index if isinstance(index, torch.Tensor) else torch.stack(index, -1)
    records = subject.storage.get(tuple(index.T) if index.ndim > 1 else index)
    stored = tape.locate(torch.stack(records) if isinstance(records, list) else records)
    assert torch.equal(stored[1].reshape(-1), t.reshape(-1)), "a batch isn't what is stored"


def check_valid(subject: Any) -> None:
    for part in (subject.storage, subject.sampler, subject.writer):
        if hasattr(part, "check_valid"):
            part.check_valid()


def writes(tape: Tape) -> dict[str, Callable[[Any], Any]]:
    one = {} if tape is TAPE else {"streams": 2}
    index = torch.tensor([1, 4, 2]) if not one else torch.tensor([[1, 0], [4, 1], [2, 0]])

    def replace(rb: Any) -> None:
        rb[..., 1:4] = tape.rows(40, 43)

    return {
        "extend": lambda rb: rb.extend(tape.rows(20, 25)),
        "add": lambda rb: rb.add(tape.step_at(20)),
        "set": replace,
        "column": lambda rb: rb.__setitem__("action", rb[:]["action"].clone()),
        "update_priority": lambda rb: rb.update_priority(index, torch.tensor([3.0, 5.0, 7.0])),
        "mark_update": lambda rb: rb.mark_update(index),
        "empty": lambda rb: rb.empty(),
        "set_seed": lambda rb: rb.set_seed(3),
    }


def check_all_or_nothing(
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    tape: Tape,
    sampler: str,
    interrupted: Interruptions = interruptions,
    most: int = MOST,
) -> None:
    """Interrupt a call once or twice; the result must be the state before the call or the state after it."""
    before, after = life(make()), make()
    call(after)
    after = life(after)
    for subject, place in interrupted(make, call, most):
        try:
            found = in_another_thread(lambda subject=subject: life(subject))
            if found not in (before, after):
                changes = difference(found, before), difference(found, after)
                raise AssertionError(
                    f"half a change: it differs from before in {changes[0]}, after in {changes[1]}"
                )
            check_goes_on(subject, tape, sampler)
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error


@pytest.mark.parametrize(("call", "sampler", "depth"), in_turn([*writes(TAPE)], SAMPLERS, [None, 2]))
@pytest.mark.filterwarnings("ignore:update_priority")
def test_interrupted_write_is_whole_or_absent(call: str, sampler: str, depth: int | None) -> None:
    def make() -> Any:
        made = buffer(sampler, prefetch=depth)
        if depth:
            made.sample()
        return made

    check_all_or_nothing(make, writes(TAPE)[call], TAPE, sampler)


@pytest.mark.parametrize("call", ["extend", "add", "set", "empty"])
@pytest.mark.parametrize("sampler", ["random", "prioritized", "prioritized_slices"])
def test_interrupted_write_of_several_dimensions_is_whole_or_absent(call: str, sampler: str) -> None:
    check_all_or_nothing(lambda: buffer(sampler, tape=WIDE), writes(WIDE)[call], WIDE, sampler)


@pytest.mark.parametrize("call", ["extend", "add", "empty"])
@pytest.mark.parametrize("sampler", ["random", "once", "prioritized"])
def test_interrupted_write_of_a_list_is_whole_or_absent(call: str, sampler: str) -> None:
    check_all_or_nothing(lambda: buffer(sampler, storage="list"), writes(TAPE)[call], TAPE, sampler)


@pytest.mark.parametrize("call", ["extend", "add"])
def test_interrupted_first_write_is_whole_or_absent(call: str) -> None:
    def make() -> Any:
        storage = parts.LazyTensorStorage(CAPACITY)
        return make_buffer("plain", storage, make_sampler("prioritized", CAPACITY), batch_size=BATCH)

    after = make()
    writes(TAPE)[call](after)
    for subject, place in interruptions(make, writes(TAPE)[call], MOST):
        try:
            assert len(subject) in (0, len(after))
            check_goes_on(subject, TAPE, "prioritized")
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error


@pytest.mark.parametrize("call", ["extend", "add"])
def test_interrupted_write_of_the_best_records_is_whole_or_absent(call: str) -> None:
    def make() -> Any:
        writer = parts.TensorDictMaxValueWriter(rank_key=("next", "reward"))
        made = parts.ReplayBuffer(storage=parts.LazyTensorStorage(CAPACITY), writer=writer, batch_size=BATCH)
        made.extend(TAPE.rows(0, 15))
        return made

    check_all_or_nothing(make, writes(TAPE)[call], TAPE, "random")


@pytest.mark.parametrize("call", ["add", "update"])
def test_interrupted_write_with_priorities_is_whole_or_absent(call: str) -> None:
    def make() -> Any:
        made = buffer("prioritized", kind="tensordict", written=9)
        return made

    def add(rb: Any) -> None:
        batch = rb.sample()
        batch["td_error"] = torch.arange(1.0, 1.0 + len(batch))
        rb.update_tensordict_priority(batch)

    calls = {"add": lambda rb: rb.add(TAPE.step_at(20)), "update": add}
    check_all_or_nothing(make, calls[call], TAPE, "prioritized")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("depth", [None, 2])
def test_interrupted_load_is_whole_or_absent(sampler: str, depth: int | None) -> None:
    other = buffer(sampler, 23, prefetch=depth)
    other.sample()
    saved = other.state_dict()
    check_all_or_nothing(
        lambda: buffer(sampler, prefetch=depth), lambda rb: rb.load_state_dict(saved), TAPE, sampler
    )


@pytest.mark.parametrize("part", ["storage", "sampler", "writer", "transform"])
@pytest.mark.parametrize("depth", [None, 2])
def test_interrupted_exchange_of_a_part_is_whole_or_absent(part: str, depth: int | None) -> None:
    def exchange(rb: Any) -> None:
        if part == "storage":
            storage = Other(CAPACITY)
            storage.set(range(8), TAPE.rows(30, 38))
            rb.set_storage(storage)
        elif part == "sampler":
            rb.set_sampler(make_sampler("random", CAPACITY))
        elif part == "writer":
            rb.set_writer(parts.TensorDictRoundRobinWriter())
        else:
            rb.append_transform(lambda batch: batch)

    def make() -> Any:
        made = buffer("prioritized", prefetch=depth)
        made.sample()
        return made

    def kept(rb: Any) -> dict[str, Any]:
        """Return the state without prefetched batches. Exchanging a part undoes their draws first."""
        return {key: value for key, value in life(rb).items() if not key.startswith("/_prefetched")}

    before, after = kept(make()), make()
    exchange(after)
    after = kept(after)
    for subject, place in interruptions(make, exchange, MOST):
        try:
            found = in_another_thread(lambda subject=subject: kept(subject))
            assert found in (before, after), (difference(found, before), difference(found, after))
            for owned in (subject.storage, subject.sampler, subject.writer):
                assert owned.owner is subject
            assert subject.writer.storage is subject.storage
            check_goes_on(subject, TAPE, "random")
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error


@pytest.mark.parametrize(
    ("sampler", "depth", "kind"), in_turn(SAMPLERS, [None, 1, 3], ["plain", "tensordict"])
)
def test_interrupted_sample_loses_one_batch_at_most(sampler: str, depth: int | None, kind: str) -> None:
    def make() -> Any:
        made = buffer(sampler, 12, prefetch=depth, kind=kind)
        made.sample()
        return made

    for subject, place in interruptions(make, lambda rb: rb.sample(), MOST):
        try:
            if sampler in EPOCHS:
                check_epoch(subject, sampler)
            check_goes_on(subject, TAPE, sampler)
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error


def check_epoch(subject: Any, sampler: str) -> None:
    """Sample the rest of the epoch: no row repeats, and only rows of the interrupted batch may be missing."""
    seen: list[int] = []
    rest = in_another_thread(lambda: [subject.sample(return_info=True) for _ in range(2)])
    for _, info in rest:
        seen += info["index"].tolist()
    if sampler == "once":
        assert len(seen) == 8 and len(set(seen[:4])) == 4
    assert len(subject.sample()) == BATCH


@pytest.mark.parametrize("depth", [None, 2])
def test_interrupted_iteration_loses_one_batch_at_most(depth: int | None) -> None:
    def make() -> Any:
        made = buffer("once", 12, prefetch=depth)
        made.sample()
        return made

    for subject, place in interruptions(make, lambda rb: [*rb], MOST):
        try:
            batches = in_another_thread(lambda subject=subject: [*subject])
            rows = sorted(t for batch in batches for t in TAPE.locate(batch)[1].tolist())
            assert rows == [*range(12)], f"an epoch has rows {rows}"
            check_goes_on(subject, TAPE, "once")
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error


def test_harness_raises_at_the_requested_line() -> None:
    made = buffer("random")
    places, error = trace(lambda: made.sample())
    assert error is None and len(places) > 20
    _, error = trace(lambda: made.sample(), 7)
    assert str(places[7].line) in str(error)
