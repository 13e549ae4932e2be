"""What earlier formats become: for each kind of file a table, from a format to what makes the next one of it.

A function gets the tree of JSON that was read, which is its own to change, and returns that of the next format. It's
run before anything in the tree is checked or believed, so that it needs no checks of its own: what it stumbles over
is damage. A format that checkpoints of a release have keeps its function for ever, and `tests/checkpoint/golden` has
a checkpoint of it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gleanrl.errors import CorruptCheckpointError, IncompatibleCheckpointError

Tree = dict[str, Any]
Migrations = Mapping[int, Callable[[Tree], Tree]]


def _with_extents(tree: Tree) -> Tree:
    """Let each file, which has checksums itself, be one extent of that number."""
    files = tree["files"]
    return {
        **tree,
        "files": [{"name": file["name"], "size": file["size"]} for file in files],
        "extents": _packed((n for number, file in enumerate(files) for n in (number, 0, file["size"])), 8),
        "crc32": _packed((checksum for file in files for checksum in file["crc32"]), 4),
    }


def _packed(numbers: Iterable[int], size: int) -> str:
    return b64encode(b"".join(number.to_bytes(size, "little") for number in numbers)).decode()


MANIFESTS: Migrations = {1: lambda tree: tree, 2: lambda tree: tree, 3: _with_extents}
"""Of manifests. The second format has one kind of value more, rows in segments; the third two, of non-tensor data; the
fourth many extents in a file."""
HDF5: Migrations = {1: lambda tree: tree}
"""Of the trees in HDF5 files. The second format has the two kinds of non-tensor data."""


def migrated(tree: Tree, newest: int, steps: Migrations, what: str) -> Tree:
    """Return a tree of the newest format.

    Args:
        tree: of any format, which stands under ``"format"``.
        newest: the format that this library writes.
        steps: one of the tables above.
        what: the tree is of, for messages.

    Raises:
        CorruptCheckpointError: the tree isn't of the format that it says.
        IncompatibleCheckpointError: a later library wrote it, or one so early that nothing here reads it.
    """
    version = tree.get("format")
    if type(version) is not int or version < 0:
        raise CorruptCheckpointError(f"{what}: 'format' isn't an integer of 0 or more")
    if version > newest:
        raise IncompatibleCheckpointError(
            f"{what}: format {version}; this library reads {newest}: a later one wrote it"
        )
    for step in range(version, newest):
        if step not in steps:
            raise IncompatibleCheckpointError(
                f"{what}: format {version}, which no release wrote; this library reads {newest}"
            )
        try:
            tree = steps[step](tree)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as cause:
            raise CorruptCheckpointError(f"{what}: it isn't of format {step}: {cause!r}") from cause
    return tree
