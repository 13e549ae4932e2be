"""What a collector's numbers and devices mean, as tables."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.collectors.plan import DevicePlan, FramePlan, integer, make_env
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.fakes_base import CountingEnv

CPU, CPU0, META = torch.device("cpu"), torch.device("cpu:0"), torch.device("meta")


def plan(num_envs: int, frames: Any, total: Any = None, random: Any = None) -> FramePlan:
    """Return the plan, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FramePlan.of(num_envs, frames, total, random)


def portions(frames: FramePlan, most: int = 20) -> list[int]:
    """Return the frames of the first batches."""
    done, found = 0, []
    while (steps := frames.steps_after(done)) and len(found) < most:
        found.append(steps * frames.num_envs)
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
    assert found.steps_after(0) == found.steps_after(2**70) == 2


def test_beyond_the_budget_nothing_is_left() -> None:
    assert [plan(2, 4, 10).steps_after(n) for n in (8, 10, 12, 100)] == [1, 0, 0, 0]


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
        ((0, None, None), "frames_per_batch: expected a positive integer, got 0"),
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
        FramePlan.of(1, *arguments)


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), torch.tensor(5)])
def test_integers_of_any_kind_are_integers(value: Any) -> None:
    assert type(integer("n", value)) is int and integer("n", value) == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 10, 20, 20), []),
        ((4, 10, None, None), ["frames_per_batch=10 .* 4 environments; batches have 12"]),
        ((1, 10, 25, None), ["total_frames=25 .* 10 frames of a batch: 25 .* last batch has 5 of 10"]),
        ((4, 8, 7, None), ["total_frames=7 .* 8 frames of a batch: 8 are collected$"]),
        ((1, 10, None, 5), ["init_random_frames=5 .* 10 are random"]),
        ((4, 10, 13, 13), ["frames_per_batch", "total_frames=13 .*: 16 .* 4 of 12", "init_random_frames"]),
    ],
)
def test_each_rounding_warns_once(arguments: Any, expected: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FramePlan.of(*arguments)
    assert len(caught) == len(expected)
    for warning, text in zip(caught, expected, strict=True):
        with pytest.raises(UserWarning, match=text):
            raise warning.message  # type: ignore[misc]


@pytest.mark.parametrize(("value", "loud"), [("0", False), ("False", False), ("1", True), ("", True)])
def test_rl_warnings_silences(monkeypatch: pytest.MonkeyPatch, value: str, loud: bool) -> None:
    monkeypatch.setenv("RL_WARNINGS", value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FramePlan.of(4, 10, 13, 13)
    assert bool(caught) is loud


@pytest.mark.parametrize(
    ("device", "env", "policy", "storing", "own", "expected"),
    [
        (None, None, None, None, None, (None, None, None)),
        (None, None, None, None, CPU, (CPU, None, CPU)),
        ("cpu", None, None, None, None, (CPU, CPU, CPU)),
        ("cpu", None, None, None, META, (CPU, CPU, CPU)),
        ("cpu", None, "cpu:0", None, None, (CPU, CPU0, CPU)),
        ("cpu", "cpu:0", None, "meta", None, (CPU0, CPU, META)),
        (None, None, "cpu:0", None, CPU, (CPU, CPU0, None)),
        (None, None, "cpu", None, None, (None, CPU, None)),
        (None, "cpu:0", "cpu:0", None, CPU, (CPU0, CPU0, CPU0)),
        (None, "cpu", None, None, META, (CPU, None, CPU)),
        (None, None, None, "cpu:0", CPU, (CPU, None, CPU0)),
        (torch.device("cpu"), None, None, None, "cpu:0", (CPU, CPU, CPU)),
    ],
)
def test_unset_devices_are_filled(
    device: Any, env: Any, policy: Any, storing: Any, own: Any, expected: tuple[Any, ...]
) -> None:
    found = DevicePlan.of(device, env, policy, storing, own)
    assert (found.env, found.policy, found.storing) == expected


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'toaster'"):
        DevicePlan.of(None, None, "toaster", None, None)


class TestMakeEnv:
    """`make_env`: environments, callables, classes, and what is neither."""

    def test_an_environment_is_taken_as_it_is(self) -> None:
        env = CountingEnv()
        assert make_env(env, None) is make_env(env, {}) is env

    def test_a_callable_or_a_class_is_called_with_the_keywords(self) -> None:
        assert make_env(CountingEnv, {"batch_size": (2,)}).batch_size == (2,)
        assert make_env(lambda **kwargs: CountingEnv(**kwargs), {"batch_size": (3,)}).batch_size == (3,)

    def test_keywords_for_an_environment_that_exists_need_its_consent(self) -> None:
        with pytest.raises(UnsupportedError, match="create_env_kwargs: the environment exists already"):
            make_env(CountingEnv(), {"a": 1})

        class Willing(CountingEnv):
            def update_kwargs(self, kwargs: Any) -> None:
                self.given = dict(kwargs)

        assert make_env(Willing(), {"a": 1}).given == {"a": 1}

    @pytest.mark.parametrize("value", [None, 3, "CartPole-v1", [CountingEnv]])
    def test_what_is_neither_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidTypeError, match=f"got {type(value).__name__}"):
            make_env(value, None)

    def test_a_callable_that_makes_no_environment_is_refused(self) -> None:
        with pytest.raises(InvalidTypeError, match="create_env_fn: .* got NoneType"):
            make_env(lambda: None, None)
