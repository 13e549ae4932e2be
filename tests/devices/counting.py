"""An environment and policies on a device, with arithmetic that is exact on every device."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl._arrays.tensordicts import flatten
from gleanrl.data import Categorical, Composite, Unbounded
from gleanrl.envs import EnvBase

WEIGHT = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 4.0, 2.0]])


class Counter(EnvBase):
    """Observes ``(stream, episode, step)``; stream s ends its episodes after ``3 + s % 2`` steps, each pays its step.

    All its tensors are on its device and move with it.

    Args:
        device: device of all tensors.
        batch_size: `()` or `(P,)`; stream p is row p.
        first: number of the first stream.
        dtype: of the observation.
    """

    def __init__(
        self,
        device: Any = None,
        batch_size: tuple[int, ...] = (),
        first: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.observation_spec = Composite(
            observation=Unbounded((*batch_size, 3), dtype=dtype), shape=batch_size
        )
        self.action_spec = Unbounded((*batch_size, 2))
        self.reward_spec = Unbounded((*batch_size, 1))
        flag = Categorical(2, (*batch_size, 1), dtype=torch.bool)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch_size
        )
        streams = torch.arange(first, first + max(1, self.batch_size.numel())).reshape(batch_size)
        for name, value in (("stream", streams), ("episode", streams * 0 - 1), ("clock", streams * 0)):
            self.register_buffer(name, value.to(self.device or "cpu"))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = torch.ones_like(self.stream, dtype=torch.bool) if mask is None else mask.squeeze(-1)
        assert rows.device == self.stream.device
        self.episode, self.clock = self.episode + rows, self.clock * ~rows
        return self._packed(torch.zeros_like(rows))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert tensordict["action"].device == self.stream.device
        self.clock = self.clock + 1
        return self._packed(self.clock >= 3 + self.stream % 2).set("reward", self.clock[..., None].float())

    def _packed(self, ended: torch.Tensor) -> TensorDict:
        triple = torch.stack([self.stream, self.episode, self.clock], -1)
        flags = {"done": ended[..., None], "terminated": ended[..., None].clone()}
        flags["truncated"] = torch.zeros_like(flags["done"])
        observation = triple.to(self.observation_spec["observation"].dtype)
        return TensorDict({"observation": observation, **flags}, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass


def rows(steps: int, stream: int = 0) -> list[list[float]]:
    """Return the first observations of a stream."""
    length = 3 + stream % 2
    return [[float(stream), float(t // length), float(t % length)] for t in range(steps)]


def linear(weight: torch.Tensor = WEIGHT) -> nn.Linear:
    """Return a module that maps an observation to an action, by small integers."""
    net = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(weight)
    return net


def acted(batch: TensorDictBase, weight: torch.Tensor = WEIGHT) -> torch.Tensor:
    """Return on the CPU the actions of `linear` for the batch's observations."""
    return batch["observation"].cpu().float() @ weight.T


def check_stream(batch: TensorDictBase, steps: int, streams: tuple[int, ...] = (0,)) -> None:
    """Check that the batch, ``[T]`` or ``[P, T]``, is the first `steps` steps of these streams, bit for bit."""
    single = batch.ndim == 1
    for row, stream in zip(batch.unsqueeze(0) if single else batch, streams, strict=True):
        expected = torch.tensor(rows(steps, stream))
        after = torch.cat([expected[:, :2], expected[:, 2:] + 1], -1)
        ended = after[:, 2:] == 3 + stream % 2
        assert row["observation"].cpu().tolist() == expected.tolist()
        assert row["next", "observation"].cpu().tolist() == after.tolist()
        assert row["next", "reward"].cpu().tolist() == after[:, 2:].tolist()
        assert torch.equal(row["next", "done"].cpu(), ended)
        assert torch.equal(row["next", "terminated"].cpu(), ended)
        assert not row["next", "truncated"].any() and not row["done"].any()
        if ("collector", "traj_ids") in batch.keys(True):
            ids, episodes = row["collector", "traj_ids"].cpu(), expected[:, 1]
            changes = ids[1:] != ids[:-1]
            assert torch.equal(changes, episodes[1:] != episodes[:-1])


def leaves_on(batch: TensorDictBase) -> set[torch.device]:
    """Return the devices of a batch's tensors."""
    return {leaf.device for leaf in batch.values(True, True) if isinstance(leaf, torch.Tensor)}


def drained(kind: str, collector: Any) -> list[TensorDictBase]:
    """Return of each worker a batch that was begun after this call."""
    batches = [collector.next() for _ in range(1 if kind == "sync" else 7)]
    if kind == "sync":
        return batches
    # Up to two batches of a worker may have been in progress.
    of = {w: [batch for batch in batches if batch["observation"][0, 0] == w] for w in (0, 1)}
    return [part[-1] for part in of.values() if len(part) > 2]


def check_same(
    found: TensorDictBase, expected: TensorDictBase, device: torch.device, **tolerance: Any
) -> None:
    """Check that a batch on the device equals one on the CPU: exactly, unless a tolerance is given."""
    assert leaves_on(found) == {device} and leaves_on(expected) == {torch.device("cpu")}
    ours, theirs = flatten(found), flatten(expected)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        here, there = leaf.cpu(), theirs[path]
        assert here.dtype is there.dtype and here.shape == there.shape, path
        same = torch.allclose(here, there, **tolerance) if tolerance and here.is_floating_point() else None
        assert torch.equal(here, there) if same is None else same, path
