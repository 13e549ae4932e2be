"""Plain values are read back as attributes of objects."""

from __future__ import annotations

import ast
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl._state.attribute_kinds import saved
from gleanrl._state.attributes import adopt, parse
from gleanrl._state.rng import OwnedGenerator
from gleanrl.errors import SchemaError

Pair = namedtuple("Pair", "left right")


class Colour(Enum):
    RED = 1
    BLUE = 2


class Thing:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Counting:
    """Provides its own state; its unreadable attribute isn't part of it."""

    def __init__(self) -> None:
        self.n, self.hidden = 0, iter([])

    def get_state(self) -> Any:
        return {"n": np.int64(self.n)}

    def set_state(self, state: Any) -> None:
        self.n = int(state["n"])


VALUES = [
    *(None, True, 3, -(2**70), 0.1, float("inf"), "text", b"bytes", bytearray(b"x"), 1 + 2j, ...),
    *([1, [2]], (1, (2,)), {1, 2}, frozenset("a"), {"a": {2: 3}}, OrderedDict(b=1), Counter("aab")),
    *(deque([1], 3), Pair(1, [2]), MappingProxyType({"a": 1}), torch.Size((2, 3)), Colour.BLUE),
    *(np.float32(0.1), np.bool_(True), np.str_("ab"), np.dtype("f4"), torch.int8, len, int, range(2)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_survive_a_round_trip(value: Any) -> None:
    source, target = Thing(value=value), Thing(value=Colour.RED if value is Colour.BLUE else value)
    adopt(target, saved(source))
    assert target.value == value and type(target.value) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3), np.float32)),
        np.array(3.0),
        np.zeros((0, 2), bool),
        np.array([["ab", "c"]]),
        np.array([b"a"]),
        np.array([None, (1, 2)], dtype=object),
        np.arange(6)[::-2],
    ],
    ids=repr,
)
def test_arrays_keep_their_memory_order(array: Any) -> None:
    target = Thing(array=None)
    adopt(target, saved(Thing(array=array)))
    found = target.array
    assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
    assert found.flags.f_contiguous == array.flags.f_contiguous or array.strides[0] < 0


@pytest.mark.parametrize(
    "text", ["0f8,", "0", "(2,)U2", "<f4", "V4", "O", "U2,U2", "<U", "<U2\n", "<U9999999999"]
)
def test_dtypes_that_arent_of_text_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved(Thing(array=np.array(["ab", "c"])))
    (node,) = (node for node in nodes_in(state) if node.get("text"))
    node["text"] = text
    compiled: list[Any] = []  # the texts that NumPy would compile as Python source
    monkeypatch.setattr(ast, "parse", lambda *a, **k: compiled.append(a))
    with pytest.raises(SchemaError, match="expected NumPy's name of a dtype of text"):
        adopt(Thing(array=None), state)
    assert not compiled


def nodes_in(state: Any) -> list[dict[str, Any]]:
    """Return all mappings in a state."""
    found, ahead = [], [state]
    while ahead:
        part = ahead.pop()
        if isinstance(part, dict):
            found.append(part)
        ahead += part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else []
    return found


def test_shared_and_recursive_values_stay_shared() -> None:
    shared = np.zeros(2)
    source = Thing(a=shared, b=[shared], c=[])
    source.c.append(source.c)
    target = Thing()
    adopt(target, saved(source))
    target.a[0] = 5
    assert target.b[0][0] == 5 and target.c[0] is target.c and source.a[0] == 0


def test_attributes_missing_in_the_state_are_removed() -> None:
    target = Thing(n=1, extra=2)
    adopt(target, saved(Thing(n=3)))
    assert vars(target) == {"n": 3}


def test_attributes_to_leave_out_keep_their_values_under_a_state_that_has_them() -> None:
    source, target = Thing(number=1, text="earlier"), Thing(number=2, text=None)
    adopt(target, saved(source), {Thing: ("text",)})
    assert vars(target) == {"number": 1, "text": None}


def test_parameters_keep_their_identity() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    weight = target.weight
    adopt(target, saved(source))
    assert target.weight is weight and weight.equal(source.weight)


def test_parts_and_objects_with_hooks_load_their_own_state() -> None:
    source, target = (
        Thing(part=OwnedGenerator(1), own=Counting()),
        Thing(part=OwnedGenerator(2), own=Counting()),
    )
    source.part.integers(5, 3)
    source.own.n = 7
    adopt(target, saved(source))
    assert target.own.n == 7 and target.part.integers(99, 5).equal(source.part.integers(99, 5))


def test_bound_methods_refer_to_the_present_objects() -> None:
    def made(n: int) -> Thing:
        thing = Thing(own=Counting())
        thing.own.n = n
        thing.call = thing.own.get_state
        return thing

    target = made(1)
    adopt(target, saved(made(5)))
    assert target.call() == {"n": 5}


