"""Tables of names, modules and class members of other releases that aren't served, each with advice what to use.

`hasattr` returns False for such a name. Attribute access and ``from module import name`` raise an error with the
advice. A row for a class applies to its subclasses, too, unless a user's class defines or assigns the member.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from gleanrl._util import is_ours
from gleanrl.errors import UnservedMemberError


class UnservedMembers(NamedTuple):
    """Methods, attributes and arguments of methods that aren't served."""

    owner: str
    """The name of a public class."""
    names: str
    """The members, separated by spaces; an argument of a method is written ``method(argument)``."""
    why: str
    """What to use instead."""


_BY_NAME = "pass it to the constructor"
_ON_NEW = "to detect overwritten records, compare rb.generation(index) with the batch's ``_generation``"
_IN_PLACE = "write records, or a column of them: rb[index] = records, rb[key] = column"
_HERE = "a buffer in this process needs no start or end; its threads end with it"
_LATER = "to look at a batch of the collector, take one: next(iter(collector))"
_OWN_WEIGHTS = "update_policy_weights_ sends weights; for another way pass weight_updater="
_KEYWORD = "an argument of the constructor, which the object doesn't show; keep the value that you passed"
_BACK = "to_observation_norm() returns a transform that has an inverse"
_A_BUFFER = "use one of the buffers: ensemble[number] returns it"
_BY_PRIORITY = ("PrioritizedSampler", "PrioritizedSliceSampler")
_SLICE_SAMPLERS = ("SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler")
_PRIORITIZED = ("PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer")

