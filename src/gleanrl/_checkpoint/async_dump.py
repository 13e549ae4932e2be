"""Checkpoints that a background thread writes while the program continues."""

from __future__ import annotations

import os
import threading
from typing import Any

from gleanrl._checkpoint.folder import Folder
from gleanrl._checkpoint.tree_codec import items_in, sources_in
from gleanrl._os.proc import available_memory
from gleanrl._os.threads import Job
from gleanrl.errors import UnsupportedError


class Dump:
    """A checkpoint that a thread is writing. The interpreter's exit waits for it.

    The thread uses a seventh of a processor, so that it hardly delays other threads; a GB takes about five seconds.
    Once a caller waits without a timeout, the thread works at full speed.

    Any thread may call the methods. A forked child has no such thread, and the dump belongs to its parent. The
    constructor copies the `Items` in the state. It doesn't wait for the write, except while the interpreter exits.

    Args:
        folder: the folder of the checkpoint.
        kind: the kind of the state's owner.
        state: see `Folder.commit`; the caller must not change it.
        keep: the number of checkpoints to keep.
    """

    def __init__(self, folder: Folder, kind: str, state: Any, keep: int) -> None:
        for items in items_in(state):
            items.own()
        # A quarter of the free memory may hold copies, so that writers to the buffer don't wait for the disk.
        for source in sources_in(state):
            source.room = max(source.room, (available_memory() or 0) // 4)
        # `pop` below takes the last reference, so that the state is freed right after the write.
        left = [state]
        self._folder, self._process, self._reported = folder, os.getpid(), False
        self._hurry = threading.Event()
        self._job = Job(lambda: folder.commit(kind, left.pop(), keep, self._hurry))
        try:
            threading.Thread(target=self._job.run, name="gleanrl-dump").start()
        except RuntimeError:  # The interpreter is exiting and starts no threads any more.
            self._job.run()

    def done(self) -> bool:
        """Return whether the dump has ended, with or without an error; `UnsupportedError` in a forked child."""
        self._check_process()
        return self._job.ended

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the dump has ended. Each call raises the dump's error.

        Args:
            timeout: seconds; None for no limit, which also makes the dump faster.

        Returns:
            Whether the complete checkpoint is on the disk; False after a timeout.

        Raises:
            CheckpointError: a part of the state can't be saved, or another process writes there.
            OSError: the disk is full, or fails.
            UnsupportedError: this process is a forked child of the process that made the dump.
        """
        self._check_process()
        if timeout is None:
            self._hurry.set()
        elif not self._job.wait(timeout):
            return False
        self._reported = True
        self._job.result()
        return True

    def settle(self) -> None:
        """Wait until the dump has ended; raise its error unless `wait` has already raised it.

        A forked child returns at once.
        """
        if self._process == os.getpid() and not (self._reported and self._job.ended):
            self.wait()

    def end(self) -> None:
        """Wait until the dump has ended, and ignore its error. A load then finds its checkpoint, or an earlier one.

        A forked child returns at once.
        """
        if self._process == os.getpid():
            self._hurry.set()
            self._job.join()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UnsupportedError(
                f"dumps: process {self._process} writes this checkpoint, and this process is a fork of it: "
                "call done() and wait() in the process that called dumps"
            )

    def __repr__(self) -> str:
        """Show the folder and whether the dump has ended."""
        return f"{type(self).__name__}({str(self._folder.path)!r}, done={self._job.ended})"
