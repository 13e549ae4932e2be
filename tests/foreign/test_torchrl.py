"""Real TorchRL environments and transforms work in gleanrl's collectors and batches (`make test-foreign`)."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

torchrl = pytest.importorskip("torchrl")

from torchrl import data as foreign_data  # noqa: E402
from torchrl import envs as foreign  # noqa: E402

from gleanrl.collectors import SyncDataCollector  # noqa: E402
from gleanrl.data import from_torchrl  # noqa: E402
from gleanrl.envs import (  # noqa: E402
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
    transforms,
)
from gleanrl.errors import InvalidTypeError  # noqa: E402
from gleanrl.testing import check_env  # noqa: E402
from tests.foreign import torchrl_envs as envs  # noqa: E402 - it imports TorchRL

pytestmark = pytest.mark.filterwarnings("default")

each_env = pytest.mark.parametrize("make", envs.ENVS, ids=lambda make: make.__name__)


def batches(env, **kwargs):
    collector = SyncDataCollector(env, **{"frames_per_batch": 40, "total_frames": 80, **kwargs})
    return list(collector)


def test_gleanrl_does_not_import_torchrl():
    code = """
import sys
import gleanrl.collectors, gleanrl.data, gleanrl.envs, gleanrl.testing
assert "torchrl" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documented_example_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (block,) = [
        found for found in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "torchrl" in found
    ]
    exec(block, {"SyncDataCollector": SyncDataCollector})
    assert "tensor(" in capsys.readouterr().out


# ------------------------------------------------------------------ collectors
@each_env
def test_collectors_deliver_torchrl_environments(make):
    first, second = batches(make)
    assert first.names[-1] == "time" and first.numel() == second.numel() == 40
    for batch in (first, second):
        done, ids = batch[("next", *end_key(batch))], batch["collector", "traj_ids"]
        ended = done.reshape(*batch.batch_size, -1).any(-1)[..., :-1]
        assert torch.equal(ids[..., 1:] != ids[..., :-1], ended)
        came = batch["next"].select(*observed(batch), strict=False)[..., :-1]
        assert (came[~ended] == batch.select(*came.keys(True, True))[..., 1:][~ended]).all()


def end_key(batch):
    return ("done",) if "done" in batch["next"].keys() else ("agents", "done")


def observed(batch):
    return [
        key for key in batch.keys(True, True) if key[0] not in ("next", "collector") and "action" not in key
    ]


