"""`from_lerobot` decodes videos frame by frame for the right rows, and refuses videos that don't fit them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.data import from_lerobot
from gleanrl.errors import DatasetError, UnsupportedError
from tests.lerobots import CAMERA, FPS, LENGTHS, ROWS, STATE, feature, second, third, with_camera

try:
    from torchcodec.decoders import VideoDecoder
    from torchcodec.encoders import VideoEncoder

    REASON = ""
except (ImportError, OSError, RuntimeError) as cause:
    REASON = f"torchcodec can't be imported: {str(cause).strip().splitlines()[0]}"
needs_torchcodec = pytest.mark.skipif(bool(REASON), reason=REASON)
KEY = tuple(CAMERA.split("."))
SHAPE = (16, 24, 3)
LAST = {"names": ["height", "width", "channels"]}
FRAMES = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), dtype=np.uint8)
SPANS = [slice(0, LENGTHS[0]), slice(LENGTHS[0], ROWS)]


def write(path: Path, frames: np.ndarray, fps: float = FPS, **options: Any) -> None:
    """Write a video without loss; B-frames and one key frame make a search expensive and the order of packets mixed."""
    chosen = {"codec": "libx264rgb", "crf": 0, "pixel_format": "rgb24", "extra_options": {"g": 1000, "bf": 2}}
    encoder = VideoEncoder(torch.from_numpy(frames).permute(0, 3, 1, 2), frame_rate=fps)
    encoder.to_file(path, **{**chosen, **options})


def frames_of(root: Path, **options: Any) -> np.ndarray:
    return from_lerobot(root, next_observation=False, **options)[:][KEY].numpy()


def filled(root: Path, **changed: Any) -> Path:
    """Return a folder of version 3 with both episodes in one video."""
    (path,) = with_camera(third(root), feature("video", *SHAPE, **LAST), **changed)
    write(path, FRAMES[:ROWS])
    return root


@needs_torchcodec
@pytest.mark.filterwarnings("ignore:.*terminated steps have no next observation")
@pytest.mark.parametrize("layout", [second, third])
def test_frames_and_next_frames_are_those_of_the_rows(tmp_path: Path, layout: Any):
    root = layout(tmp_path / "set")
    paths = with_camera(root, feature("video", *SHAPE, **LAST))
    for path, span in zip(paths, SPANS if layout is second else [slice(ROWS)], strict=True):
        write(path, FRAMES[span])
    steps = from_lerobot(root)[:]
    kept = np.array([0, 1, 2, 4, 5, 6, 7, 8])
    assert steps[KEY].dtype == torch.uint8 and np.array_equal(steps[KEY], FRAMES[kept])
    assert np.array_equal(steps["next"][KEY], FRAMES[kept + 1])
    assert np.array_equal(steps["observation", "state"], STATE[kept])
    assert KEY not in from_lerobot(root, video=False)[:].keys(True)


@needs_torchcodec
@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["channels", "height", "width"], True),
        (["channel", "height", "width"], True),
        (None, True),
        (None, False),
    ],
)
def test_frames_have_the_layout_of_the_feature(tmp_path: Path, names: Any, first: bool):
    shape = (3, *SHAPE[:2]) if first else SHAPE
    (path,) = with_camera(third(tmp_path), feature("video", *shape, names=names))
    write(path, FRAMES[:ROWS])
    expected = np.moveaxis(FRAMES[:ROWS], 3, 1) if first else FRAMES[:ROWS]
    assert np.array_equal(frames_of(tmp_path), expected)


@needs_torchcodec
@pytest.mark.parametrize(
    ("starts", "files"),
    [
        ((0.0, 0.4), (0, 0)),
        ((1.3, 2.0), (0, 0)),  # unused frames before, between and behind
        ((2.0, 0.7), (0, 0)),  # in another order
        ((0.5, 3.0), (0, 1)),  # in two files
        ((0.53, 0.88), (0, 0)),  # times that drift by less than half a frame
    ],
)
def test_episodes_begin_anywhere_in_a_file(tmp_path: Path, starts: Any, files: Any):
    paths = with_camera(third(tmp_path), feature("video", *SHAPE, **LAST), starts, files)
    others = FRAMES[::-1].copy()
    for path, frames in zip(paths, (FRAMES, others), strict=False):
        write(path, frames)
    expected = []
    for start, file, length in zip(starts, files, LENGTHS, strict=True):
        first = round(start * FPS)
        expected.append((others if file else FRAMES)[first : first + length])
    assert np.array_equal(frames_of(tmp_path), np.concatenate(expected))


@needs_torchcodec
@pytest.mark.parametrize("codec", ["libx264", "libsvtav1"])  # LeRobot writes both
def test_frames_of_lossy_videos_are_those_of_the_decoder(tmp_path: Path, codec: str):
    (path,) = with_camera(third(tmp_path), feature("video", 64, 96, 3, **LAST), (1.0, 2.0))
    smooth = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None, None] * 6, (40, 64, 96, 3))
    options = {"codec": codec, "crf": 30, "pixel_format": "yuv420p", "extra_options": {"g": 2}}
    try:
        write(path, np.ascontiguousarray(smooth), **options)
    except RuntimeError as cause:
        pytest.skip(f"FFmpeg can't write {codec}: {str(cause).splitlines()[0]}")
    numbers = [*range(10, 14), *range(20, 26)]
    decoded = VideoDecoder(path, dimension_order="NHWC").get_frames_at(numbers).data.numpy()
    assert np.array_equal(frames_of(tmp_path), decoded)
    assert (np.abs(decoded.mean((1, 2, 3)) - np.array(numbers) * 6) < 3).all()


@needs_torchcodec
def test_an_episode_of_many_blocks_is_read_once_and_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gleanrl.data.datasets.videos._BATCH_BYTES", 2 * FRAMES[0].nbytes)
    asked: list[tuple[int, int]] = []
    original = VideoDecoder.get_frames_in_range

    def spied(self: Any, start: int, stop: int) -> Any:
        asked.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(VideoDecoder, "get_frames_in_range", spied)
    assert np.array_equal(frames_of(filled(tmp_path)), FRAMES[:ROWS])
    assert asked == [(start, start + 2) for start in range(0, ROWS, 2)]


@needs_torchcodec
@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (FRAMES[:3], "episode_000000.mp4: .*images.top': expected 4 frames, as episode 0 has rows, got 3"),
        (FRAMES[:5], "expected 4 frames, as episode 0 has rows, got 5"),
        (FRAMES[:4, :, :8], r"expected frames \(16, 24, 3\), as meta/info.json says, got \(16, 8, 3\)"),
    ],
)
def test_videos_of_other_lengths_and_sizes_are_refused(tmp_path: Path, frames: np.ndarray, message: str):
    paths = with_camera(second(tmp_path / "set"), feature("video", *SHAPE, **LAST))
    write(paths[0], np.ascontiguousarray(frames))
    write(paths[1], FRAMES[:6])
    with pytest.raises(DatasetError, match=message):
        frames_of(tmp_path / "set")


@needs_torchcodec
def test_a_video_of_version_three_without_the_last_frame_is_refused(tmp_path: Path):
    (path,) = with_camera(third(tmp_path), feature("video", *SHAPE, **LAST))
    write(path, FRAMES[: ROWS - 1])
    message = "file-000.mp4.*expected frame 5 of episode 1 at 0.9 s.*got the end of the video; the video has 9 frames"
    with pytest.raises(DatasetError, match=message):
        frames_of(tmp_path)


@needs_torchcodec
@pytest.mark.parametrize("fps", [5, 9, 20])
def test_videos_of_another_rate_are_refused(tmp_path: Path, fps: float):
    (path,) = with_camera(third(tmp_path), feature("video", *SHAPE, **LAST))
    write(path, FRAMES, fps)
    with pytest.raises(
        DatasetError, match=rf"expected frame \d of .*10 frames per second, got .*{fps} per second"
    ):
        frames_of(tmp_path)


@needs_torchcodec
@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the program ffmpeg")
def test_a_video_that_lost_a_frame_is_refused(tmp_path: Path):
    (path,) = with_camera(third(tmp_path), feature("video", *SHAPE, **LAST))
    write(tmp_path / "whole.mp4", FRAMES)
    select = ["-vf", "select=not(eq(n\\,6))", "-fps_mode", "vfr", "-c:v", "libx264rgb", "-crf", "0"]
    subprocess.run(["ffmpeg", "-loglevel", "error", "-i", tmp_path / "whole.mp4", *select, path], check=True)
    with pytest.raises(DatasetError, match="expected frame 2 of episode 1 at 0.6 s.*got 0.7 s"):
        frames_of(tmp_path)


@needs_torchcodec
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"starts": (0.0, 0.3)},
            "file-000.mp4: .*other frames for each episode, got episode 0 from 0 s and episode 1",
        ),
        ({"starts": (0.0, 0.0)}, "other frames for each episode"),
        ({"starts": (-1.0, 0.4)}, "expected 4 frames of episode 0, 10 per second, got the times -1 s to"),
        ({"starts": (float("nan"), 0.4)}, "got the times nan s"),
        (
            {"stops": (0.4, 0.9)},
            "expected 6 frames of episode 1, 10 per second, got the times 0.4 s to 0.9 s",
        ),
        ({"starts": (0.0, 5.0)}, "expected frame 0 of episode 1 at 5 s, 10 frames per second, got 0.9 s"),
        ({"files": (0, 7)}, "expected the video of episode 1 at .*file-007.mp4, got no such file"),
    ],
)
def test_times_and_files_that_contradict_each_other_are_refused(tmp_path: Path, changed: Any, message: str):
    paths = with_camera(third(tmp_path), feature("video", *SHAPE, **LAST), **changed)
    write(paths[0], FRAMES[:ROWS])
    with pytest.raises(DatasetError, match=message):
        frames_of(tmp_path)


@needs_torchcodec
@pytest.mark.parametrize(
    ("described", "error", "message"),
    [
        (
            feature("video", 16, 24, 1, **LAST),
            DatasetError,
            r"expected frames \(height, width, 3\).*\(16, 24, 1\)",
        ),
        (feature("video", 3, 16, 24, **LAST), DatasetError, r"expected frames \(height, width, 3\)"),
        (feature("video", 16, 24), DatasetError, r"got the shape \(16, 24\)"),
        (feature("video", *SHAPE, info={"video.is_depth_map": True}), UnsupportedError, "videos of depths"),
        ({"dtype": "video", "names": None}, DatasetError, "expected metadata of this format"),
    ],
)
def test_features_that_are_no_colour_videos_are_refused(
    tmp_path: Path, described: Any, error: Any, message: str
):
    with_camera(third(tmp_path), described)
    with pytest.raises(error, match=message):
        frames_of(tmp_path)


@needs_torchcodec
def test_a_damaged_video_is_refused(tmp_path: Path):
    root = filled(tmp_path)
    (path,) = root.rglob("*.mp4")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match="file-000.mp4: .*images.top': expected a readable video"):
        frames_of(root)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(DatasetError, match="expected a path in this folder"):
        frames_of(root)


@needs_torchcodec
def test_records_above_the_limit_are_mapped_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root, scratch = filled(tmp_path / "set"), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert np.array_equal(frames_of(root, memmap_above=0), FRAMES[:ROWS])
    (path,) = root.rglob("*.mp4")
    write(path, FRAMES[: ROWS - 1])
    with pytest.raises(DatasetError, match="the end of the video"):
        frames_of(root, memmap_above=0)
    assert not [*scratch.iterdir()]


def test_videos_without_torchcodec_name_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_camera(third(tmp_path), feature("video", *SHAPE, **LAST))
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    with pytest.raises(
        UnsupportedError, match=r"images.top'\]: .*pip install 'gleanrl\[video\]'.*video=False"
    ) as raised:
        from_lerobot(tmp_path)
    assert "FFmpeg" in str(raised.value)
    assert KEY not in from_lerobot(tmp_path, video=False, next_observation=False)[:].keys(True)
