"""Environments with masks that change at each step and at each reset, for every encoding of an action."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.data import Binary, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from gleanrl.envs import EnvBase
from gleanrl.envs.transforms import ActionMask, TransformedEnv

N = 4
"""Number of choices of each action."""

ENCODINGS: dict[str, Any] = {
    "categorical": lambda: Categorical(N),
    "one_hot": lambda: OneHot(N),
    "multi_categorical": lambda: MultiCategorical([N, N]),
    "multi_one_hot": lambda: MultiOneHot([N, N]),
    "binary": lambda: Binary(1),
}
SOURCES = ("spec", "late_spec", "mid_spec", "transform")
"""Origins of the mask: an `ActionMask` transform, or the spec.

The spec has a mask from the start (``"spec"``), from the first reset (``"late_spec"``), or at times only
(``"mid_spec"``). The latter gets its first mask in the middle of a rollout.
"""
KEYS = {"plain": ["action"], "two": ["action", "other"], "nested": [("agents", "action")]}


def count(encoding: str) -> int:
    """Return the length of a mask."""
    return {"multi_categorical": 2 * N, "multi_one_hot": 2 * N, "binary": 2}.get(encoding, N)


def masks_at(clock: int) -> bool:
    """Return whether a ``"mid_spec"`` environment has a mask after `clock` steps and resets."""
    return clock % 8 > 3


def mask_of(encoding: str, clock: int) -> torch.Tensor:
    """Return the mask after `clock` steps and resets.

    It forbids one or two of the four choices, or one of the two choices of a binary action.
    """
    mask = torch.ones(count(encoding), dtype=torch.bool)
    if encoding == "binary":
        mask[clock % 2] = False
        return mask.reshape(1, 2)
    for part in mask.split(N):
        part[clock % N] = False
        part[(clock * 3) % N] = False
        clock += 1
    return mask


class MaskedEnv(EnvBase):
    """Episodes of three steps. The masks follow a clock that counts steps and resets; a reset doesn't set it back."""

    def __init__(self, encoding: str, source: str = "spec", keys: str = "plain", clock: int = 0) -> None:
        super().__init__()
        self.encoding, self.source, self.clock, self.left = encoding, source, clock, 0
        self.keys = KEYS[keys]
        self.action_spec = Composite({key: ENCODINGS[encoding]() for key in self.keys})
        shape = mask_of(encoding, 0).shape
        masks = {self.mask_key(key): Binary(shape=shape, dtype=torch.bool) for key in self.keys}
        self.observation_spec = Composite({"seen": Unbounded((1,)), **masks})
        self.reward_spec = Unbounded((1,))
        if source == "spec":
            self.show()

    @staticmethod
    def mask_key(key: Any) -> Any:
        """Return the observation key of an action's mask."""
        return (*key[:-1], "mask") if isinstance(key, tuple) else f"{key}_mask"

    def show(self) -> None:
        for index, key in enumerate(self.keys):
            mask = self.mask(index)
            self.full_action_spec[key].update_mask(None if bool(mask.all()) else mask)

    def mask(self, index: int) -> torch.Tensor:
        """Return the present mask of an action."""
        mask = mask_of(self.encoding, self.clock + index)
        free = self.source == "mid_spec" and not masks_at(self.clock)
        return torch.ones_like(mask) if free else mask

    def package(self) -> TensorDict:
        self.clock += 1
        if self.source != "transform":
            self.show()
        out = TensorDict({"seen": torch.zeros(1)})
        for index, key in enumerate(self.keys):
            out[self.mask_key(key)] = self.mask(index)
        return out

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        self.left = 3
        return self.package()

    def _step(self, tensordict: Any) -> TensorDict:
        self.left -= 1
        return self.package().update({"reward": torch.ones(1), "done": torch.tensor([self.left == 0])})

    def _set_seed(self, seed: Any) -> None:
        pass


def masked(encoding: str, source: str = "spec", keys: str = "plain", clock: int = 0) -> Any:
    """Return a masked environment."""
    env: Any = MaskedEnv(encoding, source, keys, clock)
    if source == "transform":
        for key in KEYS[keys]:
            env = TransformedEnv(env, ActionMask(key, MaskedEnv.mask_key(key)))
    return env


def chosen(encoding: str, action: torch.Tensor) -> torch.Tensor:
    """Return the choices of actions, as one-hot vectors of the masks' shape."""
    if encoding.endswith("one_hot"):
        return action.bool()
    rows = torch.nn.functional.one_hot(action.long(), 2 if encoding == "binary" else N).bool()
    return rows.flatten(-2) if encoding == "multi_categorical" else rows


def check_allowed(batch: Any, encoding: str, keys: str = "plain", everything: bool = True) -> None:
    """Check that all actions obey the masks in the same rows, and that every allowed choice occurs for each mask."""
    for key in KEYS[keys]:
        took = chosen(encoding, batch[key])
        mask = batch[MaskedEnv.mask_key(key)]
        assert not bool((took & ~mask).any()), f"{(took & ~mask).float().mean():.3f} of {key} are forbidden"
        if everything:
            assert len(mask.reshape(-1, mask[0, 0].numel()).unique(dim=0)) > 1
            for one in mask.reshape(-1, mask[0, 0].numel()).unique(dim=0):
                rows = (mask.flatten(2) == one).all(-1)
                assert bool((took.flatten(2)[rows].any(0) == one).all())
