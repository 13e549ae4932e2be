"""Calls of specs give the same results as TorchRL's (`make test-foreign`)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, is_tensor_collection, tensorclass

torchrl = pytest.importorskip("torchrl")

from torchrl.data import tensor_specs as theirs  # noqa: E402
from torchrl.data import utils  # noqa: E402

from gleanrl.data import from_torchrl  # noqa: E402
from gleanrl.data import tensor_specs as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


@tensorclass
class Data:
    a: torch.Tensor


def provisional(spec, n):
    spec.set_provisional_n(n)
    return spec


def masked(spec, mask):
    spec.update_mask(mask)
    return spec


def in_place(spec, value):
    spec.project(value)
    return value


def updated(spec, other):
    spec.update(other)
    return spec


def rest(spec, *keys):
    spec.separates(*keys)
    return spec


def shaped(spec, shape):
    spec.shape = shape
    return spec


def lowered(spec, low):
    spec.space.low = torch.full_like(spec.space.low, low)
    return spec


WITH = {
    **{f.__name__: f for f in (provisional, masked, in_place, updated, rest, shaped, lowered)},
    **{"np": np, "torch": torch, "tensor": torch.tensor, "int8": torch.int8, "copy": copy, "pickle": pickle},
    **{"TensorDict": TensorDict, "NonTensorData": NonTensorData, "Data": Data},
}
HELPERS = ("check_no_exclusive_keys", "consolidate_spec", "contains_lazy_spec")
THEIRS = {**vars(theirs), **{name: getattr(utils, name) for name in HELPERS}, **WITH}
OURS = {**{name: getattr(ours, name) for name in ours.__all__}, **WITH}


def plain(value):
    """Return a comparable form of a value; it is equal for equal values of both libraries."""
    if isinstance(value, (theirs.TensorSpec, ours.TensorSpec)):
        return from_torchrl(value)
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [plain(part) for part in value.unbind()]
        # TorchRL's `is_in` and `==` return tensors, gleanrl's return booleans.
        return value.item() if value.shape == () else (value.dtype, value.shape, value.tolist())
    if isinstance(value, NonTensorData):
        return value.data, value.batch_size
    if is_tensor_collection(value):
        return type(value).__name__, value.batch_size, {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def outcome(call, names):
    torch.manual_seed(0)
    try:
        return plain(eval(call, dict(names))), None
    except Exception as error:
        return None, error


# The intended differences.
DIFFERENT = {
    "each element of a vector of zeros and ones is free": [
        "Binary(3).cardinality()",
        "Binary(2).enumerate()",
    ],
    "integers between bounds can be counted": [
        "Bounded(0, 4, (), dtype=torch.int64).cardinality()",
        "Bounded(0, 4, (2,), dtype=torch.int64).cardinality()",
    ],
    "-1 in expand and reshape means what it means for tensors": [
        "Bounded(-1, 1, (1, 3)).expand(2, -1, 3)",
        "Composite(a=Unbounded((2, 3)), shape=(2,)).reshape(-1)",
    ],
    "a mask stays in the other encoding": [
        "Categorical(4, mask=tensor([True, False, True, True])).to_one_hot_spec().mask"
    ],
    "encode checks choices": ["Categorical(4).encode(5)"],
    "one choice gives one element, as TorchRL's documentation says": [
        "OneHot(3).index(tensor([False, True, False]), torch.arange(3.0))"
    ],
    "the spec of one choice has the shape of its values": ["MultiCategorical([2, 3])[0]"],
    "without bounds the ends are infinite": ["Unbounded((3,)).space.low"],
    "a class that is named is the class": [
        "UnboundedContinuous((3,), dtype=torch.uint8)",
        "UnboundedDiscrete((3,), dtype=torch.float32)",
    ],
    "empty with recurse: without leaves, as TorchRL's documentation says": [
        "Composite(a=Composite()).is_empty(recurse=True)"
    ],
    "a key that isn't there raises": ['Composite(a=Unbounded(3)).get("b")'],
}

TABLE = Path(__file__).with_name("spec_calls.txt").read_text()
LINES = [line for line in TABLE.splitlines() if not line.startswith("#")]
OTHERWISE = {call for calls in DIFFERENT.values() for call in calls}


@pytest.mark.parametrize("call", LINES)
def test_spec_calls_equal_torchrls(call):
    expected, refused = outcome(call, THEIRS)
    got, error = outcome(call, OURS)
    if refused is not None:  # programs can't rely on a refused call
        return
    same = error is None and got == expected
    assert same == (call not in OTHERWISE), f"theirs {expected!r}, ours {got!r} {error!r}"


def test_listed_differences_are_among_the_calls():
    assert set(LINES) >= OTHERWISE and len(set(LINES)) == len(LINES)
