"""Compact storages keep observations and frames once, and return the written records."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl._os import fault_points
from gleanrl.data import replay_buffers as parts
from gleanrl.errors import CapacityError, InvalidArgumentError, UnsupportedError
from tests.bits import bits_of
from tests.data.replay_buffers.sharing import in_child
from tests.interrupts import double_interruptions, in_another_thread, interruptions


def chained(
    count: int, first: int = 0, length: int = 50, width: int = 4, odd: int = 0, frames: int = 0
) -> TensorDict:
    """Return steps of one stream, numbered from `first` on, in episodes of `length` steps.

    All numbers of an observation are the number of its step. Outcomes repeat the following root, except at the end of
    an episode, and in each step whose number `odd` divides. There they are negative. With `frames`, an observation is a
    stack of so many frames ``[frames, width]``; the first ones of an episode repeat its first frame.
    """
    t = torch.arange(first, first + count)
    done = (t % length == length - 1)[:, None]
    apart = done | ((t % odd == 0)[:, None] if odd else done)
    root = t[:, None].double()
    outcome = root + 1
    if frames:
        start = root - root % length
        root, outcome = (
            torch.maximum(last + torch.arange(1.0 - frames, 1), start) for last in (root, outcome)
        )
        root, outcome, apart = root[..., None], outcome[..., None], apart[..., None]
    outcome = torch.where(apart, -outcome, outcome)
    root, outcome = (rows.expand(*rows.shape[:-1], width).clone() for rows in (root, outcome))
    flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    after = {"observation": outcome, "reward": t[:, None].double(), **flags}
    return TensorDict({"observation": root, "t": t, "next": after}, [count])


def right(batch: TensorDict, length: int = 50, odd: int = 0) -> bool:
    """Return whether each row is one of `chained`."""
    *frames, width = batch["observation"].shape[1:]
    expected = torch.cat([chained(1, int(t), length, width, odd, *frames) for t in batch["t"]])
    keys = ["observation", ("next", "observation"), ("next", "reward")]
    return all(torch.equal(batch[key], expected[key]) for key in keys)


def compact(size: int, **options: Any) -> Any:
    return parts.LazyTensorStorage(size, compact=True, **options)


def test_only_outcomes_at_the_ends_of_episodes_are_stored_apart() -> None:
    buffer = parts.ReplayBuffer(storage=compact(1000), batch_size=64)
    for first in range(0, 3000, 100):
        buffer.extend(chained(100, first))
    assert "20 of 1000 outcomes stored apart" in repr(buffer.storage)
    assert right(buffer.sample()) and right(buffer[:])
    assert buffer.describe()[("next", "observation")].megabytes == 20 * 32 / 1e6
    assert buffer.describe()["observation"].megabytes == 1000 * 32 / 1e6


@pytest.mark.parametrize("batch", [7, 100, 1000])
def test_each_frame_of_a_stack_is_stored_once(batch: int) -> None:
    buffer = parts.ReplayBuffer(storage=compact(1000), batch_size=64)
    for first in range(0, 3010, batch):
        buffer.extend(chained(batch, first, width=16, frames=4))
    text = repr(buffer.storage)
    assert "stack={'observation': 4}, " in text
    ends, moved = (int(part.split()[0]) for part in re.findall(r"\d+ of 1000 \w+ stored apart", text))
    assert ends <= 22 and moved <= 3, "the ends of episodes, and the oldest steps"
    assert buffer.stats().stored_apart == ends + moved
    assert right(buffer.sample()) and right(buffer[:])
    assert buffer.describe()["observation"].megabytes == (1000 * 128 + moved * 512) / 1e6
    assert buffer.describe()[("next", "observation")].megabytes == ends * 512 / 1e6
    buffer.storage.check_valid()


@pytest.mark.parametrize("way", ["state", "checkpoint"])
@pytest.mark.parametrize("of", ["compact", "plain"])
def test_loads_find_stacks(way: str, of: str, tmp_path: Path) -> None:
    source, other = (
        parts.ReplayBuffer(storage=parts.LazyTensorStorage(100, compact=is_compact), batch_size=64)
        for is_compact in (of == "compact", True)
    )
    source.extend(chained(130, width=16, odd=9, frames=4))
    if way == "state":
        other.load_state_dict(source.state_dict())
    else:
        source.dumps(tmp_path)
        other.loads(tmp_path)
    assert "stack={'observation': 4}" in repr(other.storage)
    other.extend(chained(30, 130, width=16, odd=9, frames=4))
    assert right(other[:], odd=9) and right(other.sample(), odd=9)
    other.storage.check_valid()


def observations_of(numbers: list[int], frames: int, width: int = 8) -> torch.Tensor:
    """Return observations of numbered frames ``[len(numbers), frames, width]``; the first stacks repeat a frame."""
    steps = torch.tensor(numbers)
    index = (torch.arange(len(steps))[:, None] + torch.arange(1 - frames, 1)).clamp(min=0)
    return steps[index][..., None].float().expand(-1, -1, width).clone()


def stream(
    episodes: list[list[int]], frames: int, truncated: bool = False, flagged: bool = True
) -> TensorDict:
    """Return the steps of episodes, each with the numbers of its observations, the last one included."""
    made_parts = []
    for numbers in episodes:
        made = observations_of(numbers, frames)
        steps = len(made) - 1
        ends = (torch.arange(steps) == steps - 1)[:, None] & flagged
        off = torch.zeros_like(ends)
        flags = {
            "done": ends,
            "terminated": off if truncated else ends,
            "truncated": ends if truncated else off,
        }
        made_parts.append(
            TensorDict({"observation": made[:-1], "next": {"observation": made[1:], **flags}}, [steps])
        )
    return torch.cat(made_parts)


def adversarial(frames: int) -> dict[str, TensorDict]:
    """Return streams in which a promise about observations would be broken."""
    usual = stream([[*range(10 * e, 10 * e + 9)] for e in range(8)], frames)
    bit, nans, zeros, ahead = (usual.clone() for _ in range(4))
    bit["next", "observation"].view(torch.int32)[3::7, -1, -1] ^= 1
    nans["observation"].view(torch.int32)[::3] = (
        0x7F800001 + torch.arange(len(nans["observation"][::3]))[:, None, None]
    )
    nans["next", "observation"][:-1] = nans["observation"][1:]
    nans["next", "observation"].view(torch.int32)[5::6] ^= 4  # another payload
    for key in ("observation", ("next", "observation")):
        zeros[key].zero_()
    zeros["next", "observation"][::4] = -0.0
    ahead["next", "observation"] = ahead["next", "observation"].roll(-2, 0)  # the outcomes of three steps
    autoreset = usual.clone()
    autoreset["observation"][::9], autoreset["next", "observation"][::9] = 5.0, usual["observation"][::9]
    return {
        "usual": usual,
        "one bit": bit,
        "payloads": nans,
        "zeros": zeros,
        "identical": stream([[7] * 9] * 8, frames),
        "repeated across episodes": stream([[1, 2, 3, 1, 2]] * 16, frames),
        "episodes of one step": stream([[e, e + 1] for e in range(70)], frames),
        "truncated": stream([[*range(10 * e, 10 * e + 9)] for e in range(8)], frames, truncated=True),
        "truncated without a flag": stream(
            [[*range(10 * e, 10 * e + 9)] for e in range(8)], frames, flagged=False
        ),
        "interleaved": torch.stack([usual, usual[torch.arange(len(usual)).flip(0)]], 1).reshape(-1),
        "autoreset rows": autoreset,
        "several steps ahead": ahead,
    }


def slices() -> parts.SliceSampler:
    return parts.SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False)


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("name", adversarial(1))
def test_streams_that_break_promises_read_as_written(name: str, frames: int) -> None:
    data = adversarial(frames)[name]
    compacted = parts.Compact(stack={"observation": frames} if frames > 1 else {})
    for batch in (1, 7, len(data)):
        buffers = [
            parts.ReplayBuffer(
                storage=parts.LazyTensorStorage(41, compact=compact), sampler=slices(), batch_size=40, seed=1
            )
            for compact in (compacted, False)
        ]
        for start in range(0, len(data), batch):
            for buffer in buffers:
                buffer.extend(data[start : start + batch].clone())
            assert bits_of(buffers[0][:]) == bits_of(buffers[1][:])
            assert bits_of(buffers[0].sample()) == bits_of(buffers[1].sample())
        buffers[0].storage.check_valid()


def test_interleaved_streams_of_one_dimension_are_stored_apart() -> None:
    storage = compact(100)
    rows = torch.stack([chained(50), chained(50, 1000)], 1).reshape(-1)
    storage.set(range(100), rows)
    assert "100 of 100 outcomes stored apart" in repr(storage)
    assert parts.ReplayBuffer(storage=storage).stats().stored_apart == 100
    assert parts.ReplayBuffer(storage=parts.LazyTensorStorage(100)).stats().stored_apart is None
    assert right(storage.get(slice(None)))
    storage = compact(100, ndim=2)
    storage.set(range(50), torch.stack([chained(50), chained(50, 1000)], 1))
    assert "2 of 100 outcomes stored apart" in repr(storage)


def test_a_correction_keeps_the_neighbours() -> None:
    storage = compact(20)
    storage.set(range(20), chained(20))
    storage[5] = chained(1, 700)[0]
    found = storage.get(slice(None))
    assert right(found) and found["t"][5] == 700
    storage[5] = chained(1, 5)[0]
    storage.check_valid()
    assert right(storage.get(slice(None)))
    assert "2 of 20 outcomes stored apart" in repr(storage), "the last step of each write"


def test_views_of_shared_entries_are_copies_and_all_others_are_live() -> None:
    storage = compact(20)
    storage.set(range(20), chained(20))
    view = storage.get(slice(3, 6))
    for key in ("observation", ("next", "observation")):
        view[key].zero_()
        storage.get(key).zero_()
    storage.get(7)["next", "reward"].zero_()
    storage.get(("next", "done"))[8] = True
    found = storage.get(slice(None))
    assert torch.equal(found["observation"], chained(20)["observation"])
    assert torch.equal(found["next", "observation"], chained(20)["next", "observation"])
    assert found["next", "reward"][7] == 0 and found["next", "done"][8]


def test_a_key_is_read_alone() -> None:
    storage = compact(1_000_000)
    storage.set(range(10), chained(10))
    assert storage.get("t").shape == (10,)
    assert set(storage.get("next").keys()) == {"observation", "reward", "done", "terminated", "truncated"}


def test_refused_uses_name_an_alternative() -> None:
    class Derived(parts.LazyTensorStorage):
        """A storage of a user."""

    for make in (
        lambda: parts.LazyTensorStorage(5, device="auto", compact=True),
        lambda: parts.LazyTensorStorage(5, device="meta", compact=True),
        lambda: Derived(5, compact=True),
        lambda: parts.ReplayBuffer(storage=compact(5), shared=True),
        lambda: parts.ReplayBuffer(storage=parts.LazyMemmapStorage(5, compact=True)).share(),
    ):
        with pytest.raises(
            UnsupportedError, match="leave out compact|use a real device|expected|LazyTensorStorage"
        ):
            make()
    storage = compact(6, ndim=2)
    storage.set(range(3), torch.stack([chained(3), chained(3, 9)], 1))
    with pytest.raises(UnsupportedError, match="build it without compact"):
        storage.flatten()
    column = storage.column(("next", "observation"))
    with pytest.raises(UnsupportedError, match=r"column\(path\)\[slots\]"):
        column.mean()
    assert column[torch.tensor([1])].shape == (1, 4) and column[:2].dtype == column.dtype
    for index in ((slice(2), 0), None, ...):
        with pytest.raises(UnsupportedError, match=r"can't serve the index .*column\(path\)\[slots\]"):
            column[index]
    storage.load_state_dict(storage.state_dict())
    with pytest.raises(UnsupportedError, match=r"read column\(path\) again"):
        column[:2]
    buffer = parts.ReplayBuffer(storage=storage)
    with pytest.raises(UnsupportedError, match="write the keys with the first records"):
        buffer["new"] = torch.zeros(2, 3, 1)
    assert right(storage.get(slice(None)).reshape(-1))


@pytest.mark.parametrize("kind", [parts.LazyTensorStorage, parts.LazyMemmapStorage])
@pytest.mark.parametrize("streams", [1, 2])
def test_more_rows_than_the_core_numbers_are_refused_before_memory_is_taken(kind: Any, streams: int) -> None:
    buffer = parts.ReplayBuffer(storage=kind(2**30 + 1 - streams, ndim=streams, compact=True))
    data = chained(3) if streams == 1 else torch.stack([chained(3), chained(3, 9)])
    with pytest.raises(
        InvalidArgumentError, match="at most 1,073,741,823 .* got 1,073,741,824; .*leave out compact"
    ):
        buffer.extend(data)
    assert len(buffer) == 0 and not buffer.storage.initialized


@pytest.mark.parametrize("frames", [0, 4])
def test_columns_take_the_indices_of_tensors(frames: int) -> None:
    storages = [parts.LazyTensorStorage(9, compact=is_compact) for is_compact in (True, False)]
    for storage in storages:
        storage.set(range(9), chained(9, width=16, frames=frames, odd=4))
    columns = [storage.column(("next", "observation")) for storage in storages]
    for index in (
        3,
        -1,
        [2, -2],
        slice(-3, None),
        torch.arange(9) % 2 == 0,
        torch.tensor([2, 0, 3], dtype=torch.int32),
        torch.tensor([[5, 6], [7, 8]]),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor(4),
    ):
        assert bits_of(columns[0][index]) == bits_of(columns[1][index]), index
    for index in (9, [0, -10], torch.ones(8, dtype=torch.bool)):
        for column in columns:
            with pytest.raises(IndexError):
                column[index]


@pytest.mark.parametrize("frames", [0, 4])
def test_large_writes_reserve_room_for_rows_that_need_it(frames: int, tmp_path: Path) -> None:
    count, width = 600, 40_000 // max(frames, 1)
    storage = parts.LazyMemmapStorage(count, scratch_dir=tmp_path, compact=True)
    buffer = parts.ReplayBuffer(storage=storage)
    data = chained(count, length=10**6, width=width, frames=frames)
    step = 64 << 20
    buffer.extend(data)
    file = tmp_path / "observation.memmap"
    size = file.stat().st_blocks * 512
    assert size < count * data["observation"][0].nbytes // max(frames, 1) + step + 10**6
    buffer["next", "reward"] = torch.ones(count, 1).double()
    assert file.stat().st_blocks * 512 == size, "no observation changed"
    buffer.storage.check_valid()
    assert buffer[:]["next", "reward"].eq(1).all()
    assert bits_of(buffer[:]["next", "observation"]) == bits_of(data["next", "observation"])


def test_records_without_repeated_entries_are_stored_as_usual() -> None:
    for data in (torch.arange(12.0).view(3, 4), chained(3).exclude("observation"), chained(3, width=1)):
        storage = compact(3)
        storage.set(range(3), data)
        assert bits_of(storage.get(slice(None))) == bits_of(data)


def test_an_outcome_of_an_outcome_is_stored_as_usual() -> None:
    data = chained(9)
    data["next", "next"] = chained(9, 1).select("observation")
    storage = compact(20)
    storage.set(range(9), data)
    assert bits_of(storage.get(slice(None))) == bits_of(data)
    assert "1 of 9 outcomes stored apart" in repr(storage)


def test_lists_are_stored_next_to_shared_entries() -> None:
    data = chained(4)
    buffer = parts.ReplayBuffer(storage=compact(4), batch_size=4)
    texts = [f"step {t}" for t in range(4)]
    for t in range(4):
        record = data[t].clone()
        record.set_non_tensor("text", texts[t])
        buffer.add(record)
    assert buffer[:]["text"] == texts and right(buffer[:])
    again = parts.ReplayBuffer(storage=compact(4), batch_size=4)
    again.load_state_dict(buffer.state_dict())
    assert again[:]["text"] == texts and right(again[:])


def test_a_full_disk_refuses_the_write_and_changes_nothing(tmp_path: Path) -> None:
    buffer = parts.ReplayBuffer(storage=parts.LazyMemmapStorage(40, scratch_dir=tmp_path, compact=True))
    full = fault_points.At(
        OSError(errno.ENOSPC, "No space left on device"), 7, repeat=True
    )  # the columns exist
    with (
        fault_points.inject({"fs.reserve": full}),
        pytest.raises(CapacityError, match="spare rows: .*No space left"),
    ):
        buffer.extend(chained(20, odd=2))
    assert len(buffer) == 0
    with fault_points.inject(
        {"fs.reserve": fault_points.At(OSError(errno.ENOSPC, "No space left on device"))}
    ):
        buffer.extend(chained(20, odd=2))  # less than a step of 64 MiB is left, which is enough
    assert right(buffer[:], odd=2)
    buffer.extend(chained(20, 20, odd=2))
    sizes = {file.name: file.stat() for file in tmp_path.rglob("observation.memmap")}
    assert [found.st_size for found in sizes.values()] == [(2 * 40 + 2) * 32]


def test_a_load_replaces_the_files_of_a_directory(tmp_path: Path) -> None:
    def make(name: str) -> Any:
        storage = parts.LazyMemmapStorage(20, scratch_dir=tmp_path / name, compact=True)
        return parts.ReplayBuffer(storage=storage, batch_size=8)

    one, other = make("one"), make("other")
    one.extend(chained(30, odd=3))
    other.extend(chained(7, 100))
    one.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert right(other[:], odd=3) and other[:]["t"].max() == 29
    other.extend(chained(15, 30, odd=3))
    assert right(other[:], odd=3) and right(other.sample(), odd=3)
    other.storage.check_valid()
    files = {
        file.relative_to(tmp_path / "other").as_posix() for file in (tmp_path / "other").rglob("*.memmap")
    }
    flags = {f"next/{flag}.memmap" for flag in ("done", "terminated", "truncated")}
    assert files == {"observation.memmap", "t.memmap", "next/reward.memmap", *flags}


def test_a_forked_process_reads_a_copy_in_memory_but_no_files() -> None:
    for storage in (compact(20), parts.LazyMemmapStorage(20, compact=True)):
        buffer = parts.ReplayBuffer(storage=storage, batch_size=8)
        buffer.extend(chained(30))

        def reads(buffer: Any = buffer) -> None:
            assert right(buffer.sample()) and right(buffer[:])
            buffer.extend(chained(5, 30))
            assert right(buffer[:])

        def is_refused(buffer: Any = buffer) -> None:
            for call in (
                buffer.sample,
                lambda: buffer.extend(chained(2)),
                lambda: buffer[:],
                buffer.state_dict,
            ):
                with pytest.raises(UnsupportedError, match="forked process"):
                    call()

        assert in_child(is_refused if isinstance(storage, parts.LazyMemmapStorage) else reads) == 0
        assert right(buffer[:])


@pytest.mark.parametrize("frames", [0, 4])
@pytest.mark.parametrize("ahead", [None, 2])
def test_batches_are_right_while_a_writer_moves_rows(ahead: int | None, frames: int) -> None:
    odd, size = 3, 40
    rows = partial(chained, width=2000 if not frames else 500, odd=odd, frames=frames)
    buffer = parts.ReplayBuffer(storage=compact(size), batch_size=32, prefetch=ahead)
    buffer.extend(rows(size))
    stop, failures, counts = threading.Event(), [], [0, 0, 0]

    def read(which: int) -> None:
        try:
            while not stop.is_set():
                if which == 2:
                    state = parts.LazyTensorStorage(size)
                    state.load_state_dict(buffer.storage.state_dict())
                    found = state.get(slice(None))
                else:
                    found = buffer.sample()
                assert right(found, odd=odd)
                counts[which] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    t = size
    while min(counts) < 20 and not failures:
        count = t % 7 + 1
        if t % 5:
            buffer.extend(rows(count, t))
            t += count
        else:
            slot = t % size
            buffer[slot] = rows(1, t)[0]
            t += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    buffer.storage.check_valid()


@pytest.mark.parametrize("frames", [0, 4])
@pytest.mark.parametrize("way", ["ring", "slots"])
def test_snapshots_keep_rows_that_move_after_them(way: str, frames: int) -> None:
    width = 40_000  # a snapshot copies pieces of 256 KB, so each row is one
    storage = compact(12)
    buffer = parts.ReplayBuffer(storage=storage)
    rows = partial(chained, width=width, frames=frames)
    buffer.extend(rows(17))
    before, value = storage.get(slice(None)).clone(), storage.snapshot()
    if way == "ring":
        for t in range(17, 21):  # the newest step's outcome leaves its spare row, which is used again
            buffer.add(rows(1, t)[0])
    else:
        storage.set([9, 2], rows(2, 800))  # the outcomes of slots 8 and 1 leave the slots behind them
    other = parts.LazyTensorStorage(12)
    other.load_state_dict(storage.plain_state(value))
    assert bits_of(other.get(slice(None))) == bits_of(before)


class Overtaken:
    """Rows that are read after a writer has been called, once for each read."""

    def __init__(self, columns: Any, writes: list[Callable[[], Any]]) -> None:
        self.columns, self.writes = columns, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.columns, name)

    def gather(self, *arguments: Any) -> Any:
        if self.writes:
            self.writes.pop(0)()
        return self.columns.gather(*arguments)


def test_outcomes_that_move_during_a_read_are_read_again() -> None:
    def overtaken(written: int, *writes: Callable[[Any], Any]) -> tuple[Any, Overtaken]:
        storage = compact(20)
        buffer = parts.ReplayBuffer(storage=storage)
        buffer.extend(chained(written))
        store = storage._table.columns
        store.apart = Overtaken(store.apart, [lambda write=write: write(buffer) for write in writes])
        return storage, store.apart

    def follow(buffer: Any) -> None:
        """Let the newest step's outcome leave its spare row, which then serves another step."""
        for t in (10, 11, 12):
            buffer.add(chained(1, t)[0])

    def correct(buffer: Any) -> None:
        """Let the outcome of step 8 leave the slot of step 9."""
        buffer[9] = chained(1, 700)[0]

    def many(buffer: Any) -> None:
        """Make more writes than a reader can find."""
        correct(buffer)
        for _ in range(300):
            buffer[0] = chained(1, 900)[0]

    for slot, *writes in ((9, follow), (8, correct), (8, many), (8, follow, correct), (8, *[correct] * 9)):
        storage, left = overtaken(10, *writes)
        assert right(storage.fetch(torch.tensor([3, slot, 4]))), writes
        assert len(left.writes) <= 4, "the last try makes writers wait"


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "extend": lambda buffer, rows: buffer.extend(rows(5, 60, odd=3)),
    "extend_all": lambda buffer, rows: buffer.extend(rows(30, 60, odd=3)),
    "continue": lambda buffer, rows: buffer.extend(rows(5, 25, odd=7)),
    "add": lambda buffer, rows: buffer.add(rows(1, 60)[0]),
    "set": lambda buffer, rows: buffer.__setitem__(slice(2, 5), rows(3, 60, odd=2)),
    "set_some": lambda buffer, rows: buffer.storage.set([7, 3, 4, 3], rows(4, 60, odd=2)),
    "column": lambda buffer, rows: buffer.__setitem__("observation", buffer[:]["observation"].flip(0)),
    "empty": lambda buffer, rows: buffer.empty(),
    "load": lambda buffer, rows: buffer.load_state_dict(saved(rows)),
}


