"""Budgets of frames are exact for each batch and each collector, and invalid budgets are rejected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper
from gleanrl.errors import GleanError
from tests.contract.helpers import check_stream, counter
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv

Make = Callable[..., SyncDataCollector]
SCRIPT = Script(seed=3)


def oracle() -> GymWrapper:
    return GymWrapper(OracleEnv(script=SCRIPT))


@pytest.mark.parametrize(
    ("frames", "total", "sizes"),
    [(10, 30, [10, 10, 10]), (10, 25, [10, 10, 5]), (7, 8, [7, 1]), (10, 4, [4]), (1, 3, [1, 1, 1])],
)
def test_total_frames_is_met_to_the_frame_by_a_short_last_batch(
    make_collector: Make, frames: int, total: int, sizes: list[int]
) -> None:
    collector = make_collector(oracle(), frames_per_batch=frames, total_frames=total)
    batches = list(collector)
    assert [batch.shape[0] for batch in batches] == sizes
    assert counter(collector, "delivered") == total
    check_stream(batches, SCRIPT)


@pytest.mark.parametrize(
    ("frames", "total", "batch_frames", "numels"),
    [
        (12, 24, 12, [12, 12]),
        (10, 36, 12, [12, 12, 12]),  # 4 steps of 3 environments
        (10, 30, 12, [12, 12, 6]),  # the last batch is short
        (12, 31, 12, [12, 12, 9]),  # 31 rounds up to 33, the next multiple of 3
        (1, 5, 3, [3, 3]),
    ],
)
def test_several_environments_round_up_to_whole_steps_and_nothing_more(
    make_collector: Make, frames: int, total: int, batch_frames: int, numels: list[int]
) -> None:
    collector = make_collector(CountingEnv(SCRIPT, (3,)), frames_per_batch=frames, total_frames=total)
    assert collector.requested_frames_per_batch == frames
    assert collector.frames_per_batch == batch_frames
    batches = list(collector)
    assert [batch.numel() for batch in batches] == numels
    assert all(batch.shape[0] == 3 for batch in batches)
    check_stream(batches, SCRIPT)


def test_attribute_frames_per_batch_is_the_frames_of_a_batch(make_collector: Make) -> None:
    collector = make_collector(oracle(), frames_per_batch=9, total_frames=-1)
    assert collector.frames_per_batch == collector.requested_frames_per_batch == 9
    assert next(iter(collector)).numel() == 9


@pytest.mark.parametrize("total", [-1, None])
def test_no_total_means_endless(make_collector: Make, total: int | None) -> None:
    stream = iter(make_collector(oracle(), frames_per_batch=4, total_frames=total))
    assert [next(stream).numel() for _ in range(20)] == [4] * 20


def test_a_total_that_is_no_multiple_warns_once_and_at_construction(make_collector: Make) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = make_collector(oracle(), quiet=False, frames_per_batch=10, total_frames=25)
    assert len(caught) == 1 and "25" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(collector)


def test_rounding_up_to_whole_steps_warns_at_construction(make_collector: Make) -> None:
    with pytest.warns(match="frames_per_batch"):
        make_collector(CountingEnv(SCRIPT, (3,)), quiet=False, frames_per_batch=10, total_frames=-1)


def test_a_budget_that_fits_does_not_warn(make_collector: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(make_collector(oracle(), quiet=False, frames_per_batch=10, total_frames=30))
        list(make_collector(CountingEnv(SCRIPT, (3,)), quiet=False, frames_per_batch=12, total_frames=24))


def test_rl_warnings_0_silences_the_rounding_warnings(
    make_collector: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_WARNINGS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_collector(oracle(), quiet=False, frames_per_batch=10, total_frames=25)
        make_collector(CountingEnv(SCRIPT, (3,)), quiet=False, frames_per_batch=10, total_frames=-1)
        make_collector(oracle(), quiet=False, frames_per_batch=10, total_frames=30, init_random_frames=15)


@pytest.mark.parametrize("value", [0, -1, 2.5, "10", float("nan")])
def test_bad_frames_per_batch_is_a_value_error_that_names_argument_and_value(value: Any) -> None:
    with pytest.raises(ValueError, match="frames_per_batch") as caught:
        SyncDataCollector(oracle(), None, frames_per_batch=value, total_frames=10)
    assert isinstance(caught.value, GleanError) and str(value) in str(caught.value)


@pytest.mark.parametrize("value", [2.5, "20", float("inf")])
def test_bad_total_frames_is_a_value_error_that_names_argument_and_value(value: Any) -> None:
    with pytest.raises(ValueError, match="total_frames") as caught:
        SyncDataCollector(oracle(), None, frames_per_batch=10, total_frames=value)
    assert isinstance(caught.value, GleanError) and str(value) in str(caught.value)


@pytest.mark.parametrize("name", ["max_frames_per_traj", "init_random_frames"])
def test_other_fractional_counts_are_refused_by_name(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name) as caught:
        SyncDataCollector(oracle(), None, frames_per_batch=10, total_frames=20, **{name: 1.5})
    assert isinstance(caught.value, GleanError)


class TestInitRandomFrames:
    """`init_random_frames`: the first frames come from `env.rand_action`."""

    def test_rounds_up_to_whole_batches_and_counts_against_the_total(self, make_collector: Make) -> None:
        collector = make_collector(
            oracle(), lambda observation: observation[..., :2] * 0 + 0.5,
            frames_per_batch=10, total_frames=40, init_random_frames=15,
        )  # fmt: skip
        batches = list(collector)
        assert [batch.numel() for batch in batches] == [10] * 4
        chosen = [bool((batch["action"] == 0.5).all()) for batch in batches]
        assert chosen == [False, False, True, True]
        assert all((batch["action"] != 0.5).any(-1).all() for batch in batches[:2])
        check_stream(batches, SCRIPT)

    @pytest.mark.parametrize("value", [None, -1, 0])
    def test_none_zero_and_negative_mean_no_random_frames(
        self, make_collector: Make, value: int | None
    ) -> None:
        collector = make_collector(
            oracle(), lambda observation: observation[..., :2] * 0 + 0.5,
            frames_per_batch=5, total_frames=5, init_random_frames=value,
        )  # fmt: skip
        assert all((batch["action"] == 0.5).all() for batch in collector)

    def test_warns_if_not_a_multiple(self, make_collector: Make) -> None:
        with pytest.warns(match="init_random_frames"):
            make_collector(oracle(), quiet=False, frames_per_batch=10, total_frames=40, init_random_frames=15)

    def test_random_rows_carry_zeros_in_the_columns_of_the_policy(self, make_collector: Make) -> None:
        def policy(tensordict: Any) -> Any:
            tensordict["logits"] = tensordict["observation"][..., :2] * 0 + 3
            return tensordict.set("action", tensordict["logits"] / 6)

        first, second = make_collector(
            oracle(), policy, frames_per_batch=6, total_frames=12, init_random_frames=6
        )
        assert set(first.keys(True, True)) == set(second.keys(True, True))
        assert first["logits"].shape == second["logits"].shape == (6, 2)
        assert (first["logits"] == 0).all() and (second["logits"] == 3).all()
        assert (first["action"] != 0.5).any(-1).all() and (second["action"] == 0.5).all()

    def test_the_policy_is_not_called_for_random_frames(self, make_collector: Make) -> None:
        calls = []

        def policy(tensordict: Any) -> Any:
            calls.append(1)
            return tensordict.set("action", tensordict["observation"][..., :2] * 0)

        collector = make_collector(
            oracle(), policy, frames_per_batch=5, total_frames=10, init_random_frames=5
        )
        stream = iter(collector)
        before = len(calls)
        next(stream)
        assert len(calls) == before
        next(stream)
        assert len(calls) == before + 5

    def test_random_actions_lie_in_the_spec_and_differ(self, make_collector: Make) -> None:
        (batch,) = make_collector(
            CountingEnv(SCRIPT, (2,)), lambda observation: observation[..., :2] * 0 + 7,
            frames_per_batch=20, total_frames=20, init_random_frames=20,
        )  # fmt: skip
        assert batch["action"].abs().max() <= 1
        assert batch["action"].unique().numel() > 30
