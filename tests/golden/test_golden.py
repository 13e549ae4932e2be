"""States, checkpoints and pickles that an earlier version recorded load and continue identically."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import re
import warnings
from typing import Any

import pytest
import torch

from gleanrl.checkpoint import Checkpoint
from tests.golden.cases import BUFFERS, COLLECTORS, RESTARTED, collected, collector, continued
from tests.golden.objects import MADE, NOT_MADE, public_classes
from tests.golden.record import (
    EXPECTED,
    FOLDER,
    PICKLES,
    SAVED_TOGETHER,
    checkpoint_file,
    read_state,
    shown,
    unpacked,
)

LARGEST = 300_000
RECORDED = json.loads(EXPECTED.read_text())
OBJECTS: dict[str, tuple[bytes, str]] = pickle.loads(gzip.decompress(PICKLES.read_bytes()))
ONLY_RECENT = {
    "tictactoe": "torch.multinomial drew other numbers",
    "gleanrl.envs.BurnInTransform": "modules of tensordict printed a device",
    **dict.fromkeys(
        ("gleanrl.envs.GymEnv", "gleanrl.envs.GymWrapper", "gleanrl.envs.TransformedEnv"),
        "the pickle has arrays of NumPy 2",
    ),
}
"""Records that older releases of these packages read differently, with the reason."""


def cases(names: Any) -> list[Any]:
    is_older = torch.__version__ < (2, 13)
    marks = {name: pytest.mark.skipif(is_older, reason=reason) for name, reason in ONLY_RECENT.items()}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def same(found: Any, expected: Any) -> bool:
    """Return whether plain values are equal. Floats may differ by the rounding of other processors."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-5)
    return type(found) is type(expected) and found == expected


def as_json(values: Any) -> Any:
    return json.loads(json.dumps(values))


@pytest.mark.parametrize("name", cases(COLLECTORS))
@pytest.mark.filterwarnings("ignore:load_state_dict. 2 trajectories end:UserWarning")
def test_a_recorded_collector_continues_in_the_middle_of_its_episodes(name):
    made = collector(name)
    try:
        with warnings.catch_warnings(record=name not in RESTARTED) as heard:
            made.load_state_dict(read_state(name))
        assert not heard
        assert same(as_json(collected(name, made)), RECORDED["collectors"][name])
    finally:
        made.shutdown()


@pytest.mark.parametrize("name", BUFFERS)
def test_a_recorded_buffer_continues_with_the_same_samples(name, tmp_path):
    made = BUFFERS[name]()
    made.loads(unpacked(checkpoint_file(f"buffer_{name}"), tmp_path))
    assert same(as_json(continued(name, made)), RECORDED["buffers"][name])


@pytest.mark.parametrize(("name", "buffer_name"), SAVED_TOGETHER.items())
def test_a_recorded_checkpoint_restores_collector_and_buffer(name, buffer_name, tmp_path):
    made, buffer = collector(name), BUFFERS[buffer_name]()
    try:
        Checkpoint(collector=made, buffer=buffer).load(unpacked(checkpoint_file(name), tmp_path))
        assert same(as_json(collected(name, made)), RECORDED["collectors"][name])
        assert same(as_json(continued(buffer_name, buffer)), RECORDED["buffers"][buffer_name])
    finally:
        made.shutdown()


def without_modules(text: str) -> str:
    """Return a repr without the modules of its classes, which may have moved, and without its line breaks."""
    return re.sub(r"\s", "", re.sub(r"\bgleanrl\.(\w+\.)+", "", text))


@pytest.mark.parametrize("name", cases(OBJECTS))
def test_a_recorded_pickle_loads_as_the_class_of_that_name(name):
    content, text = OBJECTS[name]
    found = pickle.loads(content)
    assert type(found) is public_classes()[name]
    assert without_modules(shown(found)) == without_modules(text)


def test_all_public_classes_have_a_pickle_or_a_reason():
    excused = {kind for kinds in NOT_MADE.values() for kind in kinds}
    named = public_classes()
    assert sorted(name for name, kind in named.items() if kind not in MADE and kind not in excused) == []
    assert sorted(name for name, kind in named.items() if kind in MADE and name not in OBJECTS) == []
    assert not excused & set(MADE)


def test_records_are_small_and_complete():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LARGEST
    names = {*(f"states/{name}.pt.gz" for name in COLLECTORS), "pickles.gz", "expected.json"}
    names |= {
        f"checkpoints/{name}.tar.gz" for name in (*SAVED_TOGETHER, *(f"buffer_{name}" for name in BUFFERS))
    }
    assert {path.relative_to(FOLDER).as_posix() for path in files} == names


def test_the_comparison_notices_differences():
    value = {"a": [1.0, True, None, {"b": "nan"}]}
    assert same(value, value) and same({"a": [1.000001, True, None, {"b": "nan"}]}, value)
    for other in (
        [1.1, True, None, {"b": "nan"}],
        [1.0, 1, None, {"b": "nan"}],
        [1.0, True, None, {}],
        [1.0],
    ):
        assert not same({"a": other}, value)
    assert RECORDED["collectors"].keys() == COLLECTORS.keys() and not same(1, 1.0)
