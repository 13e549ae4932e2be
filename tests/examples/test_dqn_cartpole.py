"""The demo resumes after it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAM = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
import dqn_cartpole as demo

torch.set_num_threads(1)
options = ["--total-frames", "1400", "--updates-per-batch", "4", "--save-every", "3", "--no-stop"]
demo.compare_speed = lambda: None

def run(*arguments, kill_at=0):
    listen, said = os.pipe()
    child = os.fork()
    if child:
        os.close(said)
        text = os.fdopen(listen).read()
        return text, os.waitpid(child, 0)[1]
    learned, calls = demo.td_loss, []

    def td_loss(*args, **kwargs):
        calls.append(1)
        if len(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return learned(*args, **kwargs)

    try:
        demo.td_loss = td_loss
        demo.draw = lambda curve, path: os.write(said, json.dumps(curve).encode())
        sys.argv[1:] = [*options, *arguments]
        demo.main()
        os._exit(0)
    finally:
        os._exit(1)

folder = sys.argv[2]
unbroken, status = run()
assert status == 0 and unbroken
for kill_at in (7, 20):
    assert run("--resume", "--checkpoints", folder, kill_at=kill_at) == ("", signal.SIGKILL)
resumed, status = run("--resume", "--checkpoints", folder)
assert status == 0 and resumed == unbroken, (resumed, unbroken)
"""


def test_killed_demo_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(EXAMPLES), str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Resuming after 1,050 frames" in done.stdout
