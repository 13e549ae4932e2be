"""Saved state of simulators: position in the trajectory and random generators, so that a run resumes mid-trajectory.

An environment may define ``get_state()`` and ``set_state(state)``. So may its gymnasium environment, or any object
within. The state of any other object is all its attributes, if these are plain data (see `gleanrl._state`).

Attributes may not be the whole state, so an environment without these methods is tested: at each call before its first
step or reset, and once afterwards. One of two copies is stepped and then restored from the attributes. From there both
copies must behave identically, bit by bit.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from gleanrl._arrays.tensordicts import flatten
from gleanrl._rollout.env_traits import Env
from gleanrl._state.attribute_kinds import Fixed, has_hooks, saved
from gleanrl._state.attributes import adopt, parse
from gleanrl._state.rng import GENERATORS
from gleanrl._util import is_ours
from gleanrl.data.specs.base import TensorSpec
from gleanrl.envs.base import EnvBase
from gleanrl.envs.env_specs import EnvSpecs
from gleanrl.envs.libs.gym_codecs import ArrayCodec, Codec
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.compose import flattened
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.envs.vector.base import BatchedEnv
from gleanrl.envs.vector.serial import SerialEnv
from gleanrl.errors import SchemaError, UnsupportedError

_FIXED: Fixed = {
    ArrayCodec: ("accepted",),
    EnvBase: ("usage",),
    EnvSpecs: ("_known", "_forms"),
    gymnasium.Wrapper: ("_cached_spec",),
    gymnasium.vector.SyncVectorEnv: ("env_fns",),
    gymnasium.spaces.Box: ("low_repr", "high_repr"),  # texts, which newer releases make at the first print
    Transform: ("_holder", "_parent_found", "_pairs_found", "_pairs_inv_found"),
}
_SETTLED = (gymnasium.spaces.Space, TensorSpec, Codec)
_STEPS, _AFTER = 8, 4
_checked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The result of the test by environment: empty if it can resume mid-trajectory, otherwise the reason why not."""


def remember(env: Any) -> dict[str, Any]:
    """Return the state of `env` as a value that `torch.load(weights_only=True)` accepts.

    The test steps and resets deep copies of `env`. It leaves `env` and the random generators unchanged.

    Raises:
        UnsupportedError: if the state can't be determined; the message says why.
    """
    if isinstance(env, TransformedEnv):
        transforms = [saved(transform, _FIXED) for transform in _foreign(env)]
        return {"kind": "transformed", "base": remember(env.base_env), "transforms": transforms}
    if isinstance(env, SerialEnv):
        return {"kind": "members", "members": [remember(member) for member in env.members]}
    name = type(env).__name__
    if isinstance(env, BatchedEnv):
        raise UnsupportedError(f"the environments of a {name} are in other processes")
    if not isinstance(env, EnvBase) and not has_hooks(env):
        raise UnsupportedError(
            f"{name} is another library's environment; define get_state() and set_state(state)"
        )
    if isinstance(env, EnvBase) and env.was_closed:
        raise UnsupportedError(f"{name}: it was closed")
    state = saved(env, _FIXED)
    why = "" if has_hooks(env) else _checked.get(env)
    if why is None:
        # Before the first step or reset, the result may change: the first reset may take a seed from anywhere.
        why = _difference(env, state)
        if env.usage.started:
            _checked[env] = why
    if why:
        raise UnsupportedError(f"{name}: {why}")
    return {"kind": "env", "attributes": state}


def check_memory(env: Env, state: Any) -> None:
    """Check that `state`, a result of `remember`, fits `env`; restore nothing.

    The check makes the members of a `SerialEnv` that has not started.

    Raises:
        SchemaError: if it doesn't.
    """
    _changes(env, state)


def adopt_memory(env: Env, state: Any) -> None:
    """Restore a state that `check_memory` accepted in `env`; a second call has no further effect."""
    for change in _changes(env, state):
        change()


def _changes(env: Env, state: Any) -> list[Callable[[], None]]:
    kind = state["kind"]
    if kind == "env":
        return [parse(env, state["attributes"], _FIXED, _SETTLED)]
    if kind == "members" and isinstance(env, SerialEnv):
        env.start()
        parts = list(zip(env.members, state["members"], strict=False))
        if len(parts) == len(env.members) == len(state["members"]):
            return [change for member, saved_state in parts for change in _changes(member, saved_state)]
    if kind == "transformed" and isinstance(env, TransformedEnv):
        pairs = list(zip(_foreign(env), state["transforms"], strict=False))
        if len(pairs) == len(state["transforms"]):
            found = [parse(transform, saved_state, _FIXED, _SETTLED) for transform, saved_state in pairs]
            return [*_changes(env.base_env, state["base"]), *found]
    raise SchemaError(f"load_state_dict: the state wasn't saved from environments like {env!r:.200}")


def _foreign(env: TransformedEnv) -> list[Any]:
    """Return the transforms that users have written.

    The library's own transforms save their whole state in their `state_dict`.
    """
    return [t for t in flattened(env.transform) if not is_ours(type(t))]


def _difference(env: Env, state: dict[str, Any]) -> str:
    """Return why `state` doesn't fully restore `env`; empty if some steps of two copies show no difference.

    `env` and all generators are unchanged.
    """
    with GENERATORS.preserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one, other = copy.deepcopy(env), copy.deepcopy(env)
            _behaviour(other, 1)
            adopt(other, state, _FIXED, _SETTLED)
            if _behaviour(one, 0) == _behaviour(other, 0):
                return ""
        except Exception as cause:
            return f"a copy can't be restored from its attributes ({cause}); define get_state() and set_state(state)"
    return (
        "a copy that is restored from its attributes behaves differently, so they aren't its whole state; "
        "define get_state() and set_state(state)"
    )


def _behaviour(env: Env, seed: int) -> list[Any]:
    """Return the results of some steps with seeded generators: in the current trajectory, then in a new one."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    # An environment without internal state reads the root's entries. Zeros may make it fail; the error is recorded
    # then.
    zeros = {path: leaf for spec in _roots(env) for path, leaf in flatten(spec.zero()).items()}
    seen: list[Any] = []
    root: Any = TensorDict({}, env.batch_size, device=env.device)
    for path, leaf in zeros.items():
        root.set(path, leaf)
    try:
        _run(env, root, _STEPS, seen)
    except Exception as error:
        seen.append(repr(error))
    root = env.reset()
    _note(root, seen)
    _run(env, root, _AFTER, seen)
    return seen


def _roots(env: Env) -> tuple[Any, ...]:
    return env.full_observation_spec, env.full_state_spec, env.full_done_spec


def _run(env: Any, root: Any, num_steps: int, seen: list[Any]) -> None:
    for _ in range(num_steps):
        stepped, root = env.step_and_maybe_reset(env.rand_action(root))
        _note(stepped, seen)
        _note(root, seen)


def _note(batch: Any, seen: list[Any]) -> None:
    for path, leaf in flatten(batch).items():
        if isinstance(leaf, torch.Tensor):
            plain = leaf.detach().cpu().contiguous()
            seen.append(
                (path, plain.shape, plain.dtype, plain.reshape(-1).view(torch.uint8).numpy().tobytes())
            )
        else:
            seen.append((path, [repr(item) for item in leaf.items()]))
