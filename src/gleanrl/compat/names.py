"""Tables of names, module paths and keywords of other TorchRL releases.

No other module defines such names. Names that aren't served are in `unserved`. `docs_page` writes `docs/names.md` from
these tables.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch


class Alias(NamedTuple):
    """A second name of an object in a public module."""

    module: str
    """The public module that gets the second name."""
    name: str
    """The second name."""
    target: str
    """The object: a name in the same module, or ``"module:name"``."""
    releases: str
    """The releases that have the name, first and last included."""


class UnservedKeyword(NamedTuple):
    """A keyword of a public constructor that isn't served."""

    why: str
    """What to use instead."""
    off: Any = None
    """The value that turns the feature off, or a tuple of such values. These and None are accepted."""


ALIASES = (
    Alias("gleanrl.collectors", "AsyncCollector", "aSyncDataCollector", "0.11 to 0.14"),
    Alias("gleanrl.collectors", "BaseCollector", "DataCollectorBase", "0.11 to 0.14"),
    Alias("gleanrl.collectors", "Collector", "SyncDataCollector", "0.11 to 0.14"),
    Alias("gleanrl.collectors", "MultiAsyncCollector", "MultiaSyncDataCollector", "0.11 to 0.14"),
    Alias("gleanrl.collectors", "MultiSyncCollector", "MultiSyncDataCollector", "0.11 to 0.14"),
    *(
        Alias("gleanrl.collectors.distributed", f"{name}Collector", f"{name}DataCollector", "0.11 to 0.14")
        for name in ("Distributed", "DistributedSync", "RPC")
    ),
    Alias("gleanrl.data.specs", "BinaryDiscreteTensorSpec", "Binary", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "BoundedTensorSpec", "Bounded", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "CompositeSpec", "Composite", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "DiscreteTensorSpec", "Categorical", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "LazyStackedCompositeSpec", "StackedComposite", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "LazyStackedTensorSpec", "Stacked", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "MultiDiscreteTensorSpec", "MultiCategorical", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "MultiOneHotDiscreteTensorSpec", "MultiOneHot", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "NonTensorSpec", "NonTensor", "0.5 to 0.7"),
    Alias("gleanrl.data.specs", "OneHotDiscreteTensorSpec", "OneHot", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "UnboundedContinuousTensorSpec", "UnboundedContinuous", "0.1 to 0.7"),
    Alias("gleanrl.data.specs", "UnboundedDiscreteTensorSpec", "UnboundedDiscrete", "0.1 to 0.7"),
    Alias("gleanrl.data", "DEVICE_TYPING", "gleanrl.data.specs.base:DeviceLike", "0.1 to 0.14"),
    Alias(
        "gleanrl.data.utils", "CloudpickleWrapper", "gymnasium.vector.utils:CloudpickleWrapper", "0.1 to 0.14"
    ),
    Alias("gleanrl.data.utils", "DEVICE_TYPING", "gleanrl.data.specs.base:DeviceLike", "0.1 to 0.14"),
    Alias(
        "gleanrl.data.tensor_specs", "BinaryBox", "gleanrl.data.specs.choices:CategoricalBox", "0.1 to 0.14"
    ),
    Alias(
        "gleanrl.data.tensor_specs", "DiscreteBox", "gleanrl.data.specs.choices:CategoricalBox", "0.1 to 0.14"
    ),
    Alias(
        "gleanrl.envs.transforms.transforms",
        "_apply_to_composite",
        "gleanrl.envs.transforms.spec_tools:apply_to_composite",
        "0.1 to 0.14",
    ),
    Alias(
        "gleanrl.envs.transforms.transforms",
        "_apply_to_composite_inv",
        "gleanrl.envs.transforms.spec_tools:apply_to_composite_inv",
        "0.1 to 0.14",
    ),
)


