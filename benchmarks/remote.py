"""A side that runs in a second interpreter and works only on command.

The protocol is JSON lines over the worker's standard streams. After its set-up the worker writes `{"ready": version}`
or `{"error": reason}`. It answers each `{"go": true}` with `{"seconds": s, "amount": n}`. It ends when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

WORKER = Path(__file__).with_name("peer_worker.py")
SETUP_S = 300.0
TURN_S = 120.0


class Turn(NamedTuple):
    """The seconds that one turn of a side took, and the amount of work that it did."""

    seconds: float
    amount: float


class RemoteSide:
    """A side in the worker process of another interpreter. The constructor waits until the worker is set up.

    Args:
        python: the interpreter.
        case: the case's name.
        side: the side's name: the name of a module of `package`, or that name, a space and a variant.
        threads: torch threads of the worker.
        package: the package that has the side's module.

    Raises:
        RuntimeError: the worker could not set up. The message has its reason.
    """

    def __init__(
        self, python: str, case: str, side: str, *, threads: int = 1, package: str = "benchmarks.peers"
    ) -> None:
        self._side = side
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [python, str(WORKER), case, side, package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        try:
            self.version = str(self._answer(SETUP_S)["ready"])
        except BaseException:
            self.close()
            raise

    def turn(self) -> Turn:
        """Let the worker do its work once, and return its seconds and its amount.

        Raises:
            RuntimeError: the worker failed, died or did not answer in time.
        """
        assert self._process.stdin is not None
        self._process.stdin.write('{"go": true}\n')
        self._process.stdin.flush()
        answer = self._answer(TURN_S)
        return Turn(float(answer["seconds"]), float(answer["amount"]))

    def close(self) -> None:
        """End the worker. A second call does nothing."""
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # the worker died before it read the last command
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> RemoteSide:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        # Each request has one answer, so the stream's buffer holds no earlier line, which select would not see.
        if not select.select([stream], [], [], timeout_s)[0]:
            self._process.kill()
            raise RuntimeError(f"{self._side}: expected an answer within {timeout_s:.0f} s, got none")
        line = stream.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            tail = " | ".join(self._log.read().split("\n")[-4:])
            raise RuntimeError(f"{self._side}: its process ended with status {code}: {tail}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._side}: {answer['error']}")
        return answer
