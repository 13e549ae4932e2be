"""Schemas check batches and allocate columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.schema import Field, Schema, allocate, numpy_dtype, numpy_view
from gleanrl._arrays.tensordicts import Path
from gleanrl.errors import SchemaError
from tests.fields import FIELDS, SIZES

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
]


def batch(size: tuple[int, ...], fields: dict[Path, Field] = FIELDS) -> TensorDict:
    out = TensorDict({}, size)
    for path, field in fields.items():
        out.set(path, torch.ones((*size, *field.shape)).to(field.dtype))
    return out


def read(schema: Schema, data: Any) -> list[torch.Tensor]:
    leaves = schema.layout.read(data, "extend")
    schema.check(leaves, data.batch_size, "extend")
    return leaves


class TestSchema:
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_schema_is_read_from_a_batch(self, size: tuple[int, ...]) -> None:
        schema = Schema.of(batch(size))
        assert schema == Schema(FIELDS) and schema.items() == FIELDS and len(schema) == 4
        assert Schema.of(batch(size), exclude=[("image",)]).paths == tuple(FIELDS)[1:]

    def test_fields_are_found_by_path(self) -> None:
        schema = Schema(FIELDS)
        assert schema.paths == tuple(FIELDS) == tuple(schema.items())
        assert ("done",) in schema and ("next",) not in schema and "done" not in schema
        assert schema["done",] == FIELDS["done",] and schema.index(("next", "reward")) == 1
        with pytest.raises(KeyError):
            schema.index(("reward",))
        assert schema.row_bytes == 4 + 4 + 2 + 1

    def test_equality_ignores_only_the_order(self) -> None:
        turned = Schema(dict(reversed(FIELDS.items())))
        assert turned == Schema(FIELDS) and hash(turned) == hash(Schema(FIELDS)) and Schema(FIELDS) != FIELDS
        for change in (Field(torch.Size([2]), torch.bool), Field(torch.Size([]), torch.uint8)):
            assert Schema({**FIELDS, ("done",): change}) != Schema(FIELDS)

    def test_repr_shows_paths_and_fields(self) -> None:
        assert str(FIELDS["image",]) == "(2, 2) uint8"
        assert "('next', 'reward'): (1,) float32" in repr(Schema(FIELDS))

    @pytest.mark.parametrize("size", [*SIZES, (0,)], ids=str)
    def test_leaves_are_read_in_order(self, size: tuple[int, ...]) -> None:
        data = batch(size)
        leaves = read(Schema(dict(reversed(FIELDS.items()))), data)
        assert all(leaf is data.get(path) for leaf, path in zip(leaves, reversed(FIELDS), strict=True))
        stacked = LazyStackedTensorDict.lazy_stack([data, data], 0)
        assert [leaf.shape[0] for leaf in read(Schema(FIELDS), stacked)] == [2] * 4

    @pytest.mark.parametrize("size", SIZES, ids=str)
    @pytest.mark.parametrize(
        ("key", "change", "message"),
        [
            (
                "image",
                lambda x: x.float(),
                r"'image' expected shape .*2, 2\) torch.uint8, got .*2, 2\) torch.float32",
            ),
            ("image", lambda x: x.bool(), "torch.uint8, got .*torch.bool"),
            ("image", lambda x: x[..., :1], r"2, 2\) torch.uint8, got \(.*2, 1\)"),
            ("image", lambda x: x.unsqueeze(-1), r"2, 2\) torch.uint8, got \(.*2, 2, 1\)"),
            (("next", "reward"), lambda x: x.double(), r"\('next', 'reward'\).*float32, got .*float64"),
            (("next", "reward"), lambda x: x.squeeze(-1), r"\('next', 'reward'\)"),
            (("next", "stats", "half"), lambda x: x.half(), "bfloat16, got .*float16"),
        ],
    )
    def test_nothing_is_cast_or_broadcast(
        self, key: Any, change: Any, message: str, size: tuple[int, ...]
    ) -> None:
        data = batch(size)
        data.set(key, change(data.get(key)))
        for _ in range(2):
            with pytest.raises(SchemaError, match=f"(?s)extend: key .*{message}"):
                read(Schema(FIELDS), data)

    def test_missing_keys_are_reported_before_shapes(self) -> None:
        with pytest.raises(SchemaError, match=r"missing \['done'\]"):
            read(Schema(FIELDS), batch((2,)).exclude("done"))

    def test_many_batch_sizes_are_checked_correctly(self) -> None:
        schema = Schema(FIELDS)
        for size in [*range(100), *range(100)]:
            read(schema, batch((size,)))
        with pytest.raises(SchemaError):
            read(schema, batch((99,), {**FIELDS, ("done",): Field(torch.Size([1]), torch.bool)}))


class TestMemory:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)], ids=str)
    @pytest.mark.parametrize("pooled", [False, True])
    def test_allocated_tensors_have_the_requested_form(
        self, dtype: torch.dtype, shape: tuple[int, ...], pooled: bool
    ) -> None:
        pool = BufferPool(min_bytes=1) if pooled else None
        tensor = allocate(shape, dtype, None, pool)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        tensor.fill_(1)
        assert (tensor.to(torch.complex64) == 1).all() and not allocate(shape, dtype).is_shared()

    def test_other_devices_are_allocated_by_torch(self) -> None:
        for shape in ((), (3, 2)):
            tensor = allocate(shape, torch.bfloat16, torch.device("meta"))
            assert tensor.device.type == "meta" and tensor.shape == shape and tensor.dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_numpy_sees_the_same_bytes(self, dtype: torch.dtype) -> None:
        tensor = torch.ones(3, 2).to(dtype)
        array = numpy_view(tensor)
        assert array.dtype == numpy_dtype(dtype) and array.dtype.itemsize == dtype.itemsize
        assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        array[1] = 0
        assert tensor[1].tolist() == [0, 0] and numpy_view(tensor[0]).shape == (2,)
        assert numpy_dtype(torch.bfloat16) == np.uint16
