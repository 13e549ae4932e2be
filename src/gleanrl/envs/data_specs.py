"""Specs from data: what a TensorDict looks like, as a Composite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.data.specs import Composite, NonTensor, TensorSpec, Unbounded
from gleanrl.errors import MissingKeyError
from gleanrl.objects import Objects
from gleanrl.tree import FLAGS, NestedKey, Path, as_key, as_path, iter_leaves


def make_composite_from_td(
    data: TensorDictBase, unsqueeze_null_shapes: bool = True, *, dynamic_shape: bool = False
) -> Composite:
    """Return a spec with an Unbounded leaf for every tensor of `data`, of its shape, dtype and device.

    What isn't a tensor is declared as NonTensor.

    Args:
        data: the TensorDict; its batch size becomes the spec's shape.
        unsqueeze_null_shapes: whether leaves of shape ``()`` are declared as ``(1,)``.
        dynamic_shape: whether the last dimension of every leaf may have any size.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> spec = make_composite_from_td(TensorDict({"x": torch.zeros(3), "y": torch.tensor(1)}, []))
        >>> spec["x"].shape, spec["y"].shape
        (torch.Size([3]), torch.Size([1]))
    """
    leaves: dict[Any, TensorSpec] = {}
    for path, leaf in iter_leaves(data):
        if isinstance(leaf, Objects):
            leaves[as_key(path)] = NonTensor(leaf.shape)
            continue
        shape = (1,) if unsqueeze_null_shapes and not leaf.shape else tuple(leaf.shape)
        shape = (*shape[:-1], -1) if dynamic_shape else shape
        leaves[as_key(path)] = Unbounded(shape, device=leaf.device, dtype=leaf.dtype)
    return Composite(leaves, shape=data.batch_size)


def make_tensordict(env: Any, policy: Any = None) -> TensorDictBase:
    """Return a full step's TensorDict, zero everywhere: the environment's entries and what `policy` writes."""
    fake: TensorDictBase = env.fake_tensordict()
    if policy is None:
        return fake
    with torch.no_grad():
        written = policy(fake.exclude("next").clone())
    out: TensorDictBase = written.apply(torch.zeros_like).set("next", fake.get("next"))
    return out


def learn_specs(
    env: Any, policy: Any, root: TensorDictBase, keys: Mapping[str, NestedKey | list[NestedKey] | None]
) -> dict[str, Composite]:
    """Return the specs that a step of `policy` from `root` shows, by role; see `EnvBase.auto_specs_`."""
    given = [as_path(key) for key in root.keys(True, True) if as_path(key)[0] != "next"]
    stepped = env.step(policy(root))
    after = stepped.get("next")
    outcome = {as_path(key) for key in after.keys(True, True)}
    named = {role: _paths(key) for role, key in keys.items() if key is not None}
    named.setdefault("done", [path for path in sorted(outcome) if path[-1] in FLAGS])
    expected = {path for role, paths in named.items() if role != "action" for path in paths}
    if outcome - expected or expected - outcome:
        raise MissingKeyError(
            f"auto_specs_: a step returned {sorted(map(as_key, outcome), key=str)}; named are "
            f"{sorted(map(as_key, expected), key=str)}"
        )
    named["state"] = [path for path in given if path not in expected]
    sources = dict.fromkeys(named, after) | {"action": stepped, "state": stepped}
    return {
        role: make_composite_from_td(sources[role].select(*map(as_key, paths)), unsqueeze_null_shapes=False)
        for role, paths in named.items()
    }


def _paths(keys: NestedKey | list[NestedKey]) -> list[Path]:
    return [as_path(key) for key in (keys if isinstance(keys, list) else [keys])]
