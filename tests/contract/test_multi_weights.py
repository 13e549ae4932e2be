"""Workers act with the current weights at every hand-over, or with weights that were sent to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from tests.collectors.workers.crews import KINDS, collecting
from tests.contract.helpers import Constant
from tests.contract.multi import settled, take

PLACES: list[dict[str, Any]] = [{}, {"policy_device": "cpu"}, {"device": "cpu"}]


def acted(batch: Any) -> list[float]:
    """Return the distinct actions of a batch, sorted."""
    return batch["action"].unique().tolist()


def set_to(policy: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES, ids=["nowhere", "policy_device", "device"])
def test_changed_weights_reach_every_worker_without_a_call(kind: str, place: dict[str, Any]) -> None:
    policy = Constant(0.5)
    with collecting(kind, 2, policy, **place) as collector:
        assert acted(collector.next()) == [0.5]
        for value in (0.0, 0.25, -0.5):
            set_to(policy, value)
            settled(collector, kind)
            for batch in take(collector, 2 if kind == "async" else 1):
                assert acted(batch) == [value]


@pytest.mark.parametrize("kind", ["async"])
def test_an_optimizer_step_in_place_or_fused_is_seen(kind: str) -> None:
    policy = Constant(0.5)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.25, fused=True)
    with collecting(kind, 2, policy) as collector:
        assert acted(collector.next()) == [0.5]
        policy.value.grad = torch.ones_like(policy.value)
        version = policy.value._version
        optimizer.step()
        assert policy.value._version >= version and policy.value[0] == 0.25
        settled(collector, kind)
        assert acted(collector.next()) == [0.25]


@pytest.mark.parametrize("kind", ["sync"])
def test_replaced_parameters_are_seen(kind: str) -> None:
    policy = Constant(0.5)
    with collecting(kind, 2, policy) as collector:
        collector.next()
        policy.value = nn.Parameter(torch.full((2,), 0.125))
        settled(collector, kind)
        assert acted(collector.next()) == [0.125]
        policy.load_state_dict({"value": torch.full((2,), 0.75)})
        settled(collector, kind)
        assert acted(collector.next()) == [0.75]


@pytest.mark.parametrize("kind", ["async"])
def test_workers_see_weights_in_shared_memory(kind: str) -> None:
    policy = Constant(0.5)
    policy.share_memory()
    with collecting(kind, 2, policy) as collector:
        assert acted(collector.next()) == [0.5]
        set_to(policy, -0.25)
        settled(collector, kind)
        assert acted(collector.next()) == [-0.25]
        assert policy.value.is_shared()


@pytest.mark.parametrize("kind", ["sync"])
def test_the_policys_own_weights_stay_where_they_are(kind: str) -> None:
    policy = Constant(0.5)
    memory = policy.value.data_ptr()
    with collecting(kind, 2, policy) as collector:
        collector.next()
        assert policy.value.data_ptr() == memory and not policy.value.is_shared()
        assert policy.value.requires_grad and policy.calls <= 1


FORMS = {
    "tensordict": lambda policy: TensorDict.from_module(policy),
    "data": lambda policy: TensorDict.from_module(policy).data,
    "state_dict": lambda policy: policy.state_dict(),
    "module": lambda policy: policy,
}


@pytest.mark.parametrize(("kind", "form"), [*[("sync", form) for form in FORMS], ("async", "tensordict")])
def test_workers_act_with_the_given_weights(kind: str, form: str) -> None:
    policy, other = Constant(0.5), Constant(-0.75)
    with collecting(kind, 2, policy) as collector:
        assert acted(collector.next()) == [0.5]
        collector.update_policy_weights_(FORMS[form](other))
        settled(collector, kind)
        assert all(acted(batch) == [-0.75] for batch in take(collector, 2))
        set_to(other, 0.0)  # the workers copied the weights
        settled(collector, kind)
        assert acted(collector.next()) == [-0.75]
    assert policy.value[0] == 0.5, "the learner's policy is its own"


@pytest.mark.parametrize("kind", ["sync"])
def test_the_older_name_of_the_argument(kind: str) -> None:
    with collecting(kind, 2, Constant(0.5)) as collector:
        collector.next()
        collector.update_policy_weights_(policy_weights=TensorDict.from_module(Constant(0.25)))
        settled(collector, kind)
        assert acted(collector.next()) == [0.25]


@pytest.mark.parametrize(("kind", "ids"), [("sync", 1), ("async", [1])])
def test_given_workers_alone_get_new_weights(kind: str, ids: Any) -> None:
    with collecting(kind, 3, Constant(0.5)) as collector:
        collector.next()
        collector.update_policy_weights_(TensorDict.from_module(Constant(0.25)), worker_ids=ids)
        ahead = 2 if kind == "async" else 0  # worker 1 may have collected two batches before the update
        while ahead:
            ahead -= int(collector.next()["observation"][..., 0].reshape(-1)[0] == 100)
        for batch in take(collector, 3 if kind == "async" else 1):
            for owner, action in zip(
                batch["observation"][..., 0].reshape(-1).tolist(),
                batch["action"].reshape(-1, 2).tolist(),
                strict=True,
            ):
                assert action == ([0.25] * 2 if owner == 100 else [0.5] * 2)
        with pytest.raises((ValueError, IndexError, TypeError)):
            collector.update_policy_weights_(worker_ids=[7])


@pytest.mark.parametrize("kind", ["async"])
def test_weights_that_do_not_fit_change_nothing(kind: str) -> None:
    with collecting(kind, 2, Constant(0.5)) as collector:
        collector.next()
        for wrong in (Constant(0.1, 3), nn.Linear(3, 2)):
            with pytest.raises((RuntimeError, ValueError, KeyError)):
                collector.update_policy_weights_(TensorDict.from_module(wrong))
        with pytest.raises(TypeError):
            collector.update_policy_weights_(3.0)
        settled(collector, kind)
        assert acted(collector.next()) == [0.5]


@pytest.mark.parametrize("kind", ["sync"])
def test_policy_device_updates_weights_only_on_request(kind: str) -> None:
    policy = Constant(0.5)
    with collecting(kind, 2, policy, policy_device="cpu") as collector:
        collector.update_policy_weights_(policy)
        set_to(policy, 0.25)
        settled(collector, kind)
        assert acted(collector.next()) in ([0.5], [0.25])
        collector.update_policy_weights_()
        settled(collector, kind)
        assert acted(collector.next()) == [0.25]


@pytest.mark.parametrize("kind", KINDS)
def test_update_at_each_batch_sends_them_at_every_hand_over(kind: str) -> None:
    policy = Constant(0.5)
    with collecting(kind, 2, policy, update_at_each_batch=True) as collector:
        collector.update_policy_weights_(TensorDict.from_module(Constant(0.75)))
        for value in (0.25, -0.5):
            set_to(policy, value)
            settled(collector, kind)
            assert acted(collector.next()) == [value]


@pytest.mark.parametrize("kind", KINDS)
def test_no_frame_is_of_half_changed_weights(kind: str) -> None:
    """Both halves of a large policy always match, and all rows of a share have the same version."""
    big = TensorDictModule(Halves(), in_keys=["observation"], out_keys=["action"])
    with collecting(kind, 2, big, frames=8, track_policy_version=True) as collector:
        seen: dict[int, int] = {}
        for number in range(1, 30):
            collector.update_policy_weights_(TensorDict.from_module(filled(big, number)))
            batch = collector.next()
            assert torch.equal(batch["action"][..., 0], batch["action"][..., 1])
            version = batch["policy_version"]
            workers = batch["observation"][..., 0].long()
            for worker in workers.unique():
                assert len(version[workers == worker].unique()) == 1
                now = int(version[workers == worker][0])
                assert seen.get(int(worker), 0) <= now <= number
                seen[int(worker)] = now
                assert torch.equal(
                    version[workers == worker].float().reshape(-1) / 64,
                    batch["action"][workers == worker][:, 0],
                )
            if kind == "sync":
                assert version.unique().tolist() == [number]
        # A share that a worker begins after the last update has the last version.
        while min(seen.values()) < 29 or len(seen) < 2:
            batch = collector.next()
            for worker in batch["observation"][..., 0].long().unique():
                seen[int(worker)] = int(batch["policy_version"][batch["observation"][..., 0] == worker][0])
    assert collector.policy_version == 29


class Halves(nn.Module):
    """Acts with the means of two large parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(50_000)), nn.Parameter(torch.zeros(50_000))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return both means, exact in float32."""
        found = torch.stack([self.a[::49_999].mean(), self.b[::49_999].mean()])
        return found.expand(*observation.shape[:-1], 2)


def filled(module: nn.Module, number: int) -> nn.Module:
    set_to(module, number / 64)
    return module


@pytest.mark.parametrize("kind", ["async"])
def test_buffers_and_deep_copies(kind: str) -> None:
    """Workers get buffers (for example running statistics) with the weights, also from a copy of a policy."""

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.tensor(0.5))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return (observation[..., :2] * 0) + self.shift

    policy = copy.deepcopy(Buffered())
    with collecting(kind, 2, policy) as collector:
        assert acted(collector.next()) == [0.5]
        policy.shift.fill_(0.25)
        settled(collector, kind)
        assert acted(collector.next()) == [0.25]


@pytest.mark.parametrize("kind", KINDS)
def test_the_version_is_the_lowest_where_workers_have_unlike_ones(kind: str) -> None:
    def versions(batch: Any) -> dict[int, set[int]]:
        workers = batch["observation"][..., 0].long().reshape(-1) // 100
        found = batch["policy_version"].reshape(-1)
        return {int(worker): {*found[workers == worker].tolist()} for worker in workers.unique()}

    with collecting(kind, 2, Constant(0.5), track_policy_version=True) as collector:
        for _ in range(2):
            collector.update_policy_weights_(Constant(0.25))
        for _ in range(4):
            collector.update_policy_weights_(Constant(0.75), worker_ids=[0])
        assert collector.policy_version == 2
        settled(collector, kind)
        found: dict[int, set[int]] = {}
        while len(found) < 2:  # asynchronous batches come from the first ready worker
            found.update(versions(collector.next()))
        assert found == {0: {6}, 1: {2}}
        collector.update_policy_weights_(Constant(0.75), worker_ids=[1])
        assert collector.policy_version == 6
        collector.increment_version()
        assert collector.policy_version == 8, (
            "versions are numbers of updates: the seventh one was worker 1's"
        )
        collector.update_policy_weights_(Constant(0.75))
        assert collector.policy_version == 9
