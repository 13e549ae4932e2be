"""A look at stored records: a summary in text, and a page in HTML, for ``python -m gleanrl show``."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.results import text_table
from gleanrl._arrays.tensordicts import FLAGS, NestedKey, Path, as_key, iter_leaves
from gleanrl.data.datasets.opening import open_buffer, videos_of
from gleanrl.data.replay_buffers.describe import (
    BufferDescription,
    ColumnStatistics,
    StoredEpisodes,
    observed_twice,
)
from gleanrl.data.replay_buffers.export import replace_file
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.verify import AuditReport
from gleanrl.data.trajectories import TRAJ_IDS
from gleanrl.errors import MissingKeyError, SchemaError, UnsupportedError

# Limits of the page, which together keep it below 30 MB.
_MOST_LISTED = 20_000  # episodes in the list
_MOST_OPENED = 200  # episodes with steps, if not all fit
_MOST_NUMBERS = 1_000_000  # in the curves; about 9 bytes each
_MOST_VALUES = 16  # of a row of one column
_TEXT_WIDTH, _TEXT_LENGTH = 120, 200  # A text takes as much as so many numbers; most characters of a text
_MOST_FRAMES, _FRAME_BYTES = 4_000, 14 << 20
_SIDE = 160  # pixels of a picture
_SMALLEST = 8  # side of a picture
_BINS = 40
_COLUMNS = ("key", "dtype", "shape", "MB", "min", "mean", "max", "NaN", "constant")
Array = np.ndarray[Any, Any]


class _Contents(NamedTuple):
    """Stored records, and the results of the three calls that describe them."""

    storage: TensorStorage
    description: BufferDescription
    episodes: StoredEpisodes | None
    reason: str
    """The reason why `episodes` is None."""
    report: AuditReport
    videos: dict[str, list[int]]
    """The shapes of videos that weren't decoded, by name."""

    def first(self) -> Array:
        """Return the first slots of the episodes, ``(n,)`` int64; without episodes one for each stream."""
        if self.episodes is None:
            return self.storage.oldest_step * self.streams + np.arange(self.streams)
        return first_slots(self.storage, self.episodes)

    def length(self) -> Array:
        """Return the lengths of the episodes, ``(n,)`` int64."""
        if self.episodes is None:
            return np.full(self.streams, self.storage.num_steps)
        return self.episodes.length.numpy()

    @property
    def streams(self) -> int:
        return max(self.storage.rows_per_step, 1)

    def positions(self, slots: Sequence[int]) -> dict[int, tuple[int, int] | None]:
        """Return for each slot the number of its episode and the step in it; None if no episode holds the slot."""
        if not slots:
            return {}
        first, length, capacity = self.first(), self.length(), self.storage.capacity_steps
        starts = first % self.streams * capacity + first // self.streams  # sorted by stream and time step
        order = np.argsort(starts, kind="stable")
        found: dict[int, tuple[int, int] | None] = {}
        for slot in slots:
            stream, step = slot % self.streams, slot // self.streams
            low, at, high = np.searchsorted(
                starts, stream * capacity + np.array([0, step + 1, capacity]), sorter=order
            ).tolist()
            # Before the first beginning in its stream, a slot belongs to the run that the end of the ring cuts.
            one = int(order[(at if at > low else high) - 1]) if high > low else 0
            within = (step - int(first[one]) // self.streams) % capacity
            found[slot] = (one, within) if high > low and within < length[one] else None
        return found


def _contents(buffer: Any, videos: dict[str, list[int]]) -> _Contents:
    """Read a buffer with columns."""
    episodes, reason = None, ""
    try:
        episodes = buffer.episodes()
    except (MissingKeyError, SchemaError, UnsupportedError) as cause:
        reason = str(cause.args[0])
    return _Contents(buffer.storage, buffer.describe(), episodes, reason, buffer.verify(), videos)


def show(
    source: str | os.PathLike[str], part: str | None = None, html: str | os.PathLike[str] | None = None
) -> str:
    """Return a summary of the records at a path, and write a page about them.

    The summary has the columns, statistics of returns and lengths, the ends of episodes, and the problems that
    `ReplayBuffer.verify` finds. The page has these, the list of episodes, their steps as curves and frames, and the
    priorities. It needs no network. Videos of LeRobot data sets aren't decoded: they are only named.

    Args:
        source: see `open_buffer`.
        part: see `open_buffer`.
        html: the file of the page, which is replaced if it exists; None for no page.

    Raises:
        OSError: the page can't be written.
        Exception: an error of `open_buffer`.
    """
    buffer = open_buffer(source, part, video=False)
    found = _contents(buffer, videos_of(source))
    if html is not None:
        name = os.fspath(source) if part is None else f"{os.fspath(source)}: {part}"
        written = _page(found, priorities_of(buffer), name).encode()
        replace_file(FilePath(html), lambda file: file.write(written))
    return _summary(found)


def _summary(found: _Contents) -> str:
    rows, episodes = len(found.storage), found.episodes
    count = "" if episodes is None else f" in {len(episodes)} {_noun('episode', len(episodes))}"
    parts = [f"{rows} {_noun('transition', rows)}{count}, {_megabytes(found):.4g} MB"]
    if found.videos:
        videos = ", ".join(f"{name} {tuple(shape)}" for name, shape in found.videos.items())
        parts.append(f"videos, not decoded: {videos}")
    if rows:
        parts += [text_table(_COLUMNS, _described(found)), "\n".join(_about_episodes(found))]
    parts.append("\n".join(_findings(found)))
    return "\n\n".join(parts)


def _noun(name: str, count: int) -> str:
    return name if count == 1 else name + "s"


def _described(found: _Contents) -> Iterator[list[str]]:
    for key, column in found.description.items():
        cells = _column_cells(key, column)
        yield ["" if one is None else f"{one:.4g}" if isinstance(one, float) else str(one) for one in cells]


def _about_episodes(found: _Contents) -> Iterator[str]:
    episodes = found.episodes
    if episodes is None:
        yield f"no episodes: {found.reason}"
        return
    columns = {"length": episodes.length.numpy(), **returns_of(episodes)}
    yield text_table(
        ("", "min", "mean", "median", "max", "not finite"), (_statistics(*item) for item in columns.items())
    )
    yield ", ".join(f"{int(flag.sum())} {name}" for name, flag in _flags(episodes).items())


def _megabytes(found: _Contents) -> float:
    return sum(column.megabytes for column in found.description.values())


def _flags(episodes: StoredEpisodes) -> dict[str, torch.Tensor]:
    flags = {
        "complete": episodes.complete,
        "terminated": episodes.terminated,
        "truncated": episodes.truncated,
    }
    return {name: flag for name, flag in flags.items() if flag is not None}


def _statistics(name: str, values: Array) -> list[str]:
    finite = values[np.isfinite(values)]
    numbers = [finite.min(), finite.mean(), np.median(finite), finite.max()] if finite.size else [None] * 4
    return [name, *("" if one is None else f"{one:.6g}" for one in numbers), str(values.size - finite.size)]


def returns_of(episodes: StoredEpisodes) -> dict[str, Array]:
    """Return the returns of the episodes by name, ``(n,)`` float64 each; rewards of several values give several."""
    found: dict[str, Array] = {}
    for key, total in episodes.returns.items():
        name = "return" if key == "reward" else f"return of {_dotted(key)}"
        flat = total.reshape(len(episodes), -1).numpy()
        for number in range(flat.shape[1]):
            found[name if flat.shape[1] == 1 else f"{name}.{number}"] = flat[:, number]
    return found


def first_slots(storage: Storage, episodes: StoredEpisodes) -> Array:
    """Return the first slots of the episodes of a storage, ``(n,)`` int64."""
    first = episodes.first.numpy()
    return first if first.ndim == 1 else np.ravel_multi_index(tuple(first.T), storage.shape)


def _dotted(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _findings(found: _Contents) -> Iterator[str]:
    for kind, findings in (("problems", found.report.problems), ("warnings", found.report.warnings)):
        if not findings:
            yield f"{kind}: none"
            continue
        yield f"{kind}:"
        at = found.positions([one.slot for one in findings] if found.episodes is not None else [])
        rows = (
            (one.rule, one.rows, one.slot, *(at.get(one.slot) or ("", "")), one.message) for one in findings
        )
        yield text_table(("rule", "rows", "first row", "episode", "step", "message"), rows)


# ---- the page
def _page(found: _Contents, priorities: Array | None, name: str) -> str:
    """Return the page with the heading `name`. All strings of the data are escaped."""
    data = _page_data(found, priorities, name)
    # In JSON, `<` occurs only in strings, where its escape means the same. So no string can end the script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = {"chart": _file("uplot/uPlot.iife.min.js"), "script": _file("page.js")}
    # The browser runs scripts with these hashes only.
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts.values()]
    parts = {
        **scripts,
        "hashes": " ".join(f"'sha256-{one}'" for one in hashes),
        "title": escape(name.encode(errors="replace").decode()),
        "style": _file("uplot/uPlot.min.css") + _file("page.css"),
        "data": text,
    }
    return re.sub("<!--([a-z]+)-->", lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return (FilePath(__file__).parent / "page" / name).read_text(encoding="utf-8")


def priorities_of(buffer: Any) -> Array | None:
    """Return the priorities of all rows of a buffer, ``(rows,)`` float64; None if its sampler has none."""
    saved = buffer.sampler.state_dict().get("priorities")
    rows: Array | None = None if saved is None else saved["raw"].numpy()[: len(buffer.storage)]
    return rows


def _page_data(found: _Contents, priorities: Array | None, name: str) -> dict[str, Any]:
    rows, episodes = len(found.storage), found.episodes
    first, length = (
        (found.first(), found.length()) if rows else (np.empty(0, np.int64), np.empty(0, np.int64))
    )
    statistics = {} if episodes is None else {"length": length, **returns_of(episodes)}
    findings = [("problem", one) for one in found.report.problems]
    findings += [("warning", one) for one in found.report.warnings]
    largest = [] if priorities is None else np.argsort(-priorities, kind="stable")[:10].tolist()
    slots = [*largest, *(one.slot for _, one in findings)] if rows else []
    positions = found.positions(slots)
    # The page has the episodes and steps that its links name, in addition to an even sample.
    linked = [at for at in positions.values() if at is not None]
    listed = _evenly(len(length), _MOST_LISTED, [episode for episode, _ in linked])
    sample = _Sample(found, priorities, listed, linked)
    flags = {} if episodes is None else _flags(episodes)
    columns = {"number": listed, "first": first[listed], "length": length[listed]}
    columns |= {name: column[listed] for name, column in statistics.items() if name != "length"}
    columns |= {name: flag.numpy()[listed] for name, flag in flags.items()}
    if episodes is not None and episodes.ids is not None:
        columns["id"] = episodes.ids.numpy()[listed]
    opened = np.isin(listed, sample.episodes)
    columns["steps"] = np.where(opened, np.cumsum(opened) - 1, -1)
    facts: list[tuple[str, Any]] = [(_noun("transition", rows), rows)]
    facts += [] if episodes is None else [(_noun("episode", len(episodes)), len(episodes))]
    facts += [("MB", f"{_megabytes(found):.4g}"), *((name, int(flag.sum())) for name, flag in flags.items())]
    facts += [("(video, not decoded)", name) for name in found.videos]
    return {
        "name": name,
        "facts": facts,
        "reason": found.reason,
        "problems": [
            {"kind": kind, **one._asdict(), "at": positions.get(one.slot)} for kind, one in findings
        ],
        "histograms": [_histogram(*item) for item in statistics.items() if _can_be_binned(item[1])],
        "statistics": [_statistics(*item) for item in statistics.items()],
        "columns": [_column_cells(key, column) for key, column in found.description.items()],
        "count": len(length),
        "flags": [*flags],
        "episodes": {name: _numbers(column) for name, column in columns.items()},
        "steps": sample.steps(),
        "frames": sample.frames(),
        "priorities": None
        if priorities is None
        else {
            "histogram": _histogram("priority", priorities) if _can_be_binned(priorities) else None,
            "largest": [[slot, float(priorities[slot]), positions[slot]] for slot in largest],
        },
    }


def _evenly(count: int, most: int, also: Iterable[int] = ()) -> Array:
    """Return at most `most` numbers below `count`, evenly spaced, in addition to the numbers `also`; sorted."""
    if count <= most:
        return np.arange(count)
    return np.union1d(np.linspace(0, count - 1, most).round().astype(np.int64), np.fromiter(also, np.int64))


def _numbers(values: Array) -> list[Any]:
    """Return numbers ``(n,)`` for JSON: rounded to six digits, and words for values that aren't finite."""
    if values.dtype.kind != "f":
        plain: list[Any] = values.astype(np.uint8 if values.dtype.kind == "b" else values.dtype).tolist()
        return plain
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (5 - np.floor(np.log10(np.abs(wide))))
        rounded = np.round(wide * scale) / scale
    found = np.where(
        np.isfinite(rounded), rounded, wide
    ).tolist()  # 0 and the smallest numbers have no such scale
    for at in np.flatnonzero(~np.isfinite(wide)).tolist():
        found[at] = "NaN" if np.isnan(wide[at]) else "Infinity" if wide[at] > 0 else "-Infinity"
    return found


def _can_be_binned(values: Array) -> bool:
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        return bool(finite.size and np.isfinite(finite.max() - finite.min()))


def _histogram(name: str, values: Array) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    low, high = finite.min(), finite.max()
    if finite.dtype.kind != "f" and high - low < _BINS:
        counts, edges = np.histogram(finite, np.arange(low, high + 2) - 0.5)
    else:
        counts, edges = np.histogram(finite, _BINS)
    return {"name": name, "edges": edges.tolist(), "counts": counts.tolist()}


def _column_cells(key: NestedKey, column: ColumnStatistics) -> list[Any]:
    dtype = "objects" if column.dtype is None else str(column.dtype).removeprefix("torch.")
    shape = "varies" if column.shape is None else str(column.shape)
    numbers = (
        None if one is None else _numbers(np.array([one]))[0] for one in (column.min, column.mean, column.max)
    )
    return [
        _dotted(key), dtype, shape, column.megabytes, *numbers, column.num_nan,
        "yes" if column.constant else "no",
    ]  # fmt: skip


class _Sample:
    """The steps of the episodes that the page opens.

    Args:
        found: the records.
        priorities: the priorities of all rows, or None.
        listed: the numbers of the episodes in the list, ``(n,)`` int64.
        linked: the episodes and steps that links name.
    """

    def __init__(
        self, found: _Contents, priorities: Array | None, listed: Array, linked: Sequence[tuple[int, int]]
    ) -> None:
        self._storage, self._priorities = found.storage, priorities
        self._plain, self._texts, self._pictures = _kinds(found.storage)
        width = sum(min(size, _MOST_VALUES) for size in self._plain.values()) + _TEXT_WIDTH * len(self._texts)
        most = _MOST_NUMBERS // (width + 3)  # also the step, the row and the priority
        self.episodes, each = listed, most
        if not len(found.storage):
            self._times: list[Array] = []
            self._slots: list[Array] = []
            return
        first, length = found.first(), found.length()
        if length[listed].sum() > most:
            among = np.searchsorted(listed, [episode for episode, _ in linked])
            self.episodes = listed[_evenly(len(listed), min(_MOST_OPENED, max(most // 50, 1)), among)]
            each = max(most // len(self.episodes), 2)
        also: dict[int, list[int]] = {}
        for episode, step in linked:
            also.setdefault(episode, []).append(step)
        self._times = [_evenly(length[one], each, also.get(one, ())) for one in self.episodes.tolist()]
        streams, capacity = found.streams, found.storage.capacity_steps
        self._slots = [
            (start // streams + times) % capacity * streams + start % streams
            for start, times in zip(first[self.episodes].tolist(), self._times, strict=True)
        ]

    def steps(self) -> dict[str, Any]:
        """Return the numbers and texts of the steps."""
        slots = np.concatenate([np.empty(0, np.int64), *self._slots])
        keys: list[dict[str, Any]] = []
        values: list[list[list[Any]]] = []
        texts: dict[str, int] = {}
        if self._priorities is not None:
            keys.append({"name": "priority"})
            values.append([_numbers(self._priorities[slots])])
        for path, size in self._plain.items():
            rows = self._read(path, slots).reshape(len(slots), -1)[:, :_MOST_VALUES]
            more = max(size - _MOST_VALUES, 0)
            keys.append({"name": _dotted(as_key(path)), "more": more, "flag": rows.dtype == np.bool_})
            values.append([_numbers(column) for column in rows.T])
        for path in self._texts:
            keys.append({"name": _dotted(as_key(path)), "text": True})
            leaf = next(
                leaf for _, leaf in iter_leaves(self._storage.fetch(torch.from_numpy(slots), (path,)))
            )
            items = leaf.array.reshape(-1) if isinstance(leaf, ObjectColumn) else ()
            values.append([[texts.setdefault(_cut(item), len(texts)) for item in items]])
        stops = np.cumsum([len(times) for times in self._times]).tolist()
        return {
            "keys": keys,
            "texts": [*texts],
            "episodes": [
                {
                    "number": number,
                    "t": times.tolist(),
                    "slots": rows.tolist(),
                    "values": [[line[stop - len(times) : stop] for line in lines] for lines in values],
                }
                for number, times, rows, stop in zip(
                    self.episodes.tolist(), self._times, self._slots, stops, strict=True
                )
            ],
        }

    def frames(self) -> list[dict[str, Any]]:
        """Return the pictures of the steps as PNG, for each column of pictures."""
        return [self._frames(path) for path in self._pictures if self._slots]

    def _frames(self, path: Path) -> dict[str, Any]:
        budget = _FRAME_BYTES // len(self._pictures)
        middle = self._slots[len(self._slots) // 2]
        (example,) = self._encoded(path, middle[len(middle) // 2 :][:1])
        total = sum(map(len, self._slots))
        most = max(min(total, _MOST_FRAMES, budget // len(example)), 1)
        each, chosen = most // len(self._slots), range(len(self._slots))
        if each < 8 and most < total:  # rather fewer episodes than too few frames of each
            chosen = _evenly(len(self._slots), max(most // 8, 1)).tolist()
            each = most // len(chosen)
        found: dict[int, Any] = {}
        left = int(budget * 1.2)
        for number in chosen:
            at = (
                _evenly(len(self._slots[number]), max(each, 1))
                if most < total
                else np.arange(len(self._slots[number]))
            )
            source = self._encoded(path, self._slots[number][at])
            left -= sum(map(len, source))
            if left < 0:  # the example was smaller than most frames
                break
            found[number] = {"at": at.tolist(), "source": source}
        return {"name": _dotted(as_key(path)), "episodes": found}

    def _encoded(self, path: Path, slots: Array) -> list[str]:
        pictures = _as_pictures(self._read(path, slots))
        assert pictures is not None
        step = math.ceil(max(pictures.shape[1:3]) / _SIDE)
        return [
            "data:image/png;base64," + base64.b64encode(_png(picture)).decode()
            for picture in pictures[:, ::step, ::step]
        ]

    def _read(self, path: Path, slots: Array) -> Array:
        """Return the rows of a column of tensors in a dtype of NumPy."""
        column = self._storage.column(path)
        rows = column[torch.from_numpy(slots).to(column.device)].detach().cpu()
        if rows.dtype.is_floating_point and rows.dtype not in (torch.float16, torch.float32, torch.float64):
            rows = rows.float()
        return rows.numpy()


def _kinds(storage: TensorStorage) -> tuple[dict[Path, int], list[Path], list[Path]]:
    """Return the columns of numbers with their numbers of values, of texts, and of pictures.

    Columns that repeat others are left out.
    """
    plain: dict[Path, int] = {}
    texts: list[Path] = []
    pictures: list[Path] = []
    if not storage.initialized:
        return plain, texts, pictures
    schema = storage.format.schema
    repeated = {TRAJ_IDS, *observed_twice(schema)}
    for path, field in schema.items().items():
        if path in repeated or (path and path[-1] in FLAGS and path[0] != "next"):
            continue
        if field.dtype is None:
            texts += [path] if not field.shape else []
        elif not field.is_list and not field.dtype.is_complex and field.shape.numel():
            blank = torch.empty(0, *field.shape, dtype=field.dtype, device="cpu")
            if field.dtype == torch.uint8 or (
                field.dtype.is_floating_point and min(field.shape[-2:], default=0) >= 16
            ):
                if _as_pictures(blank.float().numpy()) is not None:
                    pictures.append(path)
                    continue
            plain[path] = field.shape.numel()
    order = sorted(
        plain, key=lambda path: (path[-1:] != ("reward",), path[-1:] != ("action",), path[:1] == ("next",))
    )
    return {path: plain[path] for path in order}, texts, pictures


def _cut(item: Any) -> str:
    text = item if isinstance(item, str) else repr(item)
    return text if len(text) <= _TEXT_LENGTH else text[:_TEXT_LENGTH] + "…"


def _as_pictures(rows: Array) -> Array | None:
    """Return rows as pictures ``(n, h, w)`` or ``(n, h, w, 3)`` uint8, of a stack the newest; None if they are none.

    Rows may be ``(h, w)``, ``(h, w, c)``, ``(c, h, w)``, or a stack of up to 16 of these.
    """
    if rows.ndim == 5 and rows.shape[1] <= 16:
        rows = rows[:, -1]
    if rows.ndim == 4:
        last_first = min(rows.shape[1:3]) >= _SMALLEST
        if not (last_first and rows.shape[3] <= 16):
            if min(rows.shape[2:]) < _SMALLEST or rows.shape[1] > 16:
                return None
            rows = np.moveaxis(rows, 1, 3)
        if rows.shape[3] == 4 and (rows[..., 3] == 255).all():  # colours with opacity
            rows = rows[..., :3]
        rows = rows if rows.shape[3] == 3 else rows[..., -1]
    if rows.ndim < 3 or min(rows.shape[1:3]) < _SMALLEST or rows.ndim > 4:
        return None
    if rows.dtype == np.uint8 or not rows.size:
        return rows
    finite = np.nan_to_num(rows, posinf=0.0, neginf=0.0)
    low, high = finite.min(), finite.max()
    if low < 0 or high > 255:
        finite = (finite - low) / (high - low)
    return np.asarray(finite * (255 if low < 0 or high <= 1 or high > 255 else 1)).astype(np.uint8)


def _png(picture: Array) -> bytes:
    """Return a picture ``(h, w)`` or ``(h, w, 3)`` uint8 as a PNG file."""
    height, width = picture.shape[:2]
    lines = picture.reshape(height, -1)
    filtered = np.full((height, lines.shape[1] + 1), 2, np.uint8)  # filter 2: differences from the line above
    filtered[0, 1:] = lines[0]
    filtered[1:, 1:] = lines[1:] - lines[:-1]
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if picture.ndim == 2 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
