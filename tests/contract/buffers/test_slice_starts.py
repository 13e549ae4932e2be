"""Slice samplers draw exactly the documented starts, each with the documented frequency."""

from __future__ import annotations

import pytest

from tests.contract.buffers.slices import allowed, check_distribution, slice_buffer, write
from tests.contract.buffers.slices import sampler as make
from tests.contract.buffers.tape import Tape

N = 4
CAPACITY = 23
LENGTHS = {
    "one step": (1, N + 2),
    "one short": (N - 1, N + 1),
    "just long enough": (N,),
    "one longer": (N + 1,),
    "as long as the ring": (CAPACITY,),
    "longer than the ring": (CAPACITY + 9,),
    "many times the ring": (1000,),
    "all of them": (1, N - 1, N, N + 1, CAPACITY + 3, 2),
}
WRITTEN = (N, CAPACITY - 1, CAPACITY, CAPACITY + 1, CAPACITY + 11, 2 * CAPACITY, 3 * CAPACITY + 7)


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_all_and_only_allowed_starts_are_drawn(lengths: tuple[int, ...], written: int) -> None:
    tape = Tape(lengths)
    buffer, ring = slice_buffer(tape, CAPACITY, written, 150 * N, make(num_slices=150))
    table = allowed(ring, tape, N)
    if table:
        check_distribution(tape, buffer, table)
    else:
        with pytest.raises(RuntimeError):
            buffer.sample()


@pytest.mark.parametrize("written", [9, CAPACITY, CAPACITY + 14])
def test_one_step_slices_are_uniform_over_trajectories_not_over_steps(written: int) -> None:
    tape = Tape((1, 9))
    buffer, ring = slice_buffer(tape, CAPACITY, written, 400, make(slice_len=1))
    check_distribution(tape, buffer, allowed(ring, tape, 1))


@pytest.mark.parametrize("written", [11, 16, 29])
def test_slices_as_long_as_the_ring(written: int) -> None:
    tape = Tape((1000,))
    buffer, ring = slice_buffer(tape, 16, written, 160, make(slice_len=16))
    if written < 16:
        with pytest.raises(RuntimeError):
            buffer.sample()
    else:
        check_distribution(tape, buffer, allowed(ring, tape, 16))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("written", [13, CAPACITY, CAPACITY + 11])
def test_short_trajectories_are_left_out_or_served_whole(strict: bool, written: int) -> None:
    tape = Tape((1, N - 1, N, N + 3, 2))
    buffer, ring = slice_buffer(tape, CAPACITY, written, 200 * N, make(num_slices=200, strict_length=strict))
    table = allowed(ring, tape, N, strict)
    assert any(length < N for _, _, length in table) is not strict
    check_distribution(tape, buffer, table)
    assert len(buffer.sample()) == 200 * N if strict else len(buffer.sample()) < 200 * N


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("written", [CAPACITY - 5, CAPACITY + 8])
def test_each_column_is_a_separate_timeline(shape: tuple[int, ...], written: int) -> None:
    tape = Tape((N - 1, N, N + 4, 40), shape)
    buffer, ring = slice_buffer(tape, CAPACITY, written, 300 * N, make(slice_len=N))
    table = allowed(ring, tape, N)
    assert {stream for stream, _, _ in table} == set(range(tape.streams))
    check_distribution(tape, buffer, table)


SPANS = {
    "left": ((True, False), N - 1, 0),
    "right": ((False, True), 0, N - 1),
    "both": (True, N - 1, N - 1),
    "two of each": (2, 2, 2),
    "one and two": ((1, 2), 1, 2),
    "left by one": ((1, False), 1, 0),
    "right by one": ((False, 1), 0, 1),
    "nowhere": (False, 0, 0),
    "zero": (0, 0, 0),
}


@pytest.mark.parametrize("written", [15, CAPACITY + 11])
@pytest.mark.parametrize(("span", "left", "right"), SPANS.values(), ids=SPANS)
def test_slices_that_hang_over_are_cut(span: object, left: int, right: int, written: int) -> None:
    tape = Tape((N, N + 3, 2))
    buffer, ring = slice_buffer(tape, CAPACITY, written, 200 * N, make(num_slices=200, span=span))
    table = allowed(ring, tape, N, left=left, right=right)
    assert min(length for _, _, length in table) == N - max(left, right)
    check_distribution(tape, buffer, table)


