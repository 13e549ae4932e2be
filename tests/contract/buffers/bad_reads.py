"""Rows of invalid samples, indices, priorities, parts and states."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.bad_calls import (
    LONG,
    NO_NUMBERS,
    NO_SIZES,
    SUBJECTS,
    TAPE,
    THING,
    Bad,
    each,
    storage,
    table,
)

SERVING = (
    "plain",
    "once",
    "prioritized",
    "preset",
    "grid",
    "list",
    "slices",
    "slices once",
    "fetching ahead",
)
SAMPLES = table(
    *(
        each(
            "sample",
            NO_SIZES,
            lambda s, v: s.sample(v),
            "batch_size",
            subject=kind,
            error=(ValueError, TypeError),
        )
        for kind in SERVING
    ),
    [
        Bad(
            "slices that don't divide",
            lambda s: s._sampler.sample(s._storage, 5),
            "batch",
            kind,
            RuntimeError,
        )
        for kind in ("slices", "slices once", "prioritized slices")
    ],
    each(
        "the sampler alone",
        (0, -1),
        lambda s, v: s.sampler.sample(s.storage, v),
        "batch_size",
        subject="plain",
    ),
)

OUTSIDE = (
    LONG,
    -LONG - 1,
    12,
    10**12,
    2**63,
    [0, LONG],
    torch.tensor([0, LONG]),
    torch.tensor([-LONG - 1]),
    torch.tensor([2**62]),
    torch.tensor(LONG),
)
NO_INDEX = (
    1.5,
    torch.tensor([0.5]),
    torch.ones(LONG + 1, dtype=torch.bool),
    torch.ones(2, dtype=torch.bool),
    THING,
    (0, 0, 0),
)


def put(subject: Any, index: Any) -> None:
    """Write one row at an index."""
    subject[index] = TAPE.step_at(0)


READS = table(
    *(
        each("read", OUTSIDE, lambda s, v: s[v], "", subject=kind, error=IndexError)
        for kind in ("plain", "list", "memmap", "grid")
    ),
    *(each("read", NO_INDEX, lambda s, v: s[v], "", subject=kind) for kind in ("plain", "grid")),
    each("write at", OUTSIDE, put, "", subject="plain", error=IndexError),
    each("write at", NO_INDEX, put, "", subject="plain"),
    each(
        "values of another length",
        (TAPE.rows(0, 1), TAPE.rows(0, 3), TAPE.step_at(0), 5, torch.zeros(2)),
        lambda s, v: s.__setitem__(slice(0, 2), v),
        "",
        subject="plain",
    ),
    each(
        "a column of another kind",
        (torch.zeros(LONG, 3, dtype=torch.float64), torch.zeros(LONG, 4)),
        lambda s, v: s.__setitem__("observation", v),
        "observation|",
        subject="plain",
    ),
)

ONE = torch.ones(1)
PRIORITIES = table(
    *(
        each(
            "priority",
            (
                float("nan"),
                float("inf"),
                -1.0,
                -1e-30,
                "a",
                None,
                ONE * float("nan"),
                torch.ones(2),
                torch.ones(2, 3),
            ),
            lambda s, v: s.update_priority(
                torch.tensor([[1, 1]] if "grid" in str(s.storage.ndim) else [1]), v
            ),
            "priorit",
            subject=kind,
        )
        for kind in ("prioritized", "preset", "prioritized slices")
    ),
    *(
        each(
            "priority at",
            [torch.tensor([v]) for v in (LONG, -2, 12, 10**12, -(2**63), 2**63 - 1)],
            lambda s, v: s.update_priority(v, ONE),
            "index",
            subject=kind,
            error=IndexError,
        )
        for kind in ("prioritized", "preset", "prioritized slices")
    ),
    each(
        "priority at",
        (torch.tensor([1.5]), "a", None, THING, torch.tensor([True, False])),
        lambda s, v: s.update_priority(v, ONE),
        "index",
        subject="prioritized",
    ),
    each(
        "priority at",
        (
            torch.tensor([[7, 0]]),
            torch.tensor([[0, 3]]),
            torch.tensor([[-2, 0]]),
            torch.tensor([[0, 0, 0]]),
            (torch.tensor([7]), torch.tensor([0])),
            (torch.tensor([0]),),
        ),
        lambda s, v: s.update_priority(v, ONE),
        "index",
        subject="grid prioritized",
    ),
    each(
        "generation",
        (torch.ones(2).long(), torch.ones(1), "a", 1.5),
        lambda s, v: s.update_priority(torch.tensor([1]), ONE, v),
        "generation",
        subject="prioritized",
    ),
    *(
        each(name, NO_NUMBERS, lambda s, v, n=name: setattr(s.sampler, n, v), name, subject="prioritized")
        for name in ("alpha", "beta", "eps")
    ),
    each(
        "update without",
        ("index", "index"),
        lambda s, v: s.update_tensordict_priority(TAPE.rows(0, 2)),
        "index",
        subject="preset",
        error=KeyError,
    )[:1],
)


def give(subject: Any, kind: str) -> None:
    """Install a part of another buffer that is still in use."""
    other = SUBJECTS["plain"]()
    getattr(subject, f"set_{kind}")(getattr(other, kind))


PARTS = table(
    *(
        each(
            f"set_{kind}",
            (5, None, "a", parts.ReplayBuffer),
            lambda s, v, k=kind: getattr(s, f"set_{k}")(v),
            kind,
            subject="plain",
        )
        for kind in ("storage", "sampler", "writer")
    ),
    [
        Bad(f"set_{kind}: one in use", lambda s, k=kind: give(s, k), kind, "plain")
        for kind in ("storage", "sampler", "writer")
    ],
    each(
        "append_transform", (5, None, "a"), lambda s, v: s.append_transform(v), "transform", subject="plain"
    ),
    each("set_seed", ("a", 1.5, None, [1]), lambda s, v: s.set_seed(v), "seed", subject="plain"),
)


def without(subject: Any, *path: str) -> Any:
    """Return the buffer's state without one entry."""
    state = subject.state_dict()
    inner = state
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return state


