"""Draws of the core have their distributions, are independent, and carry torch's log-probabilities.

The chi-square and Kolmogorov-Smirnov tests use fixed keys, so they give the same result in every run.
``GLEANRL_CHAOS=1`` draws a million numbers, other runs a twentieth.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn.distributions import OneHotCategorical
from torch import Tensor, distributions, nn

from gleanrl import _core
from gleanrl._arrays.native import ActorProgram
from gleanrl._arrays.schema import Field
from gleanrl._rollout.native_program import _Kind
from tests._rollout.test_native_forward import network
from tests._rollout.test_native_modules import REGISTERS, Setting, floats, module, noise, registers_of

NUM_ENVS = 1000
NUM_STEPS = 1000 if os.environ.get("GLEANRL_CHAOS") == "1" else 50
LEAST = 1e-6
"""The probability below which a statistic fails its test."""

INDEX = Field(torch.Size([]), torch.int64)


def chi_square(observed: Tensor, expected: Tensor, lost: int = 1) -> float:
    """Return the probability of a larger statistic; `lost` are the degrees of freedom that are fixed."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    possible = expected > 0
    assert not observed[~possible].any(), "a choice without probability was drawn"
    # Rare choices are counted together.
    rare = possible & (expected < 10)
    seen = torch.cat([observed[possible & ~rare], observed[rare].sum().reshape(1)])
    hoped = torch.cat([expected[possible & ~rare], expected[rare].sum().reshape(1)])
    seen, hoped = seen[hoped > 0], hoped[hoped > 0]
    freedom = len(seen) - lost
    if freedom < 1:
        return 1.0
    statistic = ((seen - hoped) ** 2 / hoped).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0, dtype=torch.float64), statistic / 2))


def independence(a: Tensor, b: Tensor, count: int) -> float:
    """Return the probability of a stronger dependence of two sequences of choices."""
    table = (
        torch.bincount(a.flatten() * count + b.flatten(), minlength=count**2).reshape(count, count).double()
    )
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    return chi_square(table, expected, table.shape[0] + table.shape[1] - 1)


def kolmogorov_smirnov(sample: Tensor, cumulative: Any) -> float:
    """Return the probability of a larger distance between a sample and a distribution."""
    x = cumulative(sample.double().flatten().sort().values)
    n = len(x)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max(float((steps[1:] - x).max()), float((x - steps[:-1]).max()))
    z = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * z) ** 2) for k in range(1, 101)))


def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def test_the_statistics_find_small_faults() -> None:
    n = NUM_ENVS * NUM_STEPS
    fair = torch.full((4,), n / 4)
    assert chi_square(fair, fair) > 0.99
    assert chi_square(fair * torch.tensor([1.05, 0.95, 1, 1]), fair) < LEAST
    sample = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert kolmogorov_smirnov(sample, normal_cdf) > 1e-3
    assert kolmogorov_smirnov(sample + 0.05, normal_cdf) < LEAST
    a = torch.randint(4, (n,), generator=torch.Generator().manual_seed(0))
    b = torch.randint(4, (n,), generator=torch.Generator().manual_seed(1))
    assert independence(a, b, 4) > 1e-3
    assert independence(a, torch.where(torch.arange(n) % 20 == 0, a, b), 4) < LEAST


# -------------------------------------------------------------------------------------------------------------- philox
@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(key: int, counter: Any, words: Any) -> None:
    assert _core.philox(key, *counter) == words


def test_philox_has_no_repeated_words_for_close_counters() -> None:
    found = [
        _core.philox(1, step, 0, env, op << 16) for step in range(40) for env in range(40) for op in range(4)
    ]
    words = [word for one in found for word in one]
    assert len(set(found)) == len(found)
    assert len(words) - len(set(words)) < 20  # of 25,600; a chance of 2**-32 for each pair


# ------------------------------------------------------------------------------------------------------- distributions
def constants(*values: Tensor) -> nn.Module:
    """Return a network ``x -> values`` for ``x`` of zeros with the size of each value."""
    lines = [f"x[..., :{len(value)}] * 0.0 + self.mean{k}" for k, value in enumerate(values)]
    net = network(f"return {', '.join(lines)}", imports=False)
    for k, value in enumerate(values):
        net.register_buffer(f"mean{k}", value)
    return net


