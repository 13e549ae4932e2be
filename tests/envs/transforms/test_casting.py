"""`DTypeCastTransform` and `DeviceCastTransform` cast values, and actions back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymWrapper, check_env_specs
from gleanrl.envs.transforms import (
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    PinMemoryTransform,
    StepCounter,
    TransformedEnv,
)
from gleanrl.errors import InvalidTypeError, UnsupportedError
from tests.envs.transforms.ways import SCRIPT, collect_both_ways, joined
from tests.fakes import OracleEnv
from tests.fakes_base import CountingEnv


def double():
    box = spaces.Box(-1.0, 1.0, (2,), np.float64)
    return GymWrapper(OracleEnv(script=SCRIPT, dtype=np.float64, action_space=box))


def test_doubles_become_floats_and_actions_go_back():
    env = double()
    simulator = env.unwrapped
    batch = joined(collect_both_ways(double, lambda: [DoubleToFloat()]))
    assert batch["observation"].dtype is batch["next", "observation"].dtype is torch.float32
    assert batch["action"].dtype is torch.float32
    out = TransformedEnv(env, DoubleToFloat()).rollout(2)
    assert simulator.actions[0].dtype == np.float64
    assert torch.equal(torch.from_numpy(simulator.actions[0]).float(), out["action"][0])


def test_integer_bounds_are_clipped_to_the_dtype():
    env = TransformedEnv(
        CountingEnv(SCRIPT),
        Compose(StepCounter(), DTypeCastTransform(torch.int64, torch.int32, ["step_count"])),
    )
    check_env_specs(env)
    spec = env.observation_spec["step_count"]
    assert spec.dtype is torch.int32 and (int(spec.low), int(spec.high)) == (0, 2**31 - 1)


def test_the_true_last_observation_passes_the_cast():
    batch = joined(collect_both_ways(double, lambda: [DoubleToFloat()]))
    after, obs = batch["next", "observation"], batch["observation"]
    assert torch.equal(after[:, 2], obs[:, 2] + 1)
    assert torch.equal(after[:, 1], obs[:, 1])


def test_without_matching_keys_nothing_is_cast():
    env = TransformedEnv(GymWrapper(OracleEnv(script=SCRIPT)), DoubleToFloat())
    assert env.transform.idles()
    assert not env.transform.inverts()


def test_only_named_keys_are_cast():
    env = TransformedEnv(double(), DTypeCastTransform(torch.float64, torch.float16, in_keys=["observation"]))
    assert env.observation_spec["observation"].dtype is torch.float16
    assert env.action_spec.dtype is torch.float64
    assert env.rollout(2)["observation"].dtype is torch.float16


def test_out_keys_keep_the_original():
    env = TransformedEnv(double(), DoubleToFloat(in_keys=["observation"], out_keys=["small"]))
    batch = env.rollout(3)
    assert batch["observation"].dtype is torch.float64
    assert torch.equal(batch["next", "small"], batch["next", "observation"].float())


def test_buffer_casts_on_read_and_back_on_write():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, transform=DoubleToFloat())
    buffer.extend(TensorDict({"a": torch.arange(6.0), "n": torch.arange(6)}, [6]))
    assert buffer._storage.get([0])["a"].dtype is torch.float64
    assert buffer.sample()["a"].dtype is torch.float32
    assert buffer.sample()["n"].dtype is torch.int64


def test_bad_dtypes_are_refused():
    with pytest.raises(InvalidTypeError, match="dtype_out"):
        DTypeCastTransform(torch.float64, "float32")


def test_device_cast_reports_its_device():
    env = TransformedEnv(double(), DeviceCastTransform("cpu"))
    assert env.device == torch.device("cpu")
    assert env.reset().device == torch.device("cpu")
    batch = env.rollout(4)
    assert batch.device == torch.device("cpu")
    assert torch.equal(batch["next", "observation"][:, 2], batch["observation"][:, 2] + 1)


def test_device_cast_moves_samples_of_a_buffer():
    cast = DeviceCastTransform("meta", "cpu")
    batch = TensorDict({"a": torch.ones(3)}, [3])
    assert cast(batch)["a"].device.type == "meta"
    assert cast.inv(batch)["a"].device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinned_memory_needs_an_accelerator():
    with pytest.raises(UnsupportedError, match="CUDA"):
        PinMemoryTransform()(TensorDict({"a": torch.ones(3)}, [3]))


def test_single_entries_change_their_device():
    move = DeviceCastTransform("meta", orig_device="cpu", in_keys=["a"], out_keys=["b"])
    out = move(TensorDict({"a": torch.ones(2), "c": torch.ones(2)}, [2]))
    assert out["b"].device.type == "meta" and out["a"].device.type == out["c"].device.type == "cpu"
    env = TransformedEnv(CountingEnv(device="cpu"), DeviceCastTransform("cpu", in_keys=["observation"]))
    check_env_specs(env)
    assert env.device == torch.device("cpu")
    env = TransformedEnv(CountingEnv(), DeviceCastTransform("meta", in_keys=["observation"]))
    assert env.device is None and env.full_observation_spec["observation"].device.type == "meta"
    assert (
        env.full_action_spec["action"].device is None or env.full_action_spec["action"].device.type == "cpu"
    )
