"""The parts and batches of a collector are on the requested devices, and no device changes the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl._arrays.tensordicts import flatten
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.data.postprocs import MultiStep
from gleanrl.envs import GymEnv, GymWrapper
from tests.devices.counting import WEIGHT, Counter, acted, check_stream, leaves_on, linear
from tests.fakes import OracleEnv, Script

D = "the device under test"
CPU = torch.device("cpu")
SPELLINGS: dict[str, Callable[[torch.device], Any]] = {
    "str": str,
    "device": lambda device: device,
    "type": lambda device: device.type,
}
USUAL = [{"device": D}, {"policy_device": D}, {"policy_device": D, "storing_device": D}]
MOVING = [{"policy_device": D}, {"device": D}, {"policy_device": D, "env_device": D}]
PLACES: list[tuple[dict[str, str], str, str | None]] = [
    # arguments, device of the batches' tensors, `device` attribute of the batches
    ({"device": D}, D, D),
    ({"policy_device": D}, "cpu", None),
    ({"policy_device": D, "storing_device": "cpu"}, "cpu", "cpu"),
    ({"policy_device": D, "storing_device": D}, D, D),
    ({"policy_device": D, "env_device": D}, D, D),
    ({"policy_device": D, "env_device": D, "storing_device": "cpu"}, "cpu", "cpu"),
    ({"policy_device": D, "env_device": "cpu", "storing_device": D}, D, D),
    ({"policy_device": "cpu", "env_device": D, "storing_device": "cpu"}, "cpu", "cpu"),
    ({"policy_device": "cpu", "env_device": D, "storing_device": D}, D, D),
    ({"device": D, "storing_device": "cpu"}, "cpu", "cpu"),
    ({"device": D, "env_device": "cpu"}, D, D),
    ({"device": D, "policy_device": "cpu"}, D, D),
    ({"device": "cpu", "policy_device": D}, "cpu", "cpu"),
    ({"storing_device": D, "policy_device": "cpu"}, D, D),
]


def make(env: Any, policy: Any = None, frames: int = 14, **kwargs: Any) -> SyncDataCollector:
    return SyncDataCollector(env, policy, frames_per_batch=frames, **kwargs)


def named(arguments: dict[str, str], device: torch.device, spell: Any = str) -> dict[str, Any]:
    """Return arguments with the device in place of its name."""
    return {name: spell(device) if value == D else value for name, value in arguments.items()}


def equal(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Return whether batches on any devices are equal bit for bit."""
    ours, theirs = flatten(one), flatten(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(leaf.cpu(), theirs[path].cpu()) for path, leaf in ours.items()
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("arguments", "where", "tag"), PLACES, ids=lambda value: str(value))
def test_batches_are_where_they_were_wanted(
    device: torch.device, arguments: dict[str, str], where: str, tag: str | None, spelling: str
) -> None:
    collector = make(Counter(), linear(), total_frames=28, **named(arguments, device, SPELLINGS[spelling]))
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(14,), (14,)]
    check_stream(batches[0], 14)
    for batch in batches:
        place = device if where == D else CPU
        assert leaves_on(batch) == {place}
        assert batch.device == (None if tag is None else place)
        assert torch.equal(batch["action"].cpu(), acted(batch))
        assert batch["collector", "traj_ids"].dtype is torch.int64
    assert batches[1]["observation"][0].tolist() == [0, 4, 2] and not batches[1]["done"].any()
    ids = [batch["collector", "traj_ids"].tolist() for batch in batches]
    assert ids[0][-1] == ids[1][0] == 4 and ids[1][-1] == 9


