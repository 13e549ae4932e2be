"""The JSON of checkpoints survives a round trip; the strict reader refuses input that Python's reader accepts."""

from __future__ import annotations

import pytest

from gleanrl._checkpoint import tree_codec
from gleanrl.errors import CorruptCheckpointError


def test_json_survives_a_round_trip() -> None:
    tree = {"a": [1, -(2**63), 2.5, None, True, "é\0"], "": {}}
    assert tree_codec.decoded(tree_codec.encoded(tree), "it") == tree
    with pytest.raises(ValueError, match="JSON"):
        tree_codec.encoded({"a": float("nan")})


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"",
        b"\xff",
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":-1e999}',
        b'{"a":9223372036854775808}',
        b'{"a":' + b"1" * 5_000 + b"}",
        b'{"a":' * 100_000,
        b'{"a":1} x',
    ],
)
def test_other_json_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="it: "):
        tree_codec.decoded(data, "it")
