"""Manifests decode completely or are refused."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._checkpoint import manifest as module
from gleanrl._checkpoint.manifest import BLOCK_BYTES, FORMAT, DataFile, Extent, Manifest, file_name
from gleanrl.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError

MADE = Manifest(
    "ReplayBuffer",
    {"a": [1, 2.5, None, "é"], "$map": []},
    (DataFile(file_name(0), BLOCK_BYTES + 40), DataFile(file_name(1), 0)),
    (Extent(0, 7, BLOCK_BYTES + 1, (5, 6)), Extent(0, 0, 7, (2**32 - 1,))),
    {"torch": "2"},
)


def signed(body: dict[str, Any]) -> bytes:
    """Return a manifest with a correct hash for any body."""
    text = json.dumps({"sha256": "0" * 64, **body}, separators=(",", ":")).encode()
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1)


def body(**changes: Any) -> dict[str, Any]:
    found = json.loads(MADE.encoded())
    del found["sha256"]
    return {**found, **changes}


def test_manifest_survives_a_round_trip() -> None:
    assert Manifest.decoded(MADE.encoded()) == MADE
    assert Manifest.decoded(signed(body())) == MADE


@given(st.integers(0, len(MADE.encoded()) - 1), st.integers(1, 255))
def test_no_byte_can_change(position: int, by: int) -> None:
    data = bytearray(MADE.encoded())
    data[position] ^= by
    with pytest.raises(CorruptCheckpointError):
        Manifest.decoded(bytes(data))


@pytest.mark.parametrize("length", range(0, len(MADE.encoded()), 7))
def test_nothing_can_be_cut_off(length: int) -> None:
    with pytest.raises(CorruptCheckpointError):
        Manifest.decoded(MADE.encoded()[:length])


def table(*numbers: int, dtype: str = "<i8") -> str:
    return b64encode(np.array(numbers, dtype)).decode()


TWICE = ((0, 0, 5, 0, 4, 2), (0, 0, 10, 0, 9, 1), (0, 3, 4, 0, 0, 10), (0, 0, 5, 0, 0, 5))
ONE = {"files": [{"name": "000000.bin", "size": 10}], "crc32": table(5, dtype="<u4")}


def test_manifest_with_one_or_no_extent_decodes() -> None:
    found = Manifest.decoded(signed(body(**ONE, extents=table(0, 2, 8))))
    assert found.extents == (Extent(0, 2, 8, (5,)),)
    assert len(Manifest.decoded(signed(body(files=[], extents="", crc32=""))).extents) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{"name": "../etc/passwd", "size": 1}]},
        {"files": [{"name": "000001.bin", "size": 1}]},
        {"files": [{"name": "../x.h5", "size": 1}]},
        {"files": [{"name": ".x.h5", "size": 1}]},
        {"files": [{"name": "x.h5", "size": 1}] * 2},
        {"files": [{"name": "000000.bin", "size": -1}]},
        {"files": [{"name": "000000.bin", "size": True}]},
        {"files": [{"name": "000000.bin", "size": "1"}]},
        {"files": [{"name": "000000.bin"}]},
        {"files": [3]},
        {"files": {}},
        {"extents": None},
        {"extents": [0, 0, 1]},
        {"extents": "é"},
        {"extents": "AAAA"},
        {"extents": table(0, 0)},
        *({**ONE, "extents": table(*numbers)} for numbers in ((1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1))),
        *({**ONE, "extents": table(*numbers)} for numbers in ((0, 0, 11), (0, 10, 1), (0, 2**62, 2**62))),
        *({**ONE, "extents": table(*numbers)} for numbers in ((0, 0, 0), (0, 11, 0), ())),
        *({**ONE, "extents": table(0, 0, 10), "crc32": table(*n, dtype="<u4")} for n in ((), (1, 2))),
        *({**ONE, "extents": table(*n), "crc32": table(1, 2, dtype="<u4")} for n in TWICE),
        {**ONE, "files": [{"name": "000000.bin", "size": 2**62}], "extents": table(0, 0, 2**62)},
        {"crc32": "AAA"},
        {"crc32": 5},
        {"libraries": []},
        {"kind": 3},
        {"format": "1"},
        {"format": -1},
    ],
)
def test_invalid_manifest_with_a_correct_hash_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        Manifest.decoded(signed(body(**changes)))


def test_a_later_format_is_named() -> None:
    with pytest.raises(IncompatibleCheckpointError, match=f"got {FORMAT + 1}: a later release"):
        Manifest.decoded(signed(body(format=FORMAT + 1)))


@pytest.mark.parametrize(
    "text",
    [
        b'{"sha256":"%s","a":1,"a":2}',
        b'{"sha256":"%s","a":NaN}',
        b'{"sha256":"%s","a":123456789012345678901234567890}',
        b'{"sha256":"%s"' + b',"a":[' * 100_000,
        b'{"sha256":"%s","a":"\xff"}',
        b'{"sha256":"%s"}',
    ],
)
def test_invalid_json_is_refused(text: bytes) -> None:
    text = text.replace(b"%s", b"0" * 64)
    data = text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1)
    with pytest.raises(CheckpointError):
        Manifest.decoded(data)


def test_overlong_manifest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    with pytest.raises(CorruptCheckpointError, match="more than 10 bytes"):
        Manifest.decoded(MADE.encoded())
