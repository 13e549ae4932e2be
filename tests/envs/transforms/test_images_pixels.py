"""Image transforms convert, resize, crop and grey pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch.nn.functional import interpolate

from gleanrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymWrapper, SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    CatFrames,
    CenterCrop,
    Compose,
    Crop,
    GrayScale,
    PermuteTransform,
    Resize,
    ToTensorImage,
    TransformedEnv,
)
from gleanrl.errors import InvalidArgumentError, SchemaError
from tests.envs.transforms.ways import SCRIPT, collect_both_ways, joined
from tests.fakes import OracleEnv


class ColourEnv(OracleEnv):
    """Shows a frame (6, 8, 3): (stream, episode, step) in its first row, a fixed pattern in the other ones."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(0, 255, (6, 8, 3), np.uint8)

    def _emit(self):
        frame = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
        frame[0, :] = (self.stream, self.episode, self.step_index)
        return frame


def colour():
    env = GymWrapper(ColourEnv(script=SCRIPT))
    return env


KEY = {"in_keys": ["pixels"], "out_keys": ["image"]}


def by_hand(frame: torch.Tensor) -> torch.Tensor:
    """Convert (..., 6, 8, 3) uint8 to (..., 3, 6, 8) float32 between 0 and 1."""
    return frame.movedim(-1, -3).float() / 255


def test_images_become_floats_with_channels_first():
    batch = joined(collect_both_ways(colour, lambda: [ToTensorImage(**KEY)]))
    assert torch.equal(batch["image"], by_hand(batch["pixels"]))
    assert torch.equal(batch["next", "image"], by_hand(batch["next", "pixels"]))
    env = TransformedEnv(colour(), ToTensorImage(in_keys=["pixels"]))
    assert env.observation_spec["pixels"].high.max() == 1
    check_env_specs(env)


def test_to_tensor_image_honours_its_options():
    td = TensorDict({"pixels": torch.full((2, 4, 4, 3), 255, dtype=torch.uint8)}, [2])
    assert ToTensorImage(from_int=False)(td.clone())["pixels"].max() == 255
    assert ToTensorImage(dtype=torch.float16)(td.clone())["pixels"].dtype is torch.float16
    first = TensorDict({"pixels": torch.zeros(2, 3, 4, 5, dtype=torch.uint8)}, [2])
    assert ToTensorImage(shape_tolerant=True)(first)["pixels"].shape == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("size", "shape"), [((), (1, 3, 6, 8)), ((2,), (2, 3, 6, 8)), ((2, 3), (2, 3, 3, 6, 8))]
)
def test_unsqueeze_adds_a_dimension_to_a_single_image(size, shape):
    image = ToTensorImage(in_keys=["pixels"], unsqueeze=True)
    td = TensorDict({"pixels": torch.zeros(*size, 6, 8, 3, dtype=torch.uint8)}, size)
    assert image(td)["pixels"].shape == shape
    if len(size) < 2:
        base = SerialEnv(2, colour) if size else colour()
        env = TransformedEnv(base, image.clone())
        assert env.observation_spec["pixels"].shape == env.reset()["pixels"].shape == shape
        check_env_specs(env)


def test_grey_resized_and_stacked_pixels_equal_manual_ones():
    def chain():
        keys = {"in_keys": ["image"]}
        return [ToTensorImage(**KEY), GrayScale(**keys), Resize(4, 3, **keys), CatFrames(2, -3, **keys)]

    batch = joined(collect_both_ways(colour, chain))
    image = by_hand(batch["pixels"])
    grey = sum(w * image[:, c] for c, w in enumerate((0.2989, 0.587, 0.114)))
    small = interpolate(grey[:, None], (3, 4), mode="bilinear", align_corners=False)
    assert torch.allclose(batch["image"][:, 1:], small, atol=1e-6)
    first = batch["pixels"][:, 0, 0, 2] == 0
    before = torch.cat([small[:1], small[:-1]])
    before[first] = small[first]
    assert torch.allclose(batch["image"][:, :1], before, atol=1e-6)
    check_env_specs(TransformedEnv(colour(), Compose(*chain())))


