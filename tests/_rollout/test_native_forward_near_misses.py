"""Forwards that aren't straight-line code fall back to torch with a reason, and their values are torch's."""

from __future__ import annotations

import copy
from pathlib import Path as File
from types import FunctionType
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from gleanrl._arrays.schema import Field
from tests._rollout.test_native_forward import Network, loaded, network
from tests._rollout.test_native_modules import SIZES, Setting, floats, module, noise

HELPERS = """
TABLE = torch.ones(4)
FACTOR = 2.0
def helper(x):
    return torch.tanh(x)
class Config:
    factor = 2.0
CONFIG = Config()
"""

NEAR_MISSES = {
    "if": "if self.flag:\n    return self.fc(x)\nreturn x",
    "if on values": "y = self.fc(x)\nif float(y.sum()) > 1e5:\n    y = -y\nreturn y",
    "for": "for layer in self.layers:\n    x = layer(x)\nreturn x",
    "while": "n = 0\nwhile n < 2:\n    x, n = self.fc(x), n + 1\nreturn x",
    "with": "with torch.no_grad():\n    y = self.fc(x)\nreturn y",
    "try": "try:\n    y = self.fc(x)\nexcept ValueError:\n    y = x\nreturn y",
    "list comprehension": "return torch.cat([f(x) for f in (self.fc, self.act)], -1)",
    "generator": "return torch.cat(list(f(x) for f in (self.fc, self.act)), -1)",
    "dict comprehension": "d = {k: self.fc(x) for k in (1, 2)}\nreturn d[1]",
    "lambda": "f = lambda y: y * 2\nreturn f(x)",
    "inner function": "def f(y):\n    return y * 2\nreturn f(x)",
    "ternary": "return self.fc(x) if self.flag else x",
    "and": "return self.flag and self.fc(x)",
    "not": "y = not self.flag\nreturn self.fc(x)",
    "comparison": "y = x > 0\nreturn y * x",
    "assert": "assert x.shape[-1] == 4\nreturn self.fc(x)",
    "augmented assignment": "y = self.fc(x)\ny += 1\nreturn y",
    "augmented assignment of the input": "x = x * 1\nx *= 2\nreturn x",
    "attribute assignment": "self.last = self.fc(x)\nreturn self.last",
    "counted calls": "self.calls = self.calls + 1\nreturn self.fc(x)",
    "item assignment": "y = self.fc(x)\ny[..., 0] = 0.0\nreturn y",
    "chained assignment": "y = z = self.fc(x)\nreturn y + z",
    "starred assignment": "a, *b = x.chunk(4, -1)\nreturn a",
    "walrus": "return (y := self.fc(x)) + y",
    "f-string": "y = f'{self.scale}'\nreturn self.fc(x)",
    "print": "print(end='')\nreturn self.fc(x)",
    "expression statement": "self.fc(x)\nreturn x * 2",
    "pass": "pass\nreturn self.fc(x)",
    "import": "import math\nreturn x * math.pi",
    "global": "global FACTOR\nreturn x * 2",
    "del": "y = x * 2\nz = y + 1\ndel y\nreturn z",
    "two returns": "return x * 2\nreturn x",
    "helper": "return helper(self.fc(x))",
    "own method": "return self.twice(x)",
    "own forward of a part": "return self.fc.forward(x)",
    "super": "return super().half(x)",
    "global tensor": "return x + TABLE",
    "global number": "return x * FACTOR",
    "global object": "return x * CONFIG.factor",
    "rand": "return self.fc(x) + 0 * torch.rand(4)",
    "rand_like": "return x + 0 * torch.rand_like(x)",
    "randn": "return x + 0 * torch.randn(4)",
    "bernoulli": "return x + 0 * torch.bernoulli(torch.sigmoid(x))",
    "dropout": "return F.dropout(x, 0.0, False)",
    "zeros": "return x + torch.zeros(4)",
    "tensor": "return x + torch.tensor(2.0)",
    "first item": "return x[0:4]",
    "ellipsis first": "return x[..., None].squeeze(-1)",
    "negative step": "return x.flip(-1)",
    "step of two": "return x[..., ::2]",
    "index by a list": "return x[..., [1, 0, 2, 3]]",
    "index by a tensor": "return x[..., x.argmax(-1)].unsqueeze(-1)",
    "slice by an attribute that is True": "return x[..., :self.flag]",
    "relu_": "y = self.fc(x)\nreturn y.relu_()",
    "add_": "y = self.fc(x)\ny = y.add_(1)\nreturn y",
    "clamp_": "return self.fc(x).clamp_(0, 1)",
    "F.relu inplace": "return F.relu(self.fc(x), inplace=True)",
    "F.relu inplace by position": "return F.relu(self.fc(x), True)",
    "F.elu inplace": "return F.elu(self.fc(x), 1.0, True)",
    "F.leaky_relu inplace": "y = self.fc(x)\nz = F.leaky_relu(y, 0.1, inplace=True)\nreturn y + z",
    "inplace module whose input is read again": "y = self.fc(x)\nz = self.relu_(y)\nreturn y + z",
    "inplace module on a part": (
        "y = self.fc(x)\na, b = y.chunk(2, -1)\nc = self.relu_(a)\nreturn y + 0 * torch.cat([b, c], -1)"
    ),
    "unknown keyword": "return torch.add(x, x, alpha=2)",
    "out": "y = x * 2\nreturn torch.tanh(x, out=y)",
    "keywords": "return x.argmax(**self.options) + x",
    "starred arguments": "return torch.add(*x.chunk(2, -1))",
    "gelu with a string": "return F.gelu(x, approximate='tanh')",
    "softmax": "return torch.softmax(x, -1)",
    "sum": "return x.sum(-1, keepdim=True)",
    "mean": "return x - x.mean(-1, keepdim=True)",
    "matmul": "return x @ self.w",
    "transpose": "return F.linear(x, self.w.T)",
    "linear by a computed weight": "return F.linear(x, self.w * 2)",
    "power of three": "return x ** 3",
    "root": "return x.abs() ** 0.5",
    "modulo": "return x % 2",
    "floor division": "return x // 2",
    "invert": "return x * ~self.count",
    "unary plus": "return +x",
    "numbers alone": "y = 2 * 3\nreturn x * y",
    "bool attribute": "return x * self.flag",
    "string attribute": "y = self.name\nreturn x * 2",
    "stored function": "return self.function(x)",
    "item of a list": "return self.layers[0](x)",
    "getattr": "return getattr(self, 'fc')(x)",
    "shape": "return x * x.shape[-1]",
    "view": "return self.fc(x).view(-1)[:4]",
    "to": "return x.to(torch.float32) * 2",
    "double": "return x.double().float()",
    "detach": "return x.detach() * 2",
    "data": "return x.data * 2",
    "parameter data": "return x * self.b.data",
    "item": "return x * self.one.item()",
    "argmax over all": "return x.argmax() + x",
    "argmax of the first dimension": "return x.argmax(0) + x",
    "cat of the first dimension": "return torch.cat([x, x])",
    "clamp by a tensor": "return x.clamp(self.mean, self.mean + 1)",
    "clamp to infinity": "return x.clamp(min=-float('inf'))",
    "batch norm": "return self.norm(x.unsqueeze(0)).squeeze(0)",
    "module with a keyword": "return self.fc(input=x)",
    "is": "return x if x is self.b else x * 2",
    "complex": "return (x * 1j).abs() if False else x * 2",
    "where": "return torch.where(x > 0, x, -x)",
    "hook in forward": "x.requires_grad\nreturn x * 2",
}  # fmt: skip

