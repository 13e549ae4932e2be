"""Environments whose dynamics are modules."""

from gleanrl.envs.model_based.common import ModelBasedEnvBase

__all__ = ["ModelBasedEnvBase"]