# Module paths of other releases, each with the objects that it re-exports: "module" (all of its public names) or
# "module:name".
MODULES: dict[str, tuple[str, ...]] = {
    "gleanrl.collectors.collectors": ("gleanrl.collectors",),
    "gleanrl.collectors.weight_update": (
        "gleanrl.collectors:MultiProcessedWeightUpdater",
        "gleanrl.collectors:VanillaWeightUpdater",
        "gleanrl.collectors:WeightUpdaterBase",
    ),
    "gleanrl.collectors.distributed.generic": ("gleanrl.collectors.distributed:DistributedCollector",),
    "gleanrl.collectors.distributed.rpc": ("gleanrl.collectors.distributed:RPCCollector",),
    "gleanrl.collectors.distributed.sync": ("gleanrl.collectors.distributed:DistributedSyncCollector",),
    "gleanrl.data.datasets.d4rl": ("gleanrl.data.datasets:D4RLExperienceReplay",),
    "gleanrl.data.datasets.minari_data": ("gleanrl.data.datasets:MinariExperienceReplay",),
    "gleanrl.data.replay_buffers.her": (
        "gleanrl.data.replay_buffers:HERReplayBuffer",
        "gleanrl.data.replay_buffers:HindsightStrategy",
    ),
    "gleanrl.data.replay_buffers.ray_buffer": ("gleanrl.data.replay_buffers:RayReplayBuffer",),
    "gleanrl.data.replay_buffers.replay_buffers": (
        "gleanrl.data.replay_buffers",
        "gleanrl.data.replay_buffers.utils:InPlaceSampler",
        "gleanrl.data.replay_buffers.utils:stack_tensors",
    ),
    "gleanrl.data.tensor_specs": (
        "gleanrl.data.specs",
        "gleanrl.data.specs.boxes:ContinuousBox",
        "gleanrl.data.specs.choices:BoxList",
        "gleanrl.data.specs.choices:CategoricalBox",
        "gleanrl.data.specs.leaf:Box",
    ),
    "gleanrl.data.utils": (
        "gleanrl.data.specs:check_no_exclusive_keys",
        "gleanrl.data.specs:consolidate_spec",
        "gleanrl.data.specs:contains_lazy_spec",
    ),
    "gleanrl.envs.async_envs": tuple(
        f"gleanrl.envs:{name}" for name in ("AsyncEnvPool", "ProcessorAsyncEnvPool", "ThreadingAsyncEnvPool")
    ),
    "gleanrl.envs.batched_envs": tuple(
        f"gleanrl.envs:{name}"
        for name in (
            "EnvCreator",
            "EnvMetaData",
            "ParallelEnv",
            "SerialEnv",
            "Timeouts",
            "env_creator",
            "get_env_metadata",
        )
    ),
    "gleanrl.envs.vec_envs": ("gleanrl.envs.batched_envs",),
    "gleanrl.envs.common": (
        "gleanrl.envs:EnvBase",
        "gleanrl.envs:EnvMetaData",
        "gleanrl.envs:make_tensordict",
    ),
    "gleanrl.envs.gym_like": (
        "gleanrl.envs:BaseInfoDictReader",
        "gleanrl.envs:GymLikeEnv",
        "gleanrl.envs:default_info_dict_reader",
    ),
    "gleanrl.envs.custom.tictactoeenv": ("gleanrl.envs:TicTacToeEnv",),
    "gleanrl.envs.transforms.gym_transforms": ("gleanrl.envs.transforms:EndOfLifeTransform",),
    "gleanrl.envs.transforms.rb_transforms": ("gleanrl.envs.transforms:MultiStepTransform",),
    "gleanrl.envs.transforms.transforms": ("gleanrl.envs.transforms",),
    "gleanrl.envs.transforms.vecnorm": ("gleanrl.envs.transforms:VecNormV2",),
    "gleanrl.envs.transforms.utils": ("gleanrl.envs.transforms.casting:check_finite",),
}

_SLICE_SAMPLER_SPELLINGS = {"pad_output": "pad", "trajectory_key": "traj_key"}
# Keywords of public constructors in other releases: {"class": {"their keyword": "gleanrl's keyword"}}.
KEYWORDS: dict[str, dict[str, str]] = {
    "Bounded": {"minimum": "low", "maximum": "high"},
    "BoxList": {"boxes": "n"},
    "Composite": {"batch_size": "shape"},
    "PrioritizedSliceSampler": _SLICE_SAMPLER_SPELLINGS,
    "SliceSampler": _SLICE_SAMPLER_SPELLINGS,
    "SliceSamplerWithoutReplacement": _SLICE_SAMPLER_SPELLINGS,
    "TransformedEnv": {"base_env": "env"},
    "UnsqueezeTransform": {"squeeze_dim": "dim", "unsqueeze_dim": "dim"},
    "WorkersCollector": {"replay_buffer_chunk": "extend_buffer"},
}

