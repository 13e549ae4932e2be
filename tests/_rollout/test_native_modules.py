"""Random module trees give the same values natively and by torch, and the same bits in any batch and register."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from gleanrl import _core
from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._rollout.actors import PolicyActor, RowLayout
from gleanrl._rollout.native_policies import NativePolicy
from gleanrl._state.rng import CounterGenerator

SIZES = [(), (1,), (8,), (2, 3)]
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 512]
REGISTERS = (4, 8, 16)

Columns = Mapping[Path, Tensor]
"""Root columns by path, ``(*batch, T, *leaf)``."""


@contextmanager
def registers_of(floats: int) -> Iterator[bool]:
    """Use registers of this many floats if the processor has them; yield whether it has."""
    before = _core.layer_width()
    try:
        yield _core.use_layer_width(floats)
    finally:
        assert _core.use_layer_width(before)


class Setting:
    """A policy on a block with fixed root columns; the policy may change between two calls of `play`."""

    def __init__(
        self,
        policy: Any,
        roots: Columns,
        written: Mapping[Path, Field],
        size: tuple[int, ...] = (),
        backend: Any = "auto",
        seed: int = 0,
        actions: tuple[Path, ...] | None = None,
    ) -> None:
        (self.num_steps,) = {column.shape[len(size)] for column in roots.values()}
        fields = {path: Field(one.shape[len(size) + 1 :], one.dtype) for path, one in roots.items()}
        self.policy, self.roots, self.written, self.size = policy, roots, dict(written), size
        self._schema = Schema({**fields, **written})
        self.random = CounterGenerator()
        self.random.seed(seed)
        self.native = NativePolicy(backend, self.random, fields, self.written, torch.Size(size))
        chosen = tuple(written) if actions is None else actions
        layout = RowLayout(tuple(roots), chosen, torch.Size(size), None, None)
        self._actor = PolicyActor(policy, self.written, layout, None, None, self.native)

    def block(self) -> Block:
        """Return a block with the root columns; the other columns hold far-off values."""
        block = Block(self._schema, self.size, self.num_steps)
        for path, column in zip(block.schema.paths, block.columns, strict=True):
            column.copy_(self.roots.get(path, torch.tensor(1).to(column.dtype) * 99))
        return block

    def play(self) -> dict[Path, Tensor]:
        """Return the columns that the policy writes, ``(*batch, T, *leaf)``."""
        block = self.block()
        with torch.no_grad():
            act = self._actor.bind(block)
            for t in range(self.num_steps):
                act(t)
            self._actor.check()
        return {path: block.column(path) for path in self.written}

    def by_torch(self) -> dict[Path, Tensor]:
        """Return the same columns, computed by a copy of the policy on a TensorDict of each row."""
        policy, dim = copy.deepcopy(self.policy), len(self.size)
        rows = []
        with torch.no_grad():
            for t in range(self.num_steps):
                root = {as_key(path): column.select(dim, t).clone() for path, column in self.roots.items()}
                rows.append(policy(TensorDict(root, self.size)))
        found = {path: torch.stack([row.get(as_key(path)) for row in rows], dim) for path in self.written}
        return {path: column.to(self.written[path].dtype) for path, column in found.items()}

    @property
    def said(self) -> list[str]:
        return self.native.said

    def is_native(self) -> bool:
        """Return whether the core computed all members in the last block."""
        return bool(self.said) and all(one.endswith(": native") for one in self.said)


def floats(*shape: int) -> Field:
    return Field(torch.Size(shape), torch.float32)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def module(net: nn.Module, inputs: str = "x", outputs: str = "y") -> TensorDictModule:
    """Return a TensorDictModule with these keys, separated by spaces."""
    return TensorDictModule(net, inputs.split(), outputs.split())


# ---------------------------------------------------------------------------------------------------- module trees
class Tree(NamedTuple):
    net: nn.Module
    width: int  # of its result


ACTIVATIONS = {
    nn.Tanh: st.just({}),
    nn.ReLU: st.just({}),
    nn.LeakyReLU: st.fixed_dictionaries(
        {"negative_slope": st.sampled_from([0.01, 0.0, 0.3, 1.0, 2.5, -0.5])}
    ),
    nn.ELU: st.fixed_dictionaries({"alpha": st.sampled_from([1.0, 0.1, 3.0, -1.0, 0.0])}),
    nn.SiLU: st.just({}),
    nn.GELU: st.fixed_dictionaries({"approximate": st.sampled_from(["none", "tanh"])}),
    nn.Sigmoid: st.just({}),
    nn.Softplus: st.fixed_dictionaries(
        {
            "beta": st.sampled_from([1, 1.0, 0.37, 3.0, 50.0, 1e-3]),
            "threshold": st.sampled_from([20.0, 0.5, 3, -1.0, 80.0]),
        }
    ),
    nn.Identity: st.just({}),
    nn.Dropout: st.fixed_dictionaries({"p": st.sampled_from([0.0, 0.5, 1.0])}),
}


@st.composite
def layers(draw: st.DrawFn, width: int, depth: int) -> Tree:
    """Return a recognised layer, or a nested Sequential, for values with `width` numbers."""
    kinds = ["linear", "linear", "function", "function", "norm", "flatten", *(["sequence"] if depth else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "linear":
        out = draw(st.sampled_from(WIDTHS))
        return Tree(nn.Linear(width, out, bias=draw(st.booleans())), out)
    if kind == "norm":
        affine = draw(st.booleans())
        norm = nn.LayerNorm(width, eps=draw(st.sampled_from([1e-5, 1e-2])), elementwise_affine=affine)
        if affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            if draw(st.booleans()):
                norm.register_parameter("bias", None)
        return Tree(norm, width)
    if kind == "flatten":
        return Tree(nn.Flatten(-1, -1), width)
    if kind == "function":
        cls = draw(st.sampled_from(list(ACTIVATIONS)))
        return Tree(cls(**draw(ACTIVATIONS[cls])), width)
    return draw(trees(width, depth - 1))


@st.composite
def trees(draw: st.DrawFn, width: int, depth: int) -> Tree:
    """Return a Sequential of up to four layers; dropout doesn't train."""
    parts: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 4))):
        part = draw(layers(width, depth))
        parts.append(part.net)
        width = part.width
    return Tree(nn.Sequential(*parts).eval(), width)


