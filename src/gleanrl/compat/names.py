"""What other releases of this API call things: the one table of second names, other paths and names not served.

Nothing else in the library defines a second name. `docs/names.md` is made from this table.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Alias(NamedTuple):
    """A second name of something in a public module."""

    module: str
    """The public module; its own names are those of the reference documents."""
    name: str
    """The second name."""
    target: str
    """A name in the same module, or ``"module:name"`` elsewhere."""
    releases: str
    """The releases that have the name, both ends included."""


class Unserved(NamedTuple):
    """A name that programs import and that isn't served: it can be imported, and using it raises `why`."""

    module: str
    name: str
    why: str
    """What the name is, since or until which release, and what to use instead."""


class UnservedKeyword(NamedTuple):
    """A keyword of a public constructor that isn't served."""

    why: str
    """What to use instead."""
    off: Any = None
    """The value that asks for nothing, with which it is accepted."""


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


def _out_of_scope(names: str, why: str, *modules: str) -> tuple[Unserved, ...]:
    return tuple(Unserved(module, name, why) for module in modules for name in names.split())


# Environments of other libraries, which TorchRL wraps and this one doesn't, by the path below gleanrl.envs.libs: names,
# the package that they need, releases.
_WRAPPERS = {
    "brax": ("BraxEnv BraxWrapper", "brax", "0.1 to 0.14"),
    "craftground": ("CraftGroundEnv CraftGroundWrapper", "craftground", "since 0.13"),
    "dm_control": ("DMControlEnv DMControlWrapper", "dm_control", "0.1 to 0.14"),
    "envpool": ("MultiThreadedEnv MultiThreadedEnvWrapper", "envpool", "0.1 to 0.14"),
    "genesis": ("GenesisEnv GenesisWrapper", "genesis-world", "since 0.13"),
    "gym": ("MOGymEnv MOGymWrapper", "mo-gymnasium", "0.2 to 0.14"),
    "habitat": ("HabitatEnv", "habitat-lab", "0.1 to 0.14"),
    "isaac_lab": ("IsaacLabWrapper", "isaaclab", "since 0.9"),
    "isaacgym": ("IsaacGymEnv IsaacGymWrapper", "isaacgym", "0.1 to 0.14"),
    "jumanji": ("JumanjiEnv JumanjiWrapper", "jumanji", "0.1 to 0.14"),
    "lbforaging": ("LBForagingEnv LBForagingWrapper", "lbforaging", "since 0.13"),
    "libero": ("LiberoEnv LiberoWrapper", "libero", "since 0.13"),
    "meltingpot": ("MeltingpotEnv MeltingpotWrapper", "dm-meltingpot", "0.5 to 0.14"),
    "mjlab": ("MJLabEnv MJLabWrapper", "mjlab", "since 0.13"),
    "mujoco_playground": (
        "MujocoPlaygroundAgentMapping MujocoPlaygroundAgentSpec MujocoPlaygroundEnv MujocoPlaygroundWrapper",
        "playground",
        "since 0.13",
    ),
    "openml": ("OpenMLEnv", "scikit-learn", "0.2 to 0.14"),
    "openspiel": ("OpenSpielEnv OpenSpielWrapper", "open_spiel", "0.6 to 0.14"),
    "pettingzoo": ("PettingZooEnv PettingZooWrapper", "pettingzoo", "0.2 to 0.14"),
    "procgen": ("ProcgenEnv ProcgenWrapper", "procgen", "since 0.11"),
    "robohive": ("RoboHiveEnv", "robohive", "0.2 to 0.14"),
    "safety_gymnasium": ("SafetyGymnasiumEnv SafetyGymnasiumWrapper", "safety-gymnasium", "since 0.13"),
    "smacv2": ("SMACv2Env SMACv2Wrapper", "smacv2", "0.3 to 0.14"),
    "unity_mlagents": ("UnityMLAgentsEnv UnityMLAgentsWrapper", "mlagents_envs", "0.6 to 0.14"),
    "vmas": ("VmasEnv VmasWrapper", "vmas", "0.1 to 0.14"),
}

# Of replay buffers: names, and why.
_OF_BUFFERS = (
    (
        "PromptGroupSampler StreamingSliceSampler",
        "of 0.14; not served: SamplerWithoutReplacement serves each record once an epoch, and a class with a sample() "
        "of its own draws by whatever it likes",
    ),
)

