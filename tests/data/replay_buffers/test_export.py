"""Exported files hold the records bit for bit, in the order of time, and other programs read them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gleanrl.data import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    from_hdf5,
    from_parquet,
)
from gleanrl.errors import DatasetError, EmptyBufferError, InvalidArgumentError, UnsupportedError


def steps(count: int, start: int = 0) -> TensorDict:
    """Return steps of trajectories of 7 steps, with leaves of many shapes and dtypes."""
    t = torch.arange(start, start + count)
    ended = (t % 7 == 6)[:, None]
    following = {
        "observation": t[:, None] + torch.tensor([1.0, 0.5]),
        "reward": t[:, None] / 3,
        "terminated": ended & (t[:, None] % 2 == 0),
        "truncated": ended & (t[:, None] % 2 == 1),
        "done": ended,
    }
    leaves = {
        "observation": t[:, None] + torch.tensor([0.0, -0.5]),
        "action": t * 2,
        "half": (t / 7).to(torch.bfloat16),
        "small": (t / 7).to(torch.float16)[:, None],
        "pair": torch.complex(t.float(), -t.float()),
        "image": (t[:, None, None, None] * torch.ones(2, 3, 4)).to(torch.uint8),
        "empty": torch.zeros(count, 0, dtype=torch.int32),
        "info": {"x": {"y": t.double() / 3}},
        "collector": {"traj_ids": t // 7},
    }
    return TensorDict({**leaves, "next": following}, [count])


def filled(capacity: int = 40, count: int = 50) -> ReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity))
    for start in range(0, count, 10):
        buffer.extend(steps(10, start))
    return buffer


def same_bits(got: Any, expected: Any) -> bool:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return (
        got.contiguous().numpy(force=True).tobytes() == expected.contiguous().numpy(force=True).tobytes()
        if (got.dtype != torch.bfloat16)
        else same_bits(got.view(torch.int16), expected.view(torch.int16))
    )


def assert_same(buffer: ReplayBuffer, expected: TensorDict) -> None:
    """Compare all columns; ids of a collector become free ids in the order of the trajectories."""
    got = buffer[:]
    assert {*got.keys(True, True)} == {*expected.keys(True, True)}
    for key in expected.keys(True, True):
        if key != ("collector", "traj_ids"):
            assert same_bits(got[key], expected[key]), key
    ids = expected["collector", "traj_ids"]
    assert torch.equal(got["collector", "traj_ids"], -2 - (ids - ids.min()))


def exported(buffer: ReplayBuffer, kind: str, path: Path) -> ReplayBuffer:
    if kind == "hdf5":
        pytest.importorskip("h5py")
        buffer.to_hdf5(path)
        return from_hdf5(path)
    pytest.importorskip("pyarrow")
    buffer.to_parquet(path)
    return from_parquet(path)


KINDS = ["hdf5", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [10, 40, 50])
def test_round_trip_is_bit_for_bit_in_the_order_of_time(tmp_path: Path, kind: str, count: int):
    buffer = filled(count=count)
    again = exported(buffer, kind, tmp_path / "a")
    newest = steps(min(count, 40), max(0, count - 40))
    assert_same(again, newest)
    # Free ids, and ids of a data set, stay.
    third = exported(again, kind, tmp_path / "b")
    assert (third[:] == again[:]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_float64_rewards_and_nan_keep_their_bits(tmp_path: Path, kind: str):
    data = steps(14)
    data["next", "reward"] = data["next", "reward"].double()
    data["info", "x", "y"][3] = float("nan")
    buffer = ReplayBuffer(storage=LazyTensorStorage(14))
    buffer.extend(data)
    assert_same(exported(buffer, kind, tmp_path / "a"), data)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_come_one_after_the_other_and_padding_is_left_out(tmp_path: Path, kind: str):
    first, second = steps(7, 0), steps(7, 7)
    data = torch.stack([first, second])
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    data["collector", "mask"] = mask
    buffer = ReplayBuffer(storage=LazyTensorStorage(14, ndim=2))
    buffer.extend(data)
    again = exported(buffer, kind, tmp_path / "a")
    assert again[:]["action"].tolist() == [*range(0, 14, 2), *range(14, 24, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_kept_and_other_objects_refused(tmp_path: Path, kind: str):
    data = steps(3)
    data["word"] = NonTensorStack("a", "", "äö")
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend(data)
    assert exported(buffer, kind, tmp_path / "a")[:]["word"] == ["a", "", "äö"]
    data["word"] = NonTensorStack("a", 3, "b")
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend(data)
    with pytest.raises(UnsupportedError, match="'word' expected tensors or strings, got objects of type int"):
        exported(buffer, kind, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_hdf5_file_has_the_names_of_d4rl(tmp_path: Path):
    h5py = pytest.importorskip("h5py")
    filled().to_hdf5(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert file["rewards"].shape == file["terminals"].shape == file["timeouts"].shape == (40,)
        assert file["terminals"].dtype == bool and file["infos/x/y"].dtype == np.float64
        assert np.array_equal(file["next_observations"][:-1, 0], file["observations"][1:, 0])
        assert file["collector/traj_ids"][0] == 1
    layout = {
        "observation": "observations",
        ("next", "terminated"): "terminals",
        ("next", "truncated"): "timeouts",
    }
    assert len(from_hdf5(tmp_path / "a.hdf5", layout)) == 40 - 7


def test_parquet_file_has_plain_columns(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    filled().to_parquet(tmp_path / "a")
    table = parquet.read_table(tmp_path / "a/part-00000.parquet")
    assert str(table.schema.field("observation").type) == "fixed_size_list<element: float>[2]"
    assert str(table.schema.field("next.reward").type) == "float" and table["action"][0].as_py() == 20
    with pytest.raises(InvalidArgumentError, match="which exists"):
        filled().to_parquet(tmp_path / "a")


def test_forged_descriptions_are_refused(tmp_path: Path):
    h5py = pytest.importorskip("h5py")
    filled().to_hdf5(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r") as file:
        right = json.loads(file.attrs["gleanrl"])
    for change, message in (
        ({"shape": [3]}, r"'actions': expected rows \(3,\) int64, got \(\) torch.int64"),
        ({"dtype": "save"}, "'actions': expected rows"),
        ({"dtype": 3}, "'actions': expected rows"),
        (None, "expected gleanrl's description"),
    ):
        columns = {
            **right["columns"],
            "actions": None if change is None else {**right["columns"]["actions"], **change},
        }
        with h5py.File(tmp_path / "a.hdf5", "a") as file:
            file.attrs["gleanrl"] = json.dumps({**right, "columns": columns})
        with pytest.raises(DatasetError, match=message):
            from_hdf5(tmp_path / "a.hdf5")


def test_safetensors_file_holds_every_column(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    buffer = filled()
    buffer.to_safetensors(path)
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    expected, body = steps(40, 10), content[8 + size :]
    for key in expected.keys(True, True):
        name = key if isinstance(key, str) else ".".join(key)
        begin, end = header[name]["data_offsets"]
        leaf = expected[key].contiguous()
        bits = leaf.view(torch.int16) if leaf.dtype == torch.bfloat16 else leaf
        assert header[name]["shape"] == [*leaf.shape] and body[begin:end] == bits.numpy().tobytes(), name
    assert len(body) == max(header[name]["data_offsets"][1] for name in header if name != "__metadata__")
    load = pytest.importorskip("safetensors.torch")
    for name, tensor in load.load_file(path).items():
        assert same_bits(tensor, expected[tuple(name.split("."))])


def test_data_frame_has_one_column_for_each_value():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(UnsupportedError, match="'half': pandas lacks torch.bfloat16"):
        filled().to_pandas()
    buffer = ReplayBuffer(storage=LazyTensorStorage(40))
    buffer.extend(steps(40, 10).exclude("half"))
    frame = buffer.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 40
    assert frame["observation.1"].tolist() == steps(40, 10)["observation"][:, 1].tolist()
    assert frame["image.1.2.3"].dtype == np.uint8 and frame["next.reward"].dtype == np.float32
    assert frame["action"].tolist() == [*range(20, 100, 2)]


@pytest.mark.parametrize("call", ["to_hdf5", "to_parquet", "to_safetensors"])
def test_buffers_without_columns_or_records_are_refused(tmp_path: Path, call: str):
    pytest.importorskip({"to_hdf5": "h5py", "to_parquet": "pyarrow"}.get(call, "torch"))
    with pytest.raises(EmptyBufferError, match=call):
        getattr(ReplayBuffer(storage=LazyTensorStorage(3)), call)(tmp_path / "a")
    listed = ReplayBuffer(storage=ListStorage(3))
    listed.add(torch.zeros(1))
    with pytest.raises(UnsupportedError, match=f"{call}: expected a storage with columns"):
        getattr(listed, call)(tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["to_hdf5", "to_safetensors", "to_parquet"])
def test_interrupted_export_leaves_the_earlier_file_or_nothing(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip({"to_hdf5": "h5py", "to_parquet": "pyarrow"}.get(call, "torch"))
    path = tmp_path / "a"
    if call != "to_parquet":
        getattr(filled(count=20), call)(path)
    before = path.read_bytes() if path.exists() else None
    (tmp_path / f"a.tmp-{'0' * 32}").touch()  # the draft of a process that was killed
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as stop:
        stop.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        getattr(filled(), call)(path)
    if before is None:
        assert not path.exists() and len(os.listdir(tmp_path)) == 1
    else:
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["a"]
