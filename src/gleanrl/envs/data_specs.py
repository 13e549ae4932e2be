"""Specs from data: what a TensorDict looks like, as a Composite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass

from gleanrl.data.specs import Composite, NonTensor, TensorSpec, Unbounded
from gleanrl.errors import MissingKeyError
from gleanrl.objects import Leaf, Objects
from gleanrl.rollouts.modes import with_gradients
from gleanrl.tree import FLAGS, NestedKey, Path, as_key, as_path, empty_groups, flatten, iter_leaves


def make_composite_from_td(
    data: TensorDictBase, unsqueeze_null_shapes: bool = True, *, dynamic_shape: bool = False
) -> Composite:
    """Return a spec with an Unbounded leaf for every tensor of `data`, of its shape, dtype and device.

    Values that aren't tensors are declared as `NonTensor` with the first one as example, tensorclasses as composites of
    their class, and tensors whose sizes differ within a lazy stack with dimensions of any size. Nested TensorDicts keep
    their batch size.

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
    kind = type(data) if is_tensorclass(data) else None
    leaves = iter_leaves(data)
    entries: dict[str, TensorSpec] = {}
    for (name, *below), leaf in leaves:
        if name in entries:
            continue
        if below:
            group = data.get(name)
            entries[name] = make_composite_from_td(group, unsqueeze_null_shapes, dynamic_shape=dynamic_shape)
        else:
            entries[name] = _leaf_spec(leaf, unsqueeze_null_shapes, dynamic_shape)
    for path in empty_groups(data):
        if len(path) == 1:
            entries[path[0]] = Composite(shape=data.get(path[0]).batch_size)
    return Composite(entries, shape=data.batch_size, data_cls=kind)


def _leaf_spec(leaf: Leaf, unsqueeze_null_shapes: bool, dynamic_shape: bool) -> TensorSpec:
    """Return the spec of one leaf; see `make_composite_from_td`."""
    if isinstance(leaf, Objects):
        blank = leaf.blank
        if blank is not None:  # tensors of unlike shapes: any size fits
            return Unbounded((*leaf.shape, *[-1] * blank.ndim), device=blank.device, dtype=blank.dtype)
        values = leaf.array.reshape(-1)
        return NonTensor(leaf.shape, example_data=values[0] if len(values) else None, batched=bool(leaf.ndim))
    shape = (1,) if unsqueeze_null_shapes and not leaf.shape else tuple(leaf.shape)
    shape = (*shape[:-1], -1) if dynamic_shape else shape
    return Unbounded(shape, device=leaf.device, dtype=leaf.dtype)


def make_tensordict(env: Any, policy: Any = None) -> TensorDictBase:
    """Return a full step's TensorDict, zero everywhere: the environment's entries and what `policy` writes."""
    fake: TensorDictBase = env.fake_tensordict()
    if policy is None:
        return fake
    written = with_gradients(False, policy, fake.exclude("next").clone())
    out: TensorDictBase = written.apply(torch.zeros_like).set("next", fake.get("next"))
    return out


def learn_specs(
    env: Any, policy: Any, root: TensorDictBase, keys: Mapping[str, NestedKey | list[NestedKey] | None]
) -> dict[str, Composite]:
    """Return the specs that a step of `policy` from `root` shows, by role; see `EnvBase.auto_specs_`."""
    given = [path for path in flatten(root) if path[0] != "next"]
    stepped = env.step(policy(root))
    after = stepped.get("next")
    outcome = set(flatten(after))
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
