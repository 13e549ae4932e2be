"""Transforms for replay buffers only.

`Reward2GoTransform`, `BurnInTransform`, `RandomCropTensorDict`, and `MultiStepTransform` for n-step transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from gleanrl._arrays.ragged import Leaf, as_entry
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path, batch_device, flatten
from gleanrl._rollout.loop import with_gradients
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl._state.state import Stateful, StateReader, objects_from
from gleanrl._util import integer, non_negative, positive
from gleanrl.data.postprocs import MultiStep, discounted_sum
from gleanrl.data.specs import Composite
from gleanrl.data.trajectories import cut_trajectories, seams, trajectory_ends
from gleanrl.envs.transforms.base import Keys, Transform, as_keys, missing_key
from gleanrl.envs.transforms.row_view import Record
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingArgumentError, SchemaError


class BufferTransform(Transform):
    """Base class of transforms that work in replay buffers only.

    Raises:
        InvalidArgumentError: if the transform is used in an environment (also a ValueError).
    """

    def set_container(self, container: Any) -> None:
        """Put the transform into a `Compose`; an environment raises."""
        if not isinstance(container, Transform):
            raise self._misplaced()
        super().set_container(container)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Raise: only an environment calls this."""
        raise self._misplaced()

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        raise self._misplaced()

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        raise self._misplaced()

    def _misplaced(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{type(self).__name__} works in replay buffers only, not in an environment; pass it to a replay buffer"
        )


