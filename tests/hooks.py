"""Exercises of each public class, and the methods that the library calls then: `python -m tests.hooks` records these.

A *hook* is a public method, or one of `PRIVATE_HOOKS`, that the library calls on an object of a user's class.
`hooks.txt` lists them by class. Methods that only users call aren't hooks.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from inspect import isfunction
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl import collectors, data, envs, extending, testing
from gleanrl.checkpoint import Checkpoint
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import datasets
from gleanrl.data.replay_buffers import describe, scheduler, verify
from gleanrl.data.replay_buffers.utils import InPlaceSampler
from gleanrl.envs import check_env_specs, transforms
from gleanrl.errors import GleanError
from tests.gates import EXTENSION_POINTS
from tests.golden.cases import Drift, steps
from tests.golden.objects import MADE

EXTENDING = Path(__file__).resolve().parents[1] / "docs" / "extending"
LIST = Path(__file__).with_suffix(".txt")
SIZE = 8
POLICY = nn.Linear(3, 1)
PRIVATE_HOOKS = {
    *EXTENSION_POINTS,
    *("_get_server_weights", "_maybe_map_weights", "_sync_weights_with_worker"),  # of weight updaters
    *("_copy_span", "_copy_slots", "_pick", "_forget", "_current_content", "_empty"),  # of storages
    *("_plain_content", "_parse_content", "_take_content"),
    *("_add", "_extend", "_sample"),  # of buffers
}
"""Methods that the documentation tells users to override, private by their spelling only."""
Make = Callable[[], Any]
Kind = type[Any]


def pendulum() -> Any:
    return envs.GymEnv("Pendulum-v1")


def cart() -> Any:
    return envs.GymEnv("CartPole-v1")


# ------------------------------------------------------------------ exercises of each family
def step_by_hand(make: Make) -> None:
    env = make()
    try:
        env.set_seed(0)
        _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
        env.step(env.rand_action(root))
        env.load_state_dict(env.state_dict())
    finally:
        env.close()


def roll_out(make: Make) -> None:
    env = make()
    try:
        env.rollout(3)
        env.rollout(3, break_when_any_done=False)
    finally:
        env.close()


def check(make: Make) -> None:
    env = make()
    try:
        check_env_specs(env)
    finally:
        env.close()


def transform(make: Make) -> None:
    roll_out(lambda: transforms.TransformedEnv(make(), transforms.StepCounter(2)))


def collect(make: Make) -> None:
    collect_from(make())


def collect_from(env: Any, policy: Any = None, **options: Any) -> None:
    frames = 3 * (env.batch_size.numel() or 1)
    made = SyncDataCollector(env, policy, frames_per_batch=frames, total_frames=-1, **options)
    try:
        made.set_seed(0)
        batches = iter(made)
        next(batches)
        made.load_state_dict(made.state_dict())
        next(batches)
    finally:
        made.shutdown()


def collect_in_batch(make: Make) -> None:
    collect_from(envs.SerialEnv(2, make))


def step_in_batch(make: Make) -> None:
    step_by_hand(lambda: envs.SerialEnv(2, make))


def reset_some(make: Make) -> None:
    made = envs.SerialEnv(2, make)
    try:
        made.reset()
        made.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
    finally:
        made.close()


def around_pendulum(use: Callable[[Make], None]) -> Callable[[Make], None]:
    """Return an exercise of a transform, given an exercise of the environment that contains it."""

    def used(make: Make) -> None:
        use(lambda: transforms.TransformedEnv(pendulum(), make()))

    used.__name__ = use.__name__
    return used


def around_batch(make: Make) -> None:
    roll_out(lambda: transforms.TransformedEnv(envs.SerialEnv(2, pendulum), make()))


def use_buffer_transform(make: Make) -> None:
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(SIZE), batch_size=4, transform=make())
    buffer.extend(steps(0, 5))
    buffer.sample()
    buffer.load_state_dict(buffer.state_dict())


def rows(begin: int, end: int, made: Any) -> Any:
    """Return steps in the form that a buffer accepts: a list for lists, else a TensorDict."""
    found = steps(begin, end)
    return list(found.unbind(0)) if isinstance(made.storage, data.ListStorage) else found


def write_and_sample(make: Make) -> None:
    made = make()
    made.extend(rows(0, 5, made))
    made.add(steps(5, 6)[0])
    index = made.extend(rows(6, 11, made))
    made.sample()
    made.sample(2)
    next(iter(made))
    made[:], made[0], made[torch.arange(2)], made.stats()
    if hasattr(made, "update_priority"):
        made.update_priority(torch.as_tensor(index).flatten()[-2:], torch.ones(2))
        made.sample()
    made.empty()
    made.extend(rows(0, 4, made))
    made.sample()


def save(make: Make) -> None:
    made = make()
    made.extend(rows(0, 5, made))
    made.sample()
    made.load_state_dict(made.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        made.dumps(folder)
        made.loads(folder)
    made.sample()


def save_in_checkpoint(make: Make) -> None:
    made = make()
    made.extend(rows(0, 5, made))
    saved = Checkpoint(buffer=made)
    with tempfile.TemporaryDirectory() as folder:
        saved.save(folder)
        saved.load(folder)


def collect_into(make: Make) -> None:
    buffer = make()
    collect_from(pendulum(), replay_buffer=buffer)
    buffer.sample()


def use_collector(make: Make) -> None:
    made = make()
    try:
        made.set_seed(0)
        batches = iter(made)
        next(batches)
        made.update_policy_weights_()
        made.load_state_dict(made.state_dict())
        next(batches)
        with tempfile.TemporaryDirectory() as folder:
            Checkpoint(collector=made).save(folder)
        made.stats()
    finally:
        made.shutdown()


def act_in_rollout(make: Make) -> None:
    pendulum().rollout(3, make())


def act_in_collector(make: Make) -> None:
    collect_from(pendulum(), make())


def use_postproc(make: Make) -> None:
    collect_from(pendulum(), postproc=make())


def use_updater(make: Make) -> None:
    made = SyncDataCollector(pendulum(), POLICY, frames_per_batch=2, total_frames=-1, weight_updater=make())
    try:
        next(iter(made))
        made.update_policy_weights_(TensorDict.from_module(nn.Linear(3, 1)))
    finally:
        made.shutdown()


def use_checkpointer(make: Make) -> None:
    save(
        lambda: data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(SIZE), batch_size=4, checkpointer=make()
        )
    )


def use_scheduler(make: Make) -> None:
    made = scheduler.SchedulerList([make()])
    made.step()
    made.load_state_dict(made.state_dict())
    made.step()


def use_spec(make: Make, key: str) -> None:
    class Own(Drift):
        def __init__(self) -> None:
            super().__init__()
            if key == "action":
                self.action_spec = make()
            else:
                self.observation_spec = data.Composite(
                    place=make(), taken=data.Unbounded((1,), dtype=torch.int64)
                )

    step_by_hand(Own)
    collect(Own)


def act_by_spec(make: Make) -> None:
    use_spec(make, "action")


def observe_by_spec(make: Make) -> None:
    use_spec(make, "observation")


# ------------------------------------------------------------------ objects of a class or of a subclass
def with_storage(**options: Any) -> Callable[[Kind], Callable[[], Any]]:
    return lambda kind: lambda: data.TensorDictReplayBuffer(storage=kind(SIZE), batch_size=4, **options)


def with_sampler(*arguments: Any, **options: Any) -> Callable[[Kind], Make]:
    def maker(kind: Kind) -> Make:
        storage = data.LazyTensorStorage
        return lambda: data.TensorDictReplayBuffer(
            storage=storage(SIZE), sampler=kind(*arguments, **options), batch_size=4
        )

    return maker


def with_writer(**options: Any) -> Callable[[Kind], Make]:
    storage = data.LazyTensorStorage
    return lambda kind: (
        lambda: data.TensorDictReplayBuffer(storage=storage(SIZE), writer=kind(**options), batch_size=4)
    )


def plain(*arguments: Any, **options: Any) -> Callable[[Kind], Make]:
    return lambda kind: lambda: kind(*arguments, **options)


def list_storage(kind: Kind) -> Make:
    return lambda: data.ReplayBuffer(storage=kind(SIZE), batch_size=4)


def buffer_of(**options: Any) -> Callable[[Kind], Make]:
    return lambda kind: lambda: kind(storage=data.LazyTensorStorage(SIZE), batch_size=4, **options)


def sampler() -> Any:
    return data.PrioritizedSampler(SIZE, 0.6, 0.4)


SLICES = {"slice_len": 2, "traj_key": "episode", "strict_length": False}
OBSERVATION = {"in_keys": ["observation"]}
PRIORITIES = {"alpha": 0.6, "beta": 0.4}

ENV = (step_by_hand, roll_out, check, collect)
MEMBER = (*ENV, transform, step_in_batch, collect_in_batch, reset_some)
OF_ONE = tuple(map(around_pendulum, (step_by_hand, roll_out, collect)))
TRANSFORM = (*OF_ONE, around_pendulum(reset_some), around_batch)
BUFFER = (write_and_sample, save, save_in_checkpoint)
SINK = (*BUFFER, collect_into)

EXERCISES: dict[Kind, tuple[tuple[Callable[[Make], None], ...], Callable[[Kind], Make]]] = {
    Drift: (MEMBER, plain()),
    envs.GymEnv: (MEMBER, plain("Pendulum-v1")),
    envs.GymWrapper: (MEMBER, lambda kind: lambda: kind(gymnasium.make("Pendulum-v1"))),
    envs.PendulumEnv: (ENV, plain()),
    envs.TicTacToeEnv: (ENV, plain()),
    envs.TransformedEnv: (MEMBER, lambda kind: lambda: kind(pendulum(), transforms.RewardSum())),
    envs.SerialEnv: (ENV, plain(2, pendulum)),
    envs.ParallelEnv: (ENV, plain(2, pendulum)),
    **{
        kind: (TRANSFORM, plain())
        for kind in (
            *(transforms.Transform, transforms.Compose, transforms.StepCounter, transforms.RewardSum),
            *(transforms.InitTracker, transforms.DoubleToFloat, transforms.FiniteTensorDictCheck),
            *(
                transforms.Timer,
                transforms.TrajCounter,
                transforms.RemoveEmptySpecs,
                transforms.AutoResetTransform,
            ),
        )
    },
    transforms.CatFrames: (TRANSFORM, plain(2, -1, **OBSERVATION)),
    transforms.ClipTransform: (TRANSFORM, plain(**OBSERVATION, low=-1.0, high=1.0)),
    transforms.SignTransform: (TRANSFORM, plain(**OBSERVATION)),
    transforms.ObservationNorm: (TRANSFORM, plain(0.0, 2.0, **OBSERVATION)),
    transforms.VecNorm: (TRANSFORM, plain(**OBSERVATION)),
    transforms.VecNormV2: (TRANSFORM, plain(**OBSERVATION)),
    transforms.UnsqueezeTransform: (TRANSFORM, plain(-1, **OBSERVATION)),
    transforms.TimeMaxPool: (TRANSFORM, plain(**OBSERVATION, T=2)),
    transforms.CatTensors: (TRANSFORM, plain(["observation"], "joined")),
    transforms.RenameTransform: (TRANSFORM, plain(["observation"], ["seen"])),
    transforms.ExcludeTransform: (TRANSFORM, plain("observation")),
    transforms.DTypeCastTransform: (TRANSFORM, plain(torch.float32, torch.float64, **OBSERVATION)),
    transforms.DeviceCastTransform: (TRANSFORM, plain("cpu")),
    transforms.RewardScaling: (TRANSFORM, plain(0.0, 2.0)),
    transforms.RewardClipping: (TRANSFORM, plain(-1.0, 1.0)),
    transforms.TargetReturn: (TRANSFORM, plain(3.0)),
    transforms.NoopResetEnv: (OF_ONE, plain(2)),
    transforms.FrameSkipTransform: (TRANSFORM, plain(2)),
    transforms.TensorDictPrimer: (TRANSFORM, plain(hidden=data.Unbounded((2,)), expand_specs=True)),
    transforms.ActionDiscretizer: (TRANSFORM, plain(3)),
    transforms.MultiStepTransform: ((use_buffer_transform,), plain(2, 0.9)),
    transforms.RandomCropTensorDict: ((use_buffer_transform,), plain(1)),
    transforms.UnaryTransform: (
        (use_buffer_transform,),
        plain(["episode"], ["doubled"], fn=torch.Tensor.double),
    ),
    data.LazyTensorStorage: (BUFFER, with_storage()),
    data.LazyMemmapStorage: (BUFFER, with_storage()),
    data.ListStorage: (BUFFER, list_storage),
    data.LazyStackStorage: (BUFFER, list_storage),
    data.CompressedListStorage: (BUFFER, list_storage),
    data.RandomSampler: (BUFFER, with_sampler()),
    data.SamplerWithoutReplacement: (BUFFER, with_sampler()),
    data.ConsumingSampler: (BUFFER, with_sampler(max_sample_count=9)),
    data.PrioritizedSampler: (BUFFER, with_sampler(SIZE, 0.6, 0.4)),
    data.SliceSampler: (BUFFER, with_sampler(**SLICES)),
    data.SliceSamplerWithoutReplacement: (BUFFER, with_sampler(**SLICES)),
    data.PrioritizedSliceSampler: (BUFFER, with_sampler(SIZE, 0.6, 0.4, **SLICES)),
    data.RoundRobinWriter: (BUFFER, with_writer()),
    data.TensorDictRoundRobinWriter: (BUFFER, with_writer()),
    data.TensorDictMaxValueWriter: (BUFFER, with_writer(rank_key=("next", "reward"))),
    data.ReplayBuffer: (SINK, buffer_of()),
    data.TensorDictReplayBuffer: (SINK, buffer_of()),
    data.PrioritizedReplayBuffer: (BUFFER, buffer_of(**PRIORITIES)),
    data.TensorDictPrioritizedReplayBuffer: (SINK, buffer_of(**PRIORITIES)),
    data.TensorStorageCheckpointer: ((use_checkpointer,), plain()),
    data.FlatStorageCheckpointer: ((use_checkpointer,), plain()),
    data.NestedStorageCheckpointer: ((use_checkpointer,), plain()),
    data.MultiStep: ((use_postproc,), plain(0.9, 2)),
    scheduler.LinearScheduler: (
        (use_scheduler,),
        lambda kind: lambda: kind(sampler(), "beta", 1.0, num_steps=5),
    ),
    scheduler.StepScheduler: (
        (use_scheduler,),
        lambda kind: lambda: kind(sampler(), "beta", gamma=0.9, n_steps=2),
    ),
    data.BoundedContinuous: ((act_by_spec,), plain(-1.0, 1.0, (1,))),
    data.UnboundedContinuous: ((observe_by_spec,), plain((1,))),
    collectors.SyncDataCollector: (
        (use_collector,),
        lambda kind: lambda: kind(pendulum(), nn.Linear(3, 1), frames_per_batch=3, total_frames=-1),
    ),
    collectors.RandomPolicy: (
        (act_in_rollout, act_in_collector),
        lambda kind: lambda: kind(pendulum().action_spec),
    ),
    collectors.VanillaWeightUpdater: ((use_updater,), plain(policy_weights=TensorDict.from_module(POLICY))),
}
"""Classes that users derive from, each with its exercises and a function that makes an object of a given subclass."""


LEFT_OUT = {
    "values that the library never calls back": (
        *(describe.ColumnStatistics, describe.BufferDescription, describe.StoredEpisodes),
        *(verify.AuditReport, verify.AuditProblem, envs.EnvMetaData, envs.Timeouts, envs.MarlGroupMapType),
        *(envs.Greedy, data.Compact),
        *(data.HindsightStrategy, data.MinSize, data.SamplesPerInsert, testing.EnvReport, testing.PartReport),
        *(extending.BoundaryKeys, extending.BufferStats, extending.Carry, extending.EnvTraits),
        *(extending.EpisodeRules, extending.Field, extending.OwnedGenerator, extending.OwnedTorchGenerator),
        *(
            extending.Placement,
            extending.Prepared,
            extending.RateCounts,
            extending.Schema,
            extending.Selection,
        ),
        *(extending.StepFault, extending.Version, *(kind for kind in MADE if issubclass(kind, GleanError))),
    ),
    "specs that share the methods of those exercised, and their spaces": tuple(
        kind
        for kind in MADE
        if kind.__module__.startswith(data.Composite.__module__.rpartition(".")[0])
        and kind not in (data.BoundedContinuous, data.UnboundedContinuous)
    ),
    "transforms that share the methods of those exercised": tuple(
        kind for kind in MADE if issubclass(kind, transforms.Transform) and kind not in EXERCISES
    ),
    "parts that need a file, data or other parts": (
        *(data.TensorStorage, data.StorageEnsemble, data.SamplerEnsemble, data.WriterEnsemble),
        *(
            data.ImmutableDatasetWriter,
            data.StalenessAwareSampler,
            data.ReplayBufferEnsemble,
            data.HERReplayBuffer,
        ),
        *(data.OfflineToOnlineReplayBuffer, data.H5StorageCheckpointer, data.ListStorageCheckpointer),
        *(data.StorageEnsembleCheckpointer, data.TED2Flat, data.Flat2TED, data.TED2Nested, data.Nested2TED),
        *(data.H5Split, data.H5Combine, data.DensifyReward, InPlaceSampler, scheduler.LambdaScheduler),
        *(scheduler.SchedulerList, envs.EnvCreator, envs.default_info_dict_reader),
        *(datasets.D4RLExperienceReplay, datasets.MinariExperienceReplay),
    ),
}
"""Public classes without an exercise."""

TOGETHER = (envs.ParallelEnv,)
"""Classes whose objects start processes. All of their hooks are overridden at once, to start fewer processes."""


# ------------------------------------------------------------------ overriding
def methods(kind: Kind) -> list[str]:
    """Return the methods of a class that users may override."""
    found = {
        name
        for base in kind.__mro__
        if base.__module__.split(".")[0] in ("gleanrl", "tests")
        for name, value in vars(base).items()
        if isfunction(value) and (not name.startswith("_") or name in PRIVATE_HOOKS)
    }
    return sorted(found)


def overriding(kind: Kind, names: Iterable[str], called: set[str]) -> Kind:
    """Return a class derived from `kind` whose methods record the library's calls in `called` and call the original."""

    def method(name: str) -> Any:
        def own(self: Any, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].split(".")[0] not in ("tests", "__main__"):
                called.add(name)
            return getattr(super(derived, self), name)(*args, **kwargs)

        own.__name__ = name
        return own

    derived = type(f"Own{kind.__name__}", (kind,), {name: method(name) for name in names})
    return derived


