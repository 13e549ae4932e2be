"""Trajectory ids equal the ids of a plain oracle that takes one step of one environment at a time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl._state.state import plain
from gleanrl.collectors.frame_accounting import Numbering, TrajectoryIds
from gleanrl.errors import SchemaError

BOOL = np.bool_


class Tracker:
    """Holds a value of `TrajectoryIds` and replaces it by each next one."""

    def __init__(self, num_envs: int, worker: int = 0, num_workers: int = 1) -> None:
        self.now = TrajectoryIds.begin(num_envs)
        self.numbering = None if num_workers == 1 else Numbering(worker, num_workers)

    def record(self, done: Any, reward: Any, ids: Any, counts: Any = None, mask: Any = None) -> None:
        before = plain(self.now)
        after = self.now.record(done, reward, ids, counts, mask, self.numbering)
        assert str(plain(self.now)) == str(before), "a value doesn't change"
        self.now = after

    def abandon(self, mask: Any = None) -> None:
        self.now = self.now.abandon(mask)


class SlowTracker:
    """The oracle."""

    def __init__(self, num_envs: int, worker: int, num_workers: int) -> None:
        self.worker, self.num_workers = worker, num_workers
        self.ids = list(range(num_envs))
        self.next_id = num_envs
        self.steps = [0] * num_envs
        self.returns = [0.0] * num_envs
        self.ended: list[tuple[float, int]] = []

    def name(self, env: int) -> int:
        return self.ids[env] * self.num_workers + self.worker

    def renew(self, env: int) -> None:
        self.ids[env], self.steps[env], self.returns[env] = self.next_id, 0, 0.0
        self.next_id += 1

    def step(self, done: list[bool], reward: list[float]) -> tuple[list[int], list[int]]:
        """Return the ids and counts of the step."""
        ids, counts = [self.name(p) for p in range(len(self.ids))], list(self.steps)
        for env, ends in enumerate(done):
            self.steps[env] += 1
            self.returns[env] += reward[env]
            if ends:
                self.ended.append((self.returns[env], self.steps[env]))
                self.renew(env)
        return ids, counts

    def abandon(self, mask: list[bool]) -> None:
        for env, chosen in enumerate(mask):
            if chosen and self.steps[env]:
                self.renew(env)


def columns(num_envs: int, num_steps: int) -> tuple[Any, Any]:
    """Return unwritten columns for ids and counts."""
    return np.full((num_envs, num_steps), -7, np.int64), np.full((num_envs, num_steps), -7, np.int64)


def record(tracker: Tracker, done: Any, reward: Any = None, mask: Any = None) -> tuple[Any, Any]:
    """Record a batch and return its ids and counts."""
    ids, counts = columns(*done.shape)
    tracker.record(done, reward, ids, counts, mask)
    return ids, counts


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, list[tuple[str, Any]]]:
    """Draw the number of environments, the worker, the number of workers, and a list of events."""
    num_envs, num_workers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rows = st.lists(st.booleans(), min_size=num_envs, max_size=num_envs)
    numbers = st.lists(st.integers(-64, 64), min_size=num_envs, max_size=num_envs)
    batch = st.lists(st.tuples(rows, numbers), max_size=6)
    event = st.one_of(
        st.tuples(st.just("record"), batch),
        st.tuples(st.just("record"), batch),
        st.tuples(st.just("abandon"), st.none() | rows),
        st.tuples(st.just("restore"), st.none()),
    )
    return num_envs, draw(st.integers(0, num_workers - 1)), num_workers, draw(st.lists(event, max_size=8))


@settings(max_examples=150)
@given(histories())
def test_ids_counts_returns_and_lengths_equal_the_oracle(history: Any) -> None:
    num_envs, worker, num_workers, events = history
    tracker, oracle = (
        Tracker(num_envs, worker, num_workers),
        SlowTracker(num_envs, worker, num_workers),
    )
    for kind, what in events:
        if kind == "abandon":
            tracker.abandon(None if what is None else np.array(what, BOOL))
            oracle.abandon([True] * num_envs if what is None else what)
        elif kind == "restore":
            tracker.now = TrajectoryIds.read(plain(tracker.now)).of_environments(num_envs)
        else:
            done = np.array([row for row, _ in what], BOOL).reshape(-1, num_envs).T
            reward = np.array([row for _, row in what], np.float64).reshape(-1, num_envs).T / 16
            slow = copy.deepcopy(oracle)
            for t in range(done.shape[1] + 1):
                for env in range(num_envs):
                    assert tracker.now.where(done[:, :t], env) == (slow.ids[env], slow.steps[env])
                if t < done.shape[1]:
                    slow.step(done[:, t].tolist(), reward[:, t].tolist())
            ids, counts = record(tracker, done, reward)
            for t in range(done.shape[1]):
                expected = oracle.step(done[:, t].tolist(), reward[:, t].tolist())
                assert (ids[:, t].tolist(), counts[:, t].tolist()) == expected
        assert tracker.now.num_ended == len(oracle.ended)
        assert list(tracker.now.recent_returns) == [total for total, _ in oracle.ended][-100:]
        assert list(tracker.now.recent_lengths) == [length for _, length in oracle.ended][-100:]


@settings(max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=30), st.data())
def test_the_cut_into_batches_changes_nothing(rows: list[list[bool]], data: st.DataObject) -> None:
    done = np.array(rows, BOOL).T
    reward = np.arange(done.size, dtype=np.float64).reshape(done.shape) / 8
    whole, pieces = Tracker(3), Tracker(3)
    expected = record(whole, done, reward)
    cuts = sorted(data.draw(st.lists(st.integers(0, done.shape[1]), max_size=4)))
    parts = [
        record(pieces, done[:, a:b], reward[:, a:b])
        for a, b in zip([0, *cuts], [*cuts, done.shape[1]], strict=True)
    ]
    for k in range(2):
        assert np.array_equal(np.concatenate([part[k] for part in parts], 1), expected[k])
    assert str(plain(pieces.now)) == str(plain(whole.now))


def test_ids_are_unique_across_workers_and_batches() -> None:
    rng = np.random.default_rng(3)
    owners: dict[int, tuple[int, int, int]] = {}
    for worker in range(3):
        tracker, episode = Tracker(2, worker, 3), [0, 0]
        for _ in range(20):
            done = rng.random((2, 5)) < 0.3
            ids, _ = record(tracker, done)
            for t in range(5):
                for env in range(2):
                    me = (worker, env, episode[env])
                    assert owners.setdefault(int(ids[env, t]), me) == me
                    episode[env] += int(done[env, t])
            if rng.random() < 0.3:
                mask = rng.random(2) < 0.5
                tracker.abandon(mask)
                episode = [n + int(m) for n, m in zip(episode, mask, strict=True)]
    assert len(set(owners.values())) >= len(owners)


def test_an_unused_id_survives_a_reset() -> None:
    tracker = Tracker(2)
    tracker.abandon()
    done = np.zeros((2, 3), BOOL)
    done[0, 2] = True
    assert record(tracker, done)[0].tolist() == [[0] * 3, [1] * 3]
    tracker.abandon()  # the first environment's new episode has no frame, the second one's has some
    assert record(tracker, np.zeros((2, 1), BOOL))[0].tolist() == [[2], [3]]


def test_earlier_state_gets_ids_that_no_later_frame_has() -> None:
    tracker = Tracker(2)
    past = tracker.now
    done = np.zeros((2, 3), BOOL)
    done[0, 2] = True
    record(tracker, done)  # 0 and 1 have frames, 2 has none yet
    assert past.apart_from(past).ids.tolist() == [0, 1]
    assert past.apart_from(tracker.now).ids.tolist() == [3, 4]
    assert tracker.now.apart_from(tracker.now).abandon().ids.tolist() == [2, 3]
    assert tracker.now.apart_from(past).abandon().ids.tolist() == [2, 3], "one without frames takes all over"


def test_abandoned_episodes_count_neither_as_ended_nor_in_the_next_return() -> None:
    tracker = Tracker(1)
    record(tracker, np.zeros((1, 4), BOOL), np.ones((1, 4)))
    tracker.abandon()
    record(tracker, np.array([[False, True]]), np.ones((1, 2)))
    assert (tracker.now.num_ended, list(tracker.now.recent_returns), list(tracker.now.recent_lengths)) == (
        1,
        [2.0],
        [2],
    )


def test_without_rewards_only_lengths_are_tracked() -> None:
    tracker = Tracker(1)
    record(tracker, np.array([[False, True, True]]))
    assert (list(tracker.now.recent_lengths), list(tracker.now.recent_returns)) == ([2, 1], [])


def test_float32_rewards_are_summed_in_float64() -> None:
    tracker = Tracker(1)
    reward = np.full((1, 5000), 0.1, np.float32)
    done = np.zeros((1, 5000), BOOL)
    done[0, -1] = True
    record(tracker, done, reward)
    assert tracker.now.recent_returns[0] == pytest.approx(5000 * float(np.float32(0.1)), rel=1e-12)


def test_only_the_latest_hundred_trajectories_are_kept() -> None:
    tracker = Tracker(1)
    record(tracker, np.ones((1, 105), BOOL), np.arange(105.0)[None])
    assert (list(tracker.now.recent_returns), tracker.now.num_ended) == (np.arange(5.0, 105.0).tolist(), 105)


def test_ids_go_beyond_32_bits() -> None:
    tracker = Tracker(1, 1, 2)
    tracker.now = TrajectoryIds.begin(1, 2**31 - 1)
    ids, _ = record(tracker, np.ones((1, 3), BOOL))
    assert ids.tolist() == [[2 * (2**31 - 1 + k) + 1 for k in range(3)]]


def test_a_state_of_another_number_of_environments_begins_new_trajectories() -> None:
    tracker = Tracker(3)
    record(tracker, np.array([[False, True], [False, False], [True, True]]), np.ones((3, 2)))
    found = TrajectoryIds.read(plain(tracker.now)).of_environments(2)
    assert (found.ids.tolist(), found.steps.tolist(), found.next_id, found.num_ended) == (
        [6, 7],
        [0, 0],
        8,
        3,
    )
    assert found.recent_returns == tracker.now.recent_returns


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("next_id", -1),
        ("next_id", 1),
        ("ids", torch.tensor([0, 0])),
        ("ids", torch.tensor([-1, 0])),
        ("ids", torch.tensor([0.0, 1.0])),
        ("steps", torch.tensor([1])),
        ("steps", torch.tensor([-1, 0])),
        ("returns", torch.tensor([1, 2])),
        ("num_ended", "3"),
        ("recent_returns", [1]),
        ("recent_lengths", [1.0]),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(field: str, value: Any) -> None:
    state = {**plain(TrajectoryIds.begin(2)), field: value}
    with pytest.raises(SchemaError, match="'ids'" if (field, value) == ("next_id", 1) else f"'{field}'"):
        TrajectoryIds.read(state)
    del state[field]
    with pytest.raises(SchemaError, match=f"'{field}' is missing"):
        TrajectoryIds.read(state)


def test_an_infinite_reward_concerns_its_own_episode_only() -> None:
    tracker = Tracker(1)
    done = np.array([[0, 1, 0, 1, 0, 1]], bool)
    reward = np.array([[1.0, np.inf, 1.0, 1.0, -np.inf, np.inf]])
    tracker.record(done, reward, np.empty((1, 6), np.int64))
    first, second, third = tracker.now.recent_returns
    assert first == np.inf and second == 2.0 and np.isnan(third)


@settings(max_examples=100)
@given(st.integers(1, 4), st.lists(st.integers(0, 6), max_size=5), st.integers(0, 2**32 - 1))
def test_steps_that_are_no_frames_count_for_nothing(num_envs: int, sizes: list[int], seed: int) -> None:
    draws = np.random.default_rng(seed)
    tracker, oracle = Tracker(num_envs), SlowTracker(num_envs, 0, 1)
    for size in sizes:
        done, mask = draws.random((2, num_envs, size)) < [[[0.3]], [[0.7]]]
        reward = draws.integers(-64, 64, (num_envs, size)) / 16
        ids, counts = record(tracker, done, reward, mask)
        for t in range(size):
            for env in range(num_envs):
                if not mask[env, t]:
                    assert ids[env, t] == -1
                    continue
                assert (ids[env, t], counts[env, t]) == (oracle.name(env), oracle.steps[env])
                oracle.steps[env] += 1
                oracle.returns[env] += reward[env, t]
                if done[env, t]:
                    oracle.ended.append((oracle.returns[env], oracle.steps[env]))
                    oracle.renew(env)
    assert (
        list(zip(tracker.now.recent_returns, tracker.now.recent_lengths, strict=True)) == oracle.ended[-100:]
    )
