"""`ObservationNorm`: an affine map of observations, and how its numbers are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl._util import integer
from gleanrl.data.specs import TensorSpec
from gleanrl.envs.transforms.base import Keys
from gleanrl.envs.transforms.entrywise import EntryTransform, Operation, affine, beside, scaled
from gleanrl.envs.transforms.spec_tools import mapped
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingArgumentError, UnsupportedError


class ObservationNorm(EntryTransform):
    """Maps observations by ``loc + scale * obs``, or by ``(obs - loc) / scale`` with `standard_normal`.

    The second form makes observations with mean `loc` and standard deviation `scale` standard normal; there `scale`
    is at least `eps`. Given in_keys_inv, the inverse map is applied to what goes in.

    Args:
        loc: location; a number or a tensor that broadcasts with the observations; None to find it by `init_stats`.
        scale: scale; likewise.
        in_keys: observations; None for all floating-point ones.
        out_keys: where the results stand; None for in place of `in_keys`.
        in_keys_inv: what the environment reads, the result of the inverse map.
        out_keys_inv: what the user writes; None for the same keys.
        standard_normal: which of the two forms.
        eps: the least scale of the second form.

    Raises:
        MissingArgumentError: at the first use, if loc and scale were neither given nor found.

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
            raise MissingArgumentError("ObservationNorm: in_keys are needed outside an environment")
        spec = self.parent.full_observation_spec
        floating = [
            k for k in spec.keys(True, True) if spec[k].dtype is not None and spec[k].dtype.is_floating_point
        ]
        return [as_key(as_path(key)) for key in floating]

    @property
    def initialized(self) -> bool:
        """Whether loc and scale are known."""
        return self.loc is not None

    def init_stats(
        self,
        num_iter: int,
        reduce_dim: int | tuple[int, ...] = 0,
        cat_dim: int | None = None,
        key: NestedKey | None = None,
        keep_dims: tuple[int, ...] | None = None,
    ) -> None:
        """Find loc and scale from random steps of the environment, after which mean 0 and deviation 1 come out.

        Args:
            num_iter: how many steps, at least 2; episodes that end are followed by new ones.
            reduce_dim: dimensions to average over, of the data with time at `cat_dim`.
            cat_dim: where time stands in the data; None for `reduce_dim`, which then must be one number.
            key: which observation; None for the only one of `in_keys`.
            keep_dims: of the dimensions in `reduce_dim`, those that stay, with size 1.

        Raises:
            UnsupportedError: if loc and scale are known already, or the transform is in no environment.
        """
        if self.initialized:
            raise UnsupportedError(f"init_stats: loc and scale are known already: {self.loc}, {self.scale}")
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
                    "init_stats: cat_dim is needed with several dimensions in reduce_dim"
                )
            cat_dim = reduce_dim
        parent = self.parent
        data = parent.rollout(num_iter, break_when_any_done=False).get(key)
        data = data.movedim(len(parent.batch_size), cat_dim)
        dims = [d % data.ndim for d in ((reduce_dim,) if isinstance(reduce_dim, int) else reduce_dim)]
        loc, scale = data.mean(dims, keepdim=True), data.std(dims, keepdim=True)
        kept = {d % data.ndim for d in keep_dims or ()}
        for dim in sorted(set(dims) - kept, reverse=True):
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
        loc, scale = beside(self, "loc", value), beside(self, "scale", value)  # read at every step
        if loc is None or scale is None:
            raise MissingArgumentError(
                "ObservationNorm: loc and scale aren't known; pass them or call init_stats"
            )
        return loc, scale

    def _apply_transform(self, value: Tensor) -> Tensor:
        return scaled(value, *self._numbers(value), self.standard_normal)

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return the two operations, where the numbers are known and of the same dtype."""
        return affine(self._buffers, self.standard_normal, dtype)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return scaled(value, *self._numbers(value), not self.standard_normal)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        # Without numbers yet: unbounded.
        function = self._apply_transform if self.initialized else torch.clone
        return mapped(spec, function, monotone=self.initialized)

    def extra_repr(self) -> str:
        """Show the numbers and the keys."""
        keys = self._in_keys if self._in_keys is not None else "all"
        return f"loc={self.loc}, scale={self.scale}, standard_normal={self.standard_normal}, in_keys={keys}"


def _number(value: Any) -> Tensor:
    if isinstance(value, nn.Parameter):
        raise InvalidTypeError("loc and scale: expected numbers or tensors, got a Parameter; detach it")
    return value.clone() if isinstance(value, Tensor) else torch.tensor(float(value))