def test_crop_and_center_crop_cut_the_expected_region():
    td = TensorDict({"pixels": torch.arange(30.0).reshape(1, 5, 6)}, [])
    assert torch.equal(Crop(2, 3, top=1, left=4)(td.clone())["pixels"], td["pixels"][:, 1:4, 4:6])
    assert torch.equal(CenterCrop(2, 3)(td.clone())["pixels"], td["pixels"][:, 1:4, 2:4])
    assert Crop(2)(td.clone())["pixels"].shape == (1, 2, 2)
    with pytest.raises(SchemaError, match="inside"):
        Crop(3, 3, top=4)(td.clone())
    with pytest.raises(SchemaError, match="inside"):
        CenterCrop(7)(td.clone())


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
def test_resize_keeps_integer_pixels(mode):
    td = TensorDict({"pixels": torch.randint(0, 256, (2, 3, 6, 8), dtype=torch.uint8)}, [2])
    out = Resize(4, 3, interpolation=mode)(td.clone())["pixels"]
    assert out.dtype is torch.uint8
    smooth = {} if mode in ("nearest", "area") else {"align_corners": False}
    want = interpolate(td["pixels"].float(), (3, 4), mode=mode, **smooth).round().clamp(0, 255)
    assert torch.equal(out, want.to(torch.uint8))
    grey = GrayScale()(td.clone())["pixels"]
    assert grey.dtype is torch.uint8
    assert grey.shape == (2, 1, 6, 8)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.5, 1.0), (-1.0, -0.5)])
@pytest.mark.parametrize(
    "transform",
    [GrayScale(), *(Resize(7, 5, interpolation=mode) for mode in ("nearest", "bilinear", "bicubic"))],
)
def test_specs_of_transformed_images_hold_for_extreme_images(transform, bounds):
    low, high = bounds
    spec = transform.transform_observation_spec(Composite(pixels=Bounded(low, high, (3, 4, 4))))["pixels"]
    pattern = torch.full((3, 4, 4), low)
    pattern[:, 1::2, 1:3] = high
    for image in (torch.full((3, 4, 4), low), torch.full((3, 4, 4), high), pattern):
        assert spec.is_in(transform(TensorDict({"pixels": image}, []))["pixels"])


@pytest.mark.parametrize("transform", [GrayScale(), Resize(8)])
def test_channels_in_the_last_dimension_are_refused(transform):
    """`Resize` once took the rows of a frame for channels, without an error."""
    frame = TensorDict({"pixels": torch.zeros(40, 60, 3, dtype=torch.uint8)}, [])
    with pytest.raises(SchemaError, match=r"C?, H, W.* got shape \(40, 60, 3\); put PermuteTransform"):
        transform(frame.clone())
    ordered = PermuteTransform((-1, -3, -2), in_keys=["pixels"])(frame)
    assert transform(ordered)["pixels"].dtype is torch.uint8


def test_rows_of_frames_with_channels_last_are_not_stacked():
    """`CatFrames` once stacked rows there, without an error."""
    message = (
        r"CatFrames: expected \(.*C, H, W\) for dim=-3, got shape \((5, |2, )?6, 8, 3\); write dim=-1, or put"
    )
    pixels = torch.zeros(5, 6, 8, 3, dtype=torch.uint8)
    flags = {"done": torch.zeros(5, 1, dtype=torch.bool)}
    steps = TensorDict({"pixels": pixels, "next": {"pixels": pixels, **flags}}, [5])
    with pytest.raises(SchemaError, match=message):
        CatFrames(2, -3)(steps)
    transform, sampler = CatFrames(2, -3).make_rb_transform_and_sampler(batch_size=2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, transform=transform, batch_size=2)
    buffer.extend(steps)
    with pytest.raises(SchemaError, match=message):
        buffer.sample()
    with pytest.raises(SchemaError, match=message):
        TransformedEnv(colour(), CatFrames(2, -3, **KEY)).rollout(2)
    assert CatFrames(2, -1)(steps.clone())["pixels"].shape == (5, 6, 8, 6)
    coordinates = TensorDict({"pixels": pixels.float(), "next": flags}, [5])
    assert CatFrames(2, -3)(coordinates)["pixels"].shape == (5, 12, 8, 3)


def test_invalid_images_and_arguments_are_refused():
    with pytest.raises(SchemaError, match="three channels"):
        GrayScale()(TensorDict({"pixels": torch.zeros(1, 4, 4)}, []))
    with pytest.raises(InvalidArgumentError, match="interpolation"):
        Resize(4, interpolation="magic")
    with pytest.raises(InvalidArgumentError, match="w: expected an integer of 1"):
        Resize(0)
    with pytest.raises(SchemaError, match="H, W, C"):
        ToTensorImage()(TensorDict({"pixels": torch.zeros(4)}, []))
