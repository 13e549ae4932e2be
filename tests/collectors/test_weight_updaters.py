"""Users can replace how weights are sent, and `VanillaWeightUpdater` copies them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl.collectors import MultiProcessedWeightUpdater, VanillaWeightUpdater, WeightUpdaterBase
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError
from tests.collectors.helpers import Net, make
from tests.collectors.workers.crews import collecting, values
from tests.contract.multi import settled
from tests.fakes_base import CountingEnv


class Mine(WeightUpdaterBase):
    """Records the weights for each worker; its constructor doesn't call the base class."""

    def __init__(self, ids: Any = None) -> None:
        self.ids, self.sent = ids, []  # type: ignore[var-annotated]

    def _get_server_weights(self) -> Any:
        return "mine"

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return f"mapped {policy_or_weights}"

    def all_worker_ids(self) -> Any:
        return self.ids

    def _skip_update(self, worker_id: Any) -> bool:
        return worker_id == 2

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.sent.append((worker_id, server_weights))


def test_every_method_of_an_updater_can_be_overridden() -> None:
    updater, calls = Mine([0, 1, 2]), []
    updater.register_post_hook(lambda: calls.append(len(updater.sent)))
    updater.push_weights()
    updater.push_weights("given", 1)
    updater("given", worker_ids=[1, 2])
    assert updater.sent == [(0, "mapped mine"), (1, "mapped mine"), (1, "mapped given"), (1, "mapped given")]
    assert calls == [2, 3, 4]
    updater.push_weights("given", {3})
    updater.push_weights("given", "a node")
    assert updater.sent[4:] == [(3, "mapped given"), ("a node", "mapped given")]
    alone = Mine()
    alone.push_weights()
    assert alone.sent == [(None, "mapped mine")] and alone.post_hooks == []


def test_collector_sends_weights_by_its_updater() -> None:
    updater = Mine()
    collector = make(policy=Net(), weight_updater=updater)
    assert collector.weight_updater is updater and updater.collector is collector
    collector.update_policy_weights_()
    collector.update_policy_weights_("w", worker_ids=[0])
    assert updater.sent == [(None, "mapped mine"), (0, "mapped w")]
    with pytest.raises(InvalidArgumentError, match="another collector"):
        make(policy=Net(), weight_updater=updater)
    del collector
    gc.collect()
    assert updater.collector is None
    assert isinstance(make(weight_updater=Mine).weight_updater, Mine)
    with pytest.raises(InvalidTypeError, match="weight_updater: expected .*got int"):
        make(weight_updater=3)


def test_updater_may_be_registered_after_construction() -> None:
    class Late(Mine):
        def init(self, address: str, port: int = 0) -> None:
            self.place = address, port

    collector = make(weight_updater=Late)
    collector.init_updater("here", port=1)
    assert collector.weight_updater.place == ("here", 1)  # type: ignore[union-attr]
    make().init_updater("nobody", "cares")


def test_worker_ids_without_an_updater_are_refused() -> None:
    collector = make(policy=Net())
    assert collector.weight_updater is None
    with pytest.raises(InvalidTypeError, match="worker_ids"):
        collector.update_policy_weights_(Net(0.75), worker_ids=0)
    for given in (Net(0.75), TensorDict.from_module(Net(0.75)), Net(0.75).state_dict()):
        with torch.no_grad():
            collector.policy.module.value.fill_(0)
        collector.update_policy_weights_(given)
        assert collector.next()["action"].eq(0.75).all()  # type: ignore[index]
    collector.update_policy_weights_(policy_weights=TensorDict.from_module(Net(0.25)))
    assert collector.next()["action"].eq(0.25).all()  # type: ignore[index]


def test_collector_with_an_updater_does_not_follow_weights() -> None:
    net = Net()
    copied = make(policy=nn.Sequential(net), weight_updater=Mine)
    copied.source.stop_following()  # type: ignore[attr-defined]
    assert copied.next()["action"].eq(0.5).all()  # type: ignore[index]


