"""Which environment of a pool each row is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from gleanrl.data.specs import NonTensor
from gleanrl.envs.vector.metadata import EnvMetaData
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    LengthError,
    MissingKeyError,
    SchemaError,
)

INDEX = "env_index"
"""The entry that says which environment a row is of: an integer, as non-tensor data."""


class RowIndex:
    """Tells environments and their rows from TensorDicts and from the argument `env_index`.

    Args:
        batch_size: of the pool, ``[n, *batch]``.
    """

    def __init__(self, batch_size: torch.Size) -> None:
        self._batch_size = batch_size

    def rows(
        self, call: str, tensordict: TensorDictBase | None, env_index: Any
    ) -> dict[int, TensorDictBase | None]:
        """Return the row of each environment that is meant; None for each without a TensorDict.

        Args:
            call: for messages.
            tensordict: rows of several environments, or that of one.
            env_index: an integer or several; None for what the TensorDict says.

        Raises:
            InvalidArgumentError: if an environment occurs twice.
            LengthError: if there are more or fewer rows than environments.
            SchemaError: if a row hasn't an environment's batch size.
            MissingKeyError, InvalidTypeError, IndexRangeError: see `envs`.
        """
        envs = self.envs(call, tensordict, env_index)
        if len(set(envs)) != len(envs):
            raise InvalidArgumentError(f"{call}: an environment occurs twice in {envs}")
        if tensordict is None:
            return dict.fromkeys(envs)
        parts = [tensordict] if self.is_one(tensordict) else tensordict.unbind(0)
        if len(parts) != len(envs):
            raise LengthError(f"{call}: got {len(parts)} rows for the environments {envs}")
        for env, part in zip(envs, parts, strict=True):
            if part.batch_size != self._batch_size[1:]:
                raise SchemaError(
                    f"{call}: expected rows of batch size {tuple(self._batch_size[1:])}, got "
                    f"{tuple(part.batch_size)} for environment {env}"
                )
        return dict(zip(envs, parts, strict=True))

    def envs(self, call: str, tensordict: TensorDictBase | None, env_index: Any) -> list[int]:
        """Return the numbers of the environments that are meant.

        Raises:
            MissingKeyError: if nothing says which.
            InvalidTypeError: for what isn't an integer.
            IndexRangeError: if there's no such environment.
        """
        if env_index is not None:
            return self._checked(call, np.asarray(_plain(env_index)).reshape(-1))
        found = None if tensordict is None else tensordict.get(INDEX, None)
        if tensordict is not None and found is not None:
            rows = 1 if self.is_one(tensordict) else tensordict.shape[0]
            return self._checked(call, np.asarray(_plain(found)).reshape(rows, -1)[:, 0])
        if tensordict is None or tensordict.batch_size == self._batch_size:
            return list(range(self._batch_size[0]))
        raise MissingKeyError(
            f"{call}: {INDEX!r} is missing: set it in the TensorDict, or pass env_index=; "
            f"got batch size {tuple(tensordict.batch_size)}"
        )

    def is_one(self, tensordict: TensorDictBase) -> bool:
        """Return whether a TensorDict is the row of one environment."""
        return tensordict.ndim < len(self._batch_size)

    def _checked(self, call: str, given: np.ndarray[Any, Any]) -> list[int]:
        if not np.issubdtype(given.dtype, np.integer):
            raise InvalidTypeError(f"{call}: env_index: expected integers, got {given.tolist()}")
        if not ((given >= 0) & (given < self._batch_size[0])).all():
            raise IndexRangeError(
                f"{call}: env_index: expected 0 to {self._batch_size[0] - 1}, got {given.tolist()}"
            )
        return [int(number) for number in given]


def is_number(env_index: Any) -> bool:
    """Return whether `env_index` names one environment, and not several."""
    return env_index is not None and np.ndim(_plain(env_index)) == 0


def index_entry(env: int, batch_size: Sequence[int]) -> Any:
    """Return the entry of an environment's row: non-tensor data."""
    return NonTensorData(env, batch_size=batch_size)


def with_index(metadata: EnvMetaData) -> EnvMetaData:
    """Return what an environment declares, with its index as a state.

    Raises:
        InvalidArgumentError: if it has such an entry itself.
    """
    if any(INDEX in spec.keys() for spec in metadata.specs.values()):
        raise InvalidArgumentError(
            f"env_makers: an environment has an entry {INDEX!r}, which is the pool's own; a pool can't hold pools"
        )
    state = metadata.specs["state"].clone()
    state[INDEX] = NonTensor(shape=metadata.batch_size, example_data=0)
    return replace(metadata, specs={**metadata.specs, "state": state})


def _plain(numbers: Any) -> Any:
    """Return the value of a tensor, an array or non-tensor data."""
    kinds = (torch.Tensor, np.ndarray, NonTensorData, NonTensorStack)
    return numbers.tolist() if isinstance(numbers, kinds) else numbers
