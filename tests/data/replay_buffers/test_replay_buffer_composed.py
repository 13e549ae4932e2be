"""A buffer creates its components when needed, and draws with its generator."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    FlatStorageCheckpointer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from gleanrl.errors import GleanError, InvalidTypeError, SchemaError
from tests.data.replay_buffers.oracle import ted


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, [count])


class Doubled:
    """A transform that a factory creates."""

    def __call__(self, batch: TensorDict) -> TensorDict:
        return batch.set("x", batch["x"] * 2)


def test_parts_may_be_given_as_factories():
    made = []
    buffer = ReplayBuffer(
        storage=lambda: made.append(LazyTensorStorage(10)) or made[0],
        sampler=SamplerWithoutReplacement,
        writer=partial(RoundRobinWriter, compilable=True),
        batch_size=3,
    )
    assert buffer.storage is made[0] and len(made) == 1
    assert type(buffer.sampler) is SamplerWithoutReplacement and type(buffer.writer) is RoundRobinWriter
    buffer.extend(rows(6))
    assert sorted(torch.cat([batch["x"] for batch in buffer]).tolist()) == list(range(6))
    buffer.set_sampler(RandomSampler)
    assert type(buffer.sampler) is RandomSampler and buffer.set_writer(RoundRobinWriter) is not None
    assert buffer.set_storage(lambda: ListStorage(5)) is made[0]
    for wrong in ({"storage": RandomSampler}, {"sampler": lambda: 3}, {"writer": dict}):
        with pytest.raises(GleanError, match=next(iter(wrong))):
            ReplayBuffer(**wrong)
    prioritized = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=partial(LazyTensorStorage, 7)
    )
    assert prioritized.sampler.max_size == 7


def test_compilable_is_accepted_by_every_part_and_changes_nothing():
    drawn = set()
    for compilable in (False, True):
        for storage in (LazyTensorStorage, LazyMemmapStorage, ListStorage):
            for writer in (RoundRobinWriter, TensorDictRoundRobinWriter):
                buffer = ReplayBuffer(
                    storage=storage(8, compilable=compilable),
                    writer=writer(compilable=compilable),
                    batch_size=4,
                    seed=0,
                    compilable=compilable,
                )
                buffer.extend(rows(5))
                drawn.add(tuple(buffer.sample()["x"].tolist()))
    assert len(drawn) == 1
    assert len(TensorStorage(torch.zeros(3), compilable=True)) == 3
    assert len(LazyTensorStorage(3, consolidated=True)) == 0
    for kind in (TensorDictMaxValueWriter, ImmutableDatasetWriter):
        kind(compilable=True)


def test_compiled_programs_call_buffers():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(40), batch_size=4, compilable=True
    )

    @torch.compile(backend="eager")
    def program(data: TensorDict, priority: torch.Tensor) -> TensorDict:
        index = buffer.extend(data)
        buffer.update_priority(index, priority * 2)
        batch = buffer.sample()
        batch["td_error"] = batch["x"] * 0.0 + 1.0
        buffer.update_tensordict_priority(batch)
        return batch

    for start in range(0, 12, 3):
        batch = program(rows(3) + start, torch.tensor([0.0, 1.0, 0.0]))
        assert (batch["x"] % 3 == 1).all() and len(buffer) == start + 3


# A user's generator


def slices(**options) -> ReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=3), batch_size=9, **options
    )
    buffer.extend(ted(40))
    return buffer


def single(**options) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(60), batch_size=9, **options)
    buffer.extend(ted(40))
    return buffer


def prioritized(**options) -> ReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60), sampler=PrioritizedSampler(60, 1.0, 1.0), batch_size=9, **options
    )
    buffer.extend(ted(40))
    return buffer


def epochs(**options) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SamplerWithoutReplacement(), batch_size=9, **options
    )
    buffer.extend(ted(40))
    return buffer


@pytest.mark.parametrize("make", [single, slices, prioritized, epochs])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_draws_come_from_the_given_generator(make, prefetch):
    generator = torch.Generator().manual_seed(3)
    buffer = make(generator=generator, prefetch=prefetch)
    before = torch.get_rng_state()
    first = [buffer.sample()["observation"] for _ in range(3)]
    assert torch.equal(before, torch.get_rng_state()), "the global generator isn't touched"
    twin = make(generator=torch.Generator().manual_seed(3), prefetch=prefetch)
    assert all(torch.equal(twin.sample()["observation"], batch) for batch in first)
    other = make(generator=torch.Generator().manual_seed(4), prefetch=prefetch)
    assert not all(torch.equal(other.sample()["observation"], batch) for batch in first)


def test_the_state_of_the_given_generator_counts():
    generator = torch.Generator().manual_seed(3)
    buffer = single(generator=generator)
    saved = generator.get_state()
    first = buffer.sample()["observation"]
    generator.set_state(saved)
    assert torch.equal(buffer.sample()["observation"], first), (
        "set by the user, the sequence goes on from there"
    )
    generator.manual_seed(3)
    assert torch.equal(buffer.sample()["observation"], first)
    state = buffer.state_dict()
    following = buffer.sample()["observation"]
    buffer.load_state_dict(state)
    assert torch.equal(buffer.sample()["observation"], following), "part of the buffer's state"
    copied = pickle.loads(pickle.dumps(buffer))
    assert torch.equal(copied.sample()["observation"], buffer.sample()["observation"])
    with pytest.raises(SchemaError, match="generator"):
        single(seed=0).load_state_dict(state)


def test_set_rng_and_samplers_that_follow():
    buffer = single()
    buffer.set_rng(torch.Generator().manual_seed(3))
    first = buffer.sample()["observation"]
    assert torch.equal(single(generator=torch.Generator().manual_seed(3)).sample()["observation"], first)
    buffer.set_rng(torch.Generator().manual_seed(3))
    buffer.set_sampler(RandomSampler())
    assert torch.equal(buffer.sample()["observation"], first), "the sampler that follows draws from it too"
    buffer.set_rng(None)
    buffer.set_seed(5)
    assert torch.equal(buffer.sample()["observation"], single(seed=5).sample()["observation"])
    with pytest.raises(InvalidTypeError, match="generator"):
        single(generator=5)


def test_generator_determines_the_samples_of_an_ensemble():
    def ensemble(seed: int) -> ReplayBufferEnsemble:
        members = [single(), single()]
        return ReplayBufferEnsemble(
            *members, batch_size=8, p=[0.5, 0.5], generator=torch.Generator().manual_seed(seed)
        )

    one, two, other = ensemble(1), ensemble(1), ensemble(2)
    draws = [[ensemble.sample()["observation"] for _ in range(3)] for ensemble in (one, two, other)]
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(draws[0], draws[2], strict=True))
    one.set_rng(torch.Generator().manual_seed(1))
    assert torch.equal(one.sample()["observation"], draws[0][0])


# The time at which components are created


def test_transform_may_be_given_as_a_factory():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform_factory=Doubled, batch_size=3)
    buffer.extend(rows(4))
    assert (buffer.sample()["x"] % 2 == 0).all() and buffer[:]["x"].tolist() == [0, 2, 4, 6]
    with pytest.raises(InvalidTypeError, match="transform_factory"):
        ReplayBuffer(transform=Doubled(), transform_factory=Doubled)


def test_parts_can_wait_for_the_first_use():
    made = []

    def storage() -> LazyTensorStorage:
        made.append(1)
        return LazyTensorStorage(10)

    buffer = TensorDictReplayBuffer(storage=storage, batch_size=2, delayed_init=True, priority_key="p")
    assert not buffer.initialized and not made and "first use" in repr(buffer)
    assert len(buffer) == 0 and buffer.initialized and made == [1]
    buffer.extend(rows(3))
    assert buffer.priority_key == "p" and buffer.sample()["x"].shape == (2,) and made == [1]
    assert ReplayBuffer(transform_factory=Doubled, delayed_init=False).initialized
    assert not ReplayBuffer(transform_factory=Doubled).initialized, (
        "a factory's call waits if nothing else is said"
    )


def test_a_buffer_that_waits_can_be_pickled():
    buffer = PrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=partial(LazyTensorStorage, 10),
        transform_factory=Doubled,
        batch_size=2,
        delayed_init=True,
    )
    copied = pickle.loads(pickle.dumps(buffer))
    assert not copied.initialized and not buffer.initialized
    copied.extend(rows(3))
    assert copied[:]["x"].tolist() == [0, 2, 4] and len(buffer) == 0


def test_delayed_part_that_fails_is_created_at_the_next_use():
    rooms = []

    def storage() -> LazyTensorStorage:
        if not rooms:
            rooms.append(1)
            raise OSError("not yet")
        return LazyTensorStorage(4)

    buffer = ReplayBuffer(storage=storage, delayed_init=True)
    with pytest.raises(OSError, match="not yet"):
        buffer.extend(rows(2))
    assert buffer.extend(rows(2)).tolist() == [0, 1]


def test_a_checkpointer_is_the_storages():
    form = FlatStorageCheckpointer()
    assert ReplayBuffer(checkpointer=form).storage.checkpointer is form
    with pytest.raises(InvalidTypeError, match="checkpointer: expected a StorageCheckpointerBase"):
        ReplayBuffer(checkpointer=object())


def test_next_returns_the_batches_of_one_separate_iteration():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(6)}, [6]))
    for _ in range(2):
        batches = [buffer.next(), buffer.next()]
        assert [len(batch) for batch in batches] == [4, 2] and buffer.next() is None
        assert sorted(torch.cat([batch["x"] for batch in batches]).tolist()) == list(range(6))
    buffer.next()
    assert len(copy.deepcopy(buffer).next()) == 4, "copies begin their own"
    endless = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    endless.extend(torch.arange(3))
    assert all(endless.next().shape == (4,) for _ in range(5))


def test_include_info_changes_nothing():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(3)}, [3]))
    for include_info in (True, False, None):
        batch = buffer.sample(include_info=include_info)
        assert torch.equal(batch["x"], batch["index"])
        assert len(buffer.sample(4, True, include_info)) == 2


def test_dim_extend_cannot_be_set_later():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), dim_extend=1)
    with pytest.raises(RuntimeError, match="make a new buffer"):
        buffer.dim_extend = 0
    assert buffer.dim_extend == 1


def test_private_names_that_programs_use():
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    buffer.extend(torch.arange(3))
    assert (buffer._batch_size, buffer._storage._len, buffer._sampler) == (4, 3, buffer.sampler)