# The keyword for a surplus positional argument, and how to write a number there: {"class": {"keyword": "form"}}.
POSITIONAL: dict[str, dict[str, str]] = {
    "SourceCollector": {"frames_per_batch": "{}"},
    "ReplayBuffer": {"storage": "LazyTensorStorage({})"},
}

# Keywords of Stable-Baselines3, and the way to write them here. A class that has the keyword itself takes it.
ELSEWHERE = {
    "buffer_size": "ReplayBuffer(storage=LazyTensorStorage(buffer_size))",
    "gradient_steps": "a loop with one buffer.sample() for each step of the optimizer",
    "learning_starts": "init_random_frames=learning_starts for the collector",
    "n_envs": "GymEnv(name, num_envs=n_envs) as the collector's environment",
    "n_steps": "frames_per_batch=n_steps * num_envs for the collector",
    "total_timesteps": "total_frames=total_timesteps for the collector",
    "train_freq": "frames_per_batch=train_freq * num_envs for the collector",
}

# Keywords of public constructors that aren't served: {"class": {"keyword": advice}}.
_COLLECTOR_KEYWORDS = {
    "auto_register_policy_transforms": UnservedKeyword(
        "append InitTracker() to the environment; the state of recurrent policies is kept without a primer"
    ),
    "compact_obs": UnservedKeyword(
        "batches hold next observations; drop them with postproc=lambda batch: batch.exclude(('next', "
        "'observation'))",
        off=False,
    ),
    "weight_recv_schemes": UnservedKeyword(
        "update_policy_weights_ sends weights, and workers need no scheme to receive them"
    ),
    "weight_sync_schemes": UnservedKeyword(
        "update_policy_weights_ sends weights through shared memory; for another way pass weight_updater="
    ),
    "worker_idx": UnservedKeyword("a worker's number is its position in create_env_fn"),
}
_AUTORESET_KEYWORDS = {
    "missing_obs_value": UnservedKeyword(
        "make the environment with AutoresetMode.DISABLED", off=(math.nan, np.nan)
    ),
    "native_autoreset": UnservedKeyword("make the environment with AutoresetMode.DISABLED", off=False),
}
_LAZY_STORAGE_KEYWORDS = {
    "shared_init": UnservedKeyword("make the buffer with shared=True before the processes start", off=False)
}
_SLICE_SAMPLER_KEYWORDS = {
    "fragmented": UnservedKeyword(
        "a trajectory's steps must be contiguous: use a storage with ndim=2, and write each environment to its own "
        "column",
        off=False,
    ),
    "step_key": UnservedKeyword("only fragmented=True uses it, which isn't served", off="step_count"),
}
_RING_WRITER_KEYWORDS = {
    "track_generations": UnservedKeyword(
        "generations are always counted; read them by rb.generation(index)", off=(False, True)
    )
}
_BATCHED_ENV_KEYWORDS = {
    "metadata_from_workers": UnservedKeyword(
        "specs are read before the workers start; pass EnvCreator(make_env) to read them once for several batches",
        off=False,
    ),
    "shutdown_timeout": UnservedKeyword("use timeouts=Timeouts(close_s=seconds)", off=10.0),
}
_ON_THE_CPU = UnservedKeyword("priorities are stored on the CPU", off=("cpu", torch.device("cpu")))
_PRIORITY_KEYWORDS = {
    "sampler_device": _ON_THE_CPU,
    "sync": UnservedKeyword("records and their priorities are always written together", off=True),
}
_WITHOUT_REPLACEMENT = "SamplerWithoutReplacement and SliceSamplerWithoutReplacement draw without replacement"
_IN_THE_BUFFERS = "pass it to the buffers of the ensemble"
_IS_NEW = "VecNormV2 takes it"
_USE_A_BUFFER = UnservedKeyword("write to one of the buffers: ensemble[number] returns it")
_USE_WORKERS = UnservedKeyword(
    "use MultiSyncDataCollector or MultiaSyncDataCollector with [create_env_fn] * num_workers"
)
_THROUGH_RAY = "Ray's object store carries the data; no other transport is needed"
_USE_RAY = "use RayReplayBuffer for a buffer in an actor"
_PLACED_BY_RAY = "Ray places the nodes and carries the batches; see ray_init_config and remote_configs"
_RAY_KEYWORDS = {
    **_COLLECTOR_KEYWORDS,
    "use_env_creator": UnservedKeyword(
        "cloudpickle sends environments to the nodes without an EnvCreator", off=False
    ),
}
_DISTRIBUTED_KEYWORDS = {
    **_RAY_KEYWORDS,
    "backend": UnservedKeyword(_PLACED_BY_RAY, off="gloo"),
    "launcher": UnservedKeyword(_PLACED_BY_RAY, off="submitit"),
    "slurm_kwargs": UnservedKeyword(_PLACED_BY_RAY),
    "tcp_port": UnservedKeyword(_PLACED_BY_RAY),
}
UNSERVED_KEYWORDS: dict[str, dict[str, UnservedKeyword]] = {
    "RayReplayBuffer": {
        "transport": UnservedKeyword(_THROUGH_RAY, off="auto"),
        "transport_options": UnservedKeyword(_THROUGH_RAY),
    },
    "D4RLExperienceReplay": {
        "direct_download": UnservedKeyword("put the file into root", off=False),
        "terminate_on_end": UnservedKeyword(
            "from_hdf5(path, episode_ends=...) says where episodes end", off=False
        ),
        "use_truncated_as_done": UnservedKeyword("done is terminated or truncated", off=True),
    },
    "EnvMetaData": {
        **dict.fromkeys(
            ("batch_locked", "device_map", "env_str", "tensordict"),
            UnservedKeyword("get_env_metadata(env) returns an EnvMetaData"),
        ),
        "supports_set_state": UnservedKeyword("get_env_metadata(env) returns an EnvMetaData", off=False),
    },
    "CatFrames": {
        "future": UnservedKeyword("draw slices, which include the following frames", off=False),
        "mask_key": UnservedKeyword("StepCounter() counts the frames of an episode before each step"),
    },
    "Compose": {"transforms": UnservedKeyword("pass them one by one: Compose(*transforms)")},
    "ContinuousBox": {"device": UnservedKeyword("pass low and high on that device")},
    "EnvBase": {
        "policy": UnservedKeyword(
            "pass it to the collector or to rollout, which keep a recurrent policy's state; pass an argument of a "
            "gymnasium environment by GymWrapper(gymnasium.make(name, policy=...))"
        ),
    },
    "GymLikeEnv": {
        "convert_actions_to_numpy": UnservedKeyword(
            "gymnasium environments get NumPy arrays; to get tensors, convert the action in a "
            "gymnasium.ActionWrapper",
            off=True,
        )
    },
    "PrioritizedReplayBuffer": _PRIORITY_KEYWORDS,
    "PrioritizedSampler": {"device": _ON_THE_CPU},
    "PrioritizedSliceSampler": _SLICE_SAMPLER_KEYWORDS,
    "ReplayBufferEnsemble": {
        "routing_dim": _USE_A_BUFFER,
        "routing_key": _USE_A_BUFFER,
        **dict.fromkeys(
            (
                "checkpointer",
                "consume_after_n_samples",
                "dim_extend",
                "prefetch",
                "sample_unit",
                "service_backend_options",
                "transform_factory",
                "transport_options",
            ),
            UnservedKeyword(_IN_THE_BUFFERS),
        ),
        **dict.fromkeys(
            ("compilable", "delayed_init", "pin_memory", "shared", "use_ray_service"),
            UnservedKeyword(_IN_THE_BUFFERS, off=False),
        ),
        "service_backend": UnservedKeyword(_IN_THE_BUFFERS, off="direct"),
        "transport": UnservedKeyword(_IN_THE_BUFFERS, off="auto"),
    },
    "Sampler": {"replacement": UnservedKeyword(_WITHOUT_REPLACEMENT, off=True)},
    "SamplerEnsemble": {
        "replacement": UnservedKeyword("pass samplers that draw without replacement", off=True)
    },
    "SamplerWithoutReplacement": {
        "replacement": UnservedKeyword("RandomSampler draws with replacement", off=False)
    },
    "TensorDictPrimer": dict.fromkeys(
        ("batch_size", "device", "shape"),
        UnservedKeyword(
            "pass a composite that has it: TensorDictPrimer(Composite(..., shape=..., device=...))"
        ),
    ),
    "TensorDictPrioritizedReplayBuffer": _PRIORITY_KEYWORDS,
    "RoundRobinWriter": _RING_WRITER_KEYWORDS,
    "SerialEnv": _BATCHED_ENV_KEYWORDS,
    "SliceSampler": _SLICE_SAMPLER_KEYWORDS,
    "SliceSamplerWithoutReplacement": {
        **_SLICE_SAMPLER_KEYWORDS,
        "replacement": UnservedKeyword("SliceSampler draws with replacement", off=False),
    },
    "TensorDictRoundRobinWriter": _RING_WRITER_KEYWORDS,
    "VecGymEnvTransform": _AUTORESET_KEYWORDS,
    "VecNorm": {
        "reduce_batch_dims": UnservedKeyword(_IS_NEW, off=False),
        "shared_data": UnservedKeyword(_IS_NEW),
        "stateful": UnservedKeyword(_IS_NEW, off=True),
    },
    "ReplayBuffer": {
        "consume_after_n_samples": UnservedKeyword("pass sampler=ConsumingSampler(max_sample_count=n)"),
        "sample_unit": UnservedKeyword(
            "choose it by the sampler: SliceSampler draws slices, RandomSampler draws transitions"
        ),
        "service_backend": UnservedKeyword(_USE_RAY, off="direct"),
        "service_backend_options": UnservedKeyword(_USE_RAY),
        "transport": UnservedKeyword(_USE_RAY, off="auto"),
        "transport_options": UnservedKeyword(_USE_RAY),
        "use_ray_service": UnservedKeyword(_USE_RAY, off=False),
    },
    "GymEnv": {"backend": UnservedKeyword("gymnasium is the only backend", off="gymnasium")},
    "GymWrapper": {
        **_AUTORESET_KEYWORDS,
        "num_workers": UnservedKeyword("use ParallelEnv(num_workers, lambda: GymEnv(...))", off=1),
    },
    "LazyMemmapStorage": {
        "auto_cleanup": UnservedKeyword(
            "files without a scratch_dir are deleted with the storage; delete files in a scratch_dir yourself"
        ),
        **_LAZY_STORAGE_KEYWORDS,
    },
    "LazyTensorStorage": {
        "cleanup_memmap": UnservedKeyword(
            "this storage keeps its records in memory and has no files; LazyMemmapStorage has", off=True
        ),
        **_LAZY_STORAGE_KEYWORDS,
    },
    "ParallelEnv": _BATCHED_ENV_KEYWORDS,
    "DistributedDataCollector": {
        **_DISTRIBUTED_KEYWORDS,
        "update_interval": UnservedKeyword("use max_weight_update_interval"),
    },
    "DistributedSyncDataCollector": _DISTRIBUTED_KEYWORDS,
    "RPCDataCollector": {
        **_DISTRIBUTED_KEYWORDS,
        "tensorpipe_options": UnservedKeyword(_PLACED_BY_RAY),
        "visible_devices": UnservedKeyword("Ray assigns devices to nodes: set num_gpus in remote_configs"),
    },
    "RayCollector": _RAY_KEYWORDS,
    "SyncDataCollector": {
        **_COLLECTOR_KEYWORDS,
        "backend": _USE_WORKERS,
        "backend_options": _USE_WORKERS,
        "num_collectors": _USE_WORKERS,
        "sync": _USE_WORKERS,
        "track_traj_ids": UnservedKeyword(
            "batches hold ids at no cost; drop them with postproc=lambda batch: batch.exclude('collector')",
            off=True,
        ),
        "traj_pool": UnservedKeyword("ids of trajectories are unique over all workers"),
    },
    "MultiSyncDataCollector": {"sync": UnservedKeyword("use MultiaSyncDataCollector", off=True)},
    "MultiaSyncDataCollector": {"sync": UnservedKeyword("use MultiSyncDataCollector", off=False)},
    "WorkersCollector": _COLLECTOR_KEYWORDS,
    "aSyncDataCollector": {"sync": UnservedKeyword("use MultiSyncDataCollector", off=False)},
}
