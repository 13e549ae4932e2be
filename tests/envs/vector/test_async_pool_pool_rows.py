"""The environment of a row can be given in several ways; `test_async_pool_pool` tests them on pools."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Composite, Unbounded
from gleanrl.envs.vector.async_pool import INDEX, RowIndex, index_entry, is_number, with_index
from gleanrl.envs.vector.factories import EnvMetaData
from gleanrl.errors import InvalidArgumentError, MissingKeyError, SchemaError
from tests.envs.vector.makers import counting, oracle


def test_rows_of_batched_environments_are_found_by_index():
    index = RowIndex(torch.Size([3, 2]))
    rows = TensorDict({"x": torch.arange(4).reshape(2, 2)}, [2, 2])
    rows[INDEX] = torch.stack([index_entry(env, [2]) for env in (2, 0)])
    found = index.rows("call", rows, None)
    assert {env: row["x"].tolist() for env, row in found.items()} == {2: [0, 1], 0: [2, 3]}
    assert index.rows("call", rows[1], None).keys() == {0} and index.is_one(rows[1])
    assert index.rows("call", None, 1) == {1: None} and index.envs("call", None, None) == [0, 1, 2]
    with pytest.raises(SchemaError, match="call: expected rows of batch size"):
        index.rows("call", rows.exclude(INDEX)[:, :1], [0, 1])
    with pytest.raises(MissingKeyError, match=r"call: 'env_index' is missing.* got batch size \(2, 2\)"):
        index.rows("call", rows.exclude(INDEX), None)


def test_is_number_accepts_scalars_only():
    assert is_number(0) and is_number(torch.tensor(1)) and not is_number([0]) and not is_number(None)
    assert not is_number(torch.tensor([1]))


def test_the_index_is_a_state():
    for env in (oracle(), counting()):
        declared = with_index(EnvMetaData.of(env))
        assert declared.specs["state"][INDEX].shape == env.batch_size
        assert INDEX not in env.full_state_spec.keys()
    taken = oracle()
    taken.observation_spec = Composite({INDEX: Unbounded(shape=(1,))})
    with pytest.raises(InvalidArgumentError, match="which the pool adds"):
        with_index(EnvMetaData.of(taken))
