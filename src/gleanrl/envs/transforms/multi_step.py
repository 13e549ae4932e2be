"""`MultiStepTransform`: n-step transitions of what is written to a buffer, however it is cut into batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.data.boundaries import cut_trajectories, seams, trajectory_ends
from gleanrl.data.postprocs import MultiStep
from gleanrl.envs.transforms.buffers import BufferTransform
from gleanrl.envs.transforms.keys import Keys, as_keys
from gleanrl.envs.transforms.rows import Record
from gleanrl.errors import InvalidArgumentError, SchemaError
from gleanrl.objects import Leaf, as_entry
from gleanrl.state import Stateful, StateReader, objects_from
from gleanrl.tree import NestedKey, as_key, as_path, flatten, place_of


class MultiStepTransform(BufferTransform):
    """Turns steps that are written into n-step transitions, as `gleanrl.data.postprocs.MultiStep` does.

    The last `n_steps` steps of each write are held back until the next one shows what follows them, so that the result
    doesn't depend on how the data is cut: of T steps in all, ``T - n_steps`` have been written. While there are no
    more than `n_steps`, nothing is written (`extend` returns no index). Rows of the batch are streams, time is the last
    dimension: every write must have the same streams. Resets between two writes are noticed by trajectory ids or flags;
    where there are no ids also by what is written, see `gleanrl.data.boundaries.seams`.

    Args:
        n_steps: how many steps to look ahead; it can be changed between writes.
        gamma: discount of one step.
        reward_keys: rewards, without ``"next"``; None for all that are called so.
        done_key: the only flag below ``"next"`` that ends a trajectory, without ``"next"``; None for every done,
            terminated and truncated, those of groups included. Ids of trajectories count in any case.
        done_keys: several of them.
        mask_key: one more mask of real steps, beside ``("collector", "mask")``.

    Raises:
        InvalidArgumentError: for a bad number, or if it's used in an environment (also a ValueError).
    """

    shows = ("n_steps", "gamma")

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Keys | None = None,
        done_key: NestedKey | None = None,
        done_keys: Keys | None = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        self.gamma = gamma
        self.reward_keys = as_keys("reward_keys", reward_keys)
        self.n_steps = n_steps
        single = [] if done_key is None else [done_key]
        self.done_keys = [*(as_keys("done_key", single) or []), *(as_keys("done_keys", done_keys) or [])]
        self.mask_key = None if mask_key is None else as_key(as_path(mask_key))
        self._held: TensorDictBase | None = None
        self._seams: torch.Tensor | None = (
            None  # which of these steps are the last before a seam, [*B, T] bool
        )

    @property
    def n_steps(self) -> int:
        """How many steps to look ahead."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        MultiStep(self.gamma, n_steps)  # raises for bad numbers
        self._n_steps = n_steps

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a batch that is read as it is."""
        return tensordict

    def _inv_call(self, tensordict: Record) -> Record:
        if tensordict.ndim == 0:  # `add` gives one step after the other
            made = self._inv_call(tensordict.unsqueeze(0))
            if made is not None and len(made) != 1:
                raise SchemaError(
                    f"MultiStepTransform: {len(made)} steps are ready at once, because n_steps was made smaller; use "
                    "extend"
                )
            return None if made is None else made.squeeze(0)
        total, cut = tensordict, torch.zeros(tensordict.batch_size, dtype=torch.bool, device="cpu")
        if self._held is not None:
            if self._held.batch_size[:-1] != tensordict.batch_size[:-1]:
                raise SchemaError(
                    f"MultiStepTransform: expected {tuple(self._held.batch_size[:-1])} streams as before, got a batch "
                    f"of {tuple(tensordict.batch_size)}; time is the last dimension"
                )
            place = place_of(tensordict)
            if place_of(self._held) != place:
                self._held = self._held.to(place)
            total = torch.cat([self._held, tensordict], tensordict.ndim - 1)
            cut = torch.cat([self._seams_of(self._held, tensordict), cut], -1)
        length = total.shape[-1]
        kept = slice(max(length - self.n_steps, 0), length)
        self._held, self._seams = total[..., kept].clone(), cut[..., kept].clone()
        if length <= self.n_steps:
            return None
        return self._post_processed(total, cut)[..., : length - self.n_steps].clone()

    def _seams_of(self, held: TensorDictBase, batch: TensorDictBase) -> torch.Tensor:
        """Return which steps that are held back are the last before a seam, ``[*B, T]`` bool."""
        cut = torch.zeros(held.batch_size, dtype=torch.bool, device="cpu")
        if self._seams is not None and self._seams.shape == held.batch_size:
            cut |= self._seams
        found = seams(held, batch, [] if self.mask_key is None else [self.mask_key])
        if found is not None:
            cut[..., -1] |= found.cpu()
        return cut

    def _post_processed(self, total: TensorDictBase, cut: torch.Tensor) -> TensorDictBase:
        """Return the n-step data of all steps, cut behind some; the last ones look too little ahead."""
        process = MultiStep(self.gamma, self.n_steps, reward_keys=self.reward_keys)
        masks = [] if self.mask_key is None else [self.mask_key]
        keys: list[NestedKey | None] = [*self.done_keys] or [None]
        ends = trajectory_ends(total, done_key=keys[0], mask_keys=masks)
        for key in keys[1:]:
            ends = ends | trajectory_ends(total, done_key=key, mask_keys=masks)
        return process.bounded(total, ends | cut.to(ends.device))

    def end_held(self, ids: Collection[int]) -> set[int]:
        """Mark what is held back of trajectories that nobody goes on with; see `HoldsSteps`."""
        return set() if self._held is None else cut_trajectories(self._held, ids)

    def parts(self) -> dict[str, Stateful[Any]]:
        """Return the steps that are held back."""
        return {"held": _Held(self)}

    def _misplaced(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            "MultiStepTransform works on what is written to a replay buffer, not in an environment; as a collector's "
            "postproc use MultiStep"
        )


@dataclass(frozen=True)
class HeldSteps:
    """Steps that are held back, ``[*B, T]``; without leaves there are none."""

    leaves: Mapping[NestedKey, Leaf]
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...]
    seams: torch.Tensor | None = None
    """Which of them are the last before a seam, ``[*B, T]`` bool; None for none."""


class _Held(Stateful[HeldSteps]):
    """What a `MultiStepTransform` holds back."""

    def __init__(self, transform: MultiStepTransform) -> None:
        self._transform = transform

    def snapshot(self) -> HeldSteps:
        held = self._transform._held
        if held is None:
            return HeldSteps({}, (), ())
        leaves = {as_key(path): leaf.clone() for path, leaf in flatten(held).items()}
        cut = self._transform._seams
        kept = cut.clone() if cut is not None and bool(cut.any()) else None
        return HeldSteps(MappingProxyType(leaves), tuple(held.batch_size), tuple(held.names), kept)

    def parse(self, state: Any) -> HeldSteps:
        reader = StateReader(state, "MultiStepTransform")
        leaves, size, names = (reader.get(name) for name in ("leaves", "batch_size", "names"))
        if not isinstance(size, (list, tuple)) or not all(type(n) is int and n >= 0 for n in size):
            raise reader.wrong("batch_size", "a list of numbers")
        if not isinstance(names, (list, tuple)) or len(names) != len(size):
            raise reader.wrong("names", f"{len(size)} names")
        if not all(name is None or type(name) is str for name in names):
            raise reader.wrong("names", f"{len(size)} names")
        shape = torch.Size(size)
        if not isinstance(leaves, Mapping):
            raise reader.wrong("leaves", "tensors and objects by key")
        try:
            copies = {key: _copied(leaf) for key, leaf in leaves.items()}
        except (KeyError, TypeError, ValueError) as cause:
            raise reader.wrong("leaves", "tensors and objects by key") from cause
        if bool(copies) != bool(shape) or any(c.shape[: len(shape)] != shape for c in copies.values()):
            raise reader.wrong("leaves", f"tensors by key, of batch size {tuple(shape)}")
        cut = None
        if "seams" in reader:  # not in the states of former releases
            cut = reader.optional("seams", lambda name: reader.tensor(name, torch.bool, size))
        return HeldSteps(MappingProxyType(copies), tuple(size), tuple(names), cut)

    def adopt(self, value: HeldSteps) -> None:
        held = None
        if value.leaves:
            names: Any = list(value.names) if any(value.names) else None
            held = TensorDict({}, list(value.batch_size), names=names)
            for key, leaf in value.leaves.items():
                held.set(key, as_entry(leaf.clone()))
        self._transform._held = held
        self._transform._seams = None if value.seams is None else value.seams.clone()


def _copied(leaf: Any) -> Leaf:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else objects_from(leaf)
