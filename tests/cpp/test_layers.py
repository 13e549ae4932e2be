"""The functions of small networks are accurate, and have the same bits in registers of every width."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gleanrl import _core
from gleanrl._arrays.native import ActorProgram
from gleanrl._rollout.native_program import UnaryFunction, _Kind

REGISTERS = (4, 8, 16)

EXACT = {
    UnaryFunction.TANH: torch.tanh,
    UnaryFunction.SIGMOID: torch.sigmoid,
    UnaryFunction.EXP: torch.exp,
    UnaryFunction.SILU: torch.nn.functional.silu,
    UnaryFunction.ELU: torch.nn.functional.elu,
    UnaryFunction.SOFTPLUS: torch.nn.functional.softplus,
    UnaryFunction.GELU: torch.nn.functional.gelu,
    UnaryFunction.LOG: lambda x: x.abs().log(),
    UnaryFunction.SQRT: lambda x: x.abs().sqrt(),
}


def apply(kind: UnaryFunction, x: torch.Tensor) -> torch.Tensor:
    """Return the function of each number, computed in one row."""
    y = torch.empty_like(x)
    operations = [(int(_Kind.INPUT), 0, [], [0, 0], []), (int(_Kind.UNARY), 1, [0], [int(kind)], [1.0, 20.0])]
    program = ActorProgram([len(x), len(x)], operations, [(1, 0)], 1, 0)
    program.pack([])
    places = [[(one.data_ptr(), one.nbytes, 0)] for one in (x, y)]
    program.bind(*places, 1, 1, 0, 0, 0)
    assert program.act(0)
    return y


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the linear layer of each row of `x`."""
    y = torch.empty(len(x), len(weight))
    given = [weight, *([] if bias is None else [bias])]
    numbers = [0, -1 if bias is None else 1, x.shape[1], len(weight), 1]
    operations = [(int(_Kind.INPUT), 0, [], [0, 0], []), (int(_Kind.DENSE), 1, [0], numbers, [])]
    program = ActorProgram([x.shape[1], len(weight)], operations, [(1, 0)], 1, len(given))
    program.pack([(one.data_ptr(), one.numel()) for one in given])
    places = [[(one.data_ptr(), one.stride(0) * 4, 0)] for one in (x, y)]
    program.bind(*places, len(x), 1, 0, 0, 0)
    assert program.act(0)
    return y


def test_only_widths_of_the_processor_are_used() -> None:
    before = _core.layer_width()
    assert before in REGISTERS
    for width in (0, 1, 2, 3, 5, 32, -4):
        assert not _core.use_layer_width(width) and _core.layer_width() == before
    assert _core.use_layer_width(4) and _core.layer_width() == 4
    assert _core.use_layer_width(before)


def numbers() -> torch.Tensor:
    """Return numbers of all magnitudes up to 90, of both signs, and the borders of the formulas."""
    sizes = torch.logspace(-30, math.log10(90), 20_000, dtype=torch.float64).float()
    borders = torch.tensor([0.0, 0.625, 1.0, 20.0, 87.33654, 88.72283, 0.34657359])
    found = torch.cat(
        [sizes, torch.linspace(0, 12, 20_000), borders, torch.nextafter(borders, torch.tensor(99.0))]
    )
    return torch.cat([found, -found])


@pytest.mark.parametrize("kind", EXACT)
def test_functions_are_accurate_to_some_units_in_the_last_place(kind: UnaryFunction) -> None:
    x = numbers()
    if kind in (UnaryFunction.LOG, UnaryFunction.SQRT):
        x = x.abs()
    exact = EXACT[kind](x.double())
    kept = exact.isfinite() & (exact.abs() > 1e-37) & (exact.abs() < 3e38)
    error = ((apply(kind, x).double() - exact).abs() / exact.abs())[kept]
    # The difference 1 + tanh loses digits of small results; torch's own error is absolute there.
    if kind in (UnaryFunction.SILU, UnaryFunction.SIGMOID, UnaryFunction.GELU, UnaryFunction.ELU):
        error = error[exact.abs()[kept] > 1e-6]
    assert error.max() < 32 * 2.0**-24, (
        x[kept][error.argmax()] if len(error) == int(kept.sum()) else error.max()
    )


@pytest.mark.parametrize("kind", UnaryFunction)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100])
def test_functions_have_the_same_bits_in_registers_of_every_width(kind: UnaryFunction, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 10
    alone = torch.cat([apply(kind, one) for one in x.split(1)]).view(torch.int32)
    before = _core.layer_width()
    for width in REGISTERS:
        if _core.use_layer_width(width):
            y = apply(kind, x)
            assert bool(((y.view(torch.int32) == alone) | y.isnan()).all())
    assert _core.use_layer_width(before)


@pytest.mark.parametrize("inner", [0, 1, 3, 16, 65])
@pytest.mark.parametrize("outer", [1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_linear_layers_equal_sums_in_order_and_have_the_same_bits(inner: int, outer: int) -> None:
    generator = torch.Generator().manual_seed(inner * 1000 + outer)
    x = torch.randn(5, inner, generator=generator)
    weight, bias = torch.randn(outer, inner, generator=generator), torch.randn(outer, generator=generator)
    before = _core.layer_width()
    for given in (bias, None):
        expected = np.zeros((5, outer), np.float32) if given is None else np.tile(given.numpy(), (5, 1))
        for i in range(inner):
            expected += weight.numpy()[:, i] * x.numpy()[:, i : i + 1]
        for width in REGISTERS:
            if _core.use_layer_width(width):
                assert (dense(x, weight, given).numpy() == expected).all()
    assert _core.use_layer_width(before)