def filled(is_compact: bool, written: int = 25, rows: Callable[..., TensorDict] = chained) -> Any:
    buffer = parts.ReplayBuffer(storage=parts.LazyTensorStorage(20, compact=is_compact), batch_size=8, seed=0)
    buffer.extend(rows(written, odd=7))
    return buffer


@cache
def saved(rows: Callable[..., TensorDict]) -> Any:
    return filled(False, 17, rows).state_dict()


def content(buffer: Any) -> dict[Any, Any]:
    state = buffer.state_dict()["_storage"]
    return bits_of({key: state[key] for key in ("columns", "num_steps", "end") if key in state})


@pytest.mark.slow
@pytest.mark.parametrize("rows", [chained, partial(chained, width=16, frames=4)], ids=["rows", "stacks"])
@pytest.mark.parametrize("kind", ["once", "twice"])
@pytest.mark.parametrize("call", CALLS)
def test_interrupted_write_is_whole_or_absent(call: str, kind: str, rows: Callable[..., TensorDict]) -> None:
    make, change = partial(filled, rows=rows), partial(CALLS[call], rows=rows)
    saved(rows)
    plain = [make(False), make(False)]
    change(plain[1])
    states = [content(buffer) for buffer in plain]
    interrupted = interruptions if kind == "once" else double_interruptions
    for subject, place in interrupted(lambda: make(True), change, 120):
        try:
            found = in_another_thread(lambda subject=subject: content(subject))
            assert found in states, "half a change"
            subject.storage.check_valid()
            other = make(False)
            if found == states[1]:
                change(other)
            for buffer in (subject, other):
                buffer.extend(rows(13, 100, odd=4))
                buffer[3] = rows(1, 200)[0]
                buffer.extend(rows(9, 113, odd=4))
            assert content(subject) == content(other)
            subject.storage.check_valid()
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error


