"""Each mistake in the input raises a library error at its cause, and the collector resumes with a reset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper
from gleanrl.errors import GleanError
from tests.contract.helpers import check_ledger, check_stream, counter, leaf_keys, same, snapshot
from tests.fakes import (
    DictEnv,
    DriftingEnv,
    FakeFailure,
    MisdeclaredEnv,
    NonFiniteEnv,
    OracleEnv,
    RaisingEnv,
    Script,
)
from tests.fakes_base import CountingEnv, CrookedEnv, StillDoneEnv

Make = Callable[..., SyncDataCollector]
SCRIPT = Script(seed=41, low=2, high=6)
NONFINITE = ("collector", "nonfinite")


def fail_then_finish(
    collector: SyncDataCollector, error: type[BaseException], match: str, *, total: int, goes_on: bool = True
) -> BaseException:
    """Collect until `error`, check that earlier batches are unchanged, then collect the rest after a reset.

    Returns:
        The error.
    """
    kept: list[tuple[TensorDictBase, Any]] = []
    with pytest.raises(error, match=match) as caught:
        for batch in collector:
            kept.append((batch, snapshot(batch)))
    assert isinstance(caught.value, GleanError)
    check_ledger(collector)
    assert all(same(batch, frozen) for batch, frozen in kept), "a batch changed after it was delivered"
    if goes_on:
        rest = list(collector)
        assert (rest[0]["observation"].reshape(-1, 3)[0, 2] == 0).all(), (
            "the next batch must begin with a reset"
        )
        delivered = sum(batch.numel() for batch, _ in kept) + sum(batch.numel() for batch in rest)
        assert delivered == counter(collector, "delivered") == total
        check_stream(rest, SCRIPT)
        if kept:
            old = {int(i) for batch, _ in kept for i in batch["collector", "traj_ids"].flatten()}
            assert not old & {int(i) for batch in rest for i in batch["collector", "traj_ids"].flatten()}
    return caught.value


def collect(
    make_collector: Make, env: Any, frames: int = 5, total: int = 40, **kwargs: Any
) -> SyncDataCollector:
    return make_collector(env, frames_per_batch=frames, total_frames=total, **kwargs)


class TestRaisingEnvironments:
    """If `step` or `reset` raises, the error names the environment, the episode and the step, and has the cause."""

    @pytest.mark.parametrize("at", [1, 5, 6, 13])
    def test_raising_step_names_the_place(self, make_collector: Make, at: int) -> None:
        collector = collect(make_collector, GymWrapper(RaisingEnv(at, script=SCRIPT)))
        error = fail_then_finish(
            collector, FakeFailure, "(?is)(?=.*environment)(?=.*episode)(?=.*step)", total=40
        )
        assert isinstance(error.__cause__, FakeFailure) and "the fake broke on purpose" in str(error)

    @pytest.mark.parametrize("at", [3, 5])
    def test_raising_reset_in_mid_rollout_names_the_place(self, make_collector: Make, at: int) -> None:
        collector = collect(make_collector, GymWrapper(RaisingEnv(at, "reset", script=SCRIPT)))
        error = fail_then_finish(collector, FakeFailure, "(?is)(?=.*environment)(?=.*reset)", total=40)
        assert isinstance(error.__cause__, FakeFailure)

    def test_raising_first_reset_names_the_reset(self) -> None:
        with pytest.raises(FakeFailure, match="reset"):
            next(iter(SyncDataCollector(GymWrapper(RaisingEnv(1, "reset")), None, frames_per_batch=5)))

    def test_raising_envbase_names_the_step(self, make_collector: Make) -> None:
        collector = collect(make_collector, CrookedEnv("raise", 8, script=SCRIPT))
        error = fail_then_finish(collector, ValueError, "(?i)step", total=40)
        assert type(error.__cause__) is ValueError

    def test_base_exception_passes_unchanged_and_the_collector_continues(self, make_collector: Make) -> None:
        collector = collect(
            make_collector, GymWrapper(RaisingEnv(8, error=KeyboardInterrupt(), script=SCRIPT))
        )
        first: list[TensorDictBase] = []
        with pytest.raises(KeyboardInterrupt):
            first.extend(collector)
        check_ledger(collector)
        rest = list(collector)
        assert counter(collector, "delivered") == 40
        check_stream(rest, SCRIPT, first_step=None)

    def test_error_class_with_required_arguments_is_kept_as_the_cause(self, make_collector: Make) -> None:
        class Picky(Exception):
            def __init__(self, one: int, *, two: int) -> None:
                super().__init__(one, two)

        collector = collect(make_collector, GymWrapper(RaisingEnv(8, error=Picky(1, two=2), script=SCRIPT)))
        error = fail_then_finish(collector, GleanError, "(?i)step", total=40)
        assert isinstance(error.__cause__, Picky)

    def test_next_serves_again_after_an_error(self, make_collector: Make) -> None:
        collector = collect(make_collector, GymWrapper(RaisingEnv(3, script=SCRIPT)), total=10)
        with pytest.raises(FakeFailure):
            collector.next()
        check_stream([collector.next(), collector.next()], SCRIPT)
        assert collector.next() is None


class TestDriftingEnvironments:
    """An observation that deviates from its declared shape, or from the first reset's dtype, raises in mid-episode."""

    @pytest.mark.parametrize("change", ["longer", "shorter", "scalar", "dtype", "integer"])
    @pytest.mark.parametrize("at", [2, 7])
    def test_drifting_gym_observation_raises(self, make_collector: Make, change: str, at: int) -> None:
        collector = collect(
            make_collector, GymWrapper(DriftingEnv(at, change, script=Script(seed=41, low=9, high=9)))
        )
        with pytest.raises(GleanError, match="observation") as caught:
            list(collector)
        expected = {
            "longer": ("3", "4"), "shorter": ("3", "1"), "scalar": ("3",),
            "dtype": ("float32", "float64"), "integer": ("float32", "int64"),
        }[change]  # fmt: skip
        assert all(part in str(caught.value) for part in expected), str(caught.value)
        check_ledger(collector)
        rest = list(collector)
        assert rest[0]["observation"][0, 2] == 0 and counter(collector, "delivered") == 40

    @pytest.mark.parametrize(
        ("fault", "named"),
        [
            ("dtype", "observation"),
            ("shape", "observation"),
            ("missing", "observation"),
            ("extra", "surprise"),
        ],
    )
    @pytest.mark.parametrize("envs", [(), (2,)])
    def test_drifting_envbase_output_raises(
        self, make_collector: Make, fault: str, named: str, envs: tuple[int, ...]
    ) -> None:
        width = envs[0] if envs else 1
        env = CrookedEnv(fault, 7, script=SCRIPT, batch_size=envs)
        fail_then_finish(
            collect(make_collector, env, 5 * width, 40 * width), Exception, named, total=40 * width
        )

    @pytest.mark.parametrize(("kwargs", "named"), [({"drop_at": 7}, "goal"), ({"add_at": 7}, "surprise")])
    def test_a_key_of_a_dict_that_goes_or_comes(
        self, make_collector: Make, kwargs: dict[str, int], named: str
    ) -> None:
        env = GymWrapper(DictEnv("observation", script=Script(lengths=(20,)), **kwargs))
        with pytest.raises(GleanError, match=named):
            list(collect(make_collector, env))

    def test_a_dtype_other_than_declared_from_the_first_reset_on_is_cast_with_one_warning(
        self, make_collector: Make
    ) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            env = GymWrapper(MisdeclaredEnv(script=SCRIPT))
            batches = list(collect(make_collector, env, quiet=False))
        assert (
            len(caught) == 1
            and "float64" in str(caught[0].message)
            and "observation" in str(caught[0].message)
        )
        assert batches[0]["observation"].dtype == torch.float32
        check_stream(batches, SCRIPT)

    def test_cast_environment_that_changes_dtype_later_raises(self, make_collector: Make) -> None:
        class Wobbly(DriftingEnv):
            """Emits float64 from the first reset, and int64 once."""

            def _emit(self) -> Any:
                row = super()._emit()
                return row if row.dtype == np.int64 else row.astype(np.float64)

        env = GymWrapper(Wobbly(7, "integer", script=Script(lengths=(20,))))
        with pytest.raises(GleanError, match="observation"):
            list(collect(make_collector, env))

    @pytest.mark.parametrize("cast", [np.float64, np.float16, int, bool, np.array, lambda x: np.array([x])])
    def test_rewards_are_cast_to_the_spec(self, make_collector: Make, cast: Any) -> None:
        class Paying(OracleEnv):
            def _reward(self) -> Any:
                return cast(self.step_index % 2)

        (batch,) = collect(make_collector, GymWrapper(Paying(script=SCRIPT)), 20, 20)
        reward = batch["next", "reward"]
        assert reward.dtype == torch.float32 and reward.shape == (20, 1)
        assert torch.equal(reward[:, 0], batch["next", "observation"][:, 2] % 2)

    def test_a_reset_that_returns_done_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="(?i)done") as caught:
            next(iter(SyncDataCollector(StillDoneEnv(), None, frames_per_batch=5)))
        assert isinstance(caught.value, GleanError)


