"""TorchRL's LSTM and GRU modules keep their state without a primer; a reset sets it to zero (`make test-foreign`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

torchrl = pytest.importorskip("torchrl")

from tensordict.nn import TensorDictModule, TensorDictSequential  # noqa: E402
from torchrl import modules  # noqa: E402

from gleanrl.collectors import SyncDataCollector  # noqa: E402
from gleanrl.envs import (  # noqa: E402
    Compose,
    GymEnv,
    InitTracker,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
)
from gleanrl.errors import PolicyError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def policy(cls):
    recurrent = cls(input_size=4, hidden_size=5, in_key="observation", out_key="embedding")
    head = TensorDictModule(
        lambda x: nn.functional.linear(x, torch.ones(2, 5)).argmax(-1), ["embedding"], ["action"]
    )
    return TensorDictSequential(recurrent, head), [key[1] for key in recurrent.out_keys[1:]]


@pytest.mark.parametrize("cls", [modules.LSTMModule, modules.GRUModule])
@pytest.mark.parametrize(
    "make",
    [cartpole, lambda: SerialEnv(2, cartpole), lambda: ParallelEnv(2, cartpole)],
    ids=["one", "serial", "parallel"],
)
def test_the_state_is_kept_and_starts_at_zero(make, cls):
    actor, keys = policy(cls)
    env = TransformedEnv(make(), InitTracker())
    first, second = SyncDataCollector(env, actor, frames_per_batch=80, total_frames=160)
    batch = torch.cat([first, second], -1)
    ended, began = batch["next", "done"][..., :-1, 0], batch["is_init"][..., 0]
    assert ended.any() and began.any()
    for key in keys:
        state, after = batch[key], batch["next", key]
        assert not state[began].any() and state[~began].any() and after.any()
        assert torch.equal(state[..., 1:, :, :][~ended], after[..., :-1, :, :][~ended])


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_members_may_use_the_primers_of_a_module(kind):
    recurrent = modules.LSTMModule(input_size=4, hidden_size=5, in_key="observation", out_key="embedding")
    head = TensorDictModule(lambda x: (x.sum(-1) > 0).long(), ["embedding"], ["action"])
    primer = recurrent.make_tensordict_primer()
    env = kind(2, lambda: TransformedEnv(cartpole(), Compose(InitTracker(), primer.clone())))
    actor = TensorDictSequential(recurrent, head)
    batch = SyncDataCollector(env, actor, frames_per_batch=80, total_frames=80).next()
    began = batch["is_init"][:, 1:, 0]
    assert batch["next", "done"].any()
    for key in ("recurrent_state_h", "recurrent_state_c"):
        state, before = batch[key][:, 1:], batch["next", key][:, :-1]
        assert not state[began].any() and state[~began].any()
        assert torch.equal(state[~began], before[~began])


def test_missing_init_tracker_is_named():
    actor, _ = policy(modules.LSTMModule)
    with pytest.raises(PolicyError, match=r"recurrent_state_h.*is_init.*InitTracker\(\)"):
        SyncDataCollector(cartpole(), actor, frames_per_batch=4)
