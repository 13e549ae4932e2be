"""Policies computed by the native core, against loops by hand in torch and against the collector with torch.

Each case names its policy. Nothing in the library knows the classes of these policies. Turns of the native side have
more frames, so that all turns take similar times.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal

from benchmarks import collection, envs, multiprocess, vector_envs
from benchmarks.climit import Actor
from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.sampled import Sampled
from benchmarks.workload import Greedy, mlp
from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import Path
from gleanrl._rollout.actors import PolicyActor, RowLayout
from gleanrl._rollout.native_policies import Backend, NativePolicy
from gleanrl._state.rng import CounterGenerator
from gleanrl.envs import Greedy as GreedyHead
from gleanrl.envs import GymEnv, SerialEnv

LOOP, TORCH, OURS = "loop in torch", "gleanrl torch", "gleanrl"
FRAMES: dict[Backend, int] = {"torch": 1000, "native": 4000}
"""Frames per turn of a single environment."""
CALLS, PASSES = 2000, 50
"""Rows of the block whose rows are computed one by one, and how often in a turn."""
VECTOR_BATCHES = 4
CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"

CATEGORICAL = Sampled(partial(mlp, 4, 2), ("logits",), Categorical, scored=True)
WIDE_CATEGORICAL = Sampled(partial(mlp, 4, 2, 256), ("logits",), Categorical, scored=True)


def with_head() -> nn.Sequential:
    """Build the network of CartPole with the library's greedy head as its last layer."""
    return nn.Sequential(*mlp(4, 2), GreedyHead(one_hot=True))


def as_module(network: Callable[[], nn.Module]) -> TensorDictModule:
    """Build a network as a TensorDictModule that writes the action."""
    return TensorDictModule(network(), in_keys=["observation"], out_keys=["action"])


def loc_and_scale() -> nn.Sequential:
    """Build the network of Pendulum with two outputs: the mean and the standard deviation."""
    return nn.Sequential(*mlp(3, 2), NormalParamExtractor())


def normal() -> Sampled:
    """Return Pendulum's policy with torch's normal distribution."""
    return Sampled(loc_and_scale, ("loc", "scale"), Normal, scored=True)


def tanh_normal() -> Sampled:
    """Return Pendulum's policy with TorchRL's squashed normal distribution."""
    cls = importlib.import_module("torchrl.modules").TanhNormal
    return Sampled(loc_and_scale, ("loc", "scale"), cls, {"low": -2.0, "high": 2.0}, scored=True)


def _case(
    name: str,
    title: str,
    bound: float,
    loop: Setup,
    ours: Callable[[Backend], Setup],
    peers: tuple[str, ...] = (),
) -> Case:
    sides = {LOOP: loop, TORCH: ours("torch"), OURS: ours("native")}
    return Case(f"native/{name}", title, "frame", sides, LOOP, (Target(bound),), peers=peers)


def _greedy(
    name: str, title: str, network: Callable[[], nn.Module], bound: float, peers: tuple[str, ...] = ()
) -> Case:
    def ours(backend: Backend) -> Setup:
        policy = partial(as_module, network)
        return collection.ours(CARTPOLE, policy, FRAMES[backend], policy_backend=backend)

    loop = collection.by_hand(CARTPOLE, network, FRAMES["torch"])
    return _case(name, f"CartPole-v1, 2x64 MLP, greedy: {title}", bound, loop, ours, peers)


def _sampled(
    name: str, env: str, title: str, make: Callable[[], Sampled], bound: float, peers: tuple[str, ...] = ()
) -> Case:
    def loop() -> Work:
        policy = make()
        options = {"indices": True, "outputs": policy.outputs}
        return collection.by_hand(env, policy.by_hand, FRAMES["torch"], **options)()

    def ours(backend: Backend) -> Setup:
        def setup() -> Work:
            policy, frames = make().by_module, FRAMES[backend]
            return collection.ours(env, policy, frames, indices=env == CARTPOLE, policy_backend=backend)()

        return setup

    title = f"{env}, {title} with log-probability (ProbabilisticTensorDictSequential)"
    return _case(name, title, bound, loop, ours, peers)


def _serial(backend: Backend) -> Setup:
    def make() -> SerialEnv:
        return SerialEnv(8, lambda: GymEnv(CARTPOLE))

    return envs.collected(make, partial(as_module, Greedy), 2, 8, policy_backend=backend)


def _vector(backend: Backend) -> Setup:
    return vector_envs.ours(vector_envs.wrapped, 64, Greedy, VECTOR_BATCHES, policy_backend=backend)


def _multi(backend: Backend) -> Setup:
    batches = 15 if backend == "torch" else 30
    policy = multiprocess.cartpole_module
    return multiprocess.ours("sync", 2, CARTPOLE, policy, batches, policy_backend=backend)


