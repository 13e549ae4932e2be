"""`GymLikeEnv`: an `EnvBase` around an environment with gymnasium's `step`, `reset` and spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import NonTensorData, TensorDict, TensorDictBase

from gleanrl._arrays.devices import on_cpu
from gleanrl._arrays.tensordicts import FLAGS, NestedKey, Path, as_key, as_path
from gleanrl._rollout.env_traits import EnvTraits
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Lease, Stepper
from gleanrl._util import is_native, positive
from gleanrl.data.specs import Categorical, Composite, TensorSpec
from gleanrl.envs.base import REPLACED, EnvBase
from gleanrl.envs.libs.gym_backend import advice
from gleanrl.envs.libs.gym_codecs import Array, Codec, RewardCodec, as_flag, as_flags
from gleanrl.envs.libs.gym_info import (
    default_info_dict_reader,
    ready_reader,
    spec_entries,
    with_reader_entries,
)
from gleanrl.envs.libs.gym_simulator import Simulator, checked_reset, checked_step
from gleanrl.envs.libs.gym_spaces import (
    Group,
    action_tree,
    assemble,
    check_names,
    encode,
    leaves,
    observation_tree,
    reward_spec,
    tree_spec,
)
from gleanrl.envs.libs.gym_stepper import GymCodecs, GymStepper
from gleanrl.envs.libs.gym_vector_simulator import VectorSimulator
from gleanrl.envs.libs.gym_vector_stepper import VectorGymStepper
from gleanrl.envs.vector.independence import require_independent, simulators_in
from gleanrl.errors import InvalidTypeError, UnsupportedError

_RESERVED = ("reward", *FLAGS, "next", "collector")
_HOOKS = (
    *("read_action", "read_obs", "read_reward", "read_done"),
    *("_output_transform", "_reset_output_transform"),
)
"""Methods that a subclass may override in addition to `REPLACED`. A rollout then calls them on TensorDicts."""


class GymLikeEnv(EnvBase):
    """Wraps an environment that has gymnasium's `step`, `reset`, `observation_space` and `action_space`.

    The observations of a Dict space have the keys of the space, nested in the same way. Its key ``state`` is renamed to
    ``observation`` if that name is free. Observations of any other space have one key. Actions of a Dict space have its
    keys, all other actions the key ``"action"``. See `gleanrl.envs.libs.gym_spaces` for the specs of each space.

    A vector environment is a batch of P environments, ``batch_size=[P]``. In every autoreset mode, ``"next"`` holds the
    observation that ended an episode, and a reset returns the first observation of the next episode.

    A seed is passed to the next reset, and only to that one. A vector environment that isn't made of single ones, for
    example gymnasium's own for CartPole, takes one seed for all. Attributes that this class lacks are looked up in the
    wrapped environment.

    Subclasses may override `read_action`, `read_obs`, `read_reward`, `read_done`, `_output_transform`,
    `_reset_output_transform`, `_step` and `_reset`. Rollouts then call these methods. Otherwise they step the
    environment without building TensorDicts.

    Args:
        env: the environment; `close` closes it.
        observation_key: the key of an observation that isn't a Dict.
        categorical_action_encoding: whether Discrete and MultiDiscrete spaces (also of observations) give integers. If
            False, they give one-hot vectors.
        frame_skip: number of times that a step repeats an action. Rewards are summed, and the end of an episode ends
            the step. For a vector environment: the number of repetitions that its members already do themselves.
        device: device of the TensorDicts; None for TensorDicts without a device.
        batch_size: ``()`` for one environment, ``[P]`` for a vector environment; None accepts either.
        allow_done_after_reset: passed to `EnvBase`; gymnasium's resets never return done.

    Raises:
        InvalidTypeError: if `env` lacks one of these four attributes, or is an environment of several agents or a
            VecEnv of Stable-Baselines3.
        SpaceError: if a space has no spec, or an entry's name is reserved.
        UnsupportedError: if `batch_size` isn't that of the environment.
        InvalidArgumentError: for a `frame_skip` below 1, or if two members of a SyncVectorEnv step the same object.
        EnvironmentContractError: if a vector environment doesn't declare its autoreset mode.
    """

    def __init__(
        self,
        env: Any,
        *,
        observation_key: str = "observation",
        categorical_action_encoding: bool = False,
        frame_skip: int = 1,
        device: torch.device | str | int | None = None,
        batch_size: Any = None,
        allow_done_after_reset: bool = False,
    ) -> None:
        frame_skip = positive("frame_skip", frame_skip)
        for name in ("step", "reset", "observation_space", "action_space"):
            if not hasattr(env, name):
                raise InvalidTypeError(
                    f"env: expected a gymnasium environment, got {type(env).__name__} without {name}{advice(env)}"
                )
        known = isinstance(env, (gymnasium.Env, VectorEnv))
        if (callable(env.observation_space) or (hasattr(env, "step_async") and not known)) and advice(env):
            raise InvalidTypeError(
                f"env: expected a gymnasium environment, got {type(env).__name__}{advice(env)}"
            )
        size = (int(env.num_envs),) if isinstance(env, VectorEnv) else ()
        if batch_size is not None and tuple(np.atleast_1d(batch_size)) != size:
            raise UnsupportedError(f"batch_size: {env} has batch size {size}, got {batch_size!r}")
        super().__init__(device=device, batch_size=size, allow_done_after_reset=allow_done_after_reset)
        self._frame_skip = frame_skip
        self._simulate(env)
        self._readers: list[Any] = []
        one = "single_" if size else ""
        observation_space, action_space = (getattr(env, f"{one}{k}_space") for k in ("observation", "action"))
        observation = observation_tree(observation_space, observation_key, categorical_action_encoding)
        action = action_tree(action_space, categorical_action_encoding)
        self._observation = observation.batched(*size) if size else observation
        self._action = action.batched(*size) if size else action
        self._reward = RewardCodec(("reward",), reward_spec(env, size))
        self._declare()

    def _declare(self) -> None:
        check_names("observation", self._observation, {"action", *_RESERVED}, self._env.observation_space)
        observed = {leaf.key[0] for leaf in leaves(self._observation)}
        check_names("action", self._action, observed.union(_RESERVED), self._env.action_space)
        size = self.batch_size
        self.observation_spec = tree_spec(self._observation, size)
        self.action_spec = tree_spec(self._action, size)
        self.reward_spec = self._reward.spec
        flag = Categorical(2, shape=(*size, 1), dtype=torch.bool)
        self.done_spec = Composite(dict.fromkeys(FLAGS, flag), shape=size)

    # ------------------------------------------------------- wrapped environment
    @property
    def _env(self) -> Any:
        return self._simulator.env

    def stepped_here(self, started: bool) -> list[Any]:
        """Return the simulators that this environment steps in this process; see `require_independent`."""
        return [self._env, *simulators_in(self)]

    @property
    def frame_skip(self) -> int:
        """The number of times that a step repeats an action."""
        return self._simulator.frame_skip

    @property
    def traits(self) -> EnvTraits:
        """The optional abilities of the environment; in a vector environment they depend on the autoreset mode."""
        if not isinstance(self._simulator, VectorSimulator):
            return super().traits
        masks = self._simulator.mode is AutoresetMode.NEXT_STEP
        return replace(super().traits, masks_frames=masks, resets_some=self._simulator.partial)

    def _elsewhere(self, name: str) -> Any:
        """Return the attribute `name` of the wrapped environment; outer wrappers are searched first."""
        simulator = self.__dict__.get("_simulator")
        if simulator is None:
            return super()._elsewhere(name)
        env = simulator.env
        try:
            return env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)
        except AttributeError:  # its message lists every wrapper
            inner = type(getattr(env, "unwrapped", env)).__name__
            raise AttributeError(
                f"neither {type(self).__name__} nor the {inner} that it wraps has an attribute {name!r}"
            ) from None

    def _simulate(self, env: Any) -> None:
        """Use `env` for all further steps.

        Raises:
            InvalidArgumentError: if two members of a SyncVectorEnv step the same object.
            EnvironmentContractError: if a vector environment doesn't declare its autoreset mode.
        """
        several = isinstance(env, VectorEnv)
        if several and isinstance(env.unwrapped, SyncVectorEnv):
            require_independent(env.unwrapped.envs)
        self._simulator = (VectorSimulator if several else Simulator)(env, self._frame_skip)

    def _made_anew(self) -> Any:
        """Return a new environment to replace the closed one; None if the class can't make one.

        `reset` of a closed environment calls this. The new environment must have the same spaces.
        """
        return None

    def _reopen(self) -> None:
        if self.is_closed and (env := self._made_anew()) is not None:
            self._simulate(env)
            self.is_closed = False

    def close(self, **kwargs: Any) -> None:
        """Close the wrapped environment. A second call does nothing."""
        super().close(**kwargs)
        self._simulator.close()

    def __repr__(self) -> str:
        """Show the wrapped environment, the batch size and the device."""
        size = tuple(self.batch_size)
        return f"{type(self).__name__}(env={self._env}, batch_size={size}, device={self.device})"

    # --------------------------------------------------------------------- hooks
    def fast_encoding(self, mode: bool = True) -> GymLikeEnv:
        """Do nothing, since outputs are always encoded the fast way; for programs written for other releases.

        Returns:
            the environment itself.
        """
        return self

    def read_action(self, action: Any) -> Any:
        """Return the argument of the wrapped environment's `step`.

        If a one-hot action has several ones, the first counts. On the CPU, all further ones are set to 0 in `action`.

        Args:
            action: the entry ``"action"``, a tensor of the action spec; for a Dict space a TensorDict with its entries.

        Raises:
            PolicyError: if it doesn't fit the action spec.
        """
        values = []
        for codec in leaves(self._action):
            leaf = action.get(as_key(codec.key)) if isinstance(self._action, Group) else action
            codec.check_action(leaf.shape, leaf.dtype)
            values.append(codec.decode(leaf.detach().cpu().numpy()))
        return assemble(self._action, values)

    def read_obs(self, observations: Any) -> dict[NestedKey, torch.Tensor]:
        """Return the entries of an observation by key.

        Raises:
            EnvironmentContractError: if its keys, shapes or dtypes differ from the declared ones.
        """
        return self._tensors(leaves(self._observation), encode(self._observation, observations))

    def read_reward(self, reward: Any) -> torch.Tensor:
        """Return a reward in the shape and dtype of the reward spec.

        Raises:
            EnvironmentContractError: if it isn't a number, or is an array of another shape.
        """
        return self._tensor(self._reward.encode(reward))

    def read_done(
        self, terminated: Any = False, truncated: Any = False, done: Any = False
    ) -> tuple[Any, Any, Any, bool]:
        """Return ``(terminated, truncated, done, any of them)`` from the flags that the environment returned.

        The flags are bools, or arrays ``(P,)`` for a vector environment. An environment is done if any of its three
        arguments is True.

        Raises:
            EnvironmentContractError: if a flag isn't a bool, or has another number of them.
        """
        terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        done = terminated | truncated | self._flag("done", done is not None and done)
        return terminated, truncated, done, bool(np.any(done))

    def _output_transform(self, result: Any) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        """Return (observation, reward, terminated, truncated, done, info) from the result of `step`."""
        observation, reward, terminated, truncated, info = checked_step(result)
        return observation, reward, terminated, truncated, None, info

    def _reset_output_transform(self, result: Any) -> tuple[Any, dict[str, Any]]:
        """Return (observation, info) from the result of the environment's `reset`."""
        return checked_reset(result)

    def _flag(self, name: str, value: Any) -> Any:
        if not self.batch_size:
            return as_flag(name, value)
        return as_flags(
            name, np.full(self.batch_size, value) if np.ndim(value) == 0 else value, *self.batch_size
        )

    # ------------------------------------------------------------------ protocol
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get("_step", None)
        if mask is not None and not bool(mask.all()):
            raise UnsupportedError(
                f"step: {self._env} steps all of its environments at once, it can't leave some out ('_step'); use a "
                "SerialEnv or a ParallelEnv"
            )
        several = isinstance(self._action, Group)
        action = self.read_action(
            tensordict.select(*self.action_keys) if several else tensordict.get("action")
        )
        result = self._output_transform(self._simulator.stepping()(action))
        observation, reward, terminated, truncated, done, info = result
        terminated, truncated, done, _ = self.read_done(terminated=terminated, truncated=truncated, done=done)
        out = self._packed(self.read_obs(observation), info, terminated, truncated, done)
        return out.set("reward", self.read_reward(reward))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None and not mask.any():
            assert tensordict is not None
            return tensordict.exclude("_reset", "next")
        if self.batch_size and mask is not None:
            kwargs["mask"] = mask.reshape(-1).cpu().numpy()
        observation, info = self._reset_output_transform(self._simulator.reset(**kwargs))
        return self._packed(self.read_obs(observation), info, False, False, False)

    def _seed_all(self, seed: int, static_seed: bool) -> None:
        if isinstance(self._simulator, VectorSimulator):
            self._simulator.seed(seed, static_seed)
        else:
            self._set_seed(seed)

    def _set_seed(self, seed: int | None) -> None:
        self._simulator.seed(seed)

    def _packed(
        self,
        observation: Mapping[NestedKey, torch.Tensor],
        info: dict[str, Any],
        terminated: Any,
        truncated: Any,
        done: Any,
    ) -> TensorDictBase:
        out: TensorDictBase = TensorDict({}, self.batch_size, device=self.device)
        for key, value in observation.items():
            out.set(key, value)
        for name, flag in zip(FLAGS, (done, terminated, truncated), strict=True):
            rows = np.broadcast_to(np.asarray(flag, np.bool_)[..., None], (*self.batch_size, 1))
            out.set(name, self._tensor(rows))
        for reader in self._readers:
            out = reader(info, out)
        return out

    def _tensors(self, codecs: list[Codec], arrays: list[Array]) -> dict[NestedKey, torch.Tensor]:
        return {
            as_key(codec.key): self._listed(array) if codec.is_list else self._tensor(array)
            for codec, array in zip(codecs, arrays, strict=True)
        }

    def _listed(self, value: Any) -> Any:
        """Return a tensor on the environment's device; wrap any other object as non-tensor data."""
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        return NonTensorData(value, device=self.device)

    def _tensor(self, array: Array) -> torch.Tensor:
        """Return a tensor with a copy of `array`, because environments may reuse their arrays."""
        return torch.from_numpy(np.array(array)).to(self.device)

    # ---------------------------------------------------------------------- info
    def set_info_dict_reader(self, info_dict_reader: Any = None, ignore_private: bool = True) -> GymLikeEnv:
        """Read entries of info in every further step, in addition to the entries of earlier readers.

        Call it before you make rollouts and collectors. If the reader's entries aren't known yet, it learns them from a
        reset and one random step of the environment, which end the present episode.

        Args:
            info_dict_reader: None reads every number and array of numbers. A `default_info_dict_reader` reads the
                entries that it declares. A function ``read(info, tensordict)`` must write the same tensors for every
                info. Any other callable of this form needs an attribute `info_spec` (a Composite or a mapping). With a
                function or another callable, rollouts use TensorDicts, which is slower.
            ignore_private: for `info_dict_reader` None: whether to skip names that begin with an underscore.

        Returns:
            The environment itself.

        Raises:
            InvalidArgumentError: if the key of an entry is taken, or the reader has no `info_spec` and writes nothing.
            EnvironmentContractError: if neither info has one of the reader's keys, or its value isn't numeric.
        """
        reader = ready_reader(info_dict_reader, ignore_private, self._sample_infos)
        acted = {leaf.key[0] for leaf in leaves(self._action)}
        self.observation_spec = with_reader_entries(reader, self.observation_spec, acted.union(_RESERVED))
        self._readers.append(reader)
        return self

    def auto_register_info_dict(
        self, ignore_private: bool = True, *, info_dict_reader: Any = None
    ) -> GymLikeEnv:
        """Read every numeric entry of the environment's infos; see `set_info_dict_reader`.

        Entries that the info of a reset lacks are zero there.

        Args:
            ignore_private: whether to skip names that begin with an underscore.
            info_dict_reader: a reader to use instead of one for every entry.

        Returns:
            The environment itself.
        """
        return self.set_info_dict_reader(info_dict_reader, ignore_private)

    def _sample_infos(self) -> list[Mapping[str, Any]]:
        """Reset the wrapped environment, take one random step, and return both infos.

        The environment is used directly, so that the seed for the next reset isn't consumed.
        """
        env = self._env
        _, first = env.reset()
        return [first, checked_step(env.step(env.action_space.sample()))[4]]

    # ------------------------------------------------------------------- stepper
    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Return a stepper that steps this environment into the rows of a block.

        It is the `host_stepper` if there is one and the device is the CPU.
        """
        stepper = self.host_stepper(rules) if on_cpu(self.device) else None
        return super().make_stepper(rules) if stepper is None else stepper

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Return a stepper that writes arrays directly; None if that isn't possible.

        It isn't possible if a subclass overrides one of the hooks, or a reader isn't a `default_info_dict_reader`. Nor
        is it if a spec was replaced by one with other keys, shapes or dtypes.
        """
        codecs = GymCodecs(self._observation, self._action, self._reward, tuple(self._readers))
        if self._overridden() or not self._as_declared(codecs):
            return None
        if isinstance(self._simulator, VectorSimulator):
            return VectorGymStepper(self._simulator, codecs, rules, Lease(self.usage))
        return GymStepper(self._simulator, codecs, rules, Lease(self.usage))

    def _overridden(self) -> bool:
        foreign = any(type(reader) is not default_info_dict_reader for reader in self._readers)
        return foreign or not is_native(self, *REPLACED, *_HOOKS, of=GymLikeEnv)

    def _as_declared(self, codecs: GymCodecs) -> bool:
        expected = {
            codec.key: codec.spec for codec in (*codecs.root_leaves(), codecs.reward, *leaves(codecs.action))
        }
        found: dict[Path, TensorSpec] = {}
        for spec in (self.full_observation_spec, self.full_reward_spec, self.full_action_spec):
            found |= dict(spec_entries(spec))
        if found.keys() != expected.keys() or {as_path(key) for key in self.done_keys} != {
            (name,) for name in FLAGS
        }:
            return False
        return all(
            (leaf.shape, leaf.dtype) == (found[p].shape, found[p].dtype) for p, leaf in expected.items()
        )
