"""Types of the compiled core.

Addresses are Python ints (`tensor.data_ptr()`, `array.ctypes.data`) of contiguous memory that the caller keeps alive
for the call, and for the life of the object in `Columns`. Arguments are checked before the first byte is written; a
call that raises has changed nothing. `IndexError`: a row, column or start outside its range; `ValueError`: any other
bad value; `TypeError`: not an int.
"""

from collections.abc import Sequence

class Columns:
    """k columns of `num_rows` rows, rows back to back, at addresses that the caller keeps alive.

    Any number of threads may call one object. It locks nothing: rows written while they are gathered come out torn.
    """

    def __init__(self, pointers: Sequence[int], row_bytes: Sequence[int], num_rows: int) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    def gather(
        self,
        index: int,
        n: int,
        out: Sequence[int],
        wanted: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> None:
        """Copy rows `index[0:n]` (int64 at an address) of the `wanted` columns, all by default, into the arrays `out`.

        Row numbers lie in `[0, limit)`; pass the filled length, `num_rows` is the default.
        """

    def write(self, start: int, n: int, src: Sequence[int]) -> None:
        """Write n <= num_rows rows from the arrays `src` to start, start + 1, ..., around the end of the ring."""

    def put(self, index: int, n: int, src: Sequence[int]) -> None:
        """Write n rows from the arrays `src` to rows `index[0:n]`; of equal numbers the last one wins."""

def first_nonfinite_f32(address: int, n: int) -> int:
    """Position of the first NaN or infinity among n float32 values, or -1."""

def first_nonfinite_f64(address: int, n: int) -> int:
    """Position of the first NaN or infinity among n float64 values, or -1."""

def bump(counters: int, start: int, n: int, num_rows: int) -> None:
    """Add 1 to int64 counters `(start + i) % num_rows` for i in `[0, n)`; they wrap around their type."""

def bump_at(counters: int, index: int, n: int, num_rows: int) -> None:
    """Add 1 to int64 counters `index[0:n]`, each in `[0, num_rows)`; a repeated number counts each time."""
