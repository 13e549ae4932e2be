"""The folder that a user names, with its checkpoints: commits, loads, and removal of leftovers."""

from __future__ import annotations

import errno
import os
import re
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from gleanrl import __version__
from gleanrl._checkpoint.manifest import MOST_BYTES, Manifest
from gleanrl._checkpoint.reader import FileReader
from gleanrl._checkpoint.tree_codec import Decoder, Encoder, sources_in
from gleanrl._checkpoint.writer import Earlier, FileWriter
from gleanrl._os import files
from gleanrl._os.atomic_files import remove_abandoned
from gleanrl._os.proc import identity
from gleanrl._util import flag, named, positive
from gleanrl.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    IncompleteCheckpointError,
)

# Numbers are written with 8 digits, larger ones with more.
_CHECKPOINT = re.compile(r"ckpt-([0-9]{8,})-[0-9a-f]{32}")
_LEFTOVER = re.compile(r"(tmp|trash)-[0-9a-f]{32}")
_LOCK, _MANIFEST = "LOCK", "manifest.json"
_NOT_PLAIN = (errno.EISDIR, errno.ELOOP, errno.ENXIO)
_MOST_LISTINGS = 100  # Most listings of a folder whose checkpoints are removed before they are read.
_LIBRARIES = ("torch", "tensordict", "numpy")
_MAX_NAMES = 4  # names in a message
_REMEMBERED = 8  # Most folders whose last commit this process remembers.
# The last commit of this process by folder, with the hash of its manifest. Any thread writes it without a lock. An
# entry is used only if path and hash match the folder, so a stale one does no harm.
_written: dict[Path, tuple[bytes, Earlier]] = {}


@dataclass(frozen=True)
class Found:
    """A checkpoint that was loaded.

    Attributes:
        path: its folder.
        kind: the kind of the state's owner.
        state: the state.
        skipped: for each newer damaged checkpoint, its name and the damage.
    """

    path: Path
    kind: str
    state: Any
    skipped: dict[str, str]


