"""Whether a transformed environment can step into rows of a block, and whether those may be on the CPU."""

from __future__ import annotations

from typing import Any

from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.columns import lists_pass
from gleanrl.envs.transforms.compose import flattened
from gleanrl.overrides import is_ours


def takes_rows(env: Any, within: Transform | None) -> bool:
    """Return whether the base environment's own stepper can be used, with the transforms on the rows' tensors.

    It can't if a transform needs a TensorDict, the environment reads more than actions or resets in the step after an
    end though it could do so at once, or a transform may touch what columns can't hold.

    Args:
        env: a `TransformedEnv`.
        within: the transform of its base environment, if that is transformed, too.
    """
    base, traits = env.base_env, env.traits
    waits = traits.masks_frames and traits.resets_some
    # What needs TensorDicts in there may read what is added here.
    rows = env.transform.takes_rows() and (within is None or within.takes_rows())
    same_resets = set(env.reset_keys) == set(base.reset_keys)  # else base would reset by others
    return rows and not base.state_keys and not waits and same_resets and lists_pass(env)


def may_be_on_host(transform: Transform) -> bool:
    """Return whether all transforms of a chain are as right on the CPU as on the environment's device, and as quick."""
    return all(is_ours(type(part)) and part.on_host and not _patched(part) for part in flattened(transform))


def _patched(transform: Transform) -> bool:
    return any(callable(value) and hasattr(type(transform), name) for name, value in vars(transform).items())
