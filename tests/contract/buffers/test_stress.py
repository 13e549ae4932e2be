"""With threads that write, sample and update priorities, every served row is one whole write, and none is stale.

`GLEANRL_STRESS_ROWS=100000000` runs the long version with that many sampled rows.
"""

from __future__ import annotations

import os

import pytest

from tests.contract.buffers.stress import Plan, Stress

ROWS = int(os.environ.get("GLEANRL_STRESS_ROWS", "0"))


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(
    ("sampler", "updaters"),
    [("random", 0), ("once", 0), ("prioritized", 2), ("slices", 0), ("prioritized_slices", 1)],
)
def test_every_row_is_one_whole_write(sampler: str, updaters: int, prefetch: int | None) -> None:
    Stress(Plan(sampler=sampler, prefetch=prefetch, updaters=updaters)).run()


@pytest.mark.parametrize("capacity", [33, 64])
def test_a_small_ring_wraps_under_the_readers(capacity: int) -> None:
    Stress(Plan(capacity=capacity, writers=3, samplers=3, writes=200, batch_size=32)).run()


@pytest.mark.skipif(not ROWS, reason="set GLEANRL_STRESS_ROWS to the number of rows to sample")
@pytest.mark.timeout(0)
@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("sampler", ["random", "prioritized", "slices"])
def test_every_row_is_one_whole_write_in_a_long_run(sampler: str, prefetch: int | None) -> None:
    samplers, size = 4, 1024
    plan = Plan(
        sampler=sampler,
        prefetch=prefetch,
        capacity=20_000,
        writers=4,
        samplers=samplers,
        updaters=2 if sampler == "prioritized" else 0,
        batches=ROWS // 6 // samplers // size + 1,
        writes=ROWS // 6 // 4 // 100 + 1,
        batch_size=size,
    )
    stress = Stress(plan)
    stress.run(timeout_s=3600)
    assert stress.rows >= ROWS // 6
