"""HDF5 files of states restore every dtype. Links, other contents and changed bytes are refused."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from gleanrl._checkpoint import hdf5
from gleanrl._checkpoint.hdf5 import decoded, write
from gleanrl._checkpoint.tree_codec import ArrayPieces
from gleanrl.errors import CheckpointError, CorruptCheckpointError

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def encoded(state: Any, columns: Any, options: Any) -> np.ndarray[Any, Any]:
    file = io.BytesIO()
    write(file, state, columns, options)
    return np.frombuffer(file.getvalue(), np.uint8)


@pytest.mark.parametrize("options", [{}, {"compression": "lzf", "fletcher32": True}])
def test_states_and_columns_come_back(options: dict[str, Any]) -> None:
    columns = {f"group/{dtype}": torch.randint(0, 2, (4, 3)).to(dtype) for dtype in DTYPES}
    columns |= {"empty": torch.empty(0, 2), "nan": torch.tensor([0x7FC0_1234]).int().view(torch.float32)}
    state, found = decoded(encoded({"a": torch.arange(3), "b": [1, (2.5, None)]}, columns, options))
    assert torch.equal(state["a"], torch.arange(3)) and state["b"] == [1, (2.5, None)]
    for name, column in columns.items():
        assert found[name].dtype is column.dtype and found[name].shape == column.shape
        assert (
            found[name].numpy(force=True).tobytes() == column.numpy().tobytes()
            if column.dtype not in (torch.bfloat16,)
            else torch.equal(found[name], column)
        )


def test_files_are_flushed_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(io.BytesIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    monkeypatch.setattr(hdf5, "LARGE_BYTES", 1_000)
    made = ArrayPieces(torch.uint8, (5_000,), lambda start, stop: np.ones((stop - start, 1), np.uint8))
    for column in (made, made.tensor()):
        file = Counting()
        write(file, {}, {"x": column}, {})
        parts = (len(file.getvalue()) - 512) // 1_000  # parts that are read for the hash
        assert file.flushed >= 5 + parts >= 10


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"chunks": (7, 3)}])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_arrays_made_in_pieces_are_restored(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(hdf5, "LARGE_BYTES", 100)
    column = torch.randint(0, 2, (1_000, 3)).to(dtype)
    data = column.view(torch.uint8).numpy().reshape(1_000, -1)
    made = ArrayPieces(dtype, (1_000, 3), lambda start, stop: data[start:stop].copy())
    files = [encoded({"a": value}, {"x": value}, options) for value in (made, column)]
    for state, found in map(decoded, files):
        assert torch.equal(state["a"], column) and torch.equal(found["x"], column)


def test_unsupported_values_are_refused() -> None:
    with pytest.raises(CheckpointError, match="object"):
        encoded({"a": object()}, {}, {})


def changed(change: Callable[[Any], None]) -> np.ndarray[Any, Any]:
    """Return a file that an attacker changed before he computed a matching hash."""
    file = io.BytesIO(encoded({"a": 1}, {"x": torch.arange(4)}, {}).tobytes())
    with h5py.File(file, "r+") as root:
        change(root)
    data = bytearray(file.getvalue())
    head = b"gleanrl h5 sha256 " + hashlib.sha256(data[512:]).hexdigest().encode() + b"\n"
    data[: len(head)] = head
    return np.frombuffer(bytes(data), np.uint8)


def replaced(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        del root["records/x"]
        make(root["records"])

    return change


def virtual(group: Any) -> None:
    layout = h5py.VirtualLayout((4,), np.int64)
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (4,))
    group.create_virtual_dataset("x", layout)


CHANGES: dict[str, Callable[[Any], None]] = {
    "missing": replaced(lambda group: None),
    "external link": replaced(lambda group: group.__setitem__("x", h5py.ExternalLink("/etc/passwd", "/x"))),
    "soft link": replaced(lambda group: group.__setitem__("x", h5py.SoftLink("/state/tree"))),
    "external data": replaced(
        lambda group: group.create_dataset("x", (4,), "i8", external=[("/etc/passwd", 0, 32)])
    ),
    "virtual": replaced(virtual),
    "dtype": replaced(lambda group: group.create_dataset("x", data=np.zeros(4))),
    "shape": replaced(lambda group: group.create_dataset("x", data=np.zeros(5, np.int64))),
    "nothing stored": replaced(lambda group: group.create_dataset("x", (4,), "i8")),
    "a group": replaced(lambda group: group.create_group("x")),
    "tree": lambda root: root["state/tree"].__setitem__(slice(0, 4), 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_links_and_changed_structures_are_refused(change: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        decoded(changed(CHANGES[change]))


def test_other_files_are_refused(tmp_path: Path) -> None:
    assert decoded(changed(lambda root: None))[1]["x"].tolist() == [0, 1, 2, 3]
    for data in (b"", b"x" * 600, changed(lambda root: None).tobytes().replace(b"\0", b"x", 1)):
        with pytest.raises(CorruptCheckpointError, match="hash"):
            decoded(np.frombuffer(data, np.uint8))
