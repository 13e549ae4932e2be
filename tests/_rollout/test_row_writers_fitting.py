"""Actions in another form than declared are converted if every value survives, and refused otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.row_writers import Conversions, RowWriter, advice, first_change, with_shape
from gleanrl.collectors import RandomPolicy, SyncDataCollector
from gleanrl.data import OneHot, Unbounded
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv
from gleanrl.errors import EnvironmentFailure, PolicyError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

PATH = ("action",)
T = 4


@pytest.mark.parametrize(
    ("shape", "wanted", "dims", "fits"),
    [
        ((3, 2), (3, 2), 1, True),
        ((3,), (3, 1), 1, True),
        ((3, 1), (3,), 1, True),
        ((), (1,), 0, True),
        ((1,), (), 0, True),
        ((), (1,), 1, False),  # the batch dimension isn't part of the action
        ((2,), (2, 1, 1), 1, False),
        ((3, 2), (3,), 1, False),
        ((1, 3), (3,), 1, False),
    ],
)
def test_trailing_dimension_of_size_one_is_added_or_removed(
    shape: Any, wanted: Any, dims: int, fits: bool
) -> None:
    found = with_shape(torch.zeros(shape), torch.Size(wanted), dims)
    assert (found is not None and found.shape == wanted) if fits else found is None


@pytest.mark.parametrize(
    ("values", "dtype", "kept"),
    [
        (torch.tensor([0.0, 3.0, -2.0]), torch.int64, 3),
        (torch.tensor([0.0, 1.0, 0.5]), torch.int64, 2),
        (torch.tensor([0.0, float("nan")]), torch.int64, 1),
        (torch.tensor([0.0, float("inf")]), torch.int32, 1),
        (torch.tensor([float("nan"), float("inf"), 0.5], dtype=torch.float64), torch.float32, 3),
        (torch.tensor([0.5, 0.1], dtype=torch.float64), torch.float32, 1),
        (torch.tensor([1.0, 1e300], dtype=torch.float64), torch.float32, 1),
        (torch.tensor([0, 1, 2]), torch.bool, 2),
        (torch.tensor([True, False]), torch.int64, 2),
        (torch.tensor([7, 2**24 + 1]), torch.float32, 1),
        (torch.tensor([127, 128]), torch.int8, 1),
        (torch.tensor([1, -1], dtype=torch.int8), torch.uint8, 1),
        (torch.tensor([1, 200], dtype=torch.uint8), torch.int8, 1),
        (torch.tensor([0.5, 1.5], dtype=torch.bfloat16), torch.float32, 2),
    ],
)  # fmt: skip
def test_the_first_value_that_a_conversion_changes(
    values: torch.Tensor, dtype: torch.dtype, kept: int
) -> None:
    found = first_change(values, values.to(dtype))
    assert found == (None if kept == len(values) else kept)


def conversions(shape: tuple[int, ...] = (2,)) -> tuple[Block, Callable[[int, torch.Tensor], None]]:
    block = Block(Schema({PATH: Field(torch.Size(shape), torch.int64)}), (3,), T)
    made = Conversions(block)

    def write(t: int, value: torch.Tensor) -> None:
        block.rows(PATH)[t].copy_(made.fit(PATH, value, torch.Size((3, *shape)), torch.int64, t))

    block.check = made.check  # type: ignore[attr-defined]
    return block, write


def test_the_whole_block_is_checked_at_its_end_and_the_first_row_at_once() -> None:
    block, write = conversions()
    with pytest.raises(
        PolicyError, match=r"'action' holds 0.5 for environment 1 at step 0 .*become 0.*argmax"
    ):
        write(0, torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.25, 0.0]]))
    block, write = conversions()
    output = torch.zeros(3, 2)
    for t in range(T):
        output[2, 1] = t / 2  # the same tensor each time
        write(t, output)
    with pytest.raises(PolicyError, match="holds 0.5 for environment 2 at step 1 of the batch"):
        block.check()  # type: ignore[attr-defined]


def test_each_dtype_is_checked_separately() -> None:
    block, write = conversions(())
    write(0, torch.ones(3))
    write(1, torch.ones(3, dtype=torch.bool))
    write(2, torch.ones(3, 1, dtype=torch.int64))  # no check is needed, because no value can change
    block.check()  # type: ignore[attr-defined]
    assert block.column(PATH)[:, :3].eq(1).all()
    write(3, torch.full((3,), 1.5))
    with pytest.raises(PolicyError, match="holds 1.5 for environment 0 at step 3"):
        block.check()  # type: ignore[attr-defined]


def categorical() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


def taken(make: Callable[[], Any], policy: Any, frames: int = 6) -> TensorDictBase:
    (batch,) = SyncDataCollector(make(), policy, frames_per_batch=frames, total_frames=frames)
    return batch


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (categorical, lambda observation: observation[..., :2].argmax(-1).float()),
        (categorical, lambda observation: observation[..., :2].argmax(-1, keepdim=True)),
        (categorical, lambda observation: 1),
        (categorical, lambda observation: np.float64(1)),
        (lambda: GymEnv("CartPole-v1"), lambda observation: torch.tensor([False, True])),
        (lambda: GymEnv("CartPole-v1"), lambda observation: torch.tensor([0.0, 1.0])),
        (pendulum, lambda observation: observation[..., 0]),
        (pendulum, lambda observation: observation[..., :1].double()),
        (pendulum, lambda td: td.set("action", td["observation"][..., 0].double())),
    ],
    ids=["float", "keepdim", "int", "numpy", "bool", "float-one-hot", "squeezed", "double", "tensordict"],
)
def test_converted_actions_are_collected(make: Callable[[], Any], policy: Any) -> None:
    batch, spec = taken(make, policy), make().full_action_spec["action"]
    assert batch["action"].dtype is spec.dtype and batch["action"].shape == (6, *spec.shape)
    assert spec.is_in(batch["action"][0])
    assert make().rollout(3, policy)["action"].dtype is spec.dtype


@pytest.mark.parametrize("around", [SerialEnv, ParallelEnv])
def test_converted_actions_of_batches_are_collected(around: Any) -> None:
    env = around(2, pendulum)
    batch = taken(lambda: env, lambda observation: observation[..., 0].double(), 8)
    assert batch["action"].shape == (2, 4, 1) and batch["action"].dtype is torch.float32
    assert torch.equal(batch["action"], batch["observation"][..., :1])


def test_a_rollout_with_gradients_converts_too() -> None:
    gain = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    env = CountingEnv(Script(ending="never"))
    rollout = env.rollout(3, lambda observation: (observation[..., :2] > 5).double() * gain)
    assert rollout["action"].dtype is torch.float32 and rollout["action"].requires_grad


def test_changed_value_discards_the_batch_and_the_next_one_continues() -> None:
    calls: list[int] = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tensor(0.5 if len(calls) == 4 else 1.0)

    collector = SyncDataCollector(categorical(), policy, frames_per_batch=5, total_frames=10)
    with pytest.raises(PolicyError, match="'action' holds 0.5 for environment 0 at step 2 of the batch"):
        collector.next()
    assert [batch.numel() for batch in collector] == [5, 5]
    assert collector.stats().reasons == {"policy": 5}


def test_invalid_conversion_is_reported_before_the_environments_error() -> None:
    calls: list[int] = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tensor(1.0 if len(calls) < 4 else float("nan"))

    collector = SyncDataCollector(categorical(), policy, frames_per_batch=5, total_frames=10)
    with pytest.raises(
        PolicyError, match=r"environment 0 \(GymEnv\).*'action' holds nan.*at step 2"
    ) as caught:
        collector.next()
    assert not isinstance(caught.value, EnvironmentFailure)
    assert collector.stats().reasons == {"environment": 2}


def test_scores_are_refused_before_the_step() -> None:
    collector = SyncDataCollector(GymEnv("CartPole-v1"), torch.nn.Linear(4, 2), frames_per_batch=5)
    with pytest.raises(PolicyError, match="argmax .*categorical_action_encoding=True"):
        collector.next()
    assert collector.stats().stepped == 0


def test_random_policy_of_another_spec_is_refused() -> None:
    with pytest.raises(PolicyError, match="'action' expected shape"):
        taken(categorical, RandomPolicy(OneHot(2)))


class TestRowsWrittenByTheCore:
    """Policy outputs that aren't plain CPU memory are written correctly too."""

    FIELDS = {
        ("action",): Field(torch.Size((2,)), torch.float32),
        ("value",): Field(torch.Size(()), torch.int64),
    }

    def written(self, action: torch.Tensor, value: Any = 7) -> torch.Tensor:
        """Return the actions of a block after `action` was written into its second row."""
        block = Block(Schema(self.FIELDS), (), 3)
        for path in self.FIELDS:
            block.column(path).zero_()
        values = {("action",): action, ("value",): torch.as_tensor(value)}
        RowWriter(block, self.FIELDS, (("action",),)).write(1, values)
        assert block.column(("value",)).tolist() == [0, 7, 0]
        return block.column(("action",))

    @pytest.mark.parametrize(
        "action",
        [
            torch.tensor([1.0, -2.0]),
            torch.tensor([1.0, -2.0], requires_grad=True),
            torch.nn.Parameter(torch.tensor([1.0, -2.0])),
            torch.tensor([1.0, 0.0, -2.0])[::2],
            torch._neg_view(torch.tensor([-1.0, 2.0])),
            torch.tensor([1.0, -2.0], dtype=torch.float64),
            torch.tensor([[1.0], [-2.0]])[:, 0],
        ],
        ids=["plain", "graph", "parameter", "strided", "negated", "double", "view"],
    )
    def test_unusual_tensors_are_written(self, action: torch.Tensor) -> None:
        assert torch.equal(self.written(action), torch.tensor([[0, 0], [1, -2], [0, 0]]).float())

    def test_unfitting_outputs_are_refused(self) -> None:
        with pytest.raises(PolicyError, match="'action' expected shape"):
            self.written(torch.zeros(3))
        with pytest.raises(PolicyError, match="'value' expected shape"):
            self.written(torch.zeros(2), [7, 7])


