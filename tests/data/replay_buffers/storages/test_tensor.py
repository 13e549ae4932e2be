"""Tensor storages keep schema, shapes, views and copies, and state."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    Storage,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gleanrl.errors import (
    EmptyBufferError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
)
from tests.data.replay_buffers.oracle import clock, fingerprint, ted

LAZY = [LazyTensorStorage, LazyMemmapStorage]


def plain(**changes: object) -> TensorDict:
    entries = {"obs": torch.ones(5, 4), "act": torch.ones(5, 1, dtype=torch.int64), **changes}
    return TensorDict({k: v for k, v in entries.items() if v is not None}, [5])


@pytest.mark.parametrize("kind", LAZY)
def test_rows_are_read_back_unchanged(kind):
    storage = kind(50)
    data = ted(20)
    storage.set(0, data)
    assert (storage.get(slice(None)) == data).all()
    picked = storage.get([3, 19, 3])
    assert clock(picked).tolist() == [3, 19, 3]
    assert picked.device == torch.device("cpu") and picked["next"].device == torch.device("cpu")
    assert picked.batch_size == (3,) and picked["next"].batch_size == (3,)
    assert picked.names == [None]
    assert not picked.is_locked
    storage.check_valid()


def test_ints_and_slices_are_live_views_and_lists_are_copies():
    storage = LazyTensorStorage(10)
    storage.set(0, torch.arange(6.0))
    whole, one, copied = storage.get(slice(None)), storage.get(2), storage.get([2])
    storage.set(2, torch.tensor([70.0]))
    assert whole.tolist() == [0, 1, 70, 3, 4, 5] and float(one) == 70 and float(copied) == 2
    storage.get(slice(0, 2)).fill_(8)
    assert storage.get(slice(None)).tolist() == [8, 8, 70, 3, 4, 5]
    with pytest.raises(IndexRangeError, match="expected a slice with a positive step, got step -1"):
        storage.get(slice(None, None, -1))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"act": None}, r"missing \['act'\]"),
        ({"more": torch.ones(5, 1)}, r"unexpected \['more'\]"),
        ({"obs": torch.ones(5, 1)}, r"key 'obs' expected shape \(5, 4\) torch.float32, got \(5, 1\)"),
        ({"obs": torch.ones(5, 4, 1)}, r"expected shape \(5, 4\)"),
        ({"obs": torch.ones(5, 4, dtype=torch.float64)}, r"got \(5, 4\) torch.float64"),
        (
            {"act": torch.full((5, 1), 0.7)},
            r"key 'act' expected shape \(5, 1\) torch.int64, got .* torch.float32",
        ),
        ({"act": TensorDict({"x": torch.ones(5, 1)}, [5])}, "missing"),
    ],
)
def test_rows_that_break_the_schema_change_nothing(change, message):
    storage = LazyTensorStorage(8)
    storage.set(0, plain())
    before = fingerprint(storage.state_dict())
    with pytest.raises(SchemaError, match=message):
        storage.set(0, plain(**change))
    assert fingerprint(storage.state_dict()) == before
    storage.check_valid()


@pytest.mark.parametrize(
    "data, error, message",
    [
        (TensorDict({"x": torch.ones(0)}, [0]), SchemaError, "no record"),
        (TensorDict({"x": torch.ones(())}, []), SchemaError, "expected at least 1 batch dimensions"),
        ({"x": torch.ones(3), "y": "text"}, InvalidTypeError, "got str at"),
        ({"x": TensorDict({"y": torch.ones(3)}, [3])}, InvalidTypeError, "got TensorDict at"),
        (3, SchemaError, "`extend` takes many records, `add` takes one"),
        ([], SchemaError, "no record at all"),
        ({"x": torch.ones(3), "y": torch.ones(2)}, SchemaError, "expected shape"),
    ],
)
def test_a_first_write_that_fails_leaves_a_storage_without_schema(data, error, message):
    storage = LazyTensorStorage(8)
    with pytest.raises(error, match=message):
        ReplayBuffer(storage=storage).extend(data)
    assert not storage.initialized and len(storage) == 0
    storage.set(0, plain())


def test_a_state_of_tensors_without_data_changes_nothing():
    storage, other = LazyTensorStorage(8), LazyTensorStorage(8)
    for one in (storage, other):
        one.set(0, plain())
    before = fingerprint(storage.state_dict())
    state = other.state_dict()
    state["columns"] = [column.to("meta") for column in state["columns"]]
    with pytest.raises(SchemaError, match="got a meta tensor"):
        storage.load_state_dict(state)
    assert fingerprint(storage.state_dict()) == before


def test_failed_copy_at_the_first_write_allocates_nothing(tmp_path):
    class Stubborn(torch.Tensor):
        def contiguous(self, **options):
            raise RuntimeError("no")

    storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "columns")
    with pytest.raises(RuntimeError, match="no"):
        storage.set(0, torch.ones(3).as_subclass(Stubborn))
    assert not storage.initialized and not (tmp_path / "columns").exists()


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6.0).view(6, 1),
        {"a": torch.arange(6), "b": (torch.ones(6, 2), [torch.zeros(6, dtype=torch.bool)])},
        (torch.arange(6), torch.ones(6, 3)),
    ],
    ids=["tensor", "dict", "tuple"],
)
def test_trees_of_tensors_come_back_as_trees(kind, data):
    storage = kind(10)
    storage.set(0, data)
    got = storage.fetch(torch.tensor([4, 1]))
    flat, spec = torch.utils._pytree.tree_flatten(got)
    source, expected = torch.utils._pytree.tree_flatten(data)
    assert spec == expected
    for leaf, original in zip(flat, source, strict=True):
        assert torch.equal(leaf, original[[4, 1]])
    with pytest.raises((SchemaError, InvalidTypeError)):
        storage.set(0, {"other": torch.ones(6)})
    with pytest.raises((SchemaError, InvalidTypeError)):
        storage.set(0, ted(3))
    other = kind(10)
    other.load_state_dict(storage.state_dict())
    assert repr(other.get([0, 5])) == repr(storage.get([0, 5]))


def test_two_batch_dimensions_are_stored_by_time():
    storage = LazyTensorStorage(100, ndim=2)
    assert (storage.max_size, storage.shape, len(storage)) == (100, (0, 0), 0)
    storage.set(0, ted(4, streams=3).transpose(0, 1))
    assert (storage.max_size, storage.capacity_steps, storage.shape, len(storage)) == (102, 34, (4, 3), 12)
    assert storage.get(2).batch_size == (3,)
    assert storage.get((slice(None), 1))["observation"][:, 0].tolist() == [1, 1, 1, 1]
    assert storage.get((torch.tensor([3, 0]), torch.tensor([2, 1])))["observation"].tolist() == [
        [2, 0, 3],
        [1, 0, 0],
    ]
    with pytest.raises(SchemaError, match=r"expected batch dimensions \[time, 3\], got \[2, 5\]"):
        storage.set(4, ted(2, streams=5).transpose(0, 1))
    storage.check_valid()


def test_three_batch_dimensions_are_stored():
    storage = LazyTensorStorage(100, ndim=3)
    storage.set(0, torch.arange(24).view(4, 3, 2))
    assert (storage.max_size, storage.shape) == (102, (4, 3, 2))
    assert storage.fetch(torch.tensor([23, 6])).tolist() == [23, 6]


def test_batch_dimensions_beyond_the_storages_belong_to_the_record():
    storage = LazyTensorStorage(10)
    storage.set(0, ted(6, streams=5))
    got = storage.fetch(torch.tensor([4, 0]))
    assert got.batch_size == (2, 6)
    assert (got == ted(6, streams=5)[[4, 0]]).all()


def test_a_batch_without_transitions_is_refused():
    with pytest.raises(SchemaError, match="expected batch dimensions of 1 or more"):
        LazyTensorStorage(10, ndim=2).set(0, torch.ones(4, 0))


def test_wrapping_existing_data_counts_as_full():
    data = torch.arange(12.0).view(6, 2)
    storage = TensorStorage(data, ndim=1)
    assert len(storage) == storage.max_size == 6
    assert storage.generation(torch.arange(6)).tolist() == [1] * 6
    storage.set(5, torch.full((1, 2), 9.0))
    assert data[5].tolist() == [9, 9], "contiguous data is used in place"
    assert TensorStorage(ted(4, streams=3), ndim=2, device="auto").shape == (3, 4)
    assert isinstance(storage, Storage)
    with pytest.raises(InvalidArgumentError, match="max_size: expected 6"):
        TensorStorage(data, 7)


def test_new_column_of_a_wrapped_storage_has_private_memory():
    given = torch.arange(4.0)
    buffer = ReplayBuffer(storage=TensorStorage(TensorDict({"x": given}, [4])), batch_size=2)
    buffer["y"] = torch.arange(4.0) + 10
    buffer[torch.tensor([1])] = TensorDict({"x": torch.tensor([7.0]), "y": torch.tensor([8.0])}, [1])
    assert buffer["x"].tolist() == given.tolist() == [0, 7, 2, 3]
    assert buffer["y"].tolist() == [10, 8, 12, 13]
    flat = buffer.storage.flatten()
    assert flat.get([1])["x"].tolist() == [7]


def test_nothing_can_be_read_before_the_first_write():
    storage = LazyTensorStorage(5)
    assert storage._storage is None
    for read in (lambda: storage.get(slice(None)), lambda: storage.get([]), lambda: storage.format):
        with pytest.raises(EmptyBufferError):
            read()
    with pytest.raises(EmptyBufferError):
        storage.fetch(torch.empty(0, dtype=torch.int64))
    with pytest.raises(IndexRangeError):
        storage.get(0)


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("ndim", [1, 2])
def test_state_is_a_copy_of_the_part_in_use(kind, ndim, tmp_path):
    storage = kind(1000, ndim=ndim)
    storage.set(0, ted(6, streams=3).transpose(0, 1) if ndim == 2 else ted(18))
    state = storage.state_dict()
    saved = fingerprint(state)
    assert all(column.shape[0] == 18 for column in state["columns"])
    torch.save(state, tmp_path / "state.pt")
    other = kind(1000, ndim=ndim)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert fingerprint(other.state_dict()) == saved
    other.check_valid()
    other.get(slice(None))["observation"].zero_()
    storage.get(slice(None))["observation"].zero_()
    assert fingerprint(state) == saved
    storage.load_state_dict(state)
    assert (storage.get(slice(None)) == (ted(6, streams=3).transpose(0, 1) if ndim == 2 else ted(18))).all()


def test_a_state_of_another_storage_is_refused_whole():
    storage = LazyTensorStorage(10)
    storage.set(0, ted(4))
    before = fingerprint(storage.state_dict())
    other = LazyTensorStorage(10)
    other.set(0, plain())
    good = storage.state_dict()
    bad = [
        other.state_dict(),
        {**good, "max_size": 2},
        {**good, "ndim": 2},
        {**good, "num_steps": 5},
        {**good, "columns": good["columns"][:-1]},
        {key: value for key, value in good.items() if key != "generations"},
        {**good, "format": None},
    ]
    for state in bad:
        with pytest.raises(SchemaError, match="load_state_dict"):
            storage.load_state_dict(state)
    assert fingerprint(storage.state_dict()) == before


def test_an_empty_state_empties():
    storage = LazyTensorStorage(10)
    empty = storage.state_dict()
    storage.set(0, ted(4))
    storage.load_state_dict(empty)
    assert len(storage) == 0


def test_leaves_in_another_order_load_by_name():
    first, second = LazyTensorStorage(10), LazyTensorStorage(10)
    first.set(0, TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2]))
    second.set(0, TensorDict({"b": torch.zeros(1), "a": torch.zeros(1)}, [1]))
    second.load_state_dict(first.state_dict())
    assert second.get(0)["b"] == 1 and second.get(0)["a"] == 0


def test_leaves_that_share_memory_get_separate_columns():
    done, wide = torch.zeros(5, 1), torch.zeros(8, 1)
    data = TensorDict({"done": done, "next": {"done": done}, "early": wide[:5], "late": wide[3:]}, [5])
    storage = TensorStorage(data)
    values = {"done": -1.0, "early": 3.0, "late": 4.0}
    two = TensorDict({key: torch.full((2, 1), value) for key, value in values.items()}, [2])
    storage.set(3, two.set(("next", "done"), torch.ones(2, 1)))
    for key, value in {**values, ("next", "done"): 1.0}.items():
        assert storage.get(slice(None))[key].flatten().tolist() == [0, 0, 0, value, value]
    # One of the leaves that share a column is still the user's own tensor.
    assert done.abs().sum() == 2 and wide.flatten().tolist() == [0, 0, 0, 3, 3, 0, 0, 0]


def test_rows_that_are_no_steps_are_never_drawn_however_they_came():
    def steps(kept: list[int]) -> TensorDict:
        mask = torch.zeros(6, dtype=torch.bool)
        mask[kept] = True
        return TensorDict({"x": torch.arange(6), "collector": {"mask": mask}}, [6])

    adopted = ReplayBuffer(storage=TensorStorage(steps([1, 4])), batch_size=100)
    replaced = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=100)
    replaced.extend(steps(list(range(6))))
    assert not replaced.storage.has_mask
    replaced[:] = steps([1, 4])
    loaded = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=100)
    loaded.load_state_dict(replaced.state_dict())
    for buffer in (adopted, replaced, loaded, copy.deepcopy(adopted)):
        assert buffer.sample()["x"].unique().tolist() == [1, 4]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_the_first_write_makes_the_columns_of_records_without_entries(device):
    buffer = ReplayBuffer(storage=TensorStorage(TensorDict(batch_size=[100]), device=device), batch_size=3)
    assert len(buffer) == buffer.storage.max_size == 100
    with pytest.raises(InvalidTypeError):
        buffer.extend(torch.arange(4))
    buffer.extend(TensorDict({"x": torch.arange(1, 5), "n": {"y": torch.ones(4, 2)}}, [4]))
    buffer.add(TensorDict({"x": torch.tensor(5), "n": {"y": torch.ones(2)}}, []))
    assert buffer[:]["x"].tolist() == [1, 2, 3, 4, 5] + [0] * 95 and buffer[:]["n", "y"].sum() == 10
    assert buffer.sample()["n", "y"].shape == (3, 2) and len(buffer) == 100
    with pytest.raises(SchemaError, match="z"):
        buffer.extend(TensorDict({"x": torch.arange(4), "z": torch.arange(4)}, [4]))
    streams = ReplayBuffer(storage=TensorStorage(TensorDict(batch_size=[25, 4]), ndim=2))
    with pytest.raises(SchemaError, match="batch dimensions"):
        streams.extend(TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3]))
    streams.extend(TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
    assert torch.equal(streams[:]["x"][:, :3], torch.arange(12).view(4, 3))


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_error_about_a_short_last_batch_names_the_remedies(buffer):
    def batch(steps):
        return TensorDict({"x": torch.zeros(2, steps, 3)}, [2, steps])

    whole = buffer(storage=LazyTensorStorage(20))
    whole.extend(batch(10))
    with pytest.raises(SchemaError, match=r"rows of \[5\].*total_frames.*ndim=2.*reshape"):
        whole.extend(batch(5))
    assert len(whole) == 2
    single = buffer(storage=LazyTensorStorage(50, ndim=2))
    for steps in (10, 10, 5):
        single.extend(batch(steps))
    assert len(single) == 50


def test_growing_groups_of_text_are_refused_with_advice():
    def chat(rows, turns):
        text = NonTensorStack(*(NonTensorStack(*(f"{i}{k}" for k in range(turns))) for i in range(rows)))
        return TensorDict({"x": torch.arange(rows), "g": TensorDict({"t": text}, [rows, turns])}, [rows])

    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    buffer.extend(chat(2, 2))
    with pytest.raises(SchemaError, match=r"got \(2, 3\) of objects.*LazyStackStorage"):
        buffer.extend(chat(2, 3))
    with pytest.raises(SchemaError, match=r"different shapes.*LazyStackStorage"):
        buffer.extend(lazy_stack([chat(2, 2)[0], chat(2, 3)[0]]))
    assert len(buffer) == 2


def test_rows_that_a_new_mask_leaves_out_are_never_drawn():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(10)}, [10]))
    mask = torch.ones(2, dtype=torch.bool)
    buffer[3:5] = TensorDict({"x": torch.tensor([30, 40]), "collector": {"mask": mask}}, [2])
    assert {x for _ in range(9) for x in buffer.sample()["x"].tolist()} == {30, 40}