class Folder:
    """Commits and loads checkpoints. Several processes may use one folder; only one may write at a time.

    Args:
        path: the folder; the first commit creates it.

    Raises:
        InvalidArgumentError: the path is empty (also a ValueError).
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        # Absolute, because the current directory may change while a dump is running.
        self.path = Path(named("path", os.fspath(path))).absolute()

    # ---------------------------------------------------------------- writing
    def commit(self, kind: str, state: Any, keep: int = 1, aside: Event | None = None) -> Path:
        """Write a checkpoint, and return its path once it is on the disk.

        A crash of the process or the machine at any moment leaves the earlier checkpoints, with or without the new one.
        Checkpoints older than the last `keep` are removed. So are the leftovers of killed processes.

        Data that the newest checkpoint already has become links to its files. Each checkpoint is complete by itself.

        Rows in the state (`CowSnapshot`) are closed at the end, also after an error. Files that can't be removed only
        give a warning.

        Args:
            kind: the kind of the state's owner.
            state: a value of the kinds that `tree_codec` lists.
            keep: the number of checkpoints to keep, 1 or more.
            aside: an event for a background commit; see `FileWriter`.

        Raises:
            CheckpointError: the state can't be saved; or another process or thread is writing, which the message names;
                or the folder holds checkpoints of another kind, or is a file.
            OSError: the disk is full, or fails. The incomplete checkpoint is removed.
            InvalidArgumentError: `keep` is below 1.
        """
        try:
            return self._alone(partial(self._commit, kind, state, positive("keep", keep), aside))
        finally:
            for source in sources_in(state):
                source.close()

    def _commit(self, kind: str, state: Any, keep: int, aside: Event | None) -> Path:
        """Write a checkpoint while the lock is held; return its path.

        The order makes the commit atomic. `_write` syncs all files before the rename, so that the final name never
        refers to missing bytes. The folder is synced after it, so that the name is on the disk when this returns. Older
        checkpoints are removed last, so that at least one is complete at any moment.
        """
        names = self._names()
        self._collect(names)
        older = self._checkpoints(names)
        newest = self._newest(older)
        if newest is not None and newest.kind != kind:
            raise CheckpointError(
                f"{self.path}: expected checkpoints of a {kind}, got a folder with checkpoints of a {newest.kind}, "
                "which the new one would replace: use another folder"
            )
        number = older[0][0] + 1 if older else 1
        draft = self.path / f"tmp-{uuid.uuid4().hex}"
        path = self.path / f"ckpt-{number:08d}-{uuid.uuid4().hex}"
        try:
            files.make_dir(draft, exist_ok=False)
            with FileWriter(draft, newest, aside) as writer:
                manifest = self._write(writer, kind, state)
                written = writer.as_earlier(path, kind)
            files.rename(draft, path)
            files.sync_dir(self.path)
        except BaseException:
            with suppress(OSError):
                files.remove_tree(draft)
            # The rename may have happened without its sync. A crash could then undo it, so the checkpoint is removed.
            with suppress(OSError):
                self._remove(path)
            raise
        _note(self.path, manifest, written)
        self._retire(older[keep - 1 :])
        return path

    @staticmethod
    def _write(writer: FileWriter, kind: str, state: Any) -> bytes:
        """Write the data files and then the manifest, and sync them; return the manifest's bytes.

        Raises:
            CheckpointError: a value can't be saved, or the manifest is longer than `MOST_BYTES`.
        """
        tree = Encoder(writer.store, writer.attach, writer.segments, writer.pieces).tree(state)
        manifest = Manifest(kind, tree, *writer.write(), _libraries()).encoded()
        if len(manifest) > MOST_BYTES:
            raise CheckpointError(
                f"expected a state of at most {MOST_BYTES} bytes without its tensors, got {len(manifest)}: "
                "store large data as tensors"
            )
        writer.add(_MANIFEST, manifest)
        writer.sync()
        return manifest

    def _newest(self, checkpoints: list[tuple[int, Path]]) -> Earlier | None:
        """Return the newest checkpoint, for links to its files; None if there is none or if its manifest is damaged."""
        for _, path in checkpoints[:1]:
            with suppress(CheckpointError):
                manifest = _manifest_bytes(path / _MANIFEST)
                digest, written = _written.get(self.path, (b"", None))
                if written is not None and written.path == path and digest == sha256(manifest).digest():
                    return written
                return Earlier.of(path, Manifest.decoded(manifest))
        return None

    def _alone(self, commit: Callable[[], Path]) -> Path:
        """Run a commit while holding the folder's lock; return its result."""
        # With a checkpoint in it, the folder's name is already on the disk.
        if not self._checkpoints(self._names()):
            files.make_lasting_dir(self.path)
        owner, lock = identity(), self.path / _LOCK
        begun = False

        def work() -> Path:
            nonlocal begun
            begun = True
            return commit()

        try:
            return files.while_locked(lock, owner.encode(), work)
        except OSError as cause:
            # An error of the commit itself, and not of the lock.
            if begun:
                raise
            if isinstance(cause, BlockingIOError):
                who = f"another process is writing a checkpoint here: {cause}"
                if str(cause) == owner:
                    who = "this process is writing a checkpoint here already: wait for it, or give each its own folder"
                raise CheckpointError(f"{self.path}: {who}") from cause
            if not isinstance(cause, files.NotPlainError) and cause.errno not in _NOT_PLAIN:
                raise
            raise CheckpointError(
                f"{lock}: expected the plain file that a dump makes, got a directory, a link, a pipe or a socket: "
                "remove it, or dump into another folder"
            ) from cause

    def _names(self) -> list[str]:
        """Return the names in the folder; an empty list if it doesn't exist.

        Raises:
            CheckpointError: the path, or a parent of it, is a file.
            OSError: the operating system refuses.
        """
        try:
            return files.names(self.path)
        except NotADirectoryError as cause:
            raise CheckpointError(
                f"{self.path}: expected a folder of checkpoints, got a file, or a path below a file: give the folder "
                "of a dump; for a file of H5StorageCheckpointer, call H5StorageCheckpointer().loads(storage, path)"
            ) from cause

    def _collect(self, names: list[str]) -> None:
        """Remove the leftovers of killed processes. The lock is held, so no process is still using them.

        A leftover that can't be removed stays, with a warning. It has no checkpoint's name, so later calls ignore it.
        """
        removals = [
            partial(files.remove_tree, self.path / name) for name in names if _LEFTOVER.fullmatch(name)
        ]
        for remove in [*removals, partial(remove_abandoned, self.path, names, ".h5")]:
            try:
                remove()
            except OSError as cause:
                warnings.warn(
                    f"{self.path}: a leftover of a process that ended can't be removed: {cause}", stacklevel=4
                )

    def _retire(self, checkpoints: list[tuple[int, Path]]) -> None:
        """Remove older checkpoints. The first error ends the call with a warning: the new checkpoint is complete."""
        try:
            for _, old in checkpoints:
                self._remove(old)
        except OSError as cause:
            warnings.warn(f"{self.path}: older checkpoints are still there: {cause}", stacklevel=4)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. The rename comes first, so that a half-removed folder never has a checkpoint's name."""
        gone = self.path / f"trash-{uuid.uuid4().hex}"
        files.rename(path, gone)
        files.remove_tree(gone)

    # ---------------------------------------------------------------- reading
    def _checkpoints(self, names: list[str]) -> list[tuple[int, Path]]:
        """Return the number and path of each entry with a checkpoint's name, newest first."""
        found = [
            (int(match[1]), self.path / name) for name in names if (match := _CHECKPOINT.fullmatch(name))
        ]
        return sorted(found, reverse=True)

    def load(self, verify: bool = True, take: Callable[[str, Any], Any] | None = None) -> Found:
        """Return the newest complete checkpoint. A warning names newer damaged ones, with their damage.

        Another process may write to the folder during the call. So the folder is listed again until two listings agree.

        Rows in segments (`Stored`) are read by the callback `take`, directly into their final memory, and verified
        there.

        Args:
            verify: whether checksums are compared; sizes always are.
            take: a callback that receives kind and state, reads rows, and returns the value for `Found.state`. If it
                raises `CorruptCheckpointError`, an older checkpoint is tried. With None, `Found.state` is the state
                itself. Its rows are verified now, and read again later.

        Raises:
            IncompleteCheckpointError: the folder holds no complete checkpoint.
            CorruptCheckpointError: all checkpoints are damaged; the message names the files.
            IncompatibleCheckpointError: a later release wrote the newest one.
            CheckpointError: a writer removed each checkpoint while it was read, or the path is a file.
            Exception: any other error of `take`.
        """
        flag("verify", verify)
        skipped: dict[str, str] = {}
        before, listings = None, 0
        while (listed := self._checkpoints(self._names())) != before:
            if listings == _MOST_LISTINGS:
                raise CheckpointError(
                    f"{self.path}: a writer removed the newest checkpoint while it was read, {listings} times, because "
                    "it writes faster than this process reads: keep more checkpoints (keep=3), or load between writes"
                )
            before, skipped, listings = listed, {}, listings + 1
            for _, path in listed:
                try:
                    kind, state = read(path, verify, take)
                except CorruptCheckpointError as damage:
                    if path.name not in self._names():
                        # A writer has removed it since the listing, after it completed a newer one. So list again.
                        break
                    skipped[path.name] = str(damage)
                    continue
                if skipped:
                    lines = "; ".join(f"{name}: {why}" for name, why in skipped.items())
                    warnings.warn(f"{path} is loaded; newer ones are damaged: {lines}", stacklevel=3)
                return Found(path, kind, state, skipped)
        if skipped:
            raise CorruptCheckpointError("; ".join(skipped.values()))
        raise IncompleteCheckpointError(f"{self.path}: there is no complete checkpoint{_hint(self._names())}")


