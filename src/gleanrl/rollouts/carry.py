"""What a policy takes along from row to row."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.errors import SchemaError
from gleanrl.state import Stateful
from gleanrl.tree import Path

_NO_BATCH = torch.Size()

CarriedOutputs = tuple[tuple[Path, torch.Tensor], ...]
"""Outputs of a policy by path; each ``(*batch, *leaf)``."""


class PolicyCarry(Stateful[CarriedOutputs]):
    """What a policy put out beside its actions and finds again in the next row: its state, if it has one.

    Args:
        batch_size: the batch dimensions of a row.
        device: where the policy wants its input; None for the CPU.
    """

    def __init__(self, batch_size: torch.Size = _NO_BATCH, device: torch.device | None = None) -> None:
        self._batch_size, self._device = batch_size, device
        self.outputs: CarriedOutputs = ()

    def clear(self) -> None:
        """Drop it: the environments were reset all together."""
        self.outputs = ()

    def snapshot(self) -> CarriedOutputs:
        """Return copies: a policy may change its state in place."""
        return tuple((path, value.detach().clone()) for path, value in self.outputs)

    def parse(self, state: Any) -> CarriedOutputs:
        """Return the outputs that a saved state holds."""
        if not isinstance(state, (list, tuple)):
            raise SchemaError(f"load_state_dict: expected a list of a policy's outputs, got {state!r:.100}")
        dims = len(self._batch_size)
        for entry in state:
            try:
                path, value = entry
                fits = bool(path) and all(isinstance(key, str) for key in path)
                fits = fits and value.shape[:dims] == self._batch_size
            except (TypeError, ValueError, AttributeError):
                fits = False
            if not fits:
                raise SchemaError(
                    f"load_state_dict: expected a path and a tensor {(*self._batch_size, '...')} of each of the "
                    f"policy's outputs, got {entry!r:.100}"
                )
        return tuple((tuple(path), value.to(self._device or "cpu", copy=True)) for path, value in state)

    def adopt(self, value: CarriedOutputs) -> None:
        """Go on from these outputs."""
        self.outputs = tuple((path, output.clone()) for path, output in value)
