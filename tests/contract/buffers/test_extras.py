"""Buffers fetch selected columns, verify their content, count events, and check the available space first."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import gleanrl.data
from gleanrl.data import replay_buffers as parts
from gleanrl.errors import CapacityError, GleanError
from tests.contract.buffers.slices import sampler
from tests.contract.buffers.tape import ADDED, IDS, Tape

TAPE = Tape((5, 3, 9))


def make(kind: str = "TensorDictReplayBuffer", tape: Tape = TAPE, steps: int = 20, **kwargs: Any) -> Any:
    storage = parts.LazyTensorStorage(steps * tape.streams, ndim=1 + len(tape.shape))
    return getattr(parts, kind)(storage=storage, **{"batch_size": 12, "seed": 0, **kwargs})


class TestKeys:
    """`sample(keys=[...])` fetches only these columns and draws the same slots as without keys."""

    @pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
    @pytest.mark.parametrize(
        "keys", [["observation"], [("next", "reward"), "action"], [IDS], ["next"], ["next", "action"]]
    )
    def test_sample_with_keys_fetches_only_these_columns(self, kind: str, keys: list[Any]) -> None:
        part, whole = make(kind), make(kind)
        for buffer in (part, whole):
            buffer.extend(TAPE.rows(0, 30))
        for _ in range(4):
            batch, full = part.sample(keys=keys), whole.sample()
            expected = set(full.select(*keys).keys(True, True))
            assert {key for key in batch.keys(True, True) if key not in ADDED} == expected
            for key in expected:
                assert torch.equal(batch[key], full[key])

    def test_sample_with_keys_keeps_slices_consecutive(self) -> None:
        buffer = make(sampler=sampler(slice_len=3))
        buffer.extend(TAPE.rows(0, 30))
        observation = buffer.sample(keys=["observation"])["observation"]
        step = observation[:, 2].view(-1, 3)
        assert (step.diff(dim=1) == 1).all()

    def test_keys_may_change_between_prefetched_batches(self) -> None:
        buffer = make("ReplayBuffer", prefetch=2)
        buffer.extend(TAPE.rows(0, 30))
        for keys in (["action"], None, ["observation", ("next", "observation")], ["action"]):
            batch = buffer.sample(keys=keys)
            if keys is None:
                TAPE.check(batch)
            else:
                assert set(batch.keys(True, True)) == set(keys)

    @pytest.mark.parametrize("keys", [["nothing"], [("next", "nothing")], [], "observation"])
    def test_unknown_keys_raise(self, keys: Any) -> None:
        buffer = make()
        buffer.extend(TAPE.rows(0, 30))
        if keys == "observation":
            # A bare key isn't a list of keys. A buffer that accepts it must not treat it as a list of letters.
            with contextlib.suppress(GleanError):
                assert "observation" in buffer.sample(keys=keys).keys()
            return
        with pytest.raises((KeyError, ValueError)) as caught:
            buffer.sample(keys=keys)
        assert isinstance(caught.value, GleanError)
        TAPE.check(buffer.sample())


def test_stats_count() -> None:
    buffer = make("TensorDictPrioritizedReplayBuffer", alpha=0.6, beta=0.4)
    assert (buffer.stats().rows, buffer.stats().rows_written, buffer.stats().batches_sampled) == (0, 0, 0)
    buffer.extend(TAPE.rows(0, 33))
    for _ in range(3):
        buffer.sample()
    found = buffer.stats()
    assert (found.rows, found.capacity, found.batches_sampled) == (20, 20, 3)
    assert found.rows_redrawn == found.priorities_dropped == 0


@pytest.mark.parametrize("kind", ["LazyTensorStorage", "LazyMemmapStorage"])
def test_room_is_checked_first(kind: str) -> None:
    buffer = parts.ReplayBuffer(storage=getattr(parts, kind)(10**14), batch_size=4)
    with pytest.raises(CapacityError):
        buffer.extend(TAPE.rows(0, 3))
    assert len(buffer) == 0 and buffer.stats().rows_written == 0


def test_capacity_rounds_up_to_whole_time_steps() -> None:
    for kind in ("LazyTensorStorage", "LazyMemmapStorage"):
        storage = getattr(parts, kind)(100, ndim=2)
        buffer = parts.ReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(Tape((5,), (3,)).rows(0, 50))
        assert storage.max_size == len(buffer) == 102


def test_the_remote_buffer_can_be_imported_without_ray() -> None:
    assert issubclass(gleanrl.data.RemoteTensorDictReplayBuffer, parts.TensorDictReplayBuffer)


NAMES = (
    "ReplayBuffer PrioritizedReplayBuffer TensorDictReplayBuffer TensorDictPrioritizedReplayBuffer",
    "RemoteTensorDictReplayBuffer ReplayBufferEnsemble ListStorage TensorStorage LazyTensorStorage",
    "LazyMemmapStorage StorageEnsemble RandomSampler SamplerWithoutReplacement PrioritizedSampler",
    "SliceSampler SliceSamplerWithoutReplacement PrioritizedSliceSampler SamplerEnsemble RoundRobinWriter",
    "TensorDictRoundRobinWriter TensorDictMaxValueWriter ImmutableDatasetWriter WriterEnsemble",
)


@pytest.mark.parametrize("name", " ".join(NAMES).split())
def test_the_names_are_public(name: str) -> None:
    assert getattr(gleanrl.data, name) is getattr(parts, name)
    assert getattr(parts, name).__doc__
