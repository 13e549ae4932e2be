"""`from_parquet` and `from_lerobot` read rows in order, and refuse missing, reordered and uneven ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.data import from_lerobot, from_parquet
from gleanrl.errors import DatasetError
from tests.conversions import during_conversion
from tests.lerobots import ROWS, STATE, arrow, columns, feature, info, parquet, second, third


@pytest.mark.filterwarnings("ignore:.*terminated steps have no next observation")
@pytest.mark.parametrize("layout", [second, third])
def test_both_versions_of_lerobot_give_the_same_records(tmp_path: Path, layout: Any):
    buffer = from_lerobot(layout(tmp_path / "set"), batch_size=3)
    kept = [0, 1, 2, 4, 5, 6, 7, 8]
    steps = buffer[:]
    assert np.array_equal(steps["observation", "state"], STATE[kept])
    assert np.array_equal(steps["next", "observation", "state"], STATE[np.add(kept, 1)])
    assert np.array_equal(steps["action"], -STATE[kept])
    assert steps["next", "reward"][:, 0].tolist() == kept and steps["frame_index"].tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
        3,
        4,
    ]
    assert steps["collector", "traj_ids"].tolist() == [-2] * 3 + [-3] * 5
    assert steps["next", "truncated"][:, 0].nonzero()[:, 0].tolist() == [2, 7]
    whole = from_lerobot(tmp_path / "set", next_observation=False)[:]
    assert len(whole) == ROWS and whole["next", "terminated"][:, 0].nonzero()[:, 0].tolist() == [3, 9]


def test_data_set_without_rewards_gives_records_without_rewards(tmp_path: Path):
    root = third(tmp_path, **{"next.reward": None, "next.done": None})
    features = json.loads((root / "meta/info.json").read_text())["features"]
    info(root, "v3.0", features={name: features[name] for name in features if not name.startswith("next")})
    steps = from_lerobot(root)[:]
    assert ("next", "reward") not in steps.keys(True) and len(steps) == 8


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"numbers": (0, 2)}, "expected the episodes 0 to 2"),
        (
            {"lengths": (5, 5)},
            "'episode_index': expected 0 in row 4.*got 1; episodes are missing or reordered",
        ),
        ({"lengths": (4, 7)}, "expected as many rows as the metadata say.*11 in the episodes, got 10"),
        ({"lengths": (4, -1)}, "each with a frame or more"),
        (
            {"next.done": arrow.array(np.isin(np.arange(ROWS), [1, 3, 9]))},
            "flags only in the last row of an episode, got one in row 1",
        ),
        ({"frame_index": arrow.array([1, 0, 2, 3, *range(6)])}, "'frame_index': expected 0 in row 0.*got 1"),
        (
            {"action": arrow.array([[1.0]] * 9 + [[1.0, 2.0]])},
            "'action'.*got 1 and 2|'action': expected rows",
        ),
        ({"action": arrow.array([None] + [[1.0, 2.0]] * 9)}, "'action'.*got null in row 0"),
        ({"action": arrow.array(["x"] * ROWS)}, "'action': expected rows"),
        ({"action": None}, "expected a column 'action'"),
    ],
)
def test_lerobot_folders_that_contradict_their_metadata_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
):
    with pytest.raises(DatasetError, match=message):
        from_lerobot(third(tmp_path, **changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version v2.x or v3.x.*'v1.6'"),
        ({"data_path": "../{chunk_index:03d}/{file_index}"}, "expected a path in this folder"),
        ({"data_path": "/etc/{chunk_index:03d}"}, "expected a path in this folder"),
        ({"data_path": "{secret}"}, "expected data_path with"),
        ({"data_path": "data/{chunk_index:03d}"}, "to be a file in the folder"),
        ({"data_path": None}, "expected a text data_path"),
        ({"total_frames": 11}, "as many rows as the metadata say, 11 in all"),
        ({"features": {"action": None}}, "expected metadata of this format"),
        ({"features": {"action": feature("float32", "x")}}, "expected metadata of this format"),
    ],
)
def test_forged_metadata_of_lerobot_are_refused(tmp_path: Path, changed: Any, message: str):
    third(tmp_path / "set")
    info(tmp_path / "set", "v3.0", **changed)
    with pytest.raises(DatasetError, match=message):
        from_lerobot(tmp_path / "set")


@pytest.mark.parametrize(
    "lines",
    ['{"episode_index": 0', "[]", "{}", '{"episode_index": 0, "length": []}', '{"episode_index": 1e999}'],
)
def test_damaged_lists_of_episodes_are_refused(tmp_path: Path, lines: str):
    root = second(tmp_path / "set")
    (root / "meta/episodes.jsonl").write_text(lines)
    with pytest.raises(DatasetError, match="expected metadata of this format"):
        from_lerobot(root)


def test_flags_within_an_episode_are_kept_if_the_caller_accepts_them(tmp_path: Path):
    done = arrow.array(np.isin(np.arange(ROWS), [1, 3, 9]))
    root = third(tmp_path / "set", **{"next.done": done})
    whole = from_lerobot(root, next_observation=False, verify=False)[:]
    assert whole["next", "terminated"][:, 0].nonzero()[:, 0].tolist() == [1, 3, 9]


def test_links_out_of_the_folder_are_refused(tmp_path: Path):
    root = third(tmp_path / "set")
    file = root / "data/chunk-000/file-000.parquet"
    file.rename(tmp_path / "elsewhere.parquet")
    file.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(DatasetError, match="expected a path in this folder"):
        from_lerobot(root)


def test_rows_of_other_programs_are_read_in_the_order_of_the_files(tmp_path: Path):
    table = arrow.table(columns())
    for number, start in ((2, 0), (10, 4)):
        parquet.write_table(table.slice(start, 4 if number == 2 else 6), tmp_path / f"part-{number}.parquet")
    with pytest.raises(DatasetError, match="'index': expected another key"):
        from_parquet(tmp_path, episode="episode_index", step="frame_index")
    named = {"observation": "observation.state", "row": "index"}
    steps = from_parquet(tmp_path, named, episode="episode_index", step="frame_index")[:]
    assert steps["row"].tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    chosen = {"observation": "observation.state", ("next", "terminated"): "next.done"}
    steps = from_parquet(tmp_path, chosen)[:]
    assert {*steps.keys()} == {"observation", "next", "collector"} and len(steps) == 8


def test_bad_parquet_files_are_refused(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(FileNotFoundError):
        from_parquet(path)
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(DatasetError, match=r"rows\.parquet: expected a readable Parquet"):
        from_parquet(path)
    parquet.write_table(arrow.table(columns()), path)
    with pytest.raises(DatasetError, match="expected a column 'episode'"):
        from_parquet(path, episode="episode")
    parquet.write_table(arrow.table(columns(frame_index=arrow.array([0, 1, 3, 2, *range(6)]))), path)
    with pytest.raises(DatasetError, match=r"'frame_index': .*got 3 after 1 in row 2"):
        from_parquet(path, episode="episode_index", step="frame_index")
    parquet.write_table(arrow.table({"a": [1]}), tmp_path / "rows2.parquet")
    with pytest.raises(DatasetError, match=r"expected the columns of the first.*instead of \['a: int64'\]"):
        from_parquet(tmp_path, episode="episode_index")
    (tmp_path / "rows2.parquet").unlink()
    parquet.write_table(arrow.table(columns()).slice(0, 0), path)
    with pytest.raises(DatasetError, match="at least one row"):
        from_parquet(path, episode="episode_index")


@pytest.mark.parametrize("change", ["cut", "overwrite"])
def test_a_parquet_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str):
    rows, path = 20_000, tmp_path / "rows.parquet"
    flags = {"terminated": np.arange(rows) % 10 == 9, "truncated": np.zeros(rows, bool)}
    values = np.random.default_rng(0).normal(size=rows)
    parquet.write_table(arrow.table({"observation": values, "reward": values, **flags}), path)

    def written() -> None:
        if change == "cut":
            os.truncate(path, path.stat().st_size // 4)
        else:
            with path.open("r+b") as file:
                file.write(bytes(100_000))

    with during_conversion(written), pytest.raises(DatasetError, match=r"rows\.parquet"):
        from_parquet(path)
