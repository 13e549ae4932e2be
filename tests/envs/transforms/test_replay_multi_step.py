"""`MultiStepTransform` writes n-step rows, and holds rows back until their n steps are known."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from gleanrl.data.postprocs import MultiStep
from gleanrl.envs.transforms import Compose, MultiStepTransform, TransformedEnv
from gleanrl.errors import SchemaError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single


def data(env=single):
    return joined(collect_both_ways(env, lambda: [], sizes=(24,)))


@pytest.mark.parametrize("env", [single, batched])
@pytest.mark.parametrize("cut", [(24,), (5, 1, 9, 9), (1,) * 24, (2, 2, 20)])
def test_n_step_rows_do_not_depend_on_the_chunks(env, cut):
    whole = data(env)
    dim = whole.ndim - 1
    transform = MultiStepTransform(3, 0.5)
    written = [out for part in whole.split(list(cut), dim) if (out := transform.inv(part)) is not None]
    got = torch.cat(written, dim)
    want = MultiStep(0.5, 3)(whole)[..., :-3]
    assert got.shape == want.shape
    assert bool((got == want).all())


def test_rows_are_held_until_n_steps_are_known():
    buffer = ReplayBuffer(storage=LazyTensorStorage(30), transform=MultiStepTransform(3, 0.9), batch_size=4)
    whole = data()
    assert len(buffer.extend(whole[:2])) == 0
    assert len(buffer.extend(whole[2:3])) == 0
    assert len(buffer.extend(whole[3:5])) == 2
    assert len(buffer) == 2
    buffer.extend(whole[5:])
    assert len(buffer) == 21


def test_the_number_of_steps_can_be_changed():
    whole = data()
    transform = MultiStepTransform(2, 0.5)
    first = transform.inv(whole[:10])
    assert len(first) == 8
    transform.n_steps = 4
    second = transform.inv(whole[10:])
    assert len(second) == 24 - 4 - 8
    assert bool((second == MultiStep(0.5, 4)(whole[8:])[:-4]).all())
    with pytest.raises(ValueError, match="n_steps"):
        transform.n_steps = 0


def test_held_rows_are_state():
    whole = data()
    one, other = MultiStepTransform(3, 0.5), MultiStepTransform(3, 0.5)
    one.inv(whole[:10])
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert bool((one.inv(whole[10:]) == other.inv(whole[10:])).all())
    fresh = MultiStepTransform(3, 0.5)
    other.load_state_dict(fresh.state_dict())
    assert other.inv(whole[:3]) is None


def test_the_held_rows_are_copies():
    whole = data()
    transform = MultiStepTransform(3, 0.5)
    part = whole[:10].clone()
    transform.inv(part)
    part.zero_()
    want = MultiStep(0.5, 3)(whole)[7:-3]
    assert bool((transform.inv(whole[10:]) == want).all())


@pytest.mark.parametrize("given", [{"done_key": "done"}, {"done_keys": ["done"]}], ids=str)
def test_named_done_key_is_the_only_flag(given):
    done = torch.zeros(8, 1, dtype=torch.bool)
    done[5] = True
    agents = torch.zeros(8, 2, 1, dtype=torch.bool)
    agents[2, 0] = True
    following = {"reward": torch.ones(8, 1), "done": done, "agents": {"done": agents}}
    batch = TensorDict({"next": following}, [8])
    assert MultiStepTransform(2, 1.0)(batch) is batch
    steps = MultiStepTransform(2, 1.0, **given).inv(batch)["steps_to_next_obs"]
    assert steps.flatten().tolist() == [2, 2, 2, 2, 2, 1]
    steps = MultiStepTransform(2, 1.0).inv(batch)["steps_to_next_obs"]
    assert steps.flatten().tolist() == [2, 2, 1, 2, 2, 1]


def test_custom_done_key_bounds_the_sums():
    whole = data()
    lost = torch.zeros(24, 1, dtype=torch.bool)
    lost[[1, 8]] = True
    whole["next", "lost"] = lost
    out = MultiStepTransform(3, 1.0, done_key="lost").inv(whole)
    steps = out["steps_to_next_obs"].flatten()
    assert steps[1] == 1
    assert steps[0] <= 2
    assert torch.equal(out["collector", "traj_ids"], whole["collector", "traj_ids"][:21])


def test_another_number_of_streams_is_refused():
    transform = MultiStepTransform(2, 0.5)
    transform.inv(data(batched))
    with pytest.raises(SchemaError, match="streams"):
        transform.inv(data(batched)[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.set("more", torch.zeros(len(rows))), "expected the keys .*'more'"),
        (lambda rows: rows.exclude("observation"), "expected the keys"),
        (
            lambda rows: rows.set("observation", rows["observation"].double()),
            "'observation' expected .* float32",
        ),
        (lambda rows: rows.set("observation", rows["observation"][:, :1]), "'observation' expected"),
    ],
    ids=["more keys", "fewer keys", "dtype", "shape"],
)
def test_rows_unlike_the_held_ones_are_refused(change, message):
    rows = data()
    buffer = ReplayBuffer(storage=LazyTensorStorage(30), transform=MultiStepTransform(3, 0.9))
    buffer.extend(rows[:2])
    with pytest.raises(SchemaError, match=message):
        buffer.extend(change(rows[2:6].clone()))
    buffer.extend(rows[2:])
    assert bool((buffer[:] == MultiStep(0.9, 3)(rows)[:-3]).all())


def test_steps_may_be_added_one_by_one():
    rows = data(single)
    whole = MultiStepTransform(2, 0.5).inv(rows)
    buffer = ReplayBuffer(storage=LazyTensorStorage(len(rows)), transform=MultiStepTransform(2, 0.5))
    for row in rows.unbind(0):
        buffer.add(row)
    assert len(buffer) == len(rows) - 2
    for key in whole.keys(True, True):
        assert torch.equal(buffer[:][key], whole[key]), key
    transform = MultiStepTransform(2, 0.5)
    assert transform.inv(rows[0]) is None and transform.inv(rows[1]) is None
    transform.n_steps = 1
    with pytest.raises(SchemaError, match="use extend"):
        transform.inv(rows[2])


def test_environment_refuses_multi_step():
    with pytest.raises(ValueError, match="postproc"):
        TransformedEnv(single(), MultiStepTransform(2, 0.5))
    with pytest.raises(ValueError, match="postproc"):
        TransformedEnv(single(), Compose(MultiStepTransform(2, 0.5))).observation_spec  # noqa: B018


def test_held_text_is_state():
    def made():
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(20), batch_size=2, transform=MultiStepTransform(3, 0.9)
        )

    def steps(start, count):
        text = NonTensorStack(*[NonTensorData(f"step {start + place}") for place in range(count)])
        done = torch.zeros(count, 1, dtype=torch.bool)
        after = {"x": torch.ones(count), "reward": torch.ones(count, 1), "done": done}
        return TensorDict({"text": text, "agents": {"text": text.clone()}, "next": after}, [count])

    buffer, again = made(), made()
    buffer.extend(steps(0, 5))
    again.load_state_dict(buffer.state_dict())
    for each in (buffer, again):
        each.extend(steps(5, 4))
        assert each[:]["text"] == each[:]["agents", "text"] == [f"step {place}" for place in range(6)]
    held = buffer.transform[0].state_dict()
    for wrong in (3, {"items": 3, "shape": [3]}, {"items": ["a"] * 3, "shape": [2]}, {"items": ["a"]}):
        state = copy.deepcopy(held)
        state["held"]["leaves"]["text"] = wrong
        with pytest.raises(SchemaError, match="leaves"):
            buffer.transform[0].load_state_dict(state)


@pytest.mark.parametrize("streams", [None, 2])
def test_ended_trajectories_are_truncated_in_held_rows(streams):
    """The last held step is treated as if it had been truncated when it was written."""
    lead = [] if streams is None else [streams]

    def steps(trajectory, count, cut=False):
        ids = torch.full((*lead, count), 2 * trajectory)
        if streams:
            ids[1] += 1
        done = torch.zeros(*lead, count, 1, dtype=torch.bool)
        done[..., -1, :] = cut
        after = {"n": torch.arange(count).expand(*lead, count).clone(), "reward": torch.ones(*lead, count, 1)}
        after |= {"done": done, "truncated": done.clone(), "terminated": torch.zeros_like(done)}
        return TensorDict({"collector": {"traj_ids": ids}, "next": after}, [*lead, count])

    def written(end):
        storage = LazyTensorStorage(40, ndim=1 + len(lead))
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=2, transform=MultiStepTransform(3, 0.9))
        buffer.extend(steps(0, 7, cut=end is None))
        if end is not None:
            buffer.end_trajectories(end)
        buffer.extend(steps(1, 6))
        return buffer[:]

    assert (written(end=[0, 1, 5]) == written(end=None)).all()
    assert not (written(end=[5]) == written(end=None)).all()


def unfinished(start: float, count: int) -> TensorDict:
    """Return steps of an unfinished trajectory without ids; observations count up."""
    x = (start + torch.arange(count))[:, None]
    after = {"x": x + 1, "done": torch.zeros(count, 1, dtype=torch.bool), "reward": torch.ones(count, 1)}
    return TensorDict({"x": x, "next": after}, [count])


def looked_ahead(chunks: list[TensorDict], restored_after: int | None = None) -> dict[float, float]:
    """Return the next observation of each step in the n-step rows, by its observation."""
    found: dict[float, float] = {}
    transform = MultiStepTransform(3, 0.9)
    for place, chunk in enumerate(chunks):
        made = transform.inv(chunk)
        if made is not None:
            shown = zip(made["x"].flatten().tolist(), made["next", "x"].flatten().tolist(), strict=True)
            found.update(shown)
        if place == restored_after:
            state, transform = transform.state_dict(), MultiStepTransform(3, 0.9)
            transform.load_state_dict(state)
    return found


@pytest.mark.parametrize("restored_after", [None, 0, 1, 2])
def test_sums_stop_where_the_next_write_does_not_continue_the_observations(restored_after):
    chunks = [unfinished(*chunk) for chunk in ((0, 5), (100, 2), (102, 2), (200, 2), (300, 6))]
    found = looked_ahead(chunks, restored_after)
    expected = {
        x: min(x + 3, end) for begin, end in ((0, 5), (100, 104), (200, 202)) for x in range(begin, end)
    }
    assert found == expected | {300: 303, 301: 304, 302: 305}


def test_sums_of_each_stream_stop_separately():
    transform = MultiStepTransform(2, 0.9)
    transform.inv(torch.stack([unfinished(0, 3), unfinished(50, 3)]))
    made = transform.inv(torch.stack([unfinished(3, 3), unfinished(80, 3)]))
    assert made["next", "x"][..., 0].tolist() == [[3, 4, 5], [53, 53, 82]]


@pytest.mark.parametrize("kind", ["one step", "other order", "ids", "mask"])
def test_sums_continue_where_the_observations_are_inconclusive(kind):
    chunks = [unfinished(0, 4), unfinished(100, 4)]
    for chunk in chunks:
        if kind == "ids":
            chunk["collector", "traj_ids"] = torch.zeros(4, dtype=torch.int64)
        if kind == "mask":
            chunk["collector", "mask"] = torch.ones(4, dtype=torch.bool)
    if kind == "other order":
        chunks = [chunk[[2, 0, 3, 1]] for chunk in chunks]
    if kind == "one step":
        chunks = [step for chunk in chunks for step in chunk.split(1)]
    found = looked_ahead(chunks)
    last = 1 if kind == "other order" else 3
    assert found[last] > 100
