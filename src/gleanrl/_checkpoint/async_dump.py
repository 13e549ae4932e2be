"""Checkpoints that are written while their owner goes on."""

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
    """A checkpoint that is being written by a thread; the interpreter's end waits for it.

    The thread takes a seventh of a processor for the records, so that others go on: a GB takes some five seconds. Once
    somebody waits for as long as it takes, it no longer rests.

    Any thread may ask. A forked process has no such thread: the dump stays its parent's.

    Args:
        folder: where to.
        kind: what it is a state of.
        state: see `Folder.commit`; nobody else changes it.
        keep: how many checkpoints there are to be.
    """

    def __init__(self, folder: Folder, kind: str, state: Any, keep: int) -> None:
        for items in items_in(state):
            items.own()
        for source in sources_in(state):  # memory is given, lest writers wait for the disk
            source.room = max(source.room, (available_memory() or 0) // 4)
        left = [state]  # the thread lets go of it once it's written
        self._folder, self._process, self._told = folder, os.getpid(), False
        self._hurry = threading.Event()
        self._job = Job(lambda: folder.commit(kind, left.pop(), keep, self._hurry))
        try:
            threading.Thread(target=self._job.run, name="gleanrl-dump").start()
        except RuntimeError:  # the interpreter is about to end, and starts no threads
            self._job.run()

    def done(self) -> bool:
        """Return whether it has ended, by an error or on the disk."""
        self._check_process()
        return self._job.ended

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            Whether it is on the disk, and whole; False if the time was too short.

        Raises:
            CheckpointError: something can't be saved, or another process writes there.
            OSError: the disk is full, or fails.
        """
        self._check_process()
        if timeout is None:
            self._hurry.set()
        elif not self._job.wait(timeout):
            return False
        self._told = True
        self._job.result()
        return True

    def settle(self) -> None:
        """Wait until it has ended; raise its error unless somebody was told of it."""
        if self._process == os.getpid() and not (self._told and self._job.ended):
            self.wait()

    def end(self) -> None:
        """Wait until it has ended, well or not: then a load finds it, or what was there before."""
        if self._process == os.getpid():
            self._hurry.set()
            self._job.join()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UnsupportedError(
                f"dumps: process {self._process} writes this checkpoint, from which this one was forked; ask there"
            )

    def __repr__(self) -> str:
        """Show where it is written."""
        return f"{type(self).__name__}({str(self._folder.path)!r}, done={self._job.ended})"
