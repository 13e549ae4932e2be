"""TorchRL transforms work outside environments. `tests/foreign/test_torchrl_transforms.py` tests them within."""

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs.transforms.torchrl import ForeignTransform


class Doubles(torch.nn.Module):
    """Implements all that a buffer requires of another library's transform."""

    scale, closed, tolerant = 2, 0, False

    def reset_parent(self):
        pass

    def forward(self, tensordict):
        return tensordict.set("a", tensordict["a"] * self.scale)

    def inv(self, tensordict):
        return tensordict.clone(False).set("a", tensordict["a"] + 1)

    def close(self):
        self.closed += 1

    def clone(self):
        return Doubles()

    def set_missing_tolerance(self, mode):
        self.tolerant = mode


def test_foreign_transform_maps_on_write_and_on_read():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), transform=ForeignTransform(Doubles()), batch_size=3)
    buffer.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    assert buffer[:]["a"].tolist() == [2.0] * 3


def test_foreign_transform_exposes_attributes_of_the_original():
    transform = ForeignTransform(Doubles())
    assert transform.scale == 2 and transform.parent is None and transform.inverts()
    with pytest.raises(AttributeError, match="nothing"):
        transform.nothing  # noqa: B018
    transform.set_missing_tolerance(True)
    transform.close()
    assert transform.foreign.tolerant and transform.missing_tolerance and transform.foreign.closed == 1
    assert transform.clone().foreign is not transform.foreign
