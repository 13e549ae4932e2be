"""Transforms of images: `ToTensorImage`, `GrayScale`, `Resize`, `CenterCrop`, `Crop`.

Images are ``(..., channels, height, width)``, but for what `ToTensorImage` takes: ``(..., height, width, channels)``.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gleanrl.arguments import positive
from gleanrl.data.specs import Bounded, TensorSpec
from gleanrl.envs.transforms.keys import Keys
from gleanrl.envs.transforms.mapping import EntryTransform
from gleanrl.envs.transforms.shapes import PIXELS
from gleanrl.envs.transforms.spec_tools import mapped
from gleanrl.errors import InvalidArgumentError, SchemaError

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
