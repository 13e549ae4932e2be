"""`ObservationNorm` normalises by given or measured statistics, and its inverse restores values."""

from __future__ import annotations

import pytest
import torch

from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import Compose, ObservationNorm, TransformedEnv
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, UnsupportedError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single, team
from tests.fakes_base import TwoKeyEnv


@pytest.mark.parametrize("env", [single, batched])
@pytest.mark.parametrize("standard", [False, True])
def test_both_forms_of_normalization_equal_their_formulas(env, standard):
    loc, scale = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 8.0])

    def chain():
        return [ObservationNorm(loc, scale, standard_normal=standard, out_keys=["normal"])]

    batch = joined(collect_both_ways(env, chain))
    for part in (batch, batch["next"]):
        obs = part["observation"]
        want = (obs - loc) / scale if standard else loc + obs * scale
        assert torch.equal(part["normal"], want)


def test_default_keys_are_all_floating_observations():
    env = TransformedEnv(TwoKeyEnv(), ObservationNorm(0.0, 2.0))
    assert set(env.transform.in_keys) == {"place", "clock"}
    env = TransformedEnv(team(), ObservationNorm(0.0, 2.0))
    assert env.transform.in_keys == [("agents", "observation")]
    collect_both_ways(team, lambda: [ObservationNorm(0.0, 2.0)])


def test_the_inverse_undoes_it():
    env = single()
    norm = ObservationNorm(0.5, 2.0, in_keys=[], in_keys_inv=["action"])
    transformed = TransformedEnv(env, norm)
    spec = transformed.action_spec
    assert (float(spec.low.min()), float(spec.high.max())) == (-1.5, 2.5)
    batch = transformed.rollout(2)
    given = torch.stack([torch.from_numpy(action) for action in env.unwrapped.actions])
    assert torch.allclose(given, (batch["action"] - 0.5) / 2)
    check_env_specs(transformed)


@pytest.mark.parametrize("standard", [False, True])
def test_statistics_are_found_by_random_steps(standard):
    env = TransformedEnv(batched(), ObservationNorm(in_keys=["observation"], standard_normal=standard))
    with pytest.raises(MissingArgumentError, match="init_stats"):
        env.reset()
    env.transform.init_stats(100, reduce_dim=(0, 1), cat_dim=1)
    assert env.transform.loc.shape == (3,)
    steps = env.base_env.rollout(100, break_when_any_done=False)["observation"]
    out = env.transform._apply_transform(steps)
    assert abs(float(out[..., 2].mean())) < 0.2
    assert abs(float(out[..., 2].std()) - 1) < 0.2
    with pytest.raises(UnsupportedError, match="already"):
        env.transform.init_stats(100)


def test_statistics_are_measured_after_earlier_transforms():
    env = TransformedEnv(single(), Compose(ObservationNorm(100.0, 1.0, in_keys=["observation"])))
    env.append_transform(ObservationNorm(in_keys=["observation"], standard_normal=True))
    env.transform[1].init_stats(50)
    assert float(env.transform[1].loc[2]) > 99


def test_loc_and_scale_are_state():
    one = ObservationNorm(1.0, 2.0, in_keys=["a"])
    other = ObservationNorm(in_keys=["a"])
    other.load_state_dict(one.state_dict())
    assert other.initialized
    assert float(other.scale) == 2
    with torch.no_grad():
        one.scale.fill_(7.0)
    assert float(other.scale) == 2


def test_bad_numbers_are_refused():
    with pytest.raises(InvalidArgumentError, match="loc and scale"):
        ObservationNorm(loc=1.0)
    assert float(ObservationNorm(0.0, 0.0, in_keys=["a"], standard_normal=True, eps=0.5).scale) == 0.5
    with pytest.raises(InvalidArgumentError, match="num_iter"):
        env = TransformedEnv(single(), ObservationNorm(in_keys=["observation"]))
        env.transform.init_stats(1)
    with pytest.raises(UnsupportedError, match="TransformedEnv"):
        ObservationNorm(in_keys=["observation"]).init_stats(10)
