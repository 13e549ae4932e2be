"""Checks of whole columns name the value, the environment and the step, for every dtype and memory layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from gleanrl.collectors.batch_columns import check_actions, check_finite, first_nonfinite, nonfinite_rows
from gleanrl.errors import NonFiniteError, PolicyError

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BAD = (float("nan"), float("inf"), -float("inf"))
P, T = 3, 5


def column(*leaf: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a contiguous ``(P, T, *leaf)`` column of finite values."""
    return torch.arange(torch.Size((P, T, *leaf)).numel()).reshape(P, T, *leaf).to(dtype)


def scattered(*leaf: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return such a column in non-contiguous memory: the front of a longer one, as after a cut."""
    longer = torch.full((P, T + 3, *leaf), float("nan")).to(dtype)
    longer[:, :T] = column(*leaf, dtype=dtype)
    assert not longer[:, :T].is_contiguous()
    return longer[:, :T]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [column, scattered])
def test_first_bad_value_is_found_at_every_position(make, dtype: torch.dtype) -> None:
    assert first_nonfinite(make(2, dtype=dtype)) == -1
    for position, value in itertools.product(range(P * T * 2), BAD):
        data = make(2, dtype=dtype)
        env, t, k = position // (T * 2), position // 2 % T, position % 2
        data[env, t, k] = value
        data[-1, -1, -1] = float("nan")
        assert first_nonfinite(data) == position


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_and_bool_columns_are_skipped(dtype: torch.dtype) -> None:
    data = column(2).to(dtype)
    assert first_nonfinite(data) == -1
    check_finite([(("a",), data)], T, "Env")
    check_actions([(("a",), data)], T)
    assert not nonfinite_rows([(("a",), data)], torch.ones(P, T, dtype=torch.bool)).any()


@pytest.mark.parametrize("leaf", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("make", [column, scattered])
def test_the_error_names_key_environment_step_and_value(make, leaf: tuple[int, ...]) -> None:
    for env, t in itertools.product(range(P), range(T)):
        data = make(*leaf)
        data[env, t].view(-1)[-1] = float("-inf")
        expected = rf"Env: environment {env} put out -inf in \('next', 'obs'\) at step {t} of the batch"
        with pytest.raises(NonFiniteError, match=expected):
            check_finite([(("obs",), make(*leaf)), (("next", "obs"), data)], T, "Env")


def test_a_column_without_elements_is_finite() -> None:
    empty = torch.empty(P, T, 0)
    check_finite([(("a",), empty)], T, "Env")
    check_actions([(("a",), empty)], T)
    assert not nonfinite_rows([(("a",), empty)], torch.ones(P, T, dtype=torch.bool)).any()


@pytest.mark.parametrize("leaf", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_actions_raise_and_infinite_ones_do_not(leaf: tuple[int, ...], dtype: torch.dtype) -> None:
    for make, env, t in itertools.product((column, scattered), range(P), range(T)):
        data = make(*leaf, dtype=dtype)
        data[0, 0] = float("inf")
        check_actions([(("action",), data)], T)
        data[env, t].view(-1)[-1] = float("nan")
        with pytest.raises(PolicyError, match=f"NaN in 'action' for environment {env} at step {t} of"):
            check_actions([(("arm",), column(*leaf)), (("action",), data)], T)


def test_marks_are_the_rows_of_any_column_with_a_bad_value() -> None:
    single, frames, short = scattered(), column(2, 3), column(4, dtype=torch.bfloat16)
    single[0, 1], frames[1, 4, 1, 2], short[2, 0, 0], frames[0, 1, 0, 0] = BAD[0], BAD[1], BAD[2], BAD[0]
    marks = nonfinite_rows(
        [(("a",), single), (("b",), frames), (("c",), short), (("d",), column().long())],
        torch.ones(P, T, dtype=torch.bool),
    )
    assert marks.dtype is torch.bool
    assert marks.nonzero().tolist() == [[0, 1], [1, 4], [2, 0]]