def drawing(
    distribution: Any,
    parameters: dict[str, Tensor],
    drawn: Field,
    scored: bool = True,
    shape: tuple[int, ...] = (),
    **options: Any,
) -> Setting:
    """Return a setting that draws from a distribution with fixed parameters in each environment and step."""
    names = [*parameters]
    width = max(len(one) for one in parameters.values())
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(constants(*parameters.values()), ["x"], names),
        ProbabilisticTensorDictModule(
            names, ["a"], distribution_class=distribution, default_interaction_type=InteractionType.RANDOM,
            return_log_prob=scored, log_prob_key="score",
        ),
    )  # fmt: skip
    steps = options.pop("num_steps", NUM_STEPS)
    size = options.pop("size", (NUM_ENVS,))
    written = {("a",): drawn, **({("score",): floats(*shape)} if scored else {})}
    return Setting(
        policy, {("x",): torch.zeros(*size, steps, width)}, written, size, actions=(("a",),), **options
    )


def shown(setting: Setting) -> dict[str, Tensor]:
    found = {path[0]: column for path, column in setting.play().items()}
    assert setting.is_native(), setting.said
    return found


LOGITS = {
    "usual": noise(5),
    "two": torch.tensor([0.3, -0.2]),
    "one": torch.tensor([1.5]),
    "many": noise(20, scale=2.0),
    "impossible": torch.tensor([0.0, -math.inf, 1.0, -math.inf, -1.0]),
    "large": torch.tensor([1e30, 1e30, -1e30, 0.0]),
    "small": torch.tensor([-1e30, -1e30, -1e30]),
    "unequal": torch.tensor([0.0, 12.0, -3.0, 11.0]),
    "impossible first": torch.tensor([-math.inf, -math.inf, 3.0]),
    "impossible last": torch.tensor([0.5, 0.1, -math.inf]),
}
PROBS = {
    "usual": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    "not normalised": torch.tensor([1.0, 2.0, 3.0, 10.0]),
    "zeros": torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]),
    "rare": torch.tensor([1e-3, 1e-5, 1.0]),
    "tiny": torch.tensor([1e-30, 2e-30, 3e-30]),
}
COARSE = ("large", "small")
"""Logits whose log-probabilities torch rounds to zero, because it subtracts numbers of 1e30."""
CHOICES = [("logits", name) for name in LOGITS] + [("probs", name) for name in PROBS]


def parameter_of(kind: str, name: str) -> tuple[Tensor, Tensor]:
    """Return a parameter and the probabilities in double precision."""
    x = (LOGITS if kind == "logits" else PROBS)[name]
    return x, x.double().softmax(-1) if kind == "logits" else x.double() / x.double().sum()


@pytest.mark.parametrize(("kind", "name"), CHOICES)
def test_categorical_draws_have_their_probabilities(kind: str, name: str) -> None:
    x, probabilities = parameter_of(kind, name)
    found = shown(drawing(distributions.Categorical, {kind: x}, INDEX, name not in COARSE, seed=17))
    drawn = found["a"]
    assert (
        chi_square(torch.bincount(drawn.flatten(), minlength=len(x)), drawn.numel() * probabilities) > LEAST
    )
    expected = distributions.Categorical(**{kind: x}).log_prob(drawn)
    assert name in COARSE or torch.allclose(found["score"], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "name"), [one for one in CHOICES if one[1] != "one"])
def test_one_hot_draws_have_their_probabilities(kind: str, name: str) -> None:
    x, probabilities = parameter_of(kind, name)
    found = shown(
        drawing(OneHotCategorical, {kind: x}, Field(x.shape, torch.int64), name not in COARSE, seed=18)
    )
    drawn = found["a"]
    assert (drawn.sum(-1) == 1).all() and drawn.ge(0).all()
    assert chi_square(drawn.sum((0, 1)), drawn.shape[0] * drawn.shape[1] * probabilities) > LEAST
    expected = OneHotCategorical(**{kind: x}).log_prob(drawn)
    assert name in COARSE or torch.allclose(found["score"], expected, atol=2e-5, rtol=1e-5)


def test_one_hot_draws_of_torchs_class_are_torchs() -> None:
    x, probabilities = parameter_of("logits", "usual")
    setting = drawing(distributions.OneHotCategorical, {"logits": x}, floats(5), num_steps=2)
    found = {path[0]: column for path, column in setting.play().items()}
    assert chi_square(found["a"].sum((0, 1)), 2 * NUM_ENVS * probabilities) > LEAST
    assert torch.allclose(
        found["score"], distributions.OneHotCategorical(logits=x).log_prob(found["a"]), atol=1e-5
    )