def called_of(kind: Kind, use: Callable[[Make], None], *names: str) -> set[str]:
    """Return which of the overridden methods `names` the library calls during the exercise `use`."""
    called: set[str] = set()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use(EXERCISES[kind][1](overriding(kind, names, called)))
    return called


def documented() -> set[str]:
    """Return the words in code of the pages on extending, and the spec methods, which one of the pages abbreviates."""
    texts = "".join(page.read_text() for page in sorted(EXTENDING.glob("*.md")))
    words = {word for code in re.findall(r"`([^`\n]+)`", texts) for word in re.findall(r"\w+", code)}
    return words | {
        f"transform_{part}_spec" for part in ("reward", "done", "action", "state", "input", "output")
    }


def listed() -> dict[tuple[str, str], list[str]]:
    """Return the recorded hooks by class name and exercise name."""
    rows = [line.split(": ") for line in LIST.read_text().splitlines()] if LIST.exists() else []
    return {tuple(who.split()): hooks.split() for who, hooks in rows}


def hooks_of(kind: Kind, use: Callable[[Make], None]) -> list[str]:
    """Return the methods that the library calls, overriding one at a time (for classes in `TOGETHER`: all at once)."""
    found: list[str] = []
    for names in [methods(kind)] if kind in TOGETHER else [[name] for name in methods(kind)]:
        try:
            found += sorted(called_of(kind, use, *names))
        except Exception as error:
            print(f"{kind.__name__}.{names[0]}: {error!r}"[:200])
    return found


def main() -> None:
    """Record the present hooks of the classes named on the command line, or of all classes."""
    found = listed()
    for kind, (uses, _) in EXERCISES.items():
        for use in uses:
            if len(sys.argv) < 2 or kind.__name__ in sys.argv[1:]:
                found[kind.__name__, use.__name__] = hooks_of(kind, use)
                print(kind.__name__, use.__name__, *found[kind.__name__, use.__name__], flush=True)
    LIST.write_text("".join(f"{name} {use}: {' '.join(hooks)}\n" for (name, use), hooks in found.items()))


if __name__ == "__main__":
    main()
