"""Layers of small networks: the values of torch, and the same bits in every register width."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from gleanrl import _core
from gleanrl._rollout.native_program import UnaryFunction

WIDTHS = (4, 8, 16)
FUNCTIONS: dict[UnaryFunction, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[float, float]]] = {
    UnaryFunction.TANH: (torch.tanh, (0.0, 0.0)),
    UnaryFunction.RELU: (torch.relu, (0.0, 0.0)),
    UnaryFunction.LEAKY_RELU: (lambda x: functional.leaky_relu(x, 0.2), (0.2, 0.0)),
    UnaryFunction.ELU: (lambda x: functional.elu(x, 1.5), (1.5, 0.0)),
    UnaryFunction.SILU: (functional.silu, (0.0, 0.0)),
    UnaryFunction.GELU: (functional.gelu, (0.0, 0.0)),
    UnaryFunction.GELU_TANH: (lambda x: functional.gelu(x, approximate="tanh"), (0.0, 0.0)),
    UnaryFunction.SIGMOID: (torch.sigmoid, (0.0, 0.0)),
    UnaryFunction.SOFTPLUS: (lambda x: functional.softplus(x, 2.0, 10.0), (2.0, 10.0)),
    UnaryFunction.EXP: (torch.exp, (0.0, 0.0)),
    UnaryFunction.LOG: (torch.log, (0.0, 0.0)),
    UnaryFunction.ABS: (torch.abs, (0.0, 0.0)),
    UnaryFunction.SQRT: (torch.sqrt, (0.0, 0.0)),
    UnaryFunction.NEGATE: (torch.neg, (0.0, 0.0)),
    UnaryFunction.AT_LEAST: (lambda x: x.clamp(min=0.5), (0.5, 0.0)),
    UnaryFunction.AT_MOST: (lambda x: x.clamp(max=0.5), (0.5, 0.0)),
    UnaryFunction.ADD: (lambda x: x + 0.3, (0.3, 0.0)),
    UnaryFunction.MULTIPLY: (lambda x: x * 0.3, (0.3, 0.0)),
    UnaryFunction.DIVIDE: (lambda x: x / 0.3, (0.3, 0.0)),
    UnaryFunction.SUBTRACT_FROM: (lambda x: 0.3 - x, (0.3, 0.0)),
    UnaryFunction.DIVIDE_INTO: (lambda x: 0.3 / x, (0.3, 0.0)),
}


@pytest.fixture(autouse=True)
def widest() -> Iterator[None]:
    width = _core.layer_width()
    yield
    _core.use_layer_width(width)


def computed(
    x: torch.Tensor, size: int, operation: tuple, weights: tuple[torch.Tensor, ...] = ()
) -> list[torch.Tensor]:
    """Return the results of an operation on each row of `x`, ``(rows, n)``, for each width that the processor has."""
    found = []
    for width in filter(_core.use_layer_width, WIDTHS):
        assert _core.layer_width() == width
        operations = [(0, 0, [], [0, 0], []), operation]
        program = _core.ActorProgram([x.shape[1], size], operations, [(1, 0)], 1, len(weights))
        program.pack([(one.data_ptr(), one.numel()) for one in weights])
        y = torch.full((len(x), size), float("nan"))
        places = [[(one.data_ptr(), one.stride(0) * 4, 0)] for one in (x, y)]
        program.bind(*places, len(x), 1, 0, 0, 0)
        assert program.act(0)
        found.append(y)
    return found


def test_every_function_has_a_case() -> None:
    assert set(FUNCTIONS) == set(UnaryFunction)


@pytest.mark.parametrize("function", UnaryFunction)
@pytest.mark.parametrize("count", [1, 3, 16, 37])
def test_functions_equal_torchs_in_every_width(function: UnaryFunction, count: int) -> None:
    reference, (a, b) = FUNCTIONS[function]
    x = torch.randn(20, count, generator=torch.Generator().manual_seed(count)) * 3
    x[0], x[1], x[2] = 0.0, 60.0, -60.0
    first, *others = computed(x, count, (4, 1, [0], [int(function)], [a, b]))
    assert torch.allclose(first, reference(x), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert all(torch.equal(first.view(torch.int32), other.view(torch.int32)) for other in others)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("outer", [1, 15, 16, 17, 48, 64, 100, 129])
@pytest.mark.parametrize("inner", [1, 7, 64])
def test_dense_layers_equal_torchs_in_every_width(inner: int, outer: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(inner + outer)
    x, weight = (torch.randn(n, inner, generator=generator) for n in (5, outer))
    bias = torch.randn(outer, generator=generator)
    weights = (weight, bias) if biased else (weight,)
    first, *others = computed(x, outer, (2, 1, [0], [0, 1 if biased else -1, inner, outer, 1], []), weights)
    expected = functional.linear(x, weight, bias if biased else None)
    size = functional.linear(x.abs(), weight.abs(), bias.abs())
    assert bool(((first - expected).abs() <= 1e-5 * size).all())
    assert all(torch.equal(first, other) for other in others)
    (alone, *_) = computed(x[2:3], outer, (2, 1, [0], [0, 1 if biased else -1, inner, outer, 1], []), weights)
    assert torch.equal(alone[0], first[2]), "a row has the same bits in any batch"
