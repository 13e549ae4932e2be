"""Policies of TorchRL with gleanrl's specs; only importable with TorchRL."""

from __future__ import annotations

from tensordict.nn import TensorDictModule
from torch import nn
from torchrl import modules


def gaussian(spec):
    """Return an actor of three observed numbers that draws from a squashed normal distribution."""
    net = nn.Sequential(nn.Linear(3, 2), modules.NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=modules.TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
    )
