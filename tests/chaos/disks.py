"""A file system in memory that replaces the operating system's and enumerates the possible results of a power cut.

The rules are harsher than the rules of any real file system. Changes that aren't synced may be lost. A file may keep
its writes up to any moment, with a torn or zeroed end. A directory may keep any subset of its changes. A rename happens
or doesn't. A completed sync is permanent.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gleanrl._arrays.native import spread_rows
from gleanrl._checkpoint import writer as files
from gleanrl._os import atomic_files, parallel_read
from gleanrl._os import files as descriptors
from gleanrl._os import files as fs
from gleanrl._os.threads import for_each

Tree = dict[str, int]  # content of a directory: name -> number of a file or directory
Content = Tree | bytearray | bytes
ROOT = 0
_CODES = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}


def _error(kind: type[OSError], path: object) -> OSError:
    return kind(_CODES[kind], os.strerror(_CODES[kind]), str(path))


class Disk:
    """The file functions of the module `os`, in memory; `mounted` installs them.

    Args:
        content: content of directories and files by their numbers; directory 0 is the root. None for an empty disk.
    """

    def __init__(self, content: dict[int, Content] | None = None) -> None:
        self.content: dict[int, Content] = {ROOT: {}} if content is None else content
        # all changes: (kind of change, number of the file or directory, argument)
        self.journal: list[tuple[str, int, Any]] = []
        self.opened: list[str] = []
        self.acts = 0
        self.before: Callable[[int, str], Any] = lambda number, name: None
        """Called before each act. It may raise. Its result limits the number of bytes that are read or written."""
        self._files: dict[int, int] = {}
        self._numbers = itertools.count(max(self.content) + 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("O_", "SEEK_")):
            return getattr(os, name)
        raise AttributeError(f"the disk has no {name}: write it")

    def _act(self, name: str) -> Any:
        self.acts += 1
        return self.before(self.acts, name)

    # ------------------------------------------------------------ names
    def _number(self, path: object) -> int:
        number = ROOT
        for part in str(path).split("/")[1:]:
            tree = self.content[number]
            if not isinstance(tree, dict):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
            if part:
                if part not in tree:
                    raise _error(FileNotFoundError, path)
                number = tree[part]
        return number

    def _place(self, path: object) -> tuple[int, Tree, str]:
        folder, _, name = str(path).rpartition("/")
        number = self._number(folder)
        tree = self.content[number]
        assert isinstance(tree, dict)
        return number, tree, name

    def _enter(self, path: object, number: int) -> None:
        folder, tree, name = self._place(path)
        if name in tree:
            raise _error(FileExistsError, path)
        tree[name] = number
        self.journal.append(("change", folder, {name: number}))

    def _leave(self, path: object) -> None:
        folder, tree, name = self._place(path)
        if name not in tree:
            raise _error(FileNotFoundError, path)
        del tree[name]
        self.journal.append(("change", folder, {name: None}))

    def mkdir(self, path: object, mode: int = 0) -> None:
        self._act("mkdir")
        self._make_dir(path)

    def _make_dir(self, path: object) -> None:
        number = next(self._numbers)
        self._enter(path, number)
        self.content[number] = {}
        self.journal.append(("make", number, None))

    def makedirs(self, path: object, exist_ok: bool = False) -> None:
        self._act("mkdir")
        parts = str(path).split("/")
        for end in range(2, len(parts) + 1):
            try:
                self._make_dir("/".join(parts[:end]))
            except FileExistsError:
                if end == len(parts) and not exist_ok:
                    raise

    def listdir(self, path: object) -> list[str]:
        self._act("listdir")
        return list(self.content[self._number(path)])  # type: ignore[arg-type]

    def link(self, path: object, to: object, **options: Any) -> None:
        self._act("link")
        self._enter(to, self._number(path))

    def unlink(self, path: object) -> None:
        self._act("unlink")
        self._leave(path)

    def rename(self, path: object, to: object) -> None:
        self._act("rename")
        number = self._number(path)
        (folder, old, name), (folder_, new, name_) = self._place(path), self._place(to)
        assert folder == folder_, "renames between directories: write them"
        if name_ in new and isinstance(self.content[new[name_]], dict):
            raise _error(FileExistsError, to)
        del old[name]
        new[name_] = number
        self.journal.append(("change", folder, {name: None, name_: number}))

    def rmtree(self, path: object) -> None:
        """Replace `shutil.rmtree`; each removal is one act."""
        for name in self.listdir(path):
            if isinstance(self.content[self._number(f"{path}/{name}")], dict):
                self.rmtree(f"{path}/{name}")
            else:
                self.unlink(f"{path}/{name}")
        self._act("rmdir")
        self._leave(path)

    # ------------------------------------------------------------ files
    def open(self, path: object, flags: int, mode: int = 0) -> int:
        self._act("open")
        self.opened.append(str(path))
        try:
            number = self._number(path)
            if flags & os.O_EXCL:
                raise _error(FileExistsError, path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            number = next(self._numbers)
            self._enter(path, number)
            self.content[number] = bytearray()
        descriptor = os.open(
            os.devnull, os.O_RDONLY
        )  # a real descriptor, which is closed at the latest when the process ends
        self._files[descriptor] = number
        return descriptor

    @property
    def num_open(self) -> int:
        """Return the number of open files and directories."""
        return len(self._files)

    def close(self, file: int) -> None:
        os.close(file)
        if self._files.pop(file, None) is not None:  # otherwise the descriptor belongs to an earlier disk
            self._act("close")

    def write(self, file: int, data: Any) -> int:
        return self._put(file, bytes(data), None, self._act("write"))

    def writev(self, file: int, pieces: Any) -> int:
        return self._put(file, b"".join(map(bytes, pieces)), None, self._act("write"))

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        return self._put(file, bytes(data), offset, self._act("write"))

    def _put(self, file: int, data: bytes, offset: int | None, most: int | None) -> int:
        content = self.content[self._files[file]]
        assert isinstance(content, bytearray)
        begin, data = len(content) if offset is None else offset, data[:most]
        content[begin : begin + len(data)] = data
        self.journal.append(("write", self._files[file], (begin, data)))
        return len(data)

    def ftruncate(self, file: int, size: int) -> None:
        self._act("truncate")
        content = self.content[self._files[file]]
        assert isinstance(content, bytearray) and size <= len(content)
        del content[size:]
        self.journal.append(("truncate", self._files[file], size))

    def lseek(self, file: int, offset: int, whence: int) -> None:
        content = self.content[self._files[file]]
        assert whence == os.SEEK_SET and offset == len(content), "files grow at their ends: write it"

    def fsync(self, file: int) -> None:
        self._act("fsync")
        self.journal.append(("sync", self._files[file], None))

    def lstat(self, path: object) -> Any:
        self._act("lstat")
        return self._state(self.content[self._number(path)])

    def fstat(self, file: int) -> Any:
        self._act("fstat")
        return self._state(self.content[self._files[file]])

    @staticmethod
    def _state(content: Any) -> Any:
        kind = stat.S_IFDIR if isinstance(content, dict) else stat.S_IFREG
        return SimpleNamespace(st_mode=kind, st_size=len(content), st_nlink=1)

    def preadv(self, file: int, buffers: list[Any], offset: int) -> int:
        content, most = self.content[self._files[file]], self._act("read")
        assert isinstance(content, (bytearray, bytes))
        found = content[offset : offset + len(buffers[0])][:most]
        buffers[0][: len(found)] = found
        return len(found)

    def read_files(self, files: Any, block: int, threads: int) -> tuple[int, int, int] | None:
        """Replace `gleanrl._arrays.native.read_files`; each read is one act."""
        for number, (path, offset, memory, checksums) in enumerate(files):
            try:
                file = self.open(os.fsdecode(path), os.O_RDONLY)
                content = bytes(self.content[self._files[file]])[offset:]  # type: ignore[arg-type]
                self._act("read")
                self.close(file)
            except OSError as cause:
                return number, 0, cause.errno or 0
            source = np.frombuffer(content or b"0", np.uint8).ctypes.data
            if isinstance(memory, tuple):
                at = memory[2]
                if at <= len(content):
                    spread_rows([(source, memory)], 1)
            else:
                at = 0
                for place, size in np.frombuffer(memory, np.int64).reshape(-1, 2).tolist():
                    if place and at < len(content):
                        ctypes.memmove(place, source + at, min(size, len(content) - at))
                    at += size
            if at > len(content):
                return number, 1, offset + len(content)
            for begin, checksum in zip(range(0, at, block), checksums, strict=False):
                if zlib.crc32(content[begin : min(begin + block, at)]) != checksum:
                    return number, 2, offset + begin
        return None

    def pread(self, file: int, size: int, offset: int) -> bytes:
        return bytes(self.content[self._files[file]][offset : offset + size])  # type: ignore[index]

    @contextmanager
    def mounted(self) -> Iterator[Disk]:
        """Install this disk in place of the operating system's files, within a ``with`` block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fs, "os", self)
            patch.setattr(descriptors, "os", self)
            patch.setattr(atomic_files, "os", self)
            patch.setattr(fs, "shutil", self)
            patch.setattr(parallel_read, "native", self)
            locks = SimpleNamespace(flock=lambda *a: None, LOCK_EX=0, LOCK_NB=0, LOCK_UN=0)
            patch.setattr(fs, "fcntl", locks)
            patch.setattr(atomic_files, "fcntl", locks)
            yield self


