"""Writers, which decide where new records go."""

from gleanrl.compat import bind
from gleanrl.data.replay_buffers.writers.base import ImmutableDatasetWriter, Writer
from gleanrl.data.replay_buffers.writers.ensemble import WriterEnsemble
from gleanrl.data.replay_buffers.writers.max_value import TensorDictMaxValueWriter
from gleanrl.data.replay_buffers.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
    "WriterEnsemble",
]

bind(__name__, globals())