def expecting(
    path: os.PathLike[str] | str, kind: str, take: Callable[[dict[str, Any]], Any]
) -> Callable[[str, Any], None]:
    """Return a callback for `Folder.load` that accepts the state of one kind only, and returns None.

    For any other state the callback raises `IncompatibleCheckpointError`, so that no older checkpoint is tried.

    Args:
        path: the folder that the user gave, for messages.
        kind: the `kind` that `Folder.commit` got.
        take: receives the state.
    """

    def checked(found: str, state: Any) -> None:
        if found != kind or not isinstance(state, dict):
            raise IncompatibleCheckpointError(
                f"{path}: expected a checkpoint of a {kind}, got one of a {found}"
            )
        take(state)

    return checked


def read(path: Path, verify: bool = True, take: Callable[[str, Any], Any] | None = None) -> tuple[str, Any]:
    """Return the kind of one checkpoint, and its state or the result of `take`; see `Folder.load`.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged; the message names the file.
        IncompatibleCheckpointError: a later release wrote it.
    """
    manifest = Manifest.decoded(_manifest_bytes(path / _MANIFEST))
    reader = FileReader(path, manifest.files, manifest.extents, verify)
    reader.fill(manifest.state, unread=take is not None)
    state = Decoder(reader.fetch, reader.rows).value(manifest.state)
    reader.finish(rows=take is None)
    return manifest.kind, state if take is None else take(manifest.kind, state)


def _hint(names: Sequence[str]) -> str:
    """Return a hint for the error about a folder that holds other entries but no checkpoint."""
    if _MANIFEST in names:
        return "; this folder is a checkpoint itself: give the folder that contains it"
    unknown = sorted(name for name in names if name != _LOCK and not _LEFTOVER.fullmatch(name))
    if not unknown:
        return ""
    listed = ", ".join(map(repr, unknown[:_MAX_NAMES])) + (", …" if unknown[_MAX_NAMES:] else "")
    return (
        f"; it holds {listed}, which no dump of this "
        "library wrote: load data of another library with that library, and extend a buffer with them"
    )


@cache
def _libraries() -> dict[str, str]:
    # The library itself may be a source tree on the path, which has no metadata.
    return {"gleanrl": __version__, **{name: version(name) for name in _LIBRARIES}}


def _note(folder: Path, manifest: bytes, written: Earlier) -> None:
    """Remember the last commit of a folder.

    The next commit then need not read it, which takes longer than writing it.
    """
    _written.pop(folder, None)
    _written[folder] = sha256(manifest).digest(), written
    for old in list(_written)[:-_REMEMBERED]:
        _written.pop(old, None)


def _manifest_bytes(path: Path) -> bytes:
    try:
        if not files.is_dir(path.parent):
            raise CorruptCheckpointError(f"{path.parent}: expected a folder, got a file or a link")
        with files.reading(path) as file:
            size = files.size_of(file)
            if size > MOST_BYTES:
                raise CorruptCheckpointError(f"{path}: expected at most {MOST_BYTES} bytes, got {size}")
            data = np.empty(size, np.uint8)
            files.read_into(file, data, 0)
    except OSError as cause:
        raise CorruptCheckpointError(f"{path}: {cause}") from cause
    return data.tobytes()
