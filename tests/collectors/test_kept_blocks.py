"""Small blocks are reused, and batches are copies of them. References that user code keeps hold their values."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
from gleanrl.envs import (
    Compose,
    FiniteTensorDictCheck,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    UnaryTransform,
)
from gleanrl.errors import PolicyError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

BATCHES = 8
ENVS = {
    "one": CountingEnv,
    "batch": lambda script: CountingEnv(script, (2,)),
    "serial": lambda script: SerialEnv(2, lambda: CountingEnv(script)),
    "transformed": lambda script: TransformedEnv(CountingEnv(script, (2,)), StepCounter()),
}
PARTS = {"row": lambda row: row, "view": lambda row: row[..., 1:], "nothing": lambda row: None}


class Keeping(torch.nn.Module):
    """Keeps each input, or the result of `part` for it."""

    def __init__(self, part, policy):
        super().__init__()
        self.part, self.policy, self.kept, self.addresses = part, policy, [], set()

    def forward(self, observation):
        part = self.part(observation)
        if part is not None:
            self.kept.append((part, part.clone()))
        self.addresses.add(observation.data_ptr())
        return self.policy(observation)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_values_kept_by_a_policy_do_not_change(part, whole, kind, steps):
    env = ENVS[kind](Script(lengths=(4,)))
    shape, dtype = env.action_spec.shape, env.action_spec.dtype
    module = Keeping(PARTS[part], lambda observation: torch.ones(shape, dtype=dtype))
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    frames = steps * env.batch_size.numel()
    collector = SyncDataCollector(
        env,
        policy if whole else (lambda td: policy(td)),
        frames_per_batch=frames,
        total_frames=BATCHES * frames,
    )
    batches = [(batch, batch.clone()) for batch in collector]
    assert len(batches) == BATCHES
    assert all((batch == copy).all() for batch, copy in batches)
    assert all(torch.equal(row, copy) for row, copy in module.kept)
    observed = torch.cat([batch["observation"].reshape(frames, -1) for batch, _ in batches])
    assert len(observed.unique(dim=0)) > 1, "there is something that could be overwritten"
    if part == "nothing" and EXCHANGE is not None:  # without this interface, no block is reused
        assert len(module.addresses) <= steps + 1, "the memory is written again"


class Entries(Transform):
    """Keeps each entry that it maps, before and after."""

    def __init__(self, **keys):
        super().__init__(**keys)
        self.kept = []

    def _seen(self, value):
        self.kept.append((value, value.clone()))
        return value * 1

    def _apply_transform(self, value):
        return self._seen(value)

    def _inv_apply_transform(self, value):
        return self._seen(value)


def step(self, tensordict, next_tensordict):
    for record in (tensordict, next_tensordict):
        for key in ("observation", "done", "step_count"):
            value = record.get(key, None)
            if value is not None:
                self._seen(value)
    return next_tensordict


def reset(self, tensordict, tensordict_reset):
    self._seen(tensordict_reset.get("observation"))
    return tensordict_reset


OnRows, OnTensorDicts = (
    type(name, (Entries,), {"on_rows": on_rows, "_step": step, "_reset": reset})
    for name, on_rows in (("OnRows", True), ("OnTensorDicts", False))
)


def mapping(**keys):
    kept: list = []

    def function(value):
        kept.append((value, value.clone()))
        return value * 1

    made = UnaryTransform(fn=function, **keys)
    made.kept = kept
    return made


SAME = {"in_keys": ["observation"], "out_keys": ["observation"]}
OTHER = {"in_keys": ["observation"], "out_keys": ["other"]}
TRANSFORMS = {
    "same": lambda: Entries(**SAME),
    "other": lambda: Entries(**OTHER),
    "actions": lambda: Entries(in_keys_inv=["action"], out_keys_inv=["action"]),
    "function": lambda: mapping(**SAME),
    "function of another": lambda: mapping(**OTHER),
    "on rows": OnRows,
    "on tensordicts": OnTensorDicts,
}


@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_values_kept_by_a_transform_do_not_change(kind, size, steps):
    transform = TRANSFORMS[kind]()
    env = TransformedEnv(
        CountingEnv(Script(lengths=(4,)), size), Compose(StepCounter(max_steps=3), transform, RewardSum())
    )
    frames = steps * env.batch_size.numel()
    collector = SyncDataCollector(env, frames_per_batch=frames, total_frames=BATCHES * frames)
    batches = [(batch, batch.clone()) for batch in collector]
    assert all((batch == copy).all() for batch, copy in batches)
    assert len(transform.kept) >= BATCHES * steps
    assert all(torch.equal(value, copy) for value, copy in transform.kept)


class Checks(torch.nn.Module):
    """A policy that raises when an earlier input has changed."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.shape, self.dtype, self.kept = shape, dtype, []

    def forward(self, observation):
        assert all(torch.equal(row, copy) for row, copy in self.kept)
        self.kept.append((observation, observation.clone()))
        return torch.ones((*observation.shape[:-1], *self.shape), dtype=self.dtype)


