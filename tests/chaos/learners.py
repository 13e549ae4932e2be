"""A learner that borrows batches from its nodes and prints their process numbers; it runs until it is killed."""

from __future__ import annotations

import os

from gleanrl.collectors.distributed import RayCollector
from tests import rays
from tests.collectors.distributed.helpers import Says, environments


def main() -> None:
    """Collect, and print the process numbers of the nodes after the first batches."""
    ray = rays.prepare()
    ray.init(**rays.CONFIG)
    collector = RayCollector(environments(2), Says(), frames_per_batch=600, remote_configs={"num_cpus": 0})
    actors = collector.remote_collectors()
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors])
    for number in range(1_000_000):
        collector.next()
        if number == 20:
            print(*pids, flush=True)


if __name__ == "__main__":
    main()
