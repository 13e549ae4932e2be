"""Collectors step simulators on the CPU and move whole batches to the device of the environment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import LazyTensorStorage, TensorDictReplayBuffer
from gleanrl.data.specs import Unbounded
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv
from gleanrl.envs.transforms import (
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    UnaryTransform,
    VecNorm,
)
from gleanrl.envs.transforms.base import Transform
from tests.devices.counting import check_same, leaves_on

CPU = torch.device("cpu")


def cartpole(device: Any = None, **kwargs: Any) -> GymEnv:
    return GymEnv("CartPole-v1", device=device, **kwargs)


def chain() -> Compose:
    return Compose(
        StepCounter(max_steps=9),
        InitTracker(),
        RewardSum(),
        ObservationNorm(0.0, 2.0, in_keys=["observation"]),
        RewardScaling(1.0, 0.5),
        ClipTransform(["observation"], low=-1.0, high=1.0),
        RenameTransform(["observation"], ["seen"], create_copy=True),
        CatTensors(["seen", "observation"], "both", del_keys=False),
        CatFrames(2, dim=-1, in_keys=["seen"]),
        DoubleToFloat(),
    )


MAKERS: dict[str, Callable[[Any], Any]] = {
    "one": cartpole,
    "transformed": lambda device: TransformedEnv(cartpole(device), chain()),
    "vector": lambda device: cartpole(device, num_envs=2),
    "serial": lambda device: SerialEnv(2, cartpole, device=device),
    "members of the device": lambda device: SerialEnv(2, lambda: cartpole(device)),
    "transformed members": lambda device: SerialEnv(
        2, lambda: TransformedEnv(cartpole(), chain()), device=device
    ),
    "transformed serial": lambda device: TransformedEnv(SerialEnv(2, cartpole, device=device), chain()),
    "parallel": lambda device: ParallelEnv(2, cartpole, device=device),
    "transformed parallel": lambda device: TransformedEnv(ParallelEnv(2, cartpole, device=device), chain()),
}


class Upright(nn.Module):
    """Pushes the pole in the direction of its fall, and checks the device of its input."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.sign = device, nn.Parameter(torch.ones(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        assert observation.device == self.device == self.sign.device
        right = (observation[..., 2] * self.sign > 0).long()
        return torch.nn.functional.one_hot(right, 2)


def collected(
    make: Callable[[Any], Any], device: torch.device, moved: bool, **kwargs: Any
) -> tuple[Any, list]:
    """Return a seeded collector and its batches; its environment is made on the device, or moved there."""
    env = make(None if moved else device)
    given = {"device": device} if moved else {}
    policy = Upright(device)
    if not moved:
        policy.to(device)
    options = {"frames_per_batch": 40, "total_frames": 120, **given, **kwargs}
    collector = SyncDataCollector(env, policy, **options)
    collector.set_seed(3)
    return collector, list(collector)


def check_all_same(found: list[TensorDictBase], expected: list[TensorDictBase], device: torch.device) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        check_same(mine, theirs.cpu(), device)


@pytest.mark.parametrize("moved", [False, True], ids=["made there", "moved"])
@pytest.mark.parametrize("name", MAKERS)
def test_batches_equal_the_cpu(device: torch.device, name: str, moved: bool) -> None:
    collector, batches = collected(MAKERS[name], device, moved)
    env = collector.env
    assert (collector.plan.stepper.device or CPU) == CPU
    assert env.device == device == collector.env_device == collector.storing_device
    for batch in batches:
        assert batch.device == device and leaves_on(batch) == {device}
    assert int(batches[-1]["next", "done"].sum()) > 0
    there = env.rollout(12, Upright(device).to(device), break_when_any_done=False)
    assert there.device == device and leaves_on(there) == {device}
    collector.shutdown()
    expected, plain = collected(MAKERS[name], CPU, False)
    check_all_same(batches, plain, device)
    expected.shutdown()


