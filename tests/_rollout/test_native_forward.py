"""Straight-line forwards give torch's values natively; all other forwards fall back to torch with a reason."""

from __future__ import annotations

import copy
import itertools
import tempfile
from pathlib import Path as File
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gleanrl._arrays.schema import Field
from tests._rollout.test_native_modules import SIZES, Setting, floats, module, noise

IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
_numbers = itertools.count()
_folder = tempfile.TemporaryDirectory()


def loaded(source: str, imports: bool = True, **names: Any) -> dict[str, Any]:
    """Return the global names of a new file with this source.

    Args:
        source: the source.
        imports: whether the file imports torch; otherwise the names are set from outside.
        names: further global names.
    """
    file = File(_folder.name) / f"network_{next(_numbers)}.py"
    text = (IMPORTS if imports else "") + source
    file.write_text(text)
    found: dict[str, Any] = {"__name__": file.stem, "torch": torch, "F": nn.functional, "nn": nn, **names}
    exec(compile(text, str(file), "exec"), found)
    return found


class Network(nn.Module):
    """The parts that the forwards of these tests use; values have four numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.act, self.relu_, self.drop = nn.Tanh(), nn.ReLU(inplace=True), nn.Dropout()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.w, self.b = nn.Parameter(noise(4, 4)), nn.Parameter(noise(4))
        self.one = nn.Parameter(noise(1))
        self.register_buffer("mean", noise(4, seed=2))
        self.scale, self.count, self.flag, self.name = 1.5, 3, True, "tanh"
        self.function, self.options = torch.tanh, {"dim": -1}
        self.calls = 0
        self.eval()


def network(*lines: str, imports: bool = True, before: str = "", arguments: str = "x", **names: Any) -> Any:
    """Return a network whose forward has these lines."""
    body = "\n".join("        " + part for line in lines for part in line.split("\n"))
    source = f"{before}\nclass Net(Network):\n    def forward(self, {arguments}):\n{body}\n"
    return loaded(source, imports, Network=Network, **names)["Net"]()


# ------------------------------------------------------------------------------------------------ random programs
UNARY = [
    "torch.tanh({})", "{}.tanh()", "F.tanh({})", "torch.relu({})", "F.relu({})", "{}.relu()", "torch.sigmoid({})",
    "{}.sigmoid()", "F.sigmoid({})", "{}.clamp(-3, 3).exp()", "torch.exp(torch.clamp({}, max=2.0))",
    "({}.abs() + 0.1).log()", "torch.log(torch.abs({}) + 1)", "torch.sqrt({}.abs() + 0.01)", "({0} * {0}).sqrt()",
    "-{}", "{}.neg()", "F.silu({})", "F.gelu({})", "F.elu({})", "F.elu({}, alpha=0.5)", "F.elu({}, 2.0)",
    "F.leaky_relu({})", "F.leaky_relu({}, 0.2)", "F.leaky_relu({}, negative_slope=0.3)", "F.softplus({})",
    "F.softplus({}, beta=2, threshold=9)", "F.softplus({}, 0.5)", "{}.clamp(min=-0.5)", "torch.clamp({}, -1, 1)",
    "{}.clamp_min(0.1)", "torch.clamp_max({}, 0.2)", "{} ** 2", "self.act({})", "{}.unsqueeze(-1).squeeze(-1)",
]  # fmt: skip
WITH_NUMBER = [
    "{} + {n}", "{n} + {}", "{} - {n}", "{n} - {}", "{} * {n}", "{n} * {}", "{} / {n}", "{n} / ({}.abs() + 0.5)",
    "torch.add({}, {n})", "{}.sub({n})", "torch.mul({}, {n})", "{}.div({n})",
]  # fmt: skip
BINARY = [
    "{} + {}", "{} - {}", "{} * {}", "{} / ({}.abs() + 0.5)", "torch.maximum({}, {})", "torch.minimum({}, {})",
    "{}.maximum({})", "{}.minimum({})", "torch.add({}, {})", "{}.add({})", "torch.sub({}, {})", "{}.mul({})",
    "torch.div({}, {}.abs() + 1)",
]  # fmt: skip
NUMBERS = ["2", "0.5", "-1.5", "1e-3", "self.scale", "self.count"]


class Program:
    """Draws the lines of a forward; `widths` has the number of elements of each variable."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self.widths = {"x": 4, "z": 3}
        self.lines: list[str] = []
        self.modules: dict[str, nn.Module] = {}
        self.values: dict[str, Tensor] = {}

    def pick(self, options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def variable(self, width: int | None = None) -> str:
        """Return a variable, or a parameter or buffer, with this number of elements."""
        found = [name for name, size in self.widths.items() if width in (None, size)]
        if width is not None and self._draw(st.integers(0, 3)) == 0:
            name = f"p{len(self.values)}"
            self.values[name] = noise(self.pick([width, 1]), seed=len(self.values))
            return f"self.{name}"
        return self.pick(found)

    def assign(self, expression: str, *widths: int) -> None:
        names = []
        for _ in widths:
            name = self.pick([f"v{len(self.widths)}", f"v{len(self.widths)}", *self.widths])
            while name in names:
                name = f"v{len(self.widths) + len(names)}"
            names.append(name)
        self.lines.append(f"{', '.join(names)} = {expression}")
        self.widths.update(zip(names, widths, strict=True))

    def line(self) -> None:
        """Add a line."""
        x = self.variable()
        width = self.widths[x]
        kind = self.pick(
            [
                "unary",
                "unary",
                "number",
                "binary",
                "binary",
                "module",
                "linear",
                "cat",
                "chunk",
                "slice",
                "item",
            ]
        )
        if kind == "unary":
            self.assign(self.pick(UNARY).format(x), width)
        elif kind == "number":
            self.assign(self.pick(WITH_NUMBER).format(x, n=self.pick(NUMBERS)), width)
        elif kind == "binary":
            self.assign(self.pick(BINARY).format(x, self.variable(width)), width)
        elif kind == "module":
            out, name = self.pick([1, 2, 3, 4, 8, 17]), f"m{len(self.modules)}"
            self.modules[name] = nn.Sequential(
                nn.Linear(width, out), self.pick([nn.Tanh(), nn.ReLU(), nn.Identity()])
            )
            self.assign(f"self.{name}({x})", out)
        elif kind == "linear":
            out = self.pick([1, 2, 4, 5])
            w, b = f"p{len(self.values)}", f"p{len(self.values) + 1}"
            self.values[w], self.values[b] = noise(out, width, seed=3), noise(out, seed=4)
            self.assign(self.pick([f"F.linear({x}, self.{w}, self.{b})", f"F.linear({x}, self.{w})"]), out)
        elif kind == "cat":
            others = [self.variable() for _ in range(self._draw(st.integers(0, 2)))]
            found = ", ".join([x, *others])
            self.assign(f"torch.cat([{found}], -1)", width + sum(self.widths[one] for one in others))
        elif kind == "chunk" and width >= 2:
            count = self.pick([2, 3])
            sizes = [len(part) for part in torch.arange(width).chunk(count)]
            self.assign(self.pick([f"{x}.chunk({count}, -1)", f"torch.chunk({x}, {count}, dim=-1)"]), *sizes)
        elif kind == "slice":
            first = self._draw(st.integers(-width, width - 1))
            end = self.pick([None, *[k for k in range(1, width + 1) if range(width)[first:k]]])
            found = len(range(width)[first:end])
            self.assign(f"{x}[..., {first}:{'' if end is None else end}]", found)
        elif kind == "item":
            at = self._draw(st.integers(-width, width - 1))
            self.assign(f"{x}[..., {at}].unsqueeze(-1)", 1)

    def net(self, result: str, imports: bool) -> Any:
        found = network(*self.lines, f"return {result}", imports=imports, arguments="x, z")
        for name, part in self.modules.items():
            found.add_module(name, part)
        for number, (name, value) in enumerate(self.values.items()):
            if number % 2:
                found.register_buffer(name, value)
            else:
                found.register_parameter(name, nn.Parameter(value))
        return found


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program(draw)
    for _ in range(draw(st.integers(1, 8))):
        program.line()
    return program


def require_like(net: nn.Module, roots: Any, mine: Tensor, theirs: Tensor) -> None:
    """Check a result against torch's; both may be as far as torch's from the one in double precision."""
    with torch.no_grad():
        exact = copy.deepcopy(net).double()(*(root.double() for root in roots))
    allowed = 20 * (theirs - exact).abs().max() + 1e-4 * (1 + exact.abs())
    assert ((mine - exact).abs() <= allowed).all(), (mine, theirs)


def check_program(program: Program, size: tuple[int, ...], imports: bool) -> None:
    result = list(program.widths)[-1]
    net, width = program.net(result, imports), program.widths[result]
    roots = {("x",): noise(*size, 2, 4), ("z",): noise(*size, 2, 3, seed=1)}
    setting = Setting(module(net, "x z"), roots, {("y",): floats(width)}, size)
    mine, theirs = setting.play()[("y",)], setting.by_torch()[("y",)]
    assert setting.is_native(), (setting.said, program.lines)
    require_like(net, roots.values(), mine, theirs)


@settings(deadline=None, max_examples=200)
@given(programs(), st.sampled_from(SIZES))
def test_random_straight_line_forwards_equal_torch(program: Program, size: tuple[int, ...]) -> None:
    check_program(program, size, imports=False)


@settings(deadline=None, max_examples=20)
@given(programs(), st.sampled_from(SIZES))
def test_random_straight_line_forwards_of_files_with_imports_equal_torch(
    program: Program, size: tuple[int, ...]
) -> None:
    check_program(program, size, imports=True)


@pytest.mark.parametrize(
    "result",
    [
        "v.argmax(-1)",
        "torch.argmax(v, dim=-1)",
        "v.argmax(dim=-1, keepdim=True)",
        "F.one_hot(v.argmax(-1), 4)",
        "F.one_hot(v.argmax(-1), num_classes=5)",
    ],
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_choices_equal_torch(result: str, size: tuple[int, ...]) -> None:
    net = network("v = self.fc(x) * 2", f"return {result}", imports=False)
    shape = net(noise(4)).shape
    setting = Setting(module(net), {("x",): noise(*size, 6, 4)}, {("y",): Field(shape, torch.int64)}, size)
    mine = setting.play()[("y",)]
    assert setting.is_native(), setting.said
    assert torch.equal(mine, setting.by_torch()[("y",)])


@pytest.mark.parametrize(
    "line",
    [
        "a, b = torch.split(x, 2, -1)",
        "a, b = x.split(2, dim=-1)",
        "a, b = x.chunk(2, -1)",
        "a, b = self.fc(x), x",
        "a, b = (x, x * 2)",
        "a: torch.Tensor = x * 2\nb = a",
    ],
)
def test_several_results_equal_torch(line: str) -> None:
    net = network('"""A docstring."""', *line.split("\n"), "return a, b", imports=False)
    width = net(noise(4))[0].shape[-1]
    setting = Setting(
        module(net, "x", "a b"), {("x",): noise(3, 4)}, {("a",): floats(width), ("b",): floats(width)}
    )
    mine, theirs = setting.play(), setting.by_torch()
    assert setting.is_native(), setting.said
    assert all(torch.allclose(mine[path], theirs[path], atol=1e-5) for path in mine)


def test_arguments_by_name_equal_torch() -> None:
    net = network("return torch.cat([a, b * 2], -1)", arguments="a, b", imports=False)
    policy = module(net)
    policy = type(policy)(net, {"b": "x", "a": "z"}, ["y"])
    setting = Setting(policy, {("x",): noise(3, 4), ("z",): noise(3, 2)}, {("y",): floats(6)})
    mine = setting.play()[("y",)]
    assert setting.is_native(), setting.said
    assert torch.equal(mine, setting.by_torch()[("y",)])
