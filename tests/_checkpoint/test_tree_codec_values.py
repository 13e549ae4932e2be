"""Values are encoded as JSON and arrays, and decoded to equal values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl._checkpoint.row_segments import Array
from gleanrl._checkpoint.tree_codec import Decoder, Encoder, dtype_name
from gleanrl.errors import CheckpointError, CorruptCheckpointError


def there_and_back(value: Any) -> Any:
    arrays: list[Array] = []

    def store(data: Array) -> int:
        arrays.append(data.copy())
        return len(arrays) - 1

    tree = json.loads(json.dumps(Encoder(store).tree(value), allow_nan=False))
    return Decoder(lambda number, size: arrays[number]).value(tree)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float):
        return type(b) is float and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


NAMES = st.text(max_size=5) | st.sampled_from(["$tensor", "$map", "$"])
KEYS = NAMES | st.integers(-5, 5) | st.tuples(st.text(max_size=3))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(torch.tensor, st.lists(st.integers(-9, 9), max_size=4))
    | st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.Size([2, 3]), torch.Size([])])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_survive_a_round_trip(value: Any) -> None:
    assert same(value, there_and_back(value))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
    ],
)
def test_tensors_of_any_kind_survive_a_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    assert same(tensor, there_and_back(tensor))
    if tensor.ndim == 2:
        assert same(tensor.T, there_and_back(tensor.T))


def test_bits_of_floats_are_kept() -> None:
    bits = torch.tensor([0x7FC00001, 0x7FC00002, -0x80000000], dtype=torch.int64).to(torch.int32)
    assert torch.equal(there_and_back(bits.view(torch.float32)).view(torch.int32), bits)


def test_tensordicts_survive_a_round_trip() -> None:
    td = TensorDict(
        {"a": torch.ones(2, 3), "b": TensorDict({"c": torch.zeros(2, 3, 1)}, [2, 3])}, [2], names=["time"]
    )
    back = there_and_back([td])[0]
    assert (back == td).all() and back.batch_size == td.batch_size and back["b"].batch_size == (2, 3)
    assert back.names == ["time"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "state: a object"),
        ({"a": [1, {2}]}, r"state\['a'\]\[1\]: a set"),
        (2**63, "64 bits"),
        (lambda: 1, "a function"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_unsupported_values_are_named(value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Encoder(len).tree(value)


def test_nesting_depth_is_limited_on_write_and_read() -> None:
    deep: Any = 1
    for _ in range(63):
        deep = [deep]
    assert there_and_back(deep) == deep
    with pytest.raises(CheckpointError, match="nested"):
        Encoder(len).tree([[deep]])
    with pytest.raises(CorruptCheckpointError, match="nested"):
        Decoder(lambda number, size: None).value([[deep]])  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "tree",
    [
        {"$evil": "os.system"},
        {"$float": "1e5"},
        {"$dtype": "object"},
        {"$device": 3},
        {"$size": [-1]},
        {"$size": [True]},
        {"$bytes": "?"},
        {"$map": [[1, 2], [1, 3]]},
        {"$map": [1]},
        {"$map": [[[1], 2]]},
        {"$tensor": 0, "dtype": "int64", "shape": [2**62, 2**62]},
        {"$tensor": 0, "dtype": "int64"},
        {"$tensordict": {}, "batch_size": [2]},
        {"$tensordict": [], "batch_size": [], "device": None, "names": None},
        {"$tuple": 3},
        {"$tuple": "ab"},
        {"$map": {"ab": 1}},
        {"$map": [[{"$float": "nan"}, 1]]},
        {"$device": "cpu", "more": 1},
        {"$device": "cpu", "$tuple": []},
        {"a": 1, "$device": "cpu"},
    ],
)
def test_broken_trees_are_refused(tree: Any) -> None:
    def fetch(number: Any, size: int) -> Any:
        raise CorruptCheckpointError(f"{size} bytes")

    with pytest.raises(CorruptCheckpointError):
        Decoder(fetch).value(tree)


def test_dtypes_have_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(CheckpointError, match="float8"):
        dtype_name(torch.float8_e4m3fn)
