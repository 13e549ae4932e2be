"""Small folders in LeRobot's layout, with two episodes of 4 and 6 rows, for tests. They need pyarrow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
LENGTHS = (4, 6)
ROWS = sum(LENGTHS)
FPS = 10
STATE = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
CAMERA = "observation.images.top"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


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
        "timestamp": arrow.array((frame / FPS).astype(np.float32)),
        "frame_index": arrow.array(frame),
        "episode_index": arrow.array(np.repeat([0, 1], LENGTHS)),
        "index": arrow.array(np.arange(ROWS)),
        "task_index": arrow.array(np.zeros(ROWS, np.int64)),
    }
    return {name: column for name, column in {**found, **changed}.items() if column is not None}


def feature(dtype: str, *shape: Any, names: Any = None, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": names, **more}


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
        "fps": FPS,
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
    parquet.write_table(arrow.table(table), root / EPISODES)
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


def with_camera(
    root: Path,
    described: dict[str, Any],
    starts: Sequence[float] = (0.0, LENGTHS[0] / FPS),
    files: Sequence[int] = (0, 0),
    stops: Sequence[float] | None = None,
) -> list[Path]:
    """Add a camera to the metadata of a folder, and return the paths of its videos, which the caller writes.

    Args:
        root: a folder of `second` or `third`.
        described: the feature in ``meta/info.json``.
        starts: the times of the episodes in their files, for version 3.
        files: the numbers of their files, for version 3.
        stops: the times of their ends; None for the ends that fit their lengths.
    """
    found = json.loads((root / "meta/info.json").read_text())
    third = found["codebase_version"] == "v3.0"
    path = (
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        if third
        else "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    )
    features = {**found["features"], CAMERA: described}
    (root / "meta/info.json").write_text(json.dumps({**found, "features": features, "video_path": path}))
    if third:
        ends = stops or [start + length / FPS for start, length in zip(starts, LENGTHS, strict=True)]
        table = parquet.read_table(root / EPISODES)
        table = table.select([name for name in table.column_names if not name.startswith("videos/")])
        more = {
            "chunk_index": [0, 0],
            "file_index": [*files],
            "from_timestamp": [*starts],
            "to_timestamp": ends,
        }
        for name, values in more.items():
            table = table.append_column(f"videos/{CAMERA}/{name}", arrow.array(values))
        parquet.write_table(table, root / EPISODES)
    folder = root / (f"videos/{CAMERA}/chunk-000" if third else f"videos/chunk-000/{CAMERA}")
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        [f"file-{n:03d}.mp4" for n in sorted({*files})] if third else [f"episode_{n:06d}.mp4" for n in (0, 1)]
    )
    return [folder / name for name in names]
