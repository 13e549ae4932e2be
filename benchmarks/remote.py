"""A side that lives in a second interpreter and works only when told to.

JSON lines over the worker's standard streams. The worker says `{"ready": version}` or `{"error": reason}`
once it is set up, then answers each `{"go": true}` by `{"seconds": s, "amount": n}` and ends when its input
ends.
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
    """What one turn of a side took and did."""

    seconds: float
    amount: float


class RemoteSide:
    """Starts the worker of one side, waits until it is set up, and gives it its turns.

    Args:
        python: the interpreter.
        case: the case's name.
        side: the side's name: a module of `package`, or that, a space and a variant.
        threads: torch threads of the worker.
        package: where the worker looks for the side's module.

    Raises:
        RuntimeError: the worker could not set up; the message carries its reason.
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
        """Lets the worker do its work once.

        Raises:
            RuntimeError: it failed, died or did not answer in time.
        """
        assert self._process.stdin is not None
        self._process.stdin.write('{"go": true}\n')
        self._process.stdin.flush()
        answer = self._answer(TURN_S)
        return Turn(float(answer["seconds"]), float(answer["amount"]))

    def close(self) -> None:
        """Ends the worker; a second call does nothing."""
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it died with our last word unread
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
        # One answer per request: no earlier line can wait in the stream's buffer, so select sees all.
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
