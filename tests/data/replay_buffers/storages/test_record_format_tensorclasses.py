"""Tensorclasses are stored in columns and returned as tensorclasses."""

from __future__ import annotations

import copy
import pickle
import sys
import types

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage
from gleanrl.data.replay_buffers.storages.record_format import classes_of, from_names, to_names, wrap
from gleanrl.errors import InvalidTypeError, SchemaError
from tests.data.replay_buffers.oracle import fill, fingerprint


@tensorclass
class Point:
    x: torch.Tensor
    label: str | None = None
    extra: torch.Tensor | None = None


@tensorclass
class Twin:
    x: torch.Tensor


@tensorclass
class Other:
    x: torch.Tensor


@tensorclass
class Step:
    obs: torch.Tensor
    point: Point
    more: TensorDict | None = None


def points(count: int, start: int = 0) -> Point:
    return Point(x=torch.arange(start, start + count), batch_size=[count])


def steps(count: int, start: int = 0) -> Step:
    more = TensorDict({"deep": TensorDict({"point": points(count, start)}, [count])}, [count])
    t = torch.arange(start, start + count)
    obs = t[:, None].expand(count, 3).float()
    return Step(obs=obs, point=points(count, start), more=more, batch_size=[count])


def values(batch: Step) -> list[int]:
    """Return the steps in a batch, after checking all of its classes."""
    assert type(batch) is Step and type(batch.point) is Point
    assert type(batch.more) is TensorDict and type(batch.more["deep"]) is TensorDict
    assert type(batch.more["deep", "point"]) is Point
    assert batch.batch_size == batch.point.batch_size == batch.more["deep", "point"].batch_size
    assert batch.point.label is None and batch.point.extra is None
    assert (batch.obs == batch.point.x[..., None]).all()
    assert torch.equal(batch.point.x, batch.more["deep", "point"].x)
    return batch.point.x.tolist()


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_records_come_back_as_their_class(kind):
    rb = ReplayBuffer(storage=kind(10), batch_size=4)
    assert rb.extend(steps(8)).tolist() == list(range(8))
    assert rb.add(steps(1, start=8)[0]) == 8
    rb.extend([steps(1, start=9)[0], steps(1, start=10)[0]])
    batch, info = rb.sample(return_info=True)
    assert values(batch) == [10 if slot == 0 else slot for slot in info["index"].tolist()]
    if kind is not ListStorage:
        assert values(rb[:]) == [10, *range(1, 10)]
        assert values(rb[3:5]) == [3, 4] == values(rb[torch.tensor([3, 4])])
    assert values(rb[7]) == 7
    rb[7] = steps(1, start=70)[0]
    assert values(rb[7]) == 70


# tensordict before 0.11 warns of this method
@pytest.mark.filterwarnings("ignore:The method <bound method TensorDictBase.__deepcopy__:UserWarning")
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_state_and_copies_keep_the_class(kind, tmp_path):
    rb = ReplayBuffer(storage=kind(10), batch_size=4, seed=0)
    rb.extend(steps(8))
    other = ReplayBuffer(storage=kind(10), batch_size=4)
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=kind is not ListStorage))
    copies = [other, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))]
    expected = values(rb.sample())
    for each in copies:
        assert values(each.sample()) == expected


def test_several_batch_dimensions_keep_the_class():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    x = torch.arange(12).view(3, 4)
    rb.extend(Point(x=x, batch_size=[3, 4]))
    assert type(rb[:]) is Point and torch.equal(rb[:].x, x)
    item = ReplayBuffer(storage=LazyTensorStorage(3))
    item.extend(Point(x=x, batch_size=[3, 4]))
    assert item[1].batch_size == (4,) and item[1].x.tolist() == [4, 5, 6, 7]


def test_wrapped_tensorclass_keeps_its_class():
    storage = TensorStorage(points(4))
    assert len(storage) == 4 and type(storage.get([1])) is Point


