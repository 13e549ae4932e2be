"""Random state that a part owns: one generator each, seeded at first use, part of the part's state."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.errors import InvalidArgumentError, SchemaError

_SEED_RANGE = 2**63 - 1


def fresh_seed() -> int:
    """Return a seed drawn from torch's global generator, in ``[0, 2**63 - 1)``."""
    return int(torch.randint(_SEED_RANGE, (), device="cpu"))


class OwnedGenerator:
    """A CPU generator that belongs to one part, whatever torch's default device is.

    Without a seed it takes one from torch's global generator at its first use, so that ``torch.manual_seed``
    makes a program reproducible while later draws of the part disturb nobody. Not thread-safe: its owner
    locks.

    Args:
        seed: a seed in ``[0, 2**63)``; None for one drawn at first use.

    Examples:
        >>> import torch
        >>> a, b = OwnedGenerator(3), OwnedGenerator()
        >>> b.load_state_dict(a.state_dict())
        >>> torch.equal(torch.rand(2, generator=a.get()), torch.rand(2, generator=b.get()))
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        self._generator: torch.Generator | None = None
        if seed is not None:
            self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed`.

        Raises:
            InvalidArgumentError: unless `seed` is an integer in ``[0, 2**63)``.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _SEED_RANGE:
            raise InvalidArgumentError(f"seed: expected an integer in [0, 2**63), got {seed!r}")
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def get(self) -> torch.Generator:
        """Return the generator; the first call without a seed takes one from torch's global generator."""
        if self._generator is None:
            self.seed(fresh_seed())
            assert self._generator is not None
        return self._generator

    def integers(self, high: int, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, high)``, int64 on the CPU."""
        return torch.randint(high, (count,), generator=self.get(), device="cpu")

    def uniforms(self, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, 1)``, float64 on the CPU."""
        return torch.rand(count, dtype=torch.float64, generator=self.get(), device="cpu")

    def permutation(self, size: int) -> torch.Tensor:
        """Return the numbers of ``[0, size)`` in random order, int64 on the CPU."""
        return torch.randperm(size, generator=self.get(), device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"generator": state}``, a uint8 tensor of its own. Counts as the first use."""
        return {"generator": self.get().get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the sequence of a saved `state`; a bad state raises `SchemaError` and changes nothing."""
        generator = torch.Generator("cpu")
        try:
            generator.set_state(state["generator"].clone())
        except (KeyError, AttributeError, TypeError, RuntimeError) as cause:
            raise SchemaError(
                f"generator state: expected what state_dict() returned, got {state!r}"
            ) from cause
        self._generator = generator

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as the generator's state."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.load_state_dict(state)
