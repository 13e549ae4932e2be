"""Transforms of images: `ToTensorImage`, `GrayScale`, `Resize`, `CenterCrop`, `Crop`.

Images are ``(..., channels, height, width)``, but for what `ToTensorImage` takes: ``(..., height, width, channels)``.

`CatFrames`: the last N observations as one.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import interpolate

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_path
from gleanrl._util import positive
from gleanrl.data.replay_buffers import SliceSampler
from gleanrl.data.specs import Bounded, TensorSpec, Unbounded
from gleanrl.data.trajectories import trajectory_ends
from gleanrl.envs.transforms.base import Keys, missing_key
from gleanrl.envs.transforms.entrywise import EntryTransform
from gleanrl.envs.transforms.episodic import Following
from gleanrl.envs.transforms.row_view import Record, trailing
from gleanrl.envs.transforms.shapes import PIXELS
from gleanrl.envs.transforms.spec_tools import mapped
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, SchemaError, UnsupportedError


class CatFrames(EntryTransform, Following):
    """Concatenates each observation with the N - 1 before it in its episode, the newest last.

    Where an episode is younger than that, its first observation is repeated, or a constant stands in. The next
    observation of a step that ends an episode includes the one that ended it.

    In a buffer `forward` stacks what is read (or, with `as_inverse`, what is written): batches ``[*B, T]`` of whole
    steps, time last. Nothing crosses the end of a trajectory as `gleanrl.data.trajectories.trajectory_ends` defines it,
    nor the batch's beginning, where a trajectory that began earlier is filled up as if it began there. In keys that
    begin with ``"next"`` name next observations; they follow the root observation of the same trajectory, whose key
    must be among `in_keys` too.

    Args:
        N: how many, at least 1.
        dim: the dimension that is concatenated, negative.
        in_keys: observations; None for ``["pixels"]``.
        out_keys: where the results stand; None for in place.
        padding: ``"same"`` repeats the first observation, ``"constant"`` fills with `padding_value`.
        padding_value: see `padding`.
        as_inverse: whether a buffer's writes are stacked instead of its reads.
        **keys: `reset_key`, the ``"_reset"`` mask to go by (None for any of the environment's), and `done_key`, in a
            buffer the only flag to look at, without ``"next"`` (None for all flags).

    Raises:
        InvalidArgumentError: for a bad `N`, `dim` or `padding`.
    """

    on_rows = True
    by_keys = True
    shows = ("N", "dim", "in_keys")
    ACCEPTED_PADDING = ("same", "constant")

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        padding: str = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        **keys: NestedKey | None,
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim >= 0:
            raise InvalidArgumentError(
                f"dim: expected a negative dimension, got {dim!r}: batch dimensions come first"
            )
        if padding not in self.ACCEPTED_PADDING:
            raise InvalidArgumentError(f"padding: expected one of {self.ACCEPTED_PADDING}, got {padding!r}")
        unknown = sorted(set(keys) - {"reset_key", "done_key"})
        if unknown:
            raise InvalidArgumentError(f"CatFrames: unexpected arguments {unknown}")
        super().__init__(list(PIXELS) if in_keys is None else in_keys, out_keys)
        self.N, self.dim, self.padding, self.padding_value = positive("N", N), dim, padding, padding_value
        self.as_inverse = as_inverse
        self.reset_key, self.done_key = keys.get("reset_key"), keys.get("done_key")

    # ----------------------------------------------------------- environment
    def carries(self) -> dict[NestedKey, Field]:
        """Return the stacks, by the keys of their frames."""
        spec = self.surroundings().full_observation_spec
        return {key: Field(self._leaf(spec[key]).shape, spec[key].dtype) for key, _ in self.pairs()}

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for in_key, out_key in self.pairs():
            frame = next_tensordict.get(in_key)
            stack = self.kept(in_key, frame.device)
            if stack is None:
                raise UnsupportedError("CatFrames: reset the environment before the first step")
            size = frame.shape[self.dim]
            stack = torch.cat([stack.narrow(self.dim, size, (self.N - 1) * size), frame], self.dim)
            self.carried[in_key] = stack
            next_tensordict.set(out_key, stack)
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows = self.asked(tensordict)
        for in_key, out_key in self.pairs():
            frame = tensordict_reset.get(in_key)
            stack = torch.cat([*[self._pad(frame)] * (self.N - 1), frame], self.dim)
            stack = self.renewed(in_key, stack, None if rows is None else trailing(rows, stack))
            tensordict_reset.set(out_key, stack)
        return tensordict_reset

    def _pad(self, first: Tensor) -> Tensor:
        return first if self.padding == "same" else torch.full_like(first, self.padding_value)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        zero = spec.zero()
        shape = torch.cat([zero] * self.N, self.dim).shape
        if isinstance(spec, Bounded):
            low, high = (torch.cat([bound] * self.N, self.dim) for bound in spec.bounds)
            if self.padding == "constant":
                low, high = low.clamp(max=self.padding_value), high.clamp(min=self.padding_value)
            return Bounded(low, high, shape, spec.device, spec.dtype)
        return Unbounded(shape, device=spec.device, dtype=spec.dtype)

    # ---------------------------------------------------------------- buffer
    def make_rb_transform_and_sampler(
        self, batch_size: int, **sampler_kwargs: Any
    ) -> tuple[CatFrames, SliceSampler]:
        """Return a transform and a sampler for a buffer that keeps single frames and serves stacks.

        Each record of a batch is the last step of a slice of N steps, stacked with those before it: its root
        observation and its next one. A record that has fewer than N - 1 before it in its trajectory is never drawn:
        the first N - 1 steps of each episode are missing. Nor are the draws uniform: each trajectory of N steps and
        more has the same probability, so that a record of a short one is drawn more often.

        Args:
            batch_size: records in a batch: that of the buffer.
            **sampler_kwargs: more arguments of the `SliceSampler`; its slices are whole.

        Returns:
            The transform, which follows those that were before this one in the environment, and the sampler.

        Raises:
            InvalidArgumentError: an argument of the sampler that would change its slices.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
            >>> stack = CatFrames(N=3, dim=-1, in_keys=["x"])
            >>> transform, sampler = stack.make_rb_transform_and_sampler(batch_size=2)
            >>> buffer = ReplayBuffer(
            ...     storage=LazyTensorStorage(10), sampler=sampler, transform=transform, batch_size=2
            ... )
            >>> x, done = torch.arange(5.0)[:, None], torch.zeros(5, 1, dtype=torch.bool)
            >>> index = buffer.extend(TensorDict({"x": x, "next": {"x": x + 1, "done": done}}, [5]))
            >>> batch = buffer.sample()
            >>> batch["x"].shape, bool((batch["next", "x"] == batch["x"] + 1).all())
            (torch.Size([2, 3]), True)
        """
        positive("batch_size", batch_size)
        taken = sorted({"num_slices", "slice_len", "span", "pad", "pad_output"} & sampler_kwargs.keys())
        if taken or not sampler_kwargs.get("strict_length", True):
            raise InvalidArgumentError(
                f"sampler_kwargs: slices are whole and of N={self.N} steps; leave out {taken or ['strict_length']}"
            )
        in_keys, out_keys = [*self.in_keys], [*self.out_keys]
        if not any(as_path(key)[0] == "next" for key in in_keys):
            in_keys += [("next", *as_path(key)) for key in in_keys]
            out_keys += [("next", *as_path(key)) for key in out_keys]
        transform = _OfSlices(self.N, self.dim, in_keys, out_keys, self.padding, self.padding_value)
        transform.reset_key, transform.done_key = self.reset_key, self.done_key
        return transform, SliceSampler(slice_len=self.N, **sampler_kwargs).count_slices()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stack a batch ``[*B, T]`` that is read; returned as it is with `as_inverse`."""
        return tensordict if self.as_inverse else self.unfolded(tensordict)

    def _inv_call(self, tensordict: Record) -> Record:
        if not self.as_inverse or self.parent is not None:
            return tensordict
        return self.unfolded(tensordict)

    def unfolded(self, batch: TensorDictBase) -> TensorDictBase:
        """Stack the observations of whole steps, in place.

        Args:
            batch: ``[*B, T]``.

        Raises:
            SchemaError: if there is no time dimension.
        """
        if batch.ndim == 0:
            raise SchemaError("CatFrames: expected steps [*B, T], got a single one; sample slices")
        ends = trajectory_ends(batch, done_key=self.done_key)
        age = _age(ends)  # (*B, T) int64
        made: dict[NestedKey, Tensor] = {}
        for in_key, out_key in self.pairs():
            value = batch.get(in_key, None)
            if value is None:
                if self.missing_tolerance:
                    continue
                raise missing_key(self, in_key, batch)
            path = as_path(in_key)
            if path[0] == "next":
                root = batch.get(path[1:], None)
                if root is None:
                    raise MissingArgumentError(
                        f"CatFrames: {in_key!r} needs {path[1:]!r} in the batch as well"
                    )
                frames = [value, *self._earlier(root, age, self.N - 1)]
            else:
                frames = self._earlier(value, age, self.N)
            made[out_key] = torch.cat(frames[::-1], self.dim)
        for out_key, stack in made.items():
            batch.set(out_key, stack)
        return batch

    def _earlier(self, value: Tensor, age: Tensor, count: int) -> list[Tensor]:
        """Return the frames of 0, 1, … ``count - 1`` steps before each step of its trajectory, padded."""
        time = age.ndim - 1
        position = torch.arange(age.shape[-1], device=age.device).expand(age.shape)
        frames = []
        for back in range(count):
            index = (position - age.clamp(max=back)).to(value.device)
            shaped = index.reshape((*index.shape, *[1] * (value.ndim - index.ndim)))
            frame = value.gather(time, shaped.expand((*index.shape, *value.shape[index.ndim :])))
            if self.padding == "constant":
                young = (age < back).to(value.device)
                frame = frame.masked_fill(young.reshape(shaped.shape), self.padding_value)
            frames.append(frame)
        return frames


class _OfSlices(CatFrames):
    """Stacks whole slices of N steps, and leaves of each its last step."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the last steps of the slices of a flat batch, ``[n * N]``, as ``[n]``."""
        stacked = super().forward(tensordict.reshape(-1, self.N))
        return stacked[:, -1].contiguous()


def _age(ends: Tensor) -> Tensor:
    """Return how many steps of its trajectory piece come before each step, ``[*B, T]`` int64."""
    length = ends.shape[-1]
    position = torch.arange(length, device=ends.device).expand(ends.shape)
    begins = torch.zeros_like(position)
    begins[..., 1:] = torch.where(ends[..., :-1], position[..., 1:], 0)
    return position - begins.cummax(-1).values


_MODES = ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
_GREY = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in ITU-R BT.601 luma."""


class _OfImages(EntryTransform):
    """Maps images."""

    on_host = False

    def __init__(self, in_keys: Keys | None = None, out_keys: Keys | None = None) -> None:
        super().__init__(list(PIXELS) if in_keys is None else in_keys, out_keys)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        out = mapped(spec, self._apply_transform)
        if isinstance(spec, Bounded) and spec.space.common is not None:
            # Averages and selections of numbers between two bounds stay between them.
            return Bounded(*spec.space.common, shape=out.shape, device=spec.device, dtype=out.dtype)
        return out


class ToTensorImage(_OfImages):
    """Turns ``(..., H, W, C)`` images into ``(..., C, H, W)`` ones; uint8 becomes a float from 0 to 1.

    Args:
        from_int: whether numbers are divided by 255; None for doing that to integers.
        unsqueeze: whether a single image, ``(H, W, C)``, gets a first dimension of size 1; batches of images have one.
        dtype: dtype of the result; None for torch's default dtype.
        in_keys: images; None for ``["pixels"]``.
        out_keys: where the results stand; None for in place.
        shape_tolerant: whether images whose channels stand first already (1 or 3 of them, and the last dimension
            another number) stay in that order.
    """

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.from_int, self.unsqueeze, self.shape_tolerant = from_int, unsqueeze, shape_tolerant
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3:
            raise SchemaError(f"ToTensorImage: expected (..., H, W, C), got shape {tuple(value.shape)}")
        first = self.shape_tolerant and value.shape[-3] in (1, 3) and value.shape[-1] not in (1, 3)
        integers = not value.dtype.is_floating_point
        ordered = value if first else value.movedim(-1, -3)
        out = ordered.to(self.dtype, memory_format=torch.contiguous_format, copy=True)
        if integers if self.from_int is None else self.from_int:
            out.div_(255)
        return out.unsqueeze(0) if self.unsqueeze and out.ndim == 3 else out

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        out = mapped(spec, self._apply_transform)
        integers = spec.dtype is not None and not spec.dtype.is_floating_point
        if integers if self.from_int is None else self.from_int:
            return Bounded(0.0, 1.0, out.shape, spec.device, self.dtype)
        return super()._leaf(spec)


class GrayScale(_OfImages):
    """Turns ``(..., 3, H, W)`` images into ``(..., 1, H, W)`` ones; integers stay integers, rounded.

    Args:
        in_keys: images; None for ``["pixels"]``.
        out_keys: where the results stand; None for in place.
    """

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3 or value.shape[-3] != 3:
            raise SchemaError(
                f"GrayScale: expected three channels, (..., 3, H, W), got shape {tuple(value.shape)}; "
                "put ToTensorImage before it"
            )
        dtype = value.dtype if value.dtype.is_floating_point else torch.float32
        image = value.to(dtype)
        red, green, blue = image.unbind(-3)
        grey = (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2]).unsqueeze(-3)
        return grey if value.dtype is dtype else grey.round_().to(value.dtype)


class Resize(_OfImages):
    """Interpolates ``(..., C, H, W)`` images to another size; integers stay integers, rounded and clipped.

    Args:
        w: width.
        h: height; None for a square.
        interpolation: ``"bilinear"``, ``"nearest"``, ``"nearest-exact"``, ``"bicubic"`` or ``"area"``, as in
            `torch.nn.functional.interpolate`, without anti-aliasing.
        in_keys: images; None for ``["pixels"]``.
        out_keys: where the results stand; None for in place.
    """

    shows = ("w", "h", "interpolation")

    def __init__(
        self,
        w: int,
        h: int | None = None,
        interpolation: str = "bilinear",
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        mode = interpolation.value if isinstance(interpolation, Enum) else interpolation
        if mode not in _MODES:
            raise InvalidArgumentError(f"interpolation: expected one of {_MODES}, got {interpolation!r}")
        self.w, self.h, self.interpolation = positive("w", w), positive("h", w if h is None else h), mode

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3:
            raise SchemaError(f"Resize: expected (..., C, H, W), got shape {tuple(value.shape)}")
        if value.shape[-2:] == (self.h, self.w):
            return value
        floating = value.dtype.is_floating_point
        image = value if floating else value.to(torch.float32)
        flat = image.reshape(-1, *image.shape[-3:])
        smooth = self.interpolation in ("bilinear", "bicubic")
        out = interpolate(
            flat, (self.h, self.w), mode=self.interpolation, align_corners=False if smooth else None
        )
        if not floating:
            limits = torch.iinfo(value.dtype)
            out = out.round_().clamp_(limits.min, limits.max).to(value.dtype)
        return out.reshape(*value.shape[:-2], self.h, self.w)


class Crop(_OfImages):
    """Cuts a rectangle out of ``(..., C, H, W)`` images.

    Args:
        w: width.
        h: height; None for a square.
        top: its first row.
        left: its first column.
        in_keys: images; None for ``["pixels"]``.
        out_keys: where the results stand; None for in place.

    Raises:
        SchemaError: if it doesn't lie inside the image.
    """

    shows = ("w", "h")

    def __init__(
        self,
        w: int,
        h: int | None = None,
        top: int = 0,
        left: int = 0,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.w, self.h = positive("w", w), positive("h", w if h is None else h)
        self.top, self.left = top, left

    def _corner(self, value: Tensor) -> tuple[int, int]:
        return self.top, self.left

    def _apply_transform(self, value: Tensor) -> Tensor:
        top, left = self._corner(value)
        height, width = value.shape[-2:]
        if top < 0 or left < 0 or top + self.h > height or left + self.w > width:
            raise SchemaError(
                f"{type(self).__name__}: rows {top} to {top + self.h} and columns {left} to {left + self.w} aren't "
                f"inside an image of shape {tuple(value.shape)}"
            )
        return value[..., top : top + self.h, left : left + self.w]

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        return mapped(spec, self._apply_transform, monotone=True)


class CenterCrop(Crop):
    """Cuts the middle out of ``(..., C, H, W)`` images; the arguments are those of `Crop`."""

    def __init__(
        self, w: int, h: int | None = None, in_keys: Keys | None = None, out_keys: Keys | None = None
    ) -> None:
        super().__init__(w, h, in_keys=in_keys, out_keys=out_keys)

    def _corner(self, value: Tensor) -> tuple[int, int]:
        return round((value.shape[-2] - self.h) / 2), round((value.shape[-1] - self.w) / 2)