def test_rollouts_between_batches_keep_transforms_on_their_device(device: torch.device) -> None:
    """The tensors of a transform move to the device where they are used."""
    env, other = TransformedEnv(cartpole(device), chain()), TransformedEnv(cartpole(), chain())
    policy = Upright(device).to(device)
    collector = SyncDataCollector(env, policy, frames_per_batch=10, total_frames=-1)
    for turn in range(3):
        with pytest.warns(UserWarning, match="outside the collector") if turn else nullcontext():
            batch = collector.next()
        assert leaves_on(batch) == {device} == leaves_on(env.rollout(4))
    env.set_seed(1)
    other.set_seed(1)
    assert bool((env.rollout(9, policy).cpu() == other.rollout(9, Upright(CPU))).all())
    collector.shutdown()


FOLLOWING: dict[str, Callable[[], Any]] = {
    "StepCounter": StepCounter,
    "RenameTransform": lambda: Compose(
        StepCounter(), RenameTransform(["observation"], ["seen"], create_copy=True)
    ),
    "CatFrames": lambda: CatFrames(2, dim=-1, in_keys=["observation"]),
    "RewardSum": lambda: RewardSum(reward_spec=True),
    "a clipped RewardSum": lambda: Compose(RewardSum(), ClipTransform(["episode_reward"], low=0.0, high=3.0)),
    "InitTracker": InitTracker,
}


@pytest.mark.filterwarnings("ignore:.*outside the collector")
@pytest.mark.parametrize("name", FOLLOWING)
def test_manual_steps_between_batches_equal_the_cpu(device: torch.device, name: str) -> None:
    """Steps that continue from a batch are equal for a batch of the device and one of the CPU."""

    def used(home: torch.device) -> list[TensorDictBase]:
        env = TransformedEnv(SerialEnv(2, cartpole, device=home), FOLLOWING[name]())
        policy = Upright(home).to(home)
        collector = SyncDataCollector(env, policy, frames_per_batch=12, total_frames=-1)
        collector.set_seed(0)
        last = collector.next()[:, -1].exclude("collector").to(home)
        seen = [env.step(last.exclude("next"))]
        root = seen[0]["next"].exclude("reward")
        root["_reset"] = torch.tensor([[True], [False]], device=home)
        seen.append(env.reset(root))
        seen.append(env.rollout(3, policy, auto_reset=False, tensordict=root.exclude("_reset")))
        env.rollout(3, policy)
        collector.reset(0)
        seen.append(collector.next().exclude("collector"))
        collector.shutdown()
        assert all(leaves_on(data) == {home} for data in seen)
        return seen

    check_all_same(used(device), used(CPU), device)


def test_overridden_make_stepper_is_called(device: torch.device) -> None:
    asked = []

    class Own(GymEnv):
        def make_stepper(self, *args: Any) -> Any:
            asked.append(self.device)
            return super().make_stepper(*args)

    (batch,) = SyncDataCollector(
        Own("CartPole-v1"), Upright(device), frames_per_batch=8, total_frames=8, device=device
    )
    assert asked == [device] and leaves_on(batch) == {device}


def test_buffers_of_a_transform_stay_the_users_tensors(device: torch.device) -> None:
    norm = ObservationNorm(torch.zeros(4), torch.ones(4), in_keys=["observation"])
    env = TransformedEnv(cartpole(device), norm.to(device))
    loc = norm.loc
    collector = SyncDataCollector(env, frames_per_batch=5, total_frames=-1)
    for shift in (0.0, 100.0, 200.0):
        batch = collector.next()
        assert norm.loc is loc and bool(((batch["next", "observation"] - shift).abs() < 10).all())
        loc += 100.0
    collector.shutdown()


def test_random_frames_precede_the_policys(device: torch.device) -> None:
    collector, batches = collected(cartpole, device, True, init_random_frames=40)
    followed = [torch.equal(b["action"].argmax(-1), (b["observation"][:, 2] > 0).long()) for b in batches]
    assert followed == [False, True, True]
    collector.shutdown()
    collector = SyncDataCollector(cartpole(device), frames_per_batch=40, total_frames=80)
    assert all(leaves_on(batch) == {device} for batch in collector)


