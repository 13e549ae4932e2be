"""Post-processing changes a batch before its delivery."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors.delivery import PostProcessing
from gleanrl.errors import InvalidTypeError

CPU0 = torch.device("cpu:0")


def batch(num_steps: int = 4) -> TensorDict:
    flags = {
        name: torch.zeros(num_steps, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")
    }
    flags["done"][1] = flags["terminated"][1] = True
    ids = torch.tensor([0, 0, 1, 1, 1, 1])[:num_steps]
    return TensorDict(
        {"x": torch.arange(num_steps), "next": flags, "collector": {"traj_ids": ids}}, [num_steps]
    )


def test_without_options_the_batch_is_returned_itself() -> None:
    given = batch()
    assert PostProcessing()(given) is given


def test_private_entries_are_left_out() -> None:
    delivery = PostProcessing()
    for _ in range(2):
        given = batch()
        noise = {"_noise": torch.ones(4), "next": {"_noise": torch.ones(4)}, "agents": {"_h": torch.ones(4)}}
        out = delivery(given.clone().update(noise))
        assert set(out.keys(True, True)) == set(given.keys(True, True))


def test_batch_is_marked_moved_split_and_processed_in_this_order() -> None:
    seen: list[TensorDictBase] = []
    delivery = PostProcessing(
        CPU0, ["done", "truncated", "terminated"], True, lambda td: [seen.append(td), td][1]
    )
    out = delivery(batch())
    assert out is seen[0] and out.batch_size == (2, 2) and out.device == CPU0
    assert out["next", "truncated"].squeeze(-1).tolist() == [[False, False], [False, True]]
    assert out["next", "done"].squeeze(-1).tolist() == [[False, True], [False, True]]


def test_moved_batches_share_their_memory_on_request() -> None:
    delivery = PostProcessing(CPU0, reuse=True)
    first = delivery(batch())
    assert delivery(batch()) is first and delivery(batch(6)) is not first
    fresh = PostProcessing(CPU0)
    assert fresh(batch()) is not fresh(batch())


@pytest.mark.parametrize("postproc", [3, "abc", [len]])
def test_postproc_that_is_not_callable_is_refused(postproc: Any) -> None:
    with pytest.raises(InvalidTypeError, match="postproc: expected a callable"):
        PostProcessing(postproc=postproc)


def test_postproc_that_returns_none_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="postproc: .* got None"):
        PostProcessing(postproc=lambda td: None)(batch())  # type: ignore[arg-type, return-value]
