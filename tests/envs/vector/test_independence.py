"""Members of a batch that step one common object are refused; independent members are accepted."""

from __future__ import annotations

import copy
import functools

import gymnasium
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from tensordict import TensorDict

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import AsyncEnvPool, EnvBase, EnvCreator, GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import RewardSum, StepCounter
from gleanrl.envs.vector.independence import require_independent
from gleanrl.errors import InvalidArgumentError
from tests.envs.vector.makers import oracle, streams
from tests.fakes import OracleEnv

SAME = "step the same"


class Line:
    """A simulator of no known library."""

    def __init__(self):
        self.at = 0.0

    def reset(self):
        self.at = 0.0
        return self.at

    def step(self, action):
        self.at += 1.0
        return self.at


class Functions:
    """A stateless simulator, which gets its state as an argument."""

    def reset(self, seed):
        return 0.0

    def step(self, state, action):
        return state + 1.0


class LineEnv(EnvBase):
    """Steps a given simulator, kept in an attribute or in a list."""

    shared = Line()

    def __init__(self, simulator=None, in_list=False, **data):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Bounded(-1, 1, (1,))
        self.simulator = [simulator] if in_list else simulator
        self.data = data

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict(observation=torch.zeros(1))

    def _step(self, tensordict):
        return TensorDict(observation=torch.zeros(1), reward=torch.zeros(1))

    def _set_seed(self, seed):
        pass


def deep(env):
    return RecordEpisodeStatistics(TimeLimit(env, 50))


def twice_gym():
    simulator = OracleEnv()
    return [GymWrapper(simulator), GymWrapper(simulator)]


def twice_at_depths():
    simulator = OracleEnv()
    return [GymWrapper(deep(simulator)), TransformedEnv(GymWrapper(simulator))]


def twice_base():
    base = oracle()
    return [TransformedEnv(base, StepCounter()), TransformedEnv(base, StepCounter())]


def twice_kept_whole():
    base = TransformedEnv(oracle(), StepCounter())
    return [TransformedEnv(base, RewardSum(), auto_unwrap=False) for _ in range(2)]


def base_and_transformed():
    base = oracle()
    return [base, TransformedEnv(base)]


def twice_vector():
    simulator = OracleEnv()
    return [GymWrapper(SyncVectorEnv([lambda: simulator])) for _ in range(2)]


def twice_own_class():
    simulator = Line()
    return [LineEnv(simulator), LineEnv(simulator, in_list=True)]


def twice_shared_attribute():
    simulator = OracleEnv()
    return [LoggingEnv(simulator), LoggingEnv(simulator)]


