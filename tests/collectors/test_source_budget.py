"""The numbers of a collector are rounded and granted by these tables."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from gleanrl.collectors.source import Budget, Grant
from gleanrl.errors import InvalidArgumentError


def plan(num_envs: int, frames: Any, total: Any = None, random: Any = None) -> Budget:
    """Return the budget, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Budget(num_envs, frames, total, random)


def portions(frames: Budget, most: int = 20) -> list[int]:
    """Return the frames of the first batches."""
    done, found = 0, list[int]()
    while (grant := frames.grant(done)) is not None and len(found) < most:
        assert grant.counted and grant.random == (done < frames.random_frames)
        found.append(grant.num_steps * frames.num_envs)
        done += found[-1]
    return found


@pytest.mark.parametrize(
    ("num_envs", "frames", "total", "expected"),
    [
        (1, 10, 30, [10, 10, 10]),
        (1, 10, 25, [10, 10, 5]),
        (1, 10, 1, [1]),
        (1, 10, 10, [10]),
        (1, 1, 3, [1, 1, 1]),
        (4, 10, 24, [12, 12]),
        (4, 10, 25, [12, 12, 4]),
        (4, 10, 1, [4]),
        (4, 1, 9, [4, 4, 4]),
        (3, 7, 10, [9, 3]),
        (1, np.int64(5), np.int32(7), [5, 2]),
    ],
)
def test_batches_add_up_to_the_total_rounded_up_to_whole_steps(
    num_envs: int, frames: Any, total: Any, expected: list[int]
) -> None:
    found = plan(num_envs, frames, total)
    assert portions(found) == expected
    assert found.total_frames == sum(expected) == -(-int(total) // num_envs) * num_envs
    assert found.requested_frames_per_batch == frames
    assert found.frames_per_batch == -(-int(frames) // num_envs) * num_envs


@pytest.mark.parametrize("total", [None, -1, -100])
def test_no_total_or_a_negative_one_is_endless(total: Any) -> None:
    found = plan(2, 4, total)
    assert found.total_frames is None
    assert found.grant(0) == found.grant(2**70) == Grant(2)


def test_beyond_the_budget_nothing_is_left() -> None:
    budget = plan(2, 4, 10)
    assert [budget.grant(n) for n in (3, 8, 9, 10, 12)] == [
        Grant(2, most=7),
        Grant(1, most=2),
        Grant(1, most=1),
        None,
        None,
    ]


def test_rollout_grant_is_a_full_batch_of_the_policy() -> None:
    assert plan(2, 4, 2, 8).extra_grant() == Grant(2, random=False, counted=False)


@pytest.mark.parametrize(
    ("num_envs", "frames", "random", "expected"),
    [(1, 10, None, 0), (1, 10, -3, 0), (1, 10, 0, 0), (1, 10, 1, 10), (1, 10, 20, 20), (4, 10, 13, 24)],
)
def test_random_frames_round_up_to_whole_batches(
    num_envs: int, frames: int, random: Any, expected: int
) -> None:
    assert plan(num_envs, frames, None, random).random_frames == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, None, None), "frames_per_batch: expected an integer of 1 or more, got 0"),
        ((-4, None, None), "frames_per_batch: .* got -4"),
        ((2.0, None, None), r"frames_per_batch: .* got 2\.0"),
        ((True, None, None), "frames_per_batch: .* got True"),
        (("8", None, None), "frames_per_batch: .* got '8'"),
        ((None, None, None), "frames_per_batch: .* got None"),
        ((8, 0, None), "total_frames: .* got 0"),
        ((8, 1e6, None), r"total_frames: .* got 1000000\.0"),
        ((8, float("inf"), None), "total_frames: .* got inf"),
        ((8, None, 1.5), r"init_random_frames: .* got 1\.5"),
    ],
)
def test_bad_numbers_are_refused_by_name_and_value(arguments: Any, expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        Budget(1, *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 10, 20, 20), None),
        ((4, 10, None, None), "^frames_per_batch=10 .* 4 environments: batches have 12$"),
        ((1, 10, 25, None), "^total_frames=25 .* 10 frames of a batch: 25 .* last batch has 5 of 10"),
        ((4, 8, 7, None), "^total_frames=7 .* 8 frames of a batch: 8 are collected$"),
        ((1, 10, None, 5), "^init_random_frames=5 .* 10 are random$"),
        (
            (4, 10, 13, 13),
            "^frames_per_batch=10 .*; total_frames=13 .*: 16 .* 4 of 12 frames; init_random_frames=13 .*$",
        ),
    ],
)
def test_all_roundings_give_one_warning_of_one_line(arguments: Any, expected: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Budget(*arguments)
    assert len(caught) == (expected is not None)
    for warning in caught:
        with pytest.raises(UserWarning, match=expected):
            raise warning.message  # type: ignore[misc]


@pytest.mark.parametrize(("value", "loud"), [("0", False), ("False", False), ("1", True), ("", True)])
def test_rl_warnings_variable_silences_warnings(
    monkeypatch: pytest.MonkeyPatch, value: str, loud: bool
) -> None:
    monkeypatch.setenv("RL_WARNINGS", value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Budget(4, 10, 13, 13)
    assert bool(caught) is loud
