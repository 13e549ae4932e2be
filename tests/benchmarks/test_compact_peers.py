"""The comparison of compact buffers finds each kind of wrong row, and none in gleanrl's buffers."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import compact_peers


@pytest.mark.parametrize("kind", compact_peers.KINDS)
def test_each_kind_of_wrong_row_is_found(kind: str) -> None:
    stream = compact_peers.Stream(kind, 400, 2)
    steps = stream.steps(0, 400)
    ends = [steps.terminated, steps.truncated, ~(steps.terminated | steps.truncated)]
    rows = {name: column.reshape(-1, *column.shape[2:]) for name, column in steps._asdict().items()}
    assert not stream.wrong(rows)
    at = [int(end.reshape(-1).nonzero()[0][0]) for end in ends]
    for name, row, wrong in (
        ("observation", 0, "root"),
        ("action", 1, "root"),
        ("following", at[0], "terminated"),
        ("following", at[1], "truncated"),
        ("following", at[2], "inside"),
        ("terminated", 2, "flags"),
        ("truncated", 3, "flags"),
    ):
        changed = rows[name].copy()
        changed[row] = ~changed[row] if changed.dtype == bool else changed[row] + 1
        assert stream.wrong({**rows, name: changed}) == {wrong: 1}
    assert stream.wrong({**rows, "following": np.zeros_like(rows["following"])}) == {"missing": 800}


@pytest.mark.parametrize("side", [side for side in compact_peers.SIDES if "gleanrl" in side])
@pytest.mark.parametrize("envs", [1, 2])
def test_all_rows_of_gleanrl_are_right(monkeypatch: pytest.MonkeyPatch, side: str, envs: int) -> None:
    monkeypatch.setattr(compact_peers, "DRAWN", 2000)
    monkeypatch.setitem(compact_peers.CHECKED, "stacks", 60)
    assert compact_peers.wrong_of(side, "stacks", envs) == {}
