"""`AsyncEnvPool` works as a batch and row by row, with both backends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import (
    AsyncEnvPool,
    GymEnv,
    GymWrapper,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    LengthError,
    MissingKeyError,
    NotReadyError,
    PendingError,
    SchemaError,
)
from gleanrl.testing import check_env
from tests.contract.helpers import check_stream
from tests.envs.vector.awkward import open_gate
from tests.envs.vector.makers import SCRIPT, counting, equal, oracle, with_goal
from tests.envs.vector.pools import BACKENDS, gated, ids, three, with_actions
from tests.fakes import ReusingEnv
from tests.fakes_base import CountingEnv
from tests.fakes_lists import TalkingEnv


# ---------------------------------------------------------------- as a batch
def test_data_equal_serial_env(make_pool):
    found = []
    for kind in (partial(SerialEnv, 3), make_pool):
        env = kind(three())
        env.set_seed(5)
        torch.manual_seed(1)
        rollout = env.rollout(7, break_when_any_done=False)
        collector = SyncDataCollector(env, nn.Linear(3, 2), frames_per_batch=30, total_frames=90)
        found.append([rollout, *collector])
    serial, pool = found
    for batch in pool:
        assert batch.get("env_index").tolist() == [[i] * batch.shape[1] for i in range(3)]
        assert ("next", "env_index") not in batch.keys(True)
    assert all(equal(a, b.exclude("env_index")) for a, b in zip(serial, pool, strict=True))
    check_stream(pool[1:], SCRIPT, first_step=None)


def test_pool_passes_the_environment_suite(make_pool):
    check_env_specs(make_pool(three()))
    check_env_specs(make_pool(three(), stack="lazy"), return_contiguous=False)
    report = check_env(lambda: make_pool([lambda: GymEnv("CartPole-v1")] * 2), num_steps=30, seed=1)
    assert "partial reset" in report.passed and "aliasing" in report.passed


def test_seeds_attributes_and_states_reach_the_members(make_pool):
    pool = make_pool([counting, partial(counting, 2)])
    assert pool.batch_size == (2, 2) and pool.env_batch_sizes == [torch.Size([2])] * 2
    assert pool.set_seed(3) == 6 and pool.seeds == [[3], [5]]
    assert pool.set_seed(3, static_seed=True) == 3 and pool.seeds == [[3, 3], [5, 3]]
    assert pool.reset()["observation"][..., 0].tolist() == [[0, 1], [2, 3]]
    assert pool.reset().get("env_index").tolist() == [[0, 0], [1, 1]]
    made = make_pool([partial(oracle, stream) for stream in (4, 5)])
    assert made.hello("you") == ["hello you from 4", "hello you from 5"]
    with pytest.raises(AttributeError, match="environment 0 .*nothing raised"):
        made.nothing  # noqa: B018
    counted = make_pool([lambda: TransformedEnv(oracle(), StepCounter())] * 2)
    counted.rollout(3)
    state = counted.state_dict()
    counted.load_state_dict(state)
    assert list(state) == ["worker0", "worker1"] and state["worker0"]


def test_answers_keep_their_types(make_pool):
    class Sized(CountingEnv):
        size = torch.Size([2])

        def sizes(self):
            return self.size, [1]

    pool = make_pool([Sized])
    assert type(pool.size[0]) is torch.Size and type(pool.sizes()[0][0]) is torch.Size


def test_transforms_work_around_and_inside_the_pool(make_pool):
    inside = make_pool([lambda: TransformedEnv(oracle(), StepCounter())] * 2)
    around = TransformedEnv(make_pool([oracle] * 2), StepCounter())
    for env in (inside, around):
        env.set_seed(1)
        assert env.rollout(4, break_when_any_done=False)["next", "step_count"].shape == (2, 4, 1)
    nested = SerialEnv(2, lambda: make_pool([oracle, oracle]))
    assert nested.rollout(3, break_when_any_done=False).shape == (2, 2, 3)
    with pytest.raises(InvalidArgumentError, match="a pool can't hold pools"):
        make_pool(lambda: make_pool([oracle]))


def test_masks_reset_and_step_some_environments(make_pool):
    pool = make_pool(three())
    root = pool.reset()
    root["_reset"] = torch.tensor([[False], [True], [False]])
    assert pool.reset(root)["observation"][:, 1].tolist() == [0, 1, 0]
    td = with_actions(pool).set("_step", torch.tensor([True, False, True]))
    assert pool.step(td)["next", "observation"][:, 2].tolist() == [1, 0, 1]


# ----------------------------------------------------------- in order of arrival
def test_answers_are_received_in_order_of_arrival(make_pool, gate):
    pool = make_pool(gated(gate))
    pool.async_step_send(with_actions(pool))
    first = pool.async_step_recv(min_get=2)
    assert ids(first) == [0, 2] and first["next", "observation"][:, 0].tolist() == [0, 2]
    with pytest.raises(NotReadyError, match="step: 0 of 1 answers"):
        pool.async_step_recv(timeout=0)
    with pytest.raises(TimeoutError):
        pool.async_step_recv(env_index=1, timeout=0.01)
    # The environments that have answered continue.
    pool.async_step_send(pool.rand_action(pool.step_mdp(first)))
    assert pool.async_step_recv(2)["next", "observation"][:, 2].tolist() == [2, 2]
    open_gate(gate)
    last = pool.async_step_recv()
    assert ids(last) == [1] and last["next", "observation"].tolist() == [[1, 0, 1]]


def test_min_get_and_max_get_are_checked(make_pool):
    pool = make_pool(three())
    pool.async_step_send(with_actions(pool))
    with pytest.raises(PendingError, match="expected 4 requests under way, got 3"):
        pool.async_step_recv(4)
    with pytest.raises(InvalidArgumentError, match="max_get"):
        pool.async_step_recv(2, max_get=1)
    for bad in (0, -1, True, 1.0):
        with pytest.raises(InvalidArgumentError, match="min_get"):
            pool.async_step_recv(bad)
    one = pool.async_step_recv(max_get=1)
    two = pool.async_step_recv(2, timeout=60)
    assert sorted(ids(one) + ids(two)) == [0, 1, 2] and ids(two) == sorted(ids(two))
    with pytest.raises(PendingError, match=r"got 0, of the environments \[\]; send requests first"):
        pool.async_step_recv()
    pool.min_get = 3
    pool.async_step_send(with_actions(pool))
    assert ids(pool.async_step_recv()) == [0, 1, 2]


def test_received_rows_may_be_selected_by_index(make_pool):
    pool = make_pool(three())
    pool.async_step_send(with_actions(pool))
    pool.async_step_recv(env_index=2)  # the other rows may have arrived before it
    assert ids(pool.async_step_recv(2, max_get=2)) == [0, 1]
    pool.async_step_send(with_actions(pool))
    assert ids(pool.async_step_recv(env_index=[2, 0])) == [2, 0]
    assert ids(pool.async_step_recv()) == [1]


def test_single_row_is_sent_and_received(make_pool):
    pool = make_pool(three())
    row = with_actions(pool)[1]
    pool.async_step_send(row)
    found = pool.async_step_recv(env_index=1)
    assert found.batch_size == () and found["env_index"] == 1
    assert found["next", "observation"].tolist() == [1, 0, 1]
    pool.async_step_send(pool.rand_action(pool.step_mdp(found)))
    assert pool.async_step_recv()["next", "observation"].tolist() == [[1, 0, 2]]


@pytest.mark.parametrize(
    "given",
    [[2, 0], torch.tensor([2, 0]), torch.tensor([[2], [0]]).numpy(), range(2, -1, -2)],
    ids=["list", "tensor", "array", "range"],
)
def test_env_index_selects_environments(make_pool, given):
    pool = make_pool(three())
    rows = with_actions(pool)[[0, 1]].exclude("env_index")
    pool.async_step_send(rows, given)
    found = pool.async_step_recv(2)
    assert ids(found) == [0, 2] and torch.equal(found["action"], rows["action"].flip(0))
    if isinstance(given, torch.Tensor):
        pool.async_step_send(rows.set("env_index", given))
        assert ids(pool.async_step_recv(2)) == [0, 2]


def test_without_env_index_all_environments_are_addressed(make_pool):
    pool = make_pool(three())
    pool.async_step_send(with_actions(pool).exclude("env_index"))
    assert ids(pool.async_step_recv(3)) == [0, 1, 2]
    pool.async_reset_send()
    assert ids(pool.async_reset_recv(3)) == [0, 1, 2]
    single = with_actions(pool)[0].exclude("env_index")
    single["env_index"] = 2
    pool.async_step_send(single)
    assert ids(pool.async_step_recv()) == [2]


def test_invalid_env_index_is_refused(make_pool):
    pool = make_pool(three())
    rows = with_actions(pool)
    plain = rows.exclude("env_index")
    for given, error, words in (
        ((plain[:2],), MissingKeyError, "'env_index' is missing"),
        ((plain[:2], [0, 3]), IndexRangeError, "expected 0 to 2, got"),
        ((plain[:2], [0, -1]), IndexRangeError, "expected 0 to 2"),
        ((plain[:2], [0.0, 1.0]), InvalidTypeError, "expected integers"),
        ((plain[:2], [True, False]), InvalidTypeError, "expected integers"),
        ((plain[:2], [1, 1]), InvalidArgumentError, "expected each environment once"),
        ((plain[:2], [0]), LengthError, r"each of the environments \[0\], got 2 rows"),
        ((plain.reshape(3, 1), [0, 1, 2]), SchemaError, "expected rows of batch size"),
        ((rows.exclude("action"),), MissingKeyError, "action.* of environment 0 is missing"),
    ):
        with pytest.raises(error, match=words):
            pool.async_step_send(*given)
    pool.async_step_send(rows)  # the refused call sent no row
    assert ids(pool.async_step_recv(3)) == [0, 1, 2]


def test_busy_environment_refuses_further_requests(make_pool, gate):
    pool = make_pool(gated(gate))
    rows = with_actions(pool)
    pool.async_step_send(rows[1])
    for call in (
        lambda: pool.async_step_send(rows),
        lambda: pool.async_reset_send(env_index=1),
        lambda: pool.step(rows),
        pool.reset,
        lambda: pool.set_seed(1),
        lambda: pool.rollout(3),
        lambda: pool.stream,
    ):
        with pytest.raises(
            PendingError, match=r"not received: environment 1 \(step\); receive their answers"
        ):
            call()
    pool.async_reset_send(env_index=[0, 2])
    with pytest.raises(PendingError, match="expected 3 requests"):
        pool.async_reset_recv(3)
    assert pool.async_reset_recv(2)["observation"][:, 1].tolist() == [1, 1]
    open_gate(gate)
    assert ids(pool.async_step_recv()) == [1]
    pool.step(rows)


def test_steps_and_resets_at_once(make_pool):
    pool = make_pool(three())
    rows = with_actions(pool)
    pool.async_step_send(rows[:1])
    pool.async_reset_send(rows[1])
    pool.async_step_and_maybe_reset_send(rows[2:])
    stepped, after = pool.async_step_and_maybe_reset_recv()
    assert ids(stepped) == ids(after) == [2]
    fresh = pool.async_reset_recv()
    assert ids(fresh) == [1] and fresh["observation"].tolist() == [[1, 1, 0]]
    assert torch.equal(fresh["action"], rows["action"][1:2])
    assert pool.async_step_recv()["next", "observation"].tolist() == [[0, 0, 1]]


def test_step_and_maybe_reset_keeps_episodes_complete_without_a_barrier(make_pool):
    pool = make_pool(three())
    steps = {env: [] for env in range(3)}
    roots = pool.reset()
    while min(map(len, steps.values())) < 12:
        pool.async_step_and_maybe_reset_send(pool.rand_action(roots))
        stepped, roots = pool.async_step_and_maybe_reset_recv()
        assert ids(stepped) == ids(roots)
        for row in stepped.unbind(0):
            steps[row["env_index"]].append(row)
    for each in steps.values():
        row = torch.stack(each)
        row["collector", "traj_ids"] = row["observation"][:, 1].long()
        before, after = row["next", "observation"][:-1], row["observation"][1:]
        ended = row["next", "done"][:-1, 0]
        assert torch.equal(after[~ended], before[~ended]) and bool((after[ended][:, 2] == 0).all())
        assert bool(ended.any())


# -------------------------------------------------------------------- memory
def test_received_batches_are_copies(make_pool):
    pool = make_pool([lambda: GymWrapper(ReusingEnv(script=SCRIPT))] * 2)
    found = []
    roots = pool.reset()
    for one in (False, True, False, True):
        pool.async_step_and_maybe_reset_send(pool.rand_action(roots))
        given = {"env_index": 0} if one else {"min_get": 2}
        stepped, after = pool.async_step_and_maybe_reset_recv(**given)
        if one:
            pool.async_step_and_maybe_reset_recv(env_index=1)
        found += [(part, part.clone()) for part in (stepped, after)]
        after["observation"] += 0
        roots = pool.reset()
    for part, then in found:
        assert equal(part.exclude("env_index"), then.exclude("env_index"))
        leaves = [leaf for leaf in part.values(True, True) if isinstance(leaf, torch.Tensor)]
        assert len({leaf.data_ptr() for leaf in leaves}) == len(leaves)


def test_sent_batches_may_be_changed(make_pool, gate):
    pool = make_pool(gated(gate))
    rows = with_actions(pool)
    kept = rows.clone()
    pool.async_step_send(rows)
    rows["action"].zero_()
    open_gate(gate)
    assert torch.equal(pool.async_step_recv(3)["action"], kept["action"])


def test_gradients_pass_through_threads_only():
    class Pushed(CountingEnv):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("reward", tensordict["action"].sum(-1, keepdim=True))

    for backend, passes in zip(BACKENDS, (True, False), strict=True):
        with AsyncEnvPool([Pushed] * 2, backend=backend) as pool:
            rows = with_actions(pool)
            rows["action"] = rows["action"].requires_grad_()
            pool.async_step_send(rows)
            assert pool.async_step_recv(2)["next", "reward"].requires_grad is passes
            with torch.no_grad():
                pool.async_step_send(rows)
            assert not pool.async_step_recv(2)["next", "reward"].requires_grad


# ------------------------------------------------------------------ stacking
def test_how_rows_are_stacked(make_pool):
    unlike = [oracle, with_goal]
    for makers, stack, kind in (
        (three(), "dense", TensorDict),
        (three(), "maybe_dense", TensorDict),
        (three(), "lazy", LazyStackedTensorDict),
        (unlike, "lazy", LazyStackedTensorDict),
        (unlike, "maybe_dense", LazyStackedTensorDict),
    ):
        pool = make_pool(makers, stack=stack)
        rows = with_actions(pool)
        assert isinstance(rows, kind)
        pool.async_step_send(rows)
        found = pool.async_step_recv(len(makers))
        assert isinstance(found, kind) and ids(found) == list(range(len(makers)))
        assert isinstance(pool.rand_action(pool.step_mdp(found[:1])), kind)
    assert "goal" in found[1].keys() and "goal" not in found[0].keys()
    with pytest.raises(InvalidArgumentError, match="pass stack='lazy'"):
        make_pool(unlike)


def test_leaves_that_columns_cannot_hold(make_pool):
    pool = make_pool([partial(TalkingEnv, name) for name in (4, 5)], stack="lazy")
    pool.async_step_send(with_actions(pool))
    found = pool.async_step_recv(2)
    assert [row["next", "text"] for row in found.unbind(0)] == ["4/0/1", "5/0/1"]
    assert found[1]["next", "group", "thing"] == {"list": [5, 0, 1]}
    assert found[0]["next", "group", "spread"].shape == (2, 2)
    batches = list(SyncDataCollector(pool, None, frames_per_batch=8, total_frames=16))
    assert batches[1]["text"][0][0].startswith("4/") and batches[1].get("env_index").tolist() == [
        [0] * 4,
        [1] * 4,
    ]


def test_a_name_is_one_environment():
    with AsyncEnvPool("CartPole-v1") as pool:
        assert pool.num_envs == 1 and pool.reset()["observation"].shape == (1, 4)
