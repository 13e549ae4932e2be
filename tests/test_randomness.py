"""The random generators of the process."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.errors import SchemaError
from gleanrl.randomness import GENERATORS


def draws() -> tuple[Any, ...]:
    return random.gauss(0, 1), np.random.normal(), np.random.uniform(), float(torch.rand(())), random.random()


@pytest.fixture(autouse=True)
def as_before() -> Any:
    with GENERATORS.kept():
        yield


def test_all_go_on_from_a_saved_state() -> None:
    random.gauss(0, 1), np.random.normal()  # one more waits in each
    file = io.BytesIO()
    torch.save(GENERATORS.state_dict(), file)
    file.seek(0)
    expected = draws()
    GENERATORS.load_state_dict(torch.load(file, weights_only=True))
    assert draws() == expected


def test_a_block_leaves_no_trace() -> None:
    with GENERATORS.kept():
        expected = draws()
    assert draws() == expected


@pytest.mark.parametrize(
    ("name", "value"), [("torch", torch.zeros(3)), ("numpy", 3), ("python", (1, 2)), ("cuda", 1)]
)
def test_a_broken_state_changes_nothing(name: str, value: Any) -> None:
    state = GENERATORS.state_dict()
    with pytest.raises(SchemaError):
        GENERATORS.load_state_dict({**state, name: value})
    assert GENERATORS.state_dict()["torch"].equal(state["torch"])
