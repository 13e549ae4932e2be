"""What a checkpoint has to be, to be a buffer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gleanrl.checkpoint.folder import Folder
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import CheckpointError


@pytest.mark.parametrize(
    "state", [None, [], {}, {"_storage": None}, {"_storage": {"form": "whole", "packed": {}}}]
)
def test_what_isnt_a_buffers_state_is_refused(tmp_path: Path, state: Any) -> None:
    Folder(tmp_path).commit("ReplayBuffer", state)
    with pytest.raises((CheckpointError, ValueError)):
        ReplayBuffer(storage=LazyTensorStorage(5)).loads(tmp_path)