NORMALS = [(0.0, 1.0), (3.0, 0.25), (-100.0, 1e-3), (0.0, 1e4), (1e5, 2.0)]


@pytest.mark.parametrize(("loc", "scale"), NORMALS)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_normal_draws_have_their_distribution(loc: float, scale: float, width: int) -> None:
    parameters = {"loc": torch.full((width,), loc), "scale": torch.full((width,), scale)}
    found = shown(drawing(distributions.Normal, parameters, floats(width), shape=(width,), seed=19))
    drawn = found["a"]
    for one in drawn.unbind(-1):
        # Rounding of a number far from zero is coarser than the distribution.
        blur = torch.rand(one.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5
        spread = one.double() + blur * float(
            torch.tensor(max(abs(loc), scale)).nextafter(torch.tensor(math.inf)) - max(abs(loc), scale)
        )
        assert kolmogorov_smirnov((spread - loc) / scale, normal_cdf) > LEAST
    expected = distributions.Normal(**parameters).log_prob(drawn)
    assert torch.allclose(found["score"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_normal_draws_of_a_row_are_independent(width: int) -> None:
    parameters = {"loc": torch.zeros(width), "scale": torch.ones(width)}
    drawn = shown(drawing(distributions.Normal, parameters, floats(width), scored=False, seed=20))["a"]
    bins = (normal_cdf(drawn.double()) * 8).long().clamp(0, 7)
    for i in range(width):
        for j in range(i):
            assert independence(bins[..., i], bins[..., j], 8) > LEAST
    signs = (drawn > 0).long()
    assert independence(bins[:, :-1, 0], bins[:, 1:, 0], 8) > LEAST
    assert independence(bins[:-1, :, 0], bins[1:, :, 0], 8) > LEAST
    radius = (normal_cdf(drawn[..., 0].double().abs()) * 16 - 8).long().clamp(0, 7)
    assert independence(radius, signs[..., 1] * 4 + signs[..., 0], 8) > LEAST
    tails = drawn.double().abs().max()
    assert 3.5 < tails < 7


def test_choices_are_independent_between_environments_and_steps() -> None:
    drawn = shown(
        drawing(distributions.Categorical, {"logits": LOGITS["usual"]}, INDEX, scored=False, seed=21)
    )["a"]
    for other in (1, 2, 3, 64):
        if other < NUM_STEPS:
            assert independence(drawn[:, other:], drawn[:, :-other], 5) > LEAST
        assert independence(drawn[other:], drawn[:-other], 5) > LEAST
    assert independence(drawn[1:, 1:], drawn[:-1, :-1], 5) > LEAST
    assert independence(drawn[1:, :-1], drawn[:-1, 1:], 5) > LEAST
    assert len({tuple(row.tolist()) for row in drawn}) == NUM_ENVS
    assert len({tuple(row.tolist()) for row in drawn.T}) == NUM_STEPS


def test_choices_of_different_keys_are_independent() -> None:
    a, b = (
        shown(
            drawing(distributions.Categorical, {"logits": LOGITS["usual"]}, INDEX, scored=False, seed=seed)
        )["a"]
        for seed in (1, 2)
    )
    assert not torch.equal(a, b)
    assert independence(a, b, 5) > LEAST


@pytest.mark.parametrize("between", [False, True], ids=["one segment", "two segments"])
def test_choices_of_several_members_are_independent(between: bool) -> None:
    def sampling(name: str, out: str) -> ProbabilisticTensorDictModule:
        return ProbabilisticTensorDictModule(
            {"logits": name},
            [out],
            distribution_class=distributions.Categorical,
            default_interaction_type=InteractionType.RANDOM,
        )

    middle = [module(nn.Softmax(-1), "x", "other")] if between else []
    policy = TensorDictSequential(
        module(constants(LOGITS["usual"], LOGITS["usual"]), "x", "p q"),
        sampling("p", "a"),
        *middle,
        sampling("q", "b"),
    )
    written = {("a",): INDEX, ("b",): INDEX}
    setting = Setting(policy, {("x",): torch.zeros(NUM_ENVS, NUM_STEPS, 5)}, written, (NUM_ENVS,), seed=22)
    with set_interaction_type(InteractionType.RANDOM):
        found = setting.play()
    assert [one.endswith(": native") for one in setting.said] == [
        True,
        True,
        *([False] if between else []),
        True,
    ], setting.said
    a, b = found[("a",)], found[("b",)]
    assert independence(a, b, 5) > LEAST
    assert independence(a[:, 1:], b[:, :-1], 5) > LEAST
    assert independence(a[:, :-1], b[:, 1:], 5) > LEAST
    for one in (a, b):
        assert (
            chi_square(
                torch.bincount(one.flatten(), minlength=5), one.numel() * LOGITS["usual"].double().softmax(-1)
            )
            > LEAST
        )


def test_choices_of_equal_segments_are_independent() -> None:
    """Both segments have one operation, at the same position of their programs."""
    policy = TensorDictSequential(
        *(
            one
            for name in "pq"
            for one in (
                ProbabilisticTensorDictModule(
                    {"logits": name}, [name + "_drawn"], distribution_class=distributions.Categorical
                ),
                module(nn.Softmax(-1), name, name + "_other"),
            )
        )
    )
    logits = LOGITS["usual"].expand(NUM_ENVS, NUM_STEPS, 5)
    written = {("p_drawn",): INDEX, ("q_drawn",): INDEX}
    setting = Setting(policy, {("p",): logits, ("q",): logits}, written, (NUM_ENVS,), seed=23)
    with set_interaction_type(InteractionType.RANDOM):
        a, b = setting.play().values()
    assert [one.endswith(": native") for one in setting.said] == [True, False, True, False], setting.said
    assert independence(a, b, 5) > LEAST


# --------------------------------------------------------------------------------------- the sequence of random numbers
PARAMETERS = "return self.fc(x[..., :4]), x[..., :2], x[..., 2:4].exp()"


def learned(size: tuple[int, ...], steps: int, seed: int = 5) -> Setting:
    """Return a setting with a network, a choice and a normal draw."""
    torch.manual_seed(0)
    policy = TensorDictSequential(
        module(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), "x", "h"),
        module(network(PARAMETERS, imports=False), "h", "logits loc scale"),
        ProbabilisticTensorDictModule(
            ["logits"], ["a"], distribution_class=distributions.Categorical, return_log_prob=True, log_prob_key="score"
        ),
        ProbabilisticTensorDictModule(["loc", "scale"], ["b"], distribution_class=distributions.Normal),
    )  # fmt: skip
    x = noise(12, 6, 4)[: max(torch.Size(size).numel(), 1), :steps].reshape(*size, steps, 4)
    written = {("a",): INDEX, ("b",): floats(2), ("score",): floats()}
    return Setting(policy, {("x",): x}, written, size, seed=seed)


def played(setting: Setting) -> list[Tensor]:
    with set_interaction_type(InteractionType.RANDOM):
        found = setting.play()
    assert setting.is_native(), setting.said
    return [*found.values()]


def test_the_first_environment_draws_the_same_alone_and_in_a_batch_and_with_every_register() -> None:
    wanted = played(learned((12,), 6))
    for width in REGISTERS:
        with registers_of(width) as there:
            if there:
                assert all(map(torch.equal, played(learned((12,), 6)), wanted))
                assert all(
                    torch.equal(one, many[0])
                    for one, many in zip(played(learned((), 6)), wanted, strict=True)
                )
                again = played(learned((3, 4), 6))
                assert all(
                    torch.equal(one.flatten(0, 1), many) for one, many in zip(again, wanted, strict=True)
                )


def test_the_cut_into_blocks_does_not_matter() -> None:
    (whole, parts) = (played(learned((), 6)), learned((), 6))
    x = parts.roots[("x",)]
    found = []
    for first, end in ((0, 1), (1, 3), (3, 6)):
        piece = learned((), end - first)
        piece.roots = {("x",): x[first:end]}
        piece.random.adopt(parts.random.snapshot())
        found.append(played(piece))
        parts.random.adopt(piece.random.snapshot())
    for column, *pieces in zip(whole, *found, strict=True):
        assert torch.equal(column, torch.cat(pieces))


def test_a_saved_position_continues_the_sequence() -> None:
    first = learned((3,), 6)
    played(first)
    place = first.random.snapshot()
    wanted = played(first)
    other = learned((3,), 6, seed=99)
    other.random.adopt(place)
    assert all(map(torch.equal, played(other), wanted))
    assert not all(map(torch.equal, played(other), wanted))


def test_draws_leave_torchs_generator_unchanged() -> None:
    setting = learned((3,), 6)
    before = torch.get_rng_state()
    played(setting)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", [InteractionType.MODE, InteractionType.DETERMINISTIC])
@pytest.mark.parametrize(("parameter", "name"), CHOICES)
def test_the_most_likely_choice_equals_torchs(kind: InteractionType, parameter: str, name: str) -> None:
    x, _ = parameter_of(parameter, name)
    setting = drawing(
        distributions.Categorical, {parameter: x}, INDEX, name not in COARSE, num_steps=2, size=(3,)
    )
    with set_interaction_type(kind):
        found = shown(setting)
    assert (found["a"] == distributions.Categorical(**{parameter: x}).mode).all()


@pytest.mark.parametrize("kind", [InteractionType.MODE, InteractionType.DETERMINISTIC, InteractionType.MEAN])
def test_the_mean_of_a_normal_equals_torchs(kind: InteractionType) -> None:
    parameters = {"loc": noise(3), "scale": noise(3).abs()}
    with set_interaction_type(kind):
        found = shown(
            drawing(distributions.Normal, parameters, floats(3), shape=(3,), num_steps=2, size=(3,))
        )
    assert (found["a"] == parameters["loc"]).all()
    assert torch.allclose(found["score"], distributions.Normal(**parameters).log_prob(found["a"]), atol=1e-5)


# --------------------------------------------------------------------------------------------- masks and tanh: the core
def core(
    slots: list[int],
    operations: list[Any],
    sources: list[np.ndarray[Any, Any]],
    outputs: list[int],
    parts: int,
    key: int = 7,
) -> Any:
    """Return the results of one row, ``(parts, size)`` float32 each; None if the core leaves it to torch."""
    read = [
        (int(_Kind.INPUT), k, [], [k, 4 if one.dtype == np.bool_ else 0], []) for k, one in enumerate(sources)
    ]
    program = ActorProgram(slots, [*read, *operations], [(slot, 0) for slot in outputs], len(sources), 0)
    program.pack([])
    made = [np.zeros((parts, slots[slot]), np.float32) for slot in outputs]
    places = [[(one.ctypes.data, one.strides[0], 0) for one in group] for group in (sources, made)]
    program.bind(*places, parts, 1, key, 3, 0)
    return made if program.act(0) else None


PARTS = NUM_ENVS * NUM_STEPS
MASKS = [[1, 1, 0, 1, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 1, 0]]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("probabilities", [0, 1])
def test_masked_choices_are_never_drawn(mask: list[int], probabilities: int) -> None:
    x = torch.tensor([0.3, 0.2, 5.0, 0.5, 0.9])
    allowed = torch.tensor(mask, dtype=torch.bool)
    sources = [np.tile(x.numpy(), (PARTS, 1)), np.tile(allowed.numpy(), (PARTS, 1))]
    choose = (int(_Kind.CATEGORICAL), 2, [0, 1], [5, probabilities, 1, 3], [])
    index, score = core([5, 5, 1, 1], [choose], sources, [2, 3], PARTS)
    weights = (x if probabilities else x.exp()).double() * allowed
    drawn = torch.from_numpy(index).long().flatten()
    assert chi_square(torch.bincount(drawn, minlength=5), PARTS * weights / weights.sum()) > LEAST
    clamped = (
        (weights / weights.sum()).clamp(2.0**-23, 1 - 2.0**-23) if probabilities else weights / weights.sum()
    )
    assert torch.allclose(torch.from_numpy(score).flatten(), clamped.log()[drawn].float(), atol=1e-5)


def test_masks_that_differ_between_environments_are_obeyed() -> None:
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand((PARTS, 5), generator=generator) < 0.4
    allowed[torch.arange(PARTS), torch.randint(5, (PARTS,), generator=generator)] = True
    x = noise(PARTS, 5, scale=30.0)
    for random in (0, 1):
        choose = (int(_Kind.CATEGORICAL), 2, [0, 1], [5, 0, random, -1], [])
        (index,) = core([5, 5, 1], [choose], [x.numpy(), allowed.numpy()], [2], PARTS)
        drawn = torch.from_numpy(index).long()
        assert allowed.gather(-1, drawn).all()
        if not random:
            assert torch.equal(drawn.flatten(), x.masked_fill(~allowed, -math.inf).argmax(-1))


@pytest.mark.parametrize(
    "case", ["nothing allowed", "nan", "inf", "all impossible", "negative", "all zero", "inf prob"]
)
def test_parameters_that_torch_refuses_are_left_to_it(case: str) -> None:
    x, allowed, probabilities = torch.tensor([[0.3, 0.2], [0.5, 0.1]]), torch.ones(2, 2, dtype=torch.bool), 0
    if case == "nothing allowed":
        allowed[1] = False
    elif case in ("nan", "inf"):
        x[1, 1] = float(case)
    elif case == "all impossible":
        x[1] = -math.inf
    else:
        probabilities = 1
        x[1] = torch.tensor(
            {"negative": [-0.1, 1.1], "all zero": [0.0, 0.0], "inf prob": [1.0, math.inf]}[case]
        )
    choose = (int(_Kind.CATEGORICAL), 2, [0, 1], [2, probabilities, 1, -1], [])
    assert core([2, 2, 1], [choose], [x.numpy(), allowed.numpy()], [2], 2) is None


def squashed(loc: float, scale: float, low: float, high: float, parts: int = PARTS) -> tuple[Tensor, Tensor]:
    sources = [np.full((parts, 1), value, np.float32) for value in (loc, scale)]
    draw = (int(_Kind.NORMAL), 2, [0, 1], [1, 1, 1, 3], [low, high])
    a, score = core([1, 1, 1, 1], [draw], sources, [2, 3], parts)
    return torch.from_numpy(a).flatten(), torch.from_numpy(score).flatten()


@pytest.mark.parametrize(("loc", "scale"), [(0.0, 1.0), (0.7, 0.3), (-1.0, 0.5)])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 2.0), (0.0, 5.0)])
def test_squashed_draws_have_their_distribution(loc: float, scale: float, low: float, high: float) -> None:
    a, score = squashed(loc, scale, low, high)
    unit = ((a.double() - low) / (high - low) * 2 - 1).clamp(-1 + 1e-6, 1 - 1e-6)
    raw = torch.atanh(unit)
    assert kolmogorov_smirnov((raw - loc) / scale, normal_cdf) > LEAST
    density = (
        distributions.Normal(loc, scale).log_prob(raw) - (1 - unit**2).log() - math.log((high - low) / 2)
    )
    inner = unit.abs() < 0.99
    assert torch.allclose(score[inner].double(), density[inner], atol=1e-3)


