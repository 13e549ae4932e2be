"""gleanrl's classes have the members of TorchRL's, or a table names a replacement."""

from __future__ import annotations

import dis
import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl", minversion="0.14")

with warnings.catch_warnings():  # TorchRL's own deprecation warnings
    warnings.simplefilter("ignore")
    import torchrl.collectors
    import torchrl.data
    import torchrl.envs

import gleanrl.collectors
import gleanrl.data
import gleanrl.envs
from gleanrl.compat.unserved import UNSERVED_MEMBERS, unserved_members

pytestmark = pytest.mark.filterwarnings("ignore")

EXEMPT = {
    "MultiCollector": "makes one of two classes, which are looked at",
    "RayReplayBuffer": "passes what it hasn't on to a buffer, which is looked at",
    "RemoteTensorDictReplayBuffer": "passes what it hasn't on to a buffer, which is looked at",
    "default_info_dict_reader": "a dictionary of functions",
    "set_gym_backend": "a context",
    "BaseCollector": "abstract; those that derive from it are looked at",
    "TensorSpec": "abstract; those that derive from it are looked at",
}
INTERNAL = {
    "NO_PARENT_ERR",
    "ENV_ERR",
    "MODE_ERR",
    "ACCEPTED_SPECS",
    "SPEC_TYPE_ERROR",
    "call_hash_fn",
    "hash_to_repertoire_key",
    "custom_arange",
    "all_done_keys",
    "all_truncated_keys",
    "full_done_spec",
    "action_spec",
    "base_env",
    "keys_to_exclude",
    "done_key",
    "done_keys",
    "obs_keys",
    "CONFLICTING_KWARGS",
    "SEP",
    "WRITING_ERR",
}
"""Messages and internal members of TorchRL's classes, which programs don't call."""
POSITIONAL = ("test_input_spec", "test_output_spec", "observation_spec")
"""Arguments that the library itself passes by position."""
NOT_OURS = {*dir(torch.nn.Module), *dir(object)}


def pairs() -> Iterator[tuple[type, type]]:
    for theirs, ours in (
        (torchrl.collectors, gleanrl.collectors),
        (torchrl.data, gleanrl.data),
        (torchrl.envs, gleanrl.envs),
    ):
        for name in dir(ours):
            both = (getattr(theirs, name, None), getattr(ours, name))
            if not name.startswith("_") and name not in EXEMPT and all(map(inspect.isclass, both)):
                yield both  # type: ignore[misc]


PAIRS = list(pairs())


def plain(member: Any) -> Any:
    member = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    return inspect.unwrap(member) if callable(member) else member


def assigned(cls: type, package: str) -> set[str]:
    """Return the attributes and buffers that methods of a class, or of its bases in a package, assign."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith(package):
            found.update(base.__dict__.get("__annotations__", ()))
            for member in map(plain, vars(base).values()):
                if isinstance(member, types.FunctionType):
                    found.update(i.argval for i in dis.get_instructions(member) if i.opname == "STORE_ATTR")
                    if "register_buffer" in member.__code__.co_names:
                        found.update(each for each in member.__code__.co_consts if isinstance(each, str))
    return found


def absent(theirs: Any, ours: Any) -> Iterator[str]:
    """Yield the arguments of `theirs` that `ours` lacks by name, except for arguments that are passed by position."""
    known = inspect.signature(ours).parameters.values()
    names = {parameter.name for parameter in known}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        return
    for place, (name, parameter) in enumerate(inspect.signature(theirs).parameters.items()):
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        by_place = parameter.default is parameter.empty and place < len(known)
        if not (variable or by_place or name in names or name.startswith("_") or name in POSITIONAL):
            yield name


def missing(theirs: type, ours: type) -> set[str]:
    stored, found = assigned(ours, "gleanrl."), set()
    for name in dir(theirs):
        if name.startswith("_") or name in NOT_OURS | INTERNAL:
            continue
        if not hasattr(ours, name):
            if name not in stored:
                found.add(name)
            continue
        functions = [plain(inspect.getattr_static(cls, name, None)) for cls in (theirs, ours)]
        if all(isinstance(function, types.FunctionType) for function in functions):
            found.update(f"{name}({argument})" for argument in absent(*functions))
    return found


def names_of(cls: type) -> tuple[str, ...]:
    return tuple(base.__name__ for base in cls.__mro__)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda cls: cls.__name__)
def test_members_are_served_or_listed_with_a_reason(theirs, ours):
    assert missing(theirs, ours) <= {name for name, _ in unserved_members(names_of(ours))}


@pytest.mark.parametrize("row", UNSERVED_MEMBERS, ids=lambda row: f"{row.owner}-{row.names.split()[0]}")
def test_table_lists_exactly_the_missing_members(row):
    related = [(theirs, ours) for theirs, ours in PAIRS if row.owner in names_of(ours)]
    absent_somewhere = {name for theirs, ours in related for name in missing(theirs, ours)}
    for theirs, ours in related:
        absent_somewhere |= {name for name in assigned(theirs, "torchrl.") if not hasattr(ours, name)}
    assert {*row.names.split()} <= absent_somewhere
