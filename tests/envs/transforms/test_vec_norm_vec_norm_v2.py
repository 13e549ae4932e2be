"""`VecNormV2` normalises each environment separately, with statistics in the transform or in the records."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from gleanrl.envs.transforms import Compose, StepCounter, TransformedEnv, VecNormV2
from gleanrl.errors import UnsupportedError
from gleanrl.testing import check_transform
from tests.envs.transforms.ways import batched, collect_both_ways, single

LOC, VAR, COUNT = "_vecnorm_loc", "_vecnorm_var", "_vecnorm_count"


def test_statistics_are_separate_by_environment():
    apart, together = (
        TransformedEnv(batched(), VecNormV2(["observation"], reduce_batch_dims=together, decay=1.0))
        for together in (False, True)
    )
    for env in (apart, together):
        env.rollout(6, break_when_any_done=False)
    assert apart.transform.loc["observation"].shape == (3, 3) and together.transform.loc[
        "observation"
    ].shape == (3,)
    assert apart.transform.loc["observation"][:, 0].tolist() == [0.0, 1.0, 2.0]  # the stream numbers


@pytest.mark.parametrize("env", [single, batched])
def test_rows_and_tensordicts_agree_with_stateful_statistics(env):
    collect_both_ways(env, lambda: [VecNormV2(["observation"], decay=0.9)])


@pytest.mark.parametrize("asked", [True, False])
def test_reset_member_continues_with_its_statistics(asked):
    norm = VecNormV2(["observation"], ["o"], decay=0.9)
    env = TransformedEnv(batched(), norm)
    root, seen = env.reset(), [[], [], []]

    def look(record, rows=(0, 1, 2)):
        for row in rows:
            seen[row].append(record["observation"][row])
            values = torch.stack(seen[row]).double()
            weights = 0.9 ** torch.arange(len(values) - 1, -1, -1).double()[:, None]
            loc = (weights * values).sum(0) / weights.sum()
            var = (weights * (values - loc) ** 2).sum(0) / weights.sum()
            wanted = (values[-1] - loc) / var.sqrt().clamp_min(norm.eps)
            assert torch.allclose(record["o"][row].double(), wanted, atol=1e-4)

    look(root)
    for t in range(8):
        stepped, after = env.step_and_maybe_reset(env.rand_action(root))
        look(stepped["next"])
        ended = stepped["next", "done"].flatten()
        look(after, ended.nonzero().flatten().tolist())
        if asked and t == 1:
            before = after.clone()
            after = env.reset(after.set("_reset", torch.tensor([[False], [True], [False]])))
            look(after, [1])
            assert torch.equal(after["o"][[0, 2]], before["o"][[0, 2]])
        root = after


def test_a_partial_reset_comes_first():
    env = TransformedEnv(batched(), VecNormV2(["observation"]))
    root = env.base_env.reset().set("_reset", torch.tensor([[False], [True], [False]]))
    env.reset(root)
    assert env.transform.loc["observation"][:, 0].tolist() == [0, 1, 0]
    assert env.transform.scale["observation"][[0, 2]].unique().tolist() == [1]


def test_copies_keep_separate_statistics():
    env = TransformedEnv(batched(), VecNormV2(["observation"]))
    env.rollout(6, break_when_any_done=False)
    loc = env.transform.loc["observation"]
    assert torch.equal(env.transform.frozen_copy().loc["observation"], loc)
    assert env.transform.share_statistics().shared and torch.equal(env.transform.loc["observation"], loc)
    other = TransformedEnv(batched(), VecNormV2(["observation"]))
    other.load_state_dict(env.state_dict())
    assert torch.equal(other.transform.loc["observation"], loc)


def in_records(**options):
    return VecNormV2(["observation", "reward"], ["o", "r"], stateful=False, **options)


@pytest.mark.parametrize("env", [single, batched])
def test_rows_and_tensordicts_agree_with_statistics_in_records(env):
    collect_both_ways(env, lambda: [in_records(decay=0.9)])


def test_stateless_vec_norm_passes_the_transform_suite():
    check_transform(lambda: VecNormV2(["observation"], stateful=False), env=single, num_steps=20)


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.9999])
def test_records_carry_the_statistics_of_their_episode(decay):
    env = TransformedEnv(batched(), Compose(StepCounter(4), in_records(decay=decay)))
    root, seen, rewards = env.reset(), [[], [], []], [[], [], []]
    for _ in range(10):
        for row in range(3):
            if not root["step_count"][row]:
                seen[row], rewards[row] = [root["observation"][row]], []
        stepped, after = env.step_and_maybe_reset(env.rand_action(root))
        out = stepped["next"]
        for row in range(3):
            seen[row].append(out["observation"][row])
            rewards[row].append(out["reward"][row])
            for key, scaled, values in (("observation", "o", seen[row]), ("reward", "r", rewards[row])):
                values = torch.stack(values).double()
                weights = decay ** torch.arange(len(values) - 1, -1, -1).double()[:, None]
                loc = (weights * values).sum(0) / weights.sum()
                var = (weights * (values - loc) ** 2).sum(0) / weights.sum()
                assert torch.allclose(out[LOC, key][row].double(), loc, atol=1e-5)
                assert torch.allclose(out[VAR, key][row].double(), var, atol=1e-5)
                assert (out[COUNT, key][row] == len(values)).all()
                wanted = (values[-1] - loc) / var.sqrt().clamp_min(1e-4)
                assert torch.allclose(out[scaled][row].double(), wanted, atol=1e-2)
        root = after
    assert out[COUNT, "observation"].dtype is torch.int64


def test_rollouts_normalise_by_episode():
    env = TransformedEnv(single(), Compose(StepCounter(4), in_records(decay=1.0)))
    batch = env.rollout(8, break_when_any_done=False)
    assert LOC not in batch.keys()
    first = torch.cat([batch["observation"][4:5], batch["next", "observation"][4:8]])
    wanted = (first[-1] - first.mean(0)) / first.std(0, correction=0).clamp_min(1e-4)
    assert torch.allclose(batch["next", "o"][7], wanted, atol=1e-3)


def test_step_uses_the_statistics_of_the_given_root():
    env = TransformedEnv(single(), in_records(decay=1.0))
    root = env.reset()
    root[LOC, "observation"] = torch.full_like(root["observation"], 100.0)
    root[COUNT, "observation"] = torch.full_like(root[COUNT, "observation"], 10**6)
    after = env.rand_step(root)["next"]
    assert (after[LOC, "observation"] > 99).all()


def test_frozen_statistics_pass_on():
    norm = in_records()
    env = TransformedEnv(single(), norm)
    root = env.step_mdp(env.rand_step(env.reset()))
    norm.freeze()
    after = env.rand_step(root)["next"]
    assert torch.equal(after[LOC, "observation"], root[LOC, "observation"])
    assert torch.equal(after[COUNT, "observation"], root[COUNT, "observation"])


def test_copies_are_of_the_same_kind():
    for made in (in_records().clone(), copy.deepcopy(in_records()), pickle.loads(pickle.dumps(in_records()))):
        assert isinstance(made, VecNormV2) and not made.stateful
        assert COUNT in TransformedEnv(single(), made).reset()
    assert VecNormV2(["a"]).stateful


def test_options_of_shared_statistics_are_refused():
    class Derived(VecNormV2):
        pass

    for make in (
        lambda: in_records(reduce_batch_dims=True),
        lambda: Derived(["observation"], stateful=False),
    ):
        with pytest.raises(UnsupportedError, match="stateful=False goes without"):
            make()
    with pytest.raises(UnsupportedError, match="read _vecnorm_loc"):
        TransformedEnv(single(), in_records()).transform.loc  # noqa: B018
