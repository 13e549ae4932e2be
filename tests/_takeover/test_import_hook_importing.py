"""Imports under takeover reach gleanrl or TorchRL, tested in separate programs (`make test-foreign`)."""

import pytest

from tests.takeovers import output, run

pytest.importorskip("torchrl")

EVERY_WAY = """
import importlib, pickle, sys
import torchrl
import torchrl.data as aliased
import torchrl.data.replay_buffers.samplers
from torchrl import envs
from torchrl.collectors import Collector
from torchrl.data import *
from torchrl.data.replay_buffers import samplers
from torchrl.envs.transforms.transforms import StepCounter, _apply_to_composite
from torchrl.data.replay_buffers.samplers.random import RandomSampler as by_inner_path
import gleanrl.collectors, gleanrl.data, gleanrl.envs

ours = gleanrl.data.ReplayBuffer
assert torchrl.data.ReplayBuffer is aliased.ReplayBuffer is ReplayBuffer is ours
assert Collector is gleanrl.collectors.SyncDataCollector
assert torchrl.data.replay_buffers.samplers.SliceSampler is samplers.SliceSampler is gleanrl.data.SliceSampler
assert envs.GymEnv is gleanrl.envs.GymEnv
assert StepCounter is gleanrl.envs.StepCounter and by_inner_path is gleanrl.data.RandomSampler
assert _apply_to_composite.__module__.startswith("gleanrl")
assert importlib.import_module("torchrl.data").ReplayBuffer is ours
assert importlib.import_module(".data", package="torchrl").ReplayBuffer is ours
assert importlib.import_module("torchrl.modules").__name__ == "torchrl.modules"

# theirs where we have none, and their own modules with their own classes
from torchrl.data import TensorDictTokenizer, datasets
from torchrl.data.datasets import D4RLExperienceReplay
from torchrl.envs.libs.vmas import VmasEnv
import torchrl.modules.tensordict_module.actors as actors
assert VmasEnv.__mro__[1].__module__.startswith("torchrl.")
assert actors.Composite.__module__.startswith("torchrl.") and actors.Composite is not Composite
assert sys.modules["torchrl.data"].ReplayBuffer is not ours
theirs = sys.modules["torchrl.data"].ReplayBuffer
assert pickle.loads(pickle.dumps(theirs)) is theirs and pickle.loads(pickle.dumps(ours)) is ours
assert pickle.loads(pickle.dumps(torchrl.data)) is torchrl.data

# names and paths of other releases
from torchrl.collectors import SyncDataCollector
from torchrl.collectors.collectors import SyncDataCollector as by_path
from torchrl.data import BoundedTensorSpec, CompositeSpec
assert SyncDataCollector is by_path is Collector and BoundedTensorSpec is torchrl.data.Bounded
for statement, error in {
    "from torchrl.data import NoSuchThing": "cannot import name 'NoSuchThing' from 'torchrl.data'",
    "import torchrl.data.nothing": "No module named 'torchrl.data.nothing'",
    "torchrl.data.NoSuchThing": "module 'torchrl.data' has no attribute 'NoSuchThing'",
}.items():
    try:
        exec(statement)
    except (ImportError, AttributeError) as raised:
        assert error in str(raised), raised
    else:
        raise AssertionError(statement)
print("as it should be")
"""


def test_every_import_statement_is_redirected(tmp_path):
    assert output(tmp_path, EVERY_WAY) == "as it should be\n"


def test_takeover_as_first_import_redirects_the_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import gleanrl.takeover\n" + EVERY_WAY)
    assert run(program).stdout == "as it should be\n"


def test_takeover_after_importing_torchrl_is_refused(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torchrl\nimport gleanrl.takeover\n")
    assert "TakeoverError: takeover: torchrl has been imported already" in run(program).stderr


CHILDREN = """
import multiprocessing, sys
import torch.multiprocessing
from torchrl.data import ReplayBuffer

def child(pipe):
    from torchrl.data import LazyTensorStorage
    pipe.send((ReplayBuffer.__module__, LazyTensorStorage.__module__))

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["decimal"])
    for method in ("fork", "spawn", "forkserver"):
        for library in (multiprocessing, torch.multiprocessing):
            context = library.get_context(method)
            mine, its = context.Pipe()
            process = context.Process(target=child, args=(its,))
            process.start()
            assert all(name.startswith("gleanrl.") for name in mine.recv()), method
            process.join()
            assert process.exitcode == 0
    print("taken over")
"""


@pytest.mark.parametrize("main", [True, False], ids=["command line", "import"])
def test_processes_of_the_program_are_taken_over(tmp_path, main):
    if main:
        assert output(tmp_path, CHILDREN) == "taken over\n"
    else:
        program = tmp_path / "program.py"
        program.write_text("import gleanrl.takeover\n" + CHILDREN)
        done = run(program)
        assert done.stdout == "taken over\n" and done.stderr.count("replaces the data layer") == 1


WORKERS = """
import torchrl
from torchrl.envs import ParallelEnv
import members

def make():
    from torchrl.envs import GymEnv, StepCounter
    return torchrl.envs.TransformedEnv(GymEnv("CartPole-v1"), StepCounter(5))

for maker in (make, members.make):
    env = ParallelEnv(2, maker)
    print(env.rollout(10, break_when_any_done=False)["next", "done"].sum().item())
    env.close()
"""
MEMBERS = """
from torchrl.envs import EnvBase, GymEnv, StepCounter, TransformedEnv

def make():
    assert EnvBase.__module__.startswith("gleanrl.")
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(5))
"""


def test_workers_of_gleanrl_environments_are_taken_over(tmp_path):
    (tmp_path / "members.py").write_text(MEMBERS)
    assert output(tmp_path, WORKERS) == "4\n4\n"


COLLECTORS = """
from torchrl.collectors import MultiAsyncCollector, MultiSyncDataCollector
from torchrl.collectors.collectors import aSyncDataCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
import gleanrl.collectors
import members

def make():
    import torchrl.envs
    return torchrl.envs.TransformedEnv(torchrl.envs.GymEnv("CartPole-v1"), torchrl.envs.StepCounter(5))

assert MultiAsyncCollector is gleanrl.collectors.MultiaSyncDataCollector
for cls in (MultiSyncDataCollector, MultiAsyncCollector):
    for maker in (make, members.make):
        collector = cls([maker] * 2, frames_per_batch=20, total_frames=40)
        print(sum(batch["next", "truncated"].sum().item() for batch in collector))
buffer = ReplayBuffer(storage=LazyTensorStorage(40))
assert list(aSyncDataCollector(make, frames_per_batch=20, total_frames=40, replay_buffer=buffer)) == [None, None]
print(len(buffer))
"""


def test_workers_of_gleanrl_collectors_are_taken_over(tmp_path):
    (tmp_path / "members.py").write_text(MEMBERS)
    assert output(tmp_path, COLLECTORS) == "8\n8\n8\n8\n40\n"


def test_program_saves_without_installed_package_metadata(tmp_path):
    """The sources are on the path, and there is no metadata of an installed package."""
    program = """
import sys
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

saved, found = (ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2))
saved.extend(torch.arange(3))
saved.dumps(sys.argv[1])
found.loads(sys.argv[1])
print(found[:].tolist())
"""
    assert output(tmp_path, program, str(tmp_path / "saved")) == "[0, 1, 2]\n"
