"""Rollouts return data that can't be stacked densely."""

from __future__ import annotations

import pytest
import torch

from gleanrl.envs import SerialEnv
from gleanrl.envs.rollout import lazy_steps
from gleanrl.envs.transforms import StepCounter, TransformedEnv
from gleanrl.errors import UnsupportedError
from tests.envs.vector.makers import SCRIPT, oracle, with_goal


@pytest.fixture
def env():
    """Return two streams; the second one has another observation in addition."""
    made = SerialEnv(2, [oracle, with_goal], create_env_kwargs=[{"stream": 0}, {"stream": 1}])
    yield made
    made.close()


def test_unstacked_rows_equal_the_environments_steps(env):
    seen = []
    batch = lazy_steps(env, 9, None, env.reset(), lambda env, step: seen.append(step), False)
    assert batch.batch_size == (2, 9) and len(seen) == 9 and batch.names == [None, "time"]
    for stream in range(2):
        row = batch[stream]
        roots, nexts = row["observation"].long().tolist(), row["next", "observation"].long().tolist()
        for t, (root, after) in enumerate(zip(roots, nexts, strict=True)):
            assert after == [stream, root[1], root[2] + 1]
            ended = any(SCRIPT.flags(stream, root[1], root[2] + 1))
            assert bool(row["next", "done"][t]) == ended
            if t + 1 < 9:
                assert roots[t + 1] == ([stream, root[1] + 1, 0] if ended else after)
        assert ("goal" in row.keys()) == (stream == 1)


def test_a_policy_gets_lazy_stacks(env):
    def policy(tensordict):
        return tensordict.set("action", torch.full((2, 2), 0.5))

    batch = env.rollout(3, policy, break_when_any_done=False)
    assert batch["action"].unique().tolist() == [0.5]
    env.rollout(2, auto_reset=False, tensordict=env.reset())


def test_rollout_stops_at_any_flag():
    limited = SerialEnv(
        2,
        [
            lambda: TransformedEnv(with_goal(), StepCounter(4, update_done=False)),
            lambda: TransformedEnv(oracle(), StepCounter(1, update_done=False)),
        ],
    )
    assert lazy_steps(limited, 3, None, limited.reset()).shape == (2, 1)
    limited.close()


def test_options_that_need_dense_data_are_refused(env):
    with pytest.raises(UnsupportedError, match="break_when_all_done"):
        env.rollout(3, break_when_all_done=True)
    with pytest.raises(UnsupportedError, match="set_truncated"):
        env.rollout(3, set_truncated=True)
