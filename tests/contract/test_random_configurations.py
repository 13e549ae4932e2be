"""Collectors with random arguments against the oracle: no combination loses, repeats or misnames a frame."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper
from tests.contract.helpers import check_ledger, check_stream, same, snapshot
from tests.fakes import OracleEnv, ReusingEnv, Script
from tests.fakes_base import CountingEnv

POLICIES: dict[str, Any] = {
    "random": None,
    "tensors": lambda observation: observation[..., :2] * 0,
    "tensordict": lambda td: td.set("action", td["observation"][..., :2] * 0),
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    envs=st.sampled_from(["gym", "reusing", (), (1,), (2,), (5,)]),
    policy=st.sampled_from(sorted(POLICIES)),
    frames=st.integers(1, 17),
    total=st.integers(1, 60),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    ending=st.sampled_from(["terminated", "truncated", "both", "mixed", "never"]),
    limit=st.none() | st.integers(1, 6),
    fresh=st.booleans(),
    random_frames=st.integers(0, 20),
)
def test_random_configurations_agree_with_the_oracle(
    envs: Any,
    policy: str,
    frames: int,
    total: int,
    lengths: tuple[int, ...],
    ending: str,
    limit: int | None,
    fresh: bool,
    random_frames: int,
) -> None:
    """Budget, stream, ids, flags, aliasing and ledger are right for any combination of arguments."""
    script = Script(lengths=lengths, ending=ending)
    width = envs[0] if isinstance(envs, tuple) and envs else 1
    kinds: dict[Any, Any] = {"gym": OracleEnv, "reusing": ReusingEnv}
    env = GymWrapper(kinds[envs](script=script)) if envs in kinds else CountingEnv(script, envs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = SyncDataCollector(
            env,
            POLICIES[policy],
            frames_per_batch=frames,
            total_frames=total,
            max_frames_per_traj=limit,
            reset_at_each_iter=fresh,
            init_random_frames=random_frames,
        )
    kept = [(batch, snapshot(batch)) for batch in collector]
    assert all(same(batch, frozen) for batch, frozen in kept)
    batches = [batch for batch, _ in kept]
    steps, rest = -(-frames // width), -(-total // width)
    sizes = [steps] * (rest // steps) + [rest % steps] * (rest % steps > 0)
    assert [batch.shape[-1] for batch in batches] == sizes
    assert sum(batch.numel() for batch in batches) == rest * width
    assert all(batch.names[-1] == "time" for batch in batches)
    check_stream(batches, script, fresh_batches=fresh, limit=limit)
    if policy != "random":
        by_policy = batches[-(-random_frames // (steps * width)) :]
        assert all(torch.count_nonzero(batch["action"]) == 0 for batch in by_policy)
    check_ledger(collector)
    collector.shutdown()
