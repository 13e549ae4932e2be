"""Functions accept specs of another library, imported before or after gleanrl; here a package of the same name."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PACKAGE = {
    "__init__.py": "",
    "data.py": """
        class TensorSpec: pass
        class OneHot(TensorSpec):
            def __init__(self, n, shape, device, dtype, mask): self.n = n
    """,
    "modules/__init__.py": """
        import enum
        from torchrl.modules.actors import Actor
        class Kind(enum.Enum):
            spec = 1
        def first(specs): return specs[0]
        def other(number): return number
    """,
    "modules/actors.py": """
        class Actor:
            def __init__(self, net, spec=None, *, more=()): self.net, self._spec, self.more = net, spec, more
            @property
            def spec(self):
                "What it is."
                return self._spec
            @spec.setter
            def spec(self, value): self._spec = value
            def register_spec(self, spec): self._spec = spec
            def act(self, value): return value
    """,
    "objectives.py": """
        class Loss:
            def __init__(self, *, action_space): self.action_space = action_space
    """,
}

CHECK = """
import sys
{first}
from torchrl import data, modules, objectives
from gleanrl.data import Composite, OneHot

ours = OneHot(3)
made = [
    modules.Actor(None, ours)._spec,
    modules.Actor(None, spec=ours).spec,
    modules.Actor(None, more=[(ours,)]).more[0][0],
    modules.actors.Actor(None, {{"a": ours}}).spec["a"],
    modules.first([ours]),
    objectives.Loss(action_space=ours).action_space,
]
actor = modules.Actor(None)
actor.spec = ours
made.append(actor.spec)
actor.register_spec(ours)
made.append(actor.spec)
assert all(type(spec) is data.OneHot and spec.n == 3 for spec in made), made
assert modules.other(ours) is ours and actor.act(ours) is ours
assert modules.Actor(3, "text").spec == "text"
assert modules.Actor.spec.__doc__ == "What it is." and modules.Kind.spec.value == 1
theirs = data.OneHot(2, None, None, None, None)
assert modules.Actor(None, theirs).spec is theirs
"""


@pytest.fixture
def run(tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / "torchrl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def run(code):
        setup = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\n"
        subprocess.run([sys.executable, "-c", setup + code], check=True)

    return run


@pytest.mark.slow
def test_specs_are_converted_where_the_other_library_came_first(run):
    run(CHECK.format(first="import torchrl.modules, torchrl.objectives"))


@pytest.mark.slow
def test_it_imports_nothing_finds_other_modules_as_before_and_converts_specs(run):
    run(
        """
import gleanrl.data, importlib.util
assert not [name for name in sys.modules if name.startswith("torchrl")]
import torchrl.modules
assert "torchrl.data" not in sys.modules and "torchrl.objectives" not in sys.modules
assert importlib.util.find_spec("torchrl.modules.actors").origin.endswith("actors.py")
assert importlib.util.find_spec("torchrl.modules.absent") is None
assert "class Actor" in torchrl.modules.actors.__loader__.get_source("torchrl.modules.actors")
"""
        + CHECK.format(first="")
    )
