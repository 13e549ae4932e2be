"""Loading a damaged or forged checkpoint raises a typed error, leaves the buffer unchanged, and has no other effect."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl import _util
from gleanrl._checkpoint import hdf5
from gleanrl._checkpoint.folder import Folder
from gleanrl._checkpoint.manifest import BLOCK_BYTES, MOST_BYTES
from gleanrl.data import H5StorageCheckpointer
from gleanrl.errors import CorruptCheckpointError, GleanError, IncompatibleCheckpointError
from tests._checkpoint.specimens import filled
from tests.chaos.drills import SHARE, SLACK, scaled
from tests.chaos.mutations import body_of, damage, flip_a_bit, signed, text_of, text_of_numbers

MUTATIONS, FLIPS = 100_000, 20_000


@pytest.mark.timeout(3600)
def test_mutated_checkpoints_are_refused_or_loaded(tmp_path: Path) -> None:
    mutations, flips, begin = scaled(MUTATIONS), scaled(FLIPS), time.monotonic()
    command = [
        sys.executable,
        "-m",
        "tests.chaos.hostile",
        str(tmp_path / "all"),
        f"{mutations}",
        f"{flips}",
        "11",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    print(f"{mutations} mutations, {flips} flips in {time.monotonic() - begin:.0f} s: {found}")
    assert not found["wrong"], (found["wrong"], done.stderr[-3000:])
    assert sum(found["outcomes"].values()) == mutations + flips
    assert {key for key in found["outcomes"] if key.startswith("flip")} == {
        "flip_a_bit: CorruptCheckpointError"
    }
    assert found["longest"] < SLACK


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mknod, (self._path,)


def zipped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """Return a forgery that replaces a file by another kind of file."""

    def forge(place: Path, marker: Path) -> None:
        (place / name).unlink()
        make(place / name)

    return forge


def told(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    """Return a forgery that changes the content of the manifest."""

    def forge(place: Path, marker: Path) -> None:
        path = place / "manifest.json"
        body = body_of({path.name: path.read_bytes()})
        change(body)
        path.write_bytes(signed(text_of(body)))

    return forge


def stored(name: str, make: Callable[[Any], bytes]) -> Callable[[Path, Path], None]:
    return lambda place, marker: (place / name).write_bytes(make(Touch(marker))) and None


def written(text: str) -> Callable[[Path, Path], None]:
    """Return a forgery with a manifest of this text."""
    return lambda place, marker: (place / "manifest.json").write_bytes(signed(text)) and None


def elsewhere(place: Path, marker: Path) -> None:
    moved = place.with_name("moved")
    place.rename(moved)
    place.symlink_to(moved)


def linked(path: Path) -> None:
    moved = path.with_name("moved")
    moved.write_bytes(b"{}")
    path.symlink_to(moved)


def array(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["state"]["_sampler"]["generator"]
    return found


def rows(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["state"]["_storage"]["packed"]["columns"]
    return found


HEAD = '{"sha256":"' + "0" * 64 + '"'
BIN, JSON = "000000.bin", "manifest.json"
PAYLOADS: dict[str, Callable[[Path, Path], None]] = {
    "pickle for a manifest": stored(JSON, pickle.dumps),
    "zip for a manifest": stored(JSON, zipped),
    "pickle for data": stored(BIN, pickle.dumps),
    "zip for data": stored(BIN, zipped),
    "manifest links away": replaced(JSON, linked),
    "data link away": replaced(BIN, linked),
    "data are a device": replaced(BIN, lambda path: path.symlink_to("/dev/zero")),
    "manifest is a device": replaced(JSON, lambda path: path.symlink_to("/dev/zero")),
    "data are a pipe": replaced(BIN, os.mkfifo),
    "manifest is a pipe": replaced(JSON, os.mkfifo),
    "data are a directory": replaced(BIN, Path.mkdir),
    "manifest without end": lambda place, marker: os.truncate(place / JSON, MOST_BYTES + 1),
    "checkpoint links away": elsewhere,
    "absolute name": told(lambda body: body["files"][0].update(name="/etc/passwd")),
    "name that leads out": told(lambda body: body["files"][0].update(name="../../../etc/passwd")),
    "name of zeros": told(lambda body: body["files"][0].update(name="000000.bin\0")),
    "huge shape": told(lambda body: array(body).update(shape=[2**62, 2**62])),
    "larger shape": told(lambda body: array(body).update(shape=[2**33])),
    "huge shape of nothing": told(lambda body: array(body).update(shape=[2**62, 0])),
    "huge number of rows": told(lambda body: rows(body).update(rows=2**62)),
    "huge number of segments": told(lambda body: rows(body).update(rows=2**62, step=1)),
    "rows in later segments": told(lambda body: rows(body).update({"$rows": rows(body)["$rows"] + 1})),
    "rows in segments of others": told(lambda body: body["state"].update(x=dict(rows(body)))),
    "huge rows": told(lambda body: rows(body)["fields"][1].__setitem__(1, [2**40])),
    "rows in no segments": told(lambda body: rows(body).update(step=0)),
    "rows elsewhere": told(lambda body: rows(body).update({"$rows": 2**40})),
    "huge file": told(lambda body: body["files"][0].update(size=2**62)),
    "huge extent": told(lambda body: body.update(extents=text_of_numbers(np.array([0, 0, 2**62])))),
    "extent elsewhere": told(lambda body: body.update(extents=text_of_numbers(np.array([2**40, 0, 8])))),
    "pickle for extents": told(
        lambda body: body.update(extents=base64.b64encode(pickle.dumps(print)).decode())
    ),
    "other kind": told(lambda body: body["state"].update(x={"$object": "os.system"})),
    "class by name": told(
        lambda body: body["state"]["_storage"]["packed"]["format"].update(classes=[[[], "subprocess:Popen"]])
    ),
    "form by name": told(lambda body: body["state"]["_storage"].update(form="os.system")),
    "two kinds": told(lambda body: body["state"].update(x={"$device": "cpu", "$object": "os.system"})),
    "deep": written(HEAD + ',"state":' + "[" * 500_000),
    "keys twice": written(
        HEAD + ',"format":1,"kind":"ReplayBuffer","kind":"x","files":[],"libraries":{},"state":{}}'
    ),
    "NaN": written(HEAD + ',"format":1,"kind":"ReplayBuffer","files":[],"libraries":{},"state":NaN}'),
    "NaN keys": told(
        lambda body: body["state"].update(x={"$map": [[{"$float": "nan"}, 1], [{"$float": "nan"}, 2]]})
    ),
    "long number": written(HEAD + ',"format":1' + "0" * 100_000 + "}"),
}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_known_payloads_are_refused(payload: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "run", tmp_path / "checkpoints"
    saved, target = filled("whole"), filled("whole")
    saved.dumps(path)
    (place,) = path.glob("ckpt-*")
    PAYLOADS[payload](place, marker)
    begin, before = time.monotonic(), target[:].clone()
    with pytest.raises((CorruptCheckpointError, GleanError)):
        target.loads(path)
    assert time.monotonic() - begin < SLACK and not marker.exists()
    assert (target[:] == before).all()


def test_files_are_cut_and_extended_at_every_edge_of_a_block(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    place = folder.commit("thing", {"a": torch.from_numpy(np.arange(2 * BLOCK_BYTES + 999, dtype=np.uint8))})
    for path in place.glob("*.bin"):
        data = path.read_bytes()
        edges = {edge + by for edge in (*range(0, len(data), BLOCK_BYTES), len(data)) for by in (-1, 0, 1)}
        for edge in sorted(edges - {-1, len(data)}):
            path.write_bytes(data[:edge] if edge < len(data) else data + bytes(edge - len(data)))
            with pytest.raises(
                CorruptCheckpointError, match=f"{path.name}: expected {len(data)} bytes, got {edge}"
            ):
                folder.load(verify=False)
            assert path.stat().st_size == edge
        path.write_bytes(data)
    folder.load()


def test_hdf5_sees_no_file_that_was_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, path, saved = H5StorageCheckpointer(), tmp_path / "records.h5", filled("h5")
    form.dumps(saved.storage, path)
    data = path.read_bytes()
    form.loads(saved.storage, path)

    def never() -> Any:
        raise AssertionError("HDF5 was asked to read it")

    monkeypatch.setattr(_util, "h5py", never)
    for number in range(max(200, round(20_000 * SHARE))):
        draw, files = random.Random(number), {path.name: data}
        (flip_a_bit if number % 2 else damage)(draw, files)
        if files.get(path.name) == data:
            continue
        damaged = files.get(path.name, b"")
        path.write_bytes(damaged)
        error: type[Exception] = CorruptCheckpointError
        words = "with a wrong hash"
        if hdf5.is_foreign(np.frombuffer(damaged, np.uint8)):  # both of the file's signatures are damaged
            error, words = IncompatibleCheckpointError, "another program wrote it"
        with pytest.raises(error, match=words):
            form.loads(saved.storage, path)
