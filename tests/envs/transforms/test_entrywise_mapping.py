"""Entrywise transforms map the specs of their keys, and actions in the inverse direction."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import EnvBase, SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    ObservationNorm,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
)
from gleanrl.envs.transforms.entrywise import EntryTransform
from gleanrl.envs.transforms.spec_tools import apply_to_composite_inv


class Doubled(EntryTransform):
    maps_inputs = True

    def _apply_transform(self, value):
        return value * 2


class OutwardsOnly(Doubled):
    maps_inputs = False


def test_specs_of_every_role_are_mapped():
    transform = Doubled(in_keys=["a"], in_keys_inv=["b"])
    for role in ("observation", "reward", "action", "state"):
        assert getattr(transform, f"transform_{role}_spec")(Bounded(-1.0, 1.0, (2,))).high.tolist() == [
            2.0,
            2.0,
        ]
    assert OutwardsOnly(in_keys_inv=["b"]).transform_action_spec(Bounded(-1.0, 1.0, ())).high.item() == 1
    for method in ("observation", "reward"):
        spec = getattr(transform, f"transform_{method}_spec")(Composite(a=Bounded(-1.0, 1.0, (2,))))
        assert spec["a"].high.tolist() == [2.0, 2.0]
    for method in ("action", "state"):
        spec = Composite(b=Bounded(-1.0, 1.0, (2,)))
        name = f"transform_{method}_spec"
        assert getattr(transform, name)(spec)["b"].high.tolist() == [2.0, 2.0]
        assert getattr(OutwardsOnly(in_keys_inv=["b"]), name)(spec) is spec
    assert "b" not in transform.transform_observation_spec(Composite(a=Bounded(0.0, 1.0, ()))).keys()
    assert transform.on_rows and torch.equal(transform._apply_transform(torch.ones(1)), torch.full((1,), 2.0))


class Halved(Transform):
    """A user's transform without declarations."""

    def _inv_apply_transform(self, value):
        return value / 2


class HalvedByHand(Transform):
    """A user's transform that maps the specs itself."""

    def _inv_apply_transform(self, value):
        return value / 2

    @apply_to_composite_inv
    def transform_input_spec(self, input_spec):
        return input_spec


class Heard(EnvBase):
    """Takes one float64 action, and shows it."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(heard=Unbounded((1,), dtype=torch.float64))
        self.action_spec = Bounded(-2, 2, (1,), dtype=torch.float64)

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict(heard=torch.zeros(1, dtype=torch.float64))

    def _step(self, tensordict):
        action = tensordict["action"]
        assert action.shape == (1,) and action.dtype is torch.float64
        return TensorDict(heard=action.clone(), reward=torch.zeros(1))

    def _set_seed(self, seed):
        pass


KEYS = {"in_keys_inv": ["action"], "out_keys_inv": ["wish"]}
RENAMING = {
    "float": (lambda: DoubleToFloat(**KEYS), torch.ones(1), 1.0),
    "cast": (lambda: DTypeCastTransform(torch.float64, torch.float32, **KEYS), torch.ones(1), 1.0),
    "unsqueeze": (lambda: UnsqueezeTransform(-1, **KEYS), torch.ones(1, 1).double(), 1.0),
    "clip": (lambda: ClipTransform(low=-0.5, high=0.5, **KEYS), torch.ones(1).double(), 0.5),
    "norm": (lambda: ObservationNorm(0.0, 2.0, in_keys=[], **KEYS), torch.ones(1).double(), 0.5),
    "user": (lambda: Halved(**KEYS), torch.ones(1).double(), 0.5),
    "user with specs": (lambda: HalvedByHand(**KEYS), torch.ones(1).double(), 0.5),
    "two": (
        lambda: Compose(
            DoubleToFloat(in_keys_inv=["action"], out_keys_inv=["between"]),
            UnsqueezeTransform(-1, in_keys_inv=["between"], out_keys_inv=["wish"]),
        ),
        torch.ones(1, 1),
        1.0,
    ),
}


@pytest.mark.parametrize("around", ["one", "inside", "outside"])
@pytest.mark.parametrize(("transform", "wish", "heard"), RENAMING.values(), ids=RENAMING)
def test_users_write_the_renamed_action(transform, wish, heard, around):
    if around == "outside":
        env = TransformedEnv(SerialEnv(2, Heard), transform())
    else:
        env = TransformedEnv(Heard(), transform())
        env = SerialEnv(2, lambda: TransformedEnv(Heard(), transform())) if around == "inside" else env
    assert env.action_keys == ["wish"]

    def policy(tensordict):
        return tensordict.set("wish", wish.expand(*tensordict.batch_size, *wish.shape))

    check_env_specs(env)
    rolled = env.rollout(3, policy)
    stepped = env.step(policy(env.reset()))
    (collected,) = SyncDataCollector(env, policy, frames_per_batch=6, total_frames=6)
    for batch in (rolled, stepped, collected):
        assert batch["next", "heard"].unique().tolist() == [heard]