class Wrapping:
    """Returns 1 twice, then a value that overflows int8, and fails after `fails_at` rows."""

    def __init__(self, fails_at: int, error: BaseException | None) -> None:
        self.rows, self._fails_at, self._error = 0, fails_at, error

    def __call__(self, row: TensorDictBase) -> TensorDictBase:
        self.rows += 1
        if self.rows > self._fails_at:
            if self._error is not None:
                raise self._error
            return row.set("action", torch.zeros(7))  # of another shape
        return row.set("action", torch.full((1,), 1 if self.rows < 3 else 160))


class Int8Env(CountingEnv):
    def __init__(self) -> None:
        super().__init__(Script(lengths=(100,)))
        self.action_spec = Unbounded((1,), dtype=torch.int8)


@pytest.mark.parametrize("error", [None, ValueError("on purpose")])
def test_a_converted_action_is_reported_where_the_policy_fails_before_the_end(error: Any) -> None:
    for run in (
        lambda policy: Int8Env().rollout(9, policy),
        lambda policy: SyncDataCollector(
            Int8Env(), policy, frames_per_batch=9, total_frames=9, trust_policy=True
        ).next(),
    ):
        with pytest.raises(
            PolicyError, match="holds 160 .* at step [12] of the batch, .* become -96"
        ) as found:
            run(Wrapping(5, error))
        context = found.value.__context__
        assert context is error if error is not None else "expected shape" in str(context)