def make_files_small(patch: pytest.MonkeyPatch, extent: int = 64) -> None:
    """Store each tensor of 64 bytes as a large one, in one file with extents of `extent` bytes, in one thread."""
    patch.setattr(files, "LARGE_BYTES", 64)
    patch.setattr(files, "MOST_FILES", 1)
    patch.setattr(files, "BLOCK_BYTES", extent)
    patch.setattr(files, "for_each", lambda call, items, count: for_each(call, items, 1))


class Remains:
    """All states in which a power cut may leave a disk, given its journal up to some act.

    Args:
        content: content of the disk before, synced; None for an empty disk.
        is_synced: returns whether a sync takes effect, for a directory (True) or a file (False).
    """

    def __init__(
        self,
        content: dict[int, Content] | None = None,
        is_synced: Callable[[bool], bool] = lambda is_directory: True,
    ) -> None:
        self._is_synced = is_synced
        self._durable: dict[int, Content] = {ROOT: {}} if content is None else dict(content)
        self._pending: dict[int, list[Any]] = {}
        self._options: dict[int, list[Content]] = {}
        self._known: dict[tuple[int, Any], Content] = {}

    def add(self, act: str, number: int, what: Any) -> None:
        """Apply one entry of a journal."""
        if act == "make":
            self._durable[number] = {}
        elif act != "sync":
            self._pending.setdefault(number, []).append((act, what))
        else:
            last = self._options_of(number)
            if self._is_synced(isinstance(last[-1], dict)):
                self._durable[number] = last[-1]
                self._pending.pop(number, None)
        self._options.pop(number, None)

    def states(self) -> Iterator[dict[int, Content]]:
        """Yield each possible disk once. A yielded disk changes when the next one is requested."""
        return self._expand({}, [ROOT])

    def _expand(self, chosen: dict[int, Content], ahead: list[int]) -> Iterator[dict[int, Content]]:
        if not ahead:
            yield chosen
            return
        number, *ahead = ahead
        if number in chosen:  # it was reached by another name before
            yield from self._expand(chosen, ahead)
            return
        for content in self._options_of(number):
            chosen[number] = content
            below = content.values() if isinstance(content, dict) else ()
            yield from self._expand(chosen, [*ahead, *below])
        del chosen[number]

    def _options_of(self, number: int) -> list[Content]:
        """Return all possible contents of a file or directory. The last one has all changes."""
        if number not in self._options:
            pending = self._pending.get(number, [])
            base = self._durable.get(number, b"")
            found = list(_trees(base, pending) if isinstance(base, dict) else _files(base, pending))
            keys = {frozenset(one.items()) if isinstance(one, dict) else one: one for one in found}
            all_of_it = found[-1]
            same = [
                self._known.setdefault((number, key), one) for key, one in keys.items() if one != all_of_it
            ]
            last = frozenset(all_of_it.items()) if isinstance(all_of_it, dict) else all_of_it
            self._options[number] = [*same, self._known.setdefault((number, last), all_of_it)]
        return self._options[number]


def _trees(base: Tree, changes: list[Any]) -> Iterator[Tree]:
    for happened in itertools.product((False, True), repeat=len(changes)):
        tree: dict[str, int | None] = dict(base)
        for happens, (_, change) in zip(happened, changes, strict=True):
            if happens:
                tree |= change
        yield {name: number for name, number in tree.items() if number is not None}


def _files(base: bytes, writes: list[Any]) -> Iterator[bytes]:
    content = bytearray(base)
    for act, what in writes:
        yield bytes(content)
        if act == "truncate":
            del content[what:]
        else:
            offset, data = what
            half = len(data) // 2
            whole = content[:]
            whole[offset : offset + len(data)] = data
            yield bytes(whole[: offset + half]) + bytes(content[offset + half :])
            yield bytes(whole[: offset + half]) + bytes(len(whole) - offset - half)
            content = whole
    yield bytes(content)
