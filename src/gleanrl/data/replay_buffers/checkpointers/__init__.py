"""How a storage's records are written into a checkpoint: `rb.storage.checkpointer = FlatStorageCheckpointer()`."""

from gleanrl.compat import bind
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.ensemble import StorageEnsembleCheckpointer
from gleanrl.data.replay_buffers.checkpointers.flat import FlatStorageCheckpointer
from gleanrl.data.replay_buffers.checkpointers.h5 import H5StorageCheckpointer
from gleanrl.data.replay_buffers.checkpointers.nested import NestedStorageCheckpointer
from gleanrl.data.replay_buffers.checkpointers.whole import ListStorageCheckpointer, TensorStorageCheckpointer

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