def test_columns_are_read_and_written_by_key():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(steps(8))
    part = rb.sample(keys=["obs", ("more", "deep", "point", "x")])
    assert type(part) is Step and part.point is None
    assert type(part.more["deep", "point"]) is Point
    assert torch.equal(rb["obs"], rb[:].obs)
    assert torch.equal(rb["more", "deep", "point", "x"], torch.arange(8)) and rb["more"].batch_size == (8,)
    rb["obs"] = torch.zeros(8, 3)
    assert not rb[:].obs.any() and type(rb[:]) is Step
    rb["point", "x"] = torch.arange(8) + 1
    assert rb[:].point.x.tolist() == list(range(1, 9))
    for key in ("nothing", ("point", "extra")):
        with pytest.raises(KeyError, match="isn't stored"):
            rb[key]
    with pytest.raises(SchemaError):
        rb["obs"] = torch.zeros(8, 4)
    with pytest.raises((SchemaError, InvalidTypeError)):
        rb["point"] = torch.zeros(8)
    assert not rb[:].obs.any()


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_fields_that_the_first_write_had_no_place_for_are_refused_by_name(kind):
    rb = ReplayBuffer(storage=kind(10), seed=0)
    rb.extend(points(3))
    before = fingerprint(rb.state_dict())
    with pytest.raises(SchemaError, match="'label'"):
        rb.extend(Point(x=torch.arange(3), label="hi", batch_size=[3]))
    with pytest.raises(SchemaError, match="unexpected \\['extra'\\]"):
        rb.extend(Point(x=torch.arange(3), extra=torch.ones(3), batch_size=[3]))
    with pytest.raises(SchemaError, match="key 'x' expected shape"):
        rb.extend(Point(x=torch.ones(3), batch_size=[3]))
    assert fingerprint(rb.state_dict()) == before


def test_lists_keep_fields_of_any_kind():
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=4)
    rb.extend(Point(x=torch.ones(3), label="hi", batch_size=[3]))
    assert list(rb.sample().label) == ["hi"] * 4


@pytest.mark.parametrize(
    "first, second, message",
    [
        (points(3), Twin(x=torch.arange(3), batch_size=[3]), "as a tensorclass Points, got a Twin"),
        (points(3), points(3).to_tensordict(), "as a tensorclass Points, got a TensorDict"),
        (points(3).to_tensordict(), points(3), "as a TensorDicts, got a Point"),
        (points(3), torch.arange(3), "as a tensorclass Points, got a Tensor"),
        (
            TensorDict({"p": points(3)}, [3]),
            TensorDict({"p": TensorDict({"x": torch.arange(3)}, [3])}, [3]),
            "as a tensorclass Point at 'p', got a TensorDict",
        ),
        (
            TensorDict({"p": TensorDict({"x": torch.arange(3)}, [3])}, [3]),
            TensorDict({"p": points(3)}, [3]),
            "as a TensorDict at 'p', got a Point",
        ),
        (
            TensorDict({"p": TensorDict({"x": torch.arange(3)}, [3])}, [3]),
            TensorDict({"p": LazyStackedTensorDict(*points(3).unbind(0))}, [3]),
            "as a TensorDict at 'p', got a Point",
        ),
        (
            TensorDict({"p": TensorDict({"x": torch.arange(3)}, [3])}, [3]),
            LazyStackedTensorDict(*TensorDict({"p": points(3)}, [3]).unbind(0)),
            "as a TensorDict at 'p', got a Point",
        ),
    ],
)
def test_another_class_is_another_kind_of_record(first, second, message):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), seed=0)
    rb.extend(first)
    before = fingerprint(rb.state_dict())
    with pytest.raises(InvalidTypeError, match=message):
        rb.extend(second)
    with pytest.raises(InvalidTypeError, match=message):
        rb[:] = second
    assert fingerprint(rb.state_dict()) == before


