"""Small programs under takeover, each in its own interpreter."""

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
    """Run the interpreter with arguments in `folder`. Its import path has `folder` and the sources of gleanrl.

    Each of its processes may use at most `cpu_s` seconds of processor time. A busy machine doesn't shorten this limit.
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
    """Return the output of a program, given as text, under takeover."""
    program = folder / "program.py"
    program.write_text(source)
    done = run("-m", "gleanrl", "run", program, *arguments, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout
