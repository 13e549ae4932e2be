"""Mixtures of buffers have the documented members, shapes and errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterEnsemble,
)
from gleanrl.errors import (
    EmptyBufferError,
    GleanError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.oracle import clock, fill, ted

COUNTS = (9, 14, 20)  # the second and third buffer have wrapped


def member(number: int, **options: Any) -> ReplayBuffer:
    """Return a buffer of ten slots; its rows start at step 100 times its number."""
    rb = ReplayBuffer(**{"storage": LazyTensorStorage(10), "batch_size": 4, "seed": number, **options})
    rb.extend(ted(COUNTS[number], start=100 * number))
    return rb


def three(**options: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(*(member(number) for number in range(3)), **{"batch_size": 12, **options})


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_every_row_is_the_one_that_the_info_names(storage):
    members = [member(number, storage=storage(10)) for number in range(3)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=12, seed=0, num_buffer_sampled=4)
    seen: set[int] = set()
    for _ in range(60):
        batch, info = ensemble.sample(return_info=True)
        assert batch.batch_size == (4, 3) and info["index"]["index"].shape == (4, 3)
        assert info["generation"].shape == (4, 3)
        for part, number in enumerate(info["index", "buffer_ids"][:, 0].tolist()):
            slots = info["index", "index"][part]
            t = clock(batch[part])
            assert torch.equal(t, torch.tensor([int(clock(members[number][int(slot)])) for slot in slots]))
            seen |= set(t.tolist())
    assert seen == {*range(9), *range(104, 114), *range(210, 220)}


def test_batch_size_must_divide_by_the_members():
    ensemble = three(batch_size=None)
    with pytest.raises(UnsupportedError, match="no batch_size"):
        ensemble.sample()
    assert ensemble.sample(6).batch_size == (3, 2)
    with pytest.raises(ValueError, match="a multiple of 3"):
        ensemble.sample(7)
    with pytest.raises(ValueError, match="integer of 1 or more"):
        ensemble.sample(0)
    with pytest.raises(ValueError, match="a multiple of 3"):
        three(batch_size=13)
    assert len(ensemble) == 29 and three().batch_size == 12


def test_members_are_chosen_by_probability_or_all_in_order():
    ensemble = three(p=[0, 1, 1], seed=3)
    chosen = torch.cat(
        [ensemble.sample(return_info=True)[1]["index", "buffer_ids"].flatten() for _ in range(50)]
    )
    assert set(chosen.tolist()) == {1, 2}
    with pytest.raises(RuntimeError, match="give one"):
        three(p=[1, 1, 1], sample_from_all=True)
    _, info = three(sample_from_all=True).sample(return_info=True)
    assert info["index", "buffer_ids"][:, 0].tolist() == [0, 1, 2]


def test_members_are_shared_and_written_through_themselves():
    first, second = member(0), member(1)
    ensemble = ReplayBufferEnsemble(first, second, batch_size=4, sample_from_all=True)
    assert ensemble[0] is first and ensemble[-1] is second
    with pytest.raises(IndexError):
        ensemble[2]
    first.empty()
    with pytest.raises(EmptyBufferError):
        ensemble.sample()
    ensemble[0].extend(ted(1, start=500))
    assert clock(ensemble.sample()[0]).tolist() == [500, 500]
    other = ReplayBufferEnsemble(first, batch_size=2)
    assert clock(other.sample()).tolist() == [[500, 500]]


def test_empty_member_with_probability_zero_is_allowed():
    empty = ReplayBuffer(storage=LazyTensorStorage(3))
    ensemble = ReplayBufferEnsemble(member(0), empty, batch_size=4, p=[1, 0])
    assert ensemble.sample().batch_size == (2, 2)


@pytest.mark.parametrize(
    "name, arguments", [("add", (1,)), ("extend", (1,)), ("empty", ()), ("__setitem__", (0, 1))]
)
def test_writes_are_refused(name, arguments):
    ensemble = three()
    with pytest.raises(RuntimeError, match=f"{name}: an ensemble is only read; write to one of its members"):
        getattr(ensemble, name)(*arguments)
    assert len(ensemble) == 29


@pytest.mark.parametrize(
    "index, members",
    [(slice(1, None), {1, 2}), ([2], {2}), (torch.tensor([0, 2]), {0, 2}), ([True, False, True], {0, 2})],
)
def test_index_selects_an_ensemble_of_members(index, members):
    ensemble = three(p=[1, 2, 3], transform=lambda batch: batch.set("seen", batch["next", "reward"] * 0 + 1))
    some = ensemble[index]
    assert isinstance(some, ReplayBufferEnsemble) and some.sampler.num_buffer_sampled == len(members)
    drawn = {int(t) // 100 for _ in range(40) for t in clock(some.sample().exclude("seen")).flatten()}
    assert drawn == members
    assert some.sample()["seen"].all()
    some.append_transform(lambda batch: batch.set("seen", batch["seen"] + 1))
    assert (some.sample()["seen"] == 2).all() and (ensemble.sample()["seen"] == 1).all()
    assert some[0] is ensemble[min(members)]
    assert three(batch_size=15)[:2].batch_size is None, "15 can't be halved"


def test_second_index_reads_records_of_members():
    ensemble = three(transform=lambda batch: batch.set("seen", batch["next", "reward"] * 0 + 1))
    # Slots 0 to 2 of the wrapped buffers hold the newest of their steps that wrapped.
    rows = ensemble[:, :3]
    assert rows.batch_size == (3, 3) and rows["seen"].all()
    assert clock(rows.exclude("seen")).tolist() == [[0, 1, 2], [110, 111, 112], [210, 211, 212]]
    assert clock(ensemble[..., 1].exclude("seen")).tolist() == [1, 111, 211]
    assert clock(ensemble[[2, 0], [5, 4]].exclude("seen")).tolist() == [[215, 214], [5, 4]]
    assert int(clock(ensemble[1, 2])) == 112, "a member's own records"
    assert ensemble[1,] is ensemble[1] and isinstance(ensemble[:2,], ReplayBufferEnsemble)
    with pytest.raises(SchemaError, match=r"member 0 and member 1 can't be stacked: .*\(9,\).*\(10,\)"):
        ensemble[:, :]
    with pytest.raises(InvalidTypeError, match="got the key .*ensemble"):
        ensemble["next", "reward"]
    grid = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    grid.extend(torch.arange(12).view(3, 4))
    assert ReplayBufferEnsemble(grid, grid)[:, 2, 1].tolist() == [9, 9]


def test_transforms_of_members_come_first():
    def add(batch: TensorDict) -> TensorDict:
        return batch.set("r", batch["next", "reward"] + 1)

    def double(batch: TensorDict) -> TensorDict:
        assert batch.batch_size == (2, 3)
        return batch.set("r", batch["r"] * 2)

    class Both:
        def __call__(self, batch: Any) -> Any:
            raise AssertionError("turned round")

        def inv(self, batch: TensorDict) -> TensorDict:
            return batch.set("r", batch["r"] + 5)

    ensemble = ReplayBufferEnsemble(
        member(0, transform=add), member(1, transform=add), batch_size=6, transform=double
    )
    ensemble.append_transform(Both(), invert=True)
    batch = ensemble.sample()
    assert torch.equal(batch["r"], (batch["next", "reward"] + 1) * 2 + 5)
    with pytest.raises(UnsupportedError, match="an ensemble isn't written"):
        ensemble.append_transform(add, invert=True)
    ensemble.insert_transform(0, lambda batch: None)
    with pytest.raises(InvalidTypeError, match="got None"):
        ensemble.sample()


def test_schemas_that_differ_are_named_unless_a_collate_fn_puts_them_together():
    other = ReplayBuffer(storage=LazyTensorStorage(10))
    other.extend(ted(5, start=700).set("action", torch.ones(5)))
    with pytest.raises(SchemaError, match=r"member 0 and member 1 .*'action' is \(3, 2\) .* and \(3,\)"):
        ReplayBufferEnsemble(member(0), other, batch_size=6, sample_from_all=True).sample()
    ensemble = ReplayBufferEnsemble(
        member(0), other, batch_size=6, sample_from_all=True, collate_fn=lambda samples: samples
    )
    assert [sample.batch_size for sample in ensemble.sample()] == [(3,), (3,)]
    assert [sample.batch_size for sample in ensemble[::-1].sample()] == [(3,), (3,)]
    ensemble = ReplayBufferEnsemble(member(0), batch_size=6, collate_fn=lambda samples: None)
    with pytest.raises(InvalidTypeError, match="collate_fn .* got None"):
        ensemble.sample()


def test_keys_select_columns_of_members():
    batch = three().sample(keys=["action", ("next", "reward")])
    assert set(batch.keys(True, True)) == {"action", ("next", "reward")} and batch.batch_size == (3, 4)


def test_an_epoch_ends_with_that_of_a_member():
    members = [member(number, sampler=SamplerWithoutReplacement(drop_last=True)) for number in range(2)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=6, sample_from_all=True)
    for _ in range(2):
        batches = list(ensemble)
        assert len(batches) == 3
        first = torch.cat([clock(batch[0]) for batch in batches]).tolist()
        assert sorted(first) == list(range(9))
    next(iter(ensemble))
    assert len(list(ensemble)) == 3, "after a loop that was left a new epoch begins"
    uneven = ReplayBufferEnsemble(*members, batch_size=4, sample_from_all=True)
    assert len(list(uneven)) == 4, "the shorter one of nine rows ends it"
    endless = iter(three())
    assert [next(endless).batch_size for _ in range(5)] == [(3, 4)] * 5
    with pytest.raises(UnsupportedError, match="needs the batch_size"):
        next(iter(three(batch_size=None)))
    ragged = ReplayBufferEnsemble(
        *(member(number, sampler=SamplerWithoutReplacement()) for number in (0, 1)),
        batch_size=8,
        sample_from_all=True,
    )
    with pytest.raises(SchemaError, match="can't be stacked"):
        list(ragged)


def test_prioritized_members_keep_their_rules():
    members = [
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10), seed=number)
        for number in (0, 1)
    ]
    for number, rb in enumerate(members):
        rb.extend(torch.arange(10) + 100 * number)
        rb.update_priority(torch.arange(10), torch.eye(10)[3 + number])
    ensemble = ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)
    batch, info = ensemble.sample(return_info=True)
    # eps gives all other rows a share of 1e-8.
    assert batch.tolist() == [[3] * 4, [104] * 4]
    assert info["_weight"].shape == (2, 4)
    ensemble.update_priority(info["index"], torch.tensor([[0.0] * 4, [2.0] * 4]), info["generation"])
    members[0].update_priority(7, 1.0)
    assert ensemble.sample().tolist() == [[7] * 4, [104] * 4]
    members[1].extend(torch.full((10,), 500))
    ensemble.update_priority(info["index"], 0.0, info["generation"])
    assert [stats.priorities_dropped for stats in ensemble.stats()] == [0, 4]
    mixed = ReplayBufferEnsemble(member(0), member(1), batch_size=2)
    mixed.update_priority(
        mixed.sample(return_info=True)[1]["index"], 1.0
    )  # no member has priorities: no warning
    with pytest.raises(SchemaError, match="expected 2 parts in priority, as in the index, got 3"):
        ensemble.update_priority(info["index"], torch.zeros(3, 4))


def test_members_draw_slices():
    members = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(20),
            sampler=SliceSampler(slice_len=3, traj_key=("collector", "traj_ids")),
        )
        for _ in range(2)
    ]
    for number, rb in enumerate(members):
        rb.extend(ted(28, start=700 * number))
    ensemble = ReplayBufferEnsemble(*members, batch_size=12, sample_from_all=True)
    for _ in range(20):
        batch = ensemble.sample()
        assert batch.batch_size == (2, 6) and batch["index"].shape == (2, 6)
        step = batch["observation"][..., 1] * 7 + batch["observation"][..., 2]
        assert (step.view(2, 2, 3).diff(dim=-1) == 1).all()
        assert (batch["observation"].view(2, 2, 3, 3)[..., 1].diff(dim=-1) == 0).all()


def test_ensemble_is_made_of_parts():
    storages = StorageEnsemble(
        TensorStorage(ted(4)),
        TensorStorage(ted(4, start=100)),
        transforms=[None, lambda batch: batch.exclude("action")],
    )
    writers = WriterEnsemble(RoundRobinWriter(), ImmutableDatasetWriter())
    samplers = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 0])
    ensemble = ReplayBufferEnsemble(storages=storages, samplers=samplers, writers=writers, batch_size=4)
    assert clock(ensemble.sample()).max() < 4
    assert list(ensemble.storage) == list(storages) and list(ensemble._storage) == list(storages)
    assert list(ensemble.writer) == list(writers) == list(ensemble._writer)
    assert list(ensemble.sampler) == list(samplers) == list(ensemble._sampler)
    assert "action" not in ensemble[1].sample(2).keys()
    with pytest.raises(UnsupportedError):
        ensemble[1].extend(ted(1))
    lists = [ListStorage(3), ListStorage(3)]
    ensemble = ReplayBufferEnsemble(
        storages=lists,
        samplers=[RandomSampler(), RandomSampler()],
        collate_fns=[None, torch.tensor],
        p=[0, 1],
    )
    for rb in ensemble[0], ensemble[1]:
        rb.extend([1, 2])
    assert ensemble.sample(8).shape == (2, 4)


@pytest.mark.parametrize(
    "options, error",
    [
        ({}, InvalidArgumentError),
        ({"storages": [ListStorage(3)]}, InvalidArgumentError),
        ({"storages": [ListStorage(3)], "samplers": []}, InvalidArgumentError),
        ({"storages": [ListStorage(3)], "samplers": [RandomSampler()], "writers": []}, InvalidArgumentError),
        (
            {"storages": [ListStorage(3)], "samplers": [RandomSampler()], "collate_fns": []},
            InvalidArgumentError,
        ),
        (
            {"storages": [ListStorage(3)], "samplers": SamplerEnsemble(RandomSampler()), "p": [1]},
            UnsupportedError,
        ),
        ({"rbs": (3,)}, InvalidArgumentError),
        ({"rbs": (ReplayBuffer(),), "storages": [ListStorage(3)]}, UnsupportedError),
        ({"rbs": (ReplayBuffer(),), "collate_fns": [None]}, UnsupportedError),
    ],
)
def test_arguments_that_exclude_each_other_raise(options, error):
    with pytest.raises(error) as caught:
        ReplayBufferEnsemble(*options.pop("rbs", ()), **options)
    assert isinstance(caught.value, GleanError)


def test_members_are_buffers():
    with pytest.raises(InvalidArgumentError, match="got an ensemble; pass its members instead"):
        ReplayBufferEnsemble(three(batch_size=None))
    with pytest.raises(InvalidArgumentError, match="of this process, got 3"):
        ReplayBufferEnsemble(3)


def test_exchanged_parts_of_members_are_seen():
    ensemble = three(sample_from_all=True)
    storage = LazyTensorStorage(4)
    fill(storage, ted(4, start=300))
    ensemble[0].set_storage(storage)
    sampler = RandomSampler(seed=1)
    ensemble[1].set_sampler(sampler)
    assert ensemble.storage[0] is storage and ensemble.sampler[1] is sampler
    assert set(clock(ensemble.sample(60)[0]).tolist()) == {300, 301, 302, 303}


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda ensemble: pickle.loads(pickle.dumps(ensemble)), None]
)
def test_copied_or_restored_ensemble_continues_with_the_same_samples(duplicate):
    ensemble = three()
    ensemble.sample()
    if duplicate is None:
        other = ReplayBufferEnsemble(
            *(ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(3)), batch_size=12
        )
        other.load_state_dict(ensemble.state_dict())
    else:
        other = duplicate(ensemble)
    for _ in range(5):
        assert (ensemble.sample() == other.sample()).all()
    other[0].empty()
    assert len(other) == 20 and len(ensemble) == 29


def test_a_state_that_fits_one_member_only_changes_nothing():
    ensemble, other = three(), three(seed=4)
    state = ensemble.state_dict()
    before = other.state_dict()["_mixture"]["generator"]
    last = {**state["_members"][2], "_storage": {**state["_members"][2]["_storage"], "max_size": 7}}
    for broken in (
        {**state, "_members": [*state["_members"][:2], last]},
        {**state, "_members": state["_members"][:2]},
        {**state, "_mixture": None},
        {**state, "_transforms": [{"loc": 1.0}]},
        {},
    ):
        with pytest.raises(SchemaError):
            other.load_state_dict(broken)
        assert clock(other[:2][1, :]).tolist() == clock(ensemble[1][:]).tolist()
        assert len(other) == 29 and torch.equal(other.state_dict()["_mixture"]["generator"], before)


def test_seed_determines_the_samples():
    ensemble, other = three(), three()
    assert ensemble.set_seed(11) == 14 == other.set_seed(11)
    assert (ensemble.sample() == other.sample()).all()
    assert (three(seed=11).sample() == three(seed=11).sample()).all()
    assert len({tuple(clock(three(seed=seed).sample()).flatten().tolist()) for seed in range(5)}) > 1


def test_repr_shows_the_members():
    ensemble = three()
    ensemble.sample()
    assert repr(ensemble).count("ReplayBuffer(\n        storage=LazyTensorStorage") == 3
    assert [stats.rows for stats in ensemble.stats()] == [9, 10, 10]
    assert sum(stats.batches_sampled for stats in ensemble.stats()) == 3


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("made", [SamplerWithoutReplacement, ConsumingSampler])
def test_failing_member_undoes_the_draws_of_the_other_members(made: Any, prefetch: int | None) -> None:
    filled, empty = (
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=made(seed=0), batch_size=2, prefetch=prefetch)
        for _ in range(2)
    )
    filled.extend(torch.arange(10))
    both = ReplayBufferEnsemble(filled, empty, batch_size=4, sample_from_all=True)
    for _ in range(2):
        with pytest.raises(EmptyBufferError):
            both.sample()
    empty.extend(torch.arange(10))
    rows = torch.cat([both.sample()[0] for _ in range(5)])
    assert rows.sort().values.tolist() == [*range(10)]


def test_undo_keeps_later_draws_of_other_callers() -> None:
    filled, empty = (
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(seed=0), batch_size=2)
        for _ in range(2)
    )
    filled.extend(torch.arange(10))
    place = filled.server.draws.position()
    drawn = [filled.sample(), filled.sample()]
    filled.server.draws.go_back(place, 1)
    drawn += [filled.sample() for _ in range(3)]
    assert torch.cat(drawn).sort().values.tolist() == [*range(10)]
    assert empty.server.draws.position() is not None and member(0).server.draws.position() is None
