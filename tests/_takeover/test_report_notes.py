"""Notes that a takeover prints for the user of a program (`make test-foreign`)."""

import pytest

from tests.takeovers import run

pytest.importorskip("torchrl")

PROGRAM = """
from torchrl.data import ReplayBuffer, LazyTensorStorage, TokenizedDatasetLoader
from torchrl.envs import GymEnv
from torchrl.modules import MLP
rollout = GymEnv("CartPole-v1").rollout(3000, break_when_any_done=False)
buffer = ReplayBuffer(storage=LazyTensorStorage(3000), batch_size=10)
buffer.extend(rollout)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_note_is_one_line_and_remaining_names_are_listed_once(program):
    said = run("-m", "gleanrl", "run", program).stderr
    banner, *rest = said.splitlines()
    assert "replaces the data layer of torchrl" in banner and "GLEANRL_TAKEOVER=report" in banner
    assert all("stays torchrl's" in line for line in rest if line.startswith("gleanrl"))
    assert " ReplayBuffer" not in said
    assert said.count("stays torchrl's\n") == 1
    assert "gleanrl: torchrl.data.TokenizedDatasetLoader stays torchrl's" in said
    assert "time since" not in said


def test_report_is_printed_at_exit(program):
    done = run("-m", "gleanrl", "run", program, GLEANRL_TAKEOVER="report")
    assert done.returncode == 0
    listed, report = done.stderr.split("are reported at their first use.\n")
    assert listed.count("replaces the data layer of torchrl") == 1
    assert "torchrl.data: " in listed and " ReplayBuffer" in listed and " MLP" not in listed
    assert "gleanrl's classes: data.LazyTensorStorage, data.ReplayBuffer, envs.GymEnv\n" in report
    assert "torchrl's classes: data.TokenizedDatasetLoader\n" in report
    assert "time since the import" in report and "\n  environments  " in report
