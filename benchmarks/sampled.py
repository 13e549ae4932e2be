"""Policies that draw their actions from a distribution, by hand and as tensordict's sequence of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn


@dataclass(frozen=True)
class Sampled:
    """A policy that draws actions from a distribution whose parameters a network computes.

    Args:
        network: builds the network: observation -> a parameter, or a tuple of parameters.
        keys: the names of the parameters.
        distribution: the distribution's class.
        kwargs: further arguments of the class.
        scored: whether the policy also computes the action's log-probability.
    """

    network: Callable[[], nn.Module]
    keys: tuple[str, ...]
    distribution: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scored: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields in addition to the action that a recording loop has to store, if the policy is scored."""
        return ("action_log_prob", *self.keys) if self.scored else ()

    def by_hand(self) -> Callable[[Tensor], Any]:
        """Build the policy as a function: observation -> action, or if scored a tuple of action and `outputs`."""
        network = self.network()

        def act(observation: Tensor) -> Any:
            found = network(observation)
            parameters = found if isinstance(found, tuple) else (found,)
            drawn_from = self.distribution(**dict(zip(self.keys, parameters, strict=True)), **self.kwargs)
            action = drawn_from.sample()
            return (action, drawn_from.log_prob(action), *parameters) if self.scored else action

        return act

    def by_module(self) -> nn.Module:
        """Build the policy as a sequence of a network and a distribution."""
        module: nn.Module = ProbabilisticTensorDictSequential(
            TensorDictModule(self.network(), in_keys=["observation"], out_keys=[*self.keys]),
            ProbabilisticTensorDictModule(
                in_keys=[*self.keys],
                out_keys=["action"],
                distribution_class=self.distribution,
                distribution_kwargs=dict(self.kwargs),
                return_log_prob=self.scored,
            ),
        )
        return module
