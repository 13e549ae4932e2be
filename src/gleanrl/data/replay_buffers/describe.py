"""Statistics of stored columns, and the list of stored trajectories.

`column_statistics` is the one reader of all values, for `ReplayBuffer.describe` and for the audit. Callers hold the
buffer's lock, so that no writer changes the records meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.native import Episodes
from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.results import html_table, text_table
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import FLAGS, NestedKey, Path, as_key, iter_leaves
from gleanrl.data.replay_buffers.samplers.episode_index import (
    BoundaryKeys,
    EpisodeTable,
    later,
    runs_of,
)
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.record_format import check_storable
from gleanrl.data.replay_buffers.storages.record_formats import as_tensor, tree_path
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.trajectories import EPISODE, TRAJ_IDS, same_bits, twins
from gleanrl.errors import SchemaError, UnsupportedError

_PIECE_BYTES = 1 << 22  # of a column, read at once
_RECORDS = 1 << 10  # records without columns, read at once
_STEPS = 1 << 16  # time steps whose rewards are added at once
_MOST_LINES = 20  # trajectories that a table shows
_REWARD = "reward"


class ColumnStatistics(NamedTuple):
    """Statistics of the stored values at one key, without padding rows (``("collector", "mask")`` is False)."""

    rows: int
    """Number of rows that have the key."""
    dtype: torch.dtype | None
    """The dtype; None if the rows differ, or hold objects other than tensors."""
    shape: tuple[int, ...] | None
    """The shape of a row, with -1 for sizes that differ between rows; None if the number of dimensions differs."""
    megabytes: float
    """Memory in units of 10^6 bytes: of the whole column, unused rows included. Without columns, of the tensors."""
    min: float | int | None
    """The smallest value that isn't NaN; None if there is none, and for complex numbers and objects."""
    mean: float | None
    """The mean of all values that aren't NaN, computed in float64; None like `min`."""
    max: float | int | None
    """The largest value that isn't NaN; None like `min`."""
    num_nan: int
    """Number of values that are NaN."""
    nonfinite_rows: int
    """Number of rows that hold a NaN or an infinity."""
    first_nonfinite: int | None
    """The first slot with such a row; None for none."""
    constant: bool
    """Whether there are two or more rows with values, and all rows are equal. A NaN equals a NaN."""


class BufferDescription(dict[NestedKey, ColumnStatistics]):
    """The result of `ReplayBuffer.describe`: the `ColumnStatistics` of each stored key. It prints as a table.

    A tensor that isn't in a TensorDict has the key ``"tensor"``. Large columns are read in pieces, so that a buffer may
    be larger than memory.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> index = buffer.extend(TensorDict({"x": torch.tensor([1.0, 2.0, torch.nan])}, [3]))
        >>> buffer.describe()["x"].mean
        1.5
        >>> buffer.describe()
        key  rows    dtype  shape     MB  min  mean  max  NaN  constant
        x       3  float32     ()  4e-05    1   1.5    2    1        no
    """

    _header = ("key", "rows", "dtype", "shape", "MB", "min", "mean", "max", "NaN", "constant")

    def _cells(self) -> Iterator[tuple[object, ...]]:
        for key, found in self.items():
            dtype = "objects" if found.dtype is None else str(found.dtype).removeprefix("torch.")
            shape = "varies" if found.shape is None else found.shape
            numbers = [_number(value) for value in (found.megabytes, found.min, found.mean, found.max)]
            yield key, found.rows, dtype, shape, *numbers, found.num_nan, "yes" if found.constant else "no"

    def __repr__(self) -> str:
        """Return a table with one line for each key."""
        return text_table(self._header, self._cells())

    def _repr_html_(self) -> str:
        return html_table("stored columns", self._header, self._cells())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def describe(storage: Storage) -> BufferDescription:
    """Return statistics of all stored values; the caller holds the lock of the storage's buffer."""
    return BufferDescription({as_key(path): found for path, found in column_statistics(storage).items()})