@pytest.mark.parametrize("loc", [5.0, 9.0, 20.0, 100.0, 1e6, 1e30, -5.0, -20.0, -1e6, -1e30])
def test_saturated_draws_stay_within_the_bounds_with_finite_scores(loc: float) -> None:
    a, score = squashed(loc, 1.0, -2.0, 2.0, 1000)
    assert (a.abs() <= 2).all() and (a.sign() == math.copysign(1, loc)).all()
    assert torch.atanh(a / 2).isfinite().all(), "the inverse stays finite"
    assert score.isfinite().all()


@pytest.mark.parametrize("values", [(math.nan, 1.0), (0.0, 0.0), (0.0, -1.0), (0.0, math.nan), (0.0, -0.0)])
def test_normal_parameters_that_torch_refuses_are_left_to_it(values: tuple[float, float]) -> None:
    sources = [
        np.array([[0.0], [value]], np.float32) if k == 0 else np.array([[1.0], [value]], np.float32)
        for k, value in enumerate(values)
    ]
    draw = (int(_Kind.NORMAL), 2, [0, 1], [1, 0, 0, -1], [0.0, 0.0])
    assert core([1, 1, 1], [draw], sources, [2], 2) is None


@pytest.mark.parametrize("dtype", ["probability", "mask"])
def test_explored_choices_are_uniform_among_the_allowed(dtype: str) -> None:
    chosen, eps = np.full((PARTS, 1), 1, np.float32), np.full((PARTS, 1), 0.3, np.float32)
    allowed = np.tile(np.array([1, 1, 0, 1], np.bool_), (PARTS, 1))
    masked = dtype == "mask"
    explore = (int(_Kind.EXPLORE), 3, [0, 1, 2 if masked else -1], [4], [])
    (index,) = core([1, 1, 4, 1], [explore], [chosen, eps, allowed], [3], PARTS)
    share = torch.tensor([1.0, 1.0, 0.0 if masked else 1.0, 1.0], dtype=torch.float64)
    expected = 0.3 * share / share.sum() + 0.7 * torch.eye(4, dtype=torch.float64)[1]
    assert (
        chi_square(torch.bincount(torch.from_numpy(index).long().flatten(), minlength=4), PARTS * expected)
        > LEAST
    )
