"""The demo resumes after it was killed, and learns the same with a compact storage."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


def learned(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[list[float], list[torch.Tensor], Any]:
    """Return the losses of a short run of the demo, the weights after the last one, and the storage."""
    spec = importlib.util.spec_from_file_location("dqn_cartpole", EXAMPLES / "dqn_cartpole.py")
    assert spec is not None and spec.loader is not None
    demo: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    td_loss, storage, losses, kept = demo.td_loss, demo.LazyTensorStorage, [], {}

    def recorded(q_net: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept["weights"] = q_net.parameters
        losses.append(loss := td_loss(q_net, *args, **kwargs))
        return loss

    def stored(*args: Any, **kwargs: Any) -> Any:
        kept["storage"] = storage(*args, **kwargs)
        return kept["storage"]

    demo.td_loss, demo.LazyTensorStorage = recorded, stored
    demo.compare_speed = demo.draw = lambda *args: None
    monkeypatch.setattr(sys, "argv", ["dqn_cartpole.py", "--total-frames", "1500", *options])
    demo.main()
    return (
        [loss.item() for loss in losses],
        [weight.detach() for weight in kept["weights"]()],
        kept["storage"],
    )


def test_a_compact_storage_gives_the_same_losses_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights, _ = learned(monkeypatch)
    again, others, storage = learned(monkeypatch, "--compact")
    assert len(losses) == 275 and losses == again
    assert all(map(torch.equal, weights, others))
    apart = re.search(r"(\d+) of 1500 outcomes stored apart", repr(storage))
    assert apart is not None and int(apart[1]) < 150