def of_another(count: int = 5, **kwargs: Any) -> Any:
    """Return the state of a buffer with other parts."""
    kwargs = {"storage": storage(), **kwargs}
    other = parts.ReplayBuffer(**kwargs, batch_size=2)
    other.extend(TAPE.rows(0, count))
    return other.state_dict()


STATES = table(
    *(
        each(
            "state",
            ({}, {"_storage": {}}),
            lambda s, v: s.load_state_dict(v),
            "load_state_dict|state",
            subject=kind,
        )
        for kind in ("plain", "preset", "fetching ahead")
    ),
    *(
        each(
            "state without",
            ("_storage", "_sampler", "_writer"),
            lambda s, v: s.load_state_dict(without(s, v)),
            "",
            subject=kind,
        )
        for kind in ("plain", "once", "prioritized", "slices", "grid", "list", "memmap")
    ),
    [
        Bad(
            "state of more records than fit",
            lambda s: s.load_state_dict(of_another(13, storage=storage(13))),
            "load_state_dict",
            kind,
        )
        for kind in ("plain", "memmap", "once")
    ],
    [
        Bad("state of other columns", lambda s: s.load_state_dict(without_column(s)), "", kind)
        for kind in ("plain", "memmap", "slices", "prioritized")
    ],
    [
        Bad(
            "state of another sampler",
            lambda s: s.load_state_dict(SUBJECTS["plain"]().state_dict()),
            "",
            kind,
        )
        for kind in ("once", "prioritized", "preset")
    ],
    [
        Bad("state of two dimensions", lambda s: s.load_state_dict(SUBJECTS["grid"]().state_dict()), "", kind)
        for kind in ("plain", "memmap", "prioritized")
    ],
)


def without_column(subject: Any) -> Any:
    """Return the state of a similar buffer whose records lack a column."""
    other = parts.ReplayBuffer(storage=storage(), batch_size=2)
    other.extend(TAPE.rows(0, LONG).exclude("action"))
    return {**subject.state_dict(), "_storage": other.state_dict()["_storage"]}


CALLS = table(SAMPLES, READS, PRIORITIES, PARTS, STATES)
