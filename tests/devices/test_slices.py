"""Slices from storages on a device are consecutive steps of one episode, with the end marked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.devices.records import PLACES, at, on

LENGTHS = (7, 3, 5, 9)  # of episodes, one after the other


def episodes(device: torch.device | str, lengths: tuple[int, ...] = LENGTHS, ids: bool = True) -> TensorDict:
    """Return whole episodes one after the other: `x` counts all steps, `step` the steps of each."""
    step = torch.cat([torch.arange(length) for length in lengths])
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    done = torch.cat([torch.arange(length) == length - 1 for length in lengths])[:, None]
    x, size = torch.arange(len(step)), [len(step)]
    below = {"x": x + 1, "done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    data = TensorDict({"x": x, "step": step, "episode_": episode, "next": TensorDict(below, size)}, size)
    if ids:
        data["collector"] = TensorDict({"traj_ids": episode + 100}, size)
    return data.to(device)


def check_slices(batch: Any, length: int) -> torch.Tensor:
    """Check that slices are consecutive steps of one episode with the end marked; return the first steps."""
    x, episode = batch["x"].cpu().view(-1, length), batch["episode_"].cpu().view(-1, length)
    assert torch.equal(x, x[:, :1] + torch.arange(length))
    assert torch.equal(episode, episode[:, :1].expand_as(episode))
    last = torch.arange(length) == length - 1
    truncated = batch["next", "truncated"].cpu().view(-1, length)
    assert torch.equal(truncated, last.expand_as(truncated))
    whole = torch.repeat_interleave(torch.tensor(LENGTHS), torch.tensor(LENGTHS))
    ended = batch["step"].cpu() == whole[batch["x"].cpu()] - 1
    assert torch.equal(batch["next", "terminated"].cpu()[:, 0], ended)
    assert torch.equal(batch["next", "done"].cpu()[:, 0], ended | truncated.reshape(-1))
    return x[:, 0]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """The device of indices and priorities."""
    return at(request.param, device)


class TestSlices:
    @pytest.mark.parametrize("ids", [True, False])
    def test_slices_are_steps_of_one_episode(self, device, ids):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(50, device=device),
            sampler=SliceSampler(slice_len=4),
            batch_size=4000,
            seed=0,
        )
        rb.extend(episodes(device, ids=ids))
        batch = rb.sample()
        starts = Counter(check_slices(batch, 4).tolist())
        assert set(starts) == {0, 1, 2, 3, 10, 11, *range(15, 21)} and on(device, batch)

    def test_info_holds_the_end_flags(self, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(50, device=device), sampler=SliceSampler(num_slices=4))
        rb.extend(episodes(device))
        batch, info = rb.sample(12, return_info=True)
        assert info["next", "truncated"].flatten().tolist() == [False, False, True] * 4
        terminated = batch["next", "terminated"].cpu()
        assert torch.equal(info["next", "terminated"].cpu(), terminated)
        assert torch.equal(info["next", "done"].cpu(), terminated | info["next", "truncated"].cpu())
        assert batch["x"].tolist() == rb[info["index"]]["x"].tolist()

    def test_full_ring_draws_complete_slices(self, device):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(20, device=device),
            sampler=SliceSampler(slice_len=3),
            batch_size=3000,
            seed=0,
        )
        rb.extend(episodes(device))  # 24 steps, of which the first four are overwritten
        assert set(check_slices(rb.sample(), 3).tolist()) == {4, 7, 10, 11, 12, *range(15, 22)}

    def test_short_episodes_are_padded(self, device):
        sampler = SliceSampler(slice_len=5, strict_length=False, pad=True, traj_key=("collector", "traj_ids"))
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(50, device=device), sampler=sampler, batch_size=100, seed=0
        )
        rb.extend(episodes(device))
        batch = rb.sample().reshape(-1, 5)
        real = batch["collector", "mask"].cpu()
        short = batch["episode_"].cpu()[:, 0] == 1
        assert short.any() and torch.equal(real.sum(1), torch.where(short, 3, 5))
        assert batch["x"].cpu()[short].tolist() == [[7, 8, 9, 9, 9]] * int(short.sum())

    def test_an_epoch_has_each_episode_once(self, device):
        sampler = SliceSamplerWithoutReplacement(slice_len=3)
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(50, device=device), sampler=sampler, batch_size=6
        )
        rb.extend(episodes(device))
        batches = list(rb)
        for batch in batches:
            check_slices(batch, 3)
        assert sorted(int(e) for batch in batches for e in batch["episode_"][::3]) == [0, 1, 2, 3]

    def test_first_steps_are_drawn_by_priority(self, device, place):
        sampler = PrioritizedSliceSampler(50, alpha=1.0, beta=1.0, eps=0.0, slice_len=4)
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(50, device=device), sampler=sampler, batch_size=400, seed=0
        )
        index = rb.extend(episodes(device))
        priority = torch.zeros(24)
        # No slice fits from step 6.
        priority[2], priority[11], priority[17], priority[6] = 1.0, 3.0, 4.0, 50.0
        rb.update_priority(index.to(place), priority.to(place))
        batch = rb.sample()
        starts = Counter(check_slices(batch, 4).tolist())
        assert set(starts) == {2, 11, 17} and starts[2] < starts[11] and starts[17] > 20
        weight = batch["_weight"].cpu().view(-1, 4)
        assert torch.equal(weight, weight[:, :1].expand_as(weight)) and on(device, batch)
        batch["td_error"] = torch.ones(400, device=device)
        rb.update_tensordict_priority(batch.to(place))

    @pytest.mark.parametrize("name", ["ends", "trajectories"])
    def test_given_ends_and_ids_bound_slices(self, device, place, name):
        data = episodes(device)
        given = {
            "ends": data["next", "done"][:, 0].to(place),
            "trajectories": data["collector", "traj_ids"].to(place),
        }
        sampler = SliceSampler(slice_len=4, cache_values=True, truncated_key=None, **{name: given[name]})
        rb = ReplayBuffer(
            storage=TensorStorage(data.select("x", "step"), device=device), sampler=sampler, batch_size=80
        )
        x = rb.sample()["x"].cpu().view(-1, 4)
        assert set(x[:, 0].tolist()) <= {0, 1, 2, 3, 10, 11, *range(15, 21)}
        assert torch.equal(x, x[:, :1] + torch.arange(4))

    def test_her_buffer_relabels_goals(self, device):
        rb = HERReplayBuffer(
            lambda part: (part["achieved"] == part["wanted"]).float(),
            her_ratio=0.5,
            strategy="final",
            goal_key="wanted",
            achieved_goal_key="achieved",
            storage=LazyTensorStorage(50, device=device),
            batch_size=40,
        )
        data = episodes(device)
        data["achieved"] = data["x"][:, None].float()
        data["wanted"] = torch.full((24, 1), -1.0, device=device)
        data["next", "reward"] = torch.zeros(24, 1, device=device)
        rb.extend(data)
        batch = rb.sample()
        final = torch.tensor([6.0, 9.0, 14.0, 23.0])[batch["episode_"].cpu()]
        wanted = batch["wanted"].cpu()[:, 0]
        assert int((wanted >= 0).sum()) == 20 and on(device, batch)
        assert torch.equal(wanted, torch.where(wanted >= 0, final, -1.0))
        reached = (batch["x"].cpu() == final) & (wanted >= 0)
        assert torch.equal(batch["next", "reward"].cpu()[:, 0], reached.float())

    def test_columns_and_episodes_are_the_same_as_on_the_cpu(self, device):
        tables = []
        for place in (device, "cpu"):
            rb = ReplayBuffer(storage=LazyTensorStorage(20, device=place))
            data = episodes(place)
            data["y"] = data["x"].float().masked_fill(data["x"] == 9, torch.nan)
            rb.extend(data)
            tables.append((rb.describe(), str(rb.episodes()), rb.verify()))
        assert tables[0] == tables[1] and tables[0][0]["y"].num_nan == 1

    def test_verify_finds_a_wrong_row(self, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(50, device=device))
        data = episodes(device)
        data["next", "x"][3] = 77
        rb.extend(data)
        report = rb.verify()
        assert [(p.rule, p.rows, p.slot) for p in report.problems] == [("next observation", 1, 3)]
        assert report.trajectories == 4

    def test_streams_have_separate_episodes(self, device):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(100, device=device, ndim=2),
            sampler=SliceSampler(slice_len=3),
            batch_size=300,
            seed=0,
        )
        streams = torch.stack([episodes(device), episodes(device)])
        streams["stream"] = torch.arange(2, device=device)[:, None].expand(2, 24)
        rb.extend(streams)
        batch = rb.sample()
        check_slices(batch, 3)
        stream = batch["stream"].cpu().view(-1, 3)
        assert torch.equal(stream, stream[:, :1].expand_as(stream)) and set(stream.flatten().tolist()) == {
            0,
            1,
        }
        assert batch["index"].tolist() == torch.stack([batch["x"], batch["stream"]], -1).tolist()
