"""Names for extensions: protocols, base classes and results that user-defined environments, storages and samplers use.

The base classes for extensions (`EnvBase`, `Transform`, `Storage`, `Sampler`, `Writer`) are in `gleanrl.envs` and
`gleanrl.data`. Import the names below from this module: the internal modules that define them may change.
"""

from gleanrl._arrays.block import Block
from gleanrl._arrays.results import BufferStats, Draw, Placement, RateCounts, Selection
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.env_traits import EnvTraits
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import Actor, Carry, EpisodeRules, Lease, Stepper
from gleanrl._state.rng import OwnedGenerator, OwnedTorchGenerator
from gleanrl._state.state import Stateful, StateReader
from gleanrl.data.replay_buffers.change_log import Follower, Version
from gleanrl.data.replay_buffers.samplers.ensemble import Mixture
from gleanrl.data.replay_buffers.samplers.episode_index import BoundaryKeys, EpisodeTable
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.data.replay_buffers.samplers.transitions import Unit
from gleanrl.data.replay_buffers.storages.allocators import Allocator
from gleanrl.data.replay_buffers.storages.base import Prepared

__all__ = [
    "Actor",
    "Allocator",
    "Block",
    "BoundaryKeys",
    "BufferStats",
    "Carry",
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
    "Unit",
    "Version",
]
