"""Types of the compiled core.

Addresses are Python ints (`tensor.data_ptr()`, `array.ctypes.data`) of contiguous memory that the caller keeps alive
for the call, and for the life of the object in `Columns`. Arguments are checked before the first byte is written; a
call that raises has changed nothing. `IndexError`: a row, column or start outside its range; `ValueError`: any other
bad value; `TypeError`: not an int.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy import ndarray
from typing_extensions import Buffer

_Rows = tuple[int, int, int, Sequence[tuple[int, int, int, int, int]]]

class Columns:
    """k columns of `num_rows` rows, rows back to back, at addresses that the caller keeps alive.

    Any number of threads may call one object. It locks nothing: rows written while they are gathered come out torn.
    """

    def __init__(self, pointers: Sequence[int], row_bytes: Sequence[int], num_rows: int) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    def gather(self, index: int, n: int, out: Sequence[int], wanted: Sequence[int] | None = None) -> None:
        """Copy rows `index[0:n]` (int64) of the `wanted` columns, all by default, into the arrays `out`."""

    def gather_at(
        self, index: Sequence[int], n: int, out: Sequence[int], wanted: Sequence[int], which: Sequence[int]
    ) -> None:
        """Copy, for each leaf p, rows `index[which[p]][0:n]` of column `wanted[p]` into the array `out[p]`."""

    def write(self, start: int, n: int, src: Sequence[int]) -> None:
        """Write n <= num_rows rows from the arrays `src` to start, start + 1, ..., around the end of the ring."""

    def put(self, index: int, n: int, src: Sequence[int]) -> None:
        """Write n rows from the arrays `src` to rows `index[0:n]`; of equal numbers the last one wins."""

class TensorColumns:
    """Columns ``[rows, *leaf]`` on the CPU, written from tensors as they are.

    Args:
        exchange: the capsule by which `tensor_class` shows its tensors; see `knows_exchange`.
        tensor_class: whose tensors are taken; no subclasses.
        columns: contiguous, of real numbers; their memory must stay where it is.
    """

    def __init__(self, exchange: object, tensor_class: type[Any], columns: list[Any]) -> None: ...
    def fits(self, leaves: list[Any], lead: tuple[int, ...]) -> bool:
        """Whether all are plain tensors ``[*lead, *leaf]`` of the columns' dtypes, in one piece on the CPU."""

    def write(self, start: int, n: int, leaves: list[Any]) -> bool:
        """Write n <= num_rows rows to start, start + 1, ..., around the end of the ring.

        Leaves aren't negated lazily: `fits` asks that, this doesn't. False, and nothing is written, if a leaf isn't n
        rows in one piece, or stands in a column itself.
        """

    def watch(self, outcomes: list[int], roots: list[int], flags: list[int]) -> None:
        """Have `seams` look at columns of outcomes, of the roots that are their twins, and of end flags."""

    def seams(self, newest: int, steps: int, streams: int, leaves: list[Any]) -> bytes | None:
        """Return in which streams leaves don't go on with the step that is stored from row `newest` on, 0 or 1 each.

        They don't where an outcome there differs from the first root, bit for bit, and no flag is set there; but only
        if the leaves chain: one step inside at least has no flag, and each such step leads to the one behind it.
        Outcomes that are the same in all of these count only if all are. None where all go on, or a leaf isn't
        ``[steps, streams, *leaf]`` in one piece on the CPU.
        """

class EndColumns:
    """The columns that say where trajectories end; their memory must stay where it is.

    Args:
        flags: addresses of bool columns, several values to a row perhaps.
        widths: their values to a row.
        ids: addresses of columns of whole numbers.
        sizes: their bytes to a row: 1, 2, 4 or 8.
        ahead: the address of a column of whole numbers; flags count in rows where it is 1. 0 for none.
        ahead_bytes: its bytes to a row.
    """

    def __init__(
        self,
        flags: Sequence[int],
        widths: Sequence[int],
        ids: Sequence[int],
        sizes: Sequence[int],
        ahead: int = 0,
        ahead_bytes: int = 0,
    ) -> None: ...
    def inside(self, slot: int, n: int, inner: int) -> bool:
        """Whether a row of slots slot[0:n] (int64) whose mark in inner[0:n] (bytes) is set ends its trajectory.

        So it does with a flag set, or with another id than the next slot of the list.
        """

