"""The native reader on a failing disk: a preloaded library replaces the system calls, in a separate process.

Run as a program, it loads a checkpoint repeatedly. In load n, the core's n-th `open` or `preadv` fails. It prints the
number of loads. Python itself makes other system calls (`openat`, `preadv2`), which never fail.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

from gleanrl._checkpoint import row_segments
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import CorruptCheckpointError

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/uio.h>

// What happens at the call of that number, and for how many calls: an errno, or 0 for the end of the file.
int shim_open = -1, shim_read = -1, shim_calls = 1, shim_what = 0;
// Bytes that a call reads at most, if that isn't 0.
int shim_most = 0;
int shim_opened = 0, shim_reads = 0;

static int struck(int* count, int at) {
  const int number = __atomic_fetch_add(count, 1, __ATOMIC_SEQ_CST);
  return at >= 0 && number >= at && number < at + shim_calls;
}

int open(const char* path, int flags, ...) {
  static int (*next)(const char*, int, ...);
  if (!next) next = dlsym(RTLD_NEXT, "open");
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  const char* end = path;
  while (*end) ++end;
  const int data = end - path > 4 && end[-4] == '.' && end[-3] == 'b' && end[-2] == 'i' && end[-1] == 'n';
  if (data && struck(&shim_opened, shim_open)) return errno = shim_what, -1;
  return next(path, flags, mode);
}

ssize_t preadv(int file, const struct iovec* memory, int count, off_t offset) {
  static ssize_t (*next)(int, const struct iovec*, int, off_t);
  if (!next) next = dlsym(RTLD_NEXT, "preadv");
  if (struck(&shim_reads, shim_read)) return shim_what ? (errno = shim_what, -1) : 0;
  if (!shim_most) return next(file, memory, count, offset);
  struct iovec first = memory[0];
  if (first.iov_len > (size_t)shim_most) first.iov_len = shim_most;
  return next(file, &first, 1, offset);
}
"""


def build(folder: Path) -> Path:
    """Return the library, built by the system's compiler."""
    source, made = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


def run(shim: Path, folder: Path) -> str:
    """Return the output of the drill, in a process with the preloaded library."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.native_reads", shim, folder],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def main(shim: str, folder: str) -> None:
    """Load with every kind of failure at every call."""
    library = ctypes.CDLL(shim)

    def word(name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(library, f"shim_{name}")

    rows, kept = 20_000, Path(folder)
    row_segments._LEAST_BYTES = 1 << 16  # so that the checkpoint has several files
    saved, other = (ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=4) for _ in range(2))
    saved.extend(TensorDict({"x": torch.randn(rows, 8), "n": torch.arange(rows)}, [rows]))
    other.extend(TensorDict({"x": torch.zeros(rows // 2, 8), "n": torch.arange(rows // 2)}, [rows // 2]))
    before = other.storage.get(slice(None)).clone()
    saved.dumps(kept)

    def load(**words: int) -> tuple[int, int]:
        for name, value in {
            "most": 0,
            "open": -1,
            "read": -1,
            "calls": 1,
            "opened": 0,
            "reads": 0,
            **words,
        }.items():
            word(name).value = value
        loaded = ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=4)
        loaded.loads(kept)
        assert (loaded[:] == saved[:]).all()
        return word("opened").value, word("reads").value

    opened, reads = load()
    assert opened >= 4 and reads >= opened, "the core makes other calls: teach the library these"
    short = [load(most=most)[1] for most in (1_000, 4_097, 100_003)]
    assert short[0] > 10 * reads, short
    interrupted = [load(read=number, what=errno.EINTR, calls=3) for number in range(reads)]
    assert all(calls == (opened, reads + 3) for calls in interrupted)
    failed = 0
    for name, codes, count in (
        ("open", (errno.EIO, errno.EMFILE, errno.EACCES), opened),
        ("read", (errno.EIO, errno.ENOMEM, 0), reads),
    ):
        for code in codes:
            for number in range(count):
                try:
                    load(**{name: number, "what": code, "calls": 1_000_000})
                except CorruptCheckpointError as error:
                    said = os.strerror(code) if code else "it became shorter"
                    assert ".bin" in str(error) and said in str(error), error
                    failed += 1
    word("read").value, word("what").value, word("reads").value = reads - 1, errno.EIO, 0
    try:
        other.loads(kept)
    except CorruptCheckpointError:
        assert (other.storage.get(slice(None)) == before).all()
        failed += 1
    assert failed == 3 * opened + 3 * reads + 1, (failed, opened, reads)
    load()
    print(
        f"{opened} files in {reads} reads; {sum(short)} short ones; {len(interrupted)} interrupted; {failed} failed"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
