"""Texts, objects and tensors of different shapes in buffers stay together with their row."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    tensorclass,
)

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gleanrl.envs import SerialEnv
from gleanrl.envs.transforms import MultiStepTransform
from gleanrl.errors import SchemaError
from tests.fakes_lists import TalkingEnv, check_rows, rows_of, said, talking

STORAGES: dict[str, Callable[[int], Any]] = {
    "tensors": LazyTensorStorage,
    "files": LazyMemmapStorage,
    "list": ListStorage,
    "lazy stack": LazyStackStorage,
}
COLUMNS = ("tensors", "files")


def batches(count: int, size: int, ragged: bool = True, seed: int = 0) -> list[TensorDictBase]:
    """Return consecutive batches of one environment."""
    collector = SyncDataCollector(
        TalkingEnv(seed, ragged=ragged), None, frames_per_batch=size, total_frames=count * size
    )
    return list(collector)


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    """Return a function that makes a storage."""
    return STORAGES[request.param]


@pytest.mark.parametrize("ragged", [False, True])
class TestRows:
    def test_extend_wraps_around(self, storage: Any, ragged: bool) -> None:
        buffer = ReplayBuffer(storage=storage(7), batch_size=16)
        expected: dict[int, Any] = {}
        for batch in batches(5, 4, ragged):
            index = buffer.extend(batch)
            expected |= dict(zip(index.tolist(), [said(row) for row in rows_of(batch)], strict=True))
            check_rows(buffer.sample())
            assert [said(buffer[i]) for i in range(len(buffer))] == [expected[i] for i in range(len(buffer))]
        assert len(buffer) == 7

    def test_added_records_are_read_by_index(self, storage: Any, ragged: bool) -> None:
        buffer, (batch,) = ReplayBuffer(storage=storage(10), batch_size=4), batches(1, 6, ragged)
        buffer.extend(batch[:2])  # the first write decides which shapes may differ
        assert [buffer.add(row) for row in rows_of(batch[2:])] == [*range(2, 6)]
        whole = buffer[:]
        rows = whole if isinstance(whole, list) else rows_of(whole)
        assert [said(row) for row in rows] == [said(row) for row in rows_of(batch)]
        some = buffer[torch.tensor([4, 1])]
        picked = some if isinstance(some, list) else rows_of(some)
        assert [said(row) for row in picked] == [said(rows[4]), said(rows[1])]
        assert buffer[-1]["text"] == rows_of(batch)[-1]["text"]

    def test_batches_are_lazy_only_where_they_have_to_be(self, storage: Any, ragged: bool) -> None:
        buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=8)
        buffer.extend(batches(1, 9, ragged)[0])
        batch = buffer.sample()
        part = (
            batch["group"] if storage is ListStorage else batch
        )  # a list's records are stacked where possible
        lazy = ragged or storage is LazyStackStorage
        assert isinstance(part, LazyStackedTensorDict if lazy else TensorDict) and batch.batch_size == (8,)
        assert isinstance(batch.get("text"), NonTensorStack)
        assert [said(buffer[i]) for i in batch["index"].tolist()] == check_rows(batch)

    def test_list_of_records_is_written(self, storage: Any, ragged: bool) -> None:
        buffer = ReplayBuffer(storage=storage(10), batch_size=8)
        buffer.extend(rows_of(batches(1, 5, ragged)[0]))
        check_rows(buffer.sample())


class TestSamplers:
    @pytest.mark.parametrize("name", COLUMNS)
    def test_slices_keep_rows_together(self, name: str) -> None:
        sampler = SliceSampler(slice_len=2, strict_length=False)
        buffer = TensorDictReplayBuffer(storage=STORAGES[name](50), sampler=sampler, batch_size=12)
        for batch in batches(6, 10):
            buffer.extend(batch)
            sample = buffer.sample()
            found = check_rows(sample)
            for (one, other), row in zip(zip(found, found[1:], strict=False), rows_of(sample), strict=False):
                if not (row["next", "done"] or row["next", "truncated"]):
                    assert other[:2] == one[:2] and other[2] == one[2] + 1

    @pytest.mark.parametrize(
        "make", [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(20, 0.6, 0.4)]
    )
    @pytest.mark.parametrize("prefetch", [None, 3])
    def test_prefetched_batches_keep_rows_together(self, make: Any, prefetch: int | None) -> None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=make(), batch_size=5, prefetch=prefetch)
        for batch in batches(12, 5):
            buffer.extend(batch)
            for _ in range(3):
                check_rows(buffer.sample())

    def test_prioritized_samples_and_chosen_keys_keep_rows_together(self) -> None:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(9), batch_size=6
        )
        buffer.extend(batches(1, 9)[0])
        batch = buffer.sample()
        batch["td_error"] = batch["code"][:, 2] + 0.1
        buffer.update_tensordict_priority(batch)
        check_rows(buffer.sample())
        some = buffer.sample(keys=["text", "code"])
        assert some["text"] == ["/".join(str(int(n)) for n in code) for code in some["code"]]
        assert ("next", "text") not in some.keys(True)

    def test_rows_of_several_environments_keep_together(self) -> None:
        collector = SyncDataCollector(SerialEnv(3, talking(3)), None, frames_per_batch=12, total_frames=60)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=2), batch_size=9)
        for batch in collector:
            index = buffer.extend(batch)
            assert index.shape == (12, 2)
            check_rows(buffer.sample())
            assert said(buffer[1, 3])[0] == 1 and buffer[:].shape == (3, len(buffer) // 3)
            check_rows(buffer[:])
        assert len(buffer) == 24

    @pytest.mark.parametrize("ragged", [False, True])
    def test_max_value_writer_keeps_whole_rows(self, ragged: bool) -> None:
        writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=writer, batch_size=8)
        for batch in batches(3, 10, ragged):
            buffer.extend(batch)
        assert {step for _, _, step in check_rows(buffer.sample())} == {2}, "rewards are the steps"

    @pytest.mark.parametrize("ragged", [False, True])
    def test_ensembles_keep_rows_together(self, ragged: bool) -> None:
        buffers = [ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8) for _ in range(2)]
        for number, buffer in enumerate(buffers):
            buffer.extend(batches(1, 10, ragged, seed=number)[0])
        both, seen = ReplayBufferEnsemble(*buffers, batch_size=32), set()
        while len(seen) < 2:  # a sample has two draws, each from one member
            sample = both.sample()
            seen |= {name for name, _, _ in check_rows(sample)}
            assert sample.batch_size == (2, 16) and seen <= {0, 1}

    @pytest.mark.parametrize("ragged", [False, True])
    def test_multi_step_transform_acts_on_writes(self, ragged: bool) -> None:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(50), batch_size=16, transform=MultiStepTransform(3, 0.9)
        )
        for batch in batches(4, 10, ragged):
            buffer.extend(batch)
        for row in rows_of(buffer.sample()):
            (name, trajectory, step), after = said(row), said(row["next"])
            assert after == (name, trajectory, step + int(row["steps_to_next_obs"]))


class TestThreads:
    def test_no_row_is_torn(self) -> None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(11), batch_size=16)
        parts, wrong, over = batches(20, 7), [], threading.Event()
        buffer.extend(parts[0])

        def read() -> None:
            while not over.is_set():
                try:
                    check_rows(buffer.sample())
                except AssertionError as error:
                    wrong.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for part in parts * 3:
            buffer.extend(part)
        over.set()
        for reader in readers:
            reader.join()
        assert not wrong


class TestState:
    @pytest.mark.parametrize("ragged", [False, True])
    def test_states_and_copies(self, storage: Any, ragged: bool) -> None:
        buffer = TensorDictReplayBuffer(storage=storage(7), batch_size=6)
        for batch in batches(3, 5, ragged):
            buffer.extend(batch)
        state = buffer.state_dict()
        other = TensorDictReplayBuffer(storage=storage(7), batch_size=6)
        other.load_state_dict(state)
        copies = [other, pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)]
        expected = [said(buffer[i]) for i in range(7)]
        for found in copies:
            assert [said(found[i]) for i in range(7)] == expected
            found.extend(batches(1, 3, ragged, seed=5)[0])
            check_rows(found.sample())
        assert [said(buffer[i]) for i in range(7)] == expected, "nothing is shared"

    def test_a_state_of_plain_objects_is_loaded_safely(self) -> None:
        data = TensorDict(
            {"x": torch.arange(4), "text": NonTensorStack(*"abcd"), "n": NonTensorStack(1, [2], None, "x")},
            [4],
        )
        buffer = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=3)
        buffer.extend(data)
        file = io.BytesIO()
        torch.save(buffer.state_dict(), file)
        file.seek(0)
        other = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=3)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert other[:]["text"] == [*"abcd"] and other[:]["n"] == [1, [2], None, "x"]
        other.extend(data)
        assert other[4]["text"] == "c" or len(other) == 6

    def test_objects_of_a_state_are_copies(self) -> None:
        thing = {"a": [1]}
        buffer = ReplayBuffer(storage=LazyTensorStorage(2), batch_size=1)
        buffer.add(TensorDict({"x": torch.ones(1), "thing": NonTensorData(thing)}))
        state = buffer.state_dict()
        thing["a"].append(2)
        assert buffer[0]["thing"] is thing, "objects are kept as they are"
        buffer.load_state_dict(state)
        assert buffer[0]["thing"] == {"a": [1]}

    @pytest.mark.parametrize("column", [["a"], "abc", [1, 2, 3, 4]])
    def test_broken_state_raises(self, column: Any) -> None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        buffer.extend(TensorDict({"text": NonTensorStack(*"abc"), "x": torch.ones(3)}, [3]))
        state = buffer.state_dict()
        place = next(i for i, c in enumerate(state["_storage"]["columns"]) if isinstance(c, list))
        state["_storage"]["columns"][place] = column
        with pytest.raises(SchemaError, match="'columns'"):
            ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2).load_state_dict(state)


class TestWrites:
    @pytest.fixture
    def buffer(self) -> ReplayBuffer:
        """Return a buffer with four rows."""
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
        buffer.extend(TensorDict({"x": torch.arange(4), "text": NonTensorStack(*"abcd")}, [4]))
        return buffer

    def test_rows_are_replaced(self, buffer: ReplayBuffer) -> None:
        buffer[1:3] = TensorDict({"x": torch.tensor([7, 8]), "text": NonTensorStack("h", "i")}, [2])
        buffer[torch.tensor([0, 0])] = TensorDict(
            {"x": torch.tensor([5, 6]), "text": NonTensorStack("f", "g")}, [2]
        )
        assert buffer[:]["text"] == ["g", "h", "i", "d"] and buffer[:]["x"].tolist() == [6, 7, 8, 3]
        buffer["text"] = NonTensorStack(*"wxyz")
        assert buffer["text"] == [*"wxyz"] and buffer[:]["x"].tolist() == [6, 7, 8, 3]

    def test_sample_can_be_written_again(self, buffer: ReplayBuffer) -> None:
        buffer.extend(buffer[:])
        assert buffer[:]["text"] == [*"abcdabcd"]
        buffer.extend(buffer.sample())
        assert all("abcd"[row["x"]] == row["text"] for row in rows_of(buffer[:]))

    def test_one_text_for_all_rows_is_expanded(self, buffer: ReplayBuffer) -> None:
        buffer.extend(TensorDict({"x": torch.arange(2), "text": NonTensorData("same", batch_size=[2])}, [2]))
        assert buffer[:]["text"] == [*"abcd", "same", "same"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d.exclude("text"), r"missing \['text'\]"),
            (lambda d: d.set("more", NonTensorStack(*"ab")), r"unexpected \['more'\]"),
            (
                lambda d: d.set("text", torch.ones(2)),
                "'text' expected shape .* of objects, got .* torch.float32",
            ),
            (
                lambda d: d.set("x", NonTensorStack(*"ab")),
                "'x' expected shape .* torch.int64, got .* of objects",
            ),
        ],
    )
    def test_write_with_mismatching_keys_or_types_raises(
        self, buffer: ReplayBuffer, change: Any, message: str
    ) -> None:
        data = TensorDict({"x": torch.arange(2), "text": NonTensorStack("p", "q")}, [2])
        with pytest.raises(SchemaError, match=message):
            buffer.extend(change(data))
        assert buffer[:]["text"] == [*"abcd"]

    def test_shapes_that_do_not_fit(self) -> None:
        def stack(*parts: torch.Tensor) -> Any:
            return LazyStackedTensorDict.lazy_stack([TensorDict({"x": part}) for part in parts])

        buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
        buffer.extend(stack(torch.ones(1, 2), torch.ones(3, 2)))
        buffer.extend(stack(torch.ones(4, 2), torch.ones(4, 2)))
        buffer.add(TensorDict({"x": torch.ones(0, 2)}))
        assert [len(row["x"]) for row in rows_of(buffer[:])] == [1, 3, 4, 4, 0]
        with pytest.raises(SchemaError, match=r"'x' expected \(-1, 2\) float32, got \(1, 3\) float32"):
            buffer.extend(stack(torch.ones(1, 3), torch.ones(2, 3)))
        with pytest.raises(SchemaError, match=r"'x' expected \(-1, 2\) float32, got \(1, 2\) int64"):
            buffer.add(TensorDict({"x": torch.ones(1, 2, dtype=torch.int64)}))
        fixed = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
        fixed.extend(stack(torch.ones(1, 2), torch.ones(1, 2)))
        with pytest.raises(
            SchemaError, match=r"'x' expected shape .*tensors of different shapes .*LazyStackStorage"
        ):
            fixed.extend(stack(torch.ones(1, 2), torch.ones(2, 2)))

    def test_changing_a_sample_does_not_change_the_buffer(self) -> None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=9)
        buffer.extend(batches(1, 6)[0])
        for row in rows_of(buffer.sample()):
            row["group", "spread"].fill_(-1)
        check_rows(buffer.sample())


@tensorclass
class Sentence:
    """A text and a number."""

    number: torch.Tensor
    text: str


class TestStructures:
    def test_tensorclasses_with_texts_are_restored(self) -> None:
        parts = [Sentence(number=torch.tensor(i), text=f"text {i}", batch_size=[]) for i in range(5)]
        buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=6)
        buffer.extend(torch.stack(parts))
        sample = buffer.sample()
        assert type(sample) is Sentence and sample.text == [f"text {int(i)}" for i in sample.number]
        assert buffer[3].text == "text 3"

    @pytest.mark.parametrize("kind", ["tensors", "files", "list"])
    def test_groups_without_tensors_are_stored(self, kind: str) -> None:
        data = {
            "empty": TensorDict(
                {"a": torch.arange(5), "g": TensorDict({"h": TensorDict({}, [5])}, [5])}, [5]
            ),
            "only empty": TensorDict({"g": TensorDict({}, [5])}, [5]),
            "nothing": TensorDict({}, [5]),
            "texts below": TensorDict({"a": {"b": {"text": NonTensorStack(*"vwxyz")}}}, [5]),
            "texts alone": TensorDict({"text": NonTensorStack(*"vwxyz")}, [5]),
        }
        for batch in data.values():
            batch.batch_size = [5]
            buffer = ReplayBuffer(storage=STORAGES[kind](9), batch_size=5)
            index = buffer.extend(batch)
            buffer.add(batch[2])
            found = buffer.sample()
            keys = {*batch.keys(True, is_leaf=lambda _: False)}
            assert index.tolist() == [*range(5)] and len(buffer) == 6 and found.batch_size == (5,)
            assert {*found.keys(True, is_leaf=lambda _: False)} >= keys
            restored = pickle.loads(pickle.dumps(buffer))
            assert {*restored.sample().keys(True, is_leaf=lambda _: False)} >= keys

    def test_storage_wraps_records_with_texts(self) -> None:
        data = TensorDict({"x": torch.arange(6), "text": NonTensorStack(*"abcdef")}, [6])
        storage = TensorStorage(data)
        assert storage.get([4, 1])["text"] == ["e", "b"]
        empty = TensorStorage(TensorDict({}, [100]))
        assert len(empty) == 100 and empty.get(slice(3)).batch_size == (3,)
        buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), dim_extend=0, batch_size=2)
        buffer.extend(data.reshape(3, 2))
        assert buffer._storage.flatten().get([0, 5])["text"] == ["a", "f"]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_sequence_of_writes(data: st.DataObject) -> None:
    """A buffer agrees with a dictionary of rows after any sequence of writes, replacements and loads."""
    kind = data.draw(st.sampled_from(COLUMNS))
    size = data.draw(st.integers(2, 6))
    buffer = ReplayBuffer(storage=STORAGES[kind](size), batch_size=8)
    expected: dict[int, tuple[int, str, int]] = {}
    number = 0

    def records(count: int) -> tuple[Any, list[tuple[int, str, int]]]:
        nonlocal number
        made = [(number + i, f"text {number + i}", (number + i) % 3) for i in range(count)]
        number += count
        parts = [
            TensorDict({"n": torch.tensor(n), "text": text, "spread": torch.full((length, 1), n)})
            for n, text, length in made
        ]
        return LazyStackedTensorDict.lazy_stack(parts), made

    def seen(row: Any) -> tuple[int, str, int]:
        assert (row["spread"] == row["n"]).all()
        return int(row["n"]), row["text"], len(row["spread"])

    first, made = records(2)
    expected |= dict(zip(buffer.extend(first).tolist(), made, strict=True))
    for _ in range(data.draw(st.integers(0, 8))):
        what = data.draw(st.sampled_from(["extend", "add", "replace", "restore", "empty"]))
        if what == "extend":
            batch, made = records(data.draw(st.integers(1, size)))
            expected |= dict(zip(buffer.extend(batch).tolist(), made, strict=True))
        elif what == "add":
            batch, made = records(1)
            expected[buffer.add(batch[0])] = made[0]
        elif what == "replace" and expected:
            slots = data.draw(st.lists(st.sampled_from(sorted(expected)), min_size=1, max_size=4))
            batch, made = records(len(slots))
            buffer[torch.tensor(slots)] = batch
            expected |= dict(zip(slots, made, strict=True))
        elif what == "restore":
            state = copy.deepcopy(buffer.state_dict())
            buffer = ReplayBuffer(storage=STORAGES[kind](size), batch_size=8)
            buffer.load_state_dict(state)
        elif what == "empty":
            buffer.empty()
            expected = {}
        assert len(buffer) == len(expected)
        buffer._storage.check_valid()
        assert {slot: seen(buffer[slot]) for slot in expected} == expected
        if expected:
            assert {seen(row) for row in rows_of(buffer.sample())} <= {*expected.values()}