def test_the_true_last_observation_flags_and_trajectories():
    batch = batches(envs.Episodes, frames_per_batch=8, total_frames=8)[0]
    root, after = batch["observation"][:, 1:].tolist(), batch["next", "observation"][:, 1:].tolist()
    # The check_env of TorchRL's constructor may have reset it before, so episodes count from the first one.
    first = root[0][0]
    assert root == [[first + k // 3, k % 3] for k in range(8)]
    assert after == [[first + k // 3, k % 3 + 1] for k in range(8)]
    ends = torch.tensor([k % 3 == 2 for k in range(8)])
    odd = torch.tensor([(first + k // 3) % 2 == 1 for k in range(8)])
    assert torch.equal(batch["next", "done"][:, 0], ends)
    assert torch.equal(batch["next", "terminated"][:, 0], ends & ~odd)
    assert torch.equal(batch["next", "truncated"][:, 0], ends & odd)
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert torch.equal(batch["next", "reward"][:, 0], batch["action"].sum(-1))


@pytest.mark.parametrize("around", [None, SerialEnv])
def test_batches_reset_row_by_row(around):
    make = partial(envs.Episodes, 3, (2,))
    env = make() if around is None else around(2, make)
    batch = batches(env, frames_per_batch=48, total_frames=48)[0]
    rows = batch.reshape(-1, batch.shape[-1])
    for index, row in enumerate(rows):
        length = 3 + index % 2
        assert row["observation"][:, 2].tolist() == [k % length for k in range(len(row))]
        assert row["next", "observation"][:, 2].tolist() == [k % length + 1 for k in range(len(row))]


def test_a_limit_of_frames_per_trajectory_truncates():
    batch = batches(envs.cartpole, max_frames_per_traj=5)[0]
    assert batch["next", "step_count"].max() == 5
    at_limit = batch["next", "step_count"] == 5
    assert batch["next", "truncated"][at_limit].all() and batch["next", "done"][at_limit].all()
    nested = batches(partial(envs.Team, own_flags=True), max_frames_per_traj=3)[0]
    assert nested["agents", "observation"][:, 0, 0].tolist() == [k % 3 for k in range(40)]
    assert nested["next", "agents", "truncated"].flatten(1)[2].all()


def test_set_truncated_marks_the_last_step():
    batch = batches(envs.pendulum, set_truncated=True)[0]
    assert batch["next", "truncated"].flatten().tolist() == [False] * 39 + [True]


def test_seeds_reach_torchrl_environments():
    def run(seed):
        torch.manual_seed(0)
        collector = SyncDataCollector(envs.cartpole, frames_per_batch=30, total_frames=30)
        assert collector.set_seed(seed) == seed
        return collector.next()

    assert SyncDataCollector(envs.several, frames_per_batch=2, total_frames=2).set_seed(4) == 5
    assert (run(1) == run(1)).all()
    assert not torch.equal(run(1)["observation"], run(2)["observation"])


def test_policy_acts_after_the_random_frames():
    policy = torch.nn.Linear(3, 2)
    first, second = batches(envs.Episodes, policy=policy, init_random_frames=40)
    assert not torch.allclose(first["action"], policy(first["observation"]))
    assert torch.allclose(second["action"], policy(second["observation"]))


def test_masked_actions_are_drawn_step_by_step():
    batch = batches(envs.turns)[0]
    assert torch.equal(batch["action"], batch["observation"][:, 0].long() % 4)
    assert batch["next", "done"].sum() == 6


def test_torchrl_transforms_act_in_the_environment():
    counted = batches(envs.counted)[0]
    assert counted["next", "step_count"].max() <= 12
    assert torch.equal(counted["is_init"], counted["step_count"] == 0)
    assert torch.equal(counted["next", "episode_reward"][:, 0], counted["next", "step_count"][:, 0].float())
    frames = batches(envs.frames)[0]
    assert frames["observation"].shape == (40, 9)
    discrete = foreign.TransformedEnv(envs.pendulum(), foreign.ActionDiscretizer(5))
    assert batches(discrete)[0]["action"].dtype == torch.int64
    renamed = foreign.TransformedEnv(envs.cartpole(), foreign.RenameTransform(["observation"], [("a", "b")]))
    assert ("a", "b") in batches(renamed)[0].keys(True)


def test_torchrl_parallel_env_is_collected():
    env = foreign.ParallelEnv(2, envs.cartpole)
    assert [batch.shape for batch in batches(env)] == [(2, 20)] * 2


# --------------------------------------------------------------------- batches
@each_env
@pytest.mark.parametrize("batch", [SerialEnv, ParallelEnv])
def test_gleanrl_batches_step_torchrl_environments(make, batch):
    env = batch(2, make)
    try:
        inner = max(1, torch.Size(make().batch_size).numel())
        assert env.set_seed(3) == 3 + 2 * inner - 1
        assert env.full_action_spec.is_in(env.rand_action().select(*env.action_keys))
        data = env.rollout(30, break_when_any_done=False)
        assert data.shape == (*env.batch_size, 30)
        assert batches(env)[0].shape == (*env.batch_size, 40 // (2 * inner))
    finally:
        env.close()


@each_env
def test_serial_and_parallel_batches_agree(make):
    found = []
    for batch in (SerialEnv, ParallelEnv):
        env = batch(2, make)
        torch.manual_seed(0)
        env.set_seed(5)
        found.append(env.rollout(30, break_when_any_done=False))
        env.close()
    assert (found[0] == found[1]).all()


def test_attributes_of_members_are_listed():
    env = SerialEnv(2, [partial(envs.Episodes, 3), partial(envs.Episodes, 5)])
    env.reset()
    assert [int(length) for length in env.length] == [3, 5]
    env.close()


def test_an_unused_environment_is_copied():
    env = SerialEnv(2, envs.Episodes())
    assert env.rollout(5, break_when_any_done=False).shape == (2, 5)
    assert env.members[0] is not env.members[1]
    env.close()


# -------------------------------------------------------- specs and conformance
SPECS = [
    foreign_data.Binary(3, shape=(4, 3)),
    foreign_data.Bounded(-1, 1, (2,)),
    foreign_data.Bounded(0, 255, (2, 2, 3), dtype=torch.uint8),
    foreign_data.Categorical(4, shape=(2,), mask=torch.tensor([True, False, True, True])),
    foreign_data.MultiCategorical([2, 3], shape=(4, 2)),
    foreign_data.MultiOneHot([2, 3]),
    foreign_data.NonTensor(shape=(2,), example_data="a"),
    foreign_data.OneHot(3, mask=torch.tensor([True, False, True])),
    foreign_data.Unbounded((3,)),
    foreign_data.Unbounded((3,), dtype=torch.int64),
    torch.stack([foreign_data.Bounded(-1, 1, (2,)), foreign_data.Bounded(-2, 2, (2,))]),
    torch.stack([foreign_data.Composite(a=foreign_data.Bounded(-1, k, (2,))) for k in (1, 2)]),
    foreign_data.Composite(a=foreign_data.Composite(b=foreign_data.Unbounded((3, 1)), shape=(3,)), c=None),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_converted_specs_describe_the_same_values(spec):
    ours = from_torchrl(spec)
    assert ours.shape == spec.shape
    if isinstance(spec, foreign_data.NonTensor):
        assert ours.example_data == "a"
        return
    if type(spec).__name__ == "Stacked":  # TorchRL's values of it are nested tensors, gleanrl's are stacked
        assert all(
            part.is_in(theirs.rand()) for part, theirs in zip(ours.unbind(0), spec.unbind(0), strict=True)
        )
        return
    for _ in range(20):
        assert ours.is_in(spec.rand()) and spec.is_in(ours.rand())
    assert ours.zero().shape == spec.zero().shape
    if ours.dtype is not None:
        assert ours.dtype == spec.dtype and ours.device == spec.device


def test_spec_without_a_counterpart_is_refused():
    with pytest.raises(InvalidTypeError, match="Choice has no counterpart"):
        from_torchrl(foreign_data.Choice([foreign_data.Bounded(-1, 1, (2,))]))


@each_env
def test_torchrl_environments_pass_the_environment_suite(make):
    check_env_specs(make())
    report = check_env(make, num_steps=60, skip=["seed"] if make is envs.Team else [])
    assert {"specs", "flags", "aliasing", "following root", "determinism", "rollout"} <= set(report.passed)


# ---------------------------------------------------------- gleanrl's transforms
@pytest.mark.parametrize("make", [envs.cartpole, envs.several, envs.counted, partial(envs.Episodes, 3, (2,))])
def test_gleanrl_transforms_work_around_torchrl_environments(make):
    chain = transforms.Compose(
        transforms.RewardScaling(1.0, 2.0), transforms.CatFrames(2, -1, in_keys=["observation"])
    )
    env = TransformedEnv(make(), chain)
    check_env_specs(env)
    batch = batches(env)[0]
    size = batch["observation"].shape[-1] // 2
    assert torch.equal(batch["observation"][..., size:][..., 1:, :], batch["observation"][..., 1:, size:])
    inside = ~batch["next", "done"][..., 0]
    older, newer = batch["next", "observation"][..., :size], batch["observation"][..., size:]
    assert torch.equal(older[inside], newer[inside])


def test_gleanrl_transforms_work_around_a_batch_of_torchrl_environments():
    env = TransformedEnv(SerialEnv(2, envs.cartpole), transforms.StepCounter(7))
    assert batches(env)[0]["next", "step_count"].max() == 7
    masked = TransformedEnv(SerialEnv(2, envs.Turns), transforms.ActionMask())
    batch = batches(masked)[0]
    assert torch.equal(batch["action"], batch["observation"][..., 0].long() % 4)
