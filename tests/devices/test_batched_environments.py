"""Batches of environments, gymnasium's and the library's own, return their data on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv, check_env_specs
from gleanrl.envs.custom.pendulum import PendulumEnv
from tests.devices.counting import Counter, acted, check_same, check_stream, leaves_on, linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
class TestBatchesOfEnvironments:
    """Members and batch may be on different devices."""

    def made(self, kind: Any, home: Any, **kwargs: Any) -> Any:
        return kind(2, [lambda: Counter(home, first=0), lambda: Counter(home, first=1)], **kwargs)

    def test_batch_may_be_on_another_device_than_its_members(self, device: torch.device, kind: Any) -> None:
        env = self.made(kind, "cpu", device=device)
        assert env.device == device == env.action_spec.device
        batch = env.rollout(7, linear().to(device), break_when_any_done=False)
        assert batch.device == device and leaves_on(batch) == {device}
        check_stream(batch, 7, (0, 1))
        assert torch.equal(batch["action"].cpu(), acted(batch))
        assert leaves_on(env.reset()) == {device}
        check_env_specs(env)
        env.close()

    def test_partial_resets_reach_the_right_rows(self, device: torch.device, kind: Any) -> None:
        env = self.made(kind, None, device=device)
        root = env.step(env.rand_action(env.reset()))["next"].exclude("reward")
        root["_reset"] = torch.tensor([[False], [True]], device=device)
        fresh = env.reset(root)
        assert leaves_on(fresh) == {device}
        assert fresh["observation"].tolist() == [[0, 0, 1], [1, 1, 0]]
        env.close()

    @pytest.mark.parametrize(
        "places", [{"policy_device": ""}, {"device": ""}, {"policy_device": "", "storing_device": ""}]
    )
    def test_collector_moves_batches_of_environments(
        self, device: torch.device, kind: Any, places: dict[str, str]
    ) -> None:
        env = self.made(kind, None)
        collector = SyncDataCollector(
            env, linear(), frames_per_batch=14, total_frames=28, **dict.fromkeys(places, device)
        )
        first, second = collector
        check_stream(first, 7, (0, 1))
        for batch in (first, second):
            assert torch.equal(batch["action"].cpu(), acted(batch))
            assert leaves_on(batch) == {CPU if places == {"policy_device": ""} else device}
        assert second["observation"][:, 0].tolist() == [[0, 2, 1], [1, 1, 3]]

    def test_members_on_the_device_keep_their_data_there(self, device: torch.device, kind: Any) -> None:
        env = self.made(kind, str(device))
        assert env.device == device
        batch = env.rollout(7, linear().to(device), break_when_any_done=False)
        assert leaves_on(batch) == {device}
        check_stream(batch, 7, (0, 1))
        env.close()


@pytest.mark.parametrize("num_envs", [0, 2])
def test_gymnasium_batches_are_returned_on_the_device(device: torch.device, num_envs: int) -> None:
    def run(place: torch.device) -> TensorDictBase:
        env = GymEnv("CartPole-v1", num_envs=num_envs, device=place)
        env.set_seed(3)
        choose = env.action_spec.zero()

        def policy(tensordict: TensorDictBase) -> TensorDictBase:
            assert tensordict["observation"].device == place
            right = torch.ones_like(choose).cumsum(-1) == 2
            return tensordict.set("action", right.to(choose.dtype))

        return env.rollout(30, policy, break_when_any_done=False)

    found, expected = run(device), run(CPU)
    check_same(found, expected, device)
    assert found.device == device and found["next", "done"].any()
    check_env_specs(GymEnv("CartPole-v1", num_envs=num_envs, device=device))


def test_pendulum_runs_on_the_device(device: torch.device) -> None:
    env = PendulumEnv(seed=0, device=device)
    start = env.reset(env.gen_params(batch_size=[5], device=device))
    batch = env.rollout(4, auto_reset=False, tensordict=start)
    assert batch.shape == (5, 4) and leaves_on(batch) == {device}
    check_env_specs(env)
