"""`PendulumEnv`: the swing-up pendulum written in torch, so that gradients flow through it."""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.data.specs import Bounded, Composite, Unbounded
from gleanrl.envs.base import EnvBase


class PendulumEnv(EnvBase):
    """A stateless pendulum: the TensorDicts hold its angle, speed and parameters.

    It steps one pendulum per row of the input TensorDict. The dynamics and costs equal gymnasium's ``Pendulum-v1``. The
    reward is the negative cost. Trajectories don't end.

    A reset takes ``"params"`` from its `tensordict`; without that entry, the defaults of `gen_params`. Angle and speed
    are drawn uniformly. ``reset(tensordict, set_state=True)`` begins at the angle ``"th"`` and the speed ``"thdot"`` of
    `tensordict`; it draws only the missing ones.

    Args:
        td_params: parameters to derive the specs from, as `gen_params` returns them; None for the defaults.
        seed: seed of the resets; None draws one from torch's global generator.
        device: see `EnvBase`.

    Examples:
        >>> env = PendulumEnv(seed=0)
        >>> many = env.reset(env.gen_params(batch_size=[10]))
        >>> env.rollout(3, auto_reset=False, tensordict=many).shape
        torch.Size([10, 3])
    """

    batch_locked = False
    DEFAULT_X = pi
    """The largest absolute angle after a reset, in radians from upright."""
    DEFAULT_Y = 1.0
    """The largest absolute speed after a reset, in radians per second."""

    def __init__(
        self,
        td_params: TensorDictBase | None = None,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(device=device)
        params = (self.gen_params() if td_params is None else td_params)["params"]
        fastest = float(params["max_speed"])
        self.observation_spec = Composite(
            th=Bounded(-pi, pi, ()),
            thdot=Bounded(-fastest, fastest, ()),
            params=Composite({key: Unbounded((), dtype=value.dtype) for key, value in params.items()}),
        )
        self.state_spec = self.observation_spec.clone()
        strongest = float(params["max_torque"])
        self.action_spec = Bounded(-strongest, strongest, (1,))
        self.rng = torch.Generator(self.device or "cpu")
        self.set_seed(int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed)

    @staticmethod
    def gen_params(g: float = 10.0, batch_size: Any = None, device: Any = None) -> TensorDict:
        """Return a TensorDict with the parameters of `batch_size` pendulums below ``"params"``.

        Args:
            g: gravity, in m/s².
            batch_size: batch size of the TensorDict; None for one pendulum.
            device: device of the parameters.
        """
        numbers = {"max_speed": 8.0, "max_torque": 2.0, "dt": 0.05, "g": g, "m": 1.0, "l": 1.0}
        size = torch.Size(batch_size or ())
        values = {key: torch.full(size, value, device=device) for key, value in numbers.items()}
        return TensorDict({"params": TensorDict(values, size, device=device)}, size, device=device)

    def _reset(
        self, tensordict: TensorDictBase | None = None, set_state: bool = False, **kwargs: Any
    ) -> TensorDictBase:
        if tensordict is None:
            tensordict = TensorDict({}, self.batch_size, device=self.device)
        size, device = tensordict.batch_size, self.device
        params = tensordict.get("params", None)
        if params is None:
            params = self.gen_params(batch_size=size, device=device)["params"]
        drawn = torch.rand((2, *size), generator=self.rng, device=device) * 2 - 1
        out = {"th": drawn[0] * self.DEFAULT_X, "thdot": drawn[1] * self.DEFAULT_Y, "params": params.clone()}
        root = TensorDict(out, size, device=device)
        return root.update(tensordict.select("th", "thdot", strict=False).clone()) if set_state else root

    @staticmethod
    def _step(tensordict: TensorDictBase) -> TensorDictBase:
        th, thdot, params = tensordict["th"], tensordict["thdot"], tensordict["params"]
        g, m, length, dt = (params[key] for key in ("g", "m", "l", "dt"))
        torque = tensordict["action"].squeeze(-1).clamp(-params["max_torque"], params["max_torque"])
        cost = _wrapped(th) ** 2 + 0.1 * thdot**2 + 0.001 * torque**2
        acceleration = 3 * g / (2 * length) * th.sin() + 3 / (m * length**2) * torque
        speed = (thdot + acceleration * dt).clamp(-params["max_speed"], params["max_speed"])
        out = {
            "th": _wrapped(th + speed * dt),
            "thdot": speed,
            "params": params.clone(),
            "reward": -cost.unsqueeze(-1),
        }
        return TensorDict(out, tensordict.batch_size, device=tensordict.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.rng.manual_seed(seed)


def _wrapped(angle: torch.Tensor) -> torch.Tensor:
    """Return the angle, mapped to ``[-pi, pi)``."""
    return (angle + pi) % (2 * pi) - pi
