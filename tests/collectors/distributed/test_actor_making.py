"""Nodes with different specs are refused."""

from __future__ import annotations

import torch

from gleanrl.collectors.distributed.actor import NodeDescription, unlike
from gleanrl.collectors.distributed.local_transport import Name, PipeNames

DONE = (("next", "done"),)


def test_nodes_make_batches_of_the_same_kind() -> None:
    one = NodeDescription(torch.Size((2,)), DONE, None)
    alike, other = one._replace(memory=Name(1, 2, PipeNames(3, 4))), one._replace(batch_size=torch.Size())
    assert unlike({0: one, 1: alike}, 1) is None
    error = unlike({0: one, 1: alike, 2: other}, 2)
    assert error is not None and "node 2 makes batches ()" in str(error)