class TestNonFinite:
    """`nonfinite`: "raise" (default) names the environment, "mark" flags the row, "pass" lets it through."""

    @pytest.mark.parametrize("where", ["observation", "reward"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("kwargs", [{}, {"nonfinite": "raise"}])
    def test_nonfinite_value_raises_by_default(
        self, make_collector: Make, where: str, value: float, kwargs: dict[str, str]
    ) -> None:
        env = GymWrapper(NonFiniteEnv(8, value, where, script=SCRIPT))
        fail_then_finish(
            collect(make_collector, env, **kwargs),
            GleanError,
            f"(?is)(?=.*{where})(?=.*environment)",
            total=40,
        )

    def test_raise_names_the_row_of_a_batched_environment(self, make_collector: Make) -> None:
        env = CrookedEnv("nan", 4, script=Script(lengths=(50,)), batch_size=(7,))
        with pytest.raises(GleanError, match=r"(?is)environment\D*6"):
            list(collect(make_collector, env, 70, 70))

    @pytest.mark.parametrize("where", ["observation", "reward"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_marked_nonfinite_rows_are_flagged(self, make_collector: Make, where: str, value: float) -> None:
        env = GymWrapper(NonFiniteEnv(8, value, where, script=Script(lengths=(50,))))
        batches = list(collect(make_collector, env, nonfinite="mark"))
        assert [batch.numel() for batch in batches] == [5] * 8
        marks = torch.cat([batch[NONFINITE] for batch in batches])
        assert marks.dtype == torch.bool and marks.shape == (40,)
        data = torch.cat(batches)
        bad = ~data["next", "reward"].isfinite().all(-1)
        for key in ("observation", ("next", "observation")):
            bad |= ~data[key].isfinite().all(-1)
        assert bad.any() and torch.equal(marks, bad)

    def test_passed_nonfinite_rows_are_delivered(self, make_collector: Make) -> None:
        env = GymWrapper(NonFiniteEnv(8, script=Script(lengths=(50,))))
        batches = list(collect(make_collector, env, nonfinite="pass"))
        assert torch.cat([batch["next", "observation"] for batch in batches])[7, 1].isnan()
        assert all(NONFINITE not in leaf_keys(batch) for batch in batches)

    def test_other_words_are_refused(self) -> None:
        with pytest.raises(ValueError, match="nonfinite") as caught:
            SyncDataCollector(CountingEnv(), None, frames_per_batch=5, nonfinite="ignore")
        assert isinstance(caught.value, GleanError) and "ignore" in str(caught.value)

    @pytest.mark.parametrize("mode", ["raise", "mark"])
    def test_finite_data_is_left_alone(self, make_collector: Make, mode: str) -> None:
        batches = list(collect(make_collector, CountingEnv(SCRIPT, (2,)), 10, nonfinite=mode))
        assert mode == "raise" or not any(batch[NONFINITE].any() for batch in batches)
        check_stream(batches, SCRIPT)


class TestConstruction:
    """The constructor rejects arguments without a sensible meaning."""

    def test_create_env_kwargs_with_an_instance_raise(self) -> None:
        with pytest.raises(RuntimeError, match="create_env_kwargs") as caught:
            SyncDataCollector(CountingEnv(), None, frames_per_batch=5, create_env_kwargs={"stream": 1})
        assert isinstance(caught.value, GleanError)

    @pytest.mark.parametrize("env", [None, 3, lambda: 3, object()])
    def test_something_that_is_no_environment(self, env: Any) -> None:
        with pytest.raises(GleanError):
            SyncDataCollector(env, None, frames_per_batch=5)

    def test_unknown_arguments_raise(self) -> None:
        with pytest.raises(TypeError, match="frame_per_batch"):
            SyncDataCollector(CountingEnv(), None, frames_per_batch=5, frame_per_batch=5)

    def test_frames_per_batch_is_required(self) -> None:
        with pytest.raises((TypeError, ValueError), match="frames_per_batch"):
            SyncDataCollector(CountingEnv(), None)

    def test_unknown_device_raises(self) -> None:
        with pytest.raises((RuntimeError, ValueError), match="no-such-device") as caught:
            SyncDataCollector(CountingEnv(), None, frames_per_batch=5, device="no-such-device")
        assert isinstance(caught.value, GleanError)

    def test_a_failed_construction_leaves_the_environment_usable(self, make_collector: Make) -> None:
        env = CountingEnv(SCRIPT)
        with pytest.raises(ValueError, match="frames_per_batch"):
            SyncDataCollector(env, None, frames_per_batch=0)
        check_stream(list(collect(make_collector, env)), SCRIPT)

    def test_unsupported_space_is_named(self) -> None:
        class Texty(OracleEnv):
            def __init__(self) -> None:
                super().__init__()
                self.action_space = spaces.Graph(spaces.Box(0, 1), None)

        with pytest.raises((NotImplementedError, ValueError), match="Graph"):
            GymWrapper(Texty())
