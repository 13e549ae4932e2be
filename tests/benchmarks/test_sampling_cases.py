"""Cases of prioritized draws, slices and the sweep have correct rows, limits and pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import prioritized, slices
from benchmarks.harness import Case, CaseResult, Growth
from benchmarks.report import wording
from benchmarks.workload import Updates, chunks_of_episodes, episode_rows

ROOT = Path(__file__).resolve().parents[2]
DRAWING = """
import sys
from pathlib import Path
from benchmarks import sweep
from benchmarks.harness import CaseResult
run = CaseResult(sweep.CASES[0], {name: [1e5, 2e5, 3e5] for name in sweep.CASES[0].sides})
assert not sweep.plot([], Path(sys.argv[1]))
assert sweep.plot([run], Path(sys.argv[1]))
"""
GROWTH = Growth(1.1, ("small", "large"), ("c small", "c large"))


def ends_of(flag: np.ndarray) -> np.ndarray:
    return np.flatnonzero(flag[:, 0])


def test_episodes_are_200_steps_long_on_average_and_differ_in_id() -> None:
    columns = episode_rows(100_000)
    ends = ends_of(columns["next", "done"])
    lengths = np.diff(ends)
    assert lengths.min() >= 1
    assert lengths.max() <= 399
    assert abs(lengths.mean() - 200) < 15
    changes = np.flatnonzero(np.diff(columns["collector", "traj_ids"]))
    np.testing.assert_array_equal(changes, ends[ends < 99_999])
    either = columns["next", "terminated"] | columns["next", "truncated"]
    np.testing.assert_array_equal(either, columns["next", "done"])


def test_chunks_are_episodes_with_different_ids() -> None:
    chunks = chunks_of_episodes(20, chunks=3)
    for columns in chunks:
        assert ends_of(columns["next", "done"]).tolist() == [19]
    assert len({int(columns["collector", "traj_ids"][0]) for columns in chunks}) == 3


def test_updates_never_repeat_a_pair() -> None:
    updates = Updates(1000, 4, calls=5, convert=torch.from_numpy)
    seen = set()
    for _ in range(4):
        pairs = [(tuple(index.tolist()), tuple(priority.tolist())) for index, priority in updates.turn()]
        assert len(pairs) == 5
        assert not seen & set(pairs)
        seen |= set(pairs)


def test_the_table_draws_slices_of_one_episode() -> None:
    columns = episode_rows(5000)
    table = slices.Table(columns)
    ids = columns["collector", "traj_ids"]
    for _ in range(50):
        first = table.draw()
        assert first.shape == (slices.SLICES,)
        np.testing.assert_array_equal(ids[first], ids[first + slices.LENGTH - 1])


def test_gleanrl_buffers_hold_the_limits_rows() -> None:
    columns = episode_rows(2000)
    batch = slices.our_buffer(2000, columns).sample()
    np.testing.assert_array_equal(batch["observation"], columns["observation",][batch["index"]])
    assert len(set(batch["collector", "traj_ids"][: slices.LENGTH].tolist())) == 1
    drawn = prioritized.our_buffer(2000, columns).sample(256)
    np.testing.assert_array_equal(drawn["observation"], columns["observation",][drawn["index"]])
    assert drawn["_weight"].unique().numel() > 100


def test_a_cursor_writes_around_the_ring() -> None:
    columns = {path: column.copy() for path, column in episode_rows(8).items()}
    write = prioritized.writer(columns, 4)
    assert [write()[0].tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_growth_is_judged_by_the_ratios_within_a_round() -> None:
    case = Case("t/growth", "", "call", {}, "c small", (GROWTH,), subject="large")
    speeds = {"small": [10.0, 1.0], "large": [5.0, 0.5], "c small": [4.0, 4.0], "c large": [2.0, 2.2]}
    run = CaseResult(case, dict(speeds))
    assert run.growth(("small", "large")) == [2.0, 2.0]
    assert run.verdict(GROWTH) is True  # 2 over 2, and 2 over 1.82
    run.speeds["large"] = [4.0, 0.4]
    assert run.verdict(GROWTH) is False
    del run.speeds["c large"]
    assert run.verdict(GROWTH) is None
    assert wording(GROWTH) == "growth <= 1.1 x that of c small to c large"


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "sweep.png"
    # A subprocess draws it, because matplotlib keeps its font files open.
    done = subprocess.run([sys.executable, "-c", DRAWING, picture], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes()[:4] == b"\x89PNG"
