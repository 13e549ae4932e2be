"""`verify` accepts a correct buffer and finds every planted mistake."""

from __future__ import annotations

import pytest

from tests.contract.buffers.slices import sampler
from tests.contract.buffers.tape import IDS, Tape, chunks
from tests.contract.buffers.test_extras import TAPE, make


class TestVerify:
    """`verify()` accepts a correct buffer and finds every planted mistake."""

    @pytest.mark.parametrize("shape", [(), (3,)])
    @pytest.mark.parametrize("written", [0, 7, 20, 33])
    @pytest.mark.parametrize("slices", [False, True])
    def test_verify_accepts_a_right_buffer(self, shape: tuple[int, ...], written: int, slices: bool) -> None:
        tape = Tape((5, 3, 9), shape)
        buffer = make(tape=tape, sampler=sampler(slice_len=3) if slices else None)
        for start, stop in chunks(written):
            buffer.extend(tape.rows(start, stop))
        report = buffer.verify()
        assert report.ok is True and not report.problems, report

    def test_verify_accepts_a_restored_buffer(self) -> None:
        buffer, other = make(), make()
        buffer.extend(TAPE.rows(0, 33))
        other.load_state_dict(buffer.state_dict())
        other.extend(TAPE.rows(33, 40))
        assert other.verify().ok

    def test_verify_changes_nothing(self) -> None:
        buffer, other = make(), make()
        for one in (buffer, other):
            one.extend(TAPE.rows(0, 33))
        buffer.verify()
        assert (buffer.sample() == other.sample()).all() and (buffer[:] == other[:]).all()

    PLANTED = {
        "a broken chain": lambda rows: rows["next", "observation"][6].add_(1),
        "another observation": lambda rows: rows["observation"][7].zero_(),
        "an id that comes again": lambda rows: rows[IDS][8:10].copy_(rows[IDS][:2]),
        "done in mid-episode": lambda rows: rows["next", "done"][10].logical_not_(),
    }

    @pytest.mark.parametrize("planted", ["a broken chain", "another observation", "an id that comes again"])
    @pytest.mark.parametrize("late", [False, True])
    def test_verify_finds_a_planted_mistake(self, planted: str, late: bool) -> None:
        buffer, rows = make(), TAPE.rows(0, 17)
        change = self.PLANTED[planted]
        if not late:
            change(rows)
        buffer.extend(rows)
        if late:
            # A slice is a live view, so a change of it changes the storage.
            change(buffer[:])
        report = buffer.verify()
        assert report.ok is False and report.problems
        assert all(isinstance(str(problem), str) and str(problem) for problem in report.problems)

    def test_verify_accepts_alternating_workers(self) -> None:
        # An asynchronous collector writes the parts of one trajectory separately, and the buffer is still correct.
        tape = Tape((50, 40), (2,))
        buffer = make(steps=80)
        for turn in range(16):
            buffer.extend(tape.rows(turn // 2 * 5, turn // 2 * 5 + 5)[turn % 2])
        report = buffer.verify()
        assert report.ok, report
