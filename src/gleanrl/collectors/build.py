"""Assembly of a single-process source from the environment, the policy and a `CollectorConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.devices import as_device, columns_device, require_device, same_device
from gleanrl._rollout.env_traits import Env, extra
from gleanrl._rollout.infer_outputs import device_of_policy, is_unmade
from gleanrl._rollout.native_policies import Backend
from gleanrl._rollout.plan import Handling, plan_rollout
from gleanrl._rollout.policies import compiler_of, drawing_device
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl._state.rng import CounterGenerator, OwnedTorchGenerator
from gleanrl.collectors.frame_accounting import Numbering
from gleanrl.collectors.policy_weights import PolicyWeights
from gleanrl.collectors.single_source import RandomNumbers, RolloutSource
from gleanrl.collectors.source import CollectionOptions
from gleanrl.envs.libs.gym_backend import advice
from gleanrl.envs.policy_state import with_policy_state
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.envs.vector.factories import as_source, is_environment, know_truncated
from gleanrl.errors import InvalidTypeError, UnsupportedError


@dataclass(frozen=True)
class Devices:
    """Devices of a collector's parts; None leaves a part on its device."""

    env: torch.device | None
    policy: torch.device | None
    storing: torch.device | None

    @classmethod
    def of(cls, device: Any, env: Any, policy: Any, storing: Any, env_own: torch.device | None) -> Devices:
        """Fill in the unset devices.

        Args:
            device: default of all other devices.
            env: device of the environment; by default its current device.
            policy: device of the policy.
            storing: device of the batches. By default it is the environment's device, if the policy's device agrees
                with it.
            env_own: the environment's current device.

        Raises:
            InvalidArgumentError: a device does not exist.
        """
        general = as_device(device)
        env_device = as_device(env) or general or as_device(env_own)
        policy_device = as_device(policy) or general
        storing_device = as_device(storing) or general
        if storing_device is None and policy_device in (None, env_device):
            storing_device = env_device
        return cls(
            require_device("env_device", env_device),
            require_device("policy_device", policy_device),
            require_device("storing_device", storing_device),
        )


def make_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """Return the environment that the user passed, or the one that the user's callable makes.

    Args:
        create_env_fn: an environment, a callable, or the name of a gymnasium environment. A gymnasium environment, also
            one that the callable returns, is wrapped.
        kwargs: keyword arguments for the callable. An environment that has `update_kwargs` gets them there.

    Raises:
        InvalidTypeError: `create_env_fn` is none of these, or the callable returned no environment. For an unknown
            name, gymnasium's own error is raised.
        UnsupportedError: keyword arguments were given, but the environment does not accept them.
    """
    source = as_source(create_env_fn)
    if is_environment(source):
        if not kwargs:
            return source
        if not hasattr(source, "update_kwargs"):
            raise UnsupportedError(
                "create_env_kwargs: the environment exists already; pass a callable that makes it"
            )
        source.update_kwargs(kwargs)
        return source
    made = as_source(source(**(kwargs or {}))) if callable(source) else source
    if not is_environment(made):
        raise InvalidTypeError(
            "create_env_fn: expected an environment, a callable that makes one, or the name of a gymnasium "
            f"environment, got {type(made).__name__}{advice(made)}"
        )
    return made


@contextmanager
def made_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None) -> Iterator[Any]:
    """Yield the environment of `make_env`; if the ``with`` block raises, close an environment made here."""
    env = make_env(create_env_fn, kwargs)
    try:
        yield env
    except BaseException:
        made_here = callable(create_env_fn) or isinstance(create_env_fn, str)
        if env is not create_env_fn and made_here:  # a wrapped environment is the user's
            with suppress(Exception):  # an error of closing would hide the first error, which is the cause
                env.close()
        raise


def has_truncated(env: Env) -> bool:
    """Return whether any group of flags of `env` has a ``"truncated"`` flag."""
    return any((key if isinstance(key, str) else key[-1]) == "truncated" for key in env.done_keys)


def innermost(env: Any) -> Any:
    """Return the environment inside all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def is_placed(device: Any, policy_device: Any) -> bool:
    """Return whether these arguments of a collector determine the policy's device."""
    return device is not None or policy_device is not None


