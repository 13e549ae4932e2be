"""Loading the state of an environment, whatever it is made of: all of it is parsed before any of it changes.

`EnvBase`, transformed environments and batches of environments have `parse_state` and `adopt_state`, as in
`_state.state`. An environment with a `load_state_dict` of its own can't say beforehand what it would take: it is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from gleanrl._os.interrupts import to_the_end
from gleanrl._rollout.env_traits import Env
from gleanrl.errors import SchemaError


class _Tried(NamedTuple):
    """A state that an environment's own `load_state_dict` took."""

    state: Mapping[str, Any]
    strict: bool


def parse_state(env: Any, state: Any, strict: bool) -> Any:
    """Return the value for `adopt_state` of a saved state of any environment; nothing changes.

    Raises:
        SchemaError: if it isn't one.
        Exception: what the environment raises for a state that doesn't fit.
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
    """Raise unless `state` is a mapping, as the states of all environments are.

    Raises:
        SchemaError: if it isn't.
    """
    if not isinstance(state, Mapping):
        raise SchemaError(
            f"load_state_dict: expected the state of a {type(env).__name__}, got {type(state).__name__}"
        )


def adopt_state(env: Any, value: Any) -> None:
    """Let an environment go on from a value that `parse_state` returned; twice has the result of once."""
    if isinstance(value, _Tried):
        env.load_state_dict(copy.deepcopy(value.state), strict=value.strict)
    else:
        env.adopt_state(value)


def load_state(env: Any, state: Any, strict: bool) -> None:
    """Parse a state of `env`, by the `parse_state` of its own, then adopt it; an interrupt comes before or after."""
    value = env.parse_state(state, strict)
    to_the_end(lambda: env.adopt_state(value))


def _parses(cls: type[Any]) -> bool:
    """Return whether the class that says how a state is loaded says how it is parsed, too."""
    loader = next((base for base in cls.__mro__ if "load_state_dict" in vars(base)), None)
    return loader is not None and "parse_state" in vars(loader)