def twice_stateless_environment():
    class Endless(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 0, 0.0, False, False, {}

    simulator = Endless()
    return [LineEnv(simulator), LineEnv(simulator)]


class Slotted:
    __slots__ = ("at",)

    def step(self, action):
        self.at = action

    def reset(self):
        self.at = 0


def twice_slotted():
    simulator = Slotted()
    return [LineEnv(simulator), LineEnv(simulator)]


def twice_behind_many_numbers():
    simulator = Line()
    envs = [LineEnv() for _ in range(2)]
    for env in envs:
        env.simulator = [*range(100_000), simulator]
    return envs


def twice_nested():
    simulator = OracleEnv()
    return [SerialEnv(1, [GymWrapper(simulator)]), TransformedEnv(SerialEnv(1, GymWrapper(simulator)), None)]


BATCHES = {
    "serial": lambda made: SerialEnv(len(made), made),
    "threads": lambda made: AsyncEnvPool(made, backend="threading"),
}
SHARING = [
    *(twice_gym, twice_at_depths, twice_base, twice_kept_whole, base_and_transformed),
    *(twice_vector, twice_own_class, twice_nested, twice_shared_attribute, twice_stateless_environment),
    *(twice_slotted, twice_behind_many_numbers),
]


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("made", SHARING)
def test_environments_that_step_one_object_raise_at_construction(made, batch):
    with pytest.raises(InvalidArgumentError, match=SAME):
        batch(made())


def test_thread_pools_in_a_batch_that_step_one_object_raise():
    simulator = OracleEnv()
    with pytest.raises(InvalidArgumentError, match=SAME):
        SerialEnv(2, [AsyncEnvPool([GymWrapper(simulator)]) for _ in range(2)])


def wrappers_of_one():
    return functools.partial(GymWrapper, OracleEnv())


def transforms_of_one():
    base = oracle()
    return lambda: TransformedEnv(base, StepCounter())


def nested_of_one():
    simulator = OracleEnv()
    return lambda: SerialEnv(1, lambda: GymWrapper(simulator))


def creator_of_one():
    return EnvCreator(functools.partial(GymWrapper, OracleEnv()))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("maker", [wrappers_of_one, transforms_of_one, nested_of_one, creator_of_one])
@pytest.mark.parametrize("as_list", [False, True])
def test_callables_that_wrap_one_object_raise_before_the_first_step(maker, batch, as_list):
    make = maker()
    env = BATCHES[batch]([make, (lambda: make()) if as_list else make])
    with pytest.raises(InvalidArgumentError, match=SAME):
        env.reset()
    assert not env.is_started


SIMULATOR = OracleEnv()


def global_simulator():
    return GymWrapper(SIMULATOR)


def test_environments_of_one_worker_process_are_compared_too():
    with (
        AsyncEnvPool([global_simulator] * 2, backend="multiprocessing", envs_per_worker=2) as pool,
        pytest.raises(Exception, match=SAME),
    ):
        pool.reset()


def test_error_for_an_object_that_may_be_shared_says_how():
    line, simulator = Line(), OracleEnv()
    with pytest.raises(InvalidArgumentError, match="shared_attributes of its holder"):
        SerialEnv(2, [LineEnv(line), LineEnv(line)])
    with pytest.raises(InvalidArgumentError, match=r"\(copy\.deepcopy\)$"):
        SerialEnv(2, [GymWrapper(simulator), GymWrapper(simulator)])


def test_vector_environment_of_one_simulator_raises():
    simulator = OracleEnv()
    with pytest.raises(InvalidArgumentError, match=SAME):
        GymWrapper(SyncVectorEnv([lambda: simulator] * 2))


def rolled(env):
    try:
        return env.rollout(4, break_when_any_done=False)
    finally:
        env.close()


def one_factory_twice():
    return [oracle] * 2


def same_environment_twice():
    return [oracle()] * 2


def same_batch_twice():
    return [SerialEnv(1, oracle)] * 2


def deep_copies():
    env = GymWrapper(deep(OracleEnv()))
    return [env, copy.deepcopy(env)]


def one_environment_returned_always():
    env = oracle()
    return [lambda: env, lambda: env]


def shared_data():
    data, functions = {"weights": torch.zeros(3)}, Functions()
    return [LineEnv(functions, data=data, model=torch.nn.Linear(1, 1)) for _ in range(2)]


def shared_class_attribute():
    return [LineEnv(), LineEnv()]


class Opponent:
    """Plays by its observation alone."""

    def step(self, observation):
        return 1

    def reset(self):
        pass


class Logger(Line):
    """Is stepped, and may be shared."""


class LoggingEnv(LineEnv):
    shared_attributes = ("simulator",)


class LoggingGym(OracleEnv):
    shared_attributes = ("logger",)

    def __init__(self, logger):
        super().__init__()
        self.logger = logger


def shared_opponent_without_attributes():
    opponent = Opponent()
    return [LineEnv(opponent, in_list=in_list) for in_list in (False, True)]


def shared_attribute_of_a_class():
    logger = Logger()
    return [LoggingEnv(logger, in_list=in_list) for in_list in (False, True)]


def shared_attribute_of_a_gymnasium_environment():
    logger = Logger()
    return [GymWrapper(deep(LoggingGym(logger))) for _ in range(2)]


def gymnasium_of_one_spec():
    spec = gymnasium.spec("CartPole-v1")
    return [GymWrapper(gymnasium.make(spec)) for _ in range(2)]


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    "made",
    [
        *(one_factory_twice, same_environment_twice, same_batch_twice, deep_copies),
        *(one_environment_returned_always, shared_data, shared_class_attribute, gymnasium_of_one_spec),
        *(shared_opponent_without_attributes, shared_attribute_of_a_class),
        shared_attribute_of_a_gymnasium_environment,
    ],
)
def test_independent_environments_are_accepted(made, batch):
    assert rolled(batch(made())).shape[0] == 2


def test_members_in_other_processes_are_copies():
    """Each worker gets its copy of the simulator."""
    expected = rolled(SerialEnv(2, oracle, create_env_kwargs=streams(1) * 2))
    found = rolled(ParallelEnv(2, twice_gym()))
    assert torch.equal(found["observation"], expected["observation"])


def test_environments_without_attributes_pass_the_check():
    require_independent([object(), object()])
