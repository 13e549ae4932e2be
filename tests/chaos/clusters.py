"""A cluster of two nodes on this machine with small object stores; one node is removed repeatedly.

The removed node's batches pass through the object stores, as if it were another machine.

The module runs as a program with the number of removals. A process can use one Ray cluster only, and the tests' process
already uses one.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

from gleanrl.envs import Timeouts
from tests import rays
from tests.collectors.distributed.helpers import HalfLent, Says, check_rows, environments, rows

STORE = 80 << 20
FRAMES = 600
"""Frames of a batch, about ten megabytes."""
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
FAR = {"far": 1}


def collected(collector: HalfLent) -> Any:
    """Return the entries of the next batch that identify its frames, without the large remainder."""
    batch = collector.next()
    batch["observation"] = batch["observation"][..., :3].clone()
    return batch.select("observation", ("collector", "traj_ids"))


def up_to(collector: HalfLent, stream: int) -> list[Any]:
    """Return batches up to the first one that has a stream."""
    batches: list[Any] = []
    while stream not in rows(batches[-1:]):
        batches.append(collected(collector))
    return batches


def main(removals: int) -> None:
    """Remove the second node `removals` times during collection."""
    ray = rays.prepare()
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    other = cluster.add_node(**NODE, resources=FAR)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    collector = HalfLent(
        environments(2),
        Says(),
        frames_per_batch=FRAMES,
        remote_configs=[{"num_cpus": 1}, {"num_cpus": 0, "resources": FAR}],
        on_worker_error="restart",
        max_restarts=10 * removals,
        timeouts=Timeouts(start_s=600.0),
    )
    pinned = [ray.get(ray.put(bytes(STORE // 4)))]  # batches on their way fill the rest of the store
    batches = [*up_to(collector, 0), *up_to(collector, 1)]
    for _ in range(removals):
        before = collector.stats()
        cluster.remove_node(other)
        while collector.stats().workers[1].restarts == before.workers[1].restarts:
            batches.append(collected(collector))
        batches += [collected(collector) for _ in range(3)]
        assert not {1} & set(rows(batches[-1:])), "the learner goes on with the rest"
        other = cluster.add_node(**NODE, resources=FAR)
        controller = collector.source.controller
        while controller.now.nodes[1].down:
            controller.wait()  # the new node needs the cores to start
        batches += up_to(collector, 1)
        stats = collector.stats()
        lost = stats.reasons.get("worker", 0) - before.reasons.get("worker", 0)
        assert 0 <= lost <= 4 * FRAMES, lost
    stats = collector.stats()
    assert stats.delivered == sum(batch.numel() for batch in batches)
    assert stats.stepped == stats.delivered + stats.discarded
    check_rows(batches, holes=2 * removals)
    collector.shutdown()
    assert ray.is_initialized() and pinned
    ray.shutdown()
    cluster.shutdown()
    print(f"{removals} removals, {stats.delivered} frames, {dict(stats.reasons)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
