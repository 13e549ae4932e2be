"""Where the environment, the policy and the batches of a collector live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gleanrl.devices import as_device, require_device


@dataclass(frozen=True)
class Devices:
    """Devices of a collector's parts; None means: wherever they are."""

    env: torch.device | None
    policy: torch.device | None
    storing: torch.device | None

    @classmethod
    def of(cls, device: Any, env: Any, policy: Any, storing: Any, env_own: torch.device | None) -> Devices:
        """Fill the unset devices.

        Args:
            device: fills every unset one.
            env: the environment's; unset, the device that it has.
            policy: the policy's.
            storing: the batches'; unset, the environment's if the policy's agrees with it.
            env_own: the device that the environment has already.
        """
        general = as_device(device)
        env_device = as_device(env) or general or as_device(env_own)
        policy_device = as_device(policy) or general
        storing_device = as_device(storing) or general
        if storing_device is None and policy_device in (None, env_device):
            storing_device = env_device
        return cls(
            require_device("env_device", env_device),
            require_device("policy_device", policy_device),
            require_device("storing_device", storing_device),
        )