class TensorRows:
    """Rows of columns ``[*batch, T, *leaf]`` on the CPU, written from tensors as they are.

    Args:
        exchange: the capsule by which `tensor_class` shows its tensors; see `knows_exchange`.
        tensor_class: whose tensors are taken; no subclasses.
        columns: by key; rows are whole and lie at equal distances.
        roots: by key, the column like it whose next row gets the same values.
        flags: the keys of which `write` says whether one is set.
        time_dim: the number of batch dimensions.
    """

    def __init__(
        self,
        exchange: object,
        tensor_class: type[Any],
        columns: dict[Any, Any],
        roots: dict[Any, Any],
        flags: list[Any],
        time_dim: int,
    ) -> None: ...
    def write(self, t: int, values: Mapping[Any, Any], exactly: bool = False) -> bool | None:
        """Write row `t`, and row ``t + 1`` of the roots, from a dictionary; return whether a flag is set.

        None, and nothing is written, if a key isn't there, there are others where there are to be `exactly` these, or a
        value isn't a tensor on the CPU of the column's dtype and row shape, or is one of over a kilobyte in several
        pieces.
        """

class TensorMarks:
    """Where some tensors are, and how often they were changed; see `gleanrl.rollouts.marks.Marks`."""

    def __init__(self, exchange: object, tensor_class: type[Any]) -> None: ...
    def take(self, tensors: tuple[Any, ...]) -> None: ...
    def unchanged(self, tensors: tuple[Any, ...]) -> bool: ...
    def taken(self) -> list[tuple[int, int]]: ...

class TensorForms:
    """Where some tensors are, their shapes and strides; the tensors aren't held.

    Args:
        exchange: the capsule by which `tensor_class` shows its tensors; see `knows_exchange`.
        tensor_class: of the tensors.
        tensors: any number.
    """

    def __init__(self, exchange: object, tensor_class: type[Any], tensors: list[Any]) -> None: ...
    def unchanged(self, tensors: list[Any]) -> bool:
        """Whether these are where they were, in their shapes, without gradients or attributes."""

class FreshTensors:
    """Makes uninitialised tensors on the CPU, again and again.

    Args:
        exchange: the capsule by which `tensor_class` shows its tensors; see `knows_exchange`.
        tensor_class: of the tensors.
        like: CPU tensors of the shapes and dtypes wanted.
    """

    def __init__(self, exchange: object, tensor_class: type[Any], like: list[Any]) -> None: ...
    def make(self) -> tuple[list[Any], list[int]]:
        """Return new ones, each in memory of its own, and where that is."""

def knows_exchange(capsule: object) -> bool:
    """Whether a capsule holds DLPack's exchange interface, in a version that is known here."""

def lanes() -> int:
    """Return how many doubles are worked on at a time: 8 with AVX-512, else 2. Results are the same."""

def use_lanes(n: int) -> bool:
    """Work on `n` doubles at a time from now on; False, and nothing changes, if this processor can't. For tests."""

def first_nonfinite_f32(address: int, n: int) -> int:
    """Position of the first NaN or infinity among n float32 values, or -1."""

def first_nonfinite_f64(address: int, n: int) -> int:
    """Position of the first NaN or infinity among n float64 values, or -1."""

def are_finite(arrays: Iterable[ndarray[Any, Any]]) -> bool:
    """Return whether contiguous arrays hold finite float32 and float64 only; False also where it can't be told."""

def positions_of_ones(column: ndarray[Any, Any]) -> list[int] | None:
    """Return where each row of ``(T, n)`` has its single 1 among zeros; None if one isn't so, or it can't be told."""

def write_ones(positions: ndarray[Any, Any], column: ndarray[Any, Any]) -> bool:
    """Make the rows of ``(T, n)`` one-hot vectors; False, and nothing is written, if they can't be."""

