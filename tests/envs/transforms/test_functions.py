"""`UnaryTransform` and `Hash` map entries by a function."""

from __future__ import annotations

import hashlib

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from gleanrl.data import NonTensor
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import Compose, Hash, TransformedEnv, UnaryTransform
from gleanrl.errors import MissingKeyError, UnsupportedError
from tests.envs.transforms.ways import SCRIPT
from tests.fakes_base import CountingEnv


@pytest.mark.parametrize("size", [(), (2,)], ids=str)
def test_entries_are_mapped_by_a_function(size):
    double = UnaryTransform(["observation"], ["sum"], fn=lambda x: x.sum(-1, keepdim=True).double())
    env = TransformedEnv(CountingEnv(SCRIPT, size), double)
    check_env_specs(env)
    assert (
        env.observation_spec["sum"].shape == (*size, 1) and env.observation_spec["sum"].dtype == torch.float64
    )
    data = env.rollout(5, break_when_any_done=False)
    assert torch.equal(data["next", "sum"], data["next", "observation"].sum(-1, keepdim=True).double())


def test_inv_fn_maps_inputs():
    shift = UnaryTransform(["a"], ["a"], ["a"], ["a"], fn=lambda x: x + 1, inv_fn=lambda x: x - 1)
    data = TensorDict({"a": torch.zeros(2)}, [2])
    assert shift(data.clone())["a"].tolist() == [1.0, 1.0] and shift.inv(data)["a"].tolist() == [-1.0, -1.0]
    both = UnaryTransform(["a"], ["a"], ["a"], ["a"], fn=lambda x: x + 1)
    assert both.inv(data)["a"].tolist() == [1.0, 1.0]


def test_function_may_return_non_tensors():
    text = UnaryTransform(["observation"], ["text"], fn=lambda x: str(int(x[2])))
    env = TransformedEnv(CountingEnv(SCRIPT), Compose(text, Hash(["text"], ["hash"])))
    assert isinstance(env.observation_spec["text"], NonTensor) and env.observation_spec["hash"].shape == (32,)
    data = env.rollout(3)
    words = list(data.get("text").tolist())
    assert words == [str(int(step)) for step in data["observation"][:, 2]]
    assert data["hash"].tolist() == [list(hashlib.sha256(word.encode()).digest()) for word in words]


def test_hash_uses_its_seed_and_repertoire():
    known = {}
    transform = Hash(["a"], ["h"], seed=3, repertoire=known)
    made = transform(TensorDict({"a": "hello"}))["h"]
    assert made.tolist() == list(hashlib.sha256(b"3hello").digest()) and list(known.values()) == ["hello"]
    assert transform.get_input_from_hash(made) == "hello"
    assert transform.get_input_from_hash(torch.zeros(32)) is None
    back = Hash(["a"], ["h"], ["a"], ["h"], repertoire=known).inv(TensorDict({"h": made}))
    assert back["a"] == "hello"
    with pytest.raises(UnsupportedError, match="repertoire"):
        Hash(["a"], ["h"]).get_input_from_hash(made)
    big = torch.arange(3000.0)
    other = big.clone()
    other[1500] = 0
    assert not torch.equal(Hash.reproducible_hash(big), Hash.reproducible_hash(other))
    own = Hash(["a"], ["h"], hash_fn=lambda value, seed: torch.tensor([len(value) + seed]), seed=5)
    assert own(TensorDict({"a": "abc"}))["h"].tolist() == [8]


def test_hash_of_a_batch_of_strings_has_one_row_for_each():
    hashed = Hash(in_keys=["text"], out_keys=["hash"])
    texts = NonTensorStack(*(NonTensorData(text) for text in ("a", "b", "a")))
    out = hashed(TensorDict(text=texts, batch_size=[3]))["hash"]
    assert out.shape == (3, 32) and torch.equal(out[0], out[2]) and not torch.equal(out[0], out[1])
    assert torch.equal(out[1], Hash.reproducible_hash("b"))
    same = hashed(TensorDict(text=NonTensorData("a", batch_size=[2, 2]), batch_size=[2, 2]))["hash"]
    assert torch.equal(same, Hash.reproducible_hash("a").expand(2, 2, 32))


def test_hash_with_inverse_keys_restores_the_input():
    hashed = Hash(["text"], ["hash"], ["text"], ["hash"])
    made = hashed(TensorDict(text="some"))["hash"]
    assert hashed.inv(TensorDict(hash=made))["text"] == "some"


def test_repertoire_keeps_the_value_although_the_entry_changes_later():
    hashed = Hash(["x"], ["hash"], ["x"], ["hash"])
    data = TensorDict(x=torch.arange(3.0))
    made = hashed(data)["hash"]
    data["x"].zero_()
    assert hashed.inv(TensorDict(hash=made))["x"].tolist() == [0.0, 1.0, 2.0]


def test_hashes_of_a_batch_are_looked_up_one_by_one():
    hashed = Hash(["text"], ["hash"], ["text"], ["hash"])
    made = hashed(TensorDict(text=NonTensorStack("a", "b", "a"), batch_size=[3]))["hash"]
    assert hashed.inv(TensorDict(hash=made, batch_size=[3]))["text"] == ["a", "b", "a"]
    rows = Hash(["x"], ["hash"], ["x"], ["hash"])
    made = torch.stack([rows(TensorDict(x=torch.full((2,), float(i))))["hash"] for i in range(3)])
    assert rows.inv(TensorDict(hash=made, batch_size=[3]))["x"].tolist() == [
        [0.0, 0.0],
        [1.0, 1.0],
        [2.0, 2.0],
    ]


@pytest.mark.parametrize("shape", [(32,), (3, 32)])
def test_unknown_hash_is_refused_instead_of_becoming_none(shape):
    hashed = Hash(["text"], ["hash"], ["text"], ["hash"])
    hashed(TensorDict(text="some"))
    with pytest.raises(MissingKeyError, match="repertoire"):
        hashed.inv(TensorDict(hash=torch.zeros(shape, dtype=torch.uint8), batch_size=shape[:-1]))
