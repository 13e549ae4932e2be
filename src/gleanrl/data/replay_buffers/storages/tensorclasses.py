"""Tensorclasses in columns: which groups of a record are tensorclasses, and how they become such again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensor_collection, is_tensorclass

from gleanrl.errors import SchemaError
from gleanrl.tree import Path


def classes_of(data: Any, path: Path = ()) -> dict[Path, type[Any]]:
    """Return the tensorclasses in `data` by their paths, the deepest first; the root's path is empty.

    Args:
        data: a TensorDict or tensorclass.
        path: where it stands.
    """
    if isinstance(data, LazyStackedTensorDict):
        return classes_of(data.tensordicts[0], path)  # of the others the stack shows the same
    found: dict[Path, type[Any]] = {}
    for key in data.keys():
        below = data.get(key)
        if is_tensor_collection(below) and not is_non_tensor(below):
            found.update(classes_of(below, (*path, key)))
    if is_tensorclass(data):
        found[path] = type(data)
    return found


def wrap(record: TensorDict, classes: Mapping[Path, type[Any]]) -> Any:
    """Return `record` with its groups as the tensorclasses they were; fields without a column are None.

    Args:
        record: a TensorDict that nobody else holds; it is changed.
        classes: what `classes_of` returned.
    """
    whole: Any = record
    for path, kind in classes.items():
        if not path:
            whole = kind.from_tensordict(record)
        else:
            parent = record if len(path) == 1 else record.get(path[:-1])
            parent.set(path[-1], kind.from_tensordict(parent.get(path[-1])))
    return whole


def classes_below(paths: Sequence[Path], classes: Mapping[Path, type[Any]]) -> dict[Path, type[Any]]:
    """Return those of `classes` that hold one of the leaves `paths`."""
    return {
        group: kind for group, kind in classes.items() if any(path[: len(group)] == group for path in paths)
    }


def to_names(classes: Mapping[Path, type[Any]]) -> list[tuple[list[str], str]]:
    """Return `classes` as plain values, ``"module:Class"`` for each path."""
    return [(list(path), _name_of(kind)) for path, kind in classes.items()]


def from_names(
    named: Sequence[tuple[Sequence[str], str | type[Any]]], known: Iterable[type[Any]] = ()
) -> dict[Path, type[Any]]:
    """Return the classes that `to_names` described, or that stand there themselves.

    Looks only at modules that the program has imported, and at `known` classes. Records of a class that was made
    within a function, which no name leads to, are TensorDicts, with a warning.

    Raises:
        SchemaError: a class of a module that isn't imported, or hasn't got it.
    """
    own = {_name_of(kind): kind for kind in known}
    found = {tuple(path): name if isinstance(name, type) else _class_named(name, own) for path, name in named}
    return {path: kind for path, kind in found.items() if kind is not None}


def _name_of(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_named(name: str, known: Mapping[str, type[Any]]) -> type[Any] | None:
    if name in known:
        return known[name]
    if "<locals>" in name:
        warnings.warn(
            f"load_state_dict: the records are of the tensorclass {name!r}, which was made within a function and can't "
            "be found by its name; they are loaded as TensorDicts",
            stacklevel=2,
        )
        return None
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split(
        "."
    ):  # what is there already: modules import some of their names when asked for them
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    if not (isinstance(found, type) and is_tensorclass(found)):
        raise SchemaError(
            f"load_state_dict: the records are of the tensorclass {name!r}, which isn't known here: import its "
            "module first"
        )
    return found
