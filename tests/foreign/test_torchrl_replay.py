"""Calls of buffers and their parts give the same results as TorchRL's (`make test-foreign`).

Each scenario yields names and calls. Both libraries run them, and each call that succeeds on TorchRL must give the same
result on gleanrl.
Three kinds of calls are left out. Intended differences are listed in docs/migrating.md. For priorities, this release of
TorchRL has no compiled trees with this torch. Copies of texts are lost by TorchRL.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchrl", minversion="0.13")

from tests.foreign.replay_data import KINDS, Raised, Shape, differences, outcome, rows, streams

pytestmark = pytest.mark.filterwarnings("default")


def side(root):
    found = [importlib.import_module(f"{root}.{path}") for path in ("data", "data.replay_buffers", "envs")]
    names = {**vars(found[0]), **vars(found[1])}
    return SimpleNamespace(**names, root=root, envs=found[2])


THEIRS, OURS = side("torchrl"), side("gleanrl")
BUFFERS = ("ReplayBuffer", "TensorDictReplayBuffer")
STORAGES = ("ListStorage", "LazyTensorStorage", "LazyMemmapStorage", "LazyStackStorage")
COLUMNS = STORAGES[1:3]


def made(lib, buffer, storage, size=10, **options):
    ndim = {"ndim": options.pop("ndim")} if "ndim" in options else {}
    store = getattr(lib, storage)(size, **ndim)
    return getattr(lib, buffer)(storage=store, batch_size=options.pop("batch_size", 4), **options)


def life(lib, path, buffer, storage, kind):
    """Fill, overflow, read, empty, fill again."""
    rb, give = made(lib, buffer, storage), KINDS[kind]
    yield "first", lambda: rb.extend(give(6, 0))
    for index in (0, -1, slice(2, 4), slice(None), [0, 2], torch.tensor([1, 0])):
        yield f"rb[{index}]", lambda index=index: rb[index]
        yield f"storage[{index}]", lambda index=index: rb._storage[index]
    yield "overflow", lambda: rb.extend(give(7, 6))
    yield "all", lambda: (len(rb), rb.write_count, rb._writer._cursor, rb[:])
    yield "batches", lambda: Shape((rb.sample(), rb.sample(3), rb.sample(return_info=True)))
    yield "empty", lambda: (rb.empty(), len(rb), rb.write_count)
    yield "again", lambda: (rb.extend(give(3, 50)), len(rb), rb[:])


SAMPLERS = {
    "random": lambda lib: lib.RandomSampler(),
    "epochs": lambda lib: lib.SamplerWithoutReplacement(),
    "whole batches": lambda lib: lib.SamplerWithoutReplacement(drop_last=True),
    "in order": lambda lib: lib.SamplerWithoutReplacement(shuffle=False),
}


def sampling(lib, path, buffer, storage, kind, sampler):
    """Batches and epochs."""
    rb = made(lib, buffer, storage, sampler=SAMPLERS[sampler](lib))
    yield "filled", lambda: rb.extend(KINDS[kind](9, 0))
    yield "epoch", lambda: Shape([*itertools.islice(rb, 5)])
    yield "ran out", lambda: rb._sampler.ran_out
    if sampler != "whole batches":  # in TorchRL, iteration then continues the begun epoch
        yield "size", lambda: Shape((rb.sample(2), rb.sample(3, return_info=True)))
    yield "priorities", lambda: rb.update_priority(torch.tensor([0, 1]), 2.0)


def copies(lib, path, buffer, storage, kind, how):
    """Restore a full ring from a state, from files and as a copy."""
    rb, other = made(lib, buffer, storage), made(lib, buffer, storage)
    yield "filled", lambda: (rb.extend(KINDS[kind](6, 0)), rb.extend(KINDS[kind](7, 6)))
    try:
        if how == "state":
            other.load_state_dict(rb.state_dict())
        elif how == "files":
            rb.dumps(path)
            other.loads(path)
        else:
            other = copy.deepcopy(rb) if how == "deepcopy" else pickle.loads(pickle.dumps(rb))
    except Exception as error:
        yield how, lambda error=error: Raised(error)
        return
    yield "same", lambda: (len(other), other[:])
    if (how, storage) != ("files", "LazyMemmapStorage"):
        yield "goes on", lambda: (other.extend(KINDS[kind](3, 40)), other[:], Shape(other.sample()))


def dimensions(lib, path, buffer, storage, size, dim_extend):
    """Several environments."""
    rb = made(
        lib, buffer, storage, size, ndim=2, **({} if dim_extend is None else {"dim_extend": dim_extend})
    )
    for _ in range(2):
        yield "extend", lambda: rb.extend(streams(3, 4))
        yield "size", lambda: (len(rb), rb._storage.shape, rb._storage.max_size, rb.dim_extend)
    for index in (slice(None), 0, (slice(None), 0), (0, 0), "i", ("next", "obs")):
        yield f"rb[{index}]", lambda index=index: rb[index]
    yield "batches", lambda: Shape((rb.sample(), rb.sample(return_info=True)[0]))
    yield "flat", lambda: Shape(rb._storage.flatten()[:])


SLICES = ("SliceSampler", "SliceSamplerWithoutReplacement")
OF_SLICES = [
    {"num_slices": 2},
    {"slice_len": 4},
    {"slice_len": 3},
    {"slice_len": 4, "truncated_key": None},
    {"slice_len": 4, "traj_key": ("collector", "traj_ids")},
    {"slice_len": 4, "end_key": ("next", "done")},
    {"slice_len": 4, "truncated_key": ("next", "cut")},
    {"num_slices": 2, "end_keys": [("next", "done")]},
    {"slice_len": 6, "strict_length": False},
]


def slices(lib, path, sampler, storage, number, ndim):
    """The possible slices, and the form of batches."""
    told = OF_SLICES[number]
    rb = made(
        lib,
        "TensorDictReplayBuffer",
        storage,
        40,
        batch_size=12 if told.get("slice_len") != 4 else 8,
        sampler=getattr(lib, sampler)(**told),
        ndim=ndim,
    )
    rb.extend(rows(20) if ndim == 1 else streams(2, 10))
    steps = told.get("slice_len", 6) if "strict_length" not in told else 1
    if "num_slices" in told:
        steps = 4
        rb.extend(rows(20, 20) if ndim == 1 else streams(2, 10, 20))

    def starts():
        first = (
            rb.sample(4 * steps if "num_slices" not in told else 8)["i"].view(-1, steps) for _ in range(60)
        )
        together = torch.cat([*first])
        return bool((together.diff(dim=1) == 1).all()), sorted({*together[:, 0].tolist()})

    if sampler == "SliceSampler":
        yield "starts", starts
    if "strict_length" not in told:
        yield "batch", lambda: Shape(rb.sample(4 * steps if "num_slices" not in told else 8))
    yield "told", lambda: (rb._sampler.num_slices, rb._sampler.slice_len, rb._sampler.strict_length)
    yield "no multiple", lambda: rb.sample(7)


def ensembles(lib, path, buffer, number):
    """Ensembles, members, parts."""
    options = [
        {},
        {"sample_from_all": True},
        {"num_buffer_sampled": 4},
        {"num_buffer_sampled": 1},
        {"p": [1, 3]},
    ]
    members = [made(lib, buffer, "LazyTensorStorage") for _ in range(2)]
    for first, member in enumerate(members):
        member.extend(KINDS["TensorDict"](6, 100 * first))
    mixed = lib.ReplayBufferEnsemble(*members, batch_size=8, **options[number])
    yield "batches", lambda: Shape((mixed.sample(), mixed.sample(4), mixed.sample(return_info=True)[0]))
    for index in (0, -1, (slice(None), 0), (0, 0), (slice(None), slice(0, 2))):
        yield (
            f"mixed[{index}]",
            lambda index=index: mixed[index][:] if isinstance(index, int) else mixed[index],
        )
    yield "some", lambda: Shape(mixed[[0, 1]].sample(4))
    parts = {
        "storages": lib.StorageEnsemble(*(member._storage for member in members)),
        "samplers": lib.SamplerEnsemble(lib.RandomSampler(), lib.RandomSampler(), p=[0.5, 0.5]),
        "writers": lib.WriterEnsemble(*(member._writer for member in members)),
    }
    made_of = {**parts, "collate_fn": torch.stack, "collate_fns": [lambda batch: batch] * 2}
    yield "of parts", lambda: Shape(lib.ReplayBufferEnsemble(**made_of).sample(4))


TRANSFORMS = {
    "CatFrames": lambda envs: envs.CatFrames(N=2, dim=-1, in_keys=["obs"], out_keys=["stack"]),
    "RenameTransform": lambda envs: envs.RenameTransform(["obs"], ["renamed"]),
    "with inverse": lambda envs: envs.RenameTransform(["obs"], ["renamed"], ["obs"], ["renamed"]),
    "ObservationNorm": lambda envs: envs.ObservationNorm(loc=1.0, scale=2.0, in_keys=["obs"]),
    "Reward2GoTransform": lambda envs: envs.Reward2GoTransform(gamma=0.5),
    "TargetReturn": lambda envs: envs.TargetReturn(target_return=10.0),
    "ExcludeTransform": lambda envs: envs.ExcludeTransform("action"),
    "RewardClipping": lambda envs: envs.RewardClipping(-1, 1, in_keys=[("next", "reward")]),
    "UnsqueezeTransform": lambda envs: envs.UnsqueezeTransform(-1, in_keys=["obs"]),
    "CatTensors": lambda envs: envs.CatTensors(in_keys=["obs"], out_key="joined", dim=-1, del_keys=False),
    "DTypeCastTransform": lambda envs: envs.DTypeCastTransform(torch.float32, torch.float64, in_keys=["obs"]),
    "SignTransform": lambda envs: envs.SignTransform(in_keys=[("next", "reward")]),
    "Compose": lambda envs: envs.Compose(
        envs.RenameTransform(["obs"], ["renamed"]), envs.ExcludeTransform("action")
    ),
    "a function": lambda envs: lambda batch: batch.set("more", batch["obs"] + 1),
}


def transforms(lib, path, buffer, storage, name, how):
    """Transforms of batches and of records, passed in every way."""
    transform = TRANSFORMS[name](lib.envs)
    at_once = {"construction": {"transform": transform}, "factory": {"transform_factory": lambda: transform}}
    rb = made(
        lib, buffer, storage, 20, sampler=lib.SamplerWithoutReplacement(shuffle=False), **at_once.get(how, {})
    )
    if how == "append":
        rb.append_transform(transform)
    yield "extend", lambda: rb.extend(rows(8))
    yield "stored", lambda: rb._storage[:]
    yield "read", lambda: (rb[:], rb.sample(), len(rb))


FORMS = ("TensorStorageCheckpointer", "FlatStorageCheckpointer", "NestedStorageCheckpointer")


def forms(lib, path, form, storage, ndim, size):
    """Records in files, in several formats."""
    rb, other = (
        made(lib, "ReplayBuffer", storage, size, ndim=ndim, checkpointer=getattr(lib, form)())
        for _ in range(2)
    )
    for first in (0, 10):
        rb.extend(rows(10, first) if ndim == 1 else streams(2, 5, first))
    yield "dumps", lambda: rb.dumps(path)
    yield "loads", lambda: other.loads(path)

    def content(buffer):
        records = (
            buffer[:].select("i", "obs", ("next", "obs"), ("next", "reward"), ("next", "done")).reshape(-1)
        )
        return records[records["i"].argsort()]

    yield "same", lambda: (len(other), content(other))


def trajectories(lib, path, shape, ids, done_key):
    """Batches split by trajectories."""
    batch = rows(torch.Size(shape).numel()).reshape(shape)
    batch = batch if ids else batch.exclude("collector")
    told = {"done_key": done_key} if done_key else {}
    utils = importlib.import_module(f"{lib.root}.collectors.utils")
    yield "split", lambda: utils.split_trajectories(batch, **told).exclude("collector", "traj_ids")


CASES = [
    *(
        (life, *told)
        for told in itertools.product(BUFFERS, STORAGES, KINDS)
        if told[1:] != ("LazyMemmapStorage", "texts")  # TorchRL stores the first record's text in all of them
    ),
    *itertools.product([sampling], BUFFERS, STORAGES, ["TensorDict", "tensor", "list of tensors"], SAMPLERS),
    *itertools.product(
        [copies],
        BUFFERS,
        STORAGES,
        ["TensorDict", "tensor", "tree", "list of TensorDicts"],
        ["state", "files", "pickle", "deepcopy"],
    ),
    *itertools.product([dimensions], BUFFERS, COLUMNS, [12, 30, 100], [None, 0, 1]),
    *itertools.product([slices], SLICES, COLUMNS, range(len(OF_SLICES)), [1, 2]),
    *itertools.product([ensembles], BUFFERS, range(5)),
    *itertools.product(
        [transforms], BUFFERS, STORAGES[:2], TRANSFORMS, ["construction", "append", "factory"]
    ),
    *itertools.product([forms], FORMS, COLUMNS, [1, 2], [6, 12, 20]),
    *itertools.product([trajectories], [(5,), (2, 5), (3, 5)], [True, False], [None, "done", "terminated"]),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(str(getattr(p, "__name__", p)) for p in case)
)
def test_buffer_calls_equal_torchrls(case, tmp_path):
    scenario, *told = case
    theirs, ours = (
        {name: outcome(call) for name, call in scenario(lib, tmp_path / path, *told)}
        for lib, path in ((THEIRS, "theirs"), (OURS, "ours"))
    )
    first = next(iter(theirs.values()))
    if isinstance(first, Raised):  # programs can't rely on a refused call
        return
    assert not differences(theirs, ours)