def test_batches_are_stored_on_the_storing_device(device: torch.device) -> None:
    for storing in (CPU, device):
        collector, batches = collected(cartpole, device, True, storing_device=storing)
        assert all(batch.device == storing and leaves_on(batch) == {storing} for batch in batches)
        collector.shutdown()


def test_collector_fills_a_buffer(device: torch.device) -> None:
    for home in (CPU, device):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(200, device=home), batch_size=8)
        collector, batches = collected(cartpole, device, True, replay_buffer=buffer)
        assert batches == [None] * 3 and len(buffer) == 120 and leaves_on(buffer.sample()) == {home}
        _, plain = collected(cartpole, CPU, False)
        whole = torch.cat(plain).select("observation", "action")
        assert bool((buffer[:].select("observation", "action").cpu() == whole).all())
        collector.shutdown()


def test_collector_continues_from_a_state(device: torch.device) -> None:
    whole, batches = collected(MAKERS["transformed"], device, True)
    whole.shutdown()
    env = MAKERS["transformed"](None)
    first = SyncDataCollector(env, Upright(device), frames_per_batch=40, total_frames=120, device=device)
    first.set_seed(3)
    first.next()
    state = first.state_dict()
    again = SyncDataCollector(
        MAKERS["transformed"](None), Upright(device), frames_per_batch=40, total_frames=120, device=device
    )
    again.load_state_dict(state)
    check_all_same(list(again), batches[1:], device)
    first.shutdown()
    again.shutdown()


@pytest.mark.parametrize("name", ["serial", "transformed serial", "vector"])
def test_resets_and_limits_work_with_host_stepping(device: torch.device, name: str) -> None:
    given = {"set_truncated": True, "split_trajs": True, "total_frames": -1}
    if name != "transformed serial":  # it has its own limit
        given["max_frames_per_traj"] = 5
    collector = SyncDataCollector(
        MAKERS[name](device), Upright(device), frames_per_batch=40, device=device, **given
    )
    collector.reset(seed=4)
    for mask in ([True, False], [False, True]):
        batch = collector.next()
        assert leaves_on(batch) == {device} and batch.shape[1] <= 9
        collector.reset(torch.tensor(mask, device=device))
    collector.shutdown()


def test_workers_step_on_the_cpu(device: torch.device) -> None:
    collector = MultiSyncDataCollector(
        [cartpole, cartpole], Upright(device), frames_per_batch=40, total_frames=80, device=device
    )
    for batch in collector:
        assert batch.device == device and leaves_on(batch) == {device}
        followed = (batch["observation"][..., 2] > 0).long()
        assert torch.equal(batch["action"].argmax(-1), followed)
    collector.shutdown()


@pytest.mark.parametrize(
    "transform",
    [
        lambda device: UnaryTransform(["observation"], ["twice"], fn=lambda x: 2 * x),
        lambda device: DeviceCastTransform(device),
        lambda device: VecNorm(in_keys=["observation"]),
        lambda device: TensorDictPrimer(state=Unbounded((3,), device=device)),
        lambda device: Compose(StepCounter(), Mine()),
    ],
    ids=["a function", "another device", "shared sums", "states", "a user's"],
)
def test_transforms_that_need_the_device_step_there(device: torch.device, transform: Any) -> None:
    env = TransformedEnv(cartpole(device), transform(device))
    collector = SyncDataCollector(env, Upright(device).to(device), frames_per_batch=20, total_frames=20)
    assert (collector.plan.stepper.device or CPU) == device
    (batch,) = collector
    assert leaves_on(batch) == {device}


class Mine(Transform):
    """A user's transform that counts on its device."""

    def _call(self, tensordict: Any) -> Any:
        return tensordict.set("home", tensordict["observation"][..., :1] * 0 + 1)

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, spec: Any) -> Any:
        spec["home"] = Unbounded((1,), device=spec.device)
        return spec
