"""Collector workers run the policy on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import LengthError
from tests.devices.counting import WEIGHT, Counter, acted, check_stream, drained, leaves_on, linear

D = "the device under test"
CPU = torch.device("cpu")
KINDS = {"sync": MultiSyncDataCollector, "async": MultiaSyncDataCollector}
PLACES: list[tuple[dict[str, str], str]] = [
    # arguments, device of the batches
    ({"policy_device": D, "storing_device": "cpu"}, "cpu"),
    ({"policy_device": D, "storing_device": D}, D),
    ({"policy_device": D}, "cpu"),
    ({"device": D}, D),
    ({"policy_device": D, "env_device": D, "storing_device": "cpu"}, "cpu"),
]
both = pytest.mark.parametrize("kind", KINDS)


@contextmanager
def collecting(kind: str, policy: Any, frames: int = 28, **kwargs: Any) -> Iterator[Any]:
    """Yield a collector of two workers, of streams 0 and 1."""
    makers = [lambda: Counter(None, (), 0), lambda: Counter(None, (), 1)]
    collector = KINDS[kind](makers, policy, frames_per_batch=frames, **kwargs)
    try:
        yield collector
    finally:
        collector.shutdown()


def named(arguments: dict[str, str], device: torch.device) -> dict[str, Any]:
    return {name: device if value == D else value for name, value in arguments.items()}


@both
@pytest.mark.parametrize(("arguments", "where"), PLACES, ids=str)
@pytest.mark.parametrize("there", [False, True], ids=["policy on the CPU", "policy on the device"])
def test_streams_are_complete_for_every_placement(
    device: torch.device, kind: str, arguments: dict[str, str], where: str, there: bool
) -> None:
    policy = linear().to(device if there else "cpu")
    place = device if where == D else CPU
    with collecting(kind, policy, total_frames=56, **named(arguments, device)) as collector:
        batches = list(collector)
    assert sum(batch.numel() for batch in batches) == 56
    for batch in batches:
        assert leaves_on(batch) == {place} and batch.device in (None, place)
        assert torch.equal(batch["action"].cpu(), acted(batch))
    if kind == "sync":
        whole = torch.cat([batch.cpu() for batch in batches], -1)
        check_stream(whole.exclude("collector"), 28, (0, 1))
        assert not set(whole["collector", "traj_ids"][0].tolist()) & set(
            whole["collector", "traj_ids"][1].tolist()
        )
    else:
        for batch in batches:
            assert batch["observation"][:, 0].unique().numel() == 1, "a batch is one worker's"


@both
@pytest.mark.parametrize("arguments", [{"policy_device": D, "storing_device": "cpu"}, {"device": D}])
@pytest.mark.parametrize("form", ["nothing", "module", "TensorDict", "TensorDict on the CPU", "state"])
def test_given_weights_are_seen_by_the_next_batch(
    device: torch.device, kind: str, arguments: dict[str, str], form: str
) -> None:
    policy = linear().to(device)
    given = {
        "nothing": lambda: None,
        "module": lambda: linear(WEIGHT * 0).to(device),
        "TensorDict": lambda: TensorDict.from_module(linear(WEIGHT * 0).to(device)),
        "TensorDict on the CPU": lambda: TensorDict.from_module(linear(WEIGHT * 0)),
        "state": lambda: linear(WEIGHT * 0).to(device).state_dict(),
    }[form]()
    with collecting(kind, policy, **named(arguments, device)) as collector:
        first = collector.next()
        assert first is not None and torch.equal(first["action"].cpu(), acted(first))
        if given is None:
            with torch.no_grad():
                policy.weight.zero_()
        collector.update_policy_weights_(given)
        for batch in drained(kind, collector):
            assert not batch["action"].any() and batch["observation"].any()
        assert collector.policy_version == 1


@both
@pytest.mark.parametrize("arguments", [{"policy_device": D, "storing_device": "cpu"}, {"device": D}])
def test_changes_by_the_learner_are_followed(
    device: torch.device, kind: str, arguments: dict[str, str]
) -> None:
    policy = linear().to(device)
    with collecting(kind, policy, **named(arguments, device)) as collector:
        collector.next()
        for factor in (2.0, 0.0, -1.0):
            with torch.no_grad():
                policy.weight.copy_(WEIGHT * factor)
            for batch in drained(kind, collector):
                assert torch.equal(batch["action"].cpu(), acted(batch, WEIGHT * factor))


@both
def test_after_the_first_update_weights_go_by_hand_only(device: torch.device, kind: str) -> None:
    policy = linear().to(device)
    with collecting(kind, policy, policy_device=device, storing_device="cpu") as collector:
        collector.update_policy_weights_()
        with torch.no_grad():
            policy.weight.zero_()
        for batch in drained(kind, collector):
            assert torch.equal(batch["action"].cpu(), acted(batch))
        collector.update_policy_weights_()
        for batch in drained(kind, collector):
            assert not batch["action"].any()


@pytest.mark.parametrize(("cat", "shape"), [("stack", (2, 14)), (0, (28,)), (-1, (28,)), (None, (2, 14))])
@pytest.mark.parametrize("storing", ["cpu", D])
def test_cat_results_determines_the_shape(
    device: torch.device, cat: Any, shape: tuple[int, ...], storing: str
) -> None:
    place = device if storing == D else CPU
    with collecting(
        "sync", linear(), policy_device=device, storing_device=place, cat_results=cat, total_frames=28
    ) as collector:
        (batch,) = collector
    assert tuple(batch.shape) == shape and leaves_on(batch) == {place}
    check_stream(batch.exclude("collector").reshape(2, 14), 14, (0, 1))


@both
def test_devices_may_be_given_by_worker(device: torch.device, kind: str) -> None:
    places = {
        "policy_device": [device, "cpu"],
        "storing_device": ["cpu", "cpu"],
        "env_device": ["cpu", device],
    }
    with collecting(kind, linear(), total_frames=56, **places) as collector:
        for batch in collector:
            assert leaves_on(batch) == {CPU} and torch.equal(batch["action"].cpu(), acted(batch))
    with pytest.raises(LengthError), collecting(kind, linear(), policy_device=[device]):
        pass


@both
def test_batches_of_workers_on_different_devices_are_joined_on_the_cpu(
    device: torch.device, kind: str
) -> None:
    stores = {"policy_device": device, "storing_device": ["cpu", device]}
    with collecting(kind, linear(), total_frames=56, **stores) as collector:
        for batch in collector:
            assert leaves_on(batch) == {CPU}
            assert torch.equal(batch["action"].cpu(), acted(batch))


@both
@pytest.mark.parametrize("policy", ["none", "init_random_frames"])
def test_random_frames_are_drawn_by_workers(device: torch.device, kind: str, policy: str) -> None:
    given = linear() if policy != "none" else None
    random = {"init_random_frames": 28} if policy != "none" else {}
    with collecting(kind, given, device=device, total_frames=84, **random) as collector:
        batches = list(collector)
    assert all(leaves_on(batch) == {device} for batch in batches)
    drawn = [not torch.equal(batch["action"].cpu(), acted(batch)) for batch in batches]
    # The batch that was begun first may arrive after another worker's batch.
    assert sum(drawn) == (3 if given is None else 1) and (drawn[0] or kind == "async")


@both
@pytest.mark.parametrize("storage", ["cpu", D])
def test_workers_fill_a_buffer(device: torch.device, kind: str, storage: str) -> None:
    place = device if storage == D else CPU
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, device=place), batch_size=8)
    places = {"policy_device": device, "storing_device": "cpu"}
    with collecting(kind, linear(), replay_buffer=buffer, total_frames=56, **places) as collector:
        assert set(collector) == {None}
    stored = buffer[:]
    assert len(buffer) == 56 and leaves_on(stored) == {place} == leaves_on(buffer.sample())
    assert torch.equal(stored["action"].cpu(), acted(stored))


@both
def test_policy_factory_runs_on_the_workers_device(device: torch.device, kind: str) -> None:
    def factory() -> torch.nn.Module:
        return linear().to(device)

    places = {"policy_device": device, "storing_device": "cpu"}
    with collecting(kind, None, policy_factory=factory, **places) as collector:
        batch = collector.next()
        assert batch is not None and torch.equal(batch["action"].cpu(), acted(batch))
        collector.update_policy_weights_(linear(WEIGHT * 2).to(device))
        for batch in drained(kind, collector):
            assert torch.equal(batch["action"].cpu(), acted(batch, WEIGHT * 2))


def test_split_and_processed_where_they_are_stored(device: torch.device) -> None:
    seen: list[set[torch.device]] = []

    def look(batch: TensorDictBase) -> TensorDictBase:
        seen.append(leaves_on(batch))
        return batch

    with collecting(
        "sync", linear(), device=device, total_frames=28, split_trajs=True, postproc=look
    ) as collector:
        (batch,) = collector
    assert seen == [{device}] and int(batch["collector", "mask"].sum()) == 28
    assert tuple(batch.shape) == (9, 4)
