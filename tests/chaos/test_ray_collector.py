"""If nodes are removed or actors are killed, frames are counted and the learner continues; full stores only delay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl._os.clock import Deadline, sleep
from gleanrl.collectors.distributed import RayCollector
from gleanrl.envs import Timeouts
from tests.chaos.drills import SHARE, scaled
from tests.collectors.distributed.helpers import Says, check_rows, environments, rows
from tests.leaks import open_files

pytestmark = pytest.mark.timeout(3600)

REMOVALS, KILLS = 20, 200
MOST_KILLS = 1
"""Number of kills in short runs. Each kill starts a process."""
FRAMES, BATCHES = 20, 60


def test_nodes_are_taken_away():
    command = [sys.executable, "-m", "tests.chaos.clusters", str(scaled(REMOVALS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())


def test_a_learner_is_killed():
    learner = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.learners"], stdout=subprocess.PIPE, text=True
    )
    assert learner.stdout is not None
    nodes = [int(word) for word in learner.stdout.readline().split()]
    lent = open_files(learner.pid).values()
    assert sum("memfd:gleanrl" in name for name in lent) == len(nodes) == 2
    learner.kill()
    learner.wait()
    learner.stdout.close()
    deadline = Deadline(60.0)
    while any(
        Path(f"/proc/{node}/exe").exists() for node in nodes
    ):  # the memory has no name and is freed with its processes
        assert not deadline.passed(), "the nodes outlive their learner"
        sleep(0.1)


def test_actors_are_killed(ray_session):
    kills, generator = KILLS if SHARE >= 1 else MOST_KILLS, torch.Generator().manual_seed(0)
    collector = RayCollector(
        environments(2),
        Says(),
        frames_per_batch=FRAMES,
        remote_configs={"num_cpus": 0},
        on_worker_error="restart",
        max_restarts=10 * kills,
        timeouts=Timeouts(start_s=600.0),
    )
    controller, batches = collector.source.controller, list[Any]()

    def collect() -> Any:
        batches.append(collector.next().select("observation", ("collector", "traj_ids")))
        batches[-1]["observation"] = batches[-1]["observation"][..., :3].clone()

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    restarts = 0
    for kill in range(kills):
        for _ in range(number(BATCHES)):
            collect()
        victims = [kill % 2] if number(4) else [0, 1]
        for victim in victims:
            ray_session.kill(collector.remote_collectors()[victim])
        restarts += len(victims)
        while sum(worker.restarts for worker in collector.stats().workers) < restarts:
            collect()
        while any(node.down for node in controller.now.nodes):
            controller.wait()  # the new node needs the cores to start
    while {*rows(batches[-2:])} != {0, 1}:
        collect()
    stats = collector.stats()
    assert stats.delivered == sum(batch.numel() for batch in batches)
    assert stats.stepped == stats.delivered + stats.discarded
    assert stats.discarded == stats.reasons.get("worker", 0) <= 2 * FRAMES * restarts
    check_rows(batches, holes=2 * restarts)
    collector.shutdown()
    print(f"{restarts} actors killed, {stats.delivered} frames, {stats.discarded} lost")
