"""Names and modules of other releases that aren't served, each with a sentence that says what to use instead.

A name isn't there for `hasattr`; to take it as an attribute, or by ``from module import name``, raises with the
sentence.
"""

from __future__ import annotations

from typing import NamedTuple


class Unserved(NamedTuple):
    """Names of other releases that have no counterpart here."""

    module: str
    """The module that has them; the modules below it may have them, too."""
    names: str
    """The names, with spaces in between."""
    why: str
    """What to use instead."""


class UnservedModules(NamedTuple):
    """Modules of other releases that have no counterpart here, nor have the modules below them."""

    package: str
    """The package that they are in."""
    names: str
    """Their names in the package, with spaces in between."""
    why: str
    """What to use instead."""


# Environments of other libraries, by the path below gleanrl.envs.libs: names, the package that they need.
_WRAPPERS = {
    "brax": ("BraxEnv BraxWrapper", "brax"),
    "craftground": ("CraftGroundEnv CraftGroundWrapper", "craftground"),
    "dm_control": ("DMControlEnv DMControlWrapper", "dm_control"),
    "envpool": ("MultiThreadedEnv MultiThreadedEnvWrapper", "envpool"),
    "genesis": ("GenesisEnv GenesisWrapper", "genesis-world"),
    "habitat": ("HabitatEnv", "habitat-lab"),
    "isaac_lab": ("IsaacLabWrapper", "isaaclab"),
    "isaacgym": ("IsaacGymEnv IsaacGymWrapper", "isaacgym"),
    "jumanji": ("JumanjiEnv JumanjiWrapper", "jumanji"),
    "lbforaging": ("LBForagingEnv LBForagingWrapper", "lbforaging"),
    "libero": ("LiberoEnv LiberoWrapper", "libero"),
    "meltingpot": ("MeltingpotEnv MeltingpotWrapper", "dm-meltingpot"),
    "mjlab": ("MJLabEnv MJLabWrapper", "mjlab"),
    "mujoco_playground": (
        "MujocoPlaygroundAgentMapping MujocoPlaygroundAgentSpec MujocoPlaygroundEnv MujocoPlaygroundWrapper",
        "playground",
    ),
    "openml": ("OpenMLEnv", "scikit-learn"),
    "openspiel": ("OpenSpielEnv OpenSpielWrapper", "open_spiel"),
    "pettingzoo": ("PettingZooEnv PettingZooWrapper", "pettingzoo"),
    "procgen": ("ProcgenEnv ProcgenWrapper", "procgen"),
    "robohive": ("RoboHiveEnv", "robohive"),
    "safety_gymnasium": ("SafetyGymnasiumEnv SafetyGymnasiumWrapper", "safety-gymnasium"),
    "smacv2": ("SMACv2Env SMACv2Wrapper", "smacv2"),
    "unity_mlagents": ("UnityMLAgentsEnv UnityMLAgentsWrapper", "mlagents_envs"),
    "vmas": ("VmasEnv VmasWrapper", "vmas"),
}
_THEIR_ENV = "make TorchRL's own, which collectors, SerialEnv, ParallelEnv and TransformedEnv take"
_THEIR_DATA = "TorchRL's own works with our batches"
_THEIR_TRANSFORM = "put TorchRL's own into a TransformedEnv"
_WEIGHTS = "update_policy_weights_ sends weights; for another way derive from WeightUpdaterBase"
_TRAJECTORIES = (
    "split rb[:] by gleanrl.collectors.utils.split_trajectories, and choose among the trajectories"
)
_UNIT = "the sampler says what is drawn: SliceSampler draws slices, RandomSampler draws transitions"
_FROM_BUFFERS = "import the class from gleanrl.data.replay_buffers"