METHODS = """
    def twice(self, x):
        return 2 * x
"""


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_fall_back_with_a_reason(case: str) -> None:
    net = network(*NEAR_MISSES[case].split("\n"), imports=False, before=HELPERS)
    type(net).twice = lambda self, x: 2 * x
    Network.half = lambda self, x: x / 2  # type: ignore[attr-defined]
    x = noise(3, 4)
    try:
        with torch.no_grad():
            expected = torch.stack([copy.deepcopy(net)(row.clone()) for row in x])
    except Exception as error:
        expected = None
        raised: Any = error
    form = Field(torch.Size([4]) if expected is None else expected.shape[1:], torch.float32)
    setting = Setting(module(net), {("x",): x}, {("y",): form})
    if expected is None or not isinstance(expected, Tensor):
        with pytest.raises(type(raised)):
            setting.play()
        return
    mine = setting.play()[("y",)]
    assert not setting.is_native()
    (reason,) = setting.said
    assert reason.startswith("Net: torch (") and len(reason) > len("Net: torch ()"), reason
    assert torch.equal(mine, expected)
    assert net.calls in (0, len(x)), "the comparison has no effect on the policy"


def test_a_source_that_cannot_be_read_falls_back() -> None:
    found: dict[str, Any] = {"Network": Network, "__name__": "nowhere"}
    exec("class Net(Network):\n    def forward(self, x):\n        return x * 2\n", found)
    refused(found["Net"](), "source")


