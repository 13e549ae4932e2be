"""A state that doesn't fit leaves all environments unchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import ParallelEnv, SerialEnv
from gleanrl.envs.env_state import adopt_state, parse_state
from gleanrl.envs.transforms import RewardSum, StepCounter, TransformedEnv, VecNorm
from gleanrl.errors import SchemaError
from tests.fakes import FakeFailure
from tests.fakes_base import CountingEnv


class Counted(CountingEnv):
    """Has a buffer, one module under two names, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.tensor(0))
        self.first = self.second = torch.nn.BatchNorm1d(2)
        self.seen = 0

    def _step(self, tensordict):
        self.total += 1
        self.seen += 1
        self.first.weight.data += 1
        return super()._step(tensordict)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = int(state["seen"])


class Own(CountingEnv):
    """Loads by its own method, which changes an attribute before it refuses the rest."""

    total = seen = 0

    def _step(self, tensordict):
        self.total, self.seen = self.total + 1, self.seen + 2
        return super()._step(tensordict)

    def state_dict(self, *args, **kwargs):
        return {"seen": self.seen, "total": torch.tensor(self.total)}

    def load_state_dict(self, state_dict, strict=True):
        self.seen = state_dict["seen"]
        if set(state_dict) != {"seen", "total"} or type(self.seen) is not int:
            raise FakeFailure("state")
        self.total = int(state_dict["total"])


def behind(env: Any) -> TransformedEnv:
    return TransformedEnv(env, RewardSum()).append_transform(VecNorm())


def counted(env: Any) -> TransformedEnv:
    return TransformedEnv(env, StepCounter())


def serial(env: Any) -> SerialEnv:
    return SerialEnv(3, env)


def parallel(env: Any) -> ParallelEnv:
    return ParallelEnv(3, env, num_processes=2)


def inner(env: Any) -> SerialEnv:
    return SerialEnv(2, env)


KINDS = {
    "one": Counted,
    "behind": lambda: behind(Counted()),
    "behind own": lambda: behind(Own()),
    "serial": lambda: serial(Counted),
    "serial own": lambda: serial(Own),
    "serial behind": lambda: serial(lambda: behind(Counted())),
    "behind serial": lambda: counted(serial(lambda: behind(Own()))),
    "serial serial": lambda: serial(lambda: inner(Counted)),
    "parallel": lambda: parallel(Counted),
    "parallel own": lambda: parallel(Own),
    "behind parallel behind": lambda: counted(parallel(lambda: behind(Counted()))),
    "parallel serial": lambda: parallel(lambda: behind(inner(Own))),
    "serial parallel": lambda: inner(lambda: parallel(Counted)),
}


def wrong(state: Mapping[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield copies of a state, each with one entry too few, too many or of another kind, at every depth.

    Changes that are allowed are left out: more states than members, more entries in the state of a part, and no carry.
    Among equal members only the last one's entries change, because a load checks it after all others.
    """
    last = {tuple(part): key for key, part in state.items() if isinstance(part, Mapping)}
    if any("." in key for key in state):
        yield "more", {**copy.deepcopy(state), "more": 1}
    for key, value in state.items():
        if len(state) > 1 or key == "seen":
            yield f"without {key}", {k: copy.deepcopy(v) for k, v in state.items() if k != key}
        yield f"{key} is text", {**copy.deepcopy(state), key: "wrong"}
        if isinstance(value, torch.Tensor):
            yield f"{key} is larger", {**copy.deepcopy(state), key: torch.zeros(7, 7)}
        elif isinstance(value, Mapping) and value and last[tuple(value)] == key:
            for what, part in wrong(value):
                yield f"{key}: {what}", {**copy.deepcopy(state), key: part}


def alike(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    return bool(left == right)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_fit_changes_nothing(kind):
    env = KINDS[kind]()
    env.rollout(3)
    saved = copy.deepcopy(env.state_dict())
    env.rollout(2)
    before = copy.deepcopy(env.state_dict())
    assert not alike(saved, before)
    refused = 0
    for what, state in wrong(saved):
        with pytest.raises(Exception):  # noqa: B017  # any type: members raise their own errors
            env.load_state_dict(state)
            pytest.fail(what)
        assert alike(env.state_dict(), before), what
        refused += 1
    assert refused > 3
    value = parse_state(env, saved, True)
    assert alike(env.state_dict(), before)
    for _ in range(2):
        adopt_state(env, value)
        assert alike(env.state_dict(), saved)
    env.close()


@pytest.mark.parametrize("junk", [5, None, [1], "x"], ids=repr)
@pytest.mark.parametrize(
    "make",
    [Counted, Own, lambda: behind(Own()), lambda: serial(Counted()), lambda: serial(Own())],
    ids=["its own", "by itself", "behind a transform", "in a batch", "by itself in a batch"],
)
def test_value_other_than_a_state_is_a_schema_error(make, junk):
    env = make()
    collector = SyncDataCollector(env, frames_per_batch=6, total_frames=6)
    state = {**collector.state_dict(), "env_state_dict": junk}
    if junk is not None:
        with pytest.raises(SchemaError, match="expected the state of"):
            collector.load_state_dict(state)
    collector.shutdown()
