"""Buffers prefetch batches, repeat stale draws, select columns, and add the documented entries to a batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors.utils import split_trajectories
from gleanrl.data.postprocs import MultiStep
from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.envs.transforms import CatFrames
from gleanrl.errors import EmptyBufferError, MissingKeyError, SchemaError, UnsupportedError
from tests.data.replay_buffers.oracle import fill
from tests.data.replay_buffers.overtaken import Overtaken

CAPACITY, BATCH = 30, 12
SAMPLERS = {
    "random": lambda: RandomSampler(seed=0),
    "epochs": lambda: SamplerWithoutReplacement(seed=0),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, seed=0),
    "slices": lambda: SliceSampler(slice_len=3, seed=0),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=3, seed=0),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=3, seed=0),
}
KINDS = pytest.mark.parametrize("kind", SAMPLERS)


def rows(start: int, count: int) -> TensorDict:
    """Return rows whose columns all hold the same number; every fifth row ends a trajectory."""
    t = torch.arange(start, start + count)
    data = {"t": t, "deep": {"twice": 2 * t, "row": t[:, None].expand(count, 50).clone()}}
    return TensorDict({**data, "next": {"done": (t % 5 == 4)[:, None]}}, [count])


def buffer_of(kind: str, storage: Any = LazyTensorStorage, **options: Any) -> TensorDictReplayBuffer:
    made = storage(CAPACITY) if isinstance(storage, type) else storage
    buffer = TensorDictReplayBuffer(storage=made, sampler=SAMPLERS[kind](), batch_size=BATCH, **options)
    buffer.extend(rows(0, CAPACITY))
    return buffer


def check(batch: TensorDict, buffer: Any) -> list[int]:
    """Check that each row is whole and is stored at its index; return the row numbers."""
    t = batch["t"]
    assert torch.equal(batch["deep", "twice"], 2 * t) and bool((batch["deep", "row"] == t[:, None]).all())
    assert torch.equal(buffer.storage.column(("t",))[batch["index"]], t), "not what is stored"
    return t.tolist()


def same(one: Any, other: Any, batches: int = 5) -> bool:
    for _ in range(batches):
        a, b = one.sample(), other.sample()
        if set(a.keys(True, True)) != set(b.keys(True, True)):
            return False
        if not all(torch.equal(a[key], b[key]) for key in a.keys(True, True) if key != "_generation"):
            return False
    return True


@KINDS
@pytest.mark.parametrize("ahead", [{}, {"prefetch": 1}, {"prefetch": 3, "prefetch_threads": 2}], ids=str)
def test_batches_hold_stored_rows_after_any_write(kind, ahead):
    buffer = buffer_of(kind, **ahead)
    for turn in range(12):
        check(buffer.sample(), buffer)
        if turn % 3 == 0:
            buffer.extend(rows(100 * turn, 4 + turn))
        elif turn % 3 == 1:
            buffer[[1, 7, 20]] = rows(10_000 + 10 * turn, 3)
        else:
            fill(buffer.storage, rows(20_000 + 100 * turn, 10), 5)
        if turn == 8:
            buffer.empty()
            buffer.extend(rows(50_000, 20))
        check(buffer.sample(), buffer)


@KINDS
def test_the_number_of_threads_changes_nothing(kind):
    one, many = (buffer_of(kind, prefetch=3, prefetch_threads=threads) for threads in (1, 4))
    assert same(one, many)
    for buffer in (one, many):
        buffer.extend(rows(100, 7))
    assert same(one, many)


@KINDS
@pytest.mark.parametrize("how", ["fresh", "used", "itself", "pickle", "deepcopy"])
@pytest.mark.parametrize("ahead", [{}, {"prefetch": 2}], ids=str)
def test_copy_in_mid_use_continues_with_the_same_batches(kind, how, ahead):
    buffer = buffer_of(kind, **ahead)
    buffer.extend(rows(100, 11))
    check(buffer.sample(), buffer)
    buffer.extend(rows(200, 3))  # overwrites some of the prefetched rows
    reference = buffer_of(kind, **ahead)
    reference.empty()
    reference.load_state_dict(buffer.state_dict())
    if how in ("pickle", "deepcopy"):
        other = copy.deepcopy(buffer) if how == "deepcopy" else pickle.loads(pickle.dumps(buffer))
    else:
        other = buffer if how == "itself" else buffer_of(kind, **ahead)
        if how == "used":
            other.extend(rows(900, 17))
            other.sample()
        other.load_state_dict(buffer.state_dict())
    assert same(reference, other)
    check(other.sample(), other)


def test_state_with_prefetched_batches_needs_a_prefetching_buffer():
    state = buffer_of("random", prefetch=2)
    state.sample()
    other = buffer_of("random")
    before = other.state_dict()["_sampler"]["generator"]
    with pytest.raises(
        SchemaError, match="the state holds 2 batches drawn ahead; build the buffer with prefetch"
    ):
        other.load_state_dict(state.state_dict())
    assert torch.equal(other.state_dict()["_sampler"]["generator"], before)


ACTS = {
    "overwritten": lambda buffer: buffer.extend(rows(1000, 22)),
    "all overwritten": lambda buffer: buffer.extend(rows(1000, CAPACITY)),
    "replaced": lambda buffer: buffer.__setitem__(slice(0, 20), rows(1000, 20)),
    "emptied": lambda buffer: (buffer.empty(), buffer.extend(rows(1000, 20))),
    "loaded": lambda buffer: buffer.load_state_dict(buffer.state_dict()),
}


@KINDS
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("keys", [None, ["deep", "t"]], ids=str)
def test_rows_overwritten_during_the_fetch_are_replaced(kind, act, keys):
    buffer = buffer_of(kind, Overtaken)
    for _ in range(4):
        buffer.storage.act = lambda: ACTS[act](buffer)
        batch, info = buffer.sample(keys=keys, return_info=True)
        check(batch, buffer)
        assert torch.equal(info["generation"], buffer.storage.generation(batch["index"]))
        for name in ("_weight", ("next", "truncated"), ("next", "done")):
            assert name not in info or info[name].shape[0] == batch.batch_size[0]
    assert buffer.stats().rows_redrawn > 0


@KINDS
def test_emptying_during_the_fetch_raises(kind):
    buffer = buffer_of(kind, Overtaken)
    buffer.storage.act = buffer.empty
    with pytest.raises(EmptyBufferError, match="emptied while a batch was fetched"):
        buffer.sample()


@KINDS
@pytest.mark.parametrize(
    ("keys", "columns"),
    [
        ("t", {"t"}),
        (["t", "t"], {"t"}),
        (("t", "deep"), {"t", ("deep", "twice"), ("deep", "row")}),
        ([("deep", "twice")], {("deep", "twice")}),
        ([("next", "done"), "t"], {("next", "done"), "t"}),
        ({"t": None}, {"t"}),
    ],
)
def test_keys_select_columns_and_added_entries(kind, keys, columns):
    buffer, whole = buffer_of(kind, prefetch=2), buffer_of(kind)
    batch, expected = buffer.sample(keys=keys), whole.sample()
    added = {"index", "_weight", "priority_weight", "_generation"}
    flags = {("next", name) for name in ("done", "terminated", "truncated")} if "slice" in kind else set()
    found = set(batch.keys(True, True))
    assert columns | {"index"} <= found <= columns | added | flags and flags <= found
    assert all(torch.equal(batch[key], expected[key]) for key in found)


@pytest.mark.parametrize("keys", ["x", ["t", ("deep", "x")], [("t", "x")], ["next", "nothing"]], ids=str)
def test_missing_columns_raise_and_use_no_draw(keys):
    buffer, twin = buffer_of("random"), buffer_of("random")
    with pytest.raises(MissingKeyError):
        buffer.sample(keys=keys)
    del twin
    check(buffer.sample(), buffer)


def test_columns_of_a_storage_without_any():
    buffer = ReplayBuffer(storage=ListStorage(4), batch_size=2)
    buffer.extend([1, 2])
    with pytest.raises(UnsupportedError, match="a ListStorage has no columns"):
        buffer.sample(keys=["t"])


def test_a_storage_that_is_cleared_behind_the_buffers_back():
    buffer = buffer_of("slices", prefetch=2)
    buffer.sample()
    buffer.storage.clear()
    with pytest.raises(EmptyBufferError):
        buffer.sample()
    buffer.extend(rows(500, 10))
    assert min(check(buffer.sample(), buffer)) >= 500


def test_the_rest_of_an_epoch_is_neither_lost_nor_mixed_with_the_next():
    buffer = buffer_of("epochs", prefetch=5)
    for _ in range(3):
        batches = [check(batch, buffer) for batch in buffer]
        assert sorted(sum(batches, [])) == list(range(CAPACITY))
        assert [len(batch) for batch in batches] == [12, 12, 6]
    buffer.sample()
    assert not buffer.sampler.ran_out
    buffer.sample(), buffer.sample()
    assert buffer.sampler.ran_out


def test_collate_fn_that_drops_rows_raises():
    buffer = buffer_of("random", collate_fn=lambda batch: batch[:3])
    with pytest.raises(SchemaError, match="collate_fn has to keep the rows"):
        buffer.sample()


@pytest.mark.parametrize("depth", [None, 2])
def test_a_loop_ends_with_its_epoch_also_where_the_rest_was_overwritten(depth):
    sampler = SliceSamplerWithoutReplacement(slice_len=2, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(16), sampler=sampler, batch_size=2, prefetch=depth)
    ends = (torch.arange(1, 17) % 4 == 0)[:, None]
    data = TensorDict({"x": torch.arange(16), "next": TensorDict({"done": ends}, [16])}, [16])
    buffer.extend(data)
    turns = 0
    for _ in buffer:
        turns += 1
        buffer.extend(data)
        assert turns == 1, "each write overwrites the whole epoch"
    assert turns == 1 and len(list(buffer)) == 4


@pytest.mark.parametrize("kind", ["prioritized", "slice epochs"])
@pytest.mark.parametrize(
    "broken",
    [{"slots": torch.arange(3)}, {"slots": torch.full((12,), CAPACITY)}, {"fresh": None}, {"extras": None}]
    + [
        {"last": torch.zeros(3, dtype=torch.bool)},
        {"origin": torch.tensor([-1])},
        {"ran_out": None},
        {"asked": "x"},
    ],
    ids=str,
)
def test_broken_draws_in_a_state_change_nothing(kind, broken):
    buffer, other = buffer_of(kind, prefetch=2), buffer_of(kind, prefetch=2)
    buffer.sample()
    other.extend(rows(500, 7))
    twin = copy.deepcopy(other)
    state = buffer.state_dict()
    state["_prefetched"][0].update(broken)
    with pytest.raises(SchemaError, match="_prefetched"):
        other.load_state_dict(state)
    assert torch.equal(other[:]["t"], twin[:]["t"]) and same(other, twin)


@KINDS
def test_the_state_of_a_storage_that_was_cleared_behind_the_buffers_back(kind):
    buffer = buffer_of(kind, prefetch=2)
    buffer.sample()
    buffer.storage.clear()
    buffer.extend(rows(700, 15))
    buffer.load_state_dict(buffer.state_dict())
    for _ in range(4):
        assert min(check(buffer.sample(), buffer)) >= 700


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda buffer: buffer.load_state_dict(buffer.state_dict()) or buffer]
)
@pytest.mark.parametrize("ahead", [{}, {"prefetch": 2}], ids=str)
def test_state_of_priorities_includes_direct_writes_to_the_storage(how, ahead):
    buffer = buffer_of("prioritized", **ahead)
    buffer.update_priority(torch.arange(CAPACITY), 0.0)
    buffer.sampler.eps = 0.0
    buffer.update_priority([3], 2.0)
    fill(buffer.storage, rows(700, 1), 7)
    buffer = how(buffer)
    assert {t for _ in range(20) for t in buffer.sample()["t"].tolist()} == {3, 700}


KEYS = [["x"], ["x", ("next", "done")], [("next", "terminated")]]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
def test_flags_in_the_info_of_slices_dont_depend_on_the_columns_fetched(make, keys):
    flag = torch.ones(8, 1, dtype=torch.bool)
    data = TensorDict(
        {"x": torch.arange(8), "next": {"done": flag, "terminated": flag, "truncated": ~flag}}, [8]
    )
    buffer = make(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=1), batch_size=4)
    buffer.extend(data)
    batch, info = buffer.sample(return_info=True, keys=keys)
    assert bool(info["next", "terminated"].all()) and bool(info["next", "done"].all())
    if make is ReplayBuffer:
        found = set(batch.keys(True, True))
        assert found == {key if isinstance(key, str) else tuple(key) for key in keys}


class Doubled(ReplayBuffer):
    """Doubles its samples, in the way of other libraries' buffers."""

    def _sample(self, batch_size):
        batch, info = super()._sample(batch_size)
        batch["x"] = batch["x"] * 2
        return batch, info


