"""Transforms run in the right direction and order, and the first write checks their result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl.data.replay_buffers import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline, Stage
from gleanrl.envs.transforms import Compose, DoubleToFloat, RenameTransform, VecNorm
from gleanrl.errors import InvalidTypeError, SchemaError
from tests.data.replay_buffers.oracle import clock, ted
from tests.interrupts import interruptions


class Scale(nn.Module):
    """Multiplies by `factor` on read and divides on write, built as TorchRL's transforms are."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, data: TensorDict) -> TensorDict:
        assert not self.training
        return data.set("x", data["x"] * self.factor)

    def inv(self, data: TensorDict) -> TensorDict:
        return data.set("x", data["x"] / self.factor)


class HoldBack(Scale):
    def inv(self, data: TensorDict) -> None:
        return None


class Halves:
    """Not callable: `forward` on read, `inv` on write."""

    def forward(self, data: TensorDict) -> TensorDict:
        return data.set("x", data["x"] / 2)

    def inv(self, data: TensorDict) -> TensorDict:
        return data.set("x", data["x"] * 2)


def buffer(transform: Any = None, ndim: int = 1) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(50, ndim=ndim), transform=transform, batch_size=4)


def xs(count: int = 4) -> TensorDict:
    return TensorDict({"x": torch.arange(float(count))}, [count])


def test_an_object_with_inv_acts_both_ways():
    rb = buffer(Scale(10.0))
    data = xs()
    rb.extend(data)
    assert rb._storage.get(slice(None))["x"].tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert rb[:]["x"].tolist() == pytest.approx([0, 1, 2, 3])
    assert rb["x"].tolist() == pytest.approx([0, 1, 2, 3])
    assert data["x"].tolist() == [0, 1, 2, 3], "extend doesn't write into its input"
    assert set(rb.sample()["x"].round().tolist()) <= {0.0, 1.0, 2.0, 3.0}


def test_records_pass_in_the_opposite_order():
    seen = []

    class Note(Scale):
        def forward(self, data: TensorDict) -> TensorDict:
            seen.append(("read", self.factor))
            return data

        def inv(self, data: TensorDict) -> TensorDict:
            seen.append(("write", self.factor))
            return data

    rb = buffer(Note(2.0))
    assert rb.append_transform(Note(3.0)) is rb
    rb.insert_transform(0, Note(1.0))
    rb.extend(xs())
    rb.sample()
    assert seen == [("write", 3), ("write", 2), ("write", 1), ("read", 1), ("read", 2), ("read", 3)]


def test_invert_swaps_the_directions():
    rb = buffer()
    rb.append_transform(Scale(10.0), invert=True)
    rb.extend(xs())
    assert rb._storage.get(slice(None))["x"].tolist() == [0, 10, 20, 30]
    assert rb[:]["x"].tolist() == pytest.approx([0, 1, 2, 3])


def test_an_inverted_callable_acts_on_writes_only():
    rb = buffer()
    rb.append_transform(lambda data: data.set("x", data["x"] + 1), invert=True)
    rb.extend(xs())
    rb.add(xs()[0])
    assert rb[:]["x"].tolist() == [1, 2, 3, 4, 1]


def test_an_inverse_that_returns_none_writes_nothing():
    for ndim, shape in [(1, (0,)), (2, (0, 2))]:
        rb = buffer(HoldBack(2.0), ndim)
        index = rb.extend(ted(4, streams=2))
        assert index.shape == shape and index.dtype == torch.int64
        assert len(rb) == 0 and not rb._storage.initialized


def test_a_plain_callable_acts_on_samples():
    calls = []

    def note(data: TensorDict) -> TensorDict:
        calls.append(tuple(data.batch_size))
        return data.set("y", data["x"] + 1)

    rb = buffer(note)
    rb.extend(xs())
    assert calls == [], "not probed: the data has no more batch dimensions than the storage"
    assert "y" in rb.sample().keys()
    assert "y" in rb[0].keys() and "y" in rb[:].keys()
    assert "y" not in rb._storage.get(slice(None)).keys()


