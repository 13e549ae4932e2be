"""Rows of constructors with invalid arguments."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.bad_calls import NO_NUMBERS, NO_SIZES, TAPE, THING, Bad, each, storage, table
from tests.contract.buffers.tape import IDS

PRIORITIES = {"max_capacity": 12, "alpha": 0.6, "beta": 0.4}
NO_SEEDS = ("a", 1.5, [1], float("nan"))
SLICES = {
    "SliceSampler": {},
    "SliceSamplerWithoutReplacement": {},
    "PrioritizedSliceSampler": PRIORITIES,
}


def made(kind: str, **fixed: Any) -> Any:
    """Return a function that makes `kind` with one more argument."""
    return lambda **more: getattr(parts, kind)(**{**fixed, **more})


def argument(kind: str, name: str, values: Any, error: Any = Exception, **fixed: Any) -> list[Bad]:
    """Return a row for each bad value of one argument."""
    named = "traj_key|trajectory_key" if name.startswith("traj") and name.endswith("key") else rf"\b{name}\b"
    return each(f"{kind}({name})", values, lambda v: made(kind, **fixed)(**{name: v}), named, error=error)


STORAGES = table(
    *(
        argument(kind, "max_size", NO_SIZES)
        for kind in ("ListStorage", "LazyTensorStorage", "LazyMemmapStorage")
    ),
    argument("LazyTensorStorage", "ndim", (0, -1, 1.5, "2", True), max_size=5),
    argument("LazyMemmapStorage", "ndim", (0, -1, 1.5, "2", True), max_size=5),
    argument("LazyMemmapStorage", "device", ("cuda", "meta"), ValueError, max_size=5),
    argument("TensorStorage", "storage", (None, 5, "text", {}, [], THING)),
    argument("TensorStorage", "max_size", (11, 13, 0, "12", 1.5), ValueError, storage=TAPE.rows(0, 12)),
    argument("TensorStorage", "ndim", (0,), storage=TAPE.rows(0, 12)),
)

SAMPLERS = table(
    *(argument(kind, "seed", NO_SEEDS) for kind in ("RandomSampler", "SamplerWithoutReplacement")),
    argument("PrioritizedSampler", "max_capacity", NO_SIZES, alpha=0.6, beta=0.4),
    *(
        argument("PrioritizedSampler", name, NO_NUMBERS, **{k: v for k, v in PRIORITIES.items() if k != name})
        for name in ("alpha", "beta", "eps")
    ),
    argument("PrioritizedSampler", "dtype", (torch.int64, torch.bool, "float", 5), **PRIORITIES),
    argument("PrioritizedSampler", "reduction", ("other", 5, None), **PRIORITIES),
    argument("PrioritizedSampler", "normalize", ("other", 5, None), **PRIORITIES),
)


def sizes(kind: str, fixed: dict[str, Any]) -> list[Bad]:
    """Return the rows that all slice samplers share."""
    make = made(kind, **fixed)
    both = {"slice_len": 2, "traj_key": "a", "trajectory_key": "b"}
    return table(
        argument(kind, "num_slices", NO_SIZES, **fixed),
        argument(kind, "slice_len", NO_SIZES, **fixed),
        [
            Bad(f"{kind}: neither size", lambda _: make(), "num_slices|slice_len"),
            Bad(
                f"{kind}: both sizes",
                lambda _: make(num_slices=2, slice_len=2),
                "num_slices|slice_len",
                error=TypeError,
            ),
            Bad(f"{kind}: both names of one key", lambda _: make(**both), "traj_key|trajectory_key"),
        ],
    )


SLICE_SAMPLERS = table(
    *(sizes(kind, fixed) for kind, fixed in SLICES.items()),
    argument("SliceSampler", "span", (-1, "a", (1,), (1, 2, 3), 1.5, (True, -1), None, (0, 2)), slice_len=2),
    argument("SliceSampler", "ends", (5, torch.ones(3)), slice_len=2, cache_values=True),
    argument("SliceSampler", "trajectories", (5, torch.ones(3, 2)), slice_len=2, cache_values=True),
    argument("SliceSamplerWithoutReplacement", "ends", (5, torch.ones(3)), slice_len=2),
    [
        Bad(
            f"ends with {name}",
            lambda _, k=more: parts.SliceSampler(slice_len=2, ends=torch.ones(3, dtype=torch.bool), **k),
            "ends",
            error=RuntimeError,
        )
        for name, more in {
            "no cache": {},
            "an end key": {"cache_values": True, "end_key": "a"},
            "a trajectory key": {"cache_values": True, "traj_key": IDS},
            "trajectories": {"cache_values": True, "trajectories": torch.ones(3, dtype=torch.int64)},
        }.items()
    ],
)

WRITERS = table(
    argument("TensorDictMaxValueWriter", "reduction", ("other", 5, None)),
)

KINDS = {
    "ReplayBuffer": {},
    "TensorDictReplayBuffer": {},
    "PrioritizedReplayBuffer": {"alpha": 0.6, "beta": 0.4},
    "TensorDictPrioritizedReplayBuffer": {"alpha": 0.6, "beta": 0.4},
}


def buffers(kind: str, fixed: dict[str, Any]) -> list[Bad]:
    """Return the rows that all buffers share."""
    open_storage = {} if kind != "ReplayBuffer" else {"storage": storage()}
    fixed = {"storage": storage(), **fixed}
    rows = table(
        argument(kind, "batch_size", NO_SIZES, ValueError, **fixed),
        argument(kind, "dim_extend", (-1, 1.5, "0", True), ValueError, **fixed),
        argument(kind, "storage", (5, "a", THING), **{**fixed, **open_storage}),
        argument(kind, "prefetch", (-1, 1.5, "2", True), batch_size=4, **fixed),
        argument(kind, "transform", (5, "a"), **fixed),
        argument(kind, "seed", NO_SEEDS, **fixed) if kind == "ReplayBuffer" else [],
        [
            Bad(
                f"{kind}: fetching ahead without a size",
                lambda _: made(kind, **fixed)(prefetch=2),
                "batch_size",
                error=ValueError,
            )
        ],
    )
    if "alpha" in fixed:
        for name in ("alpha", "beta", "eps"):
            more = {k: v for k, v in fixed.items() if k != name}
            rows += argument(kind, name, NO_NUMBERS, **more)
        rows += argument(kind, "reduction", ("other", 5), **fixed) if kind.startswith("T") else []
    else:
        rows += argument(kind, "sampler", (5, "a", parts.RoundRobinWriter), **fixed)
        rows += argument(kind, "writer", (5, "a", parts.RandomSampler), **fixed)
    return rows


BUFFERS = table(
    *(buffers(kind, fixed) for kind, fixed in KINDS.items()),
    [
        Bad(
            "dropping the last batch of no size",
            lambda _: parts.ReplayBuffer(storage=storage(), sampler=parts.SamplerWithoutReplacement(True)),
            "batch_size",
            error=ValueError,
        ),
        Bad(
            "threads without prefetch",
            lambda _: parts.ReplayBuffer(storage=storage(), batch_size=4, prefetch_threads=2),
            "prefetch",
        ),
        Bad(
            "an ensemble of nothing",
            lambda _: parts.ReplayBufferEnsemble(batch_size=4),
            "buffer|rbs|storages",
        ),
        Bad("an ensemble of numbers", lambda _: parts.ReplayBufferEnsemble(5, batch_size=4), "ReplayBuffer"),
    ],
)

CONSTRUCTORS = table(STORAGES, SAMPLERS, SLICE_SAMPLERS, WRITERS, BUFFERS)
