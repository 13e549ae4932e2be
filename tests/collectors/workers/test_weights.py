"""Weights reach each worker complete and current."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDictBase

from gleanrl.collectors.workers import weights as weights_module
from gleanrl.collectors.workers.shared_counters import PUBLISHED, WRITING
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import IndexRangeError, InvalidTypeError, SchemaError
from tests.collectors.helpers import Net
from tests.collectors.workers.crews import collecting, values
from tests.collectors.workers.traced import TracedWords


def act(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.zeros(*td.batch_size, 2))


def test_the_next_batch_shows_changed_weights() -> None:
    policy = Net(0.5)
    with collecting("sync", 2, policy) as collector:
        assert values(collector.next()) == [0.5]
        with torch.no_grad():
            policy.value.fill_(0.25)
        assert values(collector.next()) == [0.25]


def test_frames_carry_the_version_that_acted() -> None:
    policy = Net(0.0)
    with collecting("async", 2, policy, track_policy_version=True) as collector:
        before: dict[int, int] = {}  # by worker; no version decreases
        for version in range(1, 20):
            with torch.no_grad():
                policy.value.fill_(version / 64)
            collector.update_policy_weights_(
                {"value": torch.full((2,), version / 64), "calls": torch.tensor(0)}
            )
            batch = collector.next()
            assert values(batch) == (batch["collector", "policy_version"].unique() / 64).tolist()
            (found,) = batch["policy_version"].unique().tolist()
            worker = int(batch["observation"][0, 0])
            assert before.get(worker, 0) <= found <= version
            before[worker] = found


def test_workers_keep_separate_weights_until_a_common_update() -> None:
    policy = Net(0.5)
    with collecting("sync", 2, policy) as collector:
        collector.update_policy_weights_(Net(-0.5), worker_ids=[1])
        assert [values(part) for part in collector.next()] == [[0.5], [-0.5]]
        collector.update_policy_weights_(Net(0.25))
        assert values(collector.next()) == [0.25]
        with pytest.raises(IndexRangeError, match="worker_ids: .* got 2"):
            collector.update_policy_weights_(Net(), worker_ids=2)
        with pytest.raises(SchemaError):
            collector.update_policy_weights_({"value": torch.zeros(3), "calls": torch.tensor(0)})
        assert values(collector.next()) == [0.25]


def test_weights_by_worker_are_all_taken_or_none() -> None:
    with collecting("sync", 2, Net(0.5), track_policy_version=True) as collector:
        collector.update_policy_weights_({0: Net(0.25), 1: Net(-0.25).state_dict()})
        batch = collector.next()
        assert [values(part) for part in batch] == [[0.25], [-0.25]] and batch["policy_version"].eq(1).all()
        wrong = {"value": torch.zeros(3), "calls": torch.tensor(0)}
        with pytest.raises(SchemaError):
            collector.update_policy_weights_({0: Net(0.75), 1: wrong})
        with pytest.raises(InvalidTypeError, match="got worker_ids and a dictionary of weights by worker"):
            collector.update_policy_weights_({0: Net(0.75)}, worker_ids=0)
        collector.increment_version()
        batch = collector.next()
        assert [values(part) for part in batch] == [[0.25], [-0.25]] and batch["policy_version"].eq(2).all()


def test_workers_may_be_named_by_the_device_of_their_policy() -> None:
    with collecting("sync", 2, Net(0.5), policy_device=["cpu", None]) as collector:
        collector.update_policy_weights_(Net(0.25), worker_ids=torch.device("cpu"))
        assert [values(part) for part in collector.next()] == [[0.25], [0.5]]
        with pytest.raises(IndexRangeError, match="or devices that policies were sent to, got 'cuda:0'"):
            collector.update_policy_weights_(Net(0.25), worker_ids=["cuda:0"])


def test_the_version_of_policies_that_workers_make_can_be_counted_up() -> None:
    with collecting("sync", 2, policy_factory=Net, track_policy_version=True) as collector:
        collector.increment_version()
        assert collector.next()["policy_version"].eq(1).all()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_frames_of_a_plain_function_carry_its_version(kind: str) -> None:
    with collecting(kind, 2, act, track_policy_version=True) as collector:
        assert collector.policy_version == 0 and collector.next()["policy_version"].eq(0).all()
        collector.increment_version()
        collector.update_policy_weights_()
        assert collector.policy_version == 2
        # Shares that were collected ahead carry the earlier version.
        assert any(collector.next()["policy_version"].eq(2).all() for _ in range(8))
        with pytest.raises(InvalidTypeError, match="the policy isn't a module"):
            collector.update_policy_weights_(Net())
        assert collector.policy_version == 2


class Mixed(torch.nn.Module):
    """Acts with the least and the greatest of many equal weights, so that a mixture of two versions shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (torch.nn.Parameter(torch.zeros(5000)) for _ in range(2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the action, ``[*batch, 2]`` float32."""
        weights = torch.cat([self.first, self.last])
        return torch.stack([weights.min(), weights.max()]).expand(*observation.shape[:-1], 2)


def test_weights_are_never_mixed_under_fast_updates() -> None:
    with collecting(
        "async", 2, Mixed(), frames=4, replay_buffer=ReplayBuffer(storage=LazyTensorStorage(200_000))
    ) as collector:
        collector.start()
        for version in range(1, 10_001):
            both = {name: torch.full((5000,), version / 16384) for name in ("first", "last")}
            collector.update_policy_weights_(both)
            if version % 1000 == 0:
                assert collector.stats().workers[1].versions_behind >= 0
        collector.stop()
        actions = collector.replay_buffer[:]["action"]
    assert len(actions.unique()) > 10 and torch.equal(actions[:, 0], actions[:, 1])


def test_pushed_weights_survive_a_concurrent_refresh() -> None:
    policy = Net(0.5)
    with collecting("sync", 2, policy) as collector:
        weights = collector._worker_source._weights
        with weights._lock:  # the background thread is about to publish the policy's weights
            thread = threading.Thread(target=weights.refresh)
            thread.start()
            weights._publish({None: Net(0.25)}, 1, False)
        thread.join()
        assert values(collector.next()) == [0.25]


def test_fences_order_the_weights_and_their_counters(monkeypatch) -> None:
    policy = Net(0.5)
    with collecting("sync", 1, policy) as collector:
        weights = collector._worker_source._weights
        words, seen = weights._words[0], []

        def observed() -> None:
            number = words[WRITING]
            value = float(weights._all.weights(number)["value"][0])
            seen.append((number, words[PUBLISHED], value))

        weights._publish({None: Net(0.25)}, 1)
        weights._publish({None: Net(0.25)}, 1)
        number = words[WRITING]
        monkeypatch.setattr(weights_module, "fence", observed)
        weights._publish({None: Net(0.75)}, 2)
        assert seen == [(number + 1, number * 2, 0.25), (number + 1, number * 2, 0.75)]

        traced = TracedWords(monkeypatch, weights_module, words)
        pulled = weights_module.PulledWeights(policy, None, traced)  # type: ignore[arg-type]
        pulled.bind(weights._segment, weights.region)
        read = pulled._linked.read
        monkeypatch.setattr(pulled._linked, "read", lambda found: (traced.log.append("copy"), read(found)))
        pulled.refresh()
        assert policy.value[0] == 0.75 and traced.log[0] == ("read", PUBLISHED)
        begin = traced.log.index("fence")
        assert traced.log[begin : begin + 4] == ["fence", "copy", "fence", ("read", WRITING)]
