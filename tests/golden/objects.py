"""One object of each public class that can be pickled, and the reasons why other classes can't."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import isclass
from typing import Any

import gymnasium as gym
import torch
from torch import nn

from gleanrl import collectors, data, envs, errors, extending, testing
from gleanrl.checkpoint import Checkpoint
from gleanrl.collectors import distributed
from gleanrl.data import datasets
from gleanrl.data.replay_buffers import describe, scheduler, verify
from gleanrl.data.replay_buffers.utils import InPlaceSampler
from gleanrl.envs import transforms
from tests.golden.cases import buffer, cart, filled, module
from tests.public_names import NOT_IMPORTED, listed, resolved

SIZE = 4


@cache
def public_classes() -> dict[str, type[Any]]:
    """Return each class of the package with a public name, by its shortest name."""
    found: dict[type[Any], str] = {}
    for name in sorted(listed(), key=lambda name: (name.count("."), name)):
        value = None if name in NOT_IMPORTED else resolved(name)
        if isclass(value) and value.__module__.split(".")[0] == "gleanrl":
            found.setdefault(value, name)
    return {name: kind for kind, name in found.items()}


def sampler() -> data.PrioritizedSampler:
    return data.PrioritizedSampler(SIZE, 0.6, 0.4)


def schedule() -> Any:
    return scheduler.LinearScheduler(sampler(), "beta", final_value=1.0, num_steps=5)


KEY = {"in_keys": ["observation"]}
MADE: dict[type[Any], Callable[[], Any]] = {
    # Specs.
    data.Binary: lambda: data.Binary(3),
    data.BoundedContinuous: lambda: data.BoundedContinuous(-1.0, 1.0, (2,)),
    data.BoundedDiscrete: lambda: data.BoundedDiscrete(0, 4, (2,)),
    data.Categorical: lambda: data.Categorical(5),
    data.Choice: lambda: data.Choice([data.Categorical(2), data.Categorical(3)]),
    data.Composite: lambda: data.Composite(a=data.Unbounded((2,)), b=data.Composite(c=data.OneHot(3))),
    data.MultiCategorical: lambda: data.MultiCategorical([2, 3]),
    data.MultiOneHot: lambda: data.MultiOneHot([2, 3]),
    data.NonTensor: lambda: data.NonTensor((2,)),
    data.OneHot: lambda: data.OneHot(4),
    data.Stacked: lambda: data.Stacked(data.Unbounded((2,)), data.Unbounded((3,)), dim=0),
    data.StackedComposite: lambda: data.StackedComposite(
        data.Composite(a=data.Unbounded((2,))), data.Composite(a=data.Unbounded((3,))), dim=0
    ),
    data.UnboundedContinuous: lambda: data.UnboundedContinuous((2,)),
    data.UnboundedDiscrete: lambda: data.UnboundedDiscrete((2,)),
    resolved("gleanrl.data.tensor_specs.BoxList"): lambda: data.MultiCategorical([2, 3]).space,
    resolved("gleanrl.data.tensor_specs.CategoricalBox"): lambda: data.Categorical(5).space,
    resolved("gleanrl.data.tensor_specs.ContinuousBox"): lambda: (
        data.BoundedContinuous(-1.0, 1.0, (2,)).space
    ),
    # Storages.
    data.Compact: lambda: data.Compact({"pixels": 4}),
    data.CompressedListStorage: lambda: data.CompressedListStorage(SIZE),
    data.LazyMemmapStorage: lambda: data.LazyMemmapStorage(SIZE),
    data.LazyStackStorage: lambda: data.LazyStackStorage(SIZE),
    data.LazyTensorStorage: lambda: data.LazyTensorStorage(SIZE),
    data.ListStorage: lambda: data.ListStorage(SIZE),
    data.StorageEnsemble: lambda: data.StorageEnsemble(data.ListStorage(SIZE), data.ListStorage(SIZE)),
    data.TensorStorage: lambda: data.TensorStorage(torch.arange(SIZE)),
    # Samplers.
    data.ConsumingSampler: data.ConsumingSampler,
    data.PrioritizedSampler: sampler,
    data.PrioritizedSliceSampler: lambda: data.PrioritizedSliceSampler(SIZE, 0.6, 0.4, slice_len=2),
    data.RandomSampler: data.RandomSampler,
    data.SamplerEnsemble: lambda: data.SamplerEnsemble(
        data.RandomSampler(), data.SamplerWithoutReplacement()
    ),
    data.SamplerWithoutReplacement: data.SamplerWithoutReplacement,
    data.SliceSampler: lambda: data.SliceSampler(slice_len=2),
    data.SliceSamplerWithoutReplacement: lambda: data.SliceSamplerWithoutReplacement(slice_len=2),
    data.StalenessAwareSampler: data.StalenessAwareSampler,
    # Writers.
    data.ImmutableDatasetWriter: data.ImmutableDatasetWriter,
    data.RoundRobinWriter: data.RoundRobinWriter,
    data.TensorDictMaxValueWriter: lambda: data.TensorDictMaxValueWriter(rank_key="reward"),
    data.TensorDictRoundRobinWriter: data.TensorDictRoundRobinWriter,
    data.WriterEnsemble: lambda: data.WriterEnsemble(data.RoundRobinWriter(), data.RoundRobinWriter()),
    # Buffers and their parts.
    data.PrioritizedReplayBuffer: lambda: data.PrioritizedReplayBuffer(alpha=0.6, beta=0.4),
    data.ReplayBuffer: lambda: data.ReplayBuffer(batch_size=SIZE),
    data.ReplayBufferEnsemble: lambda: data.ReplayBufferEnsemble(buffer(), buffer(), batch_size=SIZE),
    data.TensorDictPrioritizedReplayBuffer: lambda: filled("td_priorities"),
    data.TensorDictReplayBuffer: lambda: filled("slices"),
    data.HERReplayBuffer: lambda: data.HERReplayBuffer(
        torch.eq, storage=data.LazyTensorStorage(SIZE), batch_size=2
    ),
    data.OfflineToOnlineReplayBuffer: lambda: data.OfflineToOnlineReplayBuffer(
        buffer(), online_capacity=SIZE
    ),
    describe.ColumnStatistics: lambda: filled("slices").describe()["action"],
    describe.BufferDescription: lambda: filled("slices").describe(),
    describe.StoredEpisodes: lambda: filled("slices").episodes(),
    verify.AuditReport: lambda: filled("td_priorities").verify(),
    verify.AuditProblem: lambda: verify.AuditProblem("schema", 1, 0, "expected one, got another"),
    data.FlatStorageCheckpointer: data.FlatStorageCheckpointer,
    data.H5StorageCheckpointer: data.H5StorageCheckpointer,
    data.ListStorageCheckpointer: data.ListStorageCheckpointer,
    data.NestedStorageCheckpointer: data.NestedStorageCheckpointer,
    data.StorageEnsembleCheckpointer: data.StorageEnsembleCheckpointer,
    data.TensorStorageCheckpointer: data.TensorStorageCheckpointer,
    data.MinSize: lambda: data.MinSize(3),
    data.SamplesPerInsert: lambda: data.SamplesPerInsert(2.0, min_size=3),
    data.HindsightStrategy: lambda: next(iter(data.HindsightStrategy)),
    data.TED2Flat: data.TED2Flat,
    data.Flat2TED: data.Flat2TED,
    data.TED2Nested: data.TED2Nested,
    data.Nested2TED: data.Nested2TED,
    data.H5Split: data.H5Split,
    data.H5Combine: data.H5Combine,
    data.MultiStep: lambda: data.MultiStep(0.9, 2),
    data.DensifyReward: data.DensifyReward,
    InPlaceSampler: InPlaceSampler,
    scheduler.LinearScheduler: schedule,
    scheduler.StepScheduler: lambda: scheduler.StepScheduler(sampler(), "beta", gamma=0.9, n_steps=2),
    scheduler.LambdaScheduler: lambda: scheduler.LambdaScheduler(sampler(), "beta", abs),
    scheduler.SchedulerList: lambda: scheduler.SchedulerList([schedule()]),
    # Environments.
    envs.GymEnv: cart,
    envs.GymWrapper: lambda: envs.GymWrapper(gym.make("CartPole-v1")),
    envs.PendulumEnv: envs.PendulumEnv,
    envs.TicTacToeEnv: envs.TicTacToeEnv,
    envs.SerialEnv: lambda: envs.SerialEnv(2, cart),
    envs.ParallelEnv: lambda: envs.ParallelEnv(2, cart),
    envs.TransformedEnv: lambda: transforms.TransformedEnv(cart(), transforms.StepCounter()),
    envs.EnvCreator: lambda: envs.EnvCreator(cart),
    envs.EnvMetaData: lambda: envs.get_env_metadata(cart()),
    envs.Timeouts: envs.Timeouts,
    envs.Greedy: lambda: envs.Greedy(one_hot=True),
    envs.RandomPolicy: lambda: envs.RandomPolicy(data.Categorical(3)),
    envs.MarlGroupMapType: lambda: envs.MarlGroupMapType.ALL_IN_ONE_GROUP,
    envs.default_info_dict_reader: lambda: envs.default_info_dict_reader(["a"]),
    # Transforms.
    transforms.ActionDiscretizer: lambda: transforms.ActionDiscretizer(3),
    transforms.ActionMask: transforms.ActionMask,
    transforms.AutoResetTransform: transforms.AutoResetTransform,
    transforms.BatchSizeTransform: lambda: transforms.BatchSizeTransform(batch_size=[2]),
    transforms.BinarizeReward: transforms.BinarizeReward,
    transforms.BurnInTransform: lambda: transforms.BurnInTransform([module()], 2, out_keys=["action"]),
    transforms.CatFrames: lambda: transforms.CatFrames(3, -1, **KEY),
    transforms.CatTensors: lambda: transforms.CatTensors(["a", "b"], "c"),
    transforms.CenterCrop: lambda: transforms.CenterCrop(2),
    transforms.ClipTransform: lambda: transforms.ClipTransform(**KEY, low=0.0),
    transforms.Compose: lambda: transforms.Compose(transforms.StepCounter(), transforms.RewardSum()),
    transforms.ConditionalPolicySwitch: lambda: transforms.ConditionalPolicySwitch(
        nn.Identity(), torch.is_tensor
    ),
    transforms.ConditionalSkip: lambda: transforms.ConditionalSkip(torch.is_tensor),
    transforms.Crop: lambda: transforms.Crop(2),
    transforms.DTypeCastTransform: lambda: transforms.DTypeCastTransform(torch.float32, torch.float64, **KEY),
    transforms.DeviceCastTransform: lambda: transforms.DeviceCastTransform("cpu"),
    transforms.DiscreteActionProjection: lambda: transforms.DiscreteActionProjection(2, 3),
    transforms.DoubleToFloat: transforms.DoubleToFloat,
    transforms.EndOfLifeTransform: transforms.EndOfLifeTransform,
    transforms.ExcludeTransform: lambda: transforms.ExcludeTransform("a"),
    transforms.FiniteTensorDictCheck: transforms.FiniteTensorDictCheck,
    transforms.FlattenObservation: lambda: transforms.FlattenObservation(-2, -1, **KEY),
    transforms.FrameSkipTransform: lambda: transforms.FrameSkipTransform(2),
    transforms.GrayScale: transforms.GrayScale,
    transforms.Hash: lambda: transforms.Hash(in_keys=["a"], out_keys=["b"], hash_fn=hash),
    transforms.InitTracker: transforms.InitTracker,
    transforms.LineariseRewards: lambda: transforms.LineariseRewards(["reward"]),
    transforms.MultiAction: transforms.MultiAction,
    transforms.MultiStepTransform: lambda: transforms.MultiStepTransform(2, 0.9),
    transforms.NoopResetEnv: lambda: transforms.NoopResetEnv(3),
    transforms.ObservationNorm: lambda: transforms.ObservationNorm(0.0, 1.0, **KEY),
    transforms.PermuteTransform: lambda: transforms.PermuteTransform((-1, -2), **KEY),
    transforms.PinMemoryTransform: transforms.PinMemoryTransform,
    transforms.RandomCropTensorDict: lambda: transforms.RandomCropTensorDict(2),
    transforms.RemoveEmptySpecs: transforms.RemoveEmptySpecs,
    transforms.RenameTransform: lambda: transforms.RenameTransform(["a"], ["b"]),
    transforms.Resize: lambda: transforms.Resize(2),
    transforms.Reward2GoTransform: transforms.Reward2GoTransform,
    transforms.RewardClipping: lambda: transforms.RewardClipping(-1.0, 1.0),
    transforms.RewardScaling: lambda: transforms.RewardScaling(0.0, 1.0),
    transforms.RewardSum: transforms.RewardSum,
    transforms.SelectTransform: lambda: transforms.SelectTransform("a"),
    transforms.SignTransform: lambda: transforms.SignTransform(**KEY),
    transforms.SqueezeTransform: lambda: transforms.SqueezeTransform(-1, **KEY),
    transforms.Stack: lambda: transforms.Stack(["a", "b"], "c"),
    transforms.StepCounter: transforms.StepCounter,
    transforms.TargetReturn: lambda: transforms.TargetReturn(1.0),
    transforms.TensorDictPrimer: lambda: transforms.TensorDictPrimer(a=data.Unbounded((2,))),
    transforms.TimeMaxPool: lambda: transforms.TimeMaxPool(**KEY),
    transforms.Timer: transforms.Timer,
    transforms.ToTensorImage: transforms.ToTensorImage,
    transforms.TrajCounter: transforms.TrajCounter,
    transforms.UnaryTransform: lambda: transforms.UnaryTransform(["a"], ["b"], fn=abs),
    transforms.UnsqueezeTransform: lambda: transforms.UnsqueezeTransform(-1, **KEY),
    transforms.VecGymEnvTransform: transforms.VecGymEnvTransform,
    transforms.VecNorm: lambda: transforms.VecNorm(**KEY),
    transforms.VecNormV2: lambda: transforms.VecNormV2(**KEY),
    # Names for extensions, and results.
    extending.BoundaryKeys: extending.BoundaryKeys,
    extending.BufferStats: lambda: buffer().stats(),
    extending.EnvTraits: extending.EnvTraits,
    extending.EpisodeRules: lambda: extending.EpisodeRules(max_steps=3),
    extending.Carry: lambda: extending.Carry({("observation",): torch.zeros(2)}, torch.zeros(())),
    extending.Field: lambda: extending.Field(torch.Size([2]), torch.float32),
    extending.OwnedGenerator: lambda: extending.OwnedGenerator(3),
    extending.OwnedTorchGenerator: lambda: extending.OwnedTorchGenerator(3),
    extending.Placement: lambda: extending.Placement(0, 2, 0, 0, 2, 4),
    extending.Prepared: lambda: extending.Prepared([1, 2], 2),
    extending.RateCounts: lambda: extending.RateCounts(*range(len(extending.RateCounts._fields))),
    extending.Schema: lambda: extending.Schema({("a",): extending.Field(torch.Size([2]), torch.float32)}),
    extending.Selection: lambda: extending.Selection(*(torch.arange(2),) * 3, 2),
    extending.Version: lambda: extending.Version(3, 4),
    extending.StepFault: lambda: extending.StepFault(1, 0, "step", ValueError("broken")),
    testing.EnvReport: lambda: testing.check_env(cart),
    testing.PartReport: lambda: testing.check_sampler(data.RandomSampler),
    **{
        error: lambda error=error: error("what came, what was expected")
        for error in vars(errors).values()
        if isclass(error) and issubclass(error, errors.GleanError) and error is not errors.ConformanceError
    },
    errors.ConformanceError: lambda: errors.ConformanceError("check", "where", "expected", "got"),
}

NOT_MADE = {
    "abstract classes and protocols": (
        *(data.Sampler, data.Storage, data.StorageCheckpointerBase, data.TensorSpec, data.Writer),
        *(
            data.Bounded,
            data.Unbounded,
            resolved("gleanrl.data.tensor_specs.Box"),
            scheduler.ParameterScheduler,
        ),
        *(envs.AsyncEnvPool, envs.BaseInfoDictReader, envs.EnvBase, envs.GymLikeEnv, envs.ModelBasedEnvBase),
        *(transforms.Transform, transforms.ForeignTransform, envs.set_gym_backend),
        *(
            extending.Actor,
            extending.Allocator,
            extending.Follower,
            extending.Stateful,
        ),
        *(extending.Stepper, extending.Unit),
        *(collectors.DataCollectorBase, collectors.WeightUpdaterBase),
    ),
    "parts of a running process, which save a state": (
        *(Checkpoint, collectors.SyncDataCollector, collectors.aSyncDataCollector, collectors.MultiCollector),
        *(collectors.MultiSyncDataCollector, collectors.MultiaSyncDataCollector, collectors.WorkersCollector),
        *(distributed.DistributedDataCollector, distributed.DistributedSyncDataCollector),
        *(distributed.RPCDataCollector, distributed.RayCollector, collectors.VanillaWeightUpdater),
        *(collectors.MultiProcessedWeightUpdater, data.RayReplayBuffer, data.RemoteTensorDictReplayBuffer),
        *(envs.ProcessorAsyncEnvPool, envs.ThreadingAsyncEnvPool, transforms.AutoResetEnv),
        *(
            extending.Block,
            extending.EpisodeTable,
            extending.Lease,
            extending.Mixture,
            extending.PriorityTable,
        ),
        extending.StateReader,
    ),
    "buffers of a file": (datasets.D4RLExperienceReplay, datasets.MinariExperienceReplay),
    "results that hold read-only mappings": (
        *(collectors.CollectorStats, collectors.WorkerStats, extending.Draw),
    ),
}
"""Classes without an object here, by the reason."""