UNSERVED: tuple[Unserved, ...] = (
    *(
        row
        for names, why in _OF_BUFFERS
        for row in _out_of_scope(names, why, "gleanrl.data", "gleanrl.data.replay_buffers")
    ),
    *_out_of_scope(
        "RayWeightUpdater RemoteModuleWeightUpdater",
        "sends weights to Ray actors, of 0.7 to 0.14; not served: RayCollector sends them itself; for a "
        "way of your own derive from WeightUpdaterBase",
        "gleanrl.collectors",
    ),
    *_out_of_scope(
        "DistributedWeightUpdater RPCWeightUpdater RayEvalWorker",
        "of 0.7 to 0.14; not served: collectors send weights themselves; evaluate with env.rollout",
        "gleanrl.collectors.distributed",
    ),
    *_out_of_scope(
        "DEFAULT_SLURM_CONF submitit_delayed_launcher",
        "starts jobs through submitit, of 0.1 to 0.14; not served: start a Ray cluster on the machines that Slurm gave "
        "(`ray start`), and pass ray_init_config={'address': 'auto'}",
        "gleanrl.collectors.distributed",
    ),
    *_out_of_scope(
        "AsyncBatchedCollector Evaluator ProfileConfig",
        "since 0.11; not served: SyncDataCollector over a ParallelEnv asks the policy once for a batch of environments",
        "gleanrl.collectors",
    ),
    *(
        row
        for path, (names, package, releases) in _WRAPPERS.items()
        for row in _out_of_scope(
            names,
            f"of {releases}, with the package {package}; not served: make TorchRL's own, which collectors, SerialEnv, "
            "ParallelEnv and TransformedEnv take as it is",
            *(["gleanrl.envs", "gleanrl.envs.libs.gym"] if path == "gym" else ["gleanrl.envs"]),
        )
    ),
    *_out_of_scope(
        "AntEnv ChessEnv CubeBowlEnv FinancialRegimeEnv HopperEnv HumanoidEnv LLMHashingEnv MicroDuckEnv MujocoEnv "
        "SatelliteEnv ToyVLAEnv Walker2dEnv",
        "a simulator of TorchRL's own, of 0.7 to 0.14; not served: make TorchRL's, which collectors, SerialEnv, "
        "ParallelEnv and TransformedEnv take as it is",
        "gleanrl.envs",
    ),
    *_out_of_scope(
        "DreamerDecoder DreamerEnv ImaginedEnv WorldModelEnv MeanActionSelector",
        "for Dreamer and the like, of 0.1 to 0.14; not served: derive from ModelBasedEnvBase, or make TorchRL's",
        "gleanrl.envs",
    ),
    *_out_of_scope(
        "AdaptiveKLController ConstantKLController ContentBase History PairwiseDataset PromptData "
        "PromptTensorDictTokenizer RewardData RolloutFromModel TensorDictTokenizer TokenizedDatasetLoader "
        "TopKRewardSelector create_infinite_iterator get_dataloader",
        "data of language models, of 0.2 to 0.14; out of scope: TorchRL's own works with our batches",
        "gleanrl.data",
    ),
    *_out_of_scope(
        "BinaryToDecimal HashToInt MCTSForest QueryModule RandomProjectionHash SipHash TensorDictMap TensorMap Tree",
        "maps and search trees, of 0.5 to 0.14; out of scope: TorchRL's own works with our batches",
        "gleanrl.data",
    ),
    *_out_of_scope(
        "ActionTokenizerBase RobotDatasetMetadata UniformActionTokenizer VideoClipRef VocabTailActionTokenizer "
        "clear_video_decoder_cache set_video_decoder_cache_size validate_vla_tensordict",
        "data of robots' vision and language models, since 0.13; out of scope: TorchRL's own works with our batches",
        "gleanrl.data",
    ),
    *_out_of_scope(
        "R3MTransform VC1Transform VIPTransform VIPRewardTransform",
        "a pretrained image network, of 0.1 to 0.14; out of scope: put TorchRL's own into a TransformedEnv",
        "gleanrl.envs",
        "gleanrl.envs.transforms",
    ),
    *_out_of_scope(
        "ActionChunkTransform ActionScaling ExpandAs FlattenAction FlattenTensorDict "
        "MicroDuckTaskSampler ModuleTransform NextObservationDelta NextStateReconstructor "
        "ObservationTransform PolicyAgeFilter RandomTruncationTransform RayTransform TerminateTransform gSDENoise",
        "a transform of 0.9 to 0.14 that isn't served: put TorchRL's own into a TransformedEnv",
        "gleanrl.envs",
        "gleanrl.envs.transforms",
    ),
    *_out_of_scope(
        "KLRewardTransform Tokenizer",
        "of language models, of 0.3 to 0.14; out of scope: put TorchRL's own into a TransformedEnv",
        "gleanrl.envs",
        "gleanrl.envs.transforms",
    ),
    *_out_of_scope(
        "ActionTokenizerTransform CartesianSolver DecodeVideoTransform HumanoidMacroAction MacroAction MacroPrimitive "
        "MacroPrimitiveTransform RobotMacroAction RobotMacroActionMode SatelliteAttitudeTransform SatelliteMacroAction "
        "SuccessReward TargetMacroAction URScriptPrimitive URScriptPrimitiveTransform",
        "for robots, since 0.13; out of scope: put TorchRL's own into a TransformedEnv",
        "gleanrl.envs",
        "gleanrl.envs.transforms",
    ),
)