def test_default_factories_are_kept() -> None:
    target = Thing(d=defaultdict(list))
    adopt(target, saved(Thing(d=defaultdict(list, a=[1]))))
    assert target.d["a"] == [1] and target.d["b"] == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Thing(inner=Thing()), Thing(inner=None)),
        (Thing(inner=Thing()), Thing(inner=Counting())),
        (Thing(f=len), Thing(f=max)),
        (Thing(f=Counting().get_state), Thing(f=Counting().__init__)),
        (Thing(p=Pair(1, 2)), Thing(p=None)),
        (Thing(m=nn.Linear(2, 2)), Thing(m=nn.Linear(2, 3))),
        (Thing(d=defaultdict(list)), Thing(d={})),
        (Thing(), Counting()),
    ],
)
def test_state_of_another_object_changes_nothing(source: Any, target: Any) -> None:
    before = dict(vars(target))
    with pytest.raises(SchemaError):
        adopt(target, saved(source))
    assert vars(target) == before


class Simulator:
    """Has class attributes and methods."""

    gravity = 9.8
    viewer: Any = None

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def step(self) -> None:
        pass


BEFORE = {
    **{
        "n": 3,
        "x": 0.5,
        "name": "cart",
        "state": (0.1, 0.2),
        "frames": [np.zeros(2)],
        "rng": random.Random(1),
    },
    **{"ages": {"a": 1}, "mark": {1, 2}, "inner": Thing(), "call": len, "last": None, "data": np.zeros(2)},
    **{"tensor": torch.zeros(2), "label": np.array(["a"]), "history": deque([1.0], 3)},
}


@pytest.mark.parametrize(
    "forged",
    [
        *(
            {"n": "x"},
            {"n": [3]},
            {"n": {}},
            {"x": b"x"},
            {"x": np.array(["x"])},
            {"name": 3},
            {"name": ["cart"]},
        ),
        *({"state": "ab"}, {"state": ("a", "b")}, {"state": {}}, {"frames": np.zeros(1)}, {"frames": ["x"]}),
        *(
            {"rng": 3},
            {"rng": np.random.default_rng(1)},
            {"ages": {"a": "x"}},
            {"ages": {1: 1}},
            {"ages": []},
        ),
        *(
            {"ages": Counter("a")},
            {"mark": [1, 2]},
            {"inner": None},
            {"inner": 3},
            {"call": None},
            {"call": "len"},
        ),
        *({"data": "x"}, {"data": np.array(["x"])}, {"data": np.array([None])}, {"tensor": np.zeros(2)}),
        *({"label": np.zeros(1)}, {"history": [1.0]}, {"step": 3}, {"step": None}, {"gravity": "x"}),
        {"__class__": "x"},
    ],
    ids=lambda forged: f"{[*forged][0]}-{type([*forged.values()][0]).__name__}",
)
def test_values_keep_their_kinds(forged: dict[str, Any]) -> None:
    """One attribute of another kind leaves all attributes unchanged, and the error names it."""
    target = Simulator(**BEFORE)
    (name,) = forged
    state = saved(Simulator(**BEFORE | {"name": "other"}))
    attributes, added = state["nodes"][0]["attributes"], saved(Thing(**forged))["nodes"]
    attributes[name] = moved(added[0]["attributes"][name], len(state["nodes"]))
    state["nodes"] += moved(added, len(state["nodes"]))
    with pytest.raises(SchemaError, match=f"Simulator.{name}"):
        adopt(target, state)
    assert vars(target) == BEFORE


def moved(value: Any, by: int) -> Any:
    """Return a part of a state with each node reference increased by `by`."""
    if isinstance(value, dict):
        return {key: v + by if key == "node" else moved(v, by) for key, v in value.items()}
    return [moved(v, by) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["inner", "call"])
def test_missing_objects_and_functions_are_refused(name: str) -> None:
    target = Simulator(**BEFORE)
    state = saved(Simulator(**{key: value for key, value in BEFORE.items() if key != name}))
    with pytest.raises(SchemaError, match=f"Simulator.{name}: expected .*, the state has nothing"):
        adopt(target, state)
    assert vars(target) == BEFORE


@pytest.mark.parametrize(
    "later",
    [
        *({"n": 3.5}, {"n": np.float32(1)}, {"x": torch.zeros(2)}, {"x": np.zeros(2)}, {"x": 1}, {"x": None}),
        *({"state": np.zeros(2)}, {"state": [0.5]}, {"state": None}, {"data": (0.5, 1)}, {"frames": []}),
        *({"last": "x"}, {"last": np.zeros(2)}, {"last": [1, "x"]}, {"rng": None}, {"ages": {"b": 2}}),
        *({"gravity": 1}, {"viewer": "x"}, {"more": 3}, {"data": np.zeros((3, 3), bool)}),
    ],
    ids=repr,
)
def test_values_of_later_program_states_are_accepted(later: dict[str, Any]) -> None:
    target, (name,) = Simulator(**BEFORE), later
    adopt(target, saved(Simulator(**BEFORE | later)))
    assert repr(getattr(target, name)) == repr(later[name])


