"""Type stubs of the compiled core.

Addresses are Python ints (`tensor.data_ptr()`, `array.ctypes.data`) of contiguous memory. The caller keeps this memory
alive during the call, and for `Columns` during the life of the object. Arguments are checked before the first byte is
written. A call that raises has changed nothing. It raises `IndexError` for a row, column or start outside its range,
`ValueError` for any other bad value, and `TypeError` for an argument that isn't an int.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy import ndarray
from typing_extensions import Buffer

class ActorProgram:
    """A policy as a list of operations on rows of float32.

    Args:
        slots: the number of floats of each value.
        operations: ``(kind, slot of the result, slots of the operands, integers, numbers)`` each; see cpp/core/actor.h.
        outputs: ``(slot, dtype)`` of each output column.
        num_inputs: the number of input columns.
        num_weights: the number of arrays of weights.
    """

    def __init__(
        self,
        slots: Sequence[int],
        operations: Sequence[tuple[int, int, Sequence[int], Sequence[int], Sequence[float]]],
        outputs: Sequence[tuple[int, int]],
        num_inputs: int,
        num_weights: int,
    ) -> None: ...
    def pack(self, weights: Sequence[tuple[int, int]]) -> None:
        """Copy float32 weights, (address, number of floats) each. Later changes of the memory have no effect."""

    def bind(
        self,
        inputs: Sequence[tuple[int, int, int]],
        outputs: Sequence[tuple[int, int, int]],
        num_parts: int,
        num_steps: int,
        key: int,
        step: int,
        first: int,
    ) -> None:
        """Read and write these columns, (address, bytes to the next environment, bytes to the next step) each.

        Random numbers are a function of `key`, of the step (row 0 is `step`), and of the environment, from `first` on.
        """

    def act(self, t: int) -> bool:
        """Compute row t and write its outputs. False, without a write, if torch has to compute the row."""

    @property
    def next_step(self) -> int:
        """The step after the last row that was computed."""

def layer_width() -> int:
    """Return how many floats a layer computes at a time."""

def use_layer_width(n: int) -> bool:
    """Compute n floats at a time (4, 8 or 16); False if the processor can't."""

def flushes_denormals() -> bool:
    """Return whether this thread computes with numbers below 2^-126 as zeros, as after `torch.set_flush_denormal`."""

