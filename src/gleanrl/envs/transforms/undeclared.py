"""What a transform adds without a spec: found by a trial of its `_call` on a copy, and declared in its place."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from tensordict import TensorDict

from gleanrl.data.specs import Composite, TensorSpec, Unbounded
from gleanrl.envs.transforms.base import Transform
from gleanrl.overrides import overridden
from gleanrl.randomness import torch_kept
from gleanrl.tree import NestedKey, as_key, as_path, is_private


def undeclared_entries(transform: Transform, output_spec: Composite) -> dict[NestedKey, TensorSpec]:
    """Return specs of what a user's `_call` adds to a step's outcome and no spec declares; warns of them.

    A copy of the transform is called once, on zeros. Where that fails, nothing is known, and the first step of a
    rollout names the key.

    Args:
        transform: one transform of a chain.
        output_spec: what it says comes out of it.
    """
    if not transform.writes_anything() or transform.takes_rows():
        return {}
    if overridden(transform, "_step", of=Transform):
        return {}  # what that does may need the environment
    outcome = TensorDict({}, output_spec.shape, device=output_spec.device)
    for role in ("observation", "reward", "done"):
        outcome.update(output_spec[f"full_{role}_spec"].zero())
    known = set(outcome.keys(True, True))
    try:
        with _undisturbed(), torch.no_grad():
            made = transform.tried(outcome)
        found = {key: made.get(key) for key in made.keys(True, True) if key not in known}
    except Exception:  # whatever a user's transform raises on zeros, or when it's copied
        return {}
    added: dict[NestedKey, TensorSpec] = {
        as_key(as_path(key)): Unbounded(value.shape, dtype=value.dtype, device=value.device)
        for key, value in found.items()
        if isinstance(value, torch.Tensor) and not is_private(as_path(key))
    }
    if added:
        warnings.warn(
            f"{transform!r} adds {list(added)}, which no spec declares: taken as observations that are zero after a "
            "reset if it doesn't add them there; declare them in transform_observation_spec",
            stacklevel=2,
        )
    return added


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the global random generators as they are."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch_kept():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