def test_a_callable_that_changes_the_batch_shape_acts_on_the_way_in():
    calls = []

    def flatten(data: TensorDict) -> TensorDict:
        calls.append(tuple(data.batch_size))
        return data.reshape(-1)

    rb = buffer(flatten)
    data = ted(6, streams=3)
    rb.extend(data)
    assert calls == [(1, 1), (3, 6)]
    assert len(rb) == 18 and data.batch_size == (3, 6)
    assert clock(rb._storage.get(slice(None))).tolist() == list(range(6)) * 3
    assert rb.sample(4).batch_size == (4,)
    rb.extend(ted(6, start=6, streams=3))
    assert calls == [(1, 1), (3, 6), (3, 6)], "probed once"
    assert rb.add(ted(1)[0]) == 36, "a single record needs no flattening"


def test_the_probe_works_on_a_clone():
    def spoil(data: TensorDict) -> TensorDict:
        data["observation"].zero_()
        return data

    rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=spoil)
    data = ted(6, start=10, streams=3)
    expected = data.clone()
    rb.extend(data)
    assert (data == expected).all()


def test_data_with_enough_storage_dimensions_isnt_probed():
    rb = buffer(lambda data: data.reshape(-1), ndim=2)
    rb.extend(ted(6, streams=3))
    assert rb._storage.shape == (6, 3)
    assert rb.sample(4).batch_size == (4,)


def test_a_callable_that_fails_on_the_corner_is_for_samples():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50), transform=lambda data: data.reshape(2, 2, 6), batch_size=4
    )
    rb.extend(ted(6, streams=3))
    assert rb.sample().batch_size == (2, 2, 6)


def test_a_failed_first_write_settles_nothing():
    rb = buffer(lambda data: data.reshape(-1))
    with pytest.raises(ValueError, match="expected a dense tensor"):
        rb.extend(TensorDict({"x": torch.ones(4).to_sparse()}, [4]))
    rb.extend(ted(6, streams=3))
    assert len(rb) == 18


def test_only_the_first_write_is_probed():
    rb = buffer()
    rb.extend(ted(6))
    rb.append_transform(lambda data: data.reshape(-1))
    with pytest.raises(ValueError, match="expected shape"):
        rb.extend(ted(6, streams=3))


def test_only_callables_that_flatten_act_on_writes():
    rb = buffer(lambda data: data.select("observation"))
    rb.append_transform(lambda data: data.reshape(-1))
    rb.append_transform(lambda data: data.exclude("collector"))
    rb.extend(ted(6, streams=3))
    assert len(rb) == 18
    assert "action" in rb._storage.get(slice(None)).keys()
    assert set(rb.sample().keys()) == {"observation"}


def test_with_transforms_positions_give_copies():
    rb = buffer(lambda data: data)
    rb.extend(xs())
    rb[:]["x"].zero_()
    rb[1]["x"].zero_()
    assert rb[:]["x"].tolist() == [0, 1, 2, 3]
    trees = buffer(lambda tree: tree)
    trees.extend({"x": torch.arange(4.0)})
    trees[:]["x"].zero_()
    assert trees[:]["x"].tolist() == [0, 1, 2, 3]


def test_replacing_by_index_runs_the_inverse():
    rb = buffer(Scale(10.0))
    rb.extend(xs())
    rb[1] = TensorDict({"x": torch.tensor(50.0)}, [])
    assert rb[:]["x"].tolist() == pytest.approx([0, 50, 2, 3])


def test_inverses_act_on_the_records_of_a_list():
    rb = ReplayBuffer(transform=Scale(10.0))
    rb.extend([xs()[1], xs()[2]])
    assert [float(row["x"]) for row in rb._storage._storage] == pytest.approx([0.1, 0.2])
    assert rb[:]["x"].tolist() == pytest.approx([1, 2])
    assert ReplayBuffer(transform=HoldBack(1.0)).extend([xs()[1]]).shape == (0,)