class RowMaps:
    """Rows of columns that get what arithmetic makes of rows of other ones, bit for bit as float32 and float64 give it.

    Args:
        exchange: DLPack's exchange interface of the tensor class; None if no numbers are read.
        tensor_class: the class of the tensors.
        maps: for each column ``(source, after, roots, operations)``: NumPy arrays with rows first, of float32 or
            float64, whose memory is held; `roots`, like `after`, gets the same in the rows behind, or is None. The
            operations are done in order: ``("add" | "subtract" | "multiply" | "divide", tensors, name)``, where
            ``tensors[name]`` broadcasts with a row and has the dtype at that point, and is looked up at each call; or
            ``("float32" | "float64", None, None)``, which converts.

    Raises:
        ValueError: for arrays and tensors of another type or shape, what can't be written, and unknown operations.
        TypeError: for what is no array, and no list of such tuples.
    """

    def __init__(
        self, exchange: Any, tensor_class: type, maps: list[tuple[Any, Any, Any, list[tuple[str, Any, Any]]]]
    ) -> None: ...
    def run(self, t: int) -> bool:
        """Write row `t`, and row ``t + 1`` of the roots, from row `t` of the sources.

        Returns:
            False, and nothing is written, if a tensor has another shape, layout or dtype than at construction, or isn't
            there.

        Raises:
            IndexError: if there is no such row, or none behind it; nothing is written.
        """

class RunningSums:
    """Sums of one column that run on from row to row, as adding row by row makes them, bit for bit.

    Args:
        after: where sums go, NumPy array with rows first, of uint8, signed integers, float32 or float64; its memory
            is held.
        roots: like it; the same sums go into the rows behind.
        addends: like it; None for ones.

    Raises:
        ValueError: for arrays that aren't alike, of another type, or that can't be written.
        TypeError: for what is no array.
    """

    def __init__(
        self, after: ndarray[Any, Any], roots: ndarray[Any, Any], addends: ndarray[Any, Any] | None = None
    ) -> None: ...
    def run_on(self, first: int, n: int) -> None:
        """Write the sums of rows `first`, ..., ``first + n - 1``; they begin with row `first` of `roots`.

        Raises:
            IndexError: if there are no such rows, or none behind them.
        """

def bump(counters: int, start: int, n: int, num_rows: int) -> None:
    """Add 1 to int64 counters `(start + i) % num_rows` for i in `[0, n)`; they wrap around their type."""

def bump_at(counters: int, index: int, n: int, num_rows: int) -> None:
    """Add 1 to int64 counters `index[0:n]`, each in `[0, num_rows)`; a repeated number counts each time."""

def crc32(pieces: Iterable[Buffer], before: int = 0) -> int:
    """Return the CRC-32, zlib's, of the bytes of contiguous buffers, one after the other.

    Args:
        pieces: any number; the interpreter lock is released where they are long.
        before: the checksum of what stands before them.

    Raises:
        TypeError, BufferError, ValueError: what has no buffer, or none that is contiguous.
    """

def read_files(
    files: list[tuple[str | bytes, int, ndarray[Any, Any] | _Rows, Sequence[int]]], block: int, threads: int
) -> tuple[int, int, int] | None:
    """Read parts of plain files without the interpreter lock.

    Args:
        files: path, offset, memory and checksums of each. Memory is pieces, ``(..., 2)`` int64, contiguous: address, or
            0 for bytes that nobody wants, and size of each; or rows, see `spread_rows`. A checksum is the CRC-32 of a
            block of these bytes, of which the last one may be short; none for no comparing.
        block: bytes in a block, 1 or more.
        threads: how many read, at most.

    Returns:
        None; or the number of a damaged part, what it is, and where: 0 and errno, 1 and where the file ends, 2 and
        where a block begins that has another checksum.

    Raises:
        ValueError: `block`, an offset or a number of bytes is too small; or a file isn't four values, or pieces aren't
            pairs of int64; or as `spread_rows`.
    """

