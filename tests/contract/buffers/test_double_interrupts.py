"""A second interrupt during the clean-up of the first leaves no half change and no held lock."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.contract.buffers.cases import EPOCHS
from tests.contract.buffers.test_interrupts import (
    BATCH,
    TAPE,
    buffer,
    check_all_or_nothing,
    check_epoch,
    check_goes_on,
    difference,
    life,
    writes,
)
from tests.interrupts import double_interruptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MOST = 150


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("sampler", ["random", "once", "prioritized", "prioritized_slices"])
@pytest.mark.parametrize("call", ["extend", "add", "set", "update_priority", "empty"])
@pytest.mark.filterwarnings("ignore:update_priority")
def test_a_write_with_two_interrupts_is_whole_or_not_there(
    call: str, sampler: str, depth: int | None
) -> None:
    def make() -> Any:
        made = buffer(sampler, prefetch=depth)
        if depth:
            made.sample()
        return made

    check_all_or_nothing(make, writes(TAPE)[call], TAPE, sampler, double_interruptions, MOST)


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("sampler", ["random", "prioritized"])
def test_a_load_with_two_interrupts_is_whole_or_not_there(sampler: str, depth: int | None) -> None:
    other = buffer(sampler, 23, prefetch=depth)
    other.sample()
    saved = other.state_dict()

    def load(rb: Any) -> None:
        rb.load_state_dict(saved)

    make = partial(buffer, sampler, prefetch=depth)
    check_all_or_nothing(make, load, TAPE, sampler, double_interruptions, MOST)


@pytest.mark.parametrize("depth", [None, 1, 3])
@pytest.mark.parametrize("sampler", ["random", "once", "prioritized", "slices"])
def test_samples_after_two_interrupts_are_stored_rows(sampler: str, depth: int | None) -> None:
    def make() -> Any:
        made = buffer(sampler, 12, prefetch=depth)
        made.sample()
        return made

    for subject, place in double_interruptions(make, lambda rb: rb.sample(), MOST):
        try:
            if sampler in EPOCHS:
                check_epoch(subject, sampler)
            check_goes_on(subject, TAPE, sampler)
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error
    assert len(subject.sample()) == BATCH


@pytest.mark.parametrize("sampler", ["random", "prioritized"])
def test_a_dump_with_two_interrupts_leaves_a_whole_checkpoint(sampler: str, tmp_path: Path) -> None:
    folders: list[Path] = []

    def make() -> Any:
        folders.append(tmp_path / str(len(folders)))
        made = buffer(sampler)
        made.dumps(folders[-1])
        made.extend(TAPE.rows(20, 25))
        return made

    former = life(buffer(sampler))
    for subject, place in double_interruptions(make, lambda rb: rb.dumps(folders[-1]), 60):
        try:
            loaded = buffer(sampler, 3)
            loaded.loads(folders[-1])
            found = life(loaded)
            assert not (difference(found, former) and difference(found, life(subject)))
            subject.dumps(folders[-1])  # fails if a lock is still held
            loaded.loads(folders[-1])
            assert not difference(life(loaded), life(subject))
            check_goes_on(subject, TAPE, sampler)
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error
