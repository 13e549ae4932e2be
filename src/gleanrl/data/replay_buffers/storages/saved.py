"""The saved state of a tensor storage, checked before anything is changed by it."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.formats import check_all_storable, format_from_state
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.errors import SchemaError


def saved_format(state: dict[str, Any], max_size: int, ndim: int) -> RecordFormat | None:
    """Return the format of the records in a state; None if it holds none.

    Args:
        state: what `TensorStorage.state_dict` returned.
        max_size: the size that the loading storage was asked to have.
        ndim: its batch dimensions.

    Raises:
        SchemaError: no such state, one of a storage of another size, or a broken one.
    """
    Storage.steps_in(state)
    try:
        if (state["max_size"], state["ndim"]) != (max_size, ndim):
            raise SchemaError(
                f"load_state_dict: the state has max_size={state['max_size']}, ndim={state['ndim']}; "
                f"this storage has {max_size}, {ndim}: build it with the same ones"
            )
        if "columns" not in state and not state["num_steps"]:
            return None
        form = format_from_state(state["format"])
        batch = torch.Size(state["batch_shape"])
        used = state["num_steps"] * batch.numel()
        sizes = {len(state["generations"]), used}
        if len(sizes) != 1 or used > -(-max_size // batch.numel()) * batch.numel():
            raise SchemaError(
                f"load_state_dict: {used} rows, {len(state['generations'])} generations: broken state"
            )
        form.schema.check(state["columns"], torch.Size((used,)), "load_state_dict")
        check_all_storable(list(state["columns"]), "load_state_dict")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
        if isinstance(cause, SchemaError):
            raise
        raise SchemaError(
            "load_state_dict: expected what state_dict() of a tensor storage returned"
        ) from cause
    return form
