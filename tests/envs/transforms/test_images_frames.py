"""`CatFrames` stacks the frames of one episode, in environments and in buffers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import CatFrames, Compose, ObservationNorm, TransformedEnv
from gleanrl.errors import InvalidArgumentError, SchemaError, UnsupportedError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single

N = 3


def expected(obs: torch.Tensor, padding: str) -> torch.Tensor:
    """Return the expected frame stack of an observation (stream, episode, step), computed from the oracle alone."""
    frames = []
    for back in reversed(range(N)):
        frame = obs.clone()
        step = obs[..., 2] - back
        frame[..., 2] = step.clamp(min=0)
        if padding == "constant":
            frame[step < 0] = -7.0
        frames.append(frame)
    return torch.cat(frames, -1)


def stacked(padding="same"):
    return CatFrames(N, -1, in_keys=["observation"], out_keys=["stack"], padding=padding, padding_value=-7.0)


@pytest.mark.parametrize("env", [single, batched])
@pytest.mark.parametrize("padding", ["same", "constant"])
def test_stacks_begin_with_the_episode_and_end_with_its_last_observation(env, padding):
    batch = joined(collect_both_ways(env, lambda: [stacked(padding)]))
    assert torch.equal(batch["stack"], expected(batch["observation"], padding))
    assert torch.equal(batch["next", "stack"], expected(batch["next", "observation"], padding))
    assert bool(batch["next", "done"].any())


def test_stacks_in_place_pass_later_transforms():
    def chain():
        norm = ObservationNorm(1.0, 2.0, in_keys=["observation"])
        return [CatFrames(N, -1, in_keys=["observation"]), norm]

    plain = joined(collect_both_ways(single, lambda: [CatFrames(N, -1, in_keys=["observation"])]))
    batch = joined(collect_both_ways(single, chain))
    assert torch.equal(batch["observation"], plain["observation"] * 2 + 1)
    assert torch.equal(batch["next", "observation"], plain["next", "observation"] * 2 + 1)


@pytest.mark.parametrize("padding", ["same", "constant"])
def test_stacked_specs_hold(padding):
    env = TransformedEnv(single(), Compose(stacked(padding)))
    assert env.observation_spec["stack"].shape == (9,)
    check_env_specs(env)


def test_a_partial_reset_by_hand_restacks_its_rows_only():
    env = TransformedEnv(batched(), stacked())
    root = env.reset()
    for _ in range(2):
        root["action"] = torch.zeros(3, 2)
        root = env.step(root)["next"].exclude("reward")
        root.set("_reset", root["done"])
        root = env.reset(root) if bool(root["_reset"].any()) else root.exclude("_reset")
    mask = torch.tensor([[True], [False], [False]])
    fresh = env.reset(root.clone().set("_reset", mask))
    assert torch.equal(fresh["stack"], expected(fresh["observation"], "same"))


@pytest.mark.parametrize("env", [single, batched])
@pytest.mark.parametrize("padding", ["same", "constant"])
def test_a_batch_is_stacked_as_the_environment_would_have(env, padding):
    plain = joined(collect_both_ways(env, lambda: [], sizes=(17,)))
    offline = CatFrames(
        N,
        -1,
        in_keys=["observation", ("next", "observation")],
        out_keys=["stack", ("next", "stack")],
        padding=padding,
        padding_value=-7.0,
    )
    out = offline(plain.clone())
    assert torch.equal(out["stack"], expected(plain["observation"], padding))
    assert torch.equal(out["next", "stack"], expected(plain["next", "observation"], padding))


def test_buffer_stacks_frames_on_write():
    plain = joined(collect_both_ways(single, lambda: [], sizes=(17,)))
    transform = CatFrames(N, -1, in_keys=["observation"], out_keys=["stack"], as_inverse=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=transform, batch_size=5)
    buffer.extend(plain)
    rows = buffer[:]
    assert torch.equal(rows["stack"], expected(rows["observation"], "same"))
    assert "stack" not in plain.keys()


@pytest.mark.parametrize("wrong", [{"slice_len": 2}, {"span": True}, {"strict_length": False}, {"pad": True}])
def test_sampler_arguments_of_slices_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match=f"leave out .*{next(iter(wrong))}"):
        CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(4, **wrong)


def test_samplers_that_draw_no_transitions_are_refused():
    with pytest.raises(UnsupportedError, match="PrioritizedSampler, got a SliceSampler"):
        CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(4, sampler=SliceSampler(slice_len=2))
    with pytest.raises(InvalidArgumentError, match="seed: the sampler was passed too"):
        CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(4, sampler=RandomSampler(), seed=1)


def test_a_batch_of_images_is_stacked_along_channels():
    done = torch.tensor([False, True, False, False]).reshape(4, 1)
    pixels = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 2, 2).clone()
    batch = TensorDict({"pixels": pixels, "next": {"done": done}}, [4])
    out = CatFrames(2, -3)(batch)["pixels"]
    assert out.shape == (4, 2, 2, 2)
    assert out[:, :, 0, 0].tolist() == [[0, 0], [0, 1], [2, 2], [2, 3]]


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [({"N": 0, "dim": -1}, "N"), ({"N": 2, "dim": 0}, "dim"), ({"N": 2, "dim": -1, "padding": "x"}, "p")],
)
def test_bad_arguments_are_refused(kwargs, name):
    with pytest.raises(InvalidArgumentError, match=name):
        CatFrames(**kwargs)


def test_single_steps_cannot_be_stacked():
    with pytest.raises(SchemaError, match="slices"):
        CatFrames(2, -1, in_keys=["a"])(TensorDict({"a": torch.ones(1)}, []))


def test_the_first_step_needs_a_reset():
    env = TransformedEnv(single(), stacked())
    root = env.base_env.reset()
    with pytest.raises(UnsupportedError, match="reset"):
        env.rand_step(root)