def test_value_that_is_no_transform_is_refused():
    with pytest.raises(InvalidTypeError, match="transform: expected a callable"):
        Stage(3)
    assert len(Pipeline()) == 0


def forgets(data: TensorDict) -> None:
    data["x"] = data["x"] * 2


class Forgets(Scale):
    def forward(self, data: TensorDict) -> None:
        return None


@pytest.mark.parametrize("transform, name", [(forgets, "forgets"), (Forgets(1.0), "Forgets")])
def test_a_transform_that_returns_none_is_named(transform, name):
    rb = buffer(lambda data: data)
    rb.append_transform(transform)
    rb.extend(xs())
    for read in (rb.sample, lambda: rb[:], lambda: rb[1], lambda: rb["x"], lambda: next(iter(rb))):
        with pytest.raises(InvalidTypeError, match=f"transform {name}: .* got None"):
            read()
    lists = ReplayBuffer(transform=transform)
    lists.extend([xs()[0]])
    with pytest.raises(InvalidTypeError, match=f"transform {name}: .* got None"):
        lists[0]


def test_inverse_that_fails_on_read_is_named_by_its_method():
    rb = buffer()
    rb.append_transform(HoldBack(1.0), invert=True)
    rb.extend(xs())
    with pytest.raises(InvalidTypeError, match=r"transform HoldBack\.inv: .* got None"):
        rb.sample()


def test_a_collate_fn_that_returns_none_is_named():
    rb = ReplayBuffer(storage=LazyTensorStorage(50), collate_fn=forgets, batch_size=4)
    rb.extend(xs())
    for read in (rb.sample, lambda: rb[:]):
        with pytest.raises(InvalidTypeError, match="collate_fn forgets: .* got None"):
            read()


def test_written_dictionary_is_unchanged():
    class Rescaled:
        def __call__(self, batch: Any) -> Any:
            return batch

        def inv(self, records: Any) -> Any:
            records["deep"]["x"] = records["deep"]["x"] / 2
            records["new"] = records.pop("old")
            return records

    rb = buffer(Rescaled())
    data = {"deep": {"x": torch.ones(3)}, "old": torch.zeros(3)}
    rb.extend(data)
    assert set(data) == {"deep", "old"} and data["deep"]["x"].tolist() == [1.0] * 3
    assert rb[:]["deep"]["x"].tolist() == [0.5] * 3


@pytest.mark.parametrize("item", [TensorDict({"x": torch.ones(())}), {"x": torch.ones(())}, {"x": [1.0]}])
def test_a_transform_of_one_object_leaves_the_stored_one_alone(item):
    def grown(record: Any) -> Any:
        record["x"] += record["x"]
        return record

    rb = ReplayBuffer(storage=ListStorage(5), transform=grown, collate_fn=lambda records: records[0])
    rb.add(item)
    for index in (0, (0,), [0], slice(None)):
        for _ in range(3):
            assert rb[index]["x"] in (2.0, [1.0, 1.0])
    assert rb._storage[0]["x"] in (1.0, [1.0])


def test_record_that_is_a_list_is_returned_unchanged():
    rb = ReplayBuffer(storage=ListStorage(5))
    rb.extend([[1, 2], [3, 4]])
    assert rb[1] == [3, 4] and rb[(-2,)] == [1, 2]


def test_a_buffers_transforms_can_be_looked_at_and_called():
    double, half = (lambda batch: batch.apply(lambda x: x * 2)), (lambda batch: batch.apply(lambda x: x / 2))
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=double)
    buffer.append_transform(half)
    assert [*buffer.transform] == [double, half] == [buffer._transform[0], buffer.transform[-1]]
    assert "Pipeline(" in repr(buffer.transform)
    batch = TensorDict({"x": torch.arange(3.0)}, [3])
    assert (buffer.transform(batch) == batch).all()