class TestVanilla:
    def test_vanilla_updater_copies_given_or_fetched_weights(self) -> None:
        policy, server = nn.Linear(2, 1), nn.Linear(2, 1)
        updater = VanillaWeightUpdater(
            weight_getter=lambda: TensorDict.from_module(server),
            policy_weights=TensorDict.from_module(policy),
        )
        updater.push_weights()
        assert torch.equal(policy.weight, server.weight)
        other = nn.Linear(2, 1)
        for form in (other, other.state_dict(), TensorDict.from_module(other).data):
            updater.push_weights()
            updater.push_weights(form)
            assert torch.equal(policy.weight, other.weight)
        with pytest.raises(SchemaError):
            updater.push_weights(nn.Linear(3, 1))

    def test_from_policy_makes_an_updater(self) -> None:
        policy, other = nn.Linear(2, 1), nn.Linear(2, 1)
        updater = VanillaWeightUpdater.from_policy(policy)
        assert updater is not None and Mine.from_policy(policy) is None
        updater.push_weights()  # there is no source to read from
        updater.push_weights(other)
        assert torch.equal(policy.weight, other.weight)

    def test_collector_uses_a_vanilla_updater(self) -> None:
        net = Net()
        collector = make(CountingEnv(), net, weight_updater=VanillaWeightUpdater.from_policy(net))
        collector.update_policy_weights_(Net(0.75))
        assert collector.next()["action"].eq(0.75).all()  # type: ignore[index]

        made = make(CountingEnv(), net, weight_updater=VanillaWeightUpdater)  # by its from_policy
        made.update_policy_weights_(Net(-0.75))
        assert made.next()["action"].eq(-0.75).all()  # type: ignore[index]


class ToEach(WeightUpdaterBase):
    """Sends every worker different weights."""

    def all_worker_ids(self) -> Any:
        return [0, 1]

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.collector.send_weights(Net(server_weights[worker_id]), worker_id)


class Halving(MultiProcessedWeightUpdater):
    """Changes the weights before they are sent."""

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return Net(policy_or_weights.value[0].item() / 2)


@pytest.mark.parametrize("kind", ["sync", "async"])
class TestOfWorkers:
    def test_a_users_updater_sends_to_each(self, kind: str) -> None:
        with collecting(kind, 2, Net(0.5), weight_updater=ToEach) as collector:
            assert values(collector.next()) == [0.5]
            collector.update_policy_weights_([0.25, 0.75])
            collector.update_policy_weights_([0.0, -0.25], worker_ids=[1])
            settled(collector, kind)
            workers, found = set[int](), set[float]()
            while len(workers) < 2:
                batch = collector.next()
                workers.update((batch["collector", "traj_ids"] % 2).unique().tolist())
                found.update(values(batch))
            assert sorted(found)[:2] == [-0.25, 0.25]

    def test_multi_processed_updater_sends_to_all_workers(self, kind: str) -> None:
        server, followed = Net(1.0), Net(0.0)
        weights = {None: TensorDict.from_module(followed)}
        updater = Halving(get_server_weights=lambda: server, policy_weights=weights)
        with collecting(kind, 2, Net(0.5), weight_updater=updater, track_policy_version=True) as collector:
            assert updater.all_worker_ids() is None
            collector.next()
            collector.update_policy_weights_()
            assert collector.policy_version == 1
            settled(collector, kind)
            batch = collector.next()
            assert values(batch) == [0.5] and batch["policy_version"].eq(1).all()
            assert followed.value.eq(0.5).all()
            collector.update_policy_weights_(Net(0.5), worker_ids=[0, 1])
            assert followed.value.eq(0.5).all()
            settled(collector, kind)
            assert values(collector.next()) == [0.25]

    def test_push_without_a_collector_is_refused(self, kind: str) -> None:
        with pytest.raises(InvalidArgumentError, match="pass it to one first, with weight_updater="):
            MultiProcessedWeightUpdater().push_weights(Net())
