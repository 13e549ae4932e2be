"""Batches of environments under the module name of the public API."""

from gleanrl.envs.vector.parallel import ParallelEnv
from gleanrl.envs.vector.serial import SerialEnv

__all__ = ["ParallelEnv", "SerialEnv"]