@pytest.mark.parametrize("batch_size", [(), (2,)])
@pytest.mark.parametrize("there", [False, True], ids=["policy on the CPU", "policy on the device"])
@pytest.mark.parametrize("arguments", MOVING)
def test_a_policy_moves_if_it_has_to(
    device: torch.device, arguments: dict[str, str], there: bool, batch_size: tuple[int, ...]
) -> None:
    policy = linear().to(device if there else "cpu")
    collector = make(Counter(None, batch_size), policy, **named(arguments, device))
    batch = collector.next()
    assert batch is not None and batch.device is None, "next() clears what the batch says of its device"
    check_stream(batch, 14 // max(1, batch.ndim), range(batch.ndim))  # type: ignore[arg-type]
    assert torch.equal(batch["action"].cpu(), acted(batch))
    assert {p.device for p in policy.parameters()} == {device if there else CPU}, (
        "the user's stays where it is"
    )
    ran = collector.policy.parameters()
    assert {p.device for p in ran} == {device}
    assert collector.policy_device == device
    collector.shutdown()


def test_environment_and_policy_on_the_device_need_no_arguments(device: torch.device) -> None:
    collector = make(Counter(device, (2,)), linear().to(device), total_frames=14)
    (batch,) = collector
    assert leaves_on(batch) == {device} and batch.device == device
    assert collector.env_device == device == collector.storing_device and collector.policy_device is None
    check_stream(batch, 7, (0, 1))


@pytest.mark.parametrize("arguments", MOVING)
@pytest.mark.parametrize("env", ["single", "vector"])
def test_gymnasium_batches_are_equal_on_every_device(
    device: torch.device, arguments: dict[str, str], env: str
) -> None:
    def build(**kwargs: Any) -> SyncDataCollector:
        made = GymEnv("CartPole-v1", num_envs=2 if env == "vector" else 0, categorical_action_encoding=True)
        torch.manual_seed(0)
        collector = make(made, Choose(), 60, total_frames=120, **kwargs)
        collector.set_seed(3)
        return collector

    for found, expected in zip(build(**named(arguments, device)), build(), strict=True):
        assert equal(found, expected)
        assert found["next", "done"].any() and found["action"].unique().tolist() == [0, 1]


class Choose(nn.Module):
    """Pushes the pole in the direction of its fall, without arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the action."""
        return (observation[..., 2] < self.threshold).long()


def test_oracle_of_gymnasium_is_collected_on_the_device(device: torch.device) -> None:
    env = GymWrapper(OracleEnv(stream=2, script=Script(lengths=(3, 2), ending="mixed")), device=device)
    (batch,) = make(env, linear().to(device), 8, total_frames=8)
    expected = [[2, 0, 0], [2, 0, 1], [2, 0, 2], [2, 1, 0], [2, 1, 1], [2, 2, 0], [2, 2, 1], [2, 2, 2]]
    assert leaves_on(batch) == {device} and batch["observation"].tolist() == expected
    for flag, at in (("done", {2, 4, 7}), ("terminated", {2, 7}), ("truncated", {4, 7})):
        assert batch["next", flag].squeeze(-1).tolist() == [t in at for t in range(8)]
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert torch.equal(batch["action"].cpu(), acted(batch))


def learning(place: torch.device, there: bool, **kwargs: Any) -> tuple[nn.Linear, SyncDataCollector]:
    policy = linear().to(place if there else "cpu")
    return policy, make(Counter(place if there and not kwargs else None, (2,)), policy, **kwargs)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("arguments", [{"policy_device": D}, {"device": D}, {}])
def test_changes_by_the_learner_apply_to_the_next_batch(
    device: torch.device, there: bool, arguments: dict[str, str]
) -> None:
    policy, collector = learning(device, there, **named(arguments, device))
    for factor in (1.0, 2.0, -3.0, 0.0):
        with torch.no_grad():
            policy.weight.copy_(WEIGHT * factor)
        batch = collector.next()
        assert batch is not None and torch.equal(batch["action"].cpu(), acted(batch, WEIGHT * factor))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.5)
    for _ in range(2):
        policy(batch["observation"].to(policy.weight.device)).sum().backward()
        optimizer.step()
        batch = collector.next()
        assert torch.allclose(batch["action"].cpu(), acted(batch, policy.weight.detach().cpu()), atol=1e-4)
    assert batch["action"].any()
    collector.shutdown()


@pytest.mark.parametrize("place", ["cpu", D])
@pytest.mark.parametrize(
    "form",
    [lambda net: net, TensorDict.from_module, lambda net: net.state_dict(), lambda net: None],
    ids=["module", "TensorDict", "state dictionary", "nothing"],
)
@pytest.mark.parametrize("there", [False, True])
def test_weights_are_pushed_from_anywhere(device: torch.device, there: bool, form: Any, place: str) -> None:
    policy, collector = learning(device, there, policy_device=device)
    given = linear(WEIGHT * 5).to(device if place == D else "cpu")
    weights = form(given)
    if weights is None:
        policy.load_state_dict(given.state_dict())
    collector.next()
    collector.update_policy_weights_(weights)
    for _ in range(2):
        batch = collector.next()
        assert batch is not None and torch.equal(batch["action"].cpu(), acted(batch, WEIGHT * 5))
    assert collector.policy_version == 1
    assert {p.device for p in collector.policy.parameters()} == {device}
    collector.shutdown()


def test_a_copy_whose_weights_were_taken_over_changes_by_hand_only(device: torch.device) -> None:
    policy, collector = learning(device, False, policy_device=device)
    copied = collector.policy.weight is not policy.weight
    assert copied == (device.type != "cpu")
    collector.update_policy_weights_()
    with torch.no_grad():
        policy.weight.zero_()
    factor = 1.0 if copied else 0.0
    batch = collector.next()
    assert batch is not None and torch.equal(batch["action"].cpu(), acted(batch, WEIGHT * factor))
    collector.shutdown()


@pytest.mark.parametrize("arguments", USUAL)
@pytest.mark.parametrize("random", [{"policy": None}, {"policy": linear(), "init_random_frames": 28}])
def test_random_actions_are_reproducible(
    device: torch.device, arguments: dict[str, str], random: dict[str, Any]
) -> None:
    def build() -> list[TensorDictBase]:
        torch.manual_seed(4)
        env, frames = Counter(None, (2,)), {"init_random_frames": random.get("init_random_frames")}
        return list(make(env, random["policy"], total_frames=42, **frames, **named(arguments, device)))

    first, second = build(), build()
    assert len(first) == 3 and all(map(equal, first, second)), "torch.manual_seed decides"
    check_stream(first[0], 7, (0, 1))
    assert not torch.equal(first[0]["action"], first[1]["action"])
    by_policy = torch.equal(first[2]["action"].cpu(), acted(first[2]))
    assert by_policy is (random["policy"] is not None)
    assert not torch.equal(first[1]["action"].cpu(), acted(first[1]))


