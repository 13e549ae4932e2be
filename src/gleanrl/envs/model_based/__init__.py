"""Environments whose dynamics are learned modules."""

from gleanrl.envs.model_based.common import ModelBasedEnvBase

__all__ = ["ModelBasedEnvBase"]
