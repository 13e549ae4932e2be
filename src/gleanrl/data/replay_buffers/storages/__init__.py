"""Storages: where records are kept."""

from gleanrl.compat import bind
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.compressed import CompressedListStorage
from gleanrl.data.replay_buffers.storages.ensemble import StorageEnsemble
from gleanrl.data.replay_buffers.storages.lazy import LazyTensorStorage
from gleanrl.data.replay_buffers.storages.lazy_stack import LazyStackStorage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.storages.memmap import LazyMemmapStorage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage

__all__ = [
    "CompressedListStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "StorageEnsemble",
    "TensorStorage",
]

bind(__name__, globals())