UNSERVED_MEMBERS = (
    # ---------------------------------------------------------------- collectors
    UnservedMembers(
        "DataCollectorBase",
        "cascade_execute get_cached_weights get_distant_attr get_model receive_weights register_scheme_receiver",
        _OWN_WEIGHTS,
    ),
    UnservedMembers(
        "DataCollectorBase",
        "disable_profile enable_profile profile_config",
        "profile the program, for example with torch.profiler; collector.stats() returns the counters",
    ),
    UnservedMembers("DataCollectorBase", "set_post_collect_hook", f"post_collect_hook: {_BY_NAME}"),
    UnservedMembers("DataCollectorBase", "fake_tensordict", _LATER),
    UnservedMembers("DataCollectorBase", "verbose", "progress=True shows the counters"),
    UnservedMembers("DataCollectorBase", "worker_idx", "a worker's number is its position in create_env_fn"),
    UnservedMembers(
        "DataCollectorBase",
        "shutdown(raise_on_error) stats(workers)",
        "shutdown always raises errors; stats() always includes each worker's counters",
    ),
    UnservedMembers(
        "DataCollectorBase",
        "compiled_policy cudagraphed_policy get_weights_fn no_cuda_sync policy_weights trust_policy",
        _KEYWORD,
    ),
    UnservedMembers("SyncDataCollector", "device", "use env_device, policy_device or storing_device"),
    UnservedMembers(
        "WorkersCollector",
        "getattr_env getattr_policy map_fn",
        "workers are other processes; use the environment and policy that you passed, and counters from stats()",
    ),
    UnservedMembers(
        "WeightUpdaterBase", "collectors increment_version", "the collector counts versions: policy_version"
    ),
    # ---------------------------------------------------------------- buffers
    *(
        UnservedMembers(owner, names, why)
        for owner in ("ReplayBuffer", "ReplayBufferEnsemble")
        for names, why in (
            (
                "as_remote client is_alive service_backend",
                f"{_HERE}; for another process use RayReplayBuffer",
            ),
            ("start shutdown synchronize", _HERE),
            ("can_sample", "use len(rb); with a rate limiter, sample waits for enough records"),
            ("query", "split rb[:] by split_trajectories, or sample slices"),
            ("read_all_in_order write_all", "read rb[:end], and write rb[:end] = records"),
            ("set_ set_at_ update_", _IN_PLACE),
            ("submit_update_if_present update_if_present", f"{_IN_PLACE}; {_ON_NEW}"),
        )
    ),
    *(UnservedMembers(owner, "prioritized_sampler", "use rb.sampler") for owner in _PRIORITIZED),
    UnservedMembers(
        "ReplayBufferEnsemble",
        "dim_extend end_streams initialized mark_update next register_load_hook register_save_hook set_sampler "
        "set_storage set_writer share transform write_count empty(empty_write_count) extend(update_priority)",
        _A_BUFFER,
    ),
    UnservedMembers("Storage", "supports_conditional_update", _ON_NEW),
    UnservedMembers(
        "LazyMemmapStorage", "cleanup", "files of a storage without a scratch_dir are deleted with it"
    ),
    UnservedMembers("LazyMemmapStorage", "existsok", _KEYWORD),
    UnservedMembers("CompressedListStorage", "to_bytestream", "pass compression_fn and decompression_fn"),
    UnservedMembers(
        "StorageEnsemble",
        "add attach checkpointer contains extend flatten ndim register_load_hook register_save_hook shape "
        "supports_conditional_update",
        "use one of the storages: ensemble[number] returns it",
    ),
    UnservedMembers(
        "StorageCheckpointerBase",
        "register_load_hook register_save_hook",
        "register hooks at the buffer, which then uses the checkpointer for this form",
    ),
    UnservedMembers(
        "StorageEnsembleCheckpointer",
        "register_load_hook register_save_hook",
        "register hooks at the buffers, which then use the checkpointer for this form",
    ),
    UnservedMembers("Sampler", "can_sample", "use len(rb)"),
    *(UnservedMembers(owner, "device", "priorities are stored on the CPU") for owner in _BY_PRIORITY),
    *(
        UnservedMembers(
            owner,
            "cache_values end_key end_keys fragmented init_key pad_output step_key traj_key use_gpu",
            _KEYWORD,
        )
        for owner in _SLICE_SAMPLERS
    ),
    UnservedMembers(
        "SamplerEnsemble",
        "add can_sample default_priority extend mark_update update_priority",
        "use one of the samplers: ensemble[number] returns it",
    ),
    UnservedMembers(
        "Writer",
        "generations_of tracks_generations",
        "the storage counts the generation of every slot: rb.generation(index)",
    ),
    UnservedMembers("RoundRobinWriter", "write_at", _IN_PLACE),
    UnservedMembers(
        "TensorDictMaxValueWriter", "get_insert_index", "rb.add and rb.extend return the indices"
    ),
    UnservedMembers("WriterEnsemble", "generations_of register_storage tracks_generations", _A_BUFFER),
    # ---------------------------------------------------------------- specs
    UnservedMembers(
        "TensorSpec",
        "SPEC_HANDLED_FUNCTIONS implements_for_spec make_neg_dim index",
        "make a new spec with the other shape; index tensors by spec.to_numpy(action), or by the action itself",
    ),
    UnservedMembers("MultiCategorical", "n set_provisional_n", "spec.nvec holds the numbers of choices"),
    UnservedMembers("MultiOneHot", "n", "spec.shape[-1] is the number of bits"),
    UnservedMembers("Stacked", "space", "each member has a space: spec[0].space"),
    UnservedMembers(
        "StackedComposite",
        "names ones_update rand_update refine_names zeros_update",
        "use td.update(spec.rand()), td.update(spec.zero()) or td.update(spec.one())",
    ),
    # ---------------------------------------------------------------- environments
    UnservedMembers(
        "EnvBase",
        "collector register_collector",
        "an environment has no reference to its collector; keep your own",
    ),
    UnservedMembers(
        "EnvBase", "auto_complete_done_specs", "flags that are missing in the done spec are always added"
    ),
    UnservedMembers(
        "EnvBase", "configure_parallel make_parallel", "use ParallelEnv(num_workers, create_env_fn)"
    ),
    UnservedMembers("EnvBase", "eager", "an environment is eager unless you compile it"),
    UnservedMembers(
        "EnvBase",
        "rollout(actions) rollout(storing_device) rollout(set_state)",
        "pass a policy that returns the actions; move the result by .to(device); call reset(td, set_state=True) "
        "first, and pass auto_reset=False",
    ),
    UnservedMembers("GymLikeEnv", "git_url libname", "use importlib.metadata.metadata(name)"),
    UnservedMembers("GymLikeEnv", "validated", "check_env_specs(env) checks the data that it returns"),
    UnservedMembers(
        "GymLikeEnv", "info_dict_reader", "keep the reader that you pass to set_info_dict_reader"
    ),
    UnservedMembers("GymLikeEnv", "available_envs", "use GymEnv.available_envs"),
    UnservedMembers(
        "GymWrapper", "rebuild_with_kwargs", "make a new one: GymWrapper(gymnasium.make(name, ...))"
    ),
    *(
        UnservedMembers(owner, names, why)
        for owner in ("SerialEnv", "ParallelEnv")
        for names, why in (
            ("non_blocking select_and_clone", "step and reset always return copies"),
            ("create_env_fn create_env_kwargs num_threads policy_proof serial_for_single", _KEYWORD),
        )
    ),
    UnservedMembers("TransformedEnv", "set_missing_tolerance", "call it on a transform: env.transform[0]"),
    UnservedMembers("PendulumEnv", "angle_normalize", "(angle + torch.pi) % (2 * torch.pi) - torch.pi"),
    UnservedMembers("PendulumEnv", "make_composite_from_td", "import it from gleanrl.envs"),
    UnservedMembers(
        "PendulumEnv", "metadata", "this environment doesn't render; gymnasium's Pendulum-v1 does"
    ),
    UnservedMembers("TicTacToeEnv", "full get_action_mask win", "read the board and the mask of the batch"),
    UnservedMembers("EnvMetaData", "clone expand metadata_from_env tensordict", "use get_env_metadata"),
    UnservedMembers("EnvCreator", "init_", "the constructor does all initialization"),
    # ---------------------------------------------------------------- transforms
    UnservedMembers("Transform", "transform_fake_tensordict", "the transformed specs describe the data"),
    UnservedMembers("CatFrames", "future inplace mask_key unfolding", "call the transform on the batch"),
    UnservedMembers(
        "DensifyReward",
        "in_keys is_tdmodule_compatible out_keys out_keys_source reset_out_keys reset_parameters_recursive "
        "select_out_keys",
        "it's a transform for buffers, not a TensorDictModule: pass it as transform=, or call it on the batch",
    ),
    UnservedMembers("TensorDictPrimer", "device", "use primer.primers.device"),
    UnservedMembers("UnsqueezeTransform", "unsqueeze_dim", "use dim"),
    UnservedMembers("UnsqueezeTransform", "allow_positive_dim", _KEYWORD),
    UnservedMembers("RewardClipping", "clamp_max clamp_min", "use low and high"),
    UnservedMembers("ActionDiscretizer", "action_key out_action_key", _KEYWORD),
    UnservedMembers("SelectTransform", "keep_done_keys keep_reward_keys", _KEYWORD),
    UnservedMembers("SqueezeTransform", "squeeze_dim unsqueeze_dim", "use dim"),
    UnservedMembers("VecNorm", "denorm standard_normal", _BACK),
    UnservedMembers("VecNormV2", "denorm prefix standard_normal", _BACK),
)


