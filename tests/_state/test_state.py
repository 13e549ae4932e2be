"""States are plain values, and their readers name each value that doesn't fit."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from gleanrl._state.state import Stateful, StateReader, plain
from gleanrl.errors import SchemaError


class Place(NamedTuple):
    position: int
    order: torch.Tensor | None


@dataclass(frozen=True)
class Whole:
    name: str
    place: Place
    more: tuple[Place, ...]


class Walker(Stateful[Place]):
    def __init__(self) -> None:
        self.place = Place(0, torch.arange(3))

    def snapshot(self) -> Place:
        return self.place

    def parse(self, state: Any) -> Place:
        reader = StateReader(state, "Walker")
        return Place(reader.integer("position", 0, 3), reader.tensor("order", torch.int64, (3,)))

    def adopt(self, value: Place) -> None:
        self.place = value


def test_plain_values_own_their_tensors_and_pass_a_strict_load():
    order = torch.arange(2)
    state = plain(Whole("a", Place(1, order), (Place(2, None),)))
    order[0] = 7
    assert state == {
        "name": "a",
        "place": {"position": 1, "order": state["place"]["order"]},
        "more": [{"position": 2, "order": None}],
    }
    assert state["place"]["order"].tolist() == [0, 1]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["place"]["position"] == 1


def test_saved_state_is_loaded_as_a_copy():
    walker, other = Walker(), Walker()
    walker.place = Place(2, torch.tensor([2, 0, 1]))
    state = walker.state_dict()
    other.load_state_dict(state)
    state["order"][0] = 9
    assert other.place.position == 2
    assert other.place.order is not None and other.place.order.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 4}, r"'position' of Walker: expected an integer in \[0, 3\], got 4"),
        ({"position": True}, "'position' of Walker: expected an integer"),
        (
            {"order": torch.arange(2)},
            r"'order' of Walker: expected a tensor \(3\) torch.int64, got a tensor \(2,\)",
        ),
        ({"order": torch.zeros(3)}, "got a tensor .* torch.float32"),
        ({"order": None}, "'order' of Walker"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_changes(change: Mapping[str, Any], message: str):
    walker = Walker()
    before = walker.place
    with pytest.raises(SchemaError, match=message):
        walker.load_state_dict({**walker.state_dict(), **change})
    assert walker.place is before


def test_missing_fields_and_invalid_states_are_named():
    with pytest.raises(SchemaError, match="the state of Walker, 'order' is missing"):
        Walker().load_state_dict({"position": 0})
    with pytest.raises(SchemaError, match="the state of Walker, got list"):
        Walker().load_state_dict([])  # type: ignore[arg-type]


def test_readers_return_numbers_flags_texts_and_parts():
    state = {
        "x": 1.5,
        "inf": float("inf"),
        "on": True,
        "name": "a",
        "part": {"n": 1},
        "parts": [{"n": 2}],
        "none": None,
    }
    reader = StateReader(state, "a thing")
    assert reader.number("x", 0.0) == 1.5 and reader.flag("on") is True and reader.text("name") == "a"
    assert reader.part("part").integer("n") == 1
    assert [part.integer("n") for part in reader.parts("parts", 1)] == [2]
    assert reader.optional("none", reader.integer) is None and reader.optional("x", reader.number) == 1.5
    assert "x" in reader and "y" not in reader
    for call, message in (
        (lambda: reader.number("inf"), "a finite number"),
        (lambda: reader.number("x", 2.0), "of 2.0 or more"),
        (lambda: reader.flag("x"), "True or False"),
        (lambda: reader.text("x"), "a string"),
        (lambda: reader.part("x"), "the state of a part"),
        (lambda: reader.parts("parts", 2), "a list of 2 states"),
        (lambda: reader.part("part").text("n"), "'n' of 'part' of a thing"),
    ):
        with pytest.raises(SchemaError, match=message):
            call()