SLOPES: dict[type[nn.Module], float] = {nn.SiLU: 1.1, nn.GELU: 1.13, nn.Sigmoid: 0.25}
ROUNDING = 1e-5


def bounded(net: nn.Module, x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Return torch's result and how far the core's may be off, for an input that is off by `error`."""
    if isinstance(net, nn.Sequential):
        for layer in net:
            x, error = bounded(layer, x, error)
        return x, error
    y = net(x)
    if isinstance(net, nn.Linear):
        size = nn.functional.linear(x.abs(), net.weight.abs(), None if net.bias is None else net.bias.abs())
        return y, nn.functional.linear(error, net.weight.abs()) + ROUNDING * size
    if isinstance(net, nn.LayerNorm):
        scale = (x.var(-1, unbiased=False, keepdim=True) + net.eps).rsqrt()
        weight = torch.ones(()) if net.weight is None else net.weight.abs()
        off = error.amax(-1, keepdim=True) + 1e-6 * x.abs().amax(-1, keepdim=True)
        return y, weight * scale * off * (2 + (x - x.mean(-1, keepdim=True)).abs() * scale) + ROUNDING * (
            1 + y.abs()
        )
    if isinstance(net, (nn.Identity, nn.Flatten, nn.Dropout)):
        return y, error
    slope = SLOPES.get(type(net), 1.0)
    for name in ("negative_slope", "alpha"):
        slope = max(slope, abs(getattr(net, name, 0.0)))
    found = slope * error + ROUNDING * (y.abs() + x.abs() + 1.0)
    if isinstance(net, nn.Softplus):  # the function jumps at its threshold
        near = (x * net.beta - net.threshold).abs() <= net.beta * error + ROUNDING * (1 + abs(net.threshold))
        found = found + near * (
            nn.functional.softplus(torch.tensor(-float(net.threshold))) / net.beta + error
        )
        found = found + ROUNDING / net.beta
    return y, found


def require_near(net: nn.Module, x: Tensor, mine: Tensor, pick: Any = lambda y: y) -> None:
    with torch.no_grad():
        y, error = bounded(net, x, torch.zeros_like(x))
    y, error = pick(y), pick(error)
    assert mine.shape == y.shape
    worst = ((mine - y).abs() - error).max()
    assert worst <= 0, f"off by {(mine - y).abs().max()}, allowed {error.min()} to {error.max()}"


@pytest.mark.parametrize("size", SIZES, ids=str)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_random_trees_equal_torch(size: tuple[int, ...], data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    width = data.draw(st.sampled_from(WIDTHS))
    net, out = data.draw(trees(width, data.draw(st.integers(0, 3))))
    x = noise(*size, 3, width, scale=data.draw(st.sampled_from([0.1, 1.0, 20.0])))
    setting = Setting(module(net), {("x",): x}, {("y",): floats(out)}, size)
    mine = setting.play()[("y",)]
    assert setting.is_native(), setting.said
    require_near(net, x, mine)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_trees_with_several_inputs_and_normal_parameters_equal_torch(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    size = data.draw(st.sampled_from(SIZES))
    widths = [data.draw(st.sampled_from(WIDTHS[:12])) for _ in range(2)]
    (left, a), (right, b) = (data.draw(trees(width, 1)) for width in widths)
    head = nn.Sequential(nn.Linear(a, 7), nn.Tanh())
    mapping = data.draw(
        st.sampled_from(["biased_softplus_1.0", "exp", "softplus", "relu", "biased_softplus_0.3_0.1"])
    )
    extractor = NormalParamExtractor(mapping, scale_lb=data.draw(st.sampled_from([1e-4, 0.2])))
    policy = TensorDictSequential(
        module(left, "x", "h"),
        module(right, "goal", "score"),
        module(head, "h", "params"),
        module(extractor, "params", "loc scale"),
    )
    roots = {("x",): noise(*size, 2, widths[0]), ("goal",): noise(*size, 2, widths[1], seed=1)}
    names = {("h",): floats(a), ("score",): floats(b), ("loc",): floats(4), ("scale",): floats(3)}
    setting = Setting(policy, roots, names, size)
    mine = setting.play()
    assert setting.is_native(), setting.said
    require_near(left, roots[("x",)], mine[("h",)])
    require_near(right, roots[("goal",)], mine[("score",)])
    whole = nn.Sequential(*left, *head)
    require_near(whole, roots[("x",)], mine[("loc",)], lambda y: y[..., :4])
    with torch.no_grad():
        x, off = bounded(whole, roots[("x",)], torch.zeros_like(roots[("x",)]))
        scale = extractor(x)[1]
    # The derivative of each mapping is at most that of exp.
    allowed = off[..., 4:] * (1 + x[..., 4:].exp()) * 2 + 3e-5 * (1 + scale)
    assert ((mine[("scale",)] - scale).abs() <= allowed).all()


def bits_of_all_ways(net: nn.Module, rows: Tensor, out: int) -> list[Tensor]:
    """Return the results of twelve rows for each width of the registers and each batch size."""
    found = []
    for width in REGISTERS:
        with registers_of(width) as there:
            for size in [(), (12,), (3, 4), (1,), (6, 1)] if there else []:
                count, inner = torch.Size(size).numel(), rows.shape[-1]
                x = rows.reshape(12 // count, count, inner).movedim(0, 1).reshape(*size, 12 // count, inner)
                setting = Setting(module(net), {("x",): x}, {("y",): floats(out)}, size)
                y = setting.play()[("y",)]
                assert setting.is_native(), setting.said
                found.append(y.reshape(count, 12 // count, out).movedim(0, 1).reshape(12, out))
    return found


def require_same_bits(found: list[Tensor]) -> None:
    for one in found[1:]:
        same = one.view(torch.int32) == found[0].view(torch.int32)
        assert bool((same | (one.isnan() & found[0].isnan())).all())


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_batch_and_register(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    width = data.draw(st.sampled_from(WIDTHS))
    net, out = data.draw(trees(width, data.draw(st.integers(0, 2))))
    require_same_bits(bits_of_all_ways(net, noise(12, width, scale=3.0), out))


@pytest.mark.parametrize("name", ["norm", "gelu", "tanh"])
def test_a_row_has_the_same_bits_beside_a_row_that_is_not_finite(name: str) -> None:
    """If the core leaves a batch with such a row to torch, the results of its other rows change."""
    torch.manual_seed(0)
    middle = {"norm": nn.LayerNorm(16), "gelu": nn.GELU(), "tanh": nn.Tanh()}[name]
    net, rows = nn.Sequential(nn.Linear(4, 16), middle, nn.Linear(16, 3)), noise(12, 4)
    rows[3] = torch.tensor([float("inf"), float("nan"), -float("inf"), 1e30])
    require_same_bits([torch.cat([one[:3], one[4:]]) for one in bits_of_all_ways(net, rows, 3)])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_with_several_dimensions_equal_torch(size: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Flatten(-2), nn.Linear(24, 3))
    x = noise(*size, 2, 4, 5)
    setting = Setting(module(net), {("x",): x}, {("y",): floats(3)}, size)
    mine = setting.play()[("y",)]
    assert setting.is_native(), setting.said
    assert torch.allclose(mine, setting.by_torch()[("y",)], atol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "net", [nn.Flatten(), nn.Flatten(0), nn.Flatten(1, 2), nn.Flatten(-3), nn.Flatten(-2, -2)], ids=str
)
def test_flatten_equals_torch_or_falls_back(net: nn.Flatten, size: tuple[int, ...]) -> None:
    x = noise(*size, 2, 4, 5)
    try:
        shape = net(x.select(len(size), 0)).shape
    except (IndexError, RuntimeError):
        return
    if shape[: len(size)] != size:  # the batch is flattened too
        return
    setting = Setting(module(net), {("x",): x}, {("y",): floats(*shape[len(size) :])}, size)
    assert torch.equal(setting.play()[("y",)], setting.by_torch()[("y",)])


def test_an_exact_gelu_behind_a_linear_layer_is_native() -> None:
    net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2))
    setting = Setting(module(net), {("x",): noise(3, 4)}, {("y",): floats(2)})
    setting.play()
    assert setting.is_native(), setting.said


EXTREME = [0.0, -0.0, 1e-40, 1e-30, 88.0, 89.5, 120.0, 1e4, 1e19, 1e25, 45.5, 3e38, math.inf, math.nan]
STEEP = [nn.Softplus(1.0, 200.0), nn.Softplus(2.0, 95.0), nn.LayerNorm(24)]


@pytest.mark.parametrize(
    "net",
    [cls() for cls in ACTIVATIONS]
    + [nn.GELU("tanh"), nn.Softplus(0.3, 1.5), nn.Softplus(-1.0), nn.ELU(-2.0)]
    + STEEP,
    ids=str,
)
def test_extreme_numbers_equal_torch(net: nn.Module) -> None:
    net.eval()
    if isinstance(net, nn.LayerNorm):
        x = torch.tensor(EXTREME[:10]).unsqueeze(-1) * noise(10, 24)
    else:
        x = torch.tensor([*EXTREME, *(-one for one in EXTREME)]).unsqueeze(0)
    setting = Setting(module(net), {("x",): x}, {("y",): floats(x.shape[-1])})
    mine, theirs = setting.play()[("y",)], setting.by_torch()[("y",)]
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    near = (mine - theirs).abs() <= ROUNDING * (1 + x.abs().nan_to_num(0, 0, 0) + theirs.abs())
    wrong = ~(same | (near & theirs.isfinite()))
    if isinstance(net, nn.GELU) and net.approximate == "none":
        wrong &= x.isfinite()  # torch gives infinity or NaN, depending on the number of elements
    assert not wrong.any(), (x[wrong], mine[wrong], theirs[wrong])