def test_new_columns_keep_their_class():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(TensorDict({"x": torch.arange(3), "p": TensorDict({"x": torch.arange(3)}, [3])}, [3]))
    with pytest.raises(InvalidTypeError, match="as a TensorDict at 'p', got a Point"):
        rb["p"] = points(3)
    with pytest.raises(SchemaError):  # a field that the stored group lacks
        rb["p"] = Point(x=torch.arange(3), extra=torch.arange(3), batch_size=[3])
    rb["new"] = points(3)
    assert type(rb[:]["new"]) is type(rb[0]["new"]) is Point and type(rb[:]["p"]) is TensorDict
    first = ReplayBuffer(storage=TensorStorage(TensorDict({}, [3])))
    first.extend(TensorDict({"p": points(3)}, [3]))
    assert type(first[:]["p"]) is Point


def test_a_state_of_another_class_is_refused():
    storage, other = LazyTensorStorage(5), LazyTensorStorage(5)
    fill(storage, points(3))
    fill(other, Twin(x=torch.arange(3), batch_size=[3]))
    with pytest.raises(SchemaError, match="load_state_dict"):
        other.load_state_dict(storage.state_dict())
    assert type(other.get(0)) is Twin


def test_names_are_looked_up_where_the_program_has_them(monkeypatch):
    classes = classes_of(steps(1), "test")
    assert from_names(to_names(classes)) == classes
    assert list(classes.values()) == [Point, Point, Step], "the deepest first"

    @tensorclass
    class Local:
        x: torch.Tensor

    made = types.ModuleType("made_up")
    made.Plain = int
    monkeypatch.setitem(sys.modules, "made_up", made)
    unknown = ["nowhere:Point", f"{__name__}:Nobody", "made_up:Plain"]
    for name in unknown:
        with pytest.raises(SchemaError, match="import its module first"):
            from_names([((), name)])
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(Local(x=torch.arange(2), batch_size=[2]))
    assert type(copy.deepcopy(rb)[:]) is Local, "a copy needs no name"


def test_wrapping_copies_nothing():
    x = torch.arange(3)
    record = TensorDict({"a": TensorDict({"x": x}, [3])}, [3])
    wrapped = wrap(record, {("a",): Point})
    assert type(wrapped) is TensorDict and wrapped["a"].x.data_ptr() == x.data_ptr()


def test_transforms_get_the_class_and_leave_the_input_alone():
    class Shift:
        def __call__(self, batch: Point) -> Point:
            batch.x = batch.x - 100
            return batch

        def inv(self, batch: Point) -> Point:
            batch.x = batch.x + 100
            return batch

    rb = ReplayBuffer(storage=LazyTensorStorage(5), transform=Shift(), batch_size=4)
    data = points(3)
    rb.extend(data)
    assert data.x.tolist() == [0, 1, 2]
    assert rb.storage.get(slice(None)).x.tolist() == [100, 101, 102]
    assert rb[:].x.tolist() == [0, 1, 2]
    assert set(rb.sample().x.tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "together", [list, lambda parts: LazyStackedTensorDict(*parts)], ids=["list", "lazy stack"]
)
def test_records_of_different_tensorclasses_are_refused_in_columns(together, nested):
    parts = [Twin(x=torch.tensor(1)), Point(x=torch.tensor(2))]
    if nested:
        parts = [TensorDict({"part": part}) for part in parts]
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.raises((InvalidTypeError, SchemaError), match="Twin.*Point|same keys|one structure"):
        buffer.extend(together(parts))
    same = [Twin(x=torch.tensor(1)), Other(x=torch.tensor(2))]
    if nested:
        same = [TensorDict({"part": part}) for part in same]
    with pytest.raises(InvalidTypeError, match=r"record 0 has \['Twin'\], record 1 has \['Other'\]"):
        buffer.extend(together(same))
    assert len(buffer) == 0
    kept = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    kept.extend(list(same))
    assert [type(one["part"] if nested else one) for one in (kept[0], kept[1])] == [Twin, Other]
