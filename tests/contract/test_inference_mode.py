"""Environments, collectors and buffers work after a program has used them in `torch.inference_mode`."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gleanrl.envs import (
    CatFrames,
    Compose,
    GymEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
)
from gleanrl.envs.utils import step_mdp
from tests.fakes import Script
from tests.fakes_base import CountingEnv


def with_stacks():
    return UnsqueezeTransform(-1, in_keys=["observation"])


def make_env():
    stack = (with_stacks(), CatFrames(2, dim=-1, in_keys=["observation"]))
    rest = (StepCounter(7), RewardSum(), VecNorm(in_keys=["observation"]))
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(*rest, *stack))


def act(td):
    return td.set("action", torch.zeros(*td.shape, 1))


def module():
    return TensorDictModule(lambda obs: obs[..., :1, -1], in_keys=["observation"], out_keys=["action"])


POLICIES = {"random": lambda: None, "callable": lambda: act, "module": module}
ENVS = {
    "one": make_env,
    "serial": lambda: SerialEnv(2, make_env),
    "parallel": lambda: ParallelEnv(2, make_env),
    "vector": lambda: TransformedEnv(GymEnv("Pendulum-v1", num_envs=2), with_stacks()),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("env", ENVS)
def test_rollouts_continue_after_inference_mode(env, policy):
    env, policy = ENVS[env](), POLICIES[policy]()
    with torch.inference_mode():
        evaluated = env.rollout(10, policy, break_when_any_done=False)
    env.rollout(10, policy, break_when_any_done=False)
    evaluated["action"] += 1
    with torch.inference_mode():
        env.rollout(10, policy, break_when_any_done=False)
    env.close()


def test_steps_continue_after_inference_mode():
    env = make_env()
    with torch.inference_mode():
        td = step_mdp(env.rand_step(env.reset()))
    for _ in range(3):
        td = step_mdp(env.rand_step(td))


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_are_collected_inside_and_outside_inference_mode(policy):
    collector = SyncDataCollector(make_env(), POLICIES[policy](), frames_per_batch=20, total_frames=80)
    batches = iter(collector)
    for _ in range(2):
        with torch.inference_mode():
            inside = next(batches)
        next(batches)
        inside["next", "reward"] += 1
    collector.shutdown()


def test_state_loaded_in_inference_mode_continues_outside():
    def make():
        env = TransformedEnv(CountingEnv(Script(lengths=(7,)), (2,)), StepCounter())
        return SyncDataCollector(env, frames_per_batch=10, total_frames=-1)

    first, second = make(), make()
    first.next()
    with torch.inference_mode():
        second.load_state_dict(first.state_dict())
    for _ in range(2):
        assert torch.equal(first.next()["observation"], second.next()["observation"])
    first.shutdown()
    second.shutdown()


def test_workers_deliver_inside_and_outside_inference_mode():
    collector = MultiSyncDataCollector([make_env] * 2, module(), frames_per_batch=20, total_frames=60)
    batches = iter(collector)
    with torch.inference_mode():
        next(batches)
        collector.update_policy_weights_()
    next(batches)["next", "reward"] += 1
    collector.update_policy_weights_()
    collector.shutdown()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler,
        lambda: PrioritizedSampler(50, 0.6, 0.4),
        lambda: SliceSampler(slice_len=2, traj_key="of"),
    ],
    ids=["random", "prioritized", "slices"],
)
def test_buffers_accept_records_inside_and_outside_inference_mode(storage, sampler):
    if storage is ListStorage and sampler is not RandomSampler:
        pytest.skip("lists have no trajectories, and one kind of draw is enough")
    buffer = TensorDictReplayBuffer(storage=storage(50), sampler=sampler(), batch_size=4)
    records = TensorDict({"of": torch.arange(20) // 5, "td_error": torch.rand(20)}, [20])
    for _ in range(2):
        with torch.inference_mode():
            buffer.extend(records)
            buffer.update_tensordict_priority(buffer.sample())
        buffer.extend(records)
        drawn = buffer.sample()
        drawn["td_error"] += 1
        buffer.update_tensordict_priority(drawn)