@pytest.mark.parametrize(
    "forged",
    [
        {"shape": (4,)},
        {"n": 4},
        {"n": None},
        {"low": np.zeros(4)},
        {"low": np.zeros(3, int)},
        {"name": "x"},
        {},
    ],
    ids=repr,
)
def test_settled_objects_keep_their_shapes_and_numbers(forged: dict[str, Any]) -> None:
    """Their array values change. Of other attributes, only one that was None may change."""
    there = {"shape": (3,), "n": 3, "low": np.zeros(3), "name": "box", "last": None}
    source = Simulator(space=Thing(**there | {"low": np.ones(3), "last": 5}))
    target = Simulator(space=Thing(**there))
    adopt(target, saved(source), settled=(Thing,))
    assert target.space.low.all() and target.space.last == 5
    vars(source.space).update(forged) if forged else source.space.__dict__.pop("low")
    before = dict(vars(target.space))
    with pytest.raises(SchemaError, match=f"Simulator.space.{next(iter(forged), 'low')}"):
        adopt(target, saved(source), settled=(Thing,))
    assert vars(target.space) == before


def test_swapped_functions_are_refused() -> None:
    state = saved(Thing(f=len, g=max))
    attributes = state["nodes"][0]["attributes"]
    attributes["g"] = attributes["f"]
    with pytest.raises(SchemaError, match="Thing.g: expected .*, the state has builtins.len"):
        adopt(Thing(f=len, g=max), state)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"nodes": []},
        {"nodes": [{"kind": "constant", "is": "os.system"}]},
        {"nodes": [{"kind": "scalar", "data": torch.zeros(()), "text": "", "plain": False}]},
        {"nodes": [{"kind": "object", "class": "x", "attributes": {}}]},
        {"nodes": [{"kind": "exec"}]},
        {
            "nodes": [
                {"kind": "object", "class": f"{__name__}.Thing", "attributes": {"n": {"node": 1}}},
                {"kind": "scalar", "data": torch.zeros(2), "text": "", "plain": False},
            ]
        },
        {
            "nodes": [
                {"kind": "object", "class": f"{__name__}.Thing", "attributes": {"n": {"node": 1}}},
                {"kind": "tensor", "data": torch.zeros(2), "device": "meta"},
            ]
        },
    ],
)
def test_broken_states_are_refused(state: Any) -> None:
    with pytest.raises(SchemaError):
        parse(Thing(n=1), state)


def test_object_whose_hook_refuses_keeps_its_state() -> None:
    source, target = Thing(own=Counting()), Thing(own=Counting())
    target.own.n = 4
    state = saved(source)
    (mapping,) = [node for node in state["nodes"] if node["kind"] == "mapping"]
    mapping["pairs"] = []
    with pytest.raises(SchemaError, match="set_state"):
        adopt(target, state)
    state["nodes"][1]["state"] = "no mapping"
    with pytest.raises(SchemaError, match=r"own.get_state\(\): expected .*, the state has a builtins.str"):
        adopt(target, state)
    assert target.own.n == 4


@pytest.mark.parametrize("value", [{"a": 1}, [1], (1,), np.array([None, 1], object)], ids=repr)
def test_list_data_that_is_no_list_is_refused(value: Any) -> None:
    state = saved(Thing(value=value))
    (node,) = [node for node in state["nodes"] if "items" in node or "pairs" in node]
    node["items" if "items" in node else "pairs"] = TensorDict({}, [1 << 40])
    target = Thing(value=value)
    with pytest.raises(SchemaError, match="expected a list at"):
        adopt(target, state)
    assert target.value is value


@pytest.mark.parametrize("value", [np.array([None, 1], object), np.array(["x"])], ids=repr)
def test_shape_that_is_not_a_list_is_refused(value: Any) -> None:
    state = saved(Thing(value=value))
    (node,) = [node for node in state["nodes"] if "shape" in node]
    node["shape"] = TensorDict({}, [1 << 40])
    with pytest.raises(SchemaError, match="expected a list at 'shape'"):
        adopt(Thing(value=value), state)


def test_pair_that_is_no_list_is_refused() -> None:
    state = saved(Thing(value={"a": 1}))
    (node,) = [node for node in state["nodes"] if "pairs" in node]
    node["pairs"] = [TensorDict({}, [1 << 40])]
    with pytest.raises(SchemaError, match="expected a list at 0"):
        adopt(Thing(value={"a": 1}), state)
