"""Locked composites keep their entries."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import (
    Binary,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from gleanrl.data.specs.mapping import Changes
from gleanrl.errors import UnsupportedError
from tests.data.specs.cases import plain, stacked
from tests.fakes_base import CountingEnv


@pytest.fixture(params=[plain, stacked])
def spec(request):
    return request.param()


def test_locking(spec):
    assert not spec.is_locked and spec.lock_() is spec and spec.is_locked and spec["a"].is_locked
    for change in (
        lambda: spec.set("z", None),
        lambda: spec.set(("a", "z"), None),
        lambda: spec.set(("new", "z"), None),
        lambda: spec.pop("x"),
        lambda: spec.update({"a": {"z": None}}),
        lambda: spec["a"].set("z", None),
        lambda: spec.__delitem__(("a", "b")),
    ):
        with pytest.raises(UnsupportedError, match="locked"):
            change()
    assert list(spec.keys(True)) == ["x", "y", "a", ("a", "b"), ("a", "c")]
    copy = spec.clone()
    assert copy == spec and not copy.is_locked
    assert spec.unlock_() is spec and not spec.is_locked
    spec["a", "z"] = None
    assert ("a", "z") in spec


def test_a_part_is_not_unlocked_alone():
    spec = plain().lock_()
    with pytest.raises(UnsupportedError, match="unlock that one"):
        spec["a"].unlock_()
    spec.unlock_()["a"].lock_().unlock_()
    assert not spec["a"].is_locked


def test_locks_of_one_level():
    spec = plain().lock_(recurse=False)
    assert spec.is_locked and spec.locked and not spec["a"].is_locked and not spec.is_fixed
    spec["a", "b"].clone()
    spec["a"]["new"] = Unbounded((2,))
    with pytest.raises(UnsupportedError, match="locked"):
        spec["new"] = Unbounded((2,))
    assert spec.lock_().is_fixed
    spec.unlock_(recurse=False)
    assert not spec.locked and spec["a"].locked


@pytest.mark.parametrize(
    "spec",
    [Categorical(2), OneHot(2), MultiCategorical([2]), MultiOneHot([2]), Binary(1)],
    ids=lambda spec: type(spec).__name__,
)
def test_mask_of_each_encoding_is_noted(spec):
    before = Changes.latest
    spec.update_mask(torch.tensor([True, False]))
    assert Changes.latest is not before
    before = Changes.latest
    spec.update_mask(None)
    assert Changes.latest is not before


def test_exchanged_entry_of_a_composite_is_noted():
    spec, other = Composite(a=Categorical(2), b=Composite(c=Categorical(2))), OneHot(2)
    for key in ("a", ("b", "c")):
        before = Changes.latest
        spec[key] = other
        assert Changes.latest is not before


def test_exchanged_spec_of_an_environment_is_noted():
    env = CountingEnv()
    spec = env.full_action_spec.clone()
    before = Changes.latest
    env.action_spec = spec
    assert Changes.latest is not before


def test_steps_of_an_environment_without_masks_note_nothing():
    env = CountingEnv()
    root = env.rand_step(env.reset())
    before = Changes.latest
    env.rand_step(env.maybe_reset(env.step_mdp(root)))
    assert Changes.latest is before
