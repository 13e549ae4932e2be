"""The ParallelEnv examples of the reference documents run; see `test_reference_documents`."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from gleanrl.envs import GymWrapper, ParallelEnv
from tests.contract.test_reference_documents import (
    FOLDER,
    document,
    first_doctest,
    run,
    running_doctests,
)
from tests.fakes import OracleEnv, Script

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(
        not FOLDER, reason="GLEANRL_REFERENCE does not name the folder of the reference documents"
    ),
]


def test_set_seed_of_six_environments_returns_six() -> None:
    """001: `set_seed(1)` of a collector over a ParallelEnv of six gives 6."""
    (code,) = [block for block in running_doctests(document("001")) if "ParallelEnv(6" in block]
    names: dict[str, Any] = {"SyncDataCollector": SyncDataCollector}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 100 frames aren't a multiple of six
        exec(compile(code, "<reference document>", "exec"), names)
    assert names["out_seed"] == 6
    names["collector"].shutdown()
    assert names["env_fn_parallel"].is_closed


def test_documented_slices_of_batched_environments_run() -> None:
    """003: a ParallelEnv and a buffer of two dimensions. Its endless loop ends after a few batches."""
    text = document("003")
    start = text.index(">>> # Batched environments")
    code = first_doctest(text[start : text.index(">>> # MultiSyncDataCollector + regular env")])
    assert "env = ParallelEnv(4, make_env)" in code and "ndim=2" in code
    names: dict[str, Any] = {
        "N": 160,
        "make_env": partial(GymWrapper, OracleEnv(script=Script(seed=51))),
        "policy": None,
        "ParallelEnv": ParallelEnv,
        "ReplayBuffer": ReplayBuffer,
        "LazyTensorStorage": LazyTensorStorage,
        "SliceSampler": SliceSampler,
        "SyncDataCollector": lambda *args, **kwargs: itertools.islice(SyncDataCollector(*args, **kwargs), 3),
    }
    run(code, names)
    memory = names["memory"]
    for _ in range(20):
        slices = memory.sample(8).view(4, 2)
        ids, steps = slices["collector", "traj_ids"], slices["observation"][..., 2]
        assert torch.equal(ids[:, 0], ids[:, 1]) and torch.equal(steps[:, 0] + 1, steps[:, 1])
    names["env"].close()