def spread_rows(columns: list[tuple[int, _Rows]], threads: int) -> None:
    """Copy rows in memory to where they go; long calls without the interpreter lock.

    Args:
        columns: address of the bytes, and rows: bytes of a row, how many bytes stand before these, how many these
            are, and targets: address, stride, addresses of the first rows of runs and of the rows that they become,
            and the number of runs.
        threads: how many copy, at most.

    Raises:
        ValueError: a size is negative, a row empty; or runs don't begin at row 0.
    """

def record(
    done: ndarray[Any, Any],
    reward: ndarray[Any, Any] | None,
    mask: ndarray[Any, Any] | None,
    ids: ndarray[Any, Any],
    counts: ndarray[Any, Any] | None,
    own_ids: ndarray[Any, Any],
    own_steps: ndarray[Any, Any],
    own_returns: ndarray[Any, Any],
    next_id: int,
    factor: int,
    offset: int,
) -> tuple[list[int], list[float]]:
    """Number the frames of T steps of P environments; return lengths and returns of the trajectories that ended.

    Ends are taken by time, then by environment. Arrays with contiguous rows, ValueError for others:

    Args:
        done: `(P, T)` bool, where trajectories end.
        reward: `(P, T)` float32 or float64; None leaves the returns as they are, and returns none.
        mask: `(P, T)` bool, False on steps that are no frames; None if all are.
        ids: `(P, T)` int64, written: `id * factor + offset`, -1 on steps that are no frames.
        counts: `(P, T)` int64, written: frames of the trajectory before the step; None if not wanted.
        own_ids: `(P,)` int64, those of the trajectories under way, changed in place, as the next two.
        own_steps: `(P,)` int64, their frames so far.
        own_returns: `(P,)` float64, their rewards so far.
        next_id: the first id that is free; those that begin have it and the following ones.
        factor: see `ids`.
        offset: see `ids`.
    """

class SumTree:
    """A sum tree of `capacity` priorities in [0, 2**960], all 0 at first.

    Parents are recomputed from their children, so every sum is a pure function of the priorities. Calls that change
    the tree run alone: a caller that shares it between threads holds one lock around each call.
    """

    def __init__(self, capacity: int) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def total(self) -> float:
        """The sum of all priorities."""

    @property
    def min_positive(self) -> float:
        """The smallest priority that isn't 0, or 0 if all are."""

    def update(self, index: int, value: int, n: int) -> None:
        """Set the priorities of rows `index[0:n]` (int64) to `value[0:n]` (float64); of equal rows the last wins."""

    def fill(self, start: int, n: int, value: float) -> None:
        """Set the priority of n <= capacity rows from `start` on, around the end of the ring."""

    def draw(self, uniforms: int, n: int, index: int, value: int) -> None:
        """Draw n rows in proportion to their priorities, never one of priority 0.

        Reads n float64 in [0, 1); writes the rows to `index` (int64) and their priorities to `value` (float64).
        RuntimeError if all are 0.
        """

    def get(self, index: int, n: int, value: int) -> None:
        """Write the priorities of rows `index[0:n]` to `value` (float64)."""

    def check_valid(self) -> None:
        """Raise RuntimeError if the tree contradicts itself; costs a pass over all of it."""

def importance_weights(priority: int, n: int, unit: float, beta: float, out: int, normalise: bool) -> None:
    """Write `(priority / unit) ** -beta` of n positive float64 to `out` (float32).

    With `normalise` the unit is the smallest of them, whose weight becomes exactly 1, and `unit` has no effect.
    """

class TensorUpdates:
    """Gives priorities to rows, both in tensors.

    Args:
        exchange: the capsule by which `tensor_class` shows its tensors; see `knows_exchange`.
        tensor_class: whose tensors are taken; no subclasses.
    """

    def __init__(self, exchange: object, tensor_class: type[Any]) -> None: ...
    def update(
        self, table: Priorities, index: Any, priority: Any, generation: Any | None, limit: int, written: int
    ) -> int | None:
        """Do as `table.update` does, with the same errors.

        None, and nothing has changed, unless all are vectors of one length on the CPU, each in one piece: rows and
        generations of int64, priorities of float32 or float64 that aren't negated lazily (this isn't asked).
        """