def unserved_members(owners: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the names in the rows of the classes named `owners`, each with the advice what to use instead."""
    for row in UNSERVED_MEMBERS:
        if row.owner in owners:
            yield from ((name, row.why) for name in row.names.split())


class _Unserved:
    """Descriptor in a class for a member that isn't served; reading it raises the error with the advice."""

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def __get__(self, found: Any, owner: type[Any]) -> Any:
        # A user's class may define the member, but come after gleanrl's class in the method resolution order
        for base in owner.__mro__:
            if self._name in vars(base) and not is_ours(base):
                member = vars(base)[self._name]
                return member.__get__(found, owner) if hasattr(member, "__get__") else member
        raise self.error(owner)

    def error(self, owner: type[Any]) -> UnservedMemberError:
        """Return the error that says what to use instead of the member of the class `owner`."""
        return UnservedMemberError(f"{owner.__name__}.{self._name} isn't served: {self._why}")


class TellingModule(nn.Module):
    """Base class of modules that look up attributes in further places, and whose errors say what to use instead.

    If the class raises an `AttributeError`, Python calls `__getattr__` and drops the error. So `__getattr__` raises it
    again.
    """

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, a buffer, a submodule, or the result of `_elsewhere`."""
        own = self.__dict__
        # The same lookup as in `nn.Module.__getattr__`, to save a call
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in own.get(kind, ()):
                return own[kind][name]
        class_attribute: Any = next(
            (vars(base)[name] for base in type(self).__mro__ if name in vars(base)), None
        )
        if hasattr(class_attribute, "__get__") and not isinstance(class_attribute, _Unserved):
            # A property of the class raised an AttributeError, and Python dropped it. Reading it again raises it again.
            return class_attribute.__get__(self, type(self))
        if name.startswith("_"):
            return super().__getattr__(name)  # raises the AttributeError
        try:
            return self._elsewhere(name)
        except AttributeError:
            if isinstance(class_attribute, _Unserved):
                raise class_attribute.error(type(self)) from None
            raise

    def _elsewhere(self, name: str) -> Any:
        """Return an attribute that the module itself lacks, or raise `AttributeError`; subclasses override this."""
        return super().__getattr__(name)  # raises the AttributeError


def refuse_members(subject: Any) -> None:
    """Add a descriptor to a gleanrl class for each unserved member that the class doesn't define itself.

    Other objects are ignored. Access to other attributes costs no more than before.
    """
    if not isinstance(subject, type) or not is_ours(subject):
        return
    for name, why in unserved_members((subject.__name__,)):
        if "(" not in name and name not in vars(subject):
            setattr(subject, name, _Unserved(name, why))


class Unserved(NamedTuple):
    """Names of other releases that have no counterpart in gleanrl."""

    module: str
    """The module that has the names; modules below it may have them, too."""
    names: str
    """The names, separated by spaces."""
    why: str
    """What to use instead."""


class UnservedModules(NamedTuple):
    """Modules of other releases that have no counterpart in gleanrl; modules below them have none either."""

    package: str
    """The package that contains the modules."""
    names: str
    """Their names in the package, separated by spaces."""
    why: str
    """What to use instead."""


# Environments of other libraries, by module path below gleanrl.envs.libs: their names, and the package that they need.
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
_THEIR_ENV = "make TorchRL's own; gleanrl's collectors, SerialEnv, ParallelEnv and TransformedEnv take it"
_THEIR_DATA = "use TorchRL's own with gleanrl's batches"
_DATASET = (
    "read local files by from_minari, from_hdf5, from_parquet, from_lerobot or from_arrays of gleanrl.data, or extend "
    "a buffer with batches of TorchRL's data set"
)
_THEIR_TRANSFORM = "put TorchRL's own into a TransformedEnv"
_WEIGHTS = "update_policy_weights_ sends weights; for another way derive from WeightUpdaterBase"
_TRAJECTORIES = (
    "split rb[:] by gleanrl.collectors.utils.split_trajectories, and choose among the trajectories"
)
_UNIT = "choose it by the sampler: SliceSampler draws slices, RandomSampler draws transitions"
_FROM_BUFFERS = "import the class from gleanrl.data.replay_buffers"

UNSERVED = (
    # ---------------------------------------------------------------- collectors
    Unserved("gleanrl.collectors", "RayWeightUpdater", "RayCollector sends weights itself"),
    Unserved("gleanrl.collectors", "RemoteModuleWeightUpdater", _WEIGHTS),
    Unserved("gleanrl.collectors", "DistributedWeightUpdater RPCWeightUpdater", _WEIGHTS),
    Unserved("gleanrl.collectors", "Evaluator RayEvalWorker", "evaluate with env.rollout"),
    Unserved(
        "gleanrl.collectors",
        "DEFAULT_SLURM_CONF submitit_delayed_launcher",
        "start a Ray cluster on the machines that Slurm allocated (`ray start`), and pass "
        "ray_init_config={'address': 'auto'}",
    ),
    Unserved(
        "gleanrl.collectors",
        "AsyncBatchedCollector",
        "use SyncDataCollector with a ParallelEnv, which calls the policy once for all environments",
    ),
    Unserved("gleanrl.collectors", "ProfileConfig", "profile the program, for example with torch.profiler"),
    Unserved("gleanrl.collectors", "DEFAULT_EXPLORATION_TYPE", "use ExplorationType.RANDOM"),
    Unserved(
        "gleanrl.collectors",
        "INSTANTIATE_TIMEOUT WEIGHT_SYNC_TIMEOUT _MAX_IDLE_COUNT _MIN_TIMEOUT _TIMEOUT",
        "pass timeouts=gleanrl.envs.Timeouts(...) to the collector",
    ),
    Unserved("gleanrl.collectors", "cudagraph_mark_step_begin", "import it from torch.compiler"),
    Unserved(
        "gleanrl.collectors",
        "_Interruptor _InterruptorManager _is_osx _main_async_collector",
        "internal to TorchRL's workers; to end the batches of slow workers early pass preemptive_threshold=",
    ),
    Unserved("gleanrl.collectors", "print_remote_collector_info", "print collector.stats()"),
    # ---------------------------------------------------------------- data
    Unserved(
        "gleanrl.data",
        "PromptGroupSampler StreamingSliceSampler",
        "use SamplerWithoutReplacement for each record once an epoch; for other orders write a Sampler subclass",
    ),
    Unserved(
        "gleanrl.data",
        "CompressedListStorageCheckpointer",
        "pass no checkpointer: rb.dumps can write a CompressedListStorage",
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
        "write rb[index] = records only for indices whose rb.generation(index) equals the batch's `_generation`",
    ),
    Unserved("gleanrl.data", "SampleUnit Sequence Transition", _UNIT),
    Unserved(
        "gleanrl.data",
        "StoreStorage",
        "use LazyMemmapStorage for records on disk, or RayReplayBuffer for records in another process",
    ),
    Unserved("gleanrl.data", "prefill_replay_buffer", "extend the buffer with batches of the data set"),
    Unserved("gleanrl.data", "as_remote", "use RayReplayBuffer"),
    Unserved(
        "gleanrl.data",
        " ".join(
            f"{kind}SegmentTreeFp{bits}"
            for kind in ("CudaMin", "CudaSum", "Min", "Sum")
            for bits in ("32", "64")
        ),
        "use PrioritizedSampler, whose priorities are in the compiled core",
    ),
    Unserved(
        "gleanrl.data.replay_buffers.utils",
        "Flat2TED H5Combine H5Split Nested2TED TED2Flat TED2Nested",
        _FROM_BUFFERS,
    ),
    Unserved("gleanrl.data.replay_buffers.utils", "pin_memory_output", "pass pin_memory=True to the buffer"),
    Unserved("gleanrl.data.replay_buffers.utils", "tree_iter", "use torch.utils._pytree.tree_leaves"),
    Unserved("gleanrl.data.replay_buffers.utils", "unravel_index", "use torch.unravel_index"),
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
    # ---------------------------------------------------------------- environments
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
    Unserved(
        "gleanrl.envs",
        "lazy lazy_property",
        "not needed: SerialEnv and ParallelEnv start at their first reset",
    ),
    Unserved("gleanrl.envs", "clear_mpi_env_vars", "delete MPI's variables from os.environ"),
    Unserved(
        "gleanrl.envs.libs.gym",
        "convert_box_spec convert_dict_spec convert_dict_spec2 convert_discrete_spec convert_multi_binary_spec "
        "convert_multidiscrete_spec convert_sequence_spec convert_text_soec convert_tuple_spec",
        "GymEnv converts spaces itself; register_gym_spec_conversion adds a conversion",
    ),
    Unserved(
        "gleanrl.envs.libs.gym", "terminal_obs_reader", "pass a reader of the info to set_info_dict_reader"
    ),
    # ---------------------------------------------------------------- transforms
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
    Unserved(
        "gleanrl.data.datasets",
        "AtariDQNExperienceReplay BaseDatasetExperienceReplay GenDGRLExperienceReplay LeRobotExperienceReplay "
        "OpenMLExperienceReplay OpenXExperienceReplay RobosetExperienceReplay VD4RLExperienceReplay "
        "lerobot_columns_to_tensordict load_dataset register_dataset",
        _DATASET,
    ),
)

UNSERVED_MODULES = (
    UnservedModules(
        "gleanrl", "services", "use RayCollector and RayReplayBuffer, which run in other processes"
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
        "gleanrl.data.datasets", "atari_dqn common gen_dgrl openml openx roboset utils vd4rl", _DATASET
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
    UnservedModules("gleanrl.envs.libs", "jax_utils utils", "use the simulator's own package"),
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
    """Return the advice for a module of another release; None if the table doesn't have the module."""
    return _MODULES.get(path)


def unserved_name(module: str, name: str) -> str | None:
    """Return the advice for a name of another release in a module; None if the table doesn't have the name."""
    for row in _NAMES.get(name, ()):
        if f"{module}.".startswith(f"{row.module}."):
            return row.why
    return _MODULES.get(f"{module}.{name}")
