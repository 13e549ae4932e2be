"""An adapter and its wrapped object share their attributes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from gleanrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
)
from gleanrl.data.replay_buffers.adapters import Adapter, with_keywords
from gleanrl.data.replay_buffers.samplers.adapter import as_sampler
from gleanrl.data.replay_buffers.storages.adapter import as_storage
from gleanrl.data.replay_buffers.writers.adapter import as_writer
from gleanrl.errors import UnsupportedError
from tests.data.replay_buffers.familiar import Ring, Shelf, Told


class Native(RandomSampler):
    """Overrides methods that buffers call."""

    def follow(self, storage):
        super().follow(storage)


def test_native_parts_need_no_adapter():
    for part, adapt in (
        (RandomSampler(), as_sampler),
        (Native(), as_sampler),
        (RoundRobinWriter(), as_writer),
    ):
        assert adapt(part) is part and part.unwrapped is part


def test_adapter_shares_the_attributes_of_its_part():
    for part, adapt in ((Told(), as_sampler), (Ring(), as_writer), (Shelf(3), as_storage)):
        view = adapt(part)
        assert isinstance(view, type(part)) and type(view).__name__ == type(part).__name__
        assert view.unwrapped is part and adapt(view) is view
        part.mark = 3
        assert view.mark == 3
        view.mark = 4
        assert part.mark == 4
        for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
            assert isinstance(copied, Adapter) and copied.unwrapped is not part and copied.unwrapped.mark == 4


def test_adapter_keeps_its_part_alive_and_nothing_keeps_the_adapter():
    part = Told()
    view, ref = as_sampler(part), weakref.ref(part)
    del part
    assert ref() is view.unwrapped
    del view
    gc.collect()
    assert ref() is None


def test_adapting_calls_no_init_subclass_hook():
    made = []

    class Registered(Sampler):
        def __init_subclass__(cls):
            super().__init_subclass__()
            made.append(cls)

        def sample(self, storage, batch_size):
            return torch.zeros(batch_size, dtype=torch.int64), {}

    class Mine(Registered):
        pass

    as_sampler(Mine())
    assert made == [Mine]


@pytest.mark.parametrize("name", ["dumps", "loads", "save"])
@pytest.mark.parametrize(
    ("kind", "adapt", "arguments"),
    [
        (RandomSampler, as_sampler, ()),
        (ImmutableDatasetWriter, as_writer, ()),
        (LazyTensorStorage, as_storage, (3,)),
    ],
)
def test_class_that_overrides_dumps_without_a_state_raises(kind, adapt, arguments, name):
    def in_files(part, path):
        raise AssertionError("not called")

    def state_dict(part):
        return {"mine": 3}

    with pytest.raises(UnsupportedError, match=rf"class Filed overrides {name}\(\), .*; override state_dict"):
        adapt(type("Filed", (kind,), {name: in_files})(*arguments))
    load = {"load_state_dict": lambda part, state: None}
    both = type("Both", (kind,), {name: in_files, "state_dict": state_dict, **load})
    assert adapt(both(*arguments)).unwrapped.state_dict() == {"mine": 3}


def test_refused_part_leaves_the_buffer_unchanged():
    class Filed(RandomSampler):
        def dumps(self, path):
            raise AssertionError("not called")

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    before = buffer.sampler
    with pytest.raises(UnsupportedError, match="class Filed"):
        buffer.set_sampler(Filed())
    assert buffer.sampler is before


def test_with_keywords_passes_only_accepted_options():
    assert with_keywords(lambda index, *, storage=None: None, storage=3) == {"storage": 3}
    assert with_keywords(lambda index: None, storage=3) == {}
    assert with_keywords(lambda index, **more: None, storage=3) == {"storage": 3}
