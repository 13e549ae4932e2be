"""A buffer that is restored in mid-use draws the same samples as the original.

In `make test` each sampler and each storage meets each value of the other axes; `make chaos` runs every combination.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.drills import SHARE
from tests.chaos.restoring import Case, History, all_cases, made, same, some_cases

CASES = all_cases() if SHARE >= 1 else some_cases()
HISTORIES = 1 if SHARE >= 1 else 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_restored_buffer_continues_with_the_draws_of_the_original(case: Case, tmp_path: Path) -> None:
    seed = zlib.crc32(str(case).encode())
    for number in range(HISTORIES):
        history = History(case, seed + number)
        original = made(case)
        history.run(original, 12 + 9 * (seed % 3 + number))
        place = history.place
        saved = save(original, case, tmp_path / str(number))
        expected = history.run(original, 12)
        target = original if case.target == "itself" else made(case)
        if case.target == "used":
            History(case, seed - 1, first=500).run(target, 8)
        load(target, case, saved)
        history.place = place
        for turn, result in enumerate(expected):
            restored = history.call(target)
            assert same(restored, result), f"history {number}, call {turn}: {restored} instead of {result}"


def save(buffer: Any, case: Case, folder: Path) -> Any:
    if case.way == "state_dict":
        return buffer.state_dict()
    buffer.dumps(folder)
    return folder


def load(buffer: Any, case: Case, saved: Any) -> None:
    if case.way == "state_dict":
        buffer.load_state_dict(saved)
    else:
        buffer.loads(saved)
