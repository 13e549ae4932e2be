"""Weights of a module that are copied again and again."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors.weights import Pairs, copy_pairs, matched_weights, on_meta
from gleanrl.tree import flatten


class LinkedWeights:
    """A module's weights, which go to records of them or come from there, again and again. One thread at a time.

    What `copy_weights` checks is checked once for each record, and again whenever the module has other tensors, or
    these another shape, dtype or place.

    Args:
        module: whose weights they are; it may change.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._modules: list[torch.nn.Module] = []
        self._names: list[str] = []
        self._found: list[Any] = []
        self._forms: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._records: dict[int, tuple[TensorDictBase, Pairs]] = {}

    @property
    def lacking(self) -> bool:
        """Whether the weights have no values: all parameters are on the meta device."""
        return on_meta(self._module)

    def write(self, record: TensorDictBase) -> None:
        """Copy the module's weights into a record, but for those without values; see `copy_weights`."""
        copy_pairs([(there, here) for here, there in self._pairs(record) if not here.is_meta])

    def read(self, record: TensorDictBase) -> None:
        """Copy a record's into the module; see `copy_weights`."""
        copy_pairs(self._pairs(record))

    def _pairs(self, record: TensorDictBase) -> Pairs:
        self._look()
        known = self._records.get(id(record))
        if known is None:
            known = self._records[id(record)] = (
                record,
                matched_weights(record, TensorDict.from_module(self._module)),
            )
        return known[1]

    def _look(self) -> None:
        """Forget what was checked if the module isn't as it was."""
        names, found = self._entries()
        same = len(found) == len(self._found) and all(map(is_, found, self._found)) and names == self._names
        if same and self._tensors and [_form(tensor) for tensor in self._tensors] == self._forms:
            return
        self._records.clear()
        self._modules = list(self._module.modules())
        self._names, self._found = self._entries()
        leaves = list(flatten(TensorDict.from_module(self._module)).values())
        entries = {id(entry) for entry in self._found}
        # Tensors that are no entries of modules could be exchanged unseen: they are looked up every time.
        self._tensors = leaves if all(id(leaf) in entries for leaf in leaves) else []
        self._forms = [_form(tensor) for tensor in self._tensors]

    def _entries(self) -> tuple[list[str], list[Any]]:
        """Return what the modules hold: tensors and other modules, and their names."""
        tables = [
            table
            for module in self._modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        return list(chain.from_iterable(tables)), [entry for table in tables for entry in table.values()]


def _form(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device
