"""A program under takeover sees modules with TorchRL's names (`make test-foreign`)."""

import pytest

from tests.takeovers import output

pytest.importorskip("torchrl")

PROGRAM = """
import inspect, sys
import torchrl, torchrl.envs, torchrl.data
real = sys.modules["torchrl.envs"]
assert inspect.ismodule(torchrl.envs) and torchrl.envs.__name__ == "torchrl.envs"
for name in ("__file__", "__path__", "__spec__", "__doc__", "__package__"):
    assert getattr(torchrl.envs, name) == getattr(real, name), name
assert torchrl.__version__ == sys.modules["torchrl"].__version__
assert torchrl.modules is sys.modules["torchrl.modules"]
assert set(real.__all__) <= set(torchrl.envs.__all__) <= set(dir(torchrl.envs))
assert "EnvBase" in torchrl.envs.__all__ and "exploration_mode" in torchrl.envs.__all__

# what a program assigns is for the program
torchrl.envs.EnvBase = mine = object()
assert torchrl.envs.EnvBase is mine and real.EnvBase is not mine
del torchrl.envs.EnvBase
assert torchrl.envs.EnvBase.__module__.startswith("gleanrl.")

# what is assigned by torchrl later is seen
real.later = 3
assert torchrl.envs.later == 3

# what isn't served stays torchrl's; what the installed release hasn't either says what to use
from torchrl.envs import PettingZooEnv
assert PettingZooEnv is real.PettingZooEnv
for holder in (real, sys.modules["torchrl.envs.libs"], sys.modules["torchrl.envs.libs.pettingzoo"]):
    holder.__dict__.pop("PettingZooEnv")
assert not hasattr(torchrl.envs, "PettingZooEnv")
try:
    from torchrl.envs import PettingZooEnv
except ImportError as error:
    assert "torchrl.envs.PettingZooEnv isn't in the installed torchrl, nor served: it needs" in str(error)
else:
    raise AssertionError("PettingZooEnv was imported")
try:
    from torchrl.envs import NoSuchEnv
except ImportError as error:
    assert "cannot import name 'NoSuchEnv'" in str(error)
print("so it is")
"""


def test_facades_behave_like_modules(tmp_path):
    assert output(tmp_path, PROGRAM) == "so it is\n"
