"""Additions to TorchRL since 0.13 have the same arguments and results in gleanrl."""

from __future__ import annotations

import inspect

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("torchrl", minversion="0.13")

import torchrl.data as their_data
import torchrl.envs as their_envs
from torchrl.data.replay_buffers.samplers import StalenessAwareSampler as TheirStaleness

import gleanrl.data as our_data
import gleanrl.envs as our_envs
from gleanrl.envs.transforms import TransformedEnv

pytestmark = pytest.mark.filterwarnings("default")

BOTH = pytest.mark.parametrize("data", [their_data, our_data], ids=["theirs", "ours"])
NAMES = {
    **dict.fromkeys(("HERReplayBuffer", "ConsumingSampler", "CompressedListStorage"), (their_data, our_data)),
    "OfflineToOnlineReplayBuffer": (their_data, our_data),
    **dict.fromkeys(("MultiAction", "TrajCounter", "VecNormV2"), (their_envs, our_envs)),
}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_have_the_same_names_and_order(name):
    theirs, ours = (
        {
            key: parameter
            for key, parameter in inspect.signature(getattr(module, name).__init__).parameters.items()
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }
        for module in NAMES[name]
    )
    assert theirs.keys() <= ours.keys()
    positional = [key for key, parameter in theirs.items() if parameter.kind != parameter.KEYWORD_ONLY]
    assert [*ours][: len(positional)] == positional
    for key, parameter in theirs.items():
        if isinstance(parameter.default, (int, float, str, type(None))) and key != "lock":
            assert ours[key].default == parameter.default, key


def steps(count=20):
    t = torch.arange(count)
    x, done = t.float()[:, None], (t % 5 == 4)[:, None]
    after = {"achieved_goal": x, "desired_goal": x * 0 - 1, "x": x + 1, "reward": x * 0, "done": done}
    return TensorDict(
        {
            "t": t,
            "x": x,
            "achieved_goal": x,
            "desired_goal": x * 0 - 1,
            "next": {**after, "terminated": done},
        },
        [count],
    )


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_hindsight_goals_equal_torchrls(strategy):
    found = []
    for data in (their_data, our_data):
        buffer = data.HERReplayBuffer(
            lambda rows: rows["desired_goal"] * 2,
            her_ratio=0.5,
            strategy=strategy,
            storage=data.LazyTensorStorage(30),
            batch_size=20_000,
        )
        buffer.extend(steps(18))
        batch = buffer.sample()
        changed = batch["desired_goal"].flatten() >= 0
        assert int(changed.sum()) == 10_000
        assert torch.equal(batch["next", "reward"][changed], batch["desired_goal"][changed] * 2)
        assert torch.equal(batch["next", "desired_goal"], batch["desired_goal"])
        pairs = zip(
            batch["t"][changed].tolist(), batch["desired_goal"][changed].flatten().tolist(), strict=True
        )
        found.append(set(pairs))
    assert found[0] == found[1]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_consuming_sampler_leaves_the_same_records(batch_size):
    lengths = []
    for data in (their_data, our_data):
        buffer = data.ReplayBuffer(
            storage=data.LazyTensorStorage(10), sampler=data.ConsumingSampler(), batch_size=batch_size
        )
        buffer.extend(torch.arange(7))
        seen, lens = [], []
        while len(buffer):
            seen += buffer.sample().tolist()
            lens.append((len(buffer), buffer._sampler.ran_out))
        assert sorted(seen) == [*range(7)]
        with pytest.raises(RuntimeError):
            buffer.sample()
        lengths.append(lens)
    assert lengths[0] == lengths[1]


def test_staleness_sampler_draws_the_same_shares():
    shares = []
    for data, kind in ((their_data, TheirStaleness), (our_data, our_data.StalenessAwareSampler)):
        sampler = kind(max_staleness=4)
        buffer = data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(10), sampler=sampler, batch_size=40_000
        )
        buffer.extend(TensorDict({"policy_version": torch.arange(10)}, [10]))
        sampler.consumer_version = 9
        batch = buffer.sample()
        assert torch.equal(batch["staleness"], (9 - batch["policy_version"]).float())
        shares.append(torch.bincount(batch["policy_version"], minlength=10) / 40_000)
    assert torch.allclose(*shares, atol=0.02)


