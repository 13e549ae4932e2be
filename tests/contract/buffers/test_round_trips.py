"""Copies, pickles and saved files of buffers continue with the same batches."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.cases import make_buffer, make_sampler, make_storage
from tests.contract.buffers.tape import IDS, Tape
from tests.data.replay_buffers.oracle import fingerprint

KINDS = ("random", "once", "prioritized", "slices", "slices_once", "prioritized_slices")
CAPACITY = 29


def make(kind: str, shape: tuple[int, ...] = (), prefetch: int | None = None, storage: str = "tensor") -> Any:
    tape = Tape((7, 3, 12, 4), shape)
    sampler = make_sampler(kind, CAPACITY * tape.streams)
    return make_buffer("tensordict", make_storage(storage, CAPACITY, tape), sampler, prefetch)


def used(kind: str, **kwargs: Any) -> tuple[Any, Tape]:
    """Return a buffer that was written, sampled and updated."""
    buffer, tape = make(kind, **kwargs), Tape((7, 3, 12, 4), kwargs.get("shape", ()))
    buffer.extend(tape.rows(0, 20))
    for _ in range(2):
        batch = buffer.sample()
        if "prioritized" in kind:
            batch["td_error"] = 0.5 + batch["action"] % 5
            buffer.update_tensordict_priority(batch)
    buffer.extend(tape.rows(20, 35))
    buffer.sample()
    return buffer, tape


def go_on(buffer: Any, tape: Tape, kind: str) -> list[Any]:
    """Sample, update and write; return all samples without generations."""
    told = []
    for turn in range(6):
        batch = buffer.sample()
        if "prioritized" in kind:
            batch["td_error"] = 0.5 + batch["action"] % 3
            buffer.update_tensordict_priority(batch)
        told.append(batch.exclude("_generation"))
        if turn % 2:
            buffer.extend(tape.rows(35 + 4 * turn, 39 + 4 * turn))
    return told


def through_a_file(buffer: Any) -> Any:
    """Return the state after a save and a load with `weights_only=True`."""
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def alike(first: list[Any], second: list[Any]) -> None:
    for one, other in zip(first, second, strict=True):
        assert set(one.keys(True)) == set(other.keys(True)) and (one == other).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))], ids=["copy", "pickle"]
)
def test_copies_continue_with_the_same_batches(copier: Callable[[Any], Any], kind: str) -> None:
    buffer, tape = used(kind)
    other = copier(buffer)
    assert other.stats() == buffer.stats()
    alike(go_on(buffer, tape, kind), go_on(other, tape, kind))


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("storage", ["tensor", "memmap"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_states_continue_with_the_same_batches(
    kind: str, storage: str, shape: tuple[int, ...], prefetch: int | None
) -> None:
    buffer, tape = used(kind, shape=shape, prefetch=prefetch, storage=storage)
    state = through_a_file(buffer)
    other = make(kind, shape, prefetch, storage)
    other.load_state_dict(state)
    before = fingerprint(state)
    alike(go_on(buffer, tape, kind), go_on(other, tape, kind))
    assert fingerprint(state) == before, "the state is nobody else's memory"


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_loaded_into_a_buffer_in_use(kind: str) -> None:
    buffer, tape = used(kind)
    other, _ = used(kind)
    other.extend(tape.rows(200, 240))
    other.sample()
    other.load_state_dict(buffer.state_dict())
    alike(go_on(buffer, tape, kind), go_on(other, tape, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_saving_changes_nothing(kind: str) -> None:
    (buffer, tape), (other, _) = used(kind), used(kind)
    for _ in range(3):
        buffer.state_dict()
    alike(go_on(buffer, tape, kind), go_on(other, tape, kind))


def test_states_of_max_value_writers_continue() -> None:
    def best() -> Any:
        return parts.TensorDictReplayBuffer(
            storage=parts.LazyTensorStorage(9),
            writer=parts.TensorDictMaxValueWriter(rank_key="action"),
            batch_size=6,
            seed=0,
        )

    tape = Tape((5,), ())
    buffer, other = best(), best()
    buffer.extend(tape.rows(0, 30)[torch.randperm(30, generator=torch.Generator().manual_seed(0))])
    other.load_state_dict(through_a_file(buffer))
    for start in (30, 10, 33):
        index = [one.extend(tape.rows(start, start + 5)) for one in (buffer, other)]
        assert torch.equal(*index)
        alike([buffer.sample()], [other.sample()])


def test_ids_reach_the_samples_unchanged() -> None:
    buffer, tape = used("slices_once", shape=(3,))
    for batch in buffer:
        stream, t = tape.locate(batch)
        assert torch.equal(batch[IDS], tape.expected(stream, t)[IDS])