class _Tally:
    """Statistics of the values at one key, of rows that are added piece by piece."""

    def __init__(self) -> None:
        self.rows = self.num_bytes = self.num_nan = self.nonfinite_rows = 0
        self.first_nonfinite: int | None = None
        self._kinds: dict[tuple[torch.dtype | None, tuple[int, ...]], None] = {}
        self._first: np.ndarray[Any, Any] | None = None  # the first row
        self._even = True  # whether all rows equal the first one
        self._least: list[Any] = []
        self._most: list[Any] = []
        self._sum, self._count = 0.0, 0

    def add_objects(self, count: int) -> None:
        """Count rows that aren't tensors."""
        self.rows += count
        self._kinds[None, ()] = None
        self._even = False

    def add(self, rows: torch.Tensor, slots: torch.Tensor | range) -> None:
        """Add rows ``(n, *shape)`` of the slots ``(n,)``."""
        self.rows += rows.shape[0]
        self.num_bytes += rows.numel() * rows.itemsize
        self._kinds[rows.dtype, tuple(rows.shape[1:])] = None
        if not rows.numel():
            return
        values = _as_array(rows)
        self._compare(values)
        if values.dtype.kind in "fc" and not (finite := np.isfinite(values)).all():
            bad = np.flatnonzero(~finite.all(1))
            self.nonfinite_rows += len(bad)
            first = int(slots[int(bad[0])])
            # Records of one shape are added together, so slots don't come in order.
            self.first_nonfinite = first if self.first_nonfinite is None else min(first, self.first_nonfinite)
            unknown = np.isnan(values)
            self.num_nan += int(unknown.sum())
            values = values[~unknown]
        if values.size and values.dtype.kind != "c":
            self._least.append(values.min().item())
            self._most.append(values.max().item())
            with np.errstate(invalid="ignore", over="ignore"):  # the mean of both infinities is NaN
                self._sum += float(values.sum(dtype=np.float64))
            self._count += values.size

    def _compare(self, values: np.ndarray[Any, Any]) -> None:
        if self._first is None:
            self._first = values[0].copy()
        if self._even and self._first.shape == values.shape[1:]:
            with np.errstate(invalid="ignore"):  # a comparison of complex numbers warns of signalling NaNs
                same = values == self._first
            if values.dtype.kind in "fc" and not same.all():
                same |= np.isnan(values) & np.isnan(self._first)
            self._even = bool(same.all())
        else:
            self._even = False

    def result(self, num_bytes: int | None) -> ColumnStatistics:
        """Return the statistics; `num_bytes` is the size of the column, or None for the size of the added rows."""
        dtypes, shapes = {dtype for dtype, _ in self._kinds}, {shape for _, shape in self._kinds}
        even_ndim = len({len(shape) for shape in shapes}) == 1
        return ColumnStatistics(
            rows=self.rows,
            dtype=dtypes.pop() if len(dtypes) == 1 else None,
            shape=tuple(sizes[0] if len({*sizes}) == 1 else -1 for sizes in zip(*shapes, strict=True))
            if even_ndim
            else None,
            megabytes=(self.num_bytes if num_bytes is None else num_bytes) / 1e6,
            min=min(self._least, default=None),
            mean=self._sum / self._count if self._count else None,
            max=max(self._most, default=None),
            num_nan=self.num_nan,
            nonfinite_rows=self.nonfinite_rows,
            first_nonfinite=self.first_nonfinite,
            constant=self._first is not None and self._even and self.rows > 1 and len(self._kinds) == 1,
        )


