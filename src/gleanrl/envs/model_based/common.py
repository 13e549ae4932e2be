"""`ModelBasedEnvBase`: an environment whose dynamics are a TensorDict module."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._rollout.env_traits import Env
from gleanrl.envs.base import EnvBase
from gleanrl.envs.env_specs import ROLES
from gleanrl.errors import UnsupportedError


class ModelBasedEnvBase(EnvBase):
    """Abstract environment with a world model, which maps a root and its action to the next entries.

    A subclass declares its specs and writes ``_reset``, as with `EnvBase`. Flags that the model doesn't write are
    False. Gradients flow through `rollout`.

    Args:
        world_model: a TensorDict module; it writes observations and rewards under the environment's keys. It is moved
            to `device`, in place.
        params: must be None: the model's own parameters are used.
        buffers: must be None: the model's own buffers are used.
        device: see `EnvBase`; the default is the CPU.
        batch_size: see `EnvBase`; None for an environment that accepts TensorDicts of any batch size.
        run_type_checks: see `EnvBase`.
        allow_done_after_reset: see `EnvBase`.

    Raises:
        UnsupportedError: if `params` or `buffers` isn't None.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from gleanrl.data import Composite, Unbounded
        >>> class Dreamt(ModelBasedEnvBase):
        ...     def __init__(self, world_model):
        ...         super().__init__(world_model)
        ...         self.observation_spec = Composite(hidden=Unbounded((4,)))
        ...         self.state_spec = Composite(hidden=Unbounded((4,)))
        ...         self.action_spec = Unbounded((1,))
        ...
        ...     def _reset(self, tensordict=None):
        ...         size = self.batch_size if tensordict is None else tensordict.batch_size
        ...         return TensorDict({"hidden": torch.zeros(*size, 4)}, size)
        >>> step = TensorDictModule(torch.add, in_keys=["hidden", "action"], out_keys=["hidden"])
        >>> pay = TensorDictModule(lambda hidden: hidden.sum(-1, True), in_keys=["hidden"], out_keys=["reward"])
        >>> Dreamt(TensorDictSequential(step, pay)).rollout(3)["next", "reward"].shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        world_model: Any,
        params: Any = None,
        buffers: Any = None,
        device: torch.device | str | int | None = "cpu",
        batch_size: Any = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
    ) -> None:
        if params is not None or buffers is not None:
            raise UnsupportedError(
                "params, buffers: expected None, because the world model uses its own; load them into the module"
            )
        super().__init__(
            device=device,
            batch_size=batch_size,
            run_type_checks=run_type_checks,
            allow_done_after_reset=allow_done_after_reset,
        )
        if batch_size is None:
            self.any_size = True
        self.world_model = world_model.to(self.device)

    def set_specs_from_env(self, env: Env) -> None:
        """Replace all specs by copies of the specs of another environment.

        Raises:
            EnvironmentContractError: if they lack this environment's batch dimensions.
        """
        for role in ROLES:
            setattr(self, f"full_{role}_spec", getattr(env, f"full_{role}_spec").clone())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcome: TensorDictBase = self.world_model(tensordict.exclude("next").clone())
        keys = [*self.observation_keys, *self.reward_keys, *self.done_keys]
        # The model may pass flags of the root through. These belong to the previous step, so only flags that the model
        # itself writes are kept.
        written = {*self.world_model.out_keys, *self.observation_keys}
        return outcome.select(*(key for key in keys if key in written), strict=False)

    def _set_seed(self, seed: int | None) -> None:
        """Seed torch's global generator, from which the model draws; do nothing for None."""
        if seed is not None:
            torch.manual_seed(seed)
