from __future__ import annotations

import torch

from gleanrl.data import Bounded, Composite
from gleanrl.envs.transforms.mapping import EntryTransform


class Doubled(EntryTransform):
    maps_inputs = True

    def _apply_transform(self, value):
        return value * 2


class OutwardsOnly(Doubled):
    maps_inputs = False


def test_specs_are_mapped_wherever_the_keys_are_declared():
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
