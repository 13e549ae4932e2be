"""`FiniteTensorDictCheck` raises at NaN and infinity and names the key; `check_finite` checks tensors."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.envs import GymWrapper
from gleanrl.envs.transforms import FiniteTensorDictCheck, TransformedEnv
from gleanrl.envs.transforms.casting import check_finite
from tests.envs.transforms.ways import SCRIPT, batched, collect_both_ways
from tests.fakes import NonFiniteEnv


def test_finite_numbers_pass():
    collect_both_ways(batched, lambda: [FiniteTensorDictCheck()])


@pytest.mark.parametrize("where", ["observation", "reward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_numbers_raise_and_name_the_key(where, value):
    env = TransformedEnv(GymWrapper(NonFiniteEnv(3, value, where, script=SCRIPT)), FiniteTensorDictCheck())
    with pytest.raises(ValueError, match=where):
        env.rollout(10, break_when_any_done=False)


def test_non_finite_numbers_in_a_batch_raise():
    td = TensorDict({"a": torch.tensor([1.0, float("nan")]), "n": torch.ones(2, dtype=torch.int64)}, [2])
    with pytest.raises(ValueError, match="'a'"):
        FiniteTensorDictCheck()(td)


def test_check_finite_checks_tensors():
    check_finite(torch.ones(2))
    with pytest.raises(ValueError, match="infinity"):
        check_finite(torch.tensor([1.0, float("inf")]))
