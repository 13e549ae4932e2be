"""Collectors against the recording loop: one environment, batches of 200 frames, the same policy on both sides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import OneHotCategorical
from torch import Tensor

from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.recording_loop import recording_loop
from benchmarks.sampled import Sampled
from benchmarks.workload import FRAMES_ENV, Greedy, make_policy, mlp
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv
from gleanrl.envs.utils import RandomPolicy

STEPS = 200
PEERS = ("torchrl", "sb3", "tianshou")


def by_hand(
    name: str, policy: Callable[[], Callable[[Tensor], Any]] | None, frames: int, **options: Any
) -> Setup:
    """Return the set-up of the recording loop's side, with `frames` frames per turn; see `recording_loop`."""

    def setup() -> Work:
        batches = recording_loop(name, policy() if policy else None, steps=STEPS, **options)

        def work() -> int:
            for _ in islice(batches, frames // STEPS):
                pass
            return frames

        return work

    return setup


def ours(
    name: str,
    policy: Callable[[], Any] | None,
    frames: int,
    steps: int = STEPS,
    indices: bool = False,
    **options: Any,
) -> Setup:
    """Return the set-up of the collector's side.

    Args:
        name: the environment's id.
        policy: builds the policy; None draws random actions.
        frames: frames per turn.
        steps: steps of a batch.
        indices: whether discrete actions are indices instead of one-hot vectors.
        options: further arguments of the collector.
    """

    def setup() -> Work:
        env = GymEnv(name, categorical_action_encoding=indices)
        actor = policy() if policy else RandomPolicy(env.action_spec)
        collector = SyncDataCollector(env, actor, frames_per_batch=steps, total_frames=-1, **options)
        batches = iter(collector)

        def work() -> int:
            for _ in islice(batches, frames // steps):
                pass
            return frames

        return work

    return setup


def tensordict_module(name: str) -> Callable[[], TensorDictModule]:
    """Return a builder of the environment's network as a TensorDictModule."""
    return lambda: TensorDictModule(make_policy(name), in_keys=["observation"], out_keys=["action"])


def td_callable() -> Callable[[TensorDictBase], TensorDictBase]:
    """Build a function around the network. A collector cannot know which entries of its TensorDict it changes."""
    net = Greedy()

    def act(tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"] = net(tensordict["observation"])
        return tensordict

    return act


ONE_HOT = Sampled(partial(mlp, 4, 2), ("logits",), OneHotCategorical)


def _case(
    name: str,
    title: str,
    env: str,
    bound: float,
    frames: int,
    *,
    policy: Callable[[], Any] | None = None,
    reference: Callable[[], Callable[[Tensor], Tensor]] | None = None,
    peers: tuple[str, ...] = (),
) -> Case:
    sides = {"recording loop": by_hand(env, reference, frames), "gleanrl": ours(env, policy, frames)}
    return Case(
        f"collection/{name}", title, "frame", sides, "recording loop", targets=(Target(bound),), peers=peers
    )


CASES = (
    _case("cartpole-random", "CartPole-v1, random actions", "CartPole-v1", 1.1, 4000, peers=PEERS),
    _case(
        "cartpole-mlp",
        "CartPole-v1, 2x64 tanh network in a TensorDictModule, against the bare network",
        "CartPole-v1",
        0.85,
        1000,
        policy=tensordict_module("CartPole-v1"),
        reference=Greedy,
        peers=PEERS,
    ),
    _case("pendulum-random", "Pendulum-v1, random actions", "Pendulum-v1", 0.95, 2000, peers=PEERS),
    _case(
        "pendulum-mlp",
        "Pendulum-v1, 2x64 tanh network in a TensorDictModule, against the bare network",
        "Pendulum-v1",
        0.85,
        1000,
        policy=tensordict_module("Pendulum-v1"),
        reference=lambda: make_policy("Pendulum-v1"),
        peers=PEERS,
    ),
    _case("frames-random", "84x84x4 uint8 frames, random actions", FRAMES_ENV, 0.8, 4000, peers=PEERS),
    _case(
        "cartpole-module",
        "CartPole-v1, the network as a plain nn.Module",
        "CartPole-v1",
        0.85,
        1000,
        policy=Greedy,
        reference=Greedy,
    ),
    _case(
        "cartpole-callable",
        "CartPole-v1, the network inside a TensorDict -> TensorDict function, against the bare network",
        "CartPole-v1",
        0.7,
        1000,
        policy=td_callable,
        reference=Greedy,
    ),
    _case(
        "cartpole-probabilistic",
        "CartPole-v1, ProbabilisticTensorDictSequential, against the same distribution sampled by hand",
        "CartPole-v1",
        0.8,
        1000,
        policy=ONE_HOT.by_module,
        reference=ONE_HOT.by_hand,
    ),
)
