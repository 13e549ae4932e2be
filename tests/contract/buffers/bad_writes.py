"""Rows of writes that violate the schema or hold no records."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tests.contract.buffers.bad_calls import GRID, LONG, TAPE, THING, Bad, each, table

LEAVES = sorted(TAPE.rows(0, 2).keys(True, True), key=str)


def name_of(key: Any) -> str:
    """Return the last part of a key."""
    return key if isinstance(key, str) else key[-1]


def broken(rows: TensorDict, key: Any, how: str) -> TensorDict:
    """Return the rows with one leaf missing, with another dtype or with another shape."""
    rows = rows.clone()
    if how == "missing":
        return rows.exclude(key)
    leaf = rows[key]
    if how == "dtype":
        other = {torch.bool: torch.uint8, torch.float32: torch.float64, torch.int64: torch.int32}
        rows[key] = leaf.to(other[leaf.dtype])
    else:
        rows[key] = torch.stack([leaf, leaf], -1)
    return rows


def call(subject: Any, method: str, data: Any) -> Any:
    """Write with one of the three methods."""
    if method == "setitem":
        subject[slice(0, 2)] = data
    else:
        getattr(subject, method)(data)


def data_for(method: str, tape: Any = TAPE) -> TensorDict:
    """Return valid data for a method that writes."""
    return tape.step_at(LONG) if method == "add" else tape.rows(LONG, LONG + 2)


BROKEN = [
    Bad(
        f"{method}: {how} {key}",
        lambda s, m=method, k=key, h=how: call(s, m, broken(data_for(m), k, h)),
        name_of(key),
        subject,
    )
    for subject, method in (
        ("plain", "extend"),
        ("plain", "add"),
        ("plain", "setitem"),
        ("preset", "extend"),
        ("slices", "extend"),
        ("memmap", "extend"),
        ("prioritized slices", "extend"),
    )
    for key in LEAVES
    for how in ("missing", "dtype", "shape")
]

EXTRA = [
    Bad(
        f"{method}: an extra key {key}",
        lambda s, m=method, k=key: call(s, m, data_for(m).set(k, torch.zeros(data_for(m).batch_size))),
        name_of(key),
        subject,
    )
    for subject in ("plain", "once", "preset", "slices", "memmap", "given")
    for method in ("extend", "add")
    for key in ("more", ("next", "more"), ("collector", "more"))
]

NO_RECORDS = (
    None,
    5,
    "text",
    THING,
    np.zeros(3),
    {},
    [],
    (),
    TAPE.rows(0, 0),
    torch.zeros(3, 4),
    {"observation": torch.zeros(2, 3)},
    TensorDict({}, []),
    [TAPE.step_at(0), 5],
    [TAPE.step_at(0), TAPE.step_at(1).exclude("action")],
    TAPE.rows(0, 2).set("text", ["a", "b"]),
    {key: value.numpy() for key, value in TAPE.rows(0, 2).flatten_keys(".").items()},
)

KINDS = ("plain", "tensordict", "slices", "fetching ahead")
DIMENSIONS = table(
    [
        Bad("extend: a row without time", lambda s: s.extend(TAPE.step_at(0)), "extend|dimension", kind)
        for kind in KINDS
    ],
    [
        Bad("extend: too few columns", lambda s: s.extend(GRID.rows(0, 2)[:2]), "", "grid"),
        Bad("extend: too many columns", lambda s: s.extend(torch.cat([GRID.rows(0, 2)] * 2)), "", "grid"),
        Bad("extend: one dimension", lambda s: s.extend(TAPE.rows(0, 2)), "", "grid"),
        Bad("add: one dimension too few", lambda s: s.add(TAPE.step_at(0)), "", "grid"),
        Bad("add: one dimension too many", lambda s: s.add(GRID.rows(0, 2)), "", "grid"),
        Bad("add: with a time dimension", lambda s: s.add(TAPE.rows(0, 2)), "", "plain"),
    ],
    each(
        "extend: a sparse column",
        (torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3, device="meta")),
        lambda s, v: s.extend(TAPE.rows(0, 2).clone().set("observation", v)),
        "observation",
        subject="plain",
    ),
)

NOTHING = table(
    *(
        each("extend", NO_RECORDS, lambda s, v: s.extend(v), "", subject=kind)
        for kind in ("plain", "tensordict", "slices", "prioritized")
    ),
    each("add", (None, 5, "text", {}, [], ()), lambda s, v: s.add(v), "", subject="plain"),
)

IMMUTABLE = [
    Bad("extend", lambda s: s.extend(TAPE.rows(0, 2)), "", "data set", RuntimeError),
    Bad("add", lambda s: s.add(TAPE.step_at(0)), "", "data set", RuntimeError),
    Bad("empty", lambda s: s.empty(), "", "data set", RuntimeError),
    Bad(
        "no rank", lambda s: s.extend(TAPE.rows(0, 2).exclude(("next", "reward"))), "reward", "best", KeyError
    ),
]

WRITES = table(BROKEN, EXTRA, DIMENSIONS, NOTHING, IMMUTABLE)
