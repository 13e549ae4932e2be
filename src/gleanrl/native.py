"""The one door to the compiled core; its manual is the headers in `cpp/`."""

from __future__ import annotations

try:
    from gleanrl._core import (
        Columns,
        EndColumns,
        Episodes,
        FreshTensors,
        Priorities,
        Random,
        RowMaps,
        RunningSums,
        SumTree,
        TensorColumns,
        TensorForms,
        TensorMarks,
        TensorRows,
        TensorUpdates,
        are_finite,
        bump,
        bump_at,
        crc32,
        first_nonfinite_f32,
        first_nonfinite_f64,
        importance_weights,
        knows_exchange,
        lanes,
        positions_of_ones,
        read_files,
        record,
        spread_rows,
        use_lanes,
        write_ones,
    )
except ImportError as cause:
    raise ImportError(
        f"gleanrl's compiled core can't be imported ({cause}): run `make build` in a clone of the project, "
        "or install the wheel for this Python version with `pip install --force-reinstall gleanrl`."
    ) from cause

__all__ = [
    "Columns",
    "EndColumns",
    "Episodes",
    "FreshTensors",
    "Priorities",
    "Random",
    "RowMaps",
    "RunningSums",
    "SumTree",
    "TensorColumns",
    "TensorForms",
    "TensorMarks",
    "TensorRows",
    "TensorUpdates",
    "are_finite",
    "bump",
    "bump_at",
    "crc32",
    "first_nonfinite_f32",
    "first_nonfinite_f64",
    "importance_weights",
    "knows_exchange",
    "lanes",
    "positions_of_ones",
    "read_files",
    "record",
    "spread_rows",
    "use_lanes",
    "write_ones",
]