class Tripled(ReplayBuffer):
    """Triples its samples."""

    def sample(self, batch_size=None, return_info=False):
        result = super().sample(batch_size, return_info)
        (result[0] if return_info else result)["x"] *= 3
        return result


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize(("make", "factor"), [(Doubled, 2), (Tripled, 3)])
def test_a_subclass_s_own_sampling_counts_everywhere(make, factor, depth):
    def made():
        buffer = make(
            storage=LazyTensorStorage(6), sampler=SamplerWithoutReplacement(), batch_size=2, prefetch=depth
        )
        buffer.extend(TensorDict({"x": torch.arange(1, 7)}, [6]))
        return buffer

    expected = [factor * x for x in range(1, 7)]
    buffer = made()
    assert sorted(x for _ in range(3) for x in buffer.sample()["x"].tolist()) == expected
    batch, info = buffer.sample(return_info=True)
    assert batch["x"].tolist() == [factor * (i + 1) for i in info["index"].tolist()]
    assert sorted(x for batch in buffer for x in batch["x"].tolist()) == expected
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert sorted(x for batch in other for x in batch["x"].tolist()) == expected
    ensemble = ReplayBufferEnsemble(buffer, made(), batch_size=4, sample_from_all=True)
    assert sorted(x for batch in ensemble for x in batch["x"].flatten().tolist()) == sorted(expected * 2)


