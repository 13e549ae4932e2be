"""The batch interface of a pool; `test_async_pool_pool` tests it on both backends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from gleanrl.envs import AsyncEnvPool
from gleanrl.errors import InvalidArgumentError, MissingKeyError
from tests.envs.vector.makers import counting, oracle
from tests.fakes_base import CountingEnv


def test_random_actions_can_be_drawn_for_some_rows():
    with AsyncEnvPool([counting] * 3) as pool:
        roots = pool.reset()
        assert pool.rand_action(roots)["action"].shape == (3, 2, 2)
        assert pool.rand_action(roots[:2])["action"].shape == (2, 2, 2)
        assert pool.rand_action(roots[1])["action"].shape == (2, 2)
        assert pool.rand_action()["action"].shape == (3, 2, 2)
        with pytest.raises(MissingKeyError, match="rand_action: 'env_index' is missing"):
            pool.rand_action(TensorDict({}, [2, 2]))


class Numbered(CountingEnv):
    """Its random actions are its number."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def rand_action(self, tensordict=None):
        return tensordict.set("action", torch.full((*self.batch_size, 2), float(self.number)))


def test_own_random_actions_go_to_the_rows_of_their_environments():
    with AsyncEnvPool([partial(Numbered, number) for number in range(3)]) as pool:
        pool.async_reset_send()
        roots = pool.async_reset_recv(env_index=[2, 0])
        assert pool.rand_action(roots)["action"][:, 0].tolist() == [2, 0]


def test_env_index_survives_resets_and_steps():
    with AsyncEnvPool([oracle] * 2) as pool:
        stepped, root = pool.step_and_maybe_reset(pool.rand_action(pool.reset()))
        for batch in (stepped, root, pool.step_mdp(stepped), pool.fake_tensordict()):
            assert batch.get("env_index").batch_size == (2,)
        assert (
            "env_index" in pool.full_state_spec.keys()
            and "env_index" not in pool.full_observation_spec.keys()
        )
        root["_reset"] = torch.tensor([[True], [False]])
        assert list(pool.reset(root)["env_index"]) == [0, 1]


def test_unknown_stack_mode_is_refused():
    with pytest.raises(InvalidArgumentError, match="stack: expected one of"):
        AsyncEnvPool(oracle, stack="high")
