"""Saved state of any environment: the whole state is checked before anything changes.

`EnvBase`, transformed environments and batches of environments have `parse_state` and `adopt_state` (see
`_state.state`). A class with its own `load_state_dict` can't check a state in advance, so the state is loaded on trial
and undone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from gleanrl._os.interrupts import to_the_end
from gleanrl._rollout.env_traits import Env
from gleanrl.errors import SchemaError


class _Tried(NamedTuple):
    """A state that an environment's own `load_state_dict` accepted on trial."""

    state: Mapping[str, Any]
    strict: bool


def parse_state(env: Any, state: Any, strict: bool) -> Any:
    """Check a saved state of any environment and return the value for `adopt_state`; change nothing.

    An environment with its own `load_state_dict` loads `state` on trial, and then its former state again.

    Raises:
        SchemaError: if the state isn't a mapping or doesn't fit.
        Exception: any error of an environment's own `load_state_dict`.
    """
    if _parses(type(env)):
        return env.parse_state(state, strict)
    check_state(env, state)
    before = copy.deepcopy(dict(env.state_dict()))
    try:
        env.load_state_dict(copy.deepcopy(state), strict=strict)
    finally:
        env.load_state_dict(before)
    return _Tried(copy.deepcopy(state), strict)


def check_state(env: Env, state: Any) -> None:
    """Check that `state` is a mapping, as the states of all environments are.

    Raises:
        SchemaError: if it isn't.
    """
    if not isinstance(state, Mapping):
        raise SchemaError(
            f"load_state_dict: expected the state of a {type(env).__name__}, got {type(state).__name__}"
        )


def adopt_state(env: Any, value: Any) -> None:
    """Take over a value that `parse_state` returned; a second call has no further effect."""
    if isinstance(value, _Tried):
        env.load_state_dict(copy.deepcopy(value.state), strict=value.strict)
    else:
        env.adopt_state(value)


def load_state(env: Any, state: Any, strict: bool) -> None:
    """Restore a saved state of `env` by its own `parse_state` and `adopt_state`; see `parse_state` for the errors.

    An interrupt during `adopt_state` is raised only afterwards, so that no state is half adopted.
    """
    value = env.parse_state(state, strict)
    to_the_end(lambda: env.adopt_state(value))


def _parses(cls: type[Any]) -> bool:
    """Return whether one class defines both `load_state_dict` and `parse_state`.

    A subclass that overrides only `load_state_dict` would be bypassed by an inherited `parse_state`.
    """
    loader = next((base for base in cls.__mro__ if "load_state_dict" in vars(base)), None)
    return loader is not None and "parse_state" in vars(loader)
