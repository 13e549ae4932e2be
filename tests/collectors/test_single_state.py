"""A collector's state is saved and loaded, and its memory doesn't grow."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.envs.transforms import RewardSum, TransformedEnv
from gleanrl.errors import InvalidTypeError, MissingKeyError, SchemaError, UnsupportedError
from tests.collectors.helpers import IDS, NEVER, SCRIPT, Net, check_names, make, take
from tests.contract.helpers import on_td
from tests.fakes import Script
from tests.fakes_base import CountingEnv


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestState:
    """State saved and loaded at every cut."""

    def through_a_file(self, state: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    @pytest.mark.parametrize("cut", [0, 1, 2, 4])
    @pytest.mark.parametrize("batch_size", [(), (2,)])
    def test_counters_ids_and_weights_continue(self, cut: int, batch_size: tuple[int, ...]) -> None:
        collector = make(CountingEnv(SCRIPT, batch_size), Net(0.25), total_frames=24)
        before = take(collector, cut)
        saved, stats = collector.state_dict(), replace(collector.stats(), policy=())
        if cut < 4:
            take(collector, 1)  # a batch after the save isn't part of the state
        restored = make(CountingEnv(SCRIPT, batch_size), Net(), total_frames=24)
        restored.load_state_dict(self.through_a_file(saved))
        assert restored.stats() == stats or math.isnan(stats.mean_return)
        assert restored.stats().delivered == stats.delivered and restored.stats().episodes == stats.episodes
        after = list(restored)
        assert len(after) == 4 - cut and all((batch["action"] == 0.25).all() for batch in after)
        check_names([*before, *after])  # type: ignore[list-item]
        assert restored.stats().delivered == restored.stats().stepped == 24

    @pytest.mark.parametrize("cut", [0, 1, 3])
    @pytest.mark.parametrize("batch_size", [(), (2,)])
    def test_collector_that_loads_an_earlier_state_reuses_no_id(
        self, cut: int, batch_size: tuple[int, ...]
    ) -> None:
        collector = make(CountingEnv(SCRIPT, batch_size))
        take(collector, cut)
        saved = collector.state_dict()
        seen = {int(n) for batch in take(collector, 2) for n in batch[IDS].reshape(-1)}
        for _ in range(2):
            collector.load_state_dict(saved)
            again = {int(n) for batch in take(collector, 2) for n in batch[IDS].reshape(-1)}
            assert not seen & again
            seen |= again

    def test_running_collector_continues_from_a_loaded_state(self) -> None:
        collector = make(CountingEnv(NEVER))
        take(collector, 1)
        state = collector.state_dict()
        expected = take(collector, 1)
        collector.load_state_dict(state)
        assert (take(collector, 1)[0]["observation"] == expected[0]["observation"]).all()

    @pytest.mark.parametrize("entry", ["env_state_dict", "policy_state_dict", "frames", "iter"])
    def test_a_missing_entry_is_an_error_unless_not_strict(self, entry: str) -> None:
        collector = make(policy=Net())
        take(collector, 1)
        state = collector.state_dict()
        del state[entry]
        other = make(policy=Net(3.0))
        with pytest.raises(MissingKeyError, match=entry):
            other.load_state_dict(state)
        assert other.stats().delivered == 0 and float(other.state_dict()["frames"]) == 0
        other.load_state_dict(state, strict=False)
        assert other.stats().delivered == 6

    @pytest.mark.parametrize("wrong", [torch.empty(0), torch.ones(2), [], 3])
    def test_invalid_environment_state_changes_nothing(self, wrong: object) -> None:
        state = make(policy=Net()).state_dict() | {"env_state_dict": wrong, "frames": 5}
        other = make(policy=Net(3.0))
        with pytest.raises(SchemaError, match="the state of a CountingEnv"):
            other.load_state_dict(state)
        assert other.state_dict()["frames"] == 0

    def test_an_argument_that_the_policy_doesnt_take_is_an_error_before_anything_changes(self) -> None:
        collector = make(TransformedEnv(CountingEnv(NEVER), RewardSum()), Net())
        take(collector, 1)
        other = make(TransformedEnv(CountingEnv(NEVER), RewardSum()), Net(3.0))
        with pytest.raises(InvalidTypeError, match="unexpected keyword argument 'rubbish'"):
            other.load_state_dict(collector.state_dict(), rubbish=1)
        assert collector.env.transform.carried["episode_reward"] != 0
        assert other.env.transform.carried["episode_reward"] == 0 and other.stats().delivered == 0

    def test_an_unexpected_entry_is_an_error_unless_not_strict(self) -> None:
        state = make(policy=Net()).state_dict()
        state["frames"] = 5
        other = make()
        with pytest.raises(SchemaError, match="unexpected .*policy_state_dict"):
            other.load_state_dict(state)
        assert other.state_dict()["frames"] == 0
        other.load_state_dict(state, strict=False)
        assert other.state_dict()["frames"] == 5

    def test_state_with_the_four_entries_of_torchrl_loads(self) -> None:
        collector = make(policy=Net(2.0))
        take(collector, 2)
        state = {k: v for k, v in collector.state_dict().items() if k != "source"}
        other = make(policy=Net(), total_frames=18)
        other.load_state_dict(state)
        assert [float(batch["action"].max()) for batch in other] == [2.0]


@pytest.mark.slow
class TestMemory:
    """Memory doesn't grow with the number of batches; one batch has a quarter of a megabyte."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"return_same_td": True, "storing_device": "cpu:0"},
            {"nonfinite": "mark", "max_frames_per_traj": 3, "split_trajs": True},
        ],
    )
    def test_memory_does_not_grow_with_batches(self, options: dict[str, Any]) -> None:
        env = CountingEnv(Script(lengths=(3,)))
        env.actions = env.masks = env.reset_kwargs = _Nothing()  # type: ignore[assignment]
        policy = on_td(lambda td: [td.set("hidden", torch.ones(1 << 14)), torch.zeros(2)][1])
        batches = iter(make(env, policy, frames=4, **options))
        tracemalloc.start()
        try:
            self.run(batches, 40)
            traced, resident = tracemalloc.get_traced_memory()[0], resident_bytes()
            self.run(batches, 100)
            assert tracemalloc.get_traced_memory()[0] - traced < 100 * 500, "500 bytes a batch"
            assert resident_bytes() - resident < 8 << 20, "80 kB a batch"
        finally:
            tracemalloc.stop()

    @staticmethod
    def run(batches: Any, count: int) -> None:
        for _ in range(count):
            next(batches)
        gc.collect()


class _Nothing(list[Any]):
    """A list that keeps no items."""

    def append(self, item: Any) -> None:
        """Drop the item."""


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_collector_is_not_copied(duplicate: Any) -> None:
    with pytest.raises(UnsupportedError, match="state_dict"):
        duplicate(make(CountingEnv(NEVER)))
