"""The rule for the end of a trajectory in a batch agrees with a slow, plain oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from gleanrl.data.trajectories import step_mask, trajectory_ends
from gleanrl.errors import GleanError, InvalidTypeError, MissingKeyError, SchemaError


def flags(*values: int) -> torch.Tensor:
    """Return a bool tensor of `values`."""
    return torch.tensor(values, dtype=torch.bool)


def slow_ends(
    done: torch.Tensor, ids: torch.Tensor | None, mask: torch.Tensor | None, steps: torch.Tensor | None
) -> torch.Tensor:
    """Return the result of `trajectory_ends` for rows ``[P, T]``, computed step by step."""
    rows, length = done.shape
    ends = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        for t in range(length):
            flag = bool(done[row, t]) and (steps is None or int(steps[row, t]) == 1)
            last = t == length - 1
            other = not last and ids is not None and int(ids[row, t]) != int(ids[row, t + 1])
            gone = mask is not None and not (mask[row, t] and (last or mask[row, t + 1]))
            ends[row, t] = flag or last or other or gone
    return ends


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_ends_agree_with_the_slow_oracle(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))

    def column(values: Any) -> torch.Tensor:
        drawn = data.draw(st.lists(values, min_size=rows * length, max_size=rows * length))
        return torch.tensor(drawn).reshape(rows, length)

    terminated, truncated = column(st.booleans()), column(st.booleans())
    batch = TensorDict(
        {"next": {"terminated": terminated, "truncated": truncated[..., None]}}, [rows, length]
    )
    ids = mask = steps = None
    if data.draw(st.booleans()):
        ids = batch["collector", "traj_ids"] = column(st.integers(0, 2))
    if data.draw(st.booleans()):
        mask = batch["collector", "mask"] = column(st.booleans())
    if data.draw(st.booleans()):
        steps = column(st.integers(1, 3))
        batch["steps_to_next_obs"] = steps[..., None]
    before = batch.clone()
    ends = trajectory_ends(batch)
    assert torch.equal(ends, slow_ends(terminated | truncated, ids, mask, steps))
    assert (batch == before).all()


@pytest.mark.parametrize("name", ["done", "terminated", "truncated"])
@pytest.mark.parametrize("group", [(), ("agents",), ("deep", "er")])
def test_every_flag_of_every_group_ends(name: str, group: tuple[str, ...]) -> None:
    batch = TensorDict({"next": {"done": flags(0, 0, 0, 0)}}, [4])
    batch.set(("next", *group, name), flags(0, 1, 0, 0))
    assert trajectory_ends(batch).tolist() == [False, True, False, True]


def test_agents_of_a_group_may_disagree_and_any_of_them_ends() -> None:
    done = torch.zeros(3, 2, 1, dtype=torch.bool)
    done[1, 0] = True
    batch = TensorDict({"next": {"agents": {"done": done}}}, [3])
    assert trajectory_ends(batch).tolist() == [False, True, True]


def test_flags_of_the_environment_with_equal_entries_are_mapped_onto_the_batch() -> None:
    batch = TensorDict({"next": {"done": flags(0, 1, 0)[:, None, None].expand(3, 4, 1)}}, [3])
    assert trajectory_ends(batch).tolist() == [False, True, True]


def test_done_key_is_the_only_flag() -> None:
    batch = TensorDict({"next": {"done": flags(1, 1, 1), "group": {"over": flags(0, 1, 0)}}}, [3])
    assert trajectory_ends(batch, done_key=("group", "over")).tolist() == [False, True, True]


def test_further_ids_and_masks_combine_with_the_collectors() -> None:
    batch = TensorDict(
        {"episode": torch.tensor([0, 1, 1, 1, 1])[:, None], "valid": flags(1, 1, 1, 1, 0)}, [5]
    )
    assert trajectory_ends(batch, id_keys=["episode"]).tolist() == [True, False, False, False, True]
    batch["collector", "traj_ids"] = torch.tensor([0, 0, 0, 1, 1])
    ends = trajectory_ends(batch, id_keys=["episode", "absent"], mask_keys=["valid", "absent"])
    assert ends.tolist() == [True, False, True, True, True]
    batch["collector", "mask"] = flags(1, 1, 0, 1, 1)
    mask = step_mask(batch, ["valid"])
    assert mask is not None and mask.tolist() == [True, True, False, True, False]


def test_batch_without_a_mask_has_none() -> None:
    assert step_mask(TensorDict({}, [3])) is None


def test_strings_next_to_the_flags_are_ignored() -> None:
    batch = TensorDict({"next": {"done": flags(0, 1, 0), "name": NonTensorData("x", batch_size=[3])}}, [3])
    assert trajectory_ends(batch).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_the_numbers_0_and_1_are_flags(dtype: torch.dtype) -> None:
    batch = TensorDict({"next": {"done": flags(0, 1, 0).to(dtype)}}, [3])
    assert trajectory_ends(batch).tolist() == [False, True, True]


def test_batch_without_steps_has_no_ends() -> None:
    assert trajectory_ends(
        TensorDict({"next": {"done": torch.zeros(2, 0, 1, dtype=torch.bool)}}, [2, 0])
    ).shape == (2, 0)


def bad_batches() -> dict[str, tuple[Any, dict[str, Any], type[GleanError], type[Exception], str]]:
    """Return the batch, the arguments, the library's error, the Python error and a part of the message."""
    time_missing = torch.zeros(2, 3, 1, dtype=torch.bool)
    time_missing[0, 1] = True
    done = {"next": {"done": flags(0, 0, 0)}}
    ragged = LazyStackedTensorDict(
        TensorDict(done, [3]), TensorDict({**done, "extra": torch.zeros(3)}, [3]), stack_dim=0
    )
    return {
        "not a TensorDict": ({"next": {}}, {}, InvalidTypeError, TypeError, "got dict"),
        "no batch": (
            TensorDict({"next": {"done": flags(0)}}, []),
            {},
            SchemaError,
            RuntimeError,
            "batch_size",
        ),
        "no time": (
            TensorDict({"next": {"done": time_missing}}, [2]),
            {},
            SchemaError,
            RuntimeError,
            "include time",
        ),
        "time first": (
            TensorDict({"next": {"done": time_missing}}, [2, 3], names=["time", None]),
            {},
            SchemaError,
            RuntimeError,
            "transpose",
        ),
        "nothing to go by": (
            TensorDict({"next": {"obs": torch.zeros(3)}}, [3]),
            {},
            MissingKeyError,
            KeyError,
            "'obs'",
        ),
        "no next": (
            TensorDict({"obs": torch.zeros(3)}, [3]),
            {},
            MissingKeyError,
            KeyError,
            "mark the ends of trajectories",
        ),
        "done_key absent": (TensorDict(done, [3]), {"done_key": "over"}, MissingKeyError, KeyError, "'over'"),
        "flag that is neither 0 nor 1": (
            TensorDict({"next": {"done": torch.tensor([0.0, 0.5, 1.0])}}, [3]),
            {},
            SchemaError,
            RuntimeError,
            "got 0.5 (torch.float32)",
        ),
        "float mask": (
            TensorDict({**done, "collector": {"mask": torch.ones(3)}}, [3]),
            {},
            SchemaError,
            ValueError,
            "bool",
        ),
        "wide ids": (
            TensorDict({**done, "collector": {"traj_ids": torch.ones(3, 2)}}, [3]),
            {},
            SchemaError,
            ValueError,
            "(3, 2)",
        ),
        "partial keys": (ragged, {}, SchemaError, RuntimeError, "extra"),
    }


@pytest.mark.parametrize("case", bad_batches())
def test_bad_batches_raise_at_the_cause(case: str) -> None:
    batch, arguments, ours, usual, part = bad_batches()[case]
    with pytest.raises(ours) as caught:
        trajectory_ends(batch, **arguments)
    assert isinstance(caught.value, usual)
    assert part in str(caught.value)