def test_a_file_that_was_edited_after_its_import_falls_back() -> None:
    net = network("return x * 2", imports=False)
    file = File(type(net).forward.__code__.co_filename)
    file.write_text(file.read_text().replace("* 2", "* 3"))
    refused(net)


def refused(net: nn.Module, reason: str = "", **options: Any) -> None:
    """Check that a network with four numbers falls back, and that its values are torch's."""
    setting = Setting(module(net), {("x",): noise(3, 4)}, {("y",): floats(4)}, **options)
    mine = setting.play()[("y",)]
    assert not setting.is_native()
    assert reason in setting.said[0], setting.said
    assert torch.equal(mine, setting.by_torch()[("y",)])


DECORATORS = """
import functools
def plain(function):
    return function
def wrapping(function):
    @functools.wraps(function)
    def inner(self, x):
        return -function(self, x)
    return inner
def hiding(function):
    def forward(self, x):
        return -function(self, x)
    return forward
class Descriptor:
    def __init__(self, function):
        self.function = function
    def __get__(self, instance, owner):
        return functools.partial(self.function, instance)
"""


@pytest.mark.parametrize(
    "decorator", ["plain", "wrapping", "hiding", "Descriptor", "torch.no_grad()", "torch.compiler.disable"]
)
def test_decorated_forwards_fall_back(decorator: str) -> None:
    body = f"    @{decorator}\n    def forward(self, x):\n        return self.fc(x)\n"
    source = f"{DECORATORS}\nclass Net(Network):\n{body}"
    refused(loaded(source, False, Network=Network)["Net"]())


@pytest.mark.parametrize(
    "head",
    [
        "self, x, scale=2.0",
        "self, *inputs",
        "self, x, **options",
        "self, x, *, scale=2.0",
        "*everything",
        "self, x=None",
    ],
)
def test_forwards_with_other_parameters_fall_back(head: str) -> None:
    body = {"self, *inputs": "return inputs[0] * 2", "*everything": "return everything[1] * 2"}.get(
        head, "return x * 2"
    )
    refused(
        loaded(f"class Net(Network):\n    def forward({head}):\n        {body}\n", False, Network=Network)[
            "Net"
        ]()
    )


def test_names_of_an_enclosing_function_fall_back() -> None:
    source = (
        "def make(factor):\n    class Net(Network):\n        def forward(self, x):\n"
        "            return x * factor\n    return Net()\n"
    )
    refused(loaded(source, False, Network=Network)["make"](2.0))


def test_an_async_forward_or_a_lambda_falls_back() -> None:
    source = "class Net(Network):\n    forward = lambda self, x: self.fc(x)\n"
    refused(loaded(source, False, Network=Network)["Net"]())


def test_code_that_was_exchanged_after_construction_takes_effect() -> None:
    forward, other = (
        f"    def {name}(self, x):\n        return x * {k}\n" for name, k in (("forward", 2), ("other", 3))
    )
    source = f"class Net(Network):\n{forward}{other}"
    net = loaded(source, False, Network=Network)["Net"]()
    setting = Setting(module(net), {("x",): noise(3, 4)}, {("y",): floats(4)})
    setting.play()
    assert setting.is_native(), setting.said
    type(net).forward.__code__ = type(net).other.__code__
    assert torch.equal(setting.play()[("y",)], setting.by_torch()[("y",)])


def test_a_forward_of_another_class_takes_effect() -> None:
    net = network("return x * 2", imports=False)
    setting = Setting(module(net), {("x",): noise(3, 4)}, {("y",): floats(4)})
    setting.play()
    assert setting.is_native(), setting.said
    type(net).forward = network("return x * 3", imports=False).forward.__func__
    assert torch.equal(setting.play()[("y",)], setting.by_torch()[("y",)])
    assert isinstance(type(net).forward, FunctionType)