def counting():
    return CountingEnv(Script(lengths=(4,)))


def policy():
    spec = counting().action_spec
    return TensorDictModule(Checks(spec.shape, spec.dtype), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("kind", ["parallel", "sync", "async"])
def test_values_of_shared_memory_kept_by_a_policy_do_not_change(kind):
    if kind == "parallel":
        collector = SyncDataCollector(ParallelEnv(2, counting), policy(), frames_per_batch=6, total_frames=48)
    else:
        cls = MultiSyncDataCollector if kind == "sync" else MultiaSyncDataCollector
        collector = cls([counting] * 2, policy(), frames_per_batch=6, total_frames=48)
    assert sum(batch.numel() for batch in collector) == 48
    collector.shutdown()


def collected(forward, steps=3, **kwargs):
    """Return the batches of a policy that is a function of its module and the observation."""
    env = CountingEnv(Script(lengths=(4,)))

    class Module(torch.nn.Module):
        def forward(self, observation):
            forward(observation)
            return torch.ones(env.action_spec.shape, dtype=env.action_spec.dtype)

    policy = TensorDictModule(Module(), in_keys=["observation"], out_keys=["action"])
    return list(
        SyncDataCollector(env, policy, frames_per_batch=steps, total_frames=BATCHES * steps, **kwargs)
    )


def test_attributes_set_on_a_row_are_gone_in_the_next_batch():
    gradients, marked = [], []

    def forward(observation):
        marked.append(hasattr(observation, "seen"))
        observation.seen = True
        with torch.enable_grad():
            (observation.requires_grad_() * 2).sum().backward()
        gradients.append(observation.grad.clone())

    collected(forward)
    assert not any(marked)
    assert torch.stack(gradients).unique().tolist() == [2.0]


@pytest.mark.parametrize("steps", [3, 30_000])
def test_policy_that_moves_its_input_raises(steps):
    with pytest.raises(PolicyError, match=r"moved its input \['observation'\] to other memory at step 0"):
        collected(lambda observation: observation.share_memory_(), steps)


@pytest.mark.parametrize("steps", [1, 3])
def test_values_kept_with_return_same_td_do_not_change(steps):
    kept = []
    collected(lambda row: kept.append((row, row.clone())), steps, return_same_td=True)
    assert len(kept) == BATCHES * steps
    assert all(torch.equal(row, copy) for row, copy in kept)


class KeepingStorage(LazyTensorStorage):
    def set(self, cursor, data, *args, **kwargs):
        self.kept.append((data["observation"], data["observation"].clone()))
        return super().set(cursor, data, *args, **kwargs)


class KeepingWriter(RoundRobinWriter):
    def extend(self, data):
        self.kept.append((data["observation"], data["observation"].clone()))
        return super().extend(data)


@pytest.mark.parametrize("kind", ["storage", "writer"])
@pytest.mark.parametrize("batched", [False, True])
def test_values_kept_by_parts_of_a_buffer_do_not_change(kind, batched):
    storage = (KeepingStorage if kind == "storage" else LazyTensorStorage)(100, ndim=1 + batched)
    writer = KeepingWriter() if kind == "writer" else RoundRobinWriter()
    part = storage if kind == "storage" else writer
    part.kept = []
    env = ParallelEnv(2, counting) if batched else counting()
    buffer = ReplayBuffer(storage=storage, writer=writer)
    collector = SyncDataCollector(env, None, frames_per_batch=6, total_frames=36, replay_buffer=buffer)
    for _ in collector:
        pass
    collector.shutdown()
    assert len(part.kept) == 6
    assert all(torch.equal(row, copy) for row, copy in part.kept)


class Looks(Transform):
    """Records the keys at each reset."""

    on_rows = True

    def _reset(self, tensordict, tensordict_reset):
        self.found.append(tensordict_reset.keys())
        return tensordict_reset


def test_resets_in_mid_block_have_no_action():
    looks = Looks()
    looks.found = []
    env = TransformedEnv(CountingEnv(Script(lengths=(2,)), (2,)), Compose(looks, FiniteTensorDictCheck()))
    collector = SyncDataCollector(env, None, frames_per_batch=12, total_frames=24)
    assert sum(batch.numel() for batch in collector) == 24
    assert len(looks.found) >= 4
    assert not any("action" in keys for keys in looks.found)
