"""The ring writer of TensorDict buffers."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, is_tensor_collection

from gleanrl.data.replay_buffers.writers.round_robin import RoundRobinWriter
from gleanrl.errors import SchemaError


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A `RoundRobinWriter` for TensorDicts and tensorclasses; it refuses other records.

    Nothing is written into the data: the ``index`` of a sample comes from its draw.
    """

    def check_write(self, data: Any, where: str) -> None:
        """Raise `SchemaError` unless `data` is a TensorDict, a tensorclass or a list of them."""
        if type(data) is not TensorDict:
            check_collections(self, data, where)


def check_collections(writer: Any, data: Any, where: str) -> None:
    """Raise `SchemaError` unless `data` is a TensorDict, a tensorclass or a list of them.

    Args:
        writer: who asks.
        data: what is to be written.
        where: the call that the message names.
    """
    for record in data if isinstance(data, list) else (data,):
        if not is_tensor_collection(record):
            raise SchemaError(
                f"{where}: a {type(writer).__name__} takes TensorDicts, got {type(record).__name__}; make it a "
                "TensorDict, or use RoundRobinWriter, which takes any data"
            )
