"""Batches of environments under the module name of the public API."""

from gleanrl.envs.vector.creator import EnvCreator, env_creator, get_env_metadata
from gleanrl.envs.vector.metadata import EnvMetaData
from gleanrl.envs.vector.parallel import ParallelEnv
from gleanrl.envs.vector.serial import SerialEnv
from gleanrl.workers.handle import Timeouts

__all__ = [
    "EnvCreator",
    "EnvMetaData",
    "ParallelEnv",
    "SerialEnv",
    "Timeouts",
    "env_creator",
    "get_env_metadata",
]
