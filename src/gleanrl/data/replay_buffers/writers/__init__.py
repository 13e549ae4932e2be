"""Writers: where new records go."""

from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.data.replay_buffers.writers.round_robin import RoundRobinWriter

__all__ = ["RoundRobinWriter", "Writer"]
