"""Transforms for replay buffers: `Reward2GoTransform`, `BurnInTransform`, `RandomCropTensorDict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from gleanrl.arguments import integer, non_negative, positive
from gleanrl.data.boundaries import trajectory_ends
from gleanrl.data.postprocs.postprocs import discounted_sum
from gleanrl.data.specs import Composite
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.keys import Keys, missing_key
from gleanrl.envs.transforms.rows import Record
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingArgumentError, SchemaError
from gleanrl.rollouts.modes import with_gradients
from gleanrl.seeding import OwnedTorchGenerator
from gleanrl.tree import NestedKey, as_key, as_path, place_of


class BufferTransform(Transform):
    """A transform that makes sense in a replay buffer only.

    Raises:
        InvalidArgumentError: if it's used in an environment (also a ValueError).
    """

    def set_container(self, container: Any) -> None:
        """Put the transform into a `Compose`."""
        if not isinstance(container, Transform):
            raise self._misplaced()
        super().set_container(container)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Raise: there is an environment."""
        raise self._misplaced()

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        raise self._misplaced()

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        raise self._misplaced()

    def _misplaced(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{type(self).__name__} works in replay buffers only, not in an environment"
        )


class Reward2GoTransform(BufferTransform):
    """Replaces rewards by the discounted sum of those to come, in what is written to a buffer.

    It goes to the end of the trajectory, or of the batch for one that goes on after it. Rewards are ``[*B, T, 1]``; the
    batch size may leave T out, but not that of groups of agents, ``[*B, T, n_agents, 1]``.

    Args:
        gamma: discount of one step.
        in_keys: rewards; None for ``[("next", "reward")]``.
        out_keys: where the sums stand; None for in place.
        done_key: the done flag to go by, without its leading ``"next"`` or with it; None for all flags.

    Raises:
        SchemaError: if a row of the batch has no end of a trajectory (also a RuntimeError).
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
        """Return a batch that is read as it is."""
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
                "Reward2GoTransform: a row of the batch has no end of a trajectory: the reward to go isn't known; "
                "write whole trajectories, time last"
            )
        for in_key, out_key in self.pairs():
            reward = tensordict.get(in_key, None)
            if reward is None:
                raise missing_key(self, in_key, tensordict)
            tensordict.set(out_key, discounted_sum(reward, ends, self.gamma))
        return tensordict


class BurnInTransform(BufferTransform):
    """Runs recurrent modules over the first steps of each sequence that is read, and drops those steps.

    The state that they leave, computed without gradients, becomes the state at the first step that stays.

    Args:
        modules: TensorDict modules that map ``[B, T]`` sequences and write their new state below ``"next"``.
        burn_in: how many steps.
        out_keys: the states, without ``"next"``; None for what the modules read that they also write below
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
                "BurnInTransform: the modules write no state below 'next'; name out_keys"
            )
        self.modules_list = nn.ModuleList(modules)
        self.burn_in = non_negative("burn_in", burn_in)

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return nothing: the modules say what is read."""
        return []

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the steps after the first `burn_in` ones.

        Args:
            tensordict: ``[B, T]``.
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
    """Cuts a random piece out of each sequence that is read.

    Args:
        sub_seq_len: its length.
        sample_dim: the dimension that is cut; negative ones hold whatever dimensions come before.
        mask_key: a bool entry of the batch's shape that marks real steps, which come first; pieces hold no others.
        seed: of the places; None for one drawn from torch's global generator at the first draw.

    Raises:
        SchemaError: if a sequence is too short (also a RuntimeError).
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
        """Return the pieces.

        Args:
            tensordict: ``[*B]`` with at least as many dimensions as `sample_dim` names.
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
        return tensordict.gather(dim, index.to(place_of(tensordict)))