UNSERVED = (
    # Collectors
    Unserved("gleanrl.collectors", "RayWeightUpdater", "RayCollector sends weights itself"),
    Unserved("gleanrl.collectors", "RemoteModuleWeightUpdater", _WEIGHTS),
    Unserved("gleanrl.collectors", "DistributedWeightUpdater RPCWeightUpdater", _WEIGHTS),
    Unserved("gleanrl.collectors", "Evaluator RayEvalWorker", "evaluate with env.rollout"),
    Unserved(
        "gleanrl.collectors",
        "DEFAULT_SLURM_CONF submitit_delayed_launcher",
        "start a Ray cluster on the machines that Slurm gave (`ray start`), and pass "
        "ray_init_config={'address': 'auto'}",
    ),
    Unserved(
        "gleanrl.collectors",
        "AsyncBatchedCollector",
        "SyncDataCollector over a ParallelEnv asks the policy once for a batch of environments",
    ),
    Unserved("gleanrl.collectors", "ProfileConfig", "profile the program, for example with torch.profiler"),
    Unserved("gleanrl.collectors", "DEFAULT_EXPLORATION_TYPE", "it is ExplorationType.RANDOM"),
    Unserved(
        "gleanrl.collectors",
        "INSTANTIATE_TIMEOUT WEIGHT_SYNC_TIMEOUT _MAX_IDLE_COUNT _MIN_TIMEOUT _TIMEOUT",
        "pass timeouts=gleanrl.envs.Timeouts(...) to the collector",
    ),
    Unserved("gleanrl.collectors", "cudagraph_mark_step_begin", "torch.compiler has it"),
    Unserved(
        "gleanrl.collectors",
        "_Interruptor _InterruptorManager _is_osx _main_async_collector",
        "a part of TorchRL's workers; preemptive_threshold= ends the batches of slow workers",
    ),
    Unserved("gleanrl.collectors", "print_remote_collector_info", "collector.stats() has the counters"),
    # Data
    Unserved(
        "gleanrl.data",
        "PromptGroupSampler StreamingSliceSampler",
        "SamplerWithoutReplacement serves each record once an epoch; a class with its own sample() draws in any way",
    ),
    Unserved(
        "gleanrl.data",
        "CompressedListStorageCheckpointer",
        "give no checkpointer: rb.dumps writes a CompressedListStorage",
    ),
    Unserved("gleanrl.data", "DEFAULT_DONE_KEYS", "write the keys: ('done', 'terminated', 'truncated')"),
    Unserved(
        "gleanrl.data",
        "Trajectory TrajectoryPredicate filter_trajectories find_start_stop_traj iter_trajectories traj",
        _TRAJECTORIES,
    ),
    Unserved(
        "gleanrl.data",
        "ConditionalUpdateResult",
        "write rb[index] = records where rb.generation(index) is the batch's `_generation`",
    ),
    Unserved("gleanrl.data", "SampleUnit Sequence Transition", _UNIT),
    Unserved(
        "gleanrl.data",
        "StoreStorage",
        "LazyMemmapStorage keeps records on disk, RayReplayBuffer in another process",
    ),
    Unserved("gleanrl.data", "prefill_replay_buffer", "extend the buffer with batches of the data set"),
    Unserved("gleanrl.data", "as_remote", "make a RayReplayBuffer"),
    Unserved(
        "gleanrl.data",
        " ".join(
            f"{kind}SegmentTreeFp{bits}"
            for kind in ("CudaMin", "CudaSum", "Min", "Sum")
            for bits in ("32", "64")
        ),
        "priorities are in the compiled core; use PrioritizedSampler",
    ),
    Unserved(
        "gleanrl.data.replay_buffers.utils",
        "Flat2TED H5Combine H5Split Nested2TED TED2Flat TED2Nested",
        _FROM_BUFFERS,
    ),
    Unserved("gleanrl.data.replay_buffers.utils", "pin_memory_output", "pass pin_memory=True to the buffer"),
    Unserved(
        "gleanrl.data.replay_buffers.utils", "tree_iter", "torch.utils._pytree.tree_leaves gives the leaves"
    ),
    Unserved("gleanrl.data.replay_buffers.utils", "unravel_index", "torch.unravel_index is it"),
    Unserved("gleanrl.data.tensor_specs", "NO_DEFAULT_RL", "compare with None"),
    Unserved("gleanrl.data.tensor_specs", "invertible_dict", "use a dict and its inverse"),
    Unserved(
        "gleanrl.data",
        "AdaptiveKLController ConstantKLController ContentBase History PairwiseDataset PromptData "
        "PromptTensorDictTokenizer RewardData RolloutFromModel TensorDictTokenizer TokenizedDatasetLoader "
        "TopKRewardSelector create_infinite_iterator get_dataloader",
        f"language models are out of scope; {_THEIR_DATA}",
    ),
    Unserved(
        "gleanrl.data",
        "BinaryToDecimal HashToInt MCTSForest QueryModule RandomProjectionHash SipHash TensorDictMap TensorMap Tree",
        f"maps and search trees are out of scope; {_THEIR_DATA}",
    ),
    Unserved(
        "gleanrl.data",
        "ActionTokenizerBase RobotDatasetMetadata UniformActionTokenizer VideoClipRef VocabTailActionTokenizer "
        "clear_video_decoder_cache set_video_decoder_cache_size validate_vla_tensordict",
        f"vision and language models of robots are out of scope; {_THEIR_DATA}",
    ),
    # Environments
    *(
        Unserved("gleanrl.envs", names, f"it needs the package {package}; {_THEIR_ENV}")
        for names, package in (*_WRAPPERS.values(), ("MOGymEnv MOGymWrapper", "mo-gymnasium"))
    ),
    Unserved(
        "gleanrl.envs",
        "AntEnv ChessEnv CubeBowlEnv FinancialRegimeEnv HopperEnv HumanoidEnv LLMHashingEnv MicroDuckEnv "
        "MicroDuckTask MujocoEnv SatelliteEnv ToyVLAEnv Walker2dEnv",
        f"a simulator of TorchRL; {_THEIR_ENV}",
    ),
    Unserved(
        "gleanrl.envs",
        "DreamerDecoder DreamerEnv ImaginedEnv MeanActionSelector WorldModelEnv",
        "derive from ModelBasedEnvBase, or make TorchRL's own",
    ),
    Unserved("gleanrl.envs", "BatchedEnvBase", "use SerialEnv or ParallelEnv, or derive from one of them"),
    Unserved("gleanrl.envs", "lazy lazy_property", "SerialEnv and ParallelEnv start at their first reset"),
    Unserved("gleanrl.envs", "clear_mpi_env_vars", "remove the variables of MPI from os.environ"),
    Unserved(
        "gleanrl.envs.libs.gym",
        "convert_box_spec convert_dict_spec convert_dict_spec2 convert_discrete_spec convert_multi_binary_spec "
        "convert_multidiscrete_spec convert_sequence_spec convert_text_soec convert_tuple_spec",
        "GymEnv converts spaces itself; register_gym_spec_conversion adds a conversion",
    ),
    Unserved(
        "gleanrl.envs.libs.gym", "terminal_obs_reader", "set_info_dict_reader takes a reader of other info"
    ),
    # Transforms
    Unserved(
        "gleanrl.envs",
        "R3MTransform VC1Transform VIPRewardTransform VIPTransform",
        f"pretrained image networks are out of scope; {_THEIR_TRANSFORM}",
    ),
    Unserved(
        "gleanrl.envs",
        "ActionChunkTransform ActionScaling ExpandAs FlattenAction FlattenTensorDict MicroDuckTaskSampler "
        "ModuleTransform NextObservationDelta NextStateReconstructor ObservationTransform PolicyAgeFilter "
        "RNDTransform RandomTruncationTransform RayTransform RunningMeanStd TerminateTransform gSDENoise",
        _THEIR_TRANSFORM,
    ),
    Unserved(
        "gleanrl.envs",
        "KLRewardTransform Tokenizer",
        f"language models are out of scope; {_THEIR_TRANSFORM}",
    ),
    Unserved(
        "gleanrl.envs",
        "ActionTokenizerTransform CartesianSolver DecodeVideoTransform HumanoidMacroAction MacroAction "
        "MacroPrimitive MacroPrimitiveTransform RobotMacroAction RobotMacroActionMode SatelliteAttitudeTransform "
        "SatelliteMacroAction SuccessReward TargetMacroAction URScriptPrimitive URScriptPrimitiveTransform",
        f"robots are out of scope; {_THEIR_TRANSFORM}",
    ),
)

