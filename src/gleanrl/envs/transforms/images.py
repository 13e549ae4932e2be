"""Transforms of images: `CatFrames`, `ToTensorImage`, `GrayScale`, `Resize`, `CenterCrop`, `Crop`.

Images are ``(..., channels, height, width)``. Only `ToTensorImage` takes ``(..., height, width, channels)``.
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
from gleanrl.data.replay_buffers import RandomSampler, SliceSampler
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.frame_history import FRAMES, frames_before, with_frames
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
    """Concatenates each observation with the N - 1 observations before it in its episode, the newest last.

    At the beginning of an episode, missing frames are filled by the first observation or by a constant. The stack below
    ``"next"`` of a step that ends an episode includes the observation that ended it.

    In a buffer `forward` stacks the sampled batches (with `as_inverse` the written ones). They hold whole steps, shape
    ``[*B, T]`` with time last. A stack never crosses the end of a trajectory, as
    `gleanrl.data.trajectories.trajectory_ends` defines it. It never reaches back before the batch: a trajectory that
    began earlier is filled as if it began there. Keys of next observations begin with ``"next"``. Their stacks continue
    the root's stacks, so the root's key must be in the batch too.

    Args:
        N: number of observations, at least 1.
        dim: the dimension to concatenate along, negative.
        in_keys: observations; None for ``["pixels"]``.
        out_keys: keys of the results; None for in place.
        padding: ``"same"`` repeats the first observation, ``"constant"`` fills with `padding_value`.
        padding_value: see `padding`.
        as_inverse: whether a buffer's writes are stacked instead of its samples.
        **keys: `reset_key` and `done_key`. The first is the ``"_reset"`` mask that begins episodes; None for any of the
            environment's. The second is the only flag that ends trajectories in a buffer, without ``"next"``; None for
            all flags.

    Raises:
        InvalidArgumentError: for a bad `N`, `dim` or `padding`, or an unknown keyword.
        SchemaError: at use, if ``dim=-3`` would stack the rows of bytes with 1 or 3 channels last.
        UnsupportedError: at a step before the first reset.
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
        """Return fields of the stacks, by the keys of their frames."""
        spec = self.surroundings().full_observation_spec
        return {key: Field(self._leaf(spec[key]).shape, spec[key].dtype) for key, _ in self.pairs()}

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for in_key, out_key in self.pairs():
            frame = next_tensordict.get(in_key)
            stack = self.carried_value(in_key, frame.device)
            if stack is None:
                raise UnsupportedError("CatFrames: reset the environment before the first step")
            size = frame.shape[self.dim]
            stack = torch.cat([stack.narrow(self.dim, size, (self.N - 1) * size), frame], self.dim)
            self.carried[in_key] = stack
            next_tensordict.set(out_key, stack)
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows = self.reset_mask(tensordict)
        for in_key, out_key in self.pairs():
            frame = tensordict_reset.get(in_key)
            stack = torch.cat([*[self._pad(frame)] * (self.N - 1), frame], self.dim)
            stack = self.renewed(in_key, stack, None if rows is None else trailing(rows, stack))
            tensordict_reset.set(out_key, stack)
        return tensordict_reset

    def _pad(self, first: Tensor) -> Tensor:
        return first if self.padding == "same" else torch.full_like(first, self.padding_value)

    def _check_layout(self, frame: Tensor) -> None:
        """Refuse bytes with channels last, whose rows ``dim=-3`` would stack. Other values may have any layout."""
        size = frame.shape[-3:]
        if self.dim == -3 and frame.dtype == torch.uint8 and len(size) == 3:
            if min(size[:2]) > 4 and size[2] in (1, 3):
                raise SchemaError(
                    f"CatFrames: expected (..., C, H, W) for dim=-3, got shape {tuple(frame.shape)}; write dim=-1, or "
                    f"{_ORDER}"
                )

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        zero = spec.zero()
        self._check_layout(zero)
        shape = torch.cat([zero] * self.N, self.dim).shape
        if isinstance(spec, Bounded):
            low, high = (torch.cat([bound] * self.N, self.dim) for bound in spec.bounds)
            if self.padding == "constant":
                low, high = low.clamp(max=self.padding_value), high.clamp(min=self.padding_value)
            return Bounded(low, high, shape, spec.device, spec.dtype)
        return Unbounded(shape, device=spec.device, dtype=spec.dtype)

    # ---------------------------------------------------------------- buffer
    def make_rb_transform_and_sampler(
        self, batch_size: int, *, sampler: Sampler | None = None, **sampler_kwargs: Any
    ) -> tuple[CatFrames, Sampler]:
        """Return a transform and a sampler for a buffer that stores single frames and serves stacks.

        Each stored step is drawn as the sampler decides, and gets its root and its next observation stacked with the
        frames before them. Stacks are padded at the first step of a trajectory, as in an environment. If the ring has
        overwritten frames of a stack, its step isn't drawn: at most the N - 1 oldest steps of each stream.

        Args:
            batch_size: number of records in a batch, as in the buffer.
            sampler: a `RandomSampler`, `SamplerWithoutReplacement` or `PrioritizedSampler`, which the call changes.
                None for a `RandomSampler`, whose `seed` may be passed.
            **sampler_kwargs: where trajectories end: `end_key`, `end_keys`, `traj_key`, and `ends` or `trajectories`
                with `cache_values`, as in `SliceSampler`.

        Returns:
            The transform and the sampler. If the environment has transforms before this one, put them before the
            returned transform in the buffer.

        Raises:
            InvalidArgumentError: an argument describes slices, or a `seed` was passed with a sampler.
            UnsupportedError: the sampler draws no transitions.

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
            >>> batch["x"].shape, bool((batch["next", "x"][:, -1] == batch["x"][:, -1] + 1).all())
            (torch.Size([2, 3]), True)
        """
        positive("batch_size", batch_size)
        reserved = sorted(_OF_SLICES & sampler_kwargs.keys())
        if reserved:
            raise InvalidArgumentError(
                f"sampler_kwargs: CatFrames samples single steps, not slices; leave out {reserved}"
            )
        seed = sampler_kwargs.pop("seed", None)
        if sampler is not None and seed is not None:
            raise InvalidArgumentError("seed: the sampler was passed too; give the seed to its constructor")
        in_keys, out_keys = [*self.in_keys], [*self.out_keys]
        roots = [key for key in in_keys if as_path(key)[0] != "next"]
        if len(roots) == len(in_keys):
            in_keys += [("next", *as_path(key)) for key in in_keys]
            out_keys += [("next", *as_path(key)) for key in out_keys]
        transform = _OfSteps(self.N, self.dim, in_keys, out_keys, self.padding, self.padding_value)
        sampler = RandomSampler(seed) if sampler is None else sampler
        if self.N > 1:
            if self.done_key is not None and not {"end_key", "end_keys"} & sampler_kwargs.keys():
                sampler_kwargs["end_key"] = ("next", *as_path(self.done_key))
            table = SliceSampler(slice_len=1, **sampler_kwargs).episode_table
            padding_value = None if self.padding == "same" else self.padding_value
            with_frames(sampler, roots, self.N - 1, padding_value, table)
        return transform, sampler

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stack a sampled batch ``[*B, T]`` in place, and return it; with `as_inverse` return it unchanged."""
        return tensordict if self.as_inverse else self.unfolded(tensordict)

    def _inv_call(self, tensordict: Record) -> Record:
        if not self.as_inverse or self.parent is not None:
            return tensordict
        return self.unfolded(tensordict)

    def unfolded(self, batch: TensorDictBase) -> TensorDictBase:
        """Stack the observations of whole steps, in place, and return the batch.

        Each stack gathers frames along time. The index of a frame is clamped to the first step of its trajectory piece,
        which repeats the first observation. All stacks are computed before the first is set, because next observations
        read the single frames of the root.

        Args:
            batch: ``[*B, T]``, time last.

        Raises:
            SchemaError: if `batch` has no time dimension.
            MissingKeyError: if a key is absent, unless that is tolerated.
            MissingArgumentError: if a next observation has no root observation in the batch.
        """
        if batch.ndim == 0:
            raise SchemaError(
                "CatFrames: expected a batch of steps [*B, T], got a single step; sample slices"
            )
        ends = trajectory_ends(batch, done_key=self.done_key)
        age = _age(ends)  # (*B, T) int64
        made: dict[NestedKey, Tensor] = {}
        for in_key, out_key in self.pairs():
            value = batch.get(in_key, None)
            if value is None:
                if self.missing_tolerance:
                    continue
                raise missing_key(self, in_key, batch)
            self._check_layout(value)
            path = as_path(in_key)
            if path[0] == "next":
                root = batch.get(path[1:], None)
                if root is None:
                    raise MissingArgumentError(
                        f"CatFrames: key {path[1:]!r} not found; {in_key!r} needs the root observation in the batch "
                        "as well"
                    )
                frames = [value, *self._earlier(root, age, self.N - 1)]
            else:
                frames = self._earlier(value, age, self.N)
            made[out_key] = torch.cat(frames[::-1], self.dim)
        for out_key, stack in made.items():
            batch.set(out_key, stack)
        return batch

    def _earlier(self, value: Tensor, age: Tensor, count: int) -> list[Tensor]:
        """Return for 0, 1, … ``count - 1`` the frames that many steps earlier in the trajectory, padded."""
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


class _OfSteps(CatFrames):
    """Stacks sampled steps with the frames that the sampler drew with them."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stack a sampled batch ``[n]`` in place, remove its earlier frames, and return it.

        Raises:
            UnsupportedError: the batch wasn't sampled, so it carries no earlier frames.
        """
        made: dict[NestedKey, Tensor] = {}
        for in_key, out_key in self.pairs():
            path = as_path(in_key)
            root = path[1:] if path[0] == "next" else path
            newest = [tensordict.get(key, None) for key in dict.fromkeys((root, path))]
            if any(frame is None for frame in newest):
                raise missing_key(self, in_key if newest[0] is not None else root, tensordict)
            self._check_layout(newest[0])
            frames = frames_before(tensordict, root)
            if frames is None and self.N > 1:
                raise UnsupportedError(
                    "CatFrames: only sampled batches carry the frames before each step; read single frames from "
                    "buffer.storage"
                )
            earlier = [] if frames is None else [*frames.unbind(1)]
            made[out_key] = torch.cat([*earlier, *newest][-self.N :], self.dim)
        tensordict.pop(FRAMES, None)
        for out_key, stack in made.items():
            tensordict.set(out_key, stack)
        return tensordict


def _age(ends: Tensor) -> Tensor:
    """Return for each step the number of steps before it in its trajectory piece, ``[*B, T]`` int64."""
    length = ends.shape[-1]
    position = torch.arange(length, device=ends.device).expand(ends.shape)
    begins = torch.zeros_like(position)
    begins[..., 1:] = torch.where(ends[..., :-1], position[..., 1:], 0)
    return position - begins.cummax(-1).values


_OF_SLICES = {"num_slices", "slice_len", "strict_length", "span", "pad", "truncated_key", "init_key"}

_MODES = ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
_ORDER = "put PermuteTransform((-1, -3, -2)), which keeps integers, or ToTensorImage before it"
_GREY = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in ITU-R BT.601 luma."""