class Sized(ReplayBuffer):
    """Negates its samples, and always returns them without info."""

    def sample(self, batch_size=None):
        return -super().sample(batch_size)


class Fixed(ReplayBuffer):
    """Negates batches of one size."""

    def sample(self):
        return -super().sample()


@pytest.mark.parametrize("make", [Sized, Fixed])
def test_a_subclass_s_own_sample_may_take_less(make):
    buffers = []
    for _ in range(2):
        buffers.append(make(storage=LazyTensorStorage(4), sampler=SamplerWithoutReplacement(), batch_size=2))
        buffers[-1].extend(torch.arange(1, 5))
    assert sorted(x for batch in buffers[0] for x in batch.tolist()) == [-4, -3, -2, -1]
    assert next(iter(buffers[0])).tolist() != buffers[0].sample().tolist()
    mixture = ReplayBufferEnsemble(*buffers, batch_size=4, sample_from_all=True)
    # The ensemble passes a size and requests info.
    with pytest.raises(TypeError, match="positional argument"):
        mixture.sample()


class Scaled(TensorDictReplayBuffer):
    """Overrides writing after the transforms."""

    def _add(self, data):
        return super()._add(data * 10)

    def _extend(self, data):
        return super()._extend(data * 100)


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_users_add_and_extend_behind_the_transforms(ndim):
    buffer = Scaled(storage=LazyTensorStorage(20, ndim=ndim), transform=Shift())
    shape = [3, 4][-ndim:]
    buffer.extend(TensorDict({"x": torch.ones(shape)}, shape))
    buffer.add(TensorDict({"x": torch.ones(shape[:-1])}, shape[:-1]))
    assert buffer.storage.get(slice(None))["x"].reshape(5, -1)[:, 0].tolist() == [200.0] * 4 + [20.0]


