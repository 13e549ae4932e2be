"""All steppers follow one protocol: the same environments give the same bits by every path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Schema
from gleanrl._rollout.errors import BATCH, StepFault
from gleanrl._rollout.plan import action_fields
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Stepper
from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.envs import GymWrapper, ParallelEnv, SerialEnv
from gleanrl.envs.libs.gym_stepper import GymStepper
from gleanrl.envs.libs.gym_vector_stepper import VectorGymStepper
from gleanrl.envs.transforms import InitTracker, TransformedEnv
from gleanrl.envs.transforms.stepper import TransformedStepper
from gleanrl.envs.vector.parallel import ParallelStepper
from gleanrl.envs.vector.serial import MemberSteppers
from gleanrl.errors import SchemaError
from tests.fakes import FakeFailure, OracleEnv, RaisingEnv, Script

SCRIPT = Script(lengths=(3, 1, 4, 2))
LONG = Script(lengths=(50,))
Rows = dict[tuple[str, ...], torch.Tensor]


def one(stream: int = 0, script: Script = SCRIPT, at: int = 0) -> GymWrapper:
    """Return a stream. With `at`, its step of that number fails."""
    inner: gymnasium.Env[Any, Any] = (
        RaisingEnv(at, stream=stream, script=script) if at else OracleEnv(stream, script)
    )
    return GymWrapper(inner)


def streams(kind: Any, **kwargs: Any) -> Any:
    """Return three streams; `kwargs` go to the second one."""
    return kind(3, one, create_env_kwargs=[{"stream": k, "script": SCRIPT} | kwargs for k in range(3)])


def vector(**kwargs: Any) -> GymWrapper:
    inner = [partial(lambda k: one(k, **kwargs)._env, k) for k in range(3)]
    return GymWrapper(SyncVectorEnv(inner, autoreset_mode=AutoresetMode.DISABLED))


def tracked(env: Any) -> TransformedEnv:
    return TransformedEnv(env, InitTracker(init_key="first"))


ROUTES: dict[str, tuple[Any, type[Stepper]]] = {
    "gym": (one, GymStepper),
    "TensorDicts": (lambda **k: OnTensorDicts(one(**k)), TensorDictStepper),
    "transformed": (lambda **k: tracked(one(**k)), TransformedStepper),
    "vector": (vector, VectorGymStepper),
    "members": (partial(streams, SerialEnv), MemberSteppers),
    "workers": (partial(streams, ParallelEnv), ParallelStepper),
    "TensorDicts of members": (lambda **k: OnTensorDicts(streams(SerialEnv, **k)), TensorDictStepper),
    "transformed members": (lambda **k: tracked(streams(SerialEnv, **k)), TransformedStepper),
}
BATCHES = [name for name in ROUTES if name not in ("gym", "TensorDicts", "transformed")]
every_route = pytest.mark.parametrize("route", ROUTES)


class OnTensorDicts:
    """An environment without a stepper."""

    def __init__(self, env: Any) -> None:
        self.env, self.usage = env, env.usage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Any] = []

    def build(route: str, rules: EpisodeRules = FREELY, **kwargs: Any) -> tuple[Any, Stepper]:
        factory, kind = ROUTES[route]
        made.append(factory(**kwargs))
        return made[-1], stepper_of(made[-1], rules, kind)

    yield build
    for env in made:
        env.close()


def stepper_of(env: Any, rules: EpisodeRules, kind: type[Stepper]) -> Stepper:
    stepper = TensorDictStepper(env, rules) if isinstance(env, OnTensorDicts) else env.make_stepper(rules)
    assert type(stepper) is kind
    return stepper


def bound(env: Any, stepper: Stepper, num_steps: int, ready: bool = False) -> Block:
    fields = {**stepper.schema().items(), **action_fields(env, len(env.batch_size))}
    block = stepper.block(Schema(fields), num_steps)
    block.column(("action",)).fill_(0.5)
    stepper.bind(block, ready)
    return block


def rows(env: Any, stepper: Stepper, num_steps: int, ready: bool = False, until: int | None = None) -> Rows:
    """Fill a block, or its first rows, and return its columns without the columns of transforms."""
    block = bound(env, stepper, num_steps, ready)
    if until is not None:
        for t in range(until):
            stepper.step(t)
        stepper.stop(until)
    elif ready:
        stepper.run(block)
    else:
        for t in range(num_steps):
            stepper.step(t)
    batch = block.owned().batch(until)
    return {path: batch.get(path).clone() for path in block.schema.paths if path[-1] != "first"}


def same(found: Rows, expected: Rows) -> None:
    assert found.keys() == expected.keys()
    for path, column in found.items():
        want = expected[path]
        assert column.dtype is want.dtype and torch.equal(
            column, want[0] if column.ndim < want.ndim else want
        ), path


def reference(make: Any, rules: EpisodeRules = FREELY, **kwargs: Any) -> tuple[Any, Stepper]:
    return make("TensorDicts of members", rules, **kwargs)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("limit", [None, 1, 3])
@every_route
def test_rows_continue_from_block_to_block(make: Any, route: str, limit: int | None, ready: bool) -> None:
    rules = EpisodeRules(max_steps=limit)
    (env, stepper), (other, model) = make(route, rules), reference(make, rules)
    assert stepper.rules == rules and stepper.batch_size == env.batch_size
    for size in (5, 1, 8):
        same(rows(env, stepper, size, ready), rows(other, model, size))


@every_route
def test_end_without_a_reset_keeps_the_last_observation(make: Any, route: str) -> None:
    rules, script = EpisodeRules(reset_when_done=False), Script(lengths=(3,))
    (env, stepper), (other, model) = make(route, rules, script=script), reference(make, rules, script=script)
    same(rows(env, stepper, 6, until=3), rows(other, model, 6, until=3))
    roots, wanted = stepper.root(), model.root()
    for name in ("done", "terminated", "truncated", "observation"):
        mine = roots[name,]
        assert torch.equal(mine, wanted[name,] if env.batch_size else wanted[name,][0])
    assert roots["done",].any()


@every_route
def test_block_that_ends_early_continues_in_the_next(make: Any, route: str) -> None:
    (env, stepper), (other, model) = make(route), reference(make)
    for until in (2, 1, 4):
        same(rows(env, stepper, 5, until=until), rows(other, model, 5, until=until))


@every_route
def test_partial_and_full_resets_follow_the_mask(make: Any, route: str) -> None:
    env, stepper = make(route, script=LONG)
    rows(env, stepper, 3)
    clocks = stepper.root()["observation",][..., 2]
    assert clocks.eq(3).all()
    mask = torch.arange(3) == 1 if env.batch_size else torch.tensor(False)
    stepper.reset(mask)
    assert stepper.root()["observation",][..., 2].tolist() == torch.where(mask, 0, 3).tolist()
    stepper.reset()
    assert stepper.root()["observation",][..., 2].eq(0).all() and not stepper.root()["done",].any()


@every_route
def test_faults_name_row_and_environment_and_a_reset_follows(make: Any, route: str) -> None:
    env, stepper = make(route, script=LONG, at=3)
    block = bound(env, stepper, 5)
    stepper.step(0)
    stepper.step(1)
    with pytest.raises(StepFault) as caught:
        stepper.step(2)
    fault = caught.value
    whole = isinstance(stepper, (VectorGymStepper, TensorDictStepper)) and len(block.batch_size) > 1
    assert (fault.t, fault.env, fault.during) == (2, BATCH if whole else 0, "step")
    assert isinstance(fault.cause, FakeFailure)
    assert fault.made(env.numel()) == [2] * env.numel()


@every_route
def test_use_outside_the_stepper_is_noticed(make: Any, route: str) -> None:
    env, stepper = make(route)
    stepper.reset()
    assert not stepper.disturbed
    env.reset()
    assert stepper.disturbed
    stepper.reset()
    assert not stepper.disturbed
    other = stepper_of(env, FREELY, type(stepper))
    other.schema()
    other.reset()
    assert stepper.disturbed and not other.disturbed


@every_route
def test_another_stepper_continues_from_a_state(make: Any, route: str) -> None:
    rules = EpisodeRules(max_steps=4)
    (env, stepper), (other, model) = make(route, rules, script=LONG), make(route, rules, script=LONG)
    heir, idle = (stepper_of(owner, rules, type(stepper)) for owner in (env, other))
    for one_env, fresh, part in ((env, heir, stepper), (other, idle, model)):
        fresh.schema()
        part.reset()
        rows(one_env, part, 3)
    value, state = stepper.snapshot(), stepper.state_dict()
    heir.load_state_dict(state)
    assert heir.snapshot().steps.eq(3).all() and torch.equal(heir.snapshot().steps, value.steps)
    assert stepper.disturbed and not heir.disturbed
    same(rows(env, heir, 6), rows(other, model, 6))
    assert torch.equal(value.root["observation",], state["root"]["observation",])


@every_route
def test_wrong_states_change_nothing(make: Any, route: str) -> None:
    env, stepper = make(route, EpisodeRules(max_steps=9), script=LONG)
    rows(env, stepper, 2)
    state, before = stepper.state_dict(), stepper.snapshot()
    root = state["root"]
    wrong = [
        None,
        {},
        {"root": root},
        {**state, "steps": state["steps"].float()},
        {**state, "steps": state["steps"].reshape(*env.batch_size, 1)},
        {**state, "root": {}},
        {**state, "root": {**root, ("observation",): root["observation",].double()}},
        {**state, "root": {**root, ("done",): root["done",][..., 0]}},
    ]
    for bad in wrong:
        with pytest.raises(SchemaError):
            stepper.load_state_dict(bad)
    after = stepper.snapshot()
    assert all(torch.equal(after.root[path], leaf) for path, leaf in before.root.items())
    assert torch.equal(after.steps, before.steps)