def _small_batches(steps: int, frames: int) -> Case:
    def ours(backend: Backend) -> Setup:
        policy = partial(as_module, Greedy)
        return collection.ours(CARTPOLE, policy, frames, steps, policy_backend=backend)

    title = f"CartPole-v1, 2x64 MLP, greedy, own forward: frames_per_batch={steps}, against the collector with torch"
    sides = {TORCH: ours("torch"), OURS: ours("native")}
    return Case(f"native/batches-of-{steps}", title, "frame", sides, TORCH, (Target(1.0),))


def _call() -> Work:
    """Call the actor as a collector's loop does, for each row of a block."""
    number, floats = torch.Size(()), torch.float32
    outputs: dict[Path, Field] = {
        ("action",): Field(number, torch.int64),
        ("logits",): Field(torch.Size((2,)), floats),
        ("action_log_prob",): Field(number, floats),
    }
    roots: dict[Path, Field] = {("observation",): Field(torch.Size((4,)), floats)}
    block = Block(Schema({**roots, **outputs}), (), CALLS)
    block.column(("observation",)).copy_(torch.from_numpy(_observations()))
    layout = RowLayout((("observation",),), (("action",),), number)
    core = NativePolicy("native", CounterGenerator(), roots, outputs, number)
    actor = PolicyActor(CATEGORICAL.by_module(), outputs, layout, native=core)
    with torch.no_grad():
        act = actor.bind(block)
    assert act is not None

    def work() -> int:
        for _ in range(PASSES):
            for t in range(CALLS):
                act(t)
        return PASSES * CALLS

    return work


def _observations() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((CALLS, 4), np.float32)


def _c_call() -> Work:
    layers = [one for one in mlp(4, 2) if isinstance(one, nn.Linear)]
    arrays = [(one.weight.detach().numpy(), one.bias.detach().numpy()) for one in layers]
    actor = Actor(arrays, _observations())

    def work() -> int:
        for _ in range(PASSES):
            actor()
        return PASSES * CALLS

    return work


def _torch_call() -> Work:
    act, rows = CATEGORICAL.by_hand(), torch.from_numpy(_observations())[: CALLS // 10]

    def work() -> int:
        with torch.no_grad():
            for row in rows:
                act(row)
        return len(rows)

    return work


_TANH_NORMAL = (
    _sampled("pendulum-tanh-normal", PENDULUM, "2x64 MLP, TorchRL's TanhNormal", tanh_normal, 5.0),
)
_PEERS = ("torchrl", "sb3", "pufferlib")
CASES = (
    _greedy("greedy-head", "a Sequential that ends with the library's Greedy", with_head, 4.0),
    _greedy("greedy-forward", "a module with its own forward", Greedy, 4.0, _PEERS),
    _sampled("categorical", CARTPOLE, "2x64 MLP, Categorical", lambda: CATEGORICAL, 9.0, ("pufferlib",)),
    _sampled("pendulum-normal", PENDULUM, "2x64 MLP, torch's Normal", normal, 5.0),
    # Both sides of this case need TorchRL in this interpreter. Without it, the case does not exist.
    *(_TANH_NORMAL if importlib.util.find_spec("torchrl") else ()),
    _sampled("categorical-256", CARTPOLE, "2x256 MLP, Categorical", lambda: WIDE_CATEGORICAL, 2.5),
    _case(
        "serial-8",
        "SerialEnv(8) of CartPole-v1, 2x64 MLP, greedy, own forward, against one policy call for 8 environments",
        1.5,
        envs.by_hand(8, 1),
        _serial,
    ),
    _case(
        "vector-64",
        "CartPole's native vector environment of 64, 2x64 MLP, greedy, own forward, against the vector loop",
        1.2,
        vector_envs.by_hand(vector_envs.native, 64, Greedy, VECTOR_BATCHES),
        _vector,
    ),
    Case(
        "native/vector-64-random",
        "CartPole's native vector environment of 64, random actions, against the vector loop",
        "frame",
        {
            "vector loop": vector_envs.by_hand(vector_envs.native, 64, None, VECTOR_BATCHES),
            OURS: vector_envs.ours(vector_envs.wrapped, 64, None, VECTOR_BATCHES),
        },
        "vector loop",
        (Target(0.85),),
    ),
    _case(
        "multi-sync-2",
        "2 workers (sync), CartPole-v1, 2x64 MLP, greedy, own forward, against 2 independent loops in torch",
        2.5,
        multiprocess.free(2, CARTPOLE, Greedy, 15),
        _multi,
    ),
    _small_batches(1, 500),
    _small_batches(16, 1600),
    Case(
        "native/call",
        "one call for a row: 4-64-64-2, Categorical with log-probability; the limit is a loop in C over the rows",
        "call",
        {"C loop": _c_call, "torch": _torch_call, OURS: _call},
        "C loop",
        (Target(4.0, "us"),),
    ),
)
