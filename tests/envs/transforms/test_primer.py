from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import Compose, StepCounter, TensorDictPrimer, TransformedEnv
from gleanrl.errors import InvalidArgumentError, PolicyError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single


@pytest.mark.parametrize("env", [single, batched])
def test_entries_are_there_from_the_reset_on(env):
    def chain():
        return [TensorDictPrimer({"h": Unbounded((4,))}, default_value=2.0), StepCounter()]

    batch = joined(collect_both_ways(env, chain))
    assert batch["h"].shape == (*batch.shape, 4)
    assert bool((batch["h"] == 2).all())
    assert bool((batch["next", "h"] == 2).all())
    check_env_specs(TransformedEnv(env(), Compose(*chain())))


def test_what_a_policy_writes_it_finds_again():
    def count(h, observation):
        return observation[..., :2].clamp(-1, 1), h + 1

    policy = TensorDictModule(count, in_keys=["h", "observation"], out_keys=["action", ("next", "h")])
    env = TransformedEnv(single(), TensorDictPrimer(h=Unbounded((1,))))
    root = env.reset()
    for step in range(3):
        assert float(root["h"]) == step
        stepped = env.step(policy(root))
        root = stepped["next"].exclude("reward")


@pytest.mark.parametrize("env", [single, batched])
def test_a_recurrent_policy_in_a_collector(env):
    def recur(h, observation):
        return observation[..., :2].clamp(-1, 1), h + 1

    def policy():
        return TensorDictModule(recur, in_keys=["h", "observation"], out_keys=["action", ("next", "h")])

    def chain():
        return [TensorDictPrimer(h=Unbounded((1,))), StepCounter()]

    for given in (policy(), lambda td: policy()(td)):
        batch = joined(collect_both_ways(env, chain, policy=given))
        assert torch.equal(batch["h"], batch["step_count"].float())
        assert torch.equal(batch["next", "h"], batch["next", "step_count"].float())
    collector = SyncDataCollector(
        TransformedEnv(env(), Compose(*chain())),
        policy(),
        frames_per_batch=6,
        total_frames=-1,
        init_random_frames=6,
    )
    assert not bool(collector.next()["next", "h"].any())
    collector.next()


def test_other_entries_below_next_are_not_a_policys_to_write():
    policy = TensorDictModule(
        lambda x: (x[..., :2] * 0, x), ["observation"], ["action", ("next", "observation")]
    )
    env = TransformedEnv(single(), TensorDictPrimer(h=Unbounded((1,))))
    with pytest.raises(PolicyError, match="next"):
        SyncDataCollector(env, policy, frames_per_batch=6, total_frames=-1)
    with pytest.raises(PolicyError, match="next"):
        SyncDataCollector(env, lambda td: env.rand_step(td), frames_per_batch=6, total_frames=-1)


def test_random_values_and_values_by_key():
    env = TransformedEnv(batched(), TensorDictPrimer(Composite(z=Bounded(2.0, 3.0, (2,))), random=True))
    z = env.reset()["z"]
    assert z.shape == (3, 2)
    assert bool(((z >= 2) & (z <= 3)).all())
    assert len(z.unique()) > 1
    primer = TensorDictPrimer(
        a=Unbounded((1,)), n=Categorical(5, shape=()), default_value={"a": 1.5, "n": lambda: 3}
    )
    root = TransformedEnv(batched(), primer).reset()
    assert root["a"].flatten().tolist() == [1.5] * 3
    assert root["n"].tolist() == [3] * 3


def test_a_partial_reset_renews_its_rows_only():
    env = TransformedEnv(batched(), TensorDictPrimer(h=Unbounded((1,)), default_value=1.0))
    root = env.reset()
    root["h"] = torch.tensor([[5.0], [6.0], [7.0]])
    fresh = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
    assert fresh["h"].flatten().tolist() == [5.0, 1.0, 7.0]


def test_in_a_buffer_missing_entries_are_added():
    primer = TensorDictPrimer(h=Unbounded((2,)), default_value=1.0)
    out = primer(TensorDict({"a": torch.zeros(3)}, [3]))
    assert out["h"].shape == (3, 2)
    kept = primer(TensorDict({"h": torch.zeros(3, 2)}, [3]))
    assert not bool(kept["h"].any())


def test_mistakes_are_named():
    with pytest.raises(InvalidArgumentError, match="not both"):
        TensorDictPrimer(h=Unbounded((1,)), random=True, default_value=1.0)
    with pytest.raises(InvalidArgumentError, match="already"):
        TransformedEnv(single(), TensorDictPrimer(observation=Unbounded((1,)))).reset()
    with pytest.raises(InvalidArgumentError, match="expand_specs"):
        TransformedEnv(batched(), TensorDictPrimer(h=Unbounded((1,)), expand_specs=False)).reset()
    with pytest.raises(InvalidArgumentError, match="nothing for 'h'"):
        TransformedEnv(single(), TensorDictPrimer(h=Unbounded((1,)), default_value={"g": 1.0})).reset()