class Shift:
    """Adds one to written records."""

    def __call__(self, batch):
        return batch

    def inv(self, data):
        return data + 1


def rollout(episodes: int, length: int, ids: bool) -> TensorDict:
    """Return whole episodes; an observation is 100 times the episode's number plus the step's number."""
    t = torch.arange(episodes * length)
    observation = (t // length * 100 + t % length).float()[:, None]
    done = (t % length == length - 1)[:, None]
    following = {"x": observation + 1, "done": done, "truncated": done, "terminated": ~done & False}
    data = TensorDict({"x": observation, "next": {**following, "reward": torch.ones(len(t), 1)}}, [len(t)])
    if ids:
        data["collector", "traj_ids"] = t // length
    return data


SLICED = {
    "slices": lambda: SliceSampler(slice_len=4, seed=0),
    "no cut flag": lambda: SliceSampler(slice_len=4, seed=0, truncated_key=None),
    "padded": lambda: SliceSampler(slice_len=4, seed=0, pad=True, span=True),
    "epochs": lambda: SliceSamplerWithoutReplacement(slice_len=4, seed=0),
    "priorities": lambda: PrioritizedSliceSampler(200, 0.7, 0.5, slice_len=4, seed=0),
}


def sliced(make: Any, sampler: str, ids: bool, transform: Any = None) -> Any:
    storage = LazyTensorStorage(200)
    buffer = make(storage=storage, sampler=SLICED[sampler](), batch_size=32, transform=transform)
    buffer.extend(rollout(10, 10, ids))
    return buffer


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("sampler", SLICED)
@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
def test_frame_stacks_of_slices_stay_within_their_slice(make, sampler, ids):
    stack = CatFrames(N=3, dim=-1, in_keys=["x"], out_keys=["stack"])
    buffer = sliced(make, sampler, ids, stack)
    for _ in range(10):
        stacks = buffer.sample()["stack"]
        steps = stacks.diff(dim=1)
        assert bool(((steps == 0) | (steps == 1)).all()), stacks


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("sampler", SLICED)
@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
def test_n_step_rows_and_pieces_of_slices_stay_within_their_slice(make, sampler, ids):
    buffer = sliced(make, sampler, ids)
    for _ in range(10):
        batch = buffer.sample()
        steps = MultiStep(0.9, 3)(batch)
        assert bool((steps["next", "x"] - steps["x"] <= 3).all() and (steps["next", "x"] > steps["x"]).all())
        pieces = split_trajectories(batch)
        assert pieces.shape[1] <= 4
        mask = pieces["mask"] if "mask" in pieces.keys() else pieces["collector", "mask"]
        inner = mask[:, 1:] & mask[:, :-1]
        assert bool((pieces["x"].diff(dim=1)[inner] == 1).all())


def test_a_users_transform_of_a_plain_buffer_sees_where_slices_end():
    seen = []
    buffer = sliced(ReplayBuffer, "slices", False, lambda batch: seen.append(batch.clone()) or batch)
    buffer.sample()
    last = torch.arange(32) % 4 == 3
    assert bool(seen[0]["next", "truncated"][last].all() and seen[0]["next", "done"][last].all())
    assert not seen[0]["next", "terminated"].any()


def test_a_transform_of_records_in_dictionaries_sees_where_slices_end():
    done = torch.zeros(20, 1, dtype=torch.bool)
    seen = []
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=SliceSampler(slice_len=4, seed=0),
        batch_size=8,
        transform=lambda batch: seen.append(batch) or batch,
    )
    buffer.extend({"x": torch.arange(20), "next": {"done": done}})
    buffer.sample()
    assert seen[0]["next"]["truncated"].flatten().tolist() == [False, False, False, True] * 2


def test_transforms_of_an_ensemble_see_where_the_slices_of_plain_members_end():
    stack = CatFrames(N=3, dim=-1, in_keys=["x"], out_keys=["stack"])
    members = [sliced(ReplayBuffer, sampler, False) for sampler in ("slices", "priorities")]
    ensemble = ReplayBufferEnsemble(*members, batch_size=64, transform=stack)
    for _ in range(10):
        steps = ensemble.sample()["stack"].diff(dim=-1)
        assert bool(((steps == 0) | (steps == 1)).all())


def test_a_batch_of_a_plain_buffer_without_transforms_holds_the_stored_records():
    buffer = sliced(ReplayBuffer, "slices", False)
    batch, info = buffer.sample(return_info=True)
    assert bool((batch == buffer[info["index"].tolist()]).all())
