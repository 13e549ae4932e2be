"""TorchRL environments with texts and open sizes work in gleanrl's collectors and return the expected batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import SerialEnv
from tests.fakes_lists import TalkingEnv

pytest.importorskip("torchrl")

from torchrl.data import Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase


class Story(EnvBase):
    """Returns its trajectory and step as a tensor and as a text, and in a leaf as long as the episode so far."""

    def __init__(self, ragged: bool) -> None:
        super().__init__()
        self.ragged, self.trajectory, self.count = ragged, -1, 0
        spec = {"code": Unbounded((2,)), "text": NonTensor(shape=())}
        if ragged:
            spec["spread"] = Unbounded((-1, 2))
        self.observation_spec = Composite(**spec)
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, (1,), dtype=torch.bool)

    def _observed(self) -> dict[str, Any]:
        code = (self.trajectory, self.count)
        found: dict[str, Any] = {"code": torch.tensor(code).float(), "text": "/".join(map(str, code))}
        return (
            {**found, "spread": torch.full((self.count + 1, 2), float(self.count))} if self.ragged else found
        )

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        self.trajectory, self.count = self.trajectory + 1, 0
        return TensorDict(self._observed(), [])

    def _step(self, tensordict: Any) -> TensorDict:
        self.count += 1
        return TensorDict(
            {**self._observed(), "reward": torch.ones(1), "done": torch.tensor([self.count == 3])}, []
        )

    def _set_seed(self, seed: Any) -> None:
        """Do nothing, because no value is random."""


def check(row: Any) -> None:
    for part in (row, row["next"]):
        assert part["text"] == "/".join(str(int(n)) for n in part["code"])
        if "spread" in part.keys():
            assert part["spread"].shape == (int(part["code"][1]) + 1, 2)


@pytest.mark.parametrize("ragged", [False, True])
def test_torchrl_environments_with_texts_are_collected(ragged: bool) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=8)
    for batch in SyncDataCollector(Story(ragged), None, frames_per_batch=8, total_frames=32):
        assert isinstance(batch, LazyStackedTensorDict if ragged else TensorDict)
        buffer.extend(batch)
        for row in [*batch.unbind(0), *buffer.sample().unbind(0)]:
            check(row)
    collector = SyncDataCollector(
        SerialEnv(2, lambda: Story(ragged)), None, frames_per_batch=8, total_frames=16
    )
    for batch in collector:
        for row in (row for part in batch.unbind(0) for row in part.unbind(0)):
            check(row)


@pytest.mark.parametrize("ragged", [False, True])
def test_rollouts_have_torchrls_classes(ragged: bool) -> None:
    theirs = Story(ragged).rollout(5, break_when_any_done=False)
    ours = TalkingEnv(ragged=ragged).rollout(5, break_when_any_done=False)
    assert type(theirs) is type(ours) and type(theirs.get("text")) is type(ours.get("text")) is NonTensorStack
    assert type(theirs["text"]) is type(ours["text"]) and theirs.names == ours.names
    assert type(theirs[0].get("text")) is type(ours[0].get("text"))
