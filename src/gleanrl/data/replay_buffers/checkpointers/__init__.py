"""Checkpointers, the forms of records on disk: `rb.storage.checkpointer = FlatStorageCheckpointer()` sets one."""

from gleanrl.compat import bind
from gleanrl.data.replay_buffers.checkpointers.base import (
    ListStorageCheckpointer,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
)
from gleanrl.data.replay_buffers.checkpointers.buffers import StorageEnsembleCheckpointer
from gleanrl.data.replay_buffers.checkpointers.flat import FlatStorageCheckpointer, NestedStorageCheckpointer
from gleanrl.data.replay_buffers.checkpointers.h5 import H5StorageCheckpointer

__all__ = [
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TensorStorageCheckpointer",
]

bind(__name__, globals())
