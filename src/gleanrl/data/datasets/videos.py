"""Frames of the videos in a folder in LeRobot's layout, decoded by torchcodec in the order of the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl.data.datasets.conversion import Array, RowSource
from gleanrl.errors import DatasetError, UnsupportedError

_BATCH_BYTES = 4 << 20
_TOLERANCE = 0.49  # of a frame, between a row's time and its frame's: no other frame is as near
_MOST_JUMPS = 8  # to the first frame of an episode; times that drift need more than one


class Clip(NamedTuple):
    """The part of a video that shows one episode."""

    episode: int
    path: FilePath
    start_s: float
    """The time of the first frame in the video."""
    stop_s: float | None
    """The time behind the last frame; None if the episode is the whole video."""
    length: int
    """The number of frames."""


def video_source(
    where: str, decoder: Any, feature: Mapping[str, Any], fps: float, clips: Sequence[Clip], times: Array
) -> RowSource:
    """Return the source of a video's frames, uint8 in the shape that the feature says.

    Row `t` of an episode is frame `t` of its clip. The time of the frame must be the time of the row, with a tolerance
    of half a frame. Frames are decoded in blocks of 4 MB.

    Args:
        where: the folder and the name of the feature, for error messages.
        decoder: the class `torchcodec.decoders.VideoDecoder`.
        feature: the description of the feature in ``meta/info.json``.
        fps: frames per second.
        clips: the clips of all episodes, in the order of the rows.
        times: the seconds of each row since the start of its episode, ``(rows,)`` float64.

    Raises:
        DatasetError: the metadata contradict each other, or the first video is damaged or has another size.
        UnsupportedError: the video holds depths instead of colours.
    """
    shape, first = _frame_shape(where, feature)
    _check_clips(where, fps, clips)

    def opened(path: FilePath) -> _Video:
        return _Video(f"{path}: {where}", decoder, path, shape, first, fps)

    opened(clips[0].path)  # a wrong size is refused before columns are allocated

    def blocks() -> Iterator[Array]:
        video, path, row = None, None, 0
        for clip in clips:
            if video is None or path != clip.path:
                video, path = opened(clip.path), clip.path
            yield from video.frames(clip, clip.start_s + times[row : row + clip.length])
            row += clip.length

    return RowSource(where, len(times), shape, torch.uint8, blocks)


def _frame_shape(where: str, feature: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Return the shape of frames, and whether their channels are first."""
    shape, names = tuple(map(int, feature["shape"])), feature.get("names")
    details = {**feature, **(feature.get("info") or {})}
    if details.get("is_depth_map") or details.get("video.is_depth_map"):
        raise UnsupportedError(f"{where}: videos of depths aren't decoded; video=False leaves out all videos")
    named = str(names[0]).startswith("channel") if isinstance(names, list) and names else None
    first = named if named is not None else shape[:1] == (3,) and shape[-1:] != (3,)
    if len(shape) != 3 or min(shape) < 1 or shape[0 if first else 2] != 3:
        raise DatasetError(
            f"{where}: expected frames (height, width, 3) or (3, height, width) in meta/info.json, got the shape "
            f"{shape} with the names {names}"
        )
    return shape, first


def _check_clips(where: str, fps: float, clips: Sequence[Clip]) -> None:
    """Refuse missing files, times that don't fit the lengths of episodes, and episodes that share frames."""
    if not 0 < fps < math.inf:
        raise DatasetError(
            f"{where}: expected a number of frames per second in meta/info.json, got fps {fps}"
        )
    for clip in clips:
        if not clip.path.is_file():
            raise DatasetError(
                f"{where}: expected the video of episode {clip.episode} at {clip.path}, got no such file"
            )
        frames = clip.length if clip.stop_s is None else (clip.stop_s - clip.start_s) * fps
        if not (abs(frames - clip.length) < 0.5 and clip.start_s * fps > -0.5):
            raise DatasetError(
                f"{where}: expected {clip.length} frames of episode {clip.episode}, {fps:g} per second, got the times "
                f"{clip.start_s:g} s to {clip.stop_s:g} s in meta/episodes"
            )
    order = sorted(clips, key=lambda clip: (clip.path, clip.start_s))
    for one, other in zip(order[:-1], order[1:], strict=True):
        if one.path == other.path and one.start_s * fps + one.length > other.start_s * fps + 0.5:
            raise DatasetError(
                f"{one.path}: {where}: expected other frames for each episode, got episode {one.episode} from "
                f"{one.start_s:g} s and episode {other.episode} from {other.start_s:g} s; a file or time is wrong"
            )