def test_interrupt_in_a_policy_is_not_a_policy_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        Int8Env().rollout(9, Wrapping(5, KeyboardInterrupt()))


@pytest.mark.parametrize(
    ("came", "dtype", "shape", "declared", "words"),
    [
        ((), torch.int64, (2,), torch.int64, "categorical_action_encoding=True.*one_hot"),
        ((3, 1), torch.int64, (3, 2), torch.int64, "categorical_action_encoding=True.*one_hot"),
        ((), torch.int64, (4,), torch.int64, "several environments, return an action for each$"),
        ((2,), torch.float32, (2,), torch.int64, "argmax.*categorical_action_encoding=True"),
        ((2,), torch.int64, (), torch.int64, "return its argmax"),
        ((), torch.float32, (2,), torch.float32, "^make the policy's output match the action spec$"),
    ],
)
def test_the_advice_names_the_encoding(came: Any, dtype: Any, shape: Any, declared: Any, words: str) -> None:
    assert re.search(words, advice(came, dtype, shape, declared))


def test_a_step_with_an_action_of_another_encoding_has_the_advice() -> None:
    env = GymEnv("CartPole-v1")
    for action in (torch.tensor(0), torch.randn(2)):
        with pytest.raises(PolicyError, match="categorical_action_encoding=True"):
            env.step(env.reset().set("action", action))