def _as_array(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return rows as an array ``(n, values of a row)`` of numbers that NumPy knows. Bools become 0 and 1."""
    rows = rows.detach().resolve_conj().resolve_neg().cpu().reshape(rows.shape[0], -1)
    if rows.dtype == torch.bool:
        return rows.view(torch.uint8).numpy()
    try:
        return rows.numpy()
    except TypeError:  # bfloat16, for example; these dtypes are narrower than float32
        return rows.to(torch.complex64 if rows.dtype.is_complex else torch.float32).numpy()


def column_statistics(storage: Storage) -> dict[Path, ColumnStatistics]:
    """Return statistics of the stored values at each path, in bounded memory. The caller holds the buffer's lock.

    Cost: one pass over the stored records.
    """
    if isinstance(storage, TensorStorage):
        if not storage.initialized:
            return {}
        schema = storage.format.schema
        return {path: _of_column(storage, schema, path) for path in schema.paths}
    tallies: dict[Path, _Tally] = {}
    for start in range(0, len(storage), _RECORDS):
        slots = torch.arange(start, min(start + _RECORDS, len(storage)), device="cpu")
        for path, rows, where in _of_records(storage.fetch(slots), slots):
            _add(tallies.setdefault(path, _Tally()), rows, path, where)
    return {path: tally.result(None) for path, tally in tallies.items()}


def _of_column(storage: TensorStorage, schema: Schema, path: Path) -> ColumnStatistics:
    field, tally, count = schema[path], _Tally(), len(storage)
    step = _RECORDS if field.is_list else max(_PIECE_BYTES // max(field.row_bytes, 1), 1)
    column = None if field.is_list else storage.column(path)
    if column is not None:
        tally.add(column[:0], range(0))  # tells dtype and shape
    for start in range(0, count, step):
        stop = min(start + step, count)
        if column is not None and not storage.has_mask:
            tally.add(column[start:stop], range(start, stop))
            continue
        slots = torch.arange(start, stop, device="cpu")
        masked = storage.masked(slots)
        slots = slots if masked is None else slots[~masked]
        if column is not None:
            tally.add(column[start:stop] if masked is None else column[slots.to(column.device)], slots)
        elif len(slots):
            for _, rows, where in _of_records(storage.fetch(slots, (path,)), slots):
                _add(tally, rows, path, where)
    return tally.result(None if column is None else column.numel() * column.itemsize)


def _add(tally: _Tally, rows: torch.Tensor | None, path: Path, slots: torch.Tensor) -> None:
    """Add rows ``(n, *shape)``. Objects (None), and tensors that NumPy can't read, are only counted."""
    if rows is not None:
        try:
            check_storable(rows, path, "describe")
        except SchemaError:
            rows = None
    if rows is None:
        tally.add_objects(slots.shape[0])
    else:
        tally.add(rows, slots)


def _of_records(
    records: Any, slots: torch.Tensor
) -> Iterator[tuple[Path, torch.Tensor | None, torch.Tensor]]:
    """Yield path, rows ``(n, *shape)`` and slots ``(n,)`` of the leaves of fetched records, a list or a batch.

    Rows are None for objects. A list yields tensors of one shape and dtype together.
    """
    alike: dict[Any, tuple[list[torch.Tensor], list[int]]] = {}
    for number, record in enumerate(records if isinstance(records, list) else [records]):
        for path, leaf in _leaves(record):
            own = slots[number : number + 1] if isinstance(records, list) else slots
            if isinstance(leaf, ObjectColumn) and leaf.blank is not None and not isinstance(records, list):
                tensors = enumerate(leaf.items())
            elif not isinstance(leaf, torch.Tensor):
                yield path, None, own
                continue
            elif not isinstance(records, list):
                yield path, leaf, own
                continue
            elif leaf.layout is torch.strided and not leaf.is_nested:
                tensors = enumerate([leaf], number)
            else:
                yield path, None, own
                continue
            for position, tensor in tensors:
                same = alike.setdefault((path, tensor.shape, tensor.dtype, tensor.device), ([], []))
                same[0].append(tensor)
                same[1].append(position)
    for (path, *_), (tensors_alike, positions) in alike.items():
        yield path, torch.stack(tensors_alike), slots[positions]


def _leaves(record: Any) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of each leaf of a record; NumPy arrays and numbers become tensors."""
    for key_path, found in _pytree.tree_flatten_with_path(record, is_leaf=is_tensor_collection)[0]:
        if is_tensor_collection(found):
            yield from iter_leaves(found, tree_path(key_path) if key_path else ())
        else:
            yield tree_path(key_path), as_tensor(found)


@dataclass(frozen=True, repr=False, eq=False)
class StoredEpisodes:
    """The result of `ReplayBuffer.episodes`: all ``n`` stored trajectories and fragments. It prints as a table.

    Trajectories end by the rule of `SliceSampler`, with the keys of the buffer's sampler if that draws slices. Streams
    (batch entries of the storage) come one after the other, each with its oldest trajectory first. Padding isn't
    listed. The attributes are on the CPU.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> done = torch.tensor([False, True, False])
        >>> steps = TensorDict({"next": {"reward": torch.tensor([1.0, 2.0, 4.0]), "terminated": done}}, [3])
        >>> index = buffer.extend(steps)
        >>> buffer.episodes().returns["reward"]
        tensor([3., 4.], dtype=torch.float64)
        >>> buffer.episodes()
        first  length  return  complete  terminated
        0           2       3       yes         yes
        2           1       4        no          no
    """

    first: torch.Tensor
    """Index of the first stored step, ``(n,)`` int64, or ``(n, ndim)`` coordinates as from `ReplayBuffer.extend`."""
    length: torch.Tensor
    """Number of stored steps, ``(n,)`` int64."""
    returns: dict[NestedKey, torch.Tensor]
    """The sum of the stored rewards, without discount, ``(n,)`` float64.

    The keys are all entries ``"reward"`` below ``next``, named without ``next``; or at the root, if there is none below
    ``next``. A reward with several values for each step, for example one for each agent, gives ``(n, *values)``.
    """
    complete: torch.Tensor | None
    """Whether the trajectory is stored from its first to its last step, ``(n,)`` bool.

    It isn't if the last stored step isn't an end, or if it continues an earlier fragment of the same id. Once rows were
    overwritten, it must also follow the end of another trajectory in its stream. None if no flags are stored.
    """
    terminated: torch.Tensor | None
    """Whether the last step is an end that is flagged as terminated, ``(n,)`` bool; None without such flags."""
    truncated: torch.Tensor | None
    """Whether the last step is an end that is flagged as truncated, ``(n,)`` bool; None without such flags."""
    ids: torch.Tensor | None
    """The values of ``("collector", "traj_ids")``, or else of the sampler's ``traj_key`` or ``"episode"``, ``(n,)``.

    None if no such key is stored.
    """

    def __len__(self) -> int:
        """Return the number of trajectories and fragments."""
        return self.length.shape[0]

    def _columns(self) -> dict[str, torch.Tensor]:
        returns = {
            "return" if key == _REWARD else f"return of {key}": total for key, total in self.returns.items()
        }
        columns = {"first": self.first, "length": self.length, **returns, "complete": self.complete}
        columns |= {"terminated": self.terminated, "truncated": self.truncated, "id": self.ids}
        return {name: column for name, column in columns.items() if column is not None}

    def _cells(self) -> Iterator[list[str]]:
        columns, count = self._columns().values(), len(self)
        half = count if count <= _MOST_LINES else _MOST_LINES // 2
        for row in (*range(half), *range(max(count - half, half), count)):
            if half <= row == count - half:
                yield ["..."] * len(columns)
            yield [_cell(column[row]) for column in columns]

    def __repr__(self) -> str:
        """Return a table with one line for each trajectory, without the middle ones if there are many."""
        return text_table([*self._columns()], self._cells())

    def _repr_html_(self) -> str:
        return html_table(f"{len(self)} stored trajectories", [*self._columns()], self._cells())


def _cell(value: torch.Tensor) -> str:
    if value.dtype == torch.bool:
        return "yes" if value else "no"
    numbers = [_number(one) if value.is_floating_point() else str(one) for one in value.reshape(-1).tolist()]
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"


def stored_episodes(storage: Storage, table: EpisodeTable | None) -> StoredEpisodes:
    """Return the stored trajectories; the caller holds the lock of the storage's buffer.

    Args:
        storage: the storage.
        table: the sampler's table of trajectories, whose keys count; None for the default keys.

    Raises:
        MissingKeyError: no stored column tells where trajectories end.
        SchemaError: a flag isn't 0 or 1, or an id isn't a whole number.
        UnsupportedError: the storage has no columns, or its records aren't in the order of time.
    """
    if not isinstance(storage, TensorStorage):
        raise UnsupportedError(
            f"episodes: trajectories are found in columns, and a {type(storage).__name__} holds single objects; use a "
            "LazyTensorStorage"
        )
    if not storage.ordered:
        raise UnsupportedError(
            "episodes: the writer chose the records by their values, so they aren't in the order of time; use a "
            "RoundRobinWriter"
        )
    if not len(storage):
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return StoredEpisodes(
            none if storage.ndim == 1 else none.reshape(0, storage.ndim), none, {}, *[None] * 4
        )
    # A copy reads all records again, and so notices flags that were changed through views.
    boundaries = EpisodeTable(BoundaryKeys()) if table is None else copy.copy(table)
    runs = boundaries.of(storage)
    first, length = runs_of(runs)
    last = later(runs, first, length - 1)
    ended, masked = boundaries.ends_at(last), storage.masked(first)
    schema = storage.format.schema
    flags = end_flags(storage, last)
    id_keys = [path for path in (TRAJ_IDS, boundaries.keys.trajectory or EPISODE) if path in schema]
    ids = storage.column(id_keys[0]).view(-1)[first].cpu() if id_keys else None
    complete = None
    if ended is not None:
        complete = ended & ~_continuing(storage, first, last, flags)
        if storage.overwritten:
            # The first steps may be lost. A trajectory begins for sure only after the end of another one, or padding.
            stream = first % runs.num_streams
            complete[:1] = False
            complete[1:] &= (stream[1:] == stream[:-1]) & (ended if masked is None else ended | masked)[:-1]
    steps_only = slice(None) if masked is None else ~masked
    index = first if storage.ndim == 1 else torch.stack(torch.unravel_index(first, storage.shape), -1)

    def flagged(flag: str) -> torch.Tensor | None:
        values = flags.get(flag)
        return None if values is None or ended is None else (values & ended)[steps_only]

    return StoredEpisodes(
        index[steps_only],
        length[steps_only],
        {key: total[steps_only] for key, total in _returns(storage, runs, first).items()},
        None if complete is None else complete[steps_only],
        flagged("terminated"),
        flagged("truncated"),
        None if ids is None else ids[steps_only],
    )


def end_flags(storage: TensorStorage, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return for each end flag stored below ``next`` whether any of its entries is set in `slots`, ``(n,)`` bool."""
    found: dict[str, torch.Tensor] = {}
    for path in storage.format.schema.paths:
        if path[0] == "next" and path[-1] in FLAGS:
            values = wide(storage.column(path)[slots.to(storage.device)] != 0).any(1).cpu()
            found[path[-1]] = found[path[-1]] | values if path[-1] in found else values
    return found


def _continuing(
    storage: TensorStorage,
    first: torch.Tensor,
    last: torch.Tensor,
    flags: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return which runs continue the trajectory of an earlier one, by their ids, ``(n,)`` bool."""
    continuing = torch.zeros(first.shape, dtype=torch.bool, device="cpu")
    if TRAJ_IDS in storage.format.schema:
        links = linked_runs(storage, first, last, flags)
        continuing[links.later] = ~links.ended | links.continued
    return continuing


class Links(NamedTuple):
    """Pairs of runs with one trajectory id, of which no run between them has that id."""

    earlier: torch.Tensor
    """The number of the earlier run, ``(m,)`` int64."""
    later: torch.Tensor
    """The number of the later run, ``(m,)`` int64."""
    ended: torch.Tensor
    """Whether the earlier run's last step is flagged as an end, ``(m,)`` bool."""
    continued: torch.Tensor
    """Whether the earlier run is only truncated, and the later one begins with its next observation, ``(m,)`` bool."""


def linked_runs(
    storage: TensorStorage,
    first: torch.Tensor,
    last: torch.Tensor,
    flags: dict[str, torch.Tensor],
) -> Links:
    """Return the pairs of runs that have one id in ``("collector", "traj_ids")``, which has to be stored.

    Args:
        storage: the storage.
        first: first slots of all runs, ``(n,)`` int64.
        last: their last slots.
        flags: for each stored end flag, whether it is set at the last slots, ``(n,)`` bool.
    """
    ids = storage.column(TRAJ_IDS).view(-1)[last.to(storage.device)].cpu()
    no = torch.zeros(first.shape, dtype=torch.bool, device="cpu")
    done, terminated, truncated = (flags.get(flag, no) for flag in FLAGS)
    # Stable, so that the runs of one id stay in the order of time within a stream.
    order = torch.sort(ids, stable=True).indices
    same = (ids[order][1:] == ids[order][:-1]) & (ids[order][1:] >= 0)
    earlier, after = order[:-1][same], order[1:][same]
    cut, observed = truncated & ~terminated, observed_twice(storage.format.schema)
    continued = cut[earlier] if observed else torch.zeros(earlier.shape, dtype=torch.bool, device="cpu")
    for path in observed:
        continued &= ~differ(storage, path, last[earlier], first[after])
    return Links(earlier, after, (done | terminated | truncated)[earlier], continued)


def observed_twice(schema: Schema) -> list[Path]:
    """Return the entries below ``next`` that the following step's root also has."""
    return twins(
        {path: field for path, field in zip(schema.paths, schema.fields, strict=True) if not field.is_list}
    )


def differ(storage: TensorStorage, path: Path, slots: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return where an entry below ``next`` differs from the following slot's root, ``(n,)`` bool."""
    coming, root = storage.column(path)[slots], storage.column(path[1:])[following]
    return ~same_bits(coming, root, 1).cpu()


def wide(rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor ``(n, ...)`` reshaped to ``(n, values of a row)``."""
    return rows.reshape(rows.shape[0], rows.shape[1:].numel())


def _returns(storage: TensorStorage, runs: Episodes, first: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
    """Return the sums of each reward over the runs that begin at `first`, ``(n, *values)`` float64."""
    schema = storage.format.schema
    numeric = [
        path
        for path, field in schema.items().items()
        if path[-1] == _REWARD and not field.is_list and not field.dtype.is_complex
    ]
    paths = [path for path in numeric if path[0] == "next"] or numeric
    sizes = {path: schema[path].shape for path in paths}
    totals = {
        path: torch.zeros(first.shape[0], size.numel(), dtype=torch.float64, device="cpu")
        for path, size in sizes.items()
    }
    streams = runs.num_streams
    steps = torch.zeros(len(storage), dtype=torch.bool, device="cpu").index_fill_(0, first, True)
    begins = steps.view(-1, streams)
    # Sorted by stream and step, so that the runs of one stream are numbered in the order of their slots.
    order = (first % streams * storage.capacity_steps + first // streams).argsort()
    counts = (first % streams).bincount(minlength=streams)
    before = counts.cumsum(0) - counts
    reached = torch.full((streams,), -1, device="cpu")  # the number of the current run in each stream
    for start in range(0, begins.shape[0] if paths else 0, _STEPS):
        number = begins[start : start + _STEPS].cumsum(0) + reached
        reached = number[-1]
        # Steps before the first beginning continue the run that the end of the ring cuts.
        run = order[torch.where(number < 0, counts - 1, number).add_(before).view(-1)]
        for path, total in totals.items():
            rewards = wide(storage.column(path)[start * streams : start * streams + run.shape[0]])
            total.index_add_(0, run, rewards.cpu().to(torch.float64))
    return {
        as_key(path[1:] if path[0] == "next" else path): total[:, 0]
        if total.shape[1] == 1
        else total.view(-1, *sizes[path])
        for path, total in totals.items()
    }