class Reward2GoTransform(BufferTransform):
    """Replaces the rewards of written batches by discounted rewards to go.

    Each sum ends with the trajectory. If the trajectory continues after the batch, it ends with the batch. Rewards are
    ``[*B, T, 1]``. The batch size may leave T out, except for groups of agents, ``[*B, T, n_agents, 1]``.

    Args:
        gamma: discount of one step.
        in_keys: rewards; None for ``[("next", "reward")]``.
        out_keys: keys of the sums; None for in place.
        done_key: the done flag that ends trajectories, with or without its leading ``"next"``; None for all flags.

    Raises:
        SchemaError: at a write, if a row of the batch has no end of a trajectory, or rewards aren't floating-point
            (also a RuntimeError).
    """

    def __init__(
        self,
        gamma: float | Tensor = 1.0,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        done_key: NestedKey | None = ("next", "done"),
    ) -> None:
        super().__init__([("next", "reward")] if in_keys is None else in_keys, out_keys)
        self.gamma = float(gamma)
        path = None if done_key is None else as_path(done_key)
        self.done_key = None if path is None else as_key(path[1:] if path[0] == "next" else path)
        self.pairs()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a sampled batch unchanged."""
        return tensordict

    def _inv_call(self, tensordict: Record) -> Record:
        done = tensordict.get(("next", *as_path(self.done_key or "done")))
        steps = tensordict
        grouped = isinstance(self.done_key, tuple)
        if tensordict.ndim == done.ndim - 2 and not grouped:  # records hold whole trajectories
            steps = TensorDict({"next": tensordict.get("next").clone(recurse=False)}, tensordict.batch_size)
            steps.batch_size = steps["next"].batch_size = done.shape[:-1]
        ends = trajectory_ends(steps, done_key=self.done_key)
        rows = done.reshape(*steps.batch_size, -1).any(-1)
        if not bool(rows.any(-1).all()):
            raise SchemaError(
                "Reward2GoTransform: expected an end of a trajectory in each row of the batch, got a row with no end; "
                "write whole trajectories, time last"
            )
        for in_key, out_key in self.pairs():
            reward = tensordict.get(in_key, None)
            if reward is None:
                raise missing_key(self, in_key, tensordict)
            tensordict.set(out_key, discounted_sum(reward, ends, self.gamma))
        return tensordict


class BurnInTransform(BufferTransform):
    """Runs recurrent modules over the first steps of each sampled sequence, and drops these steps.

    The resulting state, computed without gradients, becomes the state at the first remaining step.

    Args:
        modules: TensorDict modules that map ``[B, T]`` sequences and write their new state below ``"next"``.
        burn_in: number of steps to run and drop.
        out_keys: keys of the states, without ``"next"``; None for all keys that the modules both read and write below
            ``"next"``.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module] | nn.Module,
        burn_in: int,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        modules = [modules] if isinstance(modules, nn.Module) else list(modules)
        for module in modules:
            if not hasattr(module, "in_keys"):
                raise InvalidTypeError(
                    f"BurnInTransform: expected TensorDict modules, got a {type(module).__name__}: wrap it into a "
                    "TensorDictModule"
                )
        read = {as_path(key) for module in modules for key in module.in_keys}  # type: ignore[union-attr]
        made = [as_path(key) for module in modules for key in module.out_keys]  # type: ignore[union-attr]
        states = [path[1:] for path in made if path[0] == "next" and path[1:] in read]
        super().__init__(
            in_keys=[], out_keys=[as_key(path) for path in states] if out_keys is None else out_keys
        )
        if not self.out_keys:
            raise MissingArgumentError(
                "BurnInTransform: expected modules that read a state and write it below 'next', got none; name out_keys"
            )
        self.modules_list = nn.ModuleList(modules)
        self.burn_in = non_negative("burn_in", burn_in)

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return an empty list: entries aren't mapped one by one."""
        return []

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the steps after the first `burn_in` ones, ``[B, T - burn_in]``.

        Args:
            tensordict: ``[B, T]``; it isn't changed.

        Raises:
            SchemaError: if `tensordict` has no batch of sequences, or T isn't above `burn_in`.
        """
        if self.burn_in == 0:
            return tensordict
        if tensordict.ndim < 2 or tensordict.shape[-1] <= self.burn_in:
            raise SchemaError(
                f"BurnInTransform: expected [B, T] with T above {self.burn_in}, got {tuple(tensordict.shape)}; "
                "sample longer slices, as a batch of sequences"
            )
        early = tensordict[..., : self.burn_in].clone()
        for module in self.modules_list:
            early = with_gradients(False, module, early)
        late = tensordict[..., self.burn_in :].clone()
        time = tensordict.ndim - 1
        for key in self.out_keys:
            state = early.get(("next", *as_path(key))).select(time, self.burn_in - 1)
            entry = late.get(key)
            entry.select(time, 0).copy_(state)
        return late


class RandomCropTensorDict(BufferTransform):
    """Cuts a random piece out of each sampled sequence.

    Args:
        sub_seq_len: length of a piece.
        sample_dim: dimension to cut along. A negative one counts from the last dimension.
        mask_key: bool entry of the batch's shape that marks real steps. They come first in each sequence, and pieces
            contain no padding.
        seed: seed of the positions; None draws one from torch's global generator at the first use.

    Raises:
        SchemaError: at a sample, if a sequence is too short (also a RuntimeError).
    """

    shows = ("sub_seq_len", "sample_dim")
    generator: OwnedTorchGenerator

    def __init__(
        self,
        sub_seq_len: int,
        sample_dim: int = -1,
        mask_key: NestedKey | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.sub_seq_len = positive("sub_seq_len", sub_seq_len)
        self.sample_dim = integer("sample_dim", sample_dim)
        self.mask_key = None if mask_key is None else as_key(as_path(mask_key))
        self.generator = OwnedTorchGenerator(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return one piece of each sequence. Each possible position has the same probability.

        Positions are drawn on the CPU, so that a seed yields the same pieces on every device.

        Args:
            tensordict: ``[*B]``, with a dimension `sample_dim`.
        """
        shape = tensordict.batch_size
        if not -tensordict.ndim <= self.sample_dim < tensordict.ndim:
            raise SchemaError(
                f"RandomCropTensorDict: expected a dimension {self.sample_dim}, got {tuple(shape)}"
            )
        dim = self.sample_dim % tensordict.ndim
        lead = torch.Size((*shape[:dim], 1, *shape[dim + 1 :]))
        lengths = torch.full(lead, shape[dim])
        if self.mask_key is not None:
            mask = tensordict.get(self.mask_key).reshape(shape)
            lengths = mask.sum(dim, keepdim=True).cpu()
        free = lengths - self.sub_seq_len + 1
        if bool((free < 1).any()):
            raise SchemaError(
                f"RandomCropTensorDict: expected sequences of at least {self.sub_seq_len} steps, got one of "
                f"{int(lengths.min())}; shape {tuple(shape)}"
            )
        drawn = torch.rand(lead, dtype=torch.float64, device="cpu", generator=self.generator.get())
        start = (drawn * free).long()
        index = start + torch.arange(self.sub_seq_len, device="cpu").reshape(
            [self.sub_seq_len if d == dim else 1 for d in range(tensordict.ndim)]
        )
        return tensordict.gather(dim, index.to(batch_device(tensordict)))