@BOTH
def test_compressed_storage_restores_records(data):
    records = TensorDict(
        {"o": torch.randint(255, (5, 3, 8, 8), dtype=torch.uint8), "n": torch.arange(5)}, [5]
    )
    buffer = data.ReplayBuffer(storage=data.CompressedListStorage(10, compression_level=5), batch_size=8)
    buffer.extend(records)
    batch = buffer.sample()
    assert torch.equal(batch["o"], records["o"][batch["n"]])


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.75])
def test_parts_of_a_data_set_equal_torchrls(fraction):
    sums = []
    for data in (their_data, our_data):
        offline = data.ReplayBuffer(storage=data.LazyTensorStorage(50))
        offline.extend(TensorDict({"x": torch.zeros(50)}, [50]))
        buffer = data.OfflineToOnlineReplayBuffer(offline, online_capacity=20, offline_fraction=fraction)
        buffer.extend(TensorDict({"x": torch.ones(5)}, [5]))
        found = [buffer.sample(size)["x"].tolist() for size in (1, 2, 5, 10)]
        for step in (0, 3, 10):
            buffer.anneal(step, 10)
            found.append([buffer.offline_fraction, *buffer.sample(8)["x"].tolist()])
        sums.append(found)
    assert sums[0] == [pytest.approx(part) for part in sums[1]]


def test_stacks_from_single_frames_include_torchrls():
    found = []
    for data, envs in ((their_data, their_envs), (our_data, our_envs)):
        frames = envs.CatFrames(3, -1, in_keys=["x"], out_keys=["stack"])
        home = envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), frames)  # TorchRL's transform needs a parent
        transform, sampler = frames.make_rb_transform_and_sampler(4, end_key=("next", "done"))
        buffer = data.ReplayBuffer(
            storage=data.LazyTensorStorage(30), sampler=sampler, transform=transform, batch_size=400
        )
        buffer.extend(steps())
        batch = buffer.sample()
        assert batch.shape == (400,)
        rows = zip(batch["t"].tolist(), batch["stack"].tolist(), batch["next", "stack"].tolist(), strict=True)
        found.append({str(row) for row in rows})
        home.close()
    assert found[0] < found[1], "TorchRL draws only steps that have whole stacks"


def test_action_chunks_equal_torchrls():
    found = []
    for envs in (their_envs, our_envs):
        env = envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), envs.MultiAction())
        root = env.reset(seed=0)
        step = env.step(root.set("action", torch.linspace(-1, 1, 4)[:, None]))
        found.append((root["observation"], step["next", "observation"], step["next", "reward"]))
        assert env.action_spec.shape == (-1, 1)
    for theirs, ours in zip(*found, strict=True):
        assert torch.allclose(theirs, ours)


def test_initial_states_equal_torchrls():
    env, theirs = TransformedEnv(our_envs.PendulumEnv(), our_envs.StepCounter()), their_envs.PendulumEnv()
    for one in (env, theirs):
        given = one.reset()
        given["th"] = torch.tensor(0.5)
        assert one.reset(given.clone(), set_state=True)["th"] == 0.5
        assert one.reset(given.clone(), set_state=False)["th"] != 0.5
    for gym in (our_envs.GymEnv, their_envs.GymEnv):
        with pytest.raises(NotImplementedError):
            gym("Pendulum-v1").reset(set_state=True)


@BOTH
def test_dimension_names_equal_torchrls(data):
    spec = data.Composite(a=data.Unbounded((2, 3)), shape=(2,), names=["env"])
    assert spec.names == spec.zero().names == spec.clone().names == ["env"]
    assert (
        spec.unsqueeze(0).names == spec.expand(4, 2).names == spec.unsqueeze(0).zero().names == [None, "env"]
    )
    assert data.Composite(shape=(2, 3)).refine_names("env", None).names == ["env", None]
    assert spec[0].names == []


@BOTH
def test_first_steps_of_slices_are_flagged(data):
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(20),
        sampler=data.SliceSampler(slice_len=4, traj_key="episode", init_key="is_init"),
        batch_size=8,
    )
    t = torch.arange(20)
    stored = (t % 10 == 0)[:, None]
    buffer.extend(TensorDict({"episode": t // 10, "t": t, "is_init": stored}, [20]))
    batch = buffer.sample()
    assert torch.equal(batch["is_init"][:, 0], (torch.arange(8) % 4 == 0) | stored[batch["t"]][:, 0])
