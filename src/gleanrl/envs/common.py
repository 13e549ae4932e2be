"""The environment base class, under the path that existing programs import it from."""

from gleanrl.envs.base import EnvBase

__all__ = ["EnvBase"]