class MultiStepTransform(BufferTransform):
    """Converts written steps to n-step transitions, as `gleanrl.data.postprocs.MultiStep` does.

    The last `n_steps` steps of each write are held back until the next write shows their successors. So the result
    doesn't depend on how the data is divided into writes. After T steps in all, ``T - n_steps`` are stored. Up to
    `n_steps` steps, nothing is stored, and `extend` returns no index.

    Rows of the batch are streams, and time is the last dimension. Every write must have the same streams. Trajectory
    ids or flags reveal a reset between two writes. Without ids the transform also compares the data; see
    `gleanrl.data.trajectories.seams`.

    Args:
        n_steps: number of steps to look ahead; it can be changed between writes.
        gamma: discount of one step.
        reward_keys: rewards, without ``"next"``; None for all entries named ``"reward"``.
        done_key: the only flag that ends a trajectory, without ``"next"``; None for every done, terminated and
            truncated flag, also in groups. A change of the trajectory id always ends a trajectory.
        done_keys: several such flags.
        mask_key: a mask of real steps, in addition to ``("collector", "mask")``.

    Raises:
        InvalidArgumentError: if a number is out of range, or the transform is used in an environment (also a
            ValueError).
        SchemaError: at a write, if streams, keys, shapes or dtypes differ from the steps held back.
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
        # Marks the held steps that are the last before a seam, [*B, T] bool: a reset that no flag shows.
        self._seams: torch.Tensor | None = None

    @property
    def n_steps(self) -> int:
        """The number of steps to look ahead."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        MultiStep(self.gamma, n_steps)  # raises if a number is out of range
        self._n_steps = n_steps

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a sampled batch unchanged."""
        return tensordict

    def _inv_call(self, tensordict: Record) -> Record:
        if tensordict.ndim == 0:  # a single step, from `add`
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
                    f"MultiStepTransform: expected {tuple(self._held.batch_size[:-1])} streams as before, got a "
                    f"batch of {tuple(tensordict.batch_size)}; time is the last dimension"
                )
            _require_equal_fields(self._held, tensordict)
            device = batch_device(tensordict)
            if batch_device(self._held) != device:
                self._held = self._held.to(device)
            total = torch.cat([self._held, tensordict], tensordict.ndim - 1)
            cut = torch.cat([self._seams_of(self._held, tensordict), cut], -1)
        length = total.shape[-1]
        last = slice(max(length - self.n_steps, 0), length)
        # Clones, because the caller may change or reuse the memory of its batch before the next write.
        self._held, self._seams = total[..., last].clone(), cut[..., last].clone()
        if length <= self.n_steps:
            return None
        return self._post_processed(total, cut)[..., : length - self.n_steps].clone()

    def _seams_of(self, retained: TensorDictBase, batch: TensorDictBase) -> torch.Tensor:
        """Return which of the `retained` steps are the last before a seam, ``[*B, T]`` bool.

        Seams found at earlier writes are kept. The last held step is compared with the first step of `batch`.
        """
        cut = torch.zeros(retained.batch_size, dtype=torch.bool, device="cpu")
        if self._seams is not None and self._seams.shape == retained.batch_size:
            cut |= self._seams
        found = seams(retained, batch, [] if self.mask_key is None else [self.mask_key])
        if found is not None:
            cut[..., -1] |= found.cpu()
        return cut

    def _post_processed(self, total: TensorDictBase, cut: torch.Tensor) -> TensorDictBase:
        """Return the n-step data of all steps. The last `n_steps` steps look ahead too little; the caller drops them.

        Args:
            total: the held steps and the new ones, ``[*B, T]``.
            cut: steps after which a trajectory ends although no flag says so, ``[*B, T]`` bool.
        """
        process = MultiStep(self.gamma, self.n_steps, reward_keys=self.reward_keys)
        masks = [] if self.mask_key is None else [self.mask_key]
        keys: list[NestedKey | None] = [*self.done_keys] or [None]
        ends = trajectory_ends(total, done_key=keys[0], mask_keys=masks)
        for key in keys[1:]:
            ends = ends | trajectory_ends(total, done_key=key, mask_keys=masks)
        return process.bounded(total, ends | cut.to(ends.device))

    def end_retained(self, ids: Collection[int]) -> set[int]:
        """Mark the last held steps of trajectories that won't continue as truncated; see `HoldsSteps`.

        Args:
            ids: the ids of these trajectories.

        Returns:
            The ids of the trajectories whose last step is held back.
        """
        return set() if self._held is None else cut_trajectories(self._held, ids)

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the present held steps after further writes; see `Restorable`."""
        # No copies, because writes replace these objects and don't change them.
        steps, cut = self._held, self._seams

        def restore() -> None:
            self._held, self._seams = steps, cut

        return restore

    def parts(self) -> dict[str, Stateful[Any]]:
        """Return the held steps as a part of the state."""
        return {"held": _RetainedPart(self)}

    def _misplaced(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            "MultiStepTransform works in replay buffers only, not in an environment; pass it to a replay buffer, or "
            "use MultiStep as a collector's postproc"
        )


