"""Recurrent policies without a primer transform: the environment gets an entry for the policy's state."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from gleanrl._arrays.tensordicts import Path, as_key, as_path
from gleanrl._rollout.env_traits import Env
from gleanrl._rollout.infer_outputs import promised_by, spare
from gleanrl._rollout.loop import with_gradients
from gleanrl._state.rng import torch_rng_preserved
from gleanrl.data.specs import Composite, Unbounded
from gleanrl.envs.env_specs import KEEPING_STATE
from gleanrl.envs.transforms.primer import TensorDictPrimer
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.errors import PolicyError


def with_policy_state(env: Any, policy: Any, device: torch.device | None = None) -> Any:
    """Return `env` wrapped so that it has an entry for each state of `policy`; the entries are zero after a reset.

    `env` itself is returned if the policy isn't a TensorDict module or has no state. The same holds if `env` declares
    one of the states already.

    A recurrent module (for example torchrl's LSTM and GRU modules) reads its state in the root and writes it below
    ``"next"``. An output key below ``"next"`` that the environment doesn't write is such a state. Calling a copy of the
    policy gives its shape and dtype; a policy that can't be copied, or with lazy parameters, is called itself.

    Args:
        env: any environment.
        policy: any policy.
        device: device of the policy's input; None for the environment's device.

    Raises:
        PolicyError: if the call of the policy failed.
    """
    state = _state_of(policy, env) if isinstance(policy, TensorDictModuleBase) else []
    if not state:
        return env
    root = env.fake_tensordict().exclude("next", *env.action_keys)
    try:
        with torch_rng_preserved():
            out = with_gradients(False, spare(policy), root if device is None else root.to(device))
        found = {as_key(path): out.get(("next", *path)) for path in state}
    except Exception as cause:
        raise PolicyError(
            f"policy: it writes its state, {[('next', *path) for path in state]}, which the environment doesn't "
            f"declare; the call that infers its shape raised {type(cause).__name__}: {cause}; add missing transforms "
            "to the environment (for example InitTracker() for 'is_init'), or declare the state with TensorDictPrimer"
        ) from cause
    specs = {
        key: Unbounded(shape=leaf.shape, dtype=leaf.dtype, device=env.device) for key, leaf in found.items()
    }
    primer = TensorDictPrimer(Composite(specs, shape=env.batch_size))
    return TransformedEnv(env, primer, auto_unwrap=False)


def _state_of(policy: TensorDictModuleBase, env: Env) -> list[Path]:
    """Return the paths that a policy writes below ``"next"``; none if the environment writes one of them."""
    specs = (env.full_observation_spec, env.full_reward_spec, env.full_done_spec)
    known = {as_path(key) for spec in specs for key in spec.keys(True, True)}
    state = [path[1:] for path in promised_by(policy) if path[0] == "next"]
    return [] if known & set(state) else state


KEEPING_STATE.append(with_policy_state)
