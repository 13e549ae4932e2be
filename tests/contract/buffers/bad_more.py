"""Rows of invalid keys, callables, paths, devices, reads and states."""

from __future__ import annotations

import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.bad_calls import LONG, TAPE, THING, each, storage, table
from tests.contract.buffers.bad_constructors import KINDS, SLICES, argument
from tests.contract.buffers.bad_reads import put

NO_KEYS = (5, 1.5, ["a", 5], THING, b"a")

MORE_CONSTRUCTORS = table(
    argument("LazyTensorStorage", "device", ("nonsense", 1.5), max_size=5),
    argument("TensorStorage", "device", ("nonsense", 1.5), storage=TAPE.rows(0, 12)),
    argument("TensorStorage", "ndim", (3, -1, "2", 1.5), storage=TAPE.rows(0, 12)),
    argument("LazyMemmapStorage", "scratch_dir", (5, 1.5), max_size=5),
    *(
        argument(kind, name, NO_KEYS, slice_len=2, **fixed)
        for kind, fixed in SLICES.items()
        for name in ("end_key", "traj_key", "trajectory_key", "truncated_key")
    ),
    argument("SliceSampler", "ends", ("a", THING), slice_len=2, cache_values=True),
    argument("SliceSampler", "trajectories", ("a", THING), slice_len=2, cache_values=True),
    argument("TensorDictMaxValueWriter", "rank_key", (*NO_KEYS, None)),
    *(argument(kind, "collate_fn", (5, "a"), storage=storage(), **fixed) for kind, fixed in KINDS.items()),
    *(
        argument(kind, "priority_key", NO_KEYS, storage=storage(), **KINDS[kind])
        for kind in ("TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
    ),
    each(
        "StorageEnsemble(transforms)",
        ([None, None], 5),
        lambda v: parts.StorageEnsemble(storage(), transforms=v),
        "transforms",
    ),
)

MORE_CALLS = table(
    *(
        each(
            "keys",
            (["nothing"], [("next", "nothing")], [5], [], 5),
            lambda s, v: s.sample(keys=v),
            "keys|nothing",
            subject=kind,
        )
        for kind in ("plain", "once", "preset", "slices", "fetching ahead")
    ),
    *(each("read", (["a"], b"a"), lambda s, v: s[v], "", subject=kind) for kind in ("plain", "grid")),
    each("write at", (["a"], b"a"), put, "", subject="plain"),
    each(
        "a column",
        ("nothing", ("next", "nothing")),
        lambda s, v: s[v],
        "nothing",
        subject="plain",
        error=KeyError,
    ),
    each("write nothing", (None,), lambda s, v: s.__setitem__(slice(0, 2), v), "", subject="plain"),
    each(
        "a column of another kind",
        (torch.zeros(LONG - 1, 3), torch.zeros(3), 5, None, "a"),
        lambda s, v: s.__setitem__("observation", v),
        "observation",
        subject="plain",
    ),
    each(
        "insert_transform",
        (1, -2, "a", 1.5, None),
        lambda s, v: s.insert_transform(v, lambda batch: batch),
        "index",
        subject="plain",
    ),
    *(
        each("state", (None, 5, [], "a"), lambda s, v: s.load_state_dict(v), "state", subject=kind)
        for kind in ("plain", "preset", "fetching ahead")
    ),
)