def _require_equal_fields(steps: TensorDictBase, batch: TensorDictBase) -> None:
    """Raise `SchemaError` unless a batch has the keys, shapes and dtypes of the held steps. Lists aren't compared."""
    before, now = (
        {as_key(path): Field.of(leaf, part.ndim) for path, leaf in flatten(part).items()}
        for part in (steps, batch)
    )
    if before.keys() != now.keys():
        raise SchemaError(
            f"MultiStepTransform: expected the keys {list(before)} of the steps held back, got {list(now)}; write the "
            "same keys each time"
        )
    for key, field in now.items():
        if field != before[key] and not (field.is_list or before[key].is_list):
            raise SchemaError(
                f"MultiStepTransform: key {key!r} expected {before[key]}, as in the steps held back, got {field}"
            )


@dataclass(frozen=True)
class RetainedSteps:
    """The state of the held steps, ``[*B, T]``; `leaves` is empty if there are none."""

    leaves: Mapping[NestedKey, Leaf]
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...]
    seams: torch.Tensor | None = None
    """Marks the steps that are the last before a seam, ``[*B, T]`` bool; None if there is no seam."""


class _RetainedPart(Stateful[RetainedSteps]):
    """The held steps of a `MultiStepTransform`, as a part of its state."""

    def __init__(self, transform: MultiStepTransform) -> None:
        self._transform = transform

    def snapshot(self) -> RetainedSteps:
        steps = self._transform._held
        if steps is None:
            return RetainedSteps({}, (), ())
        leaves = {as_key(path): leaf.clone() for path, leaf in flatten(steps).items()}
        cut = self._transform._seams
        saved = cut.clone() if cut is not None and bool(cut.any()) else None
        return RetainedSteps(MappingProxyType(leaves), tuple(steps.batch_size), tuple(steps.names), saved)

    def parse(self, state: Any) -> RetainedSteps:
        reader = StateReader(state, "MultiStepTransform")
        leaves, size, names = (reader.get(name) for name in ("leaves", "batch_size", "names"))
        if not isinstance(size, (list, tuple)) or not all(type(n) is int and n >= 0 for n in size):
            raise reader.wrong("batch_size", "a list of numbers")
        if not isinstance(names, (list, tuple)) or len(names) != len(size):
            raise reader.wrong("names", f"{len(size)} names")
        if not all(name is None or type(name) is str for name in names):
            raise reader.wrong("names", f"{len(size)} names")
        # All checks come before `adopt` changes anything: a load parses all parts first.
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
        return RetainedSteps(MappingProxyType(copies), tuple(size), tuple(names), cut)

    def adopt(self, value: RetainedSteps) -> None:
        steps = None
        if value.leaves:
            names: Any = list(value.names) if any(value.names) else None
            steps = TensorDict({}, list(value.batch_size), names=names)
            for key, leaf in value.leaves.items():
                steps.set(key, as_entry(leaf.clone()))
        self._transform._held = steps
        self._transform._seams = None if value.seams is None else value.seams.clone()


def _copied(leaf: Any) -> Leaf:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else objects_from(leaf)
