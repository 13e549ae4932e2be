"""Small programs under takeover, each in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"


def run(
    *command: str | Path,
    folder: Path | None = None,
    timeout: float = 110,
    cpu_s: int | None = None,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with arguments, in `folder`, which is on its path together with our sources.

    Each of its processes may work for so many seconds of processor time, `cpu_s`, however busy the machine is.
    """
    limit = "unlimited" if cpu_s is None else cpu_s
    path = os.pathsep.join([str(SOURCE), *map(str, filter(None, [folder]))])
    return subprocess.run(
        [
            "sh",
            "-c",
            f'ulimit -t {limit}; exec "$@"',
            "sh",
            sys.executable,
            "-W",
            "ignore",
            *map(str, command),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ},
        timeout=timeout,
    )


def output(folder: Path, source: str, *arguments: str, **environ: str) -> str:
    """Return what a program, given as text, prints under takeover."""
    program = folder / "program.py"
    program.write_text(source)
    done = run("-m", "gleanrl", "run", program, *arguments, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout
