"""Stacks of drawn steps are the ones of an environment, for every sampler, even if frames were overwritten."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.envs.transforms import CatFrames
from gleanrl.errors import EmptyBufferError, UnsupportedError

N = 3

SAMPLERS = {
    "uniform": lambda: None,
    "epochs": lambda: SamplerWithoutReplacement(seed=0),
    "ordered": lambda: SamplerWithoutReplacement(shuffle=False),
    "priorities": lambda: PrioritizedSampler(200, alpha=0.7, beta=0.5, seed=0),
}
STREAMS, CAPACITY = 2, 37


def streams_of_frames(steps, lengths, start=0):
    """Return ``[STREAMS, steps]`` steps of episodes with such lengths, and the age of each step in its episode."""
    rows = []
    for stream in range(STREAMS):
        age, left, made = 0, lengths[stream % len(lengths)], []
        for t in range(start, start + steps):
            frame = float(1000 * stream + t)
            made.append((frame, age, left == 1))
            age, left = (0, lengths[(t + stream) % len(lengths)]) if left == 1 else (age + 1, left - 1)
        rows.append(made)
    x = torch.tensor([[frame for frame, _, _ in made] for made in rows])[..., None]
    age = torch.tensor([[age for _, age, _ in made] for made in rows])
    done = torch.tensor([[end for _, _, end in made] for made in rows])[..., None]
    return TensorDict({"x": x, "age": age, "next": {"x": x + 0.5, "done": done}}, [STREAMS, steps])


def stacks_of(batch, padding):
    """Return the stacks of N frames of sampled rows, from the value of each frame and its age alone."""
    last, age = batch["last"], batch["age"]
    back = torch.arange(N - 1, -1, -1)
    young = back > age[..., None]
    same = last - back.minimum(age[..., None])
    return same if padding == "same" else same.masked_fill(young, -7.0)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_buffer_keeps_frames_and_serves_the_stacks_of_an_environment(kind, name, padding, ndim):
    frames = CatFrames(N, -1, ["x"], ["stack"], padding, -7.0)
    transform, sampler = frames.make_rb_transform_and_sampler(batch_size=8, sampler=SAMPLERS[name]())
    storage = LazyTensorStorage(CAPACITY * (STREAMS if ndim == 2 else 1), ndim=ndim)
    buffer = kind(storage=storage, sampler=sampler, transform=transform, batch_size=8)
    written, batch = 0, streams_of_frames(4 * CAPACITY, (5, 1, 2, 9, 3))
    batch["last"] = batch["x"]
    if ndim == 1:
        batch = batch[0]
    for size in (3, 1, 7, 11, 2, 20, 36, 5, 13, 30):
        buffer.extend(batch[..., written : written + size])
        written += size
        stored = min(written, CAPACITY)
        kept = batch[..., written - stored : written]
        full = torch.ones(kept.shape, dtype=torch.bool)
        if (
            written > CAPACITY
        ):  # the stacks of the oldest trajectory's first steps may need overwritten frames
            position = torch.arange(stored).expand(kept.shape)
            full = (position >= N - 1) | (kept["age"] < position)
        drawn = set()
        for _ in range(40 if name in ("uniform", "priorities") else -(-int(full.sum()) // 8)):
            rows = buffer.sample()
            assert torch.equal(rows["stack"], stacks_of(rows, padding))
            shifted = torch.cat([rows["stack"][:, 1:], rows["last"] + 0.5], -1)
            assert torch.equal(rows["next", "stack"], shifted)
            assert rows["stack"].is_contiguous() and "_frames" not in rows.keys()
            drawn |= set(rows["last"].flatten().tolist())
        assert drawn <= set(kept["last"][full].flatten().tolist())
        if name in ("epochs", "ordered") or written < 20:
            assert drawn == set(kept["last"][full].flatten().tolist())


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("compact", [False, True])
def test_stored_steps_are_drawn_uniformly_whatever_the_length_of_their_episode(compact, padding):
    stack = CatFrames(4, -1, ["x"], padding=padding, padding_value=-7.0)
    transform, sampler = stack.make_rb_transform_and_sampler(batch_size=1000, seed=1)
    storage = LazyTensorStorage(60, compact=compact)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, transform=transform, batch_size=1000)
    rows, stacks = [], []
    for episode, length in enumerate((1, 2, 3, 1, 1, 2, 3, 4, 5, 1, 3, 30, 1, 2, 1)):
        # No two episodes share a frame, so the last outcome of an episode differs from the next root.
        frames = [100.0 * episode + age for age in range(length + 1)]
        early = frames[:1] * 3 if padding == "same" else [-7.0] * 3
        seen = early + frames
        for age in range(length):
            rows.append((len(rows), frames[age], frames[age + 1], age == length - 1))
            stacks.append((seen[age : age + 4], seen[age + 1 : age + 5]))
    t, root, coming, ends = (torch.tensor(column) for column in zip(*rows, strict=True))
    width = 4  # 16 bytes, so that a compact storage pairs the frames
    data = {"x": root[:, None].expand(60, width).clone()}
    data["next"] = {"x": coming[:, None].expand(60, width).clone(), "done": ends[:, None]}
    for part in TensorDict({"t": t, **data}, [60]).split(17):
        buffer.extend(part)
    if compact:
        assert "15 of 60 outcomes stored apart" in repr(storage)
    expected = torch.tensor(stacks)[..., None].expand(60, 2, 4, width).reshape(60, 2, 4 * width)
    counts = torch.zeros(60)
    for _ in range(60):
        batch = buffer.sample()
        counts += batch["t"].bincount(minlength=60)
        assert torch.equal(batch["x"], expected[batch["t"], 0])
        assert torch.equal(batch["next", "x"], expected[batch["t"], 1])
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 109  # 59 degrees of freedom: exceeded once in ten thousand


def test_priorities_apply_to_the_steps_of_stacks():
    sampler = PrioritizedSampler(50, alpha=1.0, beta=1.0, seed=0)
    transform, sampler = CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(4, sampler=sampler)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler, transform=transform, batch_size=64
    )
    x = torch.arange(50.0)[:, None]
    done = (x % 10 == 9).bool()
    index = buffer.extend(TensorDict({"x": x, "next": {"x": x + 1, "done": done}}, [50]))
    buffer.update_priority(index, torch.where(index == 31, 1.0, 0.0))
    batch = buffer.sample()
    assert batch["index"].tolist() == [31] * 64 and batch["x"].tolist() == [[30.0, 30.0, 31.0]] * 64
    buffer.update_priority(batch["index"], torch.zeros(64), batch["_generation"])
    buffer.update_priority(torch.tensor([5]), torch.tensor([2.0]))
    batch, info = buffer.sample(return_info=True)
    assert batch["x"].tolist() == [[3.0, 4.0, 5.0]] * 64 and "_weight" in info
    assert not any("_frames" in key for key in info)


@pytest.mark.parametrize("name", SAMPLERS)
def test_steps_whose_frames_are_overwritten_during_a_draw_are_drawn_again(name):
    transform, sampler = CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(16, sampler=SAMPLERS[name]())
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(64), sampler=sampler, transform=transform, batch_size=16, prefetch=3
    )
    written, going = 0, torch.zeros(64, 1, dtype=torch.bool)
    for size in (64, 9, 1, 30, 64, 2, 3, 5, 40, 40):
        x = torch.arange(float(written), written + size)[:, None]
        buffer.extend(TensorDict({"x": x, "next": {"x": x + 1, "done": going[:size]}}, [size]))
        written += size
        for _ in range(3):  # batches that were drawn before the write are repaired
            x = buffer.sample()["x"]
            first = torch.arange(3.0) + x[:, 2:] - 2
            assert torch.equal(x, first if written > 64 else first.clamp(min=0))
            assert x[:, 2].min() >= max(written - 64, 0)


def test_a_cleared_buffer_serves_its_new_first_steps_again():
    transform, sampler = CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(
        4, sampler=SamplerWithoutReplacement(shuffle=False)
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, transform=transform, batch_size=8)
    x = torch.arange(12.0)[:, None]
    rows = TensorDict({"x": x, "next": {"x": x + 1, "done": torch.zeros(12, 1, dtype=torch.bool)}}, [12])
    for _ in range(2):
        buffer.extend(rows[:5])
        assert sorted(buffer.sample()["x"][:, 2].tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0]
        buffer.extend(rows[5:])
        buffer.sampler.new_epoch()
        assert sorted(buffer.sample()["x"][:, 2].tolist()) == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
        buffer.empty()


def test_steps_of_a_storage_that_is_too_small_for_a_stack_are_refused():
    transform, sampler = CatFrames(5, -1, ["x"]).make_rb_transform_and_sampler(4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, transform=transform, batch_size=4)
    x = torch.arange(6.0)[:, None]
    buffer.extend(
        TensorDict({"x": x, "next": {"x": x + 1, "done": torch.zeros(6, 1, dtype=torch.bool)}}, [6])
    )
    with pytest.raises(EmptyBufferError, match="no stored step has the 4 frames before it"):
        buffer.sample()
    with pytest.raises(UnsupportedError, match="only sampled batches"):
        buffer[:2]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("length", [80, 100])
def test_a_write_that_is_longer_than_the_ring_leaves_no_stack_with_missing_frames(shared, length):
    transform, sampler = CatFrames(N, -1, ["x"]).make_rb_transform_and_sampler(
        8, sampler=SamplerWithoutReplacement(shuffle=False)
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(40), sampler=sampler, transform=transform, batch_size=40, shared=shared
    )
    x = torch.arange(float(length))[:, None]
    buffer.extend(
        TensorDict({"x": x, "next": {"x": x + 1, "done": torch.zeros(length, 1, dtype=torch.bool)}}, [length])
    )
    drawn = buffer.sample()["x"]
    assert torch.equal(drawn, drawn[:, 2:] + torch.arange(-2.0, 1))
    assert sorted(drawn[:, 2].tolist()) == list(range(length - 38, length))


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("written", [20, 50, 90])
def test_a_restored_buffer_continues_with_the_same_stacks(tmp_path, name, storage, written):
    def made():
        transform, sampler = CatFrames(N, -1, ["x"]).make_rb_transform_and_sampler(
            8, sampler=SAMPLERS[name]()
        )
        return ReplayBuffer(storage=storage(50), sampler=sampler, transform=transform, batch_size=8)

    buffer, loaded, copied = made(), made(), made()
    x = torch.arange(float(written))[:, None]
    rows = {"x": x, "next": {"x": x + 1, "done": (x % 7 == 6).bool()}}
    buffer.extend(TensorDict(rows, [written]))
    buffer.sample()
    buffer.dumps(tmp_path)
    loaded.loads(tmp_path)
    copied.load_state_dict(buffer.state_dict())
    for _ in range(5):
        batch = buffer.sample()
        assert (loaded.sample() == batch).all() and (copied.sample() == batch).all()


def test_rows_that_are_not_stale_keep_frames_that_a_writer_has_overwritten():
    transform, sampler = CatFrames(N, -1, ["x"]).make_rb_transform_and_sampler(8, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, transform=transform, batch_size=8)
    x = torch.arange(30.0)[:, None]
    rows = TensorDict({"x": x, "next": {"x": x + 1, "done": torch.zeros(30, 1, dtype=torch.bool)}}, [30])
    buffer.extend(rows[:20])
    drawn = sampler.draw(buffer.storage, 200)
    buffer.extend(rows[20:])  # overwrites the slots below 10
    stale = drawn.slots < 10
    again = sampler.redraw(buffer.storage, drawn, stale)
    frames, before = again.extras["_frames", "of", "x"][..., 0], drawn.extras["_frames", "of", "x"][..., 0]
    assert torch.equal(again.slots[~stale], drawn.slots[~stale]) and torch.equal(
        frames[~stale], before[~stale]
    )
    newest = buffer.storage.fetch(again.slots)["x"]
    assert torch.equal(frames, newest + torch.tensor([-2.0, -1.0]))
    assert (newest[~stale] < 12).any(), "some of the rows have overwritten frames"


@pytest.mark.parametrize("name", SAMPLERS)
def test_ends_written_through_live_views_end_stacks(name):
    transform, sampler = CatFrames(N, -1, ["x"]).make_rb_transform_and_sampler(8, sampler=SAMPLERS[name]())
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, transform=transform, batch_size=10)
    x = torch.arange(20.0)[:, None]
    buffer.extend(
        TensorDict({"x": x, "next": {"x": x + 1, "done": torch.zeros(20, 1, dtype=torch.bool)}}, [20])
    )
    buffer.sample()
    buffer.storage[:]["next", "done"][9] = True
    for _ in range(8):
        stacks = buffer.sample()["x"]
        first = torch.where(stacks[:, 2:] < 10, 0.0, 10.0)
        assert torch.equal(stacks, (stacks[:, 2:] + torch.arange(-2.0, 1)).maximum(first))
