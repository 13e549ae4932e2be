"""Names for extensions: protocols, base classes and results that user-defined environments, storages and samplers use.

The classes to derive from (`EnvBase`, `Transform`, `Storage`, `Sampler`, `Writer`) are in `gleanrl.envs` and
`gleanrl.data`. The modules that define the names below may change: import the names from here.
"""

from __future__ import annotations

from gleanrl.block import Block
from gleanrl.data.replay_buffers.samplers.episodes import BoundaryKeys, EpisodeTable
from gleanrl.data.replay_buffers.samplers.mixture import Mixture
from gleanrl.data.replay_buffers.samplers.priorities import PriorityTable
from gleanrl.data.replay_buffers.samplers.units import Unit
from gleanrl.data.replay_buffers.storages.direct import Prepared
from gleanrl.data.replay_buffers.storages.memory import Allocator
from gleanrl.data.replay_buffers.storages.snapshots import ContentCopy
from gleanrl.data.replay_buffers.storages.tabled import TabledStorage
from gleanrl.data.replay_buffers.versions import Follower, Version
from gleanrl.records import BufferStats, Draw, Placement, RateCounts, Selection
from gleanrl.rollouts.faults import StepFault
from gleanrl.rollouts.protocol import Actor, Carry, EpisodeRules, Stepper
from gleanrl.rollouts.traits import EnvTraits
from gleanrl.rollouts.usage import Lease
from gleanrl.schema import Field, Schema
from gleanrl.seeding import OwnedGenerator, OwnedTorchGenerator
from gleanrl.state import Stateful, StateReader

__all__ = [
    "Actor",
    "Allocator",
    "Block",
    "BoundaryKeys",
    "BufferStats",
    "Carry",
    "ContentCopy",
    "Draw",
    "EnvTraits",
    "EpisodeRules",
    "EpisodeTable",
    "Field",
    "Follower",
    "Lease",
    "Mixture",
    "OwnedGenerator",
    "OwnedTorchGenerator",
    "Placement",
    "Prepared",
    "PriorityTable",
    "RateCounts",
    "Schema",
    "Selection",
    "StateReader",
    "Stateful",
    "StepFault",
    "Stepper",
    "TabledStorage",
    "Unit",
    "Version",
]
