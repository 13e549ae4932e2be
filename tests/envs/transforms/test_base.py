"""User transforms work with as few hooks as they need."""

from __future__ import annotations

import pytest
import torch
from gleanrl.envs.transforms.transforms import _apply_to_composite
from tensordict import TensorDict

from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.data import Bounded, Unbounded
from gleanrl.envs.transforms import (
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    ObservationNorm,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)
from gleanrl.envs.transforms.stepper import TransformedStepper
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.envs.transforms.ways import (
    ENVS,
    OnTensorDicts,
    batched,
    batches,
    collect_both_ways,
    joined,
    single,
    team,
)


class Sine(Transform):
    """Has one method for values and one for the spec, as in many tutorials."""

    def _apply_transform(self, obs):
        return obs.sin()

    @_apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return Bounded(-1, 1, observation_spec.shape, observation_spec.device, observation_spec.dtype)


class SineWithReset(Sine):
    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


class Parity(Transform):
    """Works on whole TensorDicts."""

    def _call(self, td):
        td["parity"] = td["observation"][..., 2:] % 2
        return td

    def _reset(self, td, td_reset):
        return self._call(td_reset)

    def transform_observation_spec(self, spec):
        spec["parity"] = Unbounded((*spec.shape, 1))
        return spec


class Bonus(Transform):
    """Changes the reward only, with a value of the root."""

    def _step(self, td, next_td):
        next_td["reward"] = next_td["reward"] + td["step_count"]
        return next_td


class Doubled(Transform):
    def _inv_apply_transform(self, action):
        return action * 2


@pytest.mark.parametrize("env", [single, batched])
@pytest.mark.parametrize("kind", [Sine, SineWithReset])
def test_apply_transform_maps_values_and_specs(env, kind):
    transformed = TransformedEnv(env(), kind(in_keys=["observation"], out_keys=["sine"]))
    fast = kind is Sine
    assert isinstance(transformed.make_stepper(), TransformedStepper if fast else TensorDictStepper)
    _, parts = batches(transformed)
    batch = joined(parts)
    assert torch.equal(batch["sine"], batch["observation"].sin())
    assert torch.equal(batch["next", "sine"], batch["next", "observation"].sin())


def test_rows_and_tensordicts_agree_on_a_users_map():
    collect_both_ways(batched, lambda: [Sine(in_keys=["observation"])])


def test_nested_keys_of_agents_are_mapped():
    key = ("agents", "observation")
    batch = joined(collect_both_ways(team, lambda: [Sine(in_keys=[key], out_keys=[("agents", "sine")])]))
    assert torch.equal(batch["next", "agents", "sine"], batch["next", "agents", "observation"].sin())


@pytest.mark.parametrize("env", [single, batched])
def test_call_receives_the_whole_tensordict(env):
    _, parts = batches(TransformedEnv(env(), Compose(StepCounter(), Parity(), RewardSum())))
    batch = joined(parts)
    assert torch.equal(batch["parity"], batch["observation"][..., 2:] % 2)
    assert torch.equal(batch["next", "parity"], batch["next", "observation"][..., 2:] % 2)
    assert torch.equal(batch["next", "episode_reward"], batch["episode_reward"] + batch["next", "reward"])


def test_step_may_read_the_root():
    _, plain = batches(TransformedEnv(single(), StepCounter()))
    _, bonus = batches(TransformedEnv(single(), Compose(StepCounter(), Bonus())))
    for a, b in zip(plain, bonus, strict=True):
        assert torch.equal(b["next", "reward"], a["next", "reward"] + a["step_count"])


def test_stepping_returns_the_overridden_hook():
    hook, takes_root = Bonus().stepping()
    assert hook.__name__ == "_step" and takes_root
    hook, takes_root = Sine(in_keys=["observation"]).stepping()
    assert hook.__name__ == "_call" and not takes_root


def test_inverse_maps_actions():
    env = single()
    batch = TransformedEnv(env, Doubled(in_keys_inv=["action"])).rollout(3)
    given = torch.stack([torch.from_numpy(action) for action in env.unwrapped.actions])
    assert torch.equal(given, batch["action"] * 2)


def test_missing_apply_transform_is_named():
    with pytest.raises(UnsupportedError, match="_apply_transform"):
        TransformedEnv(single(), Transform(in_keys=["observation"])).reset()


