"""Every kind of batch has the same behaviour; each test runs on all kinds."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest
import torch
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule

from gleanrl.collectors import SyncDataCollector
from gleanrl.data.specs import Bounded, Unbounded, contains_lazy_spec
from gleanrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv, check_env_specs
from gleanrl.envs.transforms import Compose, StepCounter, TensorDictPrimer, TransformedEnv
from gleanrl.envs.vector.base import dispatched
from gleanrl.errors import ClosedError, InvalidArgumentError, LengthError, MissingKeyError, UnsupportedError
from tests.contract.helpers import check_stream
from tests.envs.vector.makers import SCRIPT, counting, equal, nested, oracle, streams, with_goal
from tests.fakes import Script
from tests.fakes_base import CountingEnv, StillDoneEnv, TeamEnv

KINDS = {"serial": SerialEnv, "parallel": ParallelEnv}


@pytest.fixture(params=list(KINDS))
def make(request):
    """Make batches, and close them after the test."""
    made = []

    def build(*args, **kwargs):
        made.append(KINDS[request.param](*args, **kwargs))
        return made[-1]

    yield build
    for env in made:
        env.close()
        env.close()


def test_specs_are_read_without_starting(make):
    env = make(3, oracle)
    assert env.batch_size == (3,) and env.num_workers == 3 and env.device is None
    assert env.observation_spec["observation"].shape == (3, 3) and env.action_spec.shape == (3, 2)
    assert env.reward_spec.shape == (3, 1) and env.done_spec["done"].shape == (3, 1)
    assert "OracleEnv" in repr(env) or "GymWrapper, batch_size=(3,)" in repr(env)
    assert not env.is_started


def test_traits_are_read_without_starting(make):
    env = make(2, oracle)
    assert env.traits.masks_frames is False and env.traits.actions_vary is False
    assert not env.is_started


def test_written_state_returns_if_members_keep_it(make):
    def recur(h, observation):
        return observation[..., :2].clamp(-1, 1), h + 1

    def primed():
        chain = Compose(TensorDictPrimer(h=Unbounded((1,))), StepCounter(3))
        return TransformedEnv(CountingEnv(), chain)

    env = make(2, primed)
    policy = TensorDictModule(recur, ["h", "observation"], ["action", ("next", "h")])
    collected = SyncDataCollector(env, policy, frames_per_batch=16).next()
    for batch in (collected, env.rollout(8, policy, break_when_any_done=False)):
        assert batch["next", "done"].any()
        assert torch.equal(batch["h"], batch["step_count"].float())
        assert torch.equal(batch["next", "h"], batch["next", "step_count"].float())


def test_batch_passes_the_environment_checks(make):
    check_env_specs(make(2, oracle))


def test_steps_and_resets_by_mask(make):
    env = make(3, oracle, create_env_kwargs=streams(3))
    td = env.reset()
    assert td["observation"].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    td = env.step(td.set("action", torch.zeros(3, 2)))
    assert td["next", "observation"].tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
    assert td["next", "reward"].squeeze(-1).tolist() == [SCRIPT.reward(i, 0, 1) for i in range(3)]
    mask = torch.tensor([[False], [True], [False]])
    root = td["next"].exclude("reward").set("_reset", mask)
    kept = mask.clone()
    fresh = env.reset(root)
    assert fresh["observation"].tolist() == [[0, 0, 1], [1, 1, 0], [2, 0, 1]]
    assert fresh is root and torch.equal(mask, kept) and "_reset" not in fresh.keys()
    none = env.reset(fresh.set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
    assert none["observation"].tolist() == fresh["observation"].tolist()


def test_collector_delivers_complete_streams(make):
    env = make(3, oracle, create_env_kwargs=streams(3))
    batches = list(SyncDataCollector(env, None, frames_per_batch=24, total_frames=120))
    assert [batch.shape for batch in batches] == [(3, 8)] * 5
    check_stream(batches, SCRIPT)
    first = batches[0]["collector", "traj_ids"][:, 0].tolist()
    assert first == [0, 1, 2]
    assert env.is_closed


def test_batches_can_be_nested(make):
    env = make(2, counting, create_env_kwargs=[{}, {"first": 2}])
    assert env.batch_size == (2, 2) and env.set_seed(3) == 6
    assert env.seeds == [[3], [5]]
    batches = list(SyncDataCollector(env, None, frames_per_batch=20, total_frames=40))
    assert batches[0].shape == (2, 2, 5)
    check_stream([batch.reshape(4, 5) for batch in batches], SCRIPT)


def test_seeds_are_chained(make):
    env = make(6, oracle)
    assert env.set_seed(1) == 6
    env.reset()
    assert [resets[-1][0] for resets in env.resets] == [1, 2, 3, 4, 5, 6]
    assert env.set_seed(1, static_seed=True) == 1
    env.reset()
    assert [resets[-1][0] for resets in env.resets] == [1] * 6


def test_keyword_arguments_of_each_reset(make):
    env = make(2, oracle)
    env.reset(list_of_kwargs=[{"options": {"a": 1}}, {"seed": 5}], seed=3)
    assert [resets[-1] for resets in env.resets] == [(3, {"a": 1}), (5, None)]
    with pytest.raises(LengthError, match="list_of_kwargs"):
        env.reset(list_of_kwargs=[{}])


def test_attributes_and_methods_of_members_are_listed(make):
    env = make(2, oracle, create_env_kwargs=streams(2))
    assert env.stream == [0, 1]
    assert env.is_started
    assert env.hello("you") == ["hello you from 0", "hello you from 1"]
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        env.nothing_of_the_kind  # noqa: B018
    with pytest.raises(AttributeError):
        env._private  # noqa: B018
    assert dispatched("a", [1, len], lambda *_: []) == [1, len]


def test_keyword_arguments_can_be_added_before_the_start(make):
    env = make(2, oracle, create_env_kwargs={"stream": 3})
    env.update_kwargs([{}, {"stream": 4}])
    assert env.stream == [3, 4]
    with pytest.raises(InvalidArgumentError, match="exist already"):
        env.update_kwargs({})
    with pytest.raises(LengthError, match="update_kwargs"):
        make(2, oracle).update_kwargs([{}])


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn", None])
def test_start_method_argument_has_no_effect(make, method):
    env = make(2, oracle, mp_start_method=method)
    assert env.reset().shape == (2,)


def test_closed_batch_refuses_every_call(make):
    env = make(2, oracle)
    env.close()
    for use in (
        env.rand_step,
        lambda: env.stream,
        lambda: env.set_seed(0),
        env.start,
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_closed_batch_opens_again_at_a_reset(make):
    env = make(2, oracle, create_env_kwargs=streams(2))
    first = env.reset()
    env.close()
    again = env.reset()
    assert not env.is_closed and torch.equal(again["observation"], first["observation"])
    env.rollout(3)
    env.close()
    env.close()
    with pytest.raises(ClosedError):
        env.rollout(3, auto_reset=False, tensordict=again)
    assert env.rollout(3).shape == (2, 3)
    assert env.state_dict().keys() == {"worker0", "worker1"}


def test_closed_batch_of_given_environments_cannot_be_reopened():
    env = SerialEnv(1, oracle())
    env.reset()
    env.close()
    with pytest.raises(ClosedError, match="pass a callable"):
        env.reset()
    assert env.is_closed


def test_step_mask_steps_only_its_members(make):
    env = make(3, CountingEnv, create_env_kwargs={"script": Script(lengths=(9,))})
    root = env.step_mdp(env.rand_step(env.reset()))
    root["_step"] = torch.tensor([True, False, True])
    after = env.step(env.rand_action(root))["next"]
    assert after["observation"][:, 2].tolist() == [2, 1, 2] and not after["done"].any()
    assert after["reward"][1] == 0 and (after["reward"][[0, 2]] != 0).all()
    root = env.rand_action(env.step_mdp(root))
    del root["_step"]
    assert env.step(root)["next", "observation"][:, 2].tolist() == [3, 2, 3]
    root["_step"] = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(InvalidArgumentError, match="at least one True in the '_step' mask"):
        env.step(root)


def test_unstarted_batch_is_copied_and_pickled(make):
    env = make(2, oracle, create_env_kwargs=streams(2))
    again = [copy.deepcopy(env), cloudpickle.loads(cloudpickle.dumps(env)), pickle.loads(pickle.dumps(env))]
    assert all(other.stream == [0, 1] for other in again)
    for other in again:
        with pytest.raises(InvalidArgumentError, match="started batch"):
            copy.deepcopy(other)
        other.close()
    assert not env.is_started


def test_batch_in_a_serial_env_has_two_dimensions(make):
    env = SerialEnv(2, make(2, oracle, create_env_kwargs=streams(2)))
    assert env.batch_size == (2, 2)
    assert env.stream == [[0, 1], [0, 1]]
    env.close()


def test_state_dict_restores_members(make):
    env = make(2, CountingEnv)
    state = env.state_dict()
    assert list(state) == ["worker0", "worker1"]
    env.load_state_dict(state)
    env.load_state_dict({})
    with pytest.raises(MissingKeyError, match="worker1"):
        env.load_state_dict({"worker0": {}})
    with pytest.raises(RuntimeError, match="expected the state of a"):
        env.load_state_dict(3)


def test_collector_state_can_be_loaded_after_its_environments_ended(make):
    class Counted(CountingEnv):
        def __init__(self):
            super().__init__(SCRIPT)
            self.register_buffer("total", torch.zeros(()))

        def _step(self, tensordict):
            self.total += 1
            return super()._step(tensordict)

    collector = SyncDataCollector(make(2, Counted), None, frames_per_batch=20, total_frames=40)
    assert len(list(collector)) == 2
    state = copy.deepcopy(collector.state_dict())
    assert [float(member["total"]) for member in state["env_state_dict"].values()] == [20, 20]
    other = SyncDataCollector(make(2, Counted), None, frames_per_batch=20, total_frames=60)
    with pytest.warns(UserWarning, match="2 trajectories end"):
        other.load_state_dict(state)
    assert [float(member["total"]) for member in other.state_dict()["env_state_dict"].values()] == [20, 20]
    assert len(list(other)) == 1
    assert list(make(2, oracle).state_dict()) == ["worker0", "worker1"]


def test_nested_keys_and_groups_are_stacked(make):
    env = make(2, lambda: TeamEnv(SCRIPT, nested_flags=True))
    assert ("agents", "action") in env.action_keys and env.reset_keys == ["_reset", ("agents", "_reset")]
    batch = env.rollout(9, break_when_any_done=False)
    assert batch["next", "agents", "reward"].shape == (2, 9, 2, 1)
    pose = make(2, nested).rollout(9, break_when_any_done=False)["next", "robot", "pose"]
    assert pose.shape == (2, 9, 3)


def test_members_with_different_bounds_keep_their_bounds(make):
    def wide():
        env = CountingEnv(SCRIPT)
        env.action_spec = Bounded(-2.0, 2.0, (2,))
        return env

    env = make(2, [lambda: CountingEnv(SCRIPT), wide])
    assert contains_lazy_spec(env.full_action_spec)
    torch.manual_seed(0)
    actions = env.rollout(60, break_when_any_done=False)["action"]
    assert actions[0].abs().max() <= 1 < actions[1].abs().max() <= 2


def test_different_members_are_stacked_lazily(make):
    env = make(2, [oracle, with_goal])
    td = env.reset()
    assert isinstance(td, LazyStackedTensorDict) and "goal" in td[1].keys() and "goal" not in td[0].keys()
    td = env.rand_step(td)
    assert td["next", "observation"].tolist() == [[0, 0, 1], [0, 0, 1]]
    assert td[1]["next", "goal"].shape == (2, 2)
    fresh = env.reset(td["next"].set("_reset", torch.tensor([[True], [False]])))
    assert fresh["observation"].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert equal(fresh[1].select("goal"), td[1]["next"].select("goal"))
    batch = env.rollout(20)
    assert batch.names[-1] == "time" and batch[1]["next", "goal"].shape == (batch.shape[1], 2, 2)
    assert bool(batch["next", "done"][:, -1].any()) and not bool(batch["next", "done"][:, :-1].any())
    with pytest.raises(UnsupportedError, match="don't fit in one batch of columns"):
        SyncDataCollector(env, None, frames_per_batch=4, total_frames=4)
    with pytest.raises(ValueError, match="share_individual_td"):
        make(2, [oracle, with_goal], share_individual_td=False)


def test_unsupported_arguments_are_refused(make):
    for name in ("pin_memory", "allow_step_when_done"):
        with pytest.raises(ValueError, match=name):
            make(2, oracle, **{name: True})
    with pytest.raises(RuntimeError, match="memmap"):
        make(2, oracle, memmap=True)
    with pytest.raises(RuntimeError, match="add_truncated_keys"):
        make(2, oracle).add_truncated_keys()
    with pytest.raises(ValueError, match="device"):
        make(2, [CountingEnv, lambda: CountingEnv(device="cpu")])


def test_no_op_options_are_accepted_and_device_moves_data(make):
    env = make(
        2,
        oracle,
        device="cpu",
        shared_memory=False,
        non_blocking=True,
        use_buffers=False,
        consolidate=False,
        daemon=True,
        serial_for_single=True,
    )
    assert env.device == torch.device("cpu") and env.reset().device == torch.device("cpu")
    assert env.rollout(3).device == torch.device("cpu")
    mixed = make(2, [CountingEnv, lambda: CountingEnv(device="cpu")], device="cpu")
    assert mixed.reset()["observation"].shape == (2, 3)


def test_thread_cap_holds_while_the_batch_is_open(make):
    before = torch.get_num_threads()
    env = make(2, oracle, num_threads=before + 2)
    env.start()
    assert torch.get_num_threads() == before + 2
    env.close()
    assert torch.get_num_threads() == before


def test_done_flags_of_a_reset_are_kept(make):
    env = make(2, lambda: StillDoneEnv(allow_done_after_reset=True))
    assert env.allow_done_after_reset and env.reset()["done"].all()


def test_rollout_continues_from_a_root(make):
    env = make(2, oracle, create_env_kwargs=streams(2))
    root = env.reset()
    batch = env.rollout(3, auto_reset=False, tensordict=root, break_when_any_done=False)
    assert batch["observation"][:, 0].tolist() == root["observation"].tolist()


@pytest.mark.parametrize("around", [lambda env: env, lambda env: TransformedEnv(env, StepCounter())])
@pytest.mark.parametrize(
    "make", [lambda: SerialEnv(2, oracle), lambda: ParallelEnv(2, oracle), lambda: AsyncEnvPool([oracle] * 2)]
)
def test_batch_is_closed_before_its_members_are_made_and_after_they_were_closed(make, around):
    env = around(make())
    assert env.is_closed and not env.was_closed
    env.reset()
    assert not env.is_closed
    env.close()
    assert env.is_closed and env.was_closed


def test_unstarted_batch_that_was_closed_stays_closed():
    env = TransformedEnv(SerialEnv(2, oracle), StepCounter())
    env.close()
    with pytest.raises(ClosedError):
        env.step(env.fake_tensordict())