def test_transform_behaves_as_a_chain_of_modules():
    encoder = TensorDictModule(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), ["x"], ["y"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4, transform=lambda batch: batch)
    buffer.append_transform(encoder)
    buffer.extend(TensorDict({"x": torch.randn(4, 2)}, [4]))
    chain = buffer.transform
    assert chain.transforms == [*chain] and len(chain) == 2
    assert [*chain.children()] == [encoder] and [*chain.modules()] == [*encoder.modules()]
    assert [*map(id, chain.parameters())] == [*map(id, encoder.parameters())]
    assert [*map(id, chain.buffers())] == [*map(id, encoder.buffers())]
    assert not encoder.training and chain.train() is chain and encoder.training
    assert chain.eval() is chain and not encoder.training
    buffer.sample()["y"].sum().backward()
    assert chain.requires_grad_(False) is chain and not buffer.sample()["y"].requires_grad
    assert chain.to(torch.float64) is chain and next(encoder.parameters()).dtype is torch.float64


@pytest.mark.parametrize("invert", [False, True])
def test_an_object_with_forward_and_inv_need_not_be_callable(invert: bool) -> None:
    halves = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4)
    halves.append_transform(Halves(), invert=invert)
    halves.extend(TensorDict({"x": torch.ones(4)}, [4]))
    assert halves.storage.get([0])["x"] == (0.5 if invert else 2)
    assert (halves.sample()["x"] == 1).all()


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(
    "transform",
    [
        lambda: lambda batch: batch,
        lambda: RenameTransform(["a"], ["b"]),
        lambda: Compose(RenameTransform(["a"], ["b"]), DoubleToFloat()),
    ],
    ids=["callable", "rename", "chain"],
)
def test_transforms_without_a_state_may_differ(transform, saved) -> None:
    def made(with_transform: bool) -> TensorDictReplayBuffer:
        options = {"transform": transform()} if with_transform else {}
        return TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4, **options)

    first, second = made(saved), made(not saved)
    first.extend(TensorDict({"a": torch.rand(5, dtype=torch.float64)}, [5]))
    second.load_state_dict(first.state_dict())
    assert len(second) == 5 and torch.equal(second.storage[:]["a"], first.storage[:]["a"])


@pytest.mark.parametrize("saved", [True, False])
def test_transforms_with_a_state_may_not(saved) -> None:
    def made(with_transform: bool) -> TensorDictReplayBuffer:
        options = {"transform": VecNorm(in_keys=["a"])} if with_transform else {}
        return TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4, **options)

    first, second = made(saved), made(not saved)
    first.extend(TensorDict({"a": torch.rand(5)}, [5]))
    with pytest.raises(SchemaError, match="some have a state: load into a buffer with the saved transforms"):
        second.load_state_dict(first.state_dict())
    assert not len(second)


@pytest.mark.parametrize("chained", [True, False])
def test_refused_write_does_not_count_in_an_inverted_norm(chained: bool) -> None:
    def written(*batches: TensorDict) -> Any:
        rb, norm = buffer(), VecNorm(in_keys=["x"], decay=1.0)
        rb.append_transform(Compose(norm) if chained else norm, invert=True)
        for batch in batches:
            if "y" in batch.keys():
                with pytest.raises(SchemaError):
                    rb.extend(batch)
            else:
                rb.extend(batch)
        return norm.state_dict(), rb[:]["x"]

    good = xs()
    bad = good.clone().set("y", torch.zeros(4))
    bad = bad.set("x", bad["x"] + 100)
    (state, stored), (want, expected) = written(good, bad, good), written(good, good)
    assert torch.equal(stored, expected)
    assert str(state) == str(want)


def test_interrupted_write_counts_in_an_inverted_norm_if_its_rows_are_stored() -> None:
    def made() -> Any:
        rb = buffer()
        rb.append_transform(VecNorm(in_keys=["x"], decay=1.0), invert=True)
        rb.extend(xs())
        return rb

    for rb, place in interruptions(made, lambda rb: rb.extend(xs()), most=60):
        (count, *_) = rb.transform[0].state_dict()["statistics"]["sums"]["x"].tolist()
        assert count == len(rb), place
