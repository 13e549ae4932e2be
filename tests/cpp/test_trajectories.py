"""Frames are numbered by trajectory. `tests/collectors/test_frame_accounting_tracking.py` has tests with an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gleanrl._arrays.native import record


def arrays(num_envs: int, num_steps: int) -> dict[str, Any]:
    """Return the arrays that record a batch without an end."""
    shape = (num_envs, num_steps)
    return {
        "done": np.zeros(shape, np.bool_),
        "reward": np.ones(shape),
        "mask": None,
        "ids": np.full(shape, -7, np.int64),
        "counts": None,
        "own_ids": np.arange(num_envs),
        "own_steps": np.zeros(num_envs, np.int64),
        "own_returns": np.zeros(num_envs),
        "next_id": num_envs,
        "factor": 1,
        "offset": 0,
    }


def test_ends_of_one_step_come_in_the_order_of_environments_and_earlier_ones_before():
    given = arrays(3, 4)
    for env, t in ((0, 3), (1, 1), (2, 1)):
        given["done"][env, t] = True
    assert record(**given) == ([2, 2, 4], [2.0, 2.0, 4.0])
    assert given["ids"].tolist() == [[0, 0, 0, 0], [1, 1, 3, 3], [2, 2, 4, 4]]
    assert [given[name].tolist() for name in ("own_ids", "own_steps", "own_returns")] == [
        [5, 3, 4],
        [0, 2, 2],
        [0.0, 2.0, 2.0],
    ]


def test_rows_may_be_strided():
    wide = np.full((2, 9), -7, np.int64)
    given = arrays(2, 4) | {"ids": wide[:, 3:7], "done": np.ones((2, 8), np.bool_)[:, :4], "offset": 100}
    assert record(**given)[0] == [1] * 8
    assert wide[:, 3:7].tolist() == [[100, 102, 104, 106], [101, 103, 105, 107]]
    assert (wide[:, :3] == -7).all() and (wide[:, 7:] == -7).all()


def test_a_long_batch_lets_other_threads_work_and_is_numbered_likewise():
    given = arrays(2, 20_000)
    given["done"][:, 9_999::10_000] = True
    assert record(**given) == ([10_000] * 4, [10_000.0] * 4)
    assert given["ids"][:, ::10_000].tolist() == [[0, 2], [1, 3]]


def test_no_steps_and_no_environments_are_fine():
    assert record(**arrays(2, 0)) == ([], [])
    assert record(**arrays(0, 2)) == ([], [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("done", np.zeros((2, 3), np.uint8)),
        ("done", np.zeros((3, 2), np.bool_).T),
        ("done", np.zeros(6, np.bool_)),
        ("reward", np.zeros((2, 3), np.int64)),
        ("reward", np.zeros((2, 2))),
        ("mask", np.zeros((3, 3), np.bool_)),
        ("ids", np.zeros((2, 3))),
        ("ids", np.zeros(7 * 8, np.uint8)[1:49].view(np.int64).reshape(2, 3)),
        ("counts", np.zeros((2, 4), np.int64)),
        ("own_ids", np.zeros(1, np.int64)),
        ("own_returns", np.zeros(2, np.float32)),
    ],
)
def test_an_array_that_doesnt_fit_is_named_and_nothing_is_written(name: str, value: Any):
    given = arrays(2, 3)
    with pytest.raises(ValueError, match=name.removeprefix("own_") if name == "done" else "record: "):
        record(**given | {name: value})
    assert (given["ids"] == -7).all() and (given["own_steps"] == 0).all()


@pytest.mark.parametrize("name", ["done", "ids", "own_ids"])
def test_required_arrays_must_not_be_none(name: str):
    with pytest.raises(TypeError):
        record(**arrays(2, 3) | {name: None})