UNSERVED_MODULES = (
    UnservedModules(
        "gleanrl", "services", "RayCollector and RayReplayBuffer are the services of other processes"
    ),
    UnservedModules("gleanrl", "weight_update", _WEIGHTS),
    UnservedModules(
        "gleanrl.collectors.distributed",
        "default_configs ray_eval_worker utils",
        "import the collectors from gleanrl.collectors.distributed",
    ),
    *(
        UnservedModules(f"gleanrl.{part}", "llm", "language models are out of scope; use TorchRL's own")
        for part in ("collectors", "data", "envs")
    ),
    UnservedModules(
        "gleanrl.data",
        "datasets",
        "extend a buffer with batches of TorchRL's own data sets, or pass one to OfflineToOnlineReplayBuffer",
    ),
    UnservedModules("gleanrl.data", "map", f"maps and search trees are out of scope; {_THEIR_DATA}"),
    UnservedModules("gleanrl.data", "video vla", f"data of robots are out of scope; {_THEIR_DATA}"),
    UnservedModules("gleanrl.data.replay_buffers", "query", _TRAJECTORIES),
    UnservedModules("gleanrl.data.replay_buffers", "sample_units", _UNIT),
    UnservedModules(
        "gleanrl.data.replay_buffers.replay_buffers",
        "base deprecated ensemble prioritized prioritized_tensordict remote tensordict",
        _FROM_BUFFERS,
    ),
    UnservedModules(
        "gleanrl.data.replay_buffers.samplers",
        "llm prioritized_slice slice slice_without_replacement streaming_slice",
        _FROM_BUFFERS,
    ),
    UnservedModules("gleanrl.data.replay_buffers.storages", "list store utils", _FROM_BUFFERS),
    UnservedModules("gleanrl.envs.custom", "chess llm mujoco trading vla", _THEIR_ENV),
    *(
        UnservedModules("gleanrl.envs.libs", path, f"it needs the package {package}; {_THEIR_ENV}")
        for path, (_, package) in _WRAPPERS.items()
    ),
    UnservedModules("gleanrl.envs.libs", "jax_utils utils", "use the package that it serves"),
    UnservedModules(
        "gleanrl.envs.model_based",
        "dreamer imagined world_model_env",
        "derive from ModelBasedEnvBase, or make TorchRL's own",
    ),
    UnservedModules(
        "gleanrl.envs.transforms", "functional", "call a transform, for example CatFrames or GrayScale"
    ),
    UnservedModules(
        "gleanrl.envs.transforms", "mean_action_selector module r3m ray_service rnd vc1 vip", _THEIR_TRANSFORM
    ),
)

_NAMES: dict[str, list[Unserved]] = {}
for _row in UNSERVED:
    for _name in _row.names.split():
        _NAMES.setdefault(_name, []).append(_row)
_MODULES = {f"{row.package}.{name}": row.why for row in UNSERVED_MODULES for name in row.names.split()}


def unserved_module(path: str) -> str | None:
    """Return what to use instead of a module of another release; None if nothing is known of it."""
    return _MODULES.get(path)


def unserved_name(module: str, name: str) -> str | None:
    """Return what to use instead of a name of another release in a module; None if nothing is known of it."""
    for row in _NAMES.get(name, ()):
        if f"{module}.".startswith(f"{row.module}."):
            return row.why
    return _MODULES.get(f"{module}.{name}")