def philox(key: int, a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    """Return four random 32-bit numbers of a key and a counter."""

_Rows = tuple[int, int, int, Sequence[tuple[int, int, int, int, int]]]

class Columns:
    """k columns of `num_rows` contiguous rows, at addresses that the caller keeps alive.

    Any number of threads may call one object. It takes no lock: rows that are written during a gather may be torn.
    """

    def __init__(self, pointers: Sequence[int], row_bytes: Sequence[int], num_rows: int) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    def gather(self, index: int, n: int, out: Sequence[int], wanted: Sequence[int] | None = None) -> None:
        """Copy rows `index[0:n]` (int64) of the `wanted` columns, all by default, into the arrays `out`."""

    def write(self, start: int, n: int, src: Sequence[int]) -> None:
        """Write n <= num_rows rows from the arrays `src` to start, start + 1, ..., around the end of the ring."""

    def put(self, index: int, n: int, src: Sequence[int]) -> None:
        """Write n rows from the arrays `src` to rows `index[0:n]`; if a row is repeated, the last one wins."""

    @staticmethod
    def sharing(
        bases: Sequence[int],
        row_bytes: Sequence[int],
        outcomes: Sequence[int],
        roots: Sequence[int],
        frames: Sequence[int],
        pieces: Sequence[int],
        num_slots: int,
        streams: int,
        places: int,
        heads: int,
    ) -> _SharedRows:
        """Return rows of a ring, in which outcomes that the following root repeats, and frames, are stored once.

        Args:
            bases: the address of each leaf's column; any number for outcomes.
            row_bytes: the bytes of a row of each leaf.
            outcomes: the leaves that are stored with their roots.
            roots: the root of each of them.
            frames: the number of frames in a row of each leaf; 1 for leaves that are no stacks of frames.
            pieces: the number of pieces of each frame that alternate with the other frames' pieces in a row.
            num_slots: the number of slots, less than 2^30.
            streams: the slots of one step.
            places: the address of `num_slots` uint32 numbers.
            heads: the address of another `num_slots` uint32 numbers, or 0 if there are no stacks.
        """

    @staticmethod
    def sharing_limit(num_slots: int, streams: int, stacks: bool) -> int:
        """Return the number of rows that the columns of roots in shared rows need: slots, zeros and spare rows."""

class _SharedRows:
    """Rows of a ring, in which outcomes that the following root repeats, and frames of stacks, are stored once.

    The columns of roots hold `num_slots` slots, a row of zeros and spare rows. ``places[slot]`` is the row of a slot's
    outcomes in these columns: the slot of the following step, a spare row, or the row of zeros before the first write.
    ``heads[slot]`` is the spare row of a slot's stacks, or a larger number. One thread may write, while others read.
    """

    @property
    def num_apart(self) -> int:
        """The number of spare rows in use."""

    @property
    def used(self) -> int:
        """The row after the last spare row that was ever used."""

    def free(self) -> list[int]:
        """Return the spare rows that were used and are free again."""

    def reach(self, n: int, by_slot: bool = False) -> int:
        """Return the row after the last one that a write of n rows may use; with `by_slot`, a `put`."""

    def reach_of(self, start: int, n: int, src: Sequence[int]) -> int:
        """Return the row after the last one that a `write` with these arguments may use, by a look at the rows."""

    def write(self, start: int, n: int, src: Sequence[int], in_place: bool = False) -> bool:
        """Write n <= num_slots rows from the arrays `src` to start, start + 1, ..., around the end of the ring.

        With `in_place`, the columns hold the rows already, and only outcomes are stored. Otherwise, return False and
        write nothing if an array is part of a column.
        """

    def put(self, index: int, n: int, src: Sequence[int]) -> bool:
        """Write n rows from the arrays `src` to the slots `index[0:n]`; if a slot is repeated, the last row wins.

        Return False and write nothing if an array is part of a column.
        """

    def gather(self, index: int, n: int, out: Sequence[int], wanted: Sequence[int] | None = None) -> None:
        """Copy the rows in slots `index[0:n]` (int64) of the wanted leaves (all by default) to the arrays at `out`."""

    def forget(self) -> None:
        """Forget all rows."""

    def recount(self) -> None:
        """Find the free spare rows anew, after a fork during a write."""

    def watch(self, outcomes: Sequence[int], roots: Sequence[int], flags: Sequence[int]) -> None:
        """Set the leaves that `seams` reads; see `TensorColumns.watch`."""

    def seams(self, newest: int, steps: int, streams: int, src: Sequence[int]) -> bytes | None:
        """Return a byte for each stream: 1 if the arrays `src` don't continue the step stored from slot `newest` on.

        See `TensorColumns.seams`.
        """

class TensorColumns:
    """Columns ``[rows, *leaf]`` on the CPU, written from tensors.

    Args:
        exchange: the capsule with DLPack's exchange interface of `tensor_class`; see `knows_exchange`.
        tensor_class: the class of the tensors; instances of subclasses aren't accepted.
        columns: contiguous tensors of real numbers; their memory must not move.
    """

    def __init__(self, exchange: object, tensor_class: type[Any], columns: list[Any]) -> None: ...
    def fits(self, leaves: list[Any], lead: tuple[int, ...]) -> bool:
        """Return whether all leaves are plain, contiguous CPU tensors ``[*lead, *leaf]`` of the columns' dtypes."""

    def write(self, start: int, n: int, leaves: list[Any]) -> bool:
        """Write n <= num_rows rows to start, start + 1, ..., around the end of the ring.

        Return False and write nothing if a leaf isn't n contiguous rows, or its memory is part of a column. Leaves must
        not be negated lazily: `fits` checks this, `write` doesn't.
        """

    def watch(self, outcomes: list[int], roots: list[int], flags: list[int]) -> None:
        """Set the columns that `seams` reads: outcomes, the roots that repeat them one step later, and end flags."""

    def seams(self, newest: int, steps: int, streams: int, leaves: list[Any]) -> bytes | None:
        """Return a byte for each stream: 1 if the leaves don't continue the step stored from row `newest` on.

        A stream doesn't continue if the bits of a stored outcome differ from the first root, and no end flag is set at
        the stored step. This is decided only if the leaves chain: each step without a flag leads to the following one,
        and there is such a step. Outcomes that never change are ignored if others change. Return None if all streams
        continue, or a leaf isn't a contiguous CPU tensor ``[steps, streams, *leaf]``.
        """

class EndColumns:
    """The columns that mark the ends of trajectories; their memory must not move.

    Args:
        flags: addresses of bool columns, with one or more values per row.
        widths: the number of values per row of each flag column.
        ids: addresses of integer columns.
        sizes: the bytes per row of each id column: 1, 2, 4 or 8.
        ahead: the address of an integer column; flags count only in rows where it is 1. 0: no such column.
        ahead_bytes: its bytes per row.
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
        """Return whether a trajectory ends at one of the rows slot[0:n] (int64) that inner[0:n] (bytes) marks.

        It ends at a row with a set flag, or with another id than the row of the next slot.
        """

class TensorRows:
    """Rows of columns ``[*batch, T, *leaf]`` on the CPU, written from tensors.

    Args:
        exchange: the capsule with DLPack's exchange interface of `tensor_class`; see `knows_exchange`.
        tensor_class: the class of the tensors; instances of subclasses aren't accepted.
        columns: the columns by key; each row is contiguous, and rows have equal distances.
        roots: by key, the column whose next row gets the same values.
        flags: the keys of flags; `write` returns whether one of them is set.
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

        Return None and write nothing if a key is missing, or with `exactly` if there are further keys. The same if a
        value isn't a CPU tensor of the column's dtype and row shape, or has more than a kilobyte and isn't contiguous.
        """

class TensorMarks:
    """The addresses and version counters of tensors, to detect changes."""

    def __init__(self, exchange: object, tensor_class: type[Any]) -> None: ...
    def take(self, tensors: tuple[Any, ...]) -> None: ...
    def unchanged(self, tensors: tuple[Any, ...]) -> bool: ...
    def taken(self) -> list[tuple[int, int]]: ...

class TensorForms:
    """The addresses, shapes and strides of tensors, without references to them.

    Args:
        exchange: the capsule with DLPack's exchange interface of `tensor_class`; see `knows_exchange`.
        tensor_class: the class of the tensors.
        tensors: any number of tensors.
    """

    def __init__(self, exchange: object, tensor_class: type[Any], tensors: list[Any]) -> None: ...
    def unchanged(self, tensors: list[Any]) -> bool:
        """Return whether tensors have the stored addresses, shapes and strides, and no gradients or attributes."""

class FreshTensors:
    """Makes uninitialised tensors on the CPU; each call makes new ones.

    Args:
        exchange: the capsule with DLPack's exchange interface of `tensor_class`; see `knows_exchange`.
        tensor_class: the class of the tensors.
        like: CPU tensors with the shapes and dtypes of the new ones.
    """

    def __init__(self, exchange: object, tensor_class: type[Any], like: list[Any]) -> None: ...
    def make(self) -> tuple[list[Any], list[int]]:
        """Return new tensors, each with separate memory, and the addresses of their memory."""

def knows_exchange(capsule: object) -> bool:
    """Return whether a capsule holds DLPack's exchange interface in a supported version."""

def lanes() -> int:
    """Return the number of doubles in a register: 8 with AVX-512, else 2. Results don't depend on it."""

def use_lanes(n: int) -> bool:
    """Use registers of `n` doubles; return False and change nothing if the processor has none. For tests."""

def first_nonfinite_f32(address: int, n: int) -> int:
    """Return the position of the first NaN or infinity among n float32 values, or -1."""

def first_nonfinite_f64(address: int, n: int) -> int:
    """Return the position of the first NaN or infinity among n float64 values, or -1."""

def are_finite(arrays: Iterable[ndarray[Any, Any]]) -> bool:
    """Return whether all arrays are contiguous float32 or float64 and hold only finite numbers."""

def positions_of_ones(column: ndarray[Any, Any]) -> list[int] | None:
    """Return the position of the 1 in each row of ``(T, n)``; None if a row isn't one-hot, or the type is unknown."""

def write_ones(positions: ndarray[Any, Any], column: ndarray[Any, Any]) -> bool:
    """Write one-hot rows into ``(T, n)``; return False and write nothing for a bad position or an unsupported array."""

class RowMaps:
    """Computes rows of columns from rows of other columns, with the bits of float32 or float64 arithmetic.

    Args:
        exchange: DLPack's exchange interface of the tensor class; None if no operation reads a tensor.
        tensor_class: the class of the tensors.
        maps: a tuple ``(source, after, roots, operations)`` for each column. The first three are float32 or float64
            NumPy arrays with rows first, whose memory is held. `roots` gets the values of `after` one row later; it may
            be None. An operation is ``("add" | "subtract" | "multiply" | "divide", tensors, name)`` or the conversion
            ``("float32" | "float64", None, None)``. ``tensors[name]`` is looked up at each call. It must broadcast with
            a row, and have the dtype of the values before the operation.

    Raises:
        ValueError: for arrays and tensors of another type or shape, read-only arrays, and unknown operations.
        TypeError: for an object that isn't an array, or isn't a list of such tuples.
    """

    def __init__(
        self, exchange: Any, tensor_class: type, maps: list[tuple[Any, Any, Any, list[tuple[str, Any, Any]]]]
    ) -> None: ...
    def run(self, t: int) -> bool:
        """Write row `t`, and row ``t + 1`` of the roots, from row `t` of the sources.

        Returns:
            True; False if a tensor is missing, or has another shape, layout or dtype than at construction. Then nothing
            is written.

        Raises:
            IndexError: if there is no row `t`, or no row ``t + 1`` of the roots; nothing is written.
        """

class RunningSums:
    """Running sums over the rows of one column, with the same bits as after adding row by row.

    Args:
        after: receives the sums; a NumPy array with rows first, of uint8, signed integers, float32 or float64, whose
            memory is held.
        roots: an array of the same type and shape, which gets the sums one row later.
        addends: an array of the same type and shape; None: add 1 at each step.

    Raises:
        ValueError: for arrays of different or unsupported types or shapes, and for read-only arrays.
        TypeError: for an object that isn't an array.
    """

    def __init__(
        self, after: ndarray[Any, Any], roots: ndarray[Any, Any], addends: ndarray[Any, Any] | None = None
    ) -> None: ...
    def run_on(self, first: int, n: int) -> None:
        """Write the sums of rows `first`, ..., ``first + n - 1``; row `first` of `roots` is the initial value.

        Raises:
            IndexError: if these rows, or the row after them, don't exist.
        """

def bump(counters: int, start: int, n: int, num_rows: int) -> None:
    """Add 1 to int64 counters `(start + i) % num_rows` for i in `[0, n)`; they wrap around their type."""

def bump_at(counters: int, index: int, n: int, num_rows: int) -> None:
    """Add 1 to int64 counters `index[0:n]`, each in `[0, num_rows)`; a repeated number counts each time."""

def crc32(pieces: Iterable[Buffer], before: int = 0) -> int:
    """Return the CRC-32 (as in zlib) of the concatenated bytes of contiguous buffers.

    Args:
        pieces: any number of buffers; the GIL is released for long ones.
        before: the checksum of the bytes before them; 0 for none.

    Raises:
        TypeError, BufferError, ValueError: an object has no buffer, or no contiguous one.
    """

def read_files(
    files: list[tuple[str | bytes, int, ndarray[Any, Any] | _Rows, Sequence[int]]], block: int, threads: int
) -> tuple[int, int, int] | None:
    """Read parts of plain files into memory, and compare checksums; the GIL is released.

    Args:
        files: a tuple of path, offset, memory and checksums for each part. Memory is either a contiguous int64 array
            ``(..., 2)`` with address (0: skip the bytes) and size of each piece, or rows as in `spread_rows`. There is
            one CRC-32 for each block of bytes; the last block may be shorter. No checksums: don't compare.
        block: the number of bytes in a block, at least 1.
        threads: the largest number of threads.

    Returns:
        None; or for the first damaged part its position, the kind of damage, and a detail. Kind 0 has errno as detail,
        1 (short file) the length of the file, and 2 (wrong checksum) the offset of the block in the file.

    Raises:
        ValueError: `block`, an offset or a size is too small; a file isn't a tuple of four values; pieces aren't
            pairs of int64; or a condition of `spread_rows`.
    """

def spread_rows(columns: list[tuple[int, _Rows]], threads: int) -> None:
    """Copy rows in memory to their targets; long calls release the GIL.

    Args:
        columns: for each column the address of its bytes, and a tuple with the bytes per row, the number of bytes
            before these bytes, the number of bytes, and a list of targets. A target is its address, its stride, the
            address of the runs' first source rows, the address of their first target rows, and the number of runs.
        threads: the largest number of threads.

    Raises:
        ValueError: a size is negative, a row is empty, or the runs don't begin at row 0.
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
    """Write trajectory ids and step counts for T steps of P environments.

    Returns the lengths and the returns of the ended trajectories, ordered by time, then by environment. Arrays need
    contiguous rows; otherwise `ValueError`.

    Args:
        done: `(P, T)` bool, True at the last step of a trajectory.
        reward: `(P, T)` float32 or float64; None: `own_returns` doesn't change, and no returns are returned.
        mask: `(P, T)` bool, False at padding; None: all steps are frames.
        ids: output `(P, T)` int64: `id * factor + offset`, -1 at padding.
        counts: output `(P, T)` int64: frames of the trajectory before the step; None: not written.
        own_ids: `(P,)` int64, ids of the current trajectories; changed in place, like the next two.
        own_steps: `(P,)` int64, frames of the current trajectories so far.
        own_returns: `(P,)` float64, sums of rewards of the current trajectories so far.
        next_id: the first unused id; new trajectories get it and the following ids.
        factor: see `ids`.
        offset: see `ids`.
    """

class SumTree:
    """A sum tree of `capacity` priorities in [0, 2**960], all 0 at first.

    Parents are recomputed from their children, so every sum depends only on the priorities. A call that changes the
    tree must not run together with another call: a caller that shares the tree holds one lock around each call.
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
        """Set the priorities of rows `index[0:n]` (int64) to `value[0:n]` (float64); the last value of a row wins."""

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
        """Raise RuntimeError if the tree is inconsistent; costs a pass over the whole tree."""

def importance_weights(priority: int, n: int, unit: float, beta: float, out: int, normalise: bool) -> None:
    """Write `(priority / unit) ** -beta` of n positive float64 to `out` (float32).

    With `normalise` the smallest priority is the unit, so that its weight is exactly 1, and `unit` has no effect.
    """

class TensorUpdates:
    """Updates priorities from tensors of row numbers and priorities.

    Args:
        exchange: the capsule with DLPack's exchange interface of `tensor_class`; see `knows_exchange`.
        tensor_class: the class of the tensors; instances of subclasses aren't accepted.
    """

    def __init__(self, exchange: object, tensor_class: type[Any]) -> None: ...
    def update(
        self, table: Priorities, index: Any, priority: Any, generation: Any | None, limit: int, written: int
    ) -> int | None:
        """Update priorities like `table.update`, with the same errors.

        All tensors must be contiguous CPU vectors of one length: int64 for rows and generations, float32 or float64 for
        priorities. Otherwise return None and change nothing. Priorities must not be negated lazily; this isn't checked.
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
        """Load a saved state; `ValueError` if it is all 0, or has another size."""

class Priorities:
    """The priorities of `capacity` rows; a draw, an update or a write of a prioritized sampler is one call.

    A row is in use after it was filled or updated. It is drawn in proportion to its leaf, `(priority + eps) ** alpha`.
    The leaf is 0 if the row isn't in use or is blocked. `written` is always the address of the caller's write counters
    (int64, one for each row). Only one call may run at a time, including draws: a caller that shares the object between
    threads holds one lock around each call.

    Args:
        capacity: the number of rows.
        single: store priorities as float32 instead of float64.
    """

    def __init__(self, capacity: int, single: bool) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def single(self) -> bool: ...
    @property
    def largest(self) -> float:
        """The largest priority that can be stored."""

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
        """The largest priority in any accepted update; None if there was no update."""

    @max_seen.setter
    def max_seen(self, value: float | None) -> None: ...
    def set_rule(self, alpha: float, eps: float) -> None:
        """Set the rule `(priority + eps) ** alpha`, and recompute the leaves of all rows in use.

        Initially alpha is 1 and eps is 0. ValueError if alpha or eps is negative or not finite, or a leaf would exceed
        2**959.
        """

    def fill(self, start: int, n: int, priority: float) -> None:
        """Put n <= capacity rows from `start` on, around the end of the ring, in use with this priority."""

    def default_priority(self, within: bool) -> float:
        """Return the priority for new rows: `max_seen`, or with `within` the largest of rows in use; 1.0 if none."""

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

        If a row is repeated, the last value wins.

        An index of -1 is skipped; all others are in `[0, limit)`. An update is dropped if the row's counter differs
        from its generation in `expected` (int64). Without `expected` (0) it is compared with the generation at the
        row's last draw, and a row that was never drawn is accepted. Return the number of dropped updates.

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

        `uniforms` is the address of the uniforms, or a generator that draws them.

        Writes rows to `index` (int64), importance weights to `weight` (float32) and the rows' counters to
        `generation` (int64). Weights are `(leaf / min_positive) ** -beta`. With `by_batch` they are divided by the
        largest weight of the batch, which becomes exactly 1. With `served` the generations are stored as those of the
        last draws. RuntimeError if all leaves are 0.
        """

    def remember(self, index: int, n: int, generation: int) -> None:
        """Store generation[0:n] as the generations at the last draws of rows index[0:n]."""

    def block(self, index: int, n: int, flags: int) -> None:
        """Block the rows of `index[0:n]` whose byte in `flags` isn't 0, and unblock the rows whose byte is 0.

        A blocked row keeps its priority, and accepts updates, but isn't drawn.
        """

    def get(self, index: int, n: int, value: int) -> None:
        """Write the priorities of rows `index[0:n]` to `value` (float64); 0 for rows that aren't in use."""

    def leaves(self, index: int, n: int, value: int) -> None:
        """Write the leaves of rows `index[0:n]` to `value` (float64)."""

    def clear(self) -> None:
        """Reset all rows, blocks, draws and `max_seen`; the rule doesn't change."""

    def save(self, priority: int, mark: int) -> None:
        """Write `priority` (float64) and `mark` (32 bits, opaque) of the rows below `end`.

        With the rule and `max_seen`, that is the whole state.
        """

    def load(self, priority: int, mark: int, n: int) -> None:
        """Load n saved rows; all other rows are then not in use. The rule and `max_seen` don't change."""

    def check_valid(self) -> None:
        """Raise RuntimeError if the state is inconsistent; costs a pass over all rows."""

class Episodes:
    """The table of trajectories in a ring of `capacity` steps of `num_streams` streams.

    The slot of a step is its place in the ring times `num_streams` plus its stream. Runs (the stored parts of
    trajectories) are numbered stream by stream, the oldest first. Only one call may run at a time, including draws: a
    caller that shares a table between threads holds one lock around each call.
    """

    def __init__(self, capacity: int, num_streams: int = 1, now: int = 0) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def now(self) -> int:
        """The step counter: the initial `now` plus all steps written since; `clear` sets it to 0."""

    @property
    def stored(self) -> int:
        """Steps stored in each stream."""

    @property
    def cursor(self) -> int:
        """The place where the next write begins."""

    def on_write(self, start: int, count: int, ends: int = 0, ids: Sequence[int] = ()) -> None:
        """Record a write of `count` steps from `start` on in every stream, around the end of the ring.

        `ends` (0: no ends) holds `count * num_streams` bytes, step by step, not 0 at the last step of a trajectory.
        `ids` holds any number of int64 columns of the same shape; a change of an id in time is a boundary. A write
        begins at the cursor, except the first one and a write of `capacity` steps. To build the table of a full ring,
        call `clear()`, then write the steps from its cursor to its end, then the rest.
        """

    def clear(self) -> None:
        """Remove all steps; the next write may begin anywhere."""

    def num_runs(self, min_len: int = 1) -> int:
        """Return the number of runs with at least `min_len` steps."""

    def list_runs(self, min_len: int, first: int, length: int, n: int) -> int:
        """Write first slot and length (int64) of the n runs with at least `min_len` steps."""

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

        Each slice selects a run with equal probability, then one of the first steps 0 to (length - slice_len) with
        equal probability. `strict` uses only runs of at least slice_len steps; otherwise shorter runs are returned
        completely. With `left` and `right` (below slice_len) slices may begin before and end after the run by as many
        steps. They are cut to the run, and have at least one step.

        Returns the sum of the lengths. RuntimeError if there is no run to draw from.
        """

    def locate(self, slot: int, n: int, before: int, after: int) -> None:
        """Write the number of steps (int64) of each slot's run before the slot, and from the slot on (at least 1).

        IndexError if a slot isn't stored.
        """

    def expand(self, first: int, length: int, n: int, slot: int, stride: int = 0, last: int = 0) -> None:
        """Write the slots (int64) of n slices one after the other, `sum(length)` of them.

        With `stride`, slice i begins at position `i * stride`, and its last slot fills the remaining positions. `last`
        (0: not written) gets a byte for each position: 1 at the last step of a slice.
        """

    def check_valid(self) -> None:
        """Raise RuntimeError if the table is inconsistent; costs a pass over all runs."""