class _Video:
    """An open video, which is decoded forward; only a jump to an earlier frame searches.

    Args:
        where: the file and the feature, for error messages.
        decoder: the class `torchcodec.decoders.VideoDecoder`.
        path: the file.
        shape: the shape of frames.
        first: whether their channels are first.
        fps: frames per second, as the metadata say.
    """

    def __init__(
        self, where: str, decoder: Any, path: FilePath, shape: tuple[int, ...], first: bool, fps: float
    ) -> None:
        self._where, self._fps, self._next = where, fps, 0
        self._step = max(1, _BATCH_BYTES // int(np.prod(shape)))
        order = "NCHW" if first else "NHWC"
        self._decoder = self._called(decoder, path, dimension_order=order, device="cpu", seek_mode="exact")
        about = self._decoder.metadata
        self._count = about.num_frames
        self._contents = f"the video has {self._count} frames, {about.average_fps or 0:g} per second"
        found = (3, about.height, about.width) if first else (about.height, about.width, 3)
        if found != shape:
            raise DatasetError(f"{where}: expected frames {shape}, as meta/info.json says, got {found}")

    def _called(self, call: Any, *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except (RuntimeError, ValueError, LookupError, TypeError) as cause:
            reason = str(cause).strip().split("\n")[0]
            raise DatasetError(f"{self._where}: expected a readable video, got: {reason}") from cause

    def frames(self, clip: Clip, times: Array) -> Iterator[Array]:
        """Yield the frames of an episode, in blocks.

        Args:
            clip: the place of the episode.
            times: the times of its rows in the video, ``(clip.length,)`` float64.

        Raises:
            DatasetError: the video is damaged, has too few or too many frames, or shows them at other times.
        """
        if self._count < clip.length or (clip.stop_s is None and self._count != clip.length):
            raise DatasetError(
                f"{self._where}: expected {clip.length} frames, as episode {clip.episode} has rows, got {self._count}"
            )
        # The episode usually begins where the last one ended.
        at, done, jumps = min(self._next, self._count - 1), 0, 0
        while done < clip.length:
            stop = min(at + self._step, at + clip.length - done, self._count)
            if stop == at:
                raise self._error(clip, done, times[done], "the end of the video")
            block = self._called(self._decoder.get_frames_in_range, at, stop)
            found = block.pts_seconds.numpy()
            late = (found - times[done : done + stop - at]) * self._fps  # in frames
            wrong = np.flatnonzero(~(np.abs(late) < _TOLERANCE))
            if len(wrong):
                one = int(wrong[0])
                jump = int(np.clip(at - np.rint(late[0]), 0, self._count - 1)) if done == one == 0 else at
                if jump == at or jumps == _MOST_JUMPS:
                    raise self._error(clip, done + one, times[done + one], f"{found[one]:.6g} s")
                at, jumps = jump, jumps + 1
                continue
            yield block.data.numpy()
            at, done = stop, done + stop - at
        self._next = at

    def _error(self, clip: Clip, frame: int, time: float, found: str) -> DatasetError:
        return DatasetError(
            f"{self._where}: expected frame {frame} of episode {clip.episode} at {time:.6g} s, {self._fps:g} frames "
            f"per second, got {found}; {self._contents}"
        )
