"""`ObservationNorm`: an affine map of observations, with parameters that are given or estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl._util import integer
from gleanrl.data.specs import TensorSpec
from gleanrl.envs.transforms.base import Keys
from gleanrl.envs.transforms.entrywise import EntryTransform, Operation, affine, buffer_on_device, scaled
from gleanrl.envs.transforms.spec_tools import mapped
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingArgumentError, UnsupportedError


class ObservationNorm(EntryTransform):
    """Maps observations by ``loc + scale * obs``, or with `standard_normal` by ``(obs - loc) / scale``.

    With `standard_normal`, observations of mean `loc` and standard deviation `scale` get mean 0 and standard deviation
    1. The inverse map is applied to inputs if `in_keys_inv` are given.

    Args:
        loc: location, a number or a tensor that broadcasts with the observations; None to estimate it by `init_stats`.
        scale: scale, a number or a tensor likewise; None to estimate it.
        in_keys: observations; None for all floating-point ones of the environment.
        out_keys: keys of the results; None for in place.
        in_keys_inv: inputs that the environment reads, the results of the inverse map.
        out_keys_inv: keys that the user writes; None for `in_keys_inv`.
        standard_normal: whether to use the second form.
        eps: lower bound of the scale in the second form, and of the deviation in `init_stats`.

    Raises:
        MissingArgumentError: at the first use, if loc and scale were neither given nor estimated. Outside an
            environment, also if `in_keys` weren't given.
        InvalidArgumentError: if only one of loc and scale is given.
        InvalidTypeError: if one of them is a `torch.nn.Parameter`.

    Examples:
        >>> norm = ObservationNorm(loc=1.0, scale=2.0, in_keys=["obs"], standard_normal=True)
        >>> from tensordict import TensorDict
        >>> norm(TensorDict({"obs": torch.tensor([1.0, 5.0])}, []))["obs"]
        tensor([0., 2.])
    """

    on_rows = True
    maps_inputs = True
    late_buffers = ("loc", "scale")

    def __init__(
        self,
        loc: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        standard_normal: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if (loc is None) != (scale is None):
            raise InvalidArgumentError("loc and scale: give both, or neither and call init_stats")
        self.standard_normal = standard_normal
        self.eps = float(eps)
        self.register_buffer("loc", None if loc is None else _number(loc))
        self.register_buffer("scale", None if scale is None else self._scale(_number(scale)))
        self.loc: Tensor | None
        self.scale: Tensor | None

    def _scale(self, scale: Tensor) -> Tensor:
        return scale.clamp_min(self.eps) if self.standard_normal else scale

    def _default_in_keys(self) -> list[NestedKey]:
        if self.parent is None:
            raise MissingArgumentError(
                "ObservationNorm: in_keys: expected keys outside an environment, got None"
            )
        spec = self.parent.full_observation_spec
        floating = [
            k for k in spec.keys(True, True) if spec[k].dtype is not None and spec[k].dtype.is_floating_point
        ]
        return [as_key(as_path(key)) for key in floating]

    @property
    def initialized(self) -> bool:
        """Whether loc and scale are known: given, estimated or loaded."""
        return self.loc is not None

    def init_stats(
        self,
        num_iter: int,
        reduce_dim: int | tuple[int, ...] = 0,
        cat_dim: int | None = None,
        key: NestedKey | None = None,
        keep_dims: tuple[int, ...] | None = None,
    ) -> None:
        """Estimate loc and scale from random steps of the environment, which is reset first.

        They are estimated from one observation and used for all `in_keys`. The results are such that these observations
        get mean 0 and standard deviation 1, in either form. The steps are taken in the parent environment, so
        transforms before this one are included. Without `standard_normal` the standardizing map is rewritten as
        ``loc + scale * obs``.

        Args:
            num_iter: number of steps, at least 2; an episode that ends is followed by a new one.
            reduce_dim: dimensions to average over. They count in the data with time moved to `cat_dim`.
            cat_dim: position of the time dimension in the data. None for `reduce_dim`, which then must be an integer.
            key: key of the observation; None if there is only one of `in_keys`.
            keep_dims: dimensions in `reduce_dim` that remain, with size 1.

        Raises:
            UnsupportedError: if loc and scale are known already, or the transform is in no environment.
            MissingArgumentError: if `key` or `cat_dim` is needed and not given.
            InvalidArgumentError: if the statistics aren't finite; loc and scale then stay unknown.
        """
        if self.initialized:
            raise UnsupportedError(
                f"init_stats: loc and scale are known already: {self.loc}, {self.scale}; construct the transform "
                "without them"
            )
        if self.parent is None:
            raise UnsupportedError("init_stats: put the transform into a TransformedEnv first")
        num_iter = integer("num_iter", num_iter, 2)
        if key is None:
            if len(self.in_keys) != 1:
                raise MissingArgumentError(f"init_stats: key: expected one of {self.in_keys}, got None")
            key = self.in_keys[0]
        if cat_dim is None:
            if not isinstance(reduce_dim, int):
                raise MissingArgumentError(
                    "init_stats: cat_dim: expected a dimension, got None; it is needed if reduce_dim isn't an integer"
                )
            cat_dim = reduce_dim
        parent = self.parent
        data = parent.rollout(num_iter, break_when_any_done=False).get(key)
        data = data.movedim(len(parent.batch_size), cat_dim)
        dims = [d % data.ndim for d in ((reduce_dim,) if isinstance(reduce_dim, int) else reduce_dim)]
        loc, scale = data.mean(dims, keepdim=True), data.std(dims, keepdim=True)
        retained = {d % data.ndim for d in keep_dims or ()}
        for dim in sorted(set(dims) - retained, reverse=True):
            loc, scale = loc.squeeze(dim), scale.squeeze(dim)
        scale = scale.clamp_min(self.eps)
        if not self.standard_normal:
            loc, scale = -loc / scale, 1 / scale
        if not bool(loc.isfinite().all() & scale.isfinite().all()):
            raise InvalidArgumentError(f"init_stats: the statistics of {key!r} aren't finite: {loc}, {scale}")
        self.loc, self.scale = loc, scale
        if self.holder is not None:
            self.holder.empty_cache()

    def _numbers(self, value: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = (
            buffer_on_device(self, "loc", value),
            buffer_on_device(self, "scale", value),
        )  # read at every step
        if loc is None or scale is None:
            raise MissingArgumentError(
                "ObservationNorm: expected loc and scale, got None; pass them or call init_stats"
            )
        return loc, scale

    def _apply_transform(self, value: Tensor) -> Tensor:
        return scaled(value, *self._numbers(value), self.standard_normal)

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return the two operations if loc and scale are known and have `dtype`, else None."""
        return affine(self._buffers, self.standard_normal, dtype)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return scaled(value, *self._numbers(value), not self.standard_normal)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        # While loc and scale aren't known, the result has an unbounded spec.
        function = self._apply_transform if self.initialized else torch.clone
        return mapped(spec, function, monotone=self.initialized)

    def extra_repr(self) -> str:
        """Show loc, scale, the form and the keys."""
        keys = self._in_keys if self._in_keys is not None else "all"
        return f"loc={self.loc}, scale={self.scale}, standard_normal={self.standard_normal}, in_keys={keys}"


def _number(value: Any) -> Tensor:
    if isinstance(value, nn.Parameter):
        raise InvalidTypeError("loc and scale: expected numbers or tensors, got a Parameter; detach it")
    return value.clone() if isinstance(value, Tensor) else torch.tensor(float(value))
