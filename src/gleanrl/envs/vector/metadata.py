"""What environments declare: read from one that is thrown away, or never built if it exists already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gleanrl.data.specs import TensorSpec, from_torchrl, has_choices, stack_specs
from gleanrl.envs.env_specs import ROLES
from gleanrl.envs.vector.factories import Factory
from gleanrl.errors import InvalidArgumentError
from gleanrl.rollouts.traits import Env, EnvTraits, is_closed
from gleanrl.tree import Path, as_path


@dataclass(frozen=True)
class EnvMetaData:
    """What one environment declares.

    Attributes:
        specs: the composite spec of each role: observation, action, reward, done, state.
        batch_size: its batch dimensions.
        device: its device; None for none.
        traits: what it does otherwise than others.
        name: its class.
    """

    specs: Mapping[str, Any]
    batch_size: torch.Size
    device: torch.device | None
    traits: EnvTraits
    name: str

    @classmethod
    def of(cls, env: Env) -> EnvMetaData:
        """Read them off an environment."""
        specs = {role: from_torchrl(getattr(env, f"full_{role}_spec")).clone() for role in ROLES}
        return cls(specs, torch.Size(env.batch_size), env.device, EnvTraits.of(env), type(env).__name__)

    @property
    def may_mask(self) -> bool:
        """Whether the action has choices, which a mask can restrict."""
        return has_choices(self.specs["action"])

    def fields(self, role: str) -> dict[Path, tuple[torch.Size, Any]]:
        """Return shape and dtype of each leaf of `role`."""
        spec = self.specs[role]
        leaves = {as_path(key): spec[key] for key in spec.keys(True, True)}
        return {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items() if leaf is not None}


def read_metadata(given: Sequence[Factory]) -> tuple[tuple[Factory, ...], tuple[EnvMetaData, ...]]:
    """Return the factory to go on with (see `Factory.probed`) and the metadata of its environment, for each factory.

    Factories that are surely alike share one throw-away environment; an environment that exists is read as it
    is; a factory that knows its metadata (`EnvCreator`) builds nothing.
    """
    found: list[tuple[Factory, EnvMetaData]] = []
    out = []
    for factory in given:
        known = next((each for each in found if factory.alike(each[0])), None)
        if known is None:
            known = _read(factory)
            found.append(known)
        out.append(known)
    return tuple(factory for factory, _ in out), tuple(metadata for _, metadata in out)


def _read(factory: Factory) -> tuple[Factory, EnvMetaData]:
    known = getattr(factory.source, "meta_data", None)
    if isinstance(known, EnvMetaData) and not factory.kwargs:
        return factory, known
    factory, env = factory.probed()
    try:
        return factory, EnvMetaData.of(env)
    finally:
        if not factory.is_instance and not is_closed(env):
            env.close()


def common_batch_size(each: Sequence[EnvMetaData]) -> torch.Size:
    """Return the batch size of every environment.

    Raises:
        InvalidArgumentError: if they differ.
    """
    sizes = {metadata.batch_size for metadata in each}
    if len(sizes) > 1:
        raise InvalidArgumentError(
            f"create_env_fn: expected environments of one batch size, got {sorted(map(tuple, sizes))}"
        )
    return each[0].batch_size


def common_device(each: Sequence[EnvMetaData]) -> torch.device | None:
    """Return the device of every environment.

    Raises:
        InvalidArgumentError: if they differ.
    """
    devices = {metadata.device for metadata in each}
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"device: the environments live on {sorted(map(str, devices))}; say where the batch is to live"
        )
    return each[0].device


def alike(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments declare the same keys, shapes and dtypes."""
    return all(m.fields(role) == each[0].fields(role) for m in each[1:] for role in ROLES)


def stackable(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments' data can be stacked densely: all alike, and of fixed shapes."""
    fixed = all(-1 not in shape for role in ROLES for shape, _ in each[0].fields(role).values())
    return fixed and alike(each)


def same_keys(each: Sequence[EnvMetaData]) -> bool:
    """Return whether the environments' data have the same keys, dtypes and numbers of dimensions."""
    kinds = [
        {
            role: {path: (len(shape), dtype) for path, (shape, dtype) in metadata.fields(role).items()}
            for role in ROLES
        }
        for metadata in each
    ]
    return all(kind == kinds[0] for kind in kinds)


def stacked_spec(role: str, each: Sequence[EnvMetaData], device: torch.device | None) -> TensorSpec:
    """Return the spec of the batch: one with a new first dimension, or a stack of those that differ."""
    return stacked_on([metadata.specs[role] for metadata in each], device)


def stacked_on(specs: Sequence[TensorSpec], device: torch.device | None) -> TensorSpec:
    """Return the stack of the members' specs along a new first dimension, on a device if one is given."""
    if device is None:
        return _stacked(specs)
    here = [spec.to(torch.device("cpu")) for spec in specs]  # compared where that is possible
    return _stacked(here).to(device)


def _stacked(specs: Sequence[TensorSpec]) -> TensorSpec:
    stacked: TensorSpec = stack_specs(specs, 0)
    return stacked