def test_undeclared_results_are_refused():
    class Undeclared(Transform):
        def _step(self, td, next_td):
            next_td["more"] = next_td["reward"]
            return next_td

    with pytest.raises(RuntimeError, match="more"):
        TransformedEnv(single(), Undeclared()).rollout(2)


def test_results_of_another_shape_are_refused():
    class Wide(Transform):
        def _apply_transform(self, value):
            return torch.cat([value, value], -1)

    with pytest.raises(RuntimeError, match="transform_observation_spec"):
        TransformedEnv(single(), Wide(in_keys=["observation"])).rollout(2)


def test_keys_must_pair_up():
    with pytest.raises(InvalidArgumentError, match="as many out_keys as in_keys"):
        Sine(in_keys=["a", "b"], out_keys=["c"]).pairs()


def test_a_string_or_a_tuple_is_one_key():
    assert Sine(in_keys="a").in_keys == ["a"]
    assert Sine(in_keys=("a", "b")).in_keys == [("a", "b")]
    assert Sine(in_keys=["a", ("b",)]).in_keys == ["a", "b"]


def test_forward_maps_nested_next_keys_literally():
    td = TensorDict({"a": torch.ones(2), "next": {"a": torch.ones(2)}}, [2])
    out = Sine(in_keys=[("next", "a")])(td)
    assert torch.equal(out["a"], torch.ones(2))
    assert torch.equal(out["next", "a"], torch.ones(2).sin())


@pytest.mark.parametrize("env", ENVS)
def test_an_empty_chain_changes_nothing(env):
    _, plain = batches(env())
    _, same = batches(TransformedEnv(env()))
    for a, b in zip(plain, same, strict=True):
        assert bool((a == b).all())


class TestOverridesOnRows:
    """Hooks that a subclass overrides are called on rows too, whatever its base class is."""

    def test_overridden_call_of_an_idle_transform_runs(self):
        class Louder(DTypeCastTransform):
            on_rows = True

            def _call(self, tensordict):
                if tensordict.get("reward", None) is not None:
                    tensordict.set("reward", tensordict.get("reward") * 2)
                return tensordict

            def written_keys(self):
                return ["reward"]

        def chain():
            return [Louder(torch.int8, torch.int16)]

        louder = joined(collect_both_ways(single, chain))
        plain = joined(collect_both_ways(single, lambda: [StepCounter()]))
        assert torch.equal(louder["next", "reward"], 2 * plain["next", "reward"])

    @pytest.mark.parametrize(
        ("kind", "arguments"),
        [(DTypeCastTransform, (torch.int8, torch.int16)), (ExcludeTransform, ("nothing",))],
    )
    def test_overridden_inv_call_runs_on_rows(self, kind, arguments):
        class Still(kind):
            on_rows = True

            def _inv_call(self, tensordict):
                return tensordict.set("action", torch.zeros_like(tensordict.get("action")))

        for chain in ([Still(*arguments)], [Still(*arguments), OnTensorDicts()]):
            env = TransformedEnv(single(), Compose(*chain))
            batches(env)
            assert all(not action.any() for action in env.base_env.unwrapped.actions)


def test_values_are_transformed_without_a_batch():
    norm = ObservationNorm(1.0, 2.0, in_keys=["x"], out_keys=["y"])
    assert norm(x=torch.ones(3)).tolist() == norm(torch.ones(3)).tolist() == [3.0] * 3
    one, two = ObservationNorm(1.0, 2.0, in_keys=["x", "y"])(torch.zeros(1), y=torch.ones(1))
    assert (one.item(), two.item()) == (1.0, 3.0)
    with pytest.raises(KeyError, match="'x'"):
        norm()


class ParityAtResets(Transform):
    """Works on whole TensorDicts, at resets too, and names no keys."""

    call_on_reset = True

    def _call(self, td):
        td["parity"] = td["observation"][..., 2:] % 2 + 1
        return td

    def transform_observation_spec(self, observation_spec):
        observation_spec["parity"] = Unbounded((*observation_spec.shape, 1))
        return observation_spec


@pytest.mark.parametrize("env", [single, batched])
def test_call_on_reset_needs_no_keys(env):
    made = TransformedEnv(env(), ParityAtResets())
    assert bool((made.reset()["parity"] == 1).all())
    batch = joined(batches(made, sizes=(7, 5))[1])
    assert torch.equal(batch["parity"], batch["observation"][..., 2:] % 2 + 1)
