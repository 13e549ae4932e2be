"""Environments on a device: rollouts, transforms, batches of environments, specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs import EnvBase, TransformedEnv, check_env_specs, step_mdp
from gleanrl.envs.transforms import (
    CatFrames,
    CatTensors,
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    InitTracker,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TimeMaxPool,
    ToTensorImage,
    UnsqueezeTransform,
    VecNorm,
)
from tests.devices.counting import Counter, acted, check_same, check_stream, leaves_on, linear

CPU = torch.device("cpu")
SIZES: list[tuple[int, ...]] = [(), (2,)]


class Frames(EnvBase):
    """Observes uint8 frames ``(4, 4, 3)`` that count up, and ends every fourth step."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(device=device)
        self.observation_spec = Composite(pixels=Bounded(0, 255, (4, 4, 3), dtype=torch.uint8))
        self.action_spec, self.reward_spec = Categorical(2), Unbounded((1,))
        self.register_buffer("clock", torch.zeros((), dtype=torch.uint8, device=self.device))

    def _frame(self) -> dict[str, torch.Tensor]:
        return {"pixels": self.clock.expand(4, 4, 3).clone()}

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.clock = torch.zeros_like(self.clock)
        return TensorDict(self._frame(), [], device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.clock = self.clock + 1
        out = {"reward": self.clock[None].float(), "done": self.clock[None] == 4}
        return TensorDict({**self._frame(), **out}, [], device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize("size", SIZES)
class TestUserEnvironment:
    """The tensors of a user's environment are on its declared device."""

    def test_all_data_are_on_the_device(self, device: torch.device, size: tuple[int, ...]) -> None:
        env = Counter(device, size)
        assert env.device == device
        for spec in (
            env.full_observation_spec,
            env.full_action_spec,
            env.full_reward_spec,
            env.full_done_spec,
        ):
            assert spec.device == device and {leaf.device for leaf in spec.values(True, True)} == {device}
        root = env.reset()
        for made in (root, env.fake_tensordict(), env.rand_action(root.clone()), env.rand_step(root.clone())):
            assert made.device == device and leaves_on(made) == {device}
        assert env.specs.zero().device == device and env.fake_tensordict()["action"].shape == (*size, 2)
        after = step_mdp(env.rand_step(env.reset()))
        assert leaves_on(after) == {device} and after["observation"][..., 2].eq(1).all()

    def test_specs_hold_on_the_device(self, device: torch.device, size: tuple[int, ...]) -> None:
        check_env_specs(Counter(device, size))

    def test_environment_moves_between_devices(self, device: torch.device, size: tuple[int, ...]) -> None:
        env = Counter(None, size)
        env.reset()
        for spelling in (device, str(device), device.type):
            env = env.to(spelling)
            assert env.device == device and env.reset().device == device
            assert env.action_spec.device == device == env.stream.device
            assert leaves_on(env.rollout(3)) == {device}
        back = env.to("cpu").rollout(2)
        assert leaves_on(back) == {CPU} and back.device == CPU

    def test_rollouts_run_on_the_device(self, device: torch.device, size: tuple[int, ...]) -> None:
        env, policy = Counter(device, size), linear().to(device)
        batch = env.rollout(7, policy, break_when_any_done=False)
        assert batch.device == device and leaves_on(batch) == {device}
        check_stream(batch, 7, tuple(range(max(1, len(size) * 2))))
        assert torch.equal(batch["action"].cpu(), acted(batch))
        assert env.rollout(7, policy).shape == (*size, 3), "it ends with the first episode"

    def test_policy_on_another_device_needs_auto_cast(
        self, device: torch.device, size: tuple[int, ...]
    ) -> None:
        for home, place in ((None, device), (device, "cpu")):
            env, policy = Counter(home, size), linear().to(place)
            batch = env.rollout(3, policy, auto_cast_to_device=True)
            assert leaves_on(batch) == {device if home is not None else CPU}
            assert torch.equal(batch["action"].cpu(), acted(batch))

    def test_gradients_flow(self, device: torch.device, size: tuple[int, ...]) -> None:
        policy = linear().to(device)
        batch = Counter(device, size).rollout(3, policy)
        batch["action"].sum().backward()
        expected = batch["observation"].reshape(-1, 3).sum(0).expand(2, 3)
        assert torch.equal(policy.weight.grad, expected)

    def test_single_steps_run_on_the_device(self, device: torch.device, size: tuple[int, ...]) -> None:
        env = Counter(device, size)
        root, seen = env.reset(), []
        for _ in range(5):
            stepped, root = env.step_and_maybe_reset(env.rand_action(root))
            assert leaves_on(stepped) | leaves_on(root) == {device}
            seen.append(root["observation"].reshape(-1, 3).tolist())
        assert [row[0] for row in seen] == [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]
        if size:
            assert [row[1] for row in seen] == [[1, 0, 1], [1, 0, 2], [1, 0, 3], [1, 1, 0], [1, 1, 1]]

    def test_random_actions_repeat(self, device: torch.device, size: tuple[int, ...]) -> None:
        def draw() -> torch.Tensor:
            torch.manual_seed(3)
            return Counter(device, size).rollout(3)["action"]

        assert torch.equal(draw(), draw()) and draw().unique().numel() > 2


CHAINS: dict[str, Callable[[], Any]] = {
    "StepCounter": lambda: StepCounter(max_steps=2),
    "InitTracker": InitTracker,
    "RewardSum": RewardSum,
    "RewardScaling": lambda: RewardScaling(loc=1.0, scale=2.0),
    "RewardClipping": lambda: RewardClipping(0.0, 2.0),
    "CatFrames": lambda: CatFrames(3, dim=-1, in_keys=["observation"]),
    "CatFrames with copies": lambda: CatFrames(2, dim=-1, in_keys=["observation"], padding="constant"),
    "TimeMaxPool": lambda: TimeMaxPool(in_keys=["observation"], T=2),
    "UnsqueezeTransform": lambda: UnsqueezeTransform(-1, in_keys=["observation"]),
    "CatTensors": lambda: CatTensors(["observation", "observation"], "both", del_keys=False),
    "DTypeCast": lambda: DTypeCastTransform(torch.float32, torch.int64, in_keys=["observation"]),
    "functions": lambda: lambda td: td.set("observation", td["observation"] * 2),
    "many": lambda: Compose(
        InitTracker(), StepCounter(), RewardSum(), CatFrames(2, dim=-1, in_keys=["observation"])
    ),
}
LEARNING: dict[str, Callable[[], Any]] = {
    "ObservationNorm": lambda: ObservationNorm(0.5, 4.0, in_keys=["observation"]),
    "a tensor's ObservationNorm": lambda: ObservationNorm(
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([2.0, 4.0, 8.0]),
        in_keys=["observation"],
        standard_normal=True,
    ),
    "VecNorm": VecNorm,
    "VecNorm of rewards": lambda: VecNorm(in_keys=["reward"], decay=0.9),
}


class TestTransforms:
    """Transformed rollouts equal the CPU's."""

    def both(self, device: torch.device, size: tuple[int, ...], chain: Any, way: str) -> list[TensorDictBase]:
        found: list[TensorDictBase] = []
        for place in (device, CPU):
            if way == "moved":
                env = TransformedEnv(Counter(None, size), chain()).to(place)
            else:
                env = TransformedEnv(Counter(place, size), chain())
            assert env.device == place == env.action_spec.device == env.reset().device
            if way == "collected":
                kwargs = {"frames_per_batch": 16, "total_frames": 16, "device": place}
                found += list(SyncDataCollector(env, None, **kwargs))
                found[-1].pop("action")  # drawn on the device
            else:
                found.append(env.rollout(8, break_when_any_done=False).exclude("action"))
        return found

    @pytest.mark.parametrize("way", ["there", "moved", "collected"])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("chain", CHAINS)
    def test_transformed_data_equal_the_cpu_exactly(
        self, device: torch.device, chain: str, size: tuple[int, ...], way: str
    ) -> None:
        found, expected = self.both(device, size, CHAINS[chain], way)
        check_same(found, expected, device)

    @pytest.mark.parametrize("way", ["there", "moved", "collected"])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("chain", LEARNING)
    def test_learning_transforms_equal_the_cpu_up_to_rounding(
        self, device: torch.device, chain: str, size: tuple[int, ...], way: str
    ) -> None:
        found, expected = self.both(device, size, LEARNING[chain], way)
        check_same(found, expected, device, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("chain", ["StepCounter", "RewardSum", "CatFrames", "many"])
    def test_transformed_specs_hold(self, device: torch.device, chain: str) -> None:
        check_env_specs(TransformedEnv(Counter(device, (2,)), CHAINS[chain]()))

    def test_images_are_stacked_on_the_device(self, device: torch.device) -> None:
        chain = Compose(ToTensorImage(in_keys=["pixels"]), CatFrames(2, dim=-3, in_keys=["pixels"]))
        batch = TransformedEnv(Frames(device), chain).rollout(4, break_when_any_done=False)
        assert leaves_on(batch) == {device} and batch["pixels"].dtype is torch.float32
        expected = torch.tensor([[0, 0], [0, 1], [1, 2], [2, 3]]) / 255
        assert torch.allclose(batch["pixels"][..., ::3, 0, 0].cpu(), expected, rtol=1e-6)
        assert batch["pixels"].shape == (4, 6, 4, 4)

    def test_doubles_are_cast_on_the_device(self, device: torch.device) -> None:
        env = TransformedEnv(
            Counter(device, (2,), dtype=torch.float64), DoubleToFloat(in_keys=["observation"])
        )
        batch = env.rollout(5, break_when_any_done=False)
        assert batch["observation"].dtype is torch.float32 is batch["next", "observation"].dtype
        check_stream(batch, 5, (0, 1))
        assert leaves_on(batch) == {device}

    def test_statistics_are_measured_on_the_device(self, device: torch.device) -> None:
        norm = ObservationNorm(in_keys=["observation"], standard_normal=True)
        env = TransformedEnv(Counter(device, (2,)), norm)
        norm.init_stats(12, reduce_dim=(0, 1), cat_dim=1)
        assert norm.loc.device == device == norm.scale.device
        assert env.rollout(3)["observation"].device == device

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("home", ["cpu", None, "the other"])
    def test_device_cast_moves_the_data(
        self, device: torch.device, size: tuple[int, ...], home: str | None
    ) -> None:
        base = device if home == "the other" else home
        target = CPU if home == "the other" else device
        env = TransformedEnv(Counter(base, size), DeviceCastTransform(target))
        policy = linear().to(target)
        assert env.device == target == env.action_spec.device == env.observation_spec["observation"].device
        batch = env.rollout(7, policy, break_when_any_done=False)
        assert batch.device == target and leaves_on(batch) == {target}
        check_stream(batch, 7, tuple(range(max(1, 2 * len(size)))))
        assert torch.equal(batch["action"].cpu(), acted(batch))
        check_env_specs(env)
        (collected,) = SyncDataCollector(env, policy, frames_per_batch=8, total_frames=8)
        assert collected.device == target and leaves_on(collected) == {target}
        assert torch.equal(collected["action"].cpu(), acted(collected))

    def test_carried_state_moves_with_the_environment(self, device: torch.device) -> None:
        env = TransformedEnv(Counter(None, (2,)), Compose(*(CHAINS[n]() for n in ("RewardSum", "CatFrames"))))
        state = env.state_dict()
        env.rollout(2)
        env.to(device)
        env.load_state_dict(state)
        batch = env.rollout(5, break_when_any_done=False)
        assert leaves_on(batch) == {device}
        assert batch["next", "episode_reward"][0].flatten().tolist() == [1, 3, 6, 1, 3]
