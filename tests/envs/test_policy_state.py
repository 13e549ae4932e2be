"""Recurrent policies work without a primer: their state is kept, and is zero after a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Unbounded
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from gleanrl.envs.policy_state import with_policy_state
from gleanrl.envs.transforms import StepCounter, TensorDictPrimer
from gleanrl.errors import PolicyError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 5))


class Recurrent(TensorDictModuleBase):
    """Counts the steps since the last reset in its state. A missing state counts as zero."""

    in_keys = ["observation", "h", ("core", "c")]
    out_keys = ["emb", ("next", "h"), ("next", "core", "c")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        size = tensordict.batch_size
        h = tensordict.get("h", torch.zeros(*size, 1))
        c = tensordict.get(("core", "c"), torch.zeros(*size, 2, 2, dtype=torch.int64))
        tensordict.update({"emb": h * 1, ("next", "h"): h + 1})
        out: TensorDictBase = tensordict.set(("next", "core", "c"), c - 1)
        return out


def policy(size: int = 2) -> TensorDictSequential:
    return TensorDictSequential(
        Recurrent(), TensorDictModule(lambda emb: emb.expand(*emb.shape[:-1], size) * 0, ["emb"], ["action"])
    )


def check(batch: TensorDictBase) -> None:
    """Check that the state is the number of steps since the reset in the root, and one more in next."""
    count = torch.zeros(batch.batch_size[:-1])
    for t in range(batch.shape[-1]):
        row = batch[..., t]
        for h, c, more in (
            (row["h"], row["core", "c"], 0),
            (row["next", "h"], row["next", "core", "c"], 1),
        ):
            assert torch.equal(h[..., 0], count + more), t
            assert torch.equal(c[..., 0, 0], -(count + more).long()) and c.dtype is torch.int64
        assert torch.equal(row["emb"], row["h"])
        count = torch.where(row["next", "done"][..., 0], 0.0, count + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CountingEnv(SCRIPT),
        lambda: CountingEnv(SCRIPT, (3,)),
        lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
        lambda: SerialEnv(3, lambda: CountingEnv(SCRIPT)),
        lambda: ParallelEnv(2, lambda: CountingEnv(SCRIPT)),
        lambda: TransformedEnv(SerialEnv(2, lambda: CountingEnv(SCRIPT)), StepCounter(4)),
    ],
    ids=["one", "batch", "gym", "serial", "parallel", "transformed"],
)
def test_the_state_is_kept_and_starts_at_zero_after_a_reset(make: Any) -> None:
    env = make()
    shape = env.full_action_spec["action"].shape[len(env.batch_size) :]
    part = policy(2)
    if not shape:
        part.module[1].module = lambda emb: emb[..., 0].long() * 0
    frames = 24
    batches = list(SyncDataCollector(env, part, frames_per_batch=frames, total_frames=2 * frames))
    check(torch.cat(batches, -1))


def test_resets_and_random_frames() -> None:
    env = CountingEnv(Script(ending="never"), (2,))
    collector = SyncDataCollector(env, policy(), frames_per_batch=8, init_random_frames=8)
    first = collector.next()
    assert first is not None and not first["next", "h"].any()
    collector.reset([1])
    second = collector.next()
    assert second is not None and second["h"][..., 0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    collector.reset([1])
    third = collector.next()
    assert third is not None and third["h"][..., 0].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    collector.reset()
    fourth = collector.next()
    assert fourth is not None and fourth["h"][:, 0].eq(0).all()


def test_environments_with_all_inputs_are_not_wrapped() -> None:
    env, primed = (
        CountingEnv(SCRIPT),
        TransformedEnv(CountingEnv(SCRIPT), TensorDictPrimer(h=Unbounded((1,)))),
    )
    for given in (
        None,
        lambda td: td,
        torch.nn.Linear(3, 2),
        TensorDictModule(torch.nn.Linear(3, 2), ["a"], ["b"]),
    ):
        assert with_policy_state(env, given) is env
    assert with_policy_state(primed, TensorDictModule(lambda h: h, ["h"], [("next", "h")])) is primed
    stepping = TensorDictModule(lambda x: (x, x), ["observation"], [("next", "observation"), ("next", "h")])
    assert with_policy_state(env, stepping) is env
    with pytest.raises(PolicyError, match="contain 'next'"):
        SyncDataCollector(env, stepping, frames_per_batch=4)


def test_transforms_of_the_user_are_not_changed() -> None:
    counter = StepCounter()
    env = with_policy_state(TransformedEnv(CountingEnv(SCRIPT), counter), policy())
    assert env.base_env.transform is counter


def test_failure_to_infer_the_state_explains_the_cause() -> None:
    class Needing(Recurrent):
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return super().forward(tensordict.set("first", tensordict["is_init"]))

    needs = TensorDictSequential(Needing(), policy()[1])
    with pytest.raises(PolicyError, match=r"\('next', 'h'\).*is_init.*InitTracker.*TensorDictPrimer"):
        SyncDataCollector(CountingEnv(SCRIPT), needs, frames_per_batch=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CountingEnv(SCRIPT),
        lambda: CountingEnv(SCRIPT, (3,)),
        lambda: SerialEnv(3, lambda: CountingEnv(SCRIPT)),
        lambda: TransformedEnv(SerialEnv(2, lambda: CountingEnv(SCRIPT)), StepCounter(4)),
    ],
    ids=["one", "batch", "serial", "transformed"],
)
@pytest.mark.parametrize("grad", [False, True])
def test_rollout_keeps_the_state_as_collectors_do(make: Any, grad: bool) -> None:
    env, seen = make(), []
    with torch.set_grad_enabled(grad):
        batch = env.rollout(9, policy(), break_when_any_done=False, callback=lambda e, _: seen.append(e))
    check(batch)
    assert all(e is env for e in seen) and "h" not in env.reset().keys()


def test_rollout_from_a_given_root_starts_at_zero_or_at_the_state_there() -> None:
    env = CountingEnv(SCRIPT)
    batch = env.rollout(2, policy(), auto_reset=False, tensordict=env.reset())
    check(batch)
    root = env.reset().set("h", torch.full((1,), 5.0))
    batch = env.rollout(2, policy(), auto_reset=False, tensordict=root)
    assert batch["h"].flatten().tolist() == [5.0, 6.0]