@pytest.mark.parametrize("arguments", USUAL)
def test_trajectories_are_split_on_the_device(device: torch.device, arguments: dict[str, str]) -> None:
    places = named(arguments, device)
    (found,), (expected,) = (
        list(make(Counter(None, (2,)), linear(), 14, total_frames=14, split_trajs=True, **given))
        for given in (places, {})
    )
    assert found.shape == expected.shape == (5, 4) and equal(found, expected)
    assert leaves_on(found) == {device if "policy_device" not in places or len(places) == 2 else CPU}
    assert int(found["collector", "mask"].sum()) == 14


@pytest.mark.parametrize("storing", ["cpu", D])
def test_a_postproc_runs_where_batches_are_stored(device: torch.device, storing: str) -> None:
    place = device if storing == D else CPU
    seen, moved = [], []

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(2.0))

        def to(self, *args: Any, **kwargs: Any) -> Scale:
            moved.append(args)
            return super().to(*args, **kwargs)

        def forward(self, batch: TensorDictBase) -> TensorDictBase:
            seen.append(leaves_on(batch))
            return batch.set("twice", batch["next", "reward"] * self.factor)

    kwargs = {"policy_device": device, "storing_device": place, "total_frames": 28}
    for batch in make(Counter(), linear(), postproc=Scale(), **kwargs):
        assert torch.equal(batch["twice"], 2 * batch["next", "reward"]) and leaves_on(batch) == {place}
    assert seen == [{place}] * 2 and len(moved) == 1
    steps = MultiStep(gamma=0.5, n_steps=2)
    (found,), (expected,) = (
        list(make(Counter(), linear(), 14, total_frames=14, postproc=steps, **given))
        for given in ({"policy_device": device, "storing_device": place}, {})
    )
    assert equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"max_frames_per_traj": 2},
        {"reset_at_each_iter": True},
        {"set_truncated": True},
        {"trajs_per_batch": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("arguments", USUAL)
def test_options_give_equal_batches_on_every_device(
    device: torch.device, options: dict[str, Any], arguments: dict[str, str]
) -> None:
    frames = {"total_frames": 42, **options}
    found = list(make(Counter(None, (2,)), linear(), **frames, **named(arguments, device)))
    expected = list(make(Counter(None, (2,)), linear(), **frames))
    assert len(found) == len(expected) > 0 and all(map(equal, found, expected))


@pytest.mark.parametrize("storage", ["cpu", D])
@pytest.mark.parametrize("extend", [True, False])
@pytest.mark.parametrize("arguments", USUAL)
def test_collector_fills_a_buffer(
    device: torch.device, arguments: dict[str, str], storage: str, extend: bool
) -> None:
    place = device if storage == D else CPU
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, device=place), batch_size=8)
    collector = make(
        Counter(),
        linear(),
        total_frames=28,
        replay_buffer=buffer,
        extend_buffer=extend,
        **named(arguments, device),
    )
    assert list(collector) == [None, None] and len(buffer) == 28
    stored = buffer[:]
    check_stream(stored, 28)
    assert leaves_on(stored) == {place} == leaves_on(buffer.sample())
    assert torch.equal(stored["action"].cpu(), acted(stored))


@pytest.mark.parametrize("arguments", [{"device": D}, {"policy_device": D}])
def test_collector_continues_from_a_state(device: torch.device, arguments: dict[str, str]) -> None:
    first, second = (make(Counter(None, (2,)), linear(), **named(arguments, device)) for _ in range(2))
    first.update_policy_weights_(linear(WEIGHT * 7))
    first.next()
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        expected, found = first.next(), second.next()
        assert equal(expected, found) and torch.equal(found["action"].cpu(), acted(found, WEIGHT * 7))
    for collector in (first, second):
        collector.shutdown()


@pytest.mark.parametrize("arguments", USUAL)
def test_resets_reach_the_rows_that_a_mask_on_the_device_names(
    device: torch.device, arguments: dict[str, str]
) -> None:
    collector = make(Counter(None, (2,)), linear(), 4, **named(arguments, device))
    collector.next()
    for index in (torch.tensor([False, True], device=device), torch.tensor([1], device=device), 1):
        collector.reset(index)
        batch = collector.next()
        assert batch is not None and batch["observation"][1, 0, 2] == 0
        assert batch["observation"][0, 0, 2] != 0 or batch["observation"][0, 0, 1] > 0
        assert batch["collector", "traj_ids"][0, 0] != batch["collector", "traj_ids"][1, 0]
    collector.shutdown()