def test_a_global_function_that_was_exchanged_takes_effect() -> None:
    names = loaded(
        "relu = torch.relu\nclass Net(Network):\n    def forward(self, x):\n        return relu(x)\n",
        False,
        Network=Network,
    )
    net = names["Net"]()
    setting = Setting(module(net), {("x",): noise(3, 4)}, {("y",): floats(4)})
    setting.play()
    names["relu"] = torch.tanh
    assert torch.allclose(setting.play()[("y",)], setting.by_torch()[("y",)], atol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("line", ["x + z", "z * x", "x - self.w", "torch.maximum(z, x)", "x + self.mean"])
def test_values_that_torch_broadcasts_over_the_batch_equal_torch(line: str, size: tuple[int, ...]) -> None:
    """In torch, ``x`` without dimensions meets the last dimension of the batch."""
    net = network(f"return {line}", arguments="x, z", imports=False)
    roots = {("x",): noise(*size, 2), ("z",): noise(*size, 2, size[-1] if size else 3, seed=1)}
    try:
        shape = net(roots[("x",)].select(len(size), 0), roots[("z",)].select(len(size), 0)).shape
    except RuntimeError:
        return
    if shape[: len(size)] != size:
        return
    setting = Setting(module(net, "x z"), roots, {("y",): floats(*shape[len(size) :])}, size)
    mine = setting.play()[("y",)]
    assert torch.allclose(mine, setting.by_torch()[("y",)])


@pytest.mark.parametrize(
    "line",
    [
        "return x[..., 0:0].chunk(2, -1)[0]",
        "return torch.cat([x[..., 2:2], x], -1)",
        "return self.b + 0 * x",
        "return self.b",
        "a, b = self.pair\nreturn a + 0 * x",
        "return F.elu(x, self.one)",
        "return x * self.huge",
        "return x[..., :self.count]",
        "return F.one_hot(x.argmax(-1), 2)",
        "return F.one_hot(x.argmax(-1), 0)",
        "return x.squeeze(0)",
        "return torch.cat(x, -1)",
        "return torch.cat([], -1)",
        "return F.linear(x, self.b)",
        "return x + x[..., :3]",
        "return torch.tanh(input=x)",
        "return torch.chunk(input=x, chunks=2, dim=-1)[0]",
        "return x.split([1, 3], -1)[1]",
        "return x.split(3, -1)[0]",
        "return F.linear(input=x, weight=self.w, bias=self.b)",
        "return x.clamp(1.0, -1.0)",
        "return x / 0",
        "return 0 / (x * 0)",
        "return x.clamp(min=self.nan)",
        "return self.missing(x)",
        "return x.chunk(2, -1)[5]",
        "return x.chunk(0, -1)[0]",
    ],
)
def test_odd_lines_behave_as_in_torch(line: str) -> None:
    net = network(*line.split("\n"), imports=False)
    net.huge, net.nan = 10**400, float("nan")
    net.register_parameter("pair", nn.Parameter(noise(2)))
    x = noise(3, 4)
    try:
        with torch.no_grad():
            expected = torch.stack([net(row) for row in x])
    except Exception as error:
        with pytest.raises(type(error)):
            Setting(module(net), {("x",): x}, {("y",): floats(4)}).play()
        return
    setting = Setting(module(net), {("x",): x}, {("y",): Field(expected.shape[1:], expected.dtype)})
    mine = setting.play()[("y",)]
    assert torch.allclose(mine, expected, atol=1e-5, equal_nan=True), setting.said


def test_parts_of_a_sequence_run_natively_around_a_near_miss() -> None:
    policy = TensorDictSequential(
        module(network("return self.fc(x)", imports=False), "x", "a"),
        module(network("return torch.softmax(x, -1)", imports=False), "a", "b"),
        module(network("return self.fc(x)", imports=False), "b", "y"),
    )
    setting = Setting(
        policy, {("x",): noise(3, 4)}, {("y",): floats(4), ("a",): floats(4), ("b",): floats(4)}
    )
    mine, theirs = setting.play(), setting.by_torch()
    assert [one.split(" ")[1] for one in setting.said] == ["native", "torch", "native"], setting.said
    assert all(torch.allclose(mine[path], theirs[path], atol=1e-5) for path in mine)