# Module paths that hold nothing of their own: what each gives again, as "module" (all of its public names, those of
# the rows above included) or "module:name".
MODULES: dict[str, tuple[str, ...]] = {
    "gleanrl.collectors.collectors": ("gleanrl.collectors",),
    "gleanrl.collectors.weight_update": (
        "gleanrl.collectors:MultiProcessedWeightUpdater",
        "gleanrl.collectors:VanillaWeightUpdater",
        "gleanrl.collectors:WeightUpdaterBase",
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
        "gleanrl.data.specs.spaces:Box",
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
    **{
        f"gleanrl.envs.libs.{path}": tuple(f"gleanrl.envs:{name}" for name in names.split())
        for path, (names, _, _) in _WRAPPERS.items()
        if path != "gym"  # a module of ours
    },
    "gleanrl.envs.custom.tictactoeenv": ("gleanrl.envs:TicTacToeEnv",),
    "gleanrl.envs.transforms.gym_transforms": ("gleanrl.envs.transforms:EndOfLifeTransform",),
    "gleanrl.envs.transforms.rb_transforms": ("gleanrl.envs.transforms:MultiStepTransform",),
    "gleanrl.envs.transforms.transforms": ("gleanrl.envs.transforms",),
    "gleanrl.envs.transforms.utils": ("gleanrl.envs.transforms.checks:check_finite",),
}

# Older spellings of keywords of public constructors: {"class": {"older": "ours"}}.
_OF_SLICES = {"pad_output": "pad", "trajectory_key": "traj_key"}
KEYWORDS: dict[str, dict[str, str]] = {
    "Bounded": {"minimum": "low", "maximum": "high"},
    "Composite": {"batch_size": "shape"},
    "PrioritizedSliceSampler": _OF_SLICES,
    "SliceSampler": _OF_SLICES,
    "SliceSamplerWithoutReplacement": _OF_SLICES,
    "TransformedEnv": {"base_env": "env"},
    "UnsqueezeTransform": {"squeeze_dim": "dim", "unsqueeze_dim": "dim"},
    "WorkersCollector": {"replay_buffer_chunk": "extend_buffer"},
}

# Keywords of public constructors that aren't served: {"class": {"keyword": what to use instead}}.
_OF_COLLECTORS = {
    "auto_register_policy_transforms": UnservedKeyword(
        "append InitTracker() to the environment; the state of recurrent policies is kept without a primer"
    ),
    "compact_obs": UnservedKeyword(
        "batches hold next observations; leave them out with postproc=lambda batch: batch.exclude(('next', "
        "'observation'))",
        off=False,
    ),
    "weight_recv_schemes": UnservedKeyword("nobody sends weights but update_policy_weights_"),
    "weight_sync_schemes": UnservedKeyword(
        "update_policy_weights_ sends weights through shared memory; for a way of your own pass weight_updater="
    ),
    "worker_idx": UnservedKeyword("the numbers of workers are given by their places in create_env_fn"),
}
_OF_GYM = {
    "convert_actions_to_numpy": UnservedKeyword(
        "gymnasium environments get NumPy arrays; one that needs tensors makes them in a gymnasium.ActionWrapper",
        off=True,
    )
}
_OF_LAZY_STORAGES = {
    "shared_init": UnservedKeyword("make the buffer with shared=True before the processes start", off=False)
}
_OF_SLICE_SAMPLERS = {
    "fragmented": UnservedKeyword(
        "steps of a trajectory have to stand one after the other: write each environment's into a column of its own, "
        "with a storage of ndim=2",
        off=False,
    ),
    "step_key": UnservedKeyword("it's for fragmented=True"),
}
_OF_RING_WRITERS = {
    "track_generations": UnservedKeyword("they are always counted: rb.generation(index)", off=True)
}
_OF_BATCHES = {
    "metadata_from_workers": UnservedKeyword(
        "specs are read before there are workers; pass EnvCreator(make_env) to read them once for several batches",
        off=False,
    ),
    "shutdown_timeout": UnservedKeyword("use timeouts=Timeouts(close_s=seconds)"),
}
_USE_A_BUFFER = UnservedKeyword("write to the buffers themselves: ensemble[number] is one")
_USE_WORKERS = UnservedKeyword(
    "use MultiSyncDataCollector or MultiaSyncDataCollector with [create_env_fn] * num_workers"
)
_THROUGH_RAY = "data travel through Ray's object store"
_USE_RAY = "a RayReplayBuffer is the buffer in an actor"
_PLACED_BY_RAY = "Ray places the nodes and carries the batches; see ray_init_config and remote_configs"
_OF_RAY = {
    **_OF_COLLECTORS,
    "use_env_creator": UnservedKeyword("environments reach the nodes by cloudpickle as they are", off=False),
}
_OF_DISTRIBUTED = {
    **_OF_RAY,
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
    "EnvMetaData": dict.fromkeys(
        ("batch_locked", "device_map", "env_str", "supports_set_state", "tensordict"),
        UnservedKeyword("get_env_metadata(env) makes one"),
    ),
    "GymLikeEnv": {"spec_locked": UnservedKeyword("env.set_spec_lock_(False) unlocks the specs", off=True)},
    "PrioritizedSampler": {"device": UnservedKeyword("priorities live on the CPU", off="cpu")},
    "PrioritizedSliceSampler": _OF_SLICE_SAMPLERS,
    "ReplayBufferEnsemble": {
        "routing_dim": _USE_A_BUFFER,
        "routing_key": _USE_A_BUFFER,
        "shared": UnservedKeyword("share the buffers themselves", off=False),
    },
    "RoundRobinWriter": _OF_RING_WRITERS,
    "SerialEnv": _OF_BATCHES,
    "SliceSampler": _OF_SLICE_SAMPLERS,
    "SliceSamplerWithoutReplacement": _OF_SLICE_SAMPLERS,
    "TensorDictRoundRobinWriter": _OF_RING_WRITERS,
    "VecGymEnvTransform": {
        "missing_obs_value": UnservedKeyword("make the environment with AutoresetMode.DISABLED"),
        "native_autoreset": UnservedKeyword("make the environment with AutoresetMode.DISABLED", off=False),
    },
    "ReplayBuffer": {
        "consume_after_n_samples": UnservedKeyword("pass sampler=ConsumingSampler(max_sample_count=n)"),
        "sample_unit": UnservedKeyword(
            "the sampler says what is drawn: SliceSampler for slices, RandomSampler for transitions"
        ),
        "service_backend": UnservedKeyword(_USE_RAY, off="direct"),
        "service_backend_options": UnservedKeyword(_USE_RAY),
        "transport": UnservedKeyword(_USE_RAY, off="auto"),
        "transport_options": UnservedKeyword(_USE_RAY),
    },
    "GymEnv": _OF_GYM,
    "GymWrapper": _OF_GYM,
    "LazyMemmapStorage": {
        "auto_cleanup": UnservedKeyword(
            "files without a scratch_dir go with the process, those in one stay until you remove them"
        ),
        **_OF_LAZY_STORAGES,
    },
    "LazyTensorStorage": {
        "cleanup_memmap": UnservedKeyword("its records are in memory; LazyMemmapStorage has files"),
        **_OF_LAZY_STORAGES,
    },
    "ParallelEnv": _OF_BATCHES,
    "DistributedDataCollector": _OF_DISTRIBUTED,
    "DistributedSyncDataCollector": _OF_DISTRIBUTED,
    "RPCDataCollector": {
        **_OF_DISTRIBUTED,
        "tensorpipe_options": UnservedKeyword(_PLACED_BY_RAY),
        "visible_devices": UnservedKeyword(
            "Ray gives nodes their devices: ask for num_gpus in remote_configs"
        ),
    },
    "RayCollector": _OF_RAY,
    "SyncDataCollector": {
        **_OF_COLLECTORS,
        "backend": _USE_WORKERS,
        "backend_options": _USE_WORKERS,
        "num_collectors": _USE_WORKERS,
        "sync": _USE_WORKERS,
        "track_traj_ids": UnservedKeyword(
            "batches hold ids, at no cost; leave them out with postproc=lambda batch: batch.exclude('collector')",
            off=True,
        ),
    },
    "WorkersCollector": _OF_COLLECTORS,
}
