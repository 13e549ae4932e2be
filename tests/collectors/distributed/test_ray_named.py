"""Collectors under other names use the same engine: their arguments are translated, or refused by name."""

from __future__ import annotations

import pytest

from gleanrl.collectors import distributed
from gleanrl.collectors.distributed import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    RayCollector,
    RPCDataCollector,
)
from gleanrl.errors import BatchSizeError, UnsupportedError
from tests.collectors.distributed.helpers import Says, environments, make_cartpole


def test_frames_not_divisible_by_the_nodes_are_refused():
    two = environments(2)
    with pytest.raises(BatchSizeError, match="frames_per_batch=5"):
        DistributedDataCollector(two, Says(), frames_per_batch=5, sync=True)
    with pytest.raises(RuntimeError, match="total_frames=15"):
        DistributedSyncDataCollector(two, Says(), frames_per_batch=10, total_frames=15)
    with pytest.raises(BatchSizeError, match="among 3 nodes"):
        DistributedSyncDataCollector(make_cartpole, Says(), frames_per_batch=10, num_collectors=3)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (DistributedDataCollector, {"backend": "nccl"}),
        (DistributedDataCollector, {"launcher": "mp"}),
        (DistributedSyncDataCollector, {"slurm_kwargs": {"timeout_min": 10}}),
        (RPCDataCollector, {"visible_devices": ["cuda:0"]}),
        (RPCDataCollector, {"tcp_port": 1234}),
        (RayCollector, {"use_env_creator": True}),
    ],
)
def test_arguments_of_other_engines_are_refused_by_name(kind, given):
    with pytest.raises(UnsupportedError, match=next(iter(given))):
        kind(environments(2), Says(), frames_per_batch=10, **given)


def test_other_class_names_are_aliases():
    assert distributed.DistributedCollector is DistributedDataCollector
    assert distributed.RPCCollector is RPCDataCollector
    with pytest.raises(UnsupportedError, match="ray start"):
        distributed.submitit_delayed_launcher(2)


def test_shares_are_joined_along_time(ray_session):
    collector = RPCDataCollector(
        environments(1),
        Says(),
        frames_per_batch=20,
        total_frames=40,
        sync=True,
        remote_configs={"num_cpus": 0},
    )
    assert [batch.shape for batch in collector] == [(20,)] * 2
