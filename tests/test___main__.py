"""The command line runs programs. Programs that need torchrl are tested by `make test-foreign`."""

import importlib.util

import pytest
import torch
from tensordict import TensorDict

from gleanrl.__main__ import main
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from tests.takeovers import run

PROGRAM = """
import sys
import helper
print(__name__, sys.argv[1:], helper.ReplayBuffer.__module__.partition(".")[0])
sys.exit(3)
"""
needs_torchrl = pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs torchrl")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("from torchrl.data import ReplayBuffer\n")
    return tmp_path


@needs_torchrl
def test_run_executes_a_file_with_its_arguments(folder):
    done = run("-m", "gleanrl", "run", folder / "program.py", "--lr", "-m", "x")
    assert done.stdout == "__main__ ['--lr', '-m', 'x'] gleanrl\n", done.stderr
    assert done.returncode == 3


@needs_torchrl
def test_run_executes_a_module_with_its_arguments(folder):
    done = run(
        "-m", "gleanrl", "run", "-m", "program", "a", PYTHONPATH=f"{folder}:{run.__globals__['SOURCE']}"
    )
    assert done.stdout == "__main__ ['a'] gleanrl\n", done.stderr


def test_bad_command_lines_raise_clear_errors():
    assert "no file nowhere.py" in run("-m", "gleanrl", "run", "nowhere.py").stderr
    assert run("-m", "gleanrl", "walk").returncode == 2


def test_command_line_without_a_command_prints_its_help():
    done = run("-m", "gleanrl")
    assert done.returncode == 2
    assert "run a TorchRL program, unchanged" in done.stderr


def test_export_writes_a_checkpoint_in_another_format(tmp_path):
    pytest.importorskip("h5py")
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TensorDict({"observation": torch.arange(4), "next": {"done": torch.arange(4) == 3}}, [4]))
    buffer.dumps(tmp_path / "saved")
    done = run("-m", "gleanrl", "export", tmp_path / "saved", "--to", "hdf5", "--out", tmp_path / "rows.hdf5")
    assert done.stdout == f"wrote 4 transitions to {tmp_path / 'rows.hdf5'}\n", done.stderr
    failed = run("-m", "gleanrl", "export", tmp_path / "nothing", "--to", "hdf5")
    assert failed.returncode == 1 and failed.stderr.startswith(
        f"export: {tmp_path / 'nothing'}: expected a file"
    )


def test_show_prints_a_summary_and_refuses_other_files_without_a_traceback(tmp_path, capsys):
    pytest.importorskip("h5py")  # a file of unknown content is opened as HDF5
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TensorDict({"observation": torch.arange(4), "next": {"done": torch.arange(4) == 3}}, [4]))
    buffer.dumps(tmp_path / "saved")
    main(["show", str(tmp_path / "saved")])
    assert capsys.readouterr().out.startswith("4 transitions in 1 episode, ")
    next((tmp_path / "saved").rglob("*.bin")).write_bytes(b"")
    (tmp_path / "text").write_text("no data set")
    for name in ("saved", "text", "nothing"):
        with pytest.raises(SystemExit) as failed:
            main(["show", str(tmp_path / name), "--summary"])
        message = capsys.readouterr().err
        assert failed.value.code == 2 and message.startswith("show: ") and str(tmp_path / name) in message
