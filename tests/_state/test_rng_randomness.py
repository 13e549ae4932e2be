"""The process's random generators are saved and restored."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl._state.rng import GENERATORS, check_position
from gleanrl.errors import SchemaError


def draws() -> tuple[Any, ...]:
    return random.gauss(0, 1), np.random.normal(), np.random.uniform(), float(torch.rand(())), random.random()


@pytest.fixture(autouse=True)
def as_before() -> Any:
    with GENERATORS.preserved():
        yield


def test_all_generators_continue_from_a_saved_state() -> None:
    random.gauss(0, 1), np.random.normal()  # each generator now caches a second value
    file = io.BytesIO()
    torch.save(GENERATORS.state_dict(), file)
    file.seek(0)
    expected = draws()
    GENERATORS.load_state_dict(torch.load(file, weights_only=True))
    assert draws() == expected


def test_block_restores_all_generators() -> None:
    with GENERATORS.preserved():
        expected = draws()
    assert draws() == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch", torch.zeros(3)),
        ("numpy", 3),
        ("numpy", (torch.zeros(624, dtype=torch.int64), 10**6, 0, 0.0)),
        ("numpy", (torch.zeros(624, dtype=torch.int64), -5, 0, 0.0)),
        ("numpy", {"words": 1}),
        ("python", (1, 2)),
        ("python", {1: 2, 3: 4}),
        ("python", (torch.full((625,), -1), None)),
        ("cuda", 1),
    ],
)
def test_a_broken_state_changes_nothing(name: str, value: Any) -> None:
    state = GENERATORS.state_dict()
    with pytest.raises(SchemaError):
        GENERATORS.load_state_dict({**state, name: value})
    assert GENERATORS.state_dict()["torch"].equal(state["torch"])


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.Philox])
def test_numpy_position_out_of_range_is_refused(bits: Any) -> None:
    state = bits().state
    check_position(state)
    for wrong in (-1, 625):
        inside = {**state["state"], "pos": wrong} if bits is np.random.MT19937 else state["state"]
        with pytest.raises(ValueError, match="position"):
            check_position({**state, "state": inside, "buffer_pos": wrong})
