"""Calls to an actor's buffer declare whether they change prefetched draws."""

from __future__ import annotations

import pytest

from gleanrl.data import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.ray.actor import SAVES, leaves_draws


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        *[
            (name, True)
            for name in ("extend", "add", "update_tensordict_priority", "__len__", *sorted(SAVES))
        ],
        *[(name, False) for name in ("set_seed", "set_sampler", "set_storage", "empty", "loads")],
    ],
)
def test_leaves_draws_lists_calls_that_keep_prefetched_batches(name, leaves):
    assert hasattr(TensorDictReplayBuffer, name) and leaves_draws((name,)) == leaves
    assert leaves_draws(("sampler", name))
