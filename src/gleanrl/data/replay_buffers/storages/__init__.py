"""Storages: they hold the records of replay buffers."""

from gleanrl.compat import bind
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.ensemble import StorageEnsemble
from gleanrl.data.replay_buffers.storages.frame_stacks import Compact
from gleanrl.data.replay_buffers.storages.lists import CompressedListStorage, LazyStackStorage, ListStorage
from gleanrl.data.replay_buffers.storages.tensor import LazyMemmapStorage, LazyTensorStorage, TensorStorage

__all__ = [
    "Compact",
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