class _ImageTransform(EntryTransform):
    """Base class for transforms of images."""

    on_host = False

    def __init__(self, in_keys: Keys | None = None, out_keys: Keys | None = None) -> None:
        super().__init__(list(PIXELS) if in_keys is None else in_keys, out_keys)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        out = mapped(spec, self._apply_transform)
        if isinstance(spec, Bounded) and spec.space.common is not None:
            # All elements have the same bounds; weighted means and selections of elements stay within them.
            return Bounded(*spec.space.common, shape=out.shape, device=spec.device, dtype=out.dtype)
        return out


class ToTensorImage(_ImageTransform):
    """Converts ``(..., H, W, C)`` images to ``(..., C, H, W)``, and integers to floats from 0 to 1.

    Args:
        from_int: whether values are divided by 255; None divides integers only.
        unsqueeze: whether a single image, ``(H, W, C)``, gets a leading dimension of size 1.
        dtype: dtype of the result; None for torch's default dtype.
        in_keys: images; None for ``["pixels"]``.
        out_keys: keys of the results; None for in place.
        shape_tolerant: whether images that are channels-first already keep their order. These have 1 or 3 channels, and
            a last dimension of another size.

    Raises:
        SchemaError: at use, if an image has fewer than three dimensions.
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


class GrayScale(_ImageTransform):
    """Converts ``(..., 3, H, W)`` images to ``(..., 1, H, W)``. Results for integer images are rounded.

    Args:
        in_keys: images; None for ``["pixels"]``.
        out_keys: keys of the results; None for in place.

    Raises:
        SchemaError: at use, if an image doesn't have three channels.
    """

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3 or value.shape[-3] != 3:
            raise SchemaError(
                f"GrayScale: expected three channels, (..., 3, H, W), got shape {tuple(value.shape)}; {_ORDER}"
            )
        dtype = value.dtype if value.dtype.is_floating_point else torch.float32
        image = value.to(dtype)
        red, green, blue = image.unbind(-3)
        grey = (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2]).unsqueeze(-3)
        return grey if value.dtype is dtype else grey.round_().to(value.dtype)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        # The sum of the weights is 0.9999, so results are nearer to 0 than a weighted mean. Bounds around 0 still hold.
        common = spec.space.common if isinstance(spec, Bounded) else None
        around_zero = common is not None and common[0] <= 0 <= common[1]
        return super()._leaf(spec) if around_zero else mapped(spec, self._apply_transform, monotone=True)


class Resize(_ImageTransform):
    """Interpolates ``(..., C, H, W)`` images to another size. Results for integer images are rounded and clipped.

    Args:
        w: width.
        h: height; None for a square.
        interpolation: ``"bilinear"``, ``"nearest"``, ``"nearest-exact"``, ``"bicubic"`` or ``"area"``, as in
            `torch.nn.functional.interpolate`, without anti-aliasing.
        in_keys: images; None for ``["pixels"]``.
        out_keys: keys of the results; None for in place.

    Raises:
        InvalidArgumentError: for another `interpolation`, or a bad `w` or `h`.
        SchemaError: at use, if an image has fewer than three dimensions, or channels last: 1 or 3 columns, and more
            than 4 channels.
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
        if value.ndim < 3 or (value.shape[-3] > 4 and value.shape[-1] in (1, 3)):
            raise SchemaError(f"Resize: expected (..., C, H, W), got shape {tuple(value.shape)}; {_ORDER}")
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

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        if self.interpolation == "bicubic":  # it has negative weights, so results exceed the bounds
            return mapped(spec, self._apply_transform)
        return super()._leaf(spec)


class Crop(_ImageTransform):
    """Cuts a rectangle out of ``(..., C, H, W)`` images.

    Args:
        w: width.
        h: height; None for a square.
        top: first row of the rectangle.
        left: first column of the rectangle.
        in_keys: images; None for ``["pixels"]``.
        out_keys: keys of the results; None for in place.

    Raises:
        SchemaError: at use, if the rectangle isn't inside the image.
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
    """Cuts the center out of ``(..., C, H, W)`` images; raises as `Crop` does.

    Args:
        w: width.
        h: height; None for a square.
        in_keys: images; None for ``["pixels"]``.
        out_keys: keys of the results; None for in place.
    """

    def __init__(
        self, w: int, h: int | None = None, in_keys: Keys | None = None, out_keys: Keys | None = None
    ) -> None:
        super().__init__(w, h, in_keys=in_keys, out_keys=out_keys)

    def _corner(self, value: Tensor) -> tuple[int, int]:
        return round((value.shape[-2] - self.h) / 2), round((value.shape[-1] - self.w) / 2)