@dataclass(frozen=True)
class CollectorConfig:
    """How one process collects. It can be pickled and sent to another process.

    Attributes:
        options: how batches are collected.
        device: default of the following devices.
        env_device: device that the environment is moved to.
        policy_device: device that the policy runs on.
        storing_device: device that batches are delivered on.
        set_truncated: whether the environment needs a ``"truncated"`` flag.
        trust_policy: whether the policy is called on TensorDicts, regardless of its signature.
        compile_policy: whether the policy is compiled, or arguments for the compiler.
        cudagraph_policy: whether the policy is captured as CUDA graphs, or arguments for the capture.
        policy_backend: which code computes the policy: ``"torch"``, ``"native"`` or ``"auto"``.
    """

    options: CollectionOptions
    device: Any = None
    env_device: Any = None
    policy_device: Any = None
    storing_device: Any = None
    set_truncated: bool = False
    trust_policy: bool = False
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None
    policy_backend: Backend = "auto"

    @property
    def places_policy(self) -> bool:
        """Whether the config determines the policy's device."""
        return is_placed(self.device, self.policy_device)

    def runs_on(self, device: Any) -> bool:
        """Return whether the config places the policy on `device`."""
        own = self.device if self.policy_device is None else self.policy_device
        return own is not None and same_device(torch.device(own), torch.device(device))


class Assembly(NamedTuple):
    """A source and the values it was made from."""

    collection: RolloutSource
    devices: Devices
    moved_to: torch.device | None
    """Device that its batches have to be moved to; None if they are already there."""


def assemble(
    env: Any,
    policy: Any,
    recipe: CollectorConfig,
    weights_for: Callable[[Any, torch.device | None], PolicyWeights] = PolicyWeights,
    prepared: Callable[[Any], Any] | None = None,
    numbering: Numbering | None = None,
    first_id: int = 0,
) -> Assembly:
    """Return a source that collects with the given environment and policy, as the config says.

    The passed environment changes: it is reopened if it was closed, moved to its device, and given a ``"truncated"``
    flag if steps are limited. If the policy has uninitialized parameters, it is called once.

    Order matters here. The environment is moved and prepared before the policy's state and the plan are derived from
    its specs. An uninitialized policy makes its parameters in a first call, before a copy of it is moved to another
    device.

    Args:
        env: the environment. The source may use a wrapper around it.
        policy: the policy as the user passed it.
        recipe: the config.
        weights_for: makes the `PolicyWeights` of the policy.
        prepared: called on the environment after it was moved to its device.
        numbering: maps local trajectory ids to global ones.
        first_id: the first local id that may be used.

    Raises:
        UnsupportedError: ``set_truncated`` or a step limit needs a ``"truncated"`` flag, but the environment has none
            or can't add it. Or ``policy_backend`` is ``"native"``, and the policy draws random actions.
        InvalidArgumentError: a device does not exist, or the environment already has an entry that would be added.
        InvalidTypeError, PolicyError: the policy does not fit the environment.
    """
    if (reopen := extra(env, "_reopen")) is not None:  # the shutdown of another collector may have closed it
        reopen()
    devices = Devices.of(
        recipe.device, recipe.env_device, recipe.policy_device, recipe.storing_device, env.device
    )
    if devices.env is not None and env.device != devices.env:
        env = env.to(devices.env)
    if prepared is not None:
        prepared(env)
    if recipe.set_truncated and not has_truncated(env):
        raise UnsupportedError(
            "set_truncated: the environment has no 'truncated' flag; call env.add_truncated_keys() first"
        )
    options = recipe.options
    if options.max_steps is not None and not has_truncated(innermost(env)):
        # The step limit needs a flag that it may set. A flag that only transforms write is theirs.
        know_truncated(env)
    env = with_policy_state(env, policy, device_of_policy(policy) or devices.policy)
    if is_unmade(policy):
        # Its first call makes its parameters, on its current device.
        plan_rollout(env, policy, device_of_policy(policy))
    draws = RandomNumbers(
        OwnedTorchGenerator(device=drawing_device(env.full_action_spec)), CounterGenerator()
    )
    weights = weights_for(policy, devices.policy)
    plan = plan_rollout(
        env,
        weights.policy,
        devices.policy,
        rules=EpisodeRules(max_steps=options.max_steps),
        generator=draws.actions,
        handling=Handling(
            recipe.trust_policy,
            compiler_of(recipe.compile_policy, recipe.cudagraph_policy),
            recipe.policy_backend,
            draws.policy,
        ),
        on_host=True,
    )
    here = columns_device(plan.stepper.device)
    target = devices.storing
    if target is None and not same_device(here, env.device):
        target = env.device
    batch_device = here if target == here else plan.device
    collection = RolloutSource(env, plan, options, batch_device, weights, draws, numbering, first_id)
    return Assembly(collection, devices, None if target == here else target)


def registered(collector: Any) -> Callable[[Any], None]:
    """Return a function that registers `collector` with an environment, if the environment has transforms."""

    def tell(env: Any) -> None:
        if isinstance(env, TransformedEnv):
            env.register_collector(collector)

    return tell
