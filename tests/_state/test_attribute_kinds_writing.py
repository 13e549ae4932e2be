"""The attributes of objects are written as plain values."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl._state.attribute_kinds import saved
from gleanrl.errors import UnsupportedError


class Thing:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_state_passes_a_weights_only_load() -> None:
    thing = Thing(
        big=2**100, text="a", words=np.array(["ab", "c"]), numbers=(np.float32(2), {1, 2}), none=None
    )
    file = io.BytesIO()
    torch.save(saved(thing), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["nodes"]


def test_object_met_twice_is_one_node() -> None:
    inner = Thing(n=1)
    thing = Thing(one=inner, two=[inner, inner])
    inner.back = thing
    nodes = saved(thing)["nodes"]
    assert sum(node["kind"] == "object" for node in nodes) == 2


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (threading.Lock(), r"Thing\.inner\['a'\]\[1\]: a _thread.lock"),
        (iter([1]), "list_iterator"),
        ([].append, "builtin_function_or_method"),
        (torch.ones(1, requires_grad=True) * 2, "graph"),
        (np.array([1], "M8[s]"), "datetime64"),
    ],
)
def test_unsupported_value_is_refused_with_its_path(value: Any, where: str) -> None:
    with pytest.raises(UnsupportedError, match=where):
        saved(Thing(inner={"a": [1, value]}))


def test_arrays_that_share_memory_are_refused() -> None:
    whole = np.zeros(4)
    with pytest.raises(UnsupportedError, match=r"Thing\.\w+ and Thing\.\w+ share memory"):
        saved(Thing(whole=whole, part=whole[1:2]))
    assert saved(Thing(one=whole[:2], other=whole[2:]))
    assert saved(Thing(one=whole, same=whole))


def test_endless_chain_is_refused() -> None:
    thing = None
    for _ in range(5000):
        thing = Thing(following=thing)
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        saved(thing)


def test_attributes_can_be_left_out() -> None:
    thing = Thing(lock=threading.Lock(), inner=Thing(lock=threading.Lock()))
    assert saved(thing, {Thing: ("lock",)})
