"""A transformed environment steps into rows where its transforms allow it, and on the CPU where all parts do."""

from __future__ import annotations

from typing import Any

import pytest

from gleanrl.envs.transforms import (
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    ObservationNorm,
    RewardSum,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    UnaryTransform,
    VecNorm,
)
from gleanrl.envs.transforms.stepper import TransformedStepper
from gleanrl.envs.transforms.transformed_env import may_be_on_host, takes_rows
from tests.fakes_base import CountingEnv


class Mine(ObservationNorm):
    """A user's class, whose behaviour isn't known."""


def doubled() -> UnaryTransform:
    return UnaryTransform(["observation"], ["twice"], fn=lambda x: 2 * x)


def seen() -> Any:
    return Compose(lambda tensordict: tensordict)


@pytest.mark.parametrize(
    ("make", "rows", "anywhere"),
    [
        (Compose, True, True),
        (StepCounter, True, True),
        (lambda: Compose(RewardSum(), Compose(DoubleToFloat(), ObservationNorm(0.0, 1.0))), True, True),
        (lambda: Mine(0.0, 1.0), True, False),
        (lambda: Compose(StepCounter(), VecNorm(in_keys=["observation"])), True, False),
        (doubled, True, False),
        (seen, False, False),
        (lambda: DeviceCastTransform("cpu"), False, False),
    ],
)
def test_stepper_and_host_depend_on_the_transforms(make: Any, rows: bool, anywhere: bool) -> None:
    env = TransformedEnv(CountingEnv(), make())
    assert (takes_rows(env, None) == rows) and may_be_on_host(env.transform) == anywhere
    assert isinstance(env.make_stepper(), TransformedStepper) == rows
    assert (env.host_stepper() is not None) == (rows and anywhere)


def test_images_are_processed_where_they_are() -> None:
    assert not may_be_on_host(Compose(ToTensorImage(in_keys=["pixels"]), StepCounter()))


def test_inner_transform_on_tensordicts_prevents_rows() -> None:
    inner = TransformedEnv(CountingEnv(), seen())
    env = TransformedEnv(inner, StepCounter(), auto_unwrap=False)
    assert not takes_rows(env, inner.transform) and takes_rows(env, None)
    assert not isinstance(env.make_stepper(), TransformedStepper)


def test_a_method_that_was_replaced_keeps_to_the_device() -> None:
    norm = ObservationNorm(0.0, 1.0)
    assert may_be_on_host(norm)
    norm._apply_transform = lambda value: value + 1
    assert not may_be_on_host(norm)