class Random:
    """A random generator, xoshiro256++: the sequence of a seed in [0, 2**64) is the same on every machine."""

    def __init__(self, seed: int) -> None: ...
    def uniforms(self, out: int, n: int) -> None:
        """Draw n float64 values from [0, 1) into an array."""

    def integers(self, high: int, out: int, n: int) -> None:
        """Draw n int64 values from [0, high) into an array."""

    def permutation(self, out: int, n: int) -> None:
        """Write the int64 numbers of [0, n) in random order into an array."""

    def save(self) -> bytes:
        """Return the state, four 64-bit numbers in the machine's order."""

    def load(self, state: bytes) -> None:
        """Go on from a saved state; `ValueError` if it is all 0, or of another size."""

class Priorities:
    """The priorities of `capacity` rows: what a prioritized sampler needs for a draw, an update or a write in one call.

    A row is in use once it was filled or updated. It is drawn in proportion to its leaf, `(priority + eps) ** alpha`,
    or 0 if it isn't in use or is blocked. `written` is always the address of the caller's write counters (int64, one
    for each of the `capacity` rows). One call at a time: a caller that shares the object between threads holds one
    lock around each call, draws included.

    Args:
        capacity: rows.
        single: keep priorities as float32, not as float64.
    """

    def __init__(self, capacity: int, single: bool) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def single(self) -> bool: ...
    @property
    def largest(self) -> float:
        """The largest priority that can be kept."""

    @property
    def alpha(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def total(self) -> float:
        """The sum of all leaves."""

    @property
    def min_positive(self) -> float:
        """The smallest leaf that isn't 0, or 0 if all are."""

    @property
    def end(self) -> int:
        """One more than the last row that was ever filled, updated, remembered or blocked."""

    @property
    def max_seen(self) -> float | None:
        """The largest priority that an accepted update brought, None if there was none."""

    @max_seen.setter
    def max_seen(self, value: float | None) -> None: ...
    def set_rule(self, alpha: float, eps: float) -> None:
        """Compute leaves as `(priority + eps) ** alpha` from now on, also those of the rows in use.

        1 and 0 at first. ValueError if alpha or eps is negative or not finite, or a leaf would exceed 2**959.
        """

    def fill(self, start: int, n: int, priority: float) -> None:
        """Set the priority of n <= capacity rows from `start` on, around the end of the ring: they are in use."""

    def default_priority(self, within: bool) -> float:
        """The priority for new rows: `max_seen`, or the largest one of the rows in use (`within`); 1.0 for none."""

    def update(
        self,
        index: int,
        priority: int,
        n: int,
        limit: int,
        written: int,
        expected: int = 0,
        single: bool = False,
    ) -> int:
        """Set the priorities of rows `index[0:n]` (int64) to `priority[0:n]` (float64, or float32 if `single`).

        Of equal rows the last one wins.

        An index of -1 is left out, any other lies in `[0, limit)`. A row is dropped if its counter differs from its
        generation in `expected` (int64), or without those (0) from that of its last draw; one that was never drawn is
        accepted then. Returns the number of dropped ones.

        ValueError: a priority is NaN, negative or above `largest`, or its leaf above 2**959.
        """

    def draw(
        self,
        uniforms: int | Random,
        n: int,
        beta: float,
        by_batch: bool,
        written: int,
        index: int,
        weight: int,
        generation: int,
        served: bool = False,
    ) -> None:
        """Draw n rows in proportion to their leaves, with n float64 in [0, 1), and read their generations.

        The uniforms stand at an address, or are the next ones of a generator.

        Writes rows to `index` (int64), importance weights to `weight` (float32) and the rows' counters to
        `generation` (int64). Weights are `(leaf / min_positive) ** -beta`, or with `by_batch` divided by the batch's
        largest, which becomes exactly 1. RuntimeError if all leaves are 0.

        `served` ones are remembered, too.
        """

    def remember(self, index: int, n: int, generation: int) -> None:
        """Take generation[0:n] as those of the last draws of rows index[0:n]."""

    def block(self, index: int, n: int, flags: int) -> None:
        """Block rows `index[0:n]` whose byte in `flags` isn't 0, unblock the others.

        A blocked row keeps its priority, and takes new ones, but isn't drawn.
        """

    def get(self, index: int, n: int, value: int) -> None:
        """Write the priorities of rows `index[0:n]` to `value` (float64); 0 for rows that aren't in use."""

    def leaves(self, index: int, n: int, value: int) -> None:
        """Write the leaves of rows `index[0:n]` to `value` (float64)."""

    def clear(self) -> None:
        """Forget rows, blocks, draws and `max_seen`; the rule stays."""

    def save(self, priority: int, mark: int) -> None:
        """Write `priority` (float64) and `mark` (32 bits, opaque) of the rows below `end`.

        With the rule and `max_seen`, that is the whole state.
        """

    def load(self, priority: int, mark: int, n: int) -> None:
        """Go on from n saved rows, the others not in use; the rule and `max_seen` stay."""

    def check_valid(self) -> None:
        """Raise RuntimeError if anything contradicts the rest; costs a pass over all rows."""

class Episodes:
    """Which stored steps belong to which trajectory, in a ring of `capacity` steps times `num_streams` streams.

    The slot of a step is its place in the ring times `num_streams` plus its stream. Runs (the stored parts of
    trajectories) are numbered stream by stream, the oldest first. One call at a time: a caller that shares a table
    between threads holds one lock around each call, draws included.
    """

    def __init__(self, capacity: int, num_streams: int = 1, now: int = 0) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def now(self) -> int:
        """Steps told of so far."""

    @property
    def stored(self) -> int:
        """Steps stored in each stream."""

    @property
    def cursor(self) -> int:
        """The place where the next write begins."""

    def on_write(self, start: int, count: int, ends: int = 0, ids: Sequence[int] = ()) -> None:
        """Learn that `count` steps from `start` on were written in every stream, around the end of the ring.

        `ends` (0 for none): `count * num_streams` bytes, step by step, not 0 at the last step of a trajectory. `ids`:
        any number of int64 columns of that shape; a change of an id in time is a boundary. A write begins at the
        cursor, except the first one and one of `capacity` steps. To take over a full ring: `clear()`, then the steps
        from its cursor to its end, then the rest.
        """

    def clear(self) -> None:
        """Forget everything; the next write may begin anywhere."""

    def num_runs(self, min_len: int = 1) -> int:
        """Count the runs of `min_len` steps and more."""

    def list_runs(self, min_len: int, first: int, length: int, n: int) -> int:
        """Write first slot and length (int64) of the runs of `min_len` steps and more; n is their number."""

    def draw(
        self,
        slice_len: int,
        n: int,
        uniforms: int,
        first: int,
        length: int,
        strict: bool = True,
        left: int = 0,
        right: int = 0,
    ) -> int:
        """Draw n slices with `2 * n` float64 in [0, 1); write first slots and lengths (int64).

        Each slice picks a run with equal probability, then one of its first steps 0 to its length - slice_len with
        equal probability. `strict` knows only runs of slice_len steps and more; otherwise shorter runs come whole.
        `left` and `right` (below slice_len) let slices begin before and end after the run by as many steps; they are
        cut to it, to one step at least.

        Returns the sum of the lengths. RuntimeError if there is no run to draw from.
        """

    def locate(self, slot: int, n: int, before: int, after: int) -> None:
        """Write how many steps (int64) the run of each slot has before it, and from it on (at least 1).

        IndexError if a slot isn't stored.
        """

    def expand(self, first: int, length: int, n: int, slot: int, stride: int = 0, last: int = 0) -> None:
        """Write the slots (int64) of n slices one after the other, `sum(length)` of them.

        With `stride`, slice i stands from `i * stride` on, and its last slot is repeated behind it. `last` (0 for
        none) gets a byte for each: 1 at the last step of a slice.
        """

    def check_valid(self) -> None:
        """Raise RuntimeError if the table contradicts itself; costs a pass over all runs."""
