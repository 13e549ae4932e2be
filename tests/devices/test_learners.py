"""A learner runs on a device while its workers stay on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from gleanrl.collectors.workers.worker import PickledPolicy
from gleanrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from gleanrl.envs import ParallelEnv
from tests.devices.counting import WEIGHT, Counter, acted, check_stream, drained, leaves_on, linear

CPU = torch.device("cpu")
KINDS = {"sync": MultiSyncDataCollector, "async": MultiaSyncDataCollector}
both = pytest.mark.parametrize("kind", KINDS)


class WithoutCuda(Counter):
    """Fails in a process that uses CUDA."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert not torch.cuda.is_initialized()
        return super()._step(tensordict)


@contextmanager
def collecting(kind: str, policy: Any, **options: Any) -> Iterator[Any]:
    """Yield a collector of two workers on the CPU, of streams 0 and 1."""
    makers = [lambda: WithoutCuda(None, (), 0), lambda: WithoutCuda(None, (), 1)]
    collector = KINDS[kind](makers, policy, frames_per_batch=28, **options)
    try:
        yield collector
    finally:
        collector.shutdown()


def check_actions(kind: str, collector: Any, weight: torch.Tensor) -> None:
    """Check that batches begun after this call are on the CPU, with the actions of `weight`."""
    for batch in drained(kind, collector):
        assert leaves_on(batch) == {CPU} and torch.equal(batch["action"], acted(batch, weight))


@both
@pytest.mark.parametrize("form", ["module", "TensorDict", "state"])
def test_weights_are_pushed_from_a_learner_on_the_device(device: torch.device, kind: str, form: str) -> None:
    learner = linear().to(device)
    with collecting(kind, linear()) as collector:
        check_actions(kind, collector, WEIGHT)
        for factor in (2.0, -1.0):
            with torch.no_grad():
                learner.weight.copy_(WEIGHT * factor)
            given = {
                "module": lambda: learner,
                "TensorDict": lambda: TensorDict.from_module(learner),
                "state": lambda: learner.state_dict(),
            }[form]()
            collector.update_policy_weights_(given)
            check_actions(kind, collector, WEIGHT * factor)
    assert learner.weight.device == device


@both
def test_the_learners_own_module_is_copied_to_the_workers(device: torch.device, kind: str) -> None:
    learner = linear().to(device)
    with collecting(kind, learner, policy_device="cpu") as collector:
        check_actions(kind, collector, WEIGHT)
        with torch.no_grad():
            learner.weight.mul_(3)
        check_actions(kind, collector, WEIGHT * 3)
        collector.update_policy_weights_()
        with torch.no_grad():
            learner.weight.zero_()
        collector.update_policy_weights_()
        check_actions(kind, collector, WEIGHT * 0)
    assert learner.weight.device == device


def test_tensors_of_a_placed_policy_are_sent_on_the_cpu(device: torch.device) -> None:
    learner = linear().to(device)
    learner.register_buffer("scale", torch.ones(2, device=device))
    learner.tied = learner.weight
    sent = PickledPolicy.of({"module": learner, "alone": learner.weight.detach()}, None, placed=True).load()
    assert {tensor.device.type for tensor in [*sent["module"].state_dict().values(), sent["alone"]]} == {
        "cpu"
    }
    assert torch.equal(sent["module"].weight, learner.weight.cpu()) and sent["module"].weight.requires_grad
    assert sent["module"].tied is sent["module"].weight and not sent["alone"].requires_grad
    assert learner.weight.device == device


def test_a_training_on_the_device_steers_the_workers(device: torch.device) -> None:
    learner = linear().to(device)
    optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60, device=device),
        sampler=PrioritizedSampler(60, alpha=1.0, beta=1.0),
        batch_size=32,
    )
    with collecting("sync", linear(), total_frames=140, cat_results="stack") as collector:
        collected = []
        for number, batch in enumerate(collector):
            assert torch.equal(batch["action"], acted(batch, WEIGHT - number))
            collected.append(batch)
            buffer.extend(batch.reshape(-1))
            sample = buffer.sample()
            assert leaves_on(sample) == {device}
            optimizer.zero_grad()
            learner.weight.sum().backward()  # each step subtracts one from every weight
            optimizer.step()
            sample["td_error"] = sample["action"].abs().sum(-1) + 1
            buffer.update_tensordict_priority(sample)
            collector.update_policy_weights_(TensorDict.from_module(learner))
    assert len(buffer) == 60 and buffer.stats().priorities_dropped == 0
    check_stream(torch.cat(collected, -1).exclude("collector"), 70, (0, 1))


def test_environments_in_processes_stay_on_the_cpu_where_the_policy_is_not(device: torch.device) -> None:
    net = linear().to(device)
    env = ParallelEnv(2, [lambda: WithoutCuda(None, (), 0), lambda: WithoutCuda(None, (), 1)])

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", net(tensordict["observation"].to(device)).to(CPU))

    try:
        with torch.no_grad():
            batch = env.rollout(14, policy, break_when_any_done=False)
    finally:
        env.close()
    assert leaves_on(batch) == {CPU} and torch.equal(batch["action"], acted(batch))
    check_stream(batch, 14, (0, 1))