def test_other_made_partsget_the_same_records() -> None:
    def goals(storage: Any) -> Any:
        reward = lambda rows: (rows["next", "observation"] - rows["desired_goal"]).sum(-1, keepdim=True)  # noqa: E731
        buffer = parts.HERReplayBuffer(
            reward, achieved_goal_key="observation", strategy="future", storage=storage, batch_size=32, seed=0
        )
        buffer.extend(TensorDict({**chained(90, odd=7), "desired_goal": torch.zeros(90, 4).double()}, [90]))
        return buffer

    def best(storage: Any) -> Any:
        writer = parts.TensorDictMaxValueWriter(rank_key=("next", "reward"))
        buffer = parts.ReplayBuffer(storage=storage, writer=writer, batch_size=32, seed=0)
        for first in (60, 0, 120, 30):
            buffer.extend(chained(30, first, odd=7))
        return buffer

    def ensemble(storage: Any) -> Any:
        members = [filled(isinstance(storage, type(compact(1)))) for _ in range(2)]
        return parts.ReplayBufferEnsemble(*members, batch_size=32)

    for make in (goals, best, ensemble):
        found = [make(storage) for storage in (compact(60), parts.LazyTensorStorage(60))]
        for _ in range(5):
            torch.manual_seed(0)
            one = found[0].sample()
            torch.manual_seed(0)
            assert bits_of(one) == bits_of(found[1].sample()), make.__name__
