"""`check_transform` accepts right transforms, and each rule detects a violation."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import Bounded, Unbounded
from gleanrl.envs.transforms import (
    ActionDiscretizer,
    CatFrames,
    CatTensors,
    Compose,
    DTypeCastTransform,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    UnsqueezeTransform,
    VecNorm,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError
from gleanrl.testing import check_transform
from gleanrl.testing.transform import IN_BUFFERS, IN_ENVIRONMENTS
from tests.testing.broken import SeedingWalk, Walk
from tests.testing.broken_transforms import BATCH, BROKEN, BROKEN_IN_BUFFERS, Age, Halving

O = ["observation"]  # noqa: E741
OURS = {
    "StepCounter": lambda: StepCounter(7),
    "InitTracker": InitTracker,
    "RewardSum": RewardSum,
    "TargetReturn": lambda: TargetReturn(3.0),
    "CatFrames": lambda: CatFrames(3, -1, in_keys=O),
    "TimeMaxPool": lambda: TimeMaxPool(O, T=2),
    "ObservationNorm": lambda: ObservationNorm(1.0, 2.0, O, standard_normal=True),
    "RewardScaling": lambda: RewardScaling(1.0, 2.0),
    "RewardClipping": lambda: RewardClipping(-1.0, 1.0),
    "RenameTransform": lambda: RenameTransform(O, ["o"], ["action"], ["a"]),
    "UnsqueezeTransform": lambda: UnsqueezeTransform(-1, in_keys=O),
    "DTypeCastTransform": lambda: DTypeCastTransform(torch.float32, torch.float64),
    "TensorDictPrimer": lambda: TensorDictPrimer({"h": Unbounded((2,))}),
    "ActionDiscretizer": lambda: ActionDiscretizer(4),
    "CatTensors": lambda: Compose(
        StepCounter(), DTypeCastTransform(torch.int64, torch.float32), CatTensors()
    ),
}


def test_every_rule_has_a_violation() -> None:
    names = {kind.__doc__ for kind in (*BROKEN, *BROKEN_IN_BUFFERS)}
    assert names >= {*IN_ENVIRONMENTS, *IN_BUFFERS}


def test_right_transform_passes() -> None:
    report = check_transform(Age, env=Walk)
    assert set(report.passed) >= {*IN_ENVIRONMENTS, "rollout", "other rows"}
    assert report.name == "Age"
    assert set(check_transform(Halving, batch=BATCH).passed) == set(IN_BUFFERS)
    assert "inverse" in check_transform(lambda: Age(), batch=BATCH, skip=["read"]).skipped


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_library_transforms_pass(name: str) -> None:
    report = check_transform(OURS[name], env=Walk, num_steps=40)
    assert set(report.passed) >= set(IN_ENVIRONMENTS)


def test_a_limit_that_ends_nothing_keeps_all_rules_but_that_of_flags() -> None:
    counter = check_transform(
        lambda: StepCounter(4, update_done=False), env=Walk, num_steps=40, skip=["flags"]
    )
    assert {"specs", "rollout", "state"} <= set(counter.passed)


@pytest.mark.slow
def test_learning_and_drawing_transforms_pass() -> None:
    report = check_transform(VecNorm, env=Walk, num_steps=40, skip=["other rows"])
    assert report.skipped["trajectories"] == "the transform learns"
    assert "state" in report.passed
    primer = check_transform(
        lambda: TensorDictPrimer({"h": Bounded(0.0, 1.0, (2,))}, random=True),
        env=Walk,
        num_steps=40,
        skip=["other rows"],
    )
    assert {"trajectories", "state", "determinism"} <= set(primer.passed)


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="give env, batch, or both"):
        check_transform(Age)
    with pytest.raises(InvalidArgumentError, match="expected names of"):
        check_transform(Age, env=Walk, skip=["nothing"])
    with pytest.raises(InvalidTypeError, match="make"):
        check_transform(lambda: 3, env=Walk)  # type: ignore[arg-type, return-value]


def test_torchs_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    check_transform(RewardSum, env=SeedingWalk)
    assert torch.equal(torch.get_rng_state(), state)
