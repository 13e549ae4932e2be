"""TorchRL's transforms work in gleanrl's environments, collectors and buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

torchrl = pytest.importorskip("torchrl")

from torchrl import envs as theirs  # noqa: E402
from torchrl.modules import GRUModule, LSTMModule  # noqa: E402
from torchrl.record import PixelRenderTransform, VideoRecorder  # noqa: E402
from torchrl.record.loggers import CSVLogger  # noqa: E402

from gleanrl.collectors import SyncDataCollector  # noqa: E402
from gleanrl.data import (  # noqa: E402
    LazyTensorStorage,
    ReplayBuffer,
)
from gleanrl.envs import (  # noqa: E402
    GymWrapper,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)
from gleanrl.envs import transforms as ours  # noqa: E402
from gleanrl.envs.transforms import (  # noqa: E402
    BurnInTransform,
    Compose,
    InitTracker,
    StepCounter,
)
from tests.fakes import OracleEnv, Script  # noqa: E402
from tests.fakes_base import CountingEnv  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
SCRIPT = Script(lengths=(3, 1, 5))

SAME = {
    "ActionDiscretizer": lambda module: module.ActionDiscretizer(3),
    "CatFrames": lambda module: module.CatFrames(N=3, dim=-1, in_keys=["observation"]),
    "CatTensors": lambda module: module.CatTensors(["observation"], out_key="o", del_keys=False),
    "DTypeCastTransform": lambda module: module.DTypeCastTransform(
        torch.float32, torch.float64, in_keys=["observation"]
    ),
    "ExcludeTransform": lambda module: module.ExcludeTransform("truncated"),
    "InitTracker": lambda module: module.InitTracker(),
    "ObservationNorm": lambda module: module.ObservationNorm(0.5, 2.0, in_keys=["observation"]),
    "RenameTransform": lambda module: module.RenameTransform(["observation"], ["o"]),
    "RewardClipping": lambda module: module.RewardClipping(-0.1, 0.1),
    "RewardScaling": lambda module: module.RewardScaling(0.5, 2.0),
    "RewardSum": lambda module: module.RewardSum(),
    "SignTransform": lambda module: module.SignTransform(["reward"], ["reward"]),
    "StepCounter": lambda module: module.StepCounter(2),
    "TargetReturn": lambda module: module.TargetReturn(9.0),
    "TimeMaxPool": lambda module: module.TimeMaxPool(["observation"], T=2),
    "UnsqueezeTransform": lambda module: module.UnsqueezeTransform(-1, in_keys=["observation"]),
    "VecNorm": lambda module: module.VecNorm(in_keys=["observation"], decay=1.0),
}


def policy(env):
    leaf = env.full_action_spec["action"].zero()
    return lambda tensordict: tensordict.set("action", leaf.clone())


def rows(env):
    return env.rollout(9, policy(env), break_when_any_done=False)


# In a partial reset, TorchRL's VecNorm also counts the observations of the other environments.
CASES = [(name, size) for name in SAME for size in ((), (2,)) if (name, size) != ("VecNorm", (2,))]


@pytest.mark.parametrize(("name", "size"), CASES, ids=str)
def test_torchrl_transforms_equal_gleanrls(name, size):
    foreign = TransformedEnv(CountingEnv(SCRIPT, size), SAME[name](theirs))
    assert type(foreign.transform).__name__ == "ForeignTransform"
    check_env_specs(foreign)
    foreign, own = (
        TransformedEnv(CountingEnv(SCRIPT, size), SAME[name](module)) for module in (theirs, ours)
    )
    came, expected = rows(foreign), rows(own)
    assert set(came.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(came[key], expected[key], rtol=1e-4, atol=1e-4, msg=str(key))


@pytest.mark.parametrize("name", ["StepCounter", "RewardSum", "VecNorm"])
def test_torchrl_transforms_work_in_collectors_and_members(name):
    def make():
        return TransformedEnv(CountingEnv(SCRIPT), Compose(InitTracker(), SAME[name](theirs)))

    expected = rows(make())
    env = make()
    batches = list(SyncDataCollector(env, policy(env), frames_per_batch=3, total_frames=9))
    for made in (torch.cat(batches), rows(SerialEnv(2, make))[1]):
        for key in expected.keys(True, True):
            assert torch.equal(made[key], expected[key]), key
    twin = copy.deepcopy(make())
    assert twin.transform[1].container is twin and rows(twin).shape == expected.shape


@pytest.mark.slow
def test_torchrl_transforms_work_in_worker_processes():
    env = ParallelEnv(2, lambda: TransformedEnv(CountingEnv(SCRIPT), theirs.StepCounter(2)))
    assert rows(env)["step_count"].max() == 1
    env.close()


def test_private_entries_reach_the_policy():
    if not hasattr(theirs.transforms, "gSDENoise"):
        pytest.skip("this release has it elsewhere")

    def make():
        return TransformedEnv(CountingEnv(SCRIPT), theirs.transforms.gSDENoise(action_dim=2, state_dim=3))

    def policy(td):
        return td.set("action", td["_eps_gSDE"].mean(-1))

    batch = make().rollout(9, policy, break_when_any_done=False)
    noise = batch["_eps_gSDE"]
    assert noise.shape == (9, 2, 3) and torch.equal(batch["action"], noise.mean(-1))
    for episode in noise.split((3, 1, 5)):
        assert (episode == episode[0]).all()
    (batch,) = SyncDataCollector(make(), policy, frames_per_batch=9, total_frames=9)
    assert "_eps_gSDE" not in batch and "action" in batch


def test_chains_are_flattened_and_attributes_exposed():
    env = TransformedEnv(CountingEnv(SCRIPT), theirs.Compose(theirs.StepCounter(2), theirs.RewardSum()))
    assert len(env.transform) == 2 and env.transform[0].max_steps == 2
    env = env.append_transform(theirs.TrajCounter())
    assert rows(env)["next", "traj_count"].flatten().tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 5]


def test_user_subclass_of_a_torchrl_transform_works():
    class Twice(theirs.Transform):
        def _call(self, next_tensordict):
            return next_tensordict.set(
                "twice", next_tensordict["observation"] * self.parent.batch_size.numel() * 2
            )

        def _reset(self, tensordict, tensordict_reset):
            return self._call(tensordict_reset)

        def transform_observation_spec(self, observation_spec):
            observation_spec["twice"] = observation_spec["observation"].clone()
            return observation_spec

    env = TransformedEnv(CountingEnv(SCRIPT), Compose(Twice(), StepCounter()))
    check_env_specs(env)
    data = rows(env)
    assert torch.equal(data["twice"], data["observation"] * 2)


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule], ids=["lstm", "gru"])
@pytest.mark.parametrize("size", [0, 2])
def test_primers_of_recurrent_modules_work(kind, size):
    module = kind(input_size=3, hidden_size=4, in_key="observation", out_key="features")
    act = TensorDictSequential(module, TensorDictModule(torch.nn.Linear(4, 2), ["features"], ["action"]))
    base = SerialEnv(size, lambda: CountingEnv(SCRIPT)) if size else CountingEnv(SCRIPT)
    env = TransformedEnv(base, Compose(InitTracker(), module.make_tensordict_primer()))
    assert type(env.transform[1]) is ours.TensorDictPrimer
    batch = next(iter(SyncDataCollector(env, act, frames_per_batch=12, total_frames=12)))
    for key in module.out_keys[1:]:
        before, after = batch[key[1:]][..., 1:, :, :], batch[key][..., :-1, :, :]
        goes_on = ~batch["is_init"][..., 1:, 0]
        assert goes_on.any() and torch.equal(before[goes_on], after[goes_on]) and after.any()
        assert not before[~goes_on].any()


def test_burn_in_of_a_recurrent_module_works():
    module = GRUModule(
        3,
        4,
        in_keys=["observation", "hidden"],
        out_keys=["features", ("next", "hidden")],
        default_recurrent_mode=True,
    )
    data = torch.stack([rows(CountingEnv(SCRIPT))[:6]] * 2)
    data["hidden"], data["is_init"] = torch.zeros(2, 6, 1, 4), torch.zeros(2, 6, 1, dtype=torch.bool)
    out = BurnInTransform([module], burn_in=2)(data)
    assert out.shape == (2, 4) and out["hidden"][:, 0].any() and not out["hidden"][:, 1:].any()


def test_pictures_are_rendered_and_recorded(tmp_path):
    recorder = VideoRecorder(CSVLogger("run", log_dir=str(tmp_path), video_format="pt"), tag="video", skip=1)
    env = TransformedEnv(
        GymWrapper(OracleEnv(script=SCRIPT, render_mode="rgb_array")), PixelRenderTransform()
    )
    env.append_transform(recorder)
    data = env.rollout(7, break_when_any_done=False)
    assert data["pixels"].dtype == torch.uint8 and data["pixels"].shape == (7, 6, 8, 3)
    assert torch.equal(data["next", "pixels"][:, 0, 0, 2].float(), data["next", "observation"][:, 2])
    recorder.dump()
    assert list(tmp_path.rglob("*.pt"))
    env.close()


def test_torchrl_transforms_work_in_buffers():
    data = rows(CountingEnv(SCRIPT))
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    buffer.append_transform(theirs.ObservationNorm(0.5, 2.0, in_keys=["observation"]))
    buffer.append_transform(theirs.Compose(theirs.RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])))
    buffer.extend(data)
    assert torch.equal(buffer[:]["observation"], data["observation"] * 2 + 0.5)
    assert torch.equal(buffer[:]["next", "reward"], data["next", "reward"] * 2)


def test_torchrl_multi_action_steps_chunks():
    env = TransformedEnv(CountingEnv(Script(ending="never")), theirs.MultiAction())
    data = env.rollout(2, lambda td: td.set("action", torch.zeros(3, 2)))
    assert data["next", "observation"][:, 2].tolist() == [3.0, 6.0]
    assert data["next", "reward"].shape == (2, 3, 1) and len(env.base_env.actions) == 6
