"""Nodes that are lost: another one takes the place, and the others go on."""

from __future__ import annotations

from tests.collectors.distributed.helpers import check_rows, rows


def test_a_killed_actor_is_made_anew_and_costs_its_frames(apart, ray_session):
    batches = [apart.next() for _ in range(4)]
    names = {name for frames in rows(batches).values() for *_, name in frames}
    before = apart.stats()
    ray_session.kill(apart.remote_collectors()[1])
    later: list = []
    new: set[int] = set()
    # What the killed one had ready may come after its successor was made.
    while apart.stats().workers[1].restarts == before.workers[1].restarts or not new or new & names:
        later.append(apart.next())
        new = {name for _, _, name in rows(later[-1:]).get(1, ())}
        assert len(later) < 20_000
    check_rows([*batches, *later], holes=2)
    after = apart.stats()
    assert after.stepped == after.delivered + after.discarded
    assert after.delivered == before.delivered + sum(batch.numel() for batch in later)
    lost = after.reasons["worker"] - before.reasons.get("worker", 0)
    assert 0 <= lost <= 40
    assert all(name % 2 == 1 for name in new)