@pytest.mark.parametrize("span", [True, (False, True), 1])
def test_short_trajectories_with_overhang_are_never_empty(span: object) -> None:
    tape = Tape((1, 2, N + 3))
    buffer, ring = slice_buffer(
        tape, CAPACITY, CAPACITY + 5, 200 * N, make(num_slices=200, span=span, strict_length=False)
    )
    held = {(s, t) for s in range(1) for piece in ring.pieces(tape, s) for t in piece}
    seen: set[tuple[int, int]] = set()
    for _ in range(10):
        batch = buffer.sample()
        stream, t = tape.locate(batch)
        seen |= set(zip(stream.tolist(), t.tolist(), strict=True))
    assert seen == held


@pytest.mark.parametrize("span", [N, N + 1, (N, False), (False, N)])
def test_an_overhang_of_a_whole_slice_is_refused(span: object) -> None:
    with pytest.raises(ValueError, match="span"):
        tape = Tape((9,))
        slice_buffer(tape, CAPACITY, CAPACITY, 4 * N, make(slice_len=N, span=span))[0].sample()


@pytest.mark.parametrize("span", [N, (N + 1, False), (False, N)])
def test_span_of_a_whole_slice_with_num_slices_raises_at_sample(span: object) -> None:
    tape = Tape((9,))
    buffer, _ = slice_buffer(tape, CAPACITY, CAPACITY, 3 * N, make(num_slices=3, span=span))
    with pytest.raises(ValueError, match="span"):
        buffer.sample()


def test_the_starts_follow_every_write() -> None:
    tape = Tape((1, N - 1, N, N + 1, 2, 9))
    buffer, ring = slice_buffer(tape, CAPACITY, 0, 20 * N, make(num_slices=20))
    for start in range(3 * CAPACITY):
        write(buffer, ring, tape, start, start + 1)
        table = allowed(ring, tape, N)
        if table:
            seen = {int(t) for _ in range(3) for t in tape.locate(buffer.sample())[1].view(-1, N)[:, 0]}
            assert seen <= {t for _, t, _ in table}


def test_writing_alone_or_in_chunks_makes_no_difference() -> None:
    tape = Tape((1, N - 1, N, N + 1, 2, 9))
    once, ring = slice_buffer(tape, CAPACITY, 0, 20 * N, make(num_slices=20))
    write(once, ring, tape, 0, CAPACITY + 9)
    apart, _ = slice_buffer(tape, CAPACITY, CAPACITY + 9, 20 * N, make(num_slices=20))
    single, _ = slice_buffer(tape, CAPACITY, 0, 20 * N, make(num_slices=20))
    for t in range(CAPACITY + 9):
        single.add(tape.step_at(t))
    for _ in range(5):
        batches = [buffer.sample().exclude("_generation") for buffer in (apart, single)]
        assert (batches[0] == batches[1]).all()
    check_distribution(tape, once, allowed(ring, tape, N))


@pytest.mark.parametrize("written", [CAPACITY - 2, CAPACITY + 11])
def test_no_slice_crosses_the_seam_after_a_restore(written: int) -> None:
    tape = Tape((2 * CAPACITY,))
    buffer, ring = slice_buffer(tape, CAPACITY, written, 150 * N, make(num_slices=150))
    restored, _ = slice_buffer(tape, CAPACITY, 0, 150 * N, make(num_slices=150, seed=5))
    restored.load_state_dict(buffer.state_dict())
    check_distribution(tape, restored, allowed(ring, tape, N))
    write(restored, ring, tape, written, written + 3)
    check_distribution(tape, restored, allowed(ring, tape, N))


def test_an_emptied_buffer_starts_over() -> None:
    tape = Tape((9,))
    buffer, ring = slice_buffer(tape, CAPACITY, CAPACITY + 11, 100 * N, make(num_slices=100))
    buffer.empty()
    ring.clear()
    with pytest.raises(RuntimeError):
        buffer.sample()
    write(buffer, ring, tape, 100, 112)
    check_distribution(tape, buffer, allowed(ring, tape, N))


@pytest.mark.parametrize("counts", [(4, 3), (2, 3), (7, 1, 9, 2, 5), (1, 6, 7), (10,), (11, 1)])
@pytest.mark.parametrize("capacity", [2, 3, 5])
def test_writes_longer_than_the_ring(capacity: int, counts: tuple[int, ...]) -> None:
    tape = Tape((4, 1, 3))
    buffer, ring = slice_buffer(tape, capacity, 0, 400, make(slice_len=1))
    start = 0
    for count in counts:
        write(buffer, ring, tape, start, start + count)
        start += count
    check_distribution(tape, buffer, allowed(ring, tape, 1))
