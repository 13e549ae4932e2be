"""`from_parquet` and `from_lerobot` read rows in order, and refuse missing, reordered and uneven ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.data import from_lerobot, from_parquet
from gleanrl.errors import DatasetError, UnsupportedError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
LENGTHS = (4, 6)
ROWS = sum(LENGTHS)
STATE = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)


def lists(array: np.ndarray, variable: bool = False) -> Any:
    flat = arrow.array(array.reshape(-1))
    if variable:
        return arrow.ListArray.from_arrays(np.arange(len(array) + 1, dtype=np.int32) * array.shape[1], flat)
    return arrow.FixedSizeListArray.from_arrays(flat, array.shape[1])


def columns(**changed: Any) -> dict[str, Any]:
    frame = np.concatenate([np.arange(length) for length in LENGTHS])
    found = {
        "observation.state": lists(STATE),
        "action": lists(-STATE, variable=True),
        "next.reward": arrow.array(np.arange(ROWS, dtype=np.float32)),
        "next.done": arrow.array(np.isin(np.arange(ROWS), [3, 9])),
        "timestamp": arrow.array((frame / 10).astype(np.float32)),
        "frame_index": arrow.array(frame),
        "episode_index": arrow.array(np.repeat([0, 1], LENGTHS)),
        "index": arrow.array(np.arange(ROWS)),
        "task_index": arrow.array(np.zeros(ROWS, np.int64)),
    }
    return {name: column for name, column in {**found, **changed}.items() if column is not None}


def feature(dtype: str, *shape: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": None}


def info(root: Path, version: str, **changed: Any) -> None:
    third = version == "v3.0"
    features = {
        "observation.state": feature("float32", 2),
        "action": feature("float32", 2),
        "next.reward": feature("float32", 1),
        "next.done": feature("bool", 1),
        "timestamp": feature("float32", 1),
        **{name: feature("int64", 1) for name in ("frame_index", "episode_index", "index", "task_index")},
    }
    name = (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        if third
        else "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    )
    found = {
        "codebase_version": version,
        "total_episodes": 2,
        "chunks_size": 1000,
        "fps": 10,
        "data_path": name,
        "video_path": None,
        "features": features,
    }
    (root / "meta").mkdir(parents=True, exist_ok=True)
    (root / "meta/info.json").write_text(json.dumps({**found, **changed}))


def third(
    root: Path, numbers: Sequence[int] = (0, 1), lengths: Sequence[int] = LENGTHS, **changed: Any
) -> Path:
    info(root, "v3.0")
    (root / "data/chunk-000").mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns(**changed)), root / "data/chunk-000/file-000.parquet")
    zero = [0] * len(numbers)
    table = {
        "episode_index": [*numbers],
        "length": [*lengths],
        "data/chunk_index": zero,
        "data/file_index": zero,
    }
    (root / "meta/episodes/chunk-000").mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(table), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


def second(root: Path) -> Path:
    info(root, "v2.1")
    (root / "data/chunk-000").mkdir(parents=True)
    table, start, lines = arrow.table(columns()), 0, []
    for number, length in enumerate(LENGTHS):
        parquet.write_table(table.slice(start, length), root / f"data/chunk-000/episode_{number:06d}.parquet")
        lines.append(json.dumps({"episode_index": number, "tasks": ["stack"], "length": length}))
        start += length
    (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    return root


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
    ("changed", "error", "message"),
    [
        ({"codebase_version": "v1.6"}, DatasetError, "codebase_version v2.x or v3.x.*'v1.6'"),
        ({"data_path": "../{chunk_index:03d}/{file_index}"}, DatasetError, "expected a path in this folder"),
        ({"data_path": "/etc/{chunk_index:03d}"}, DatasetError, "expected a path in this folder"),
        ({"data_path": "{secret}"}, DatasetError, "expected data_path with"),
        ({"data_path": "data/{chunk_index:03d}"}, DatasetError, "to be a file in the folder"),
        ({"data_path": None}, DatasetError, "expected a text data_path"),
        ({"total_frames": 11}, DatasetError, "as many rows as the metadata say, 11 in all"),
        ({"features": {"action": None}}, DatasetError, "expected metadata of this format"),
        ({"features": {"action": feature("float32", "x")}}, DatasetError, "expected metadata of this format"),
        ({"features": {"video": feature("video", 8, 8, 3)}}, UnsupportedError, "video=False leaves out"),
    ],
)
def test_forged_metadata_of_lerobot_are_refused(tmp_path: Path, changed: Any, error: Any, message: str):
    third(tmp_path / "set")
    info(tmp_path / "set", "v3.0", **changed)
    with pytest.raises(error, match=message):
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
