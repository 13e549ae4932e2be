"""`policy_backend`: natively computed policies collect like torch's, resume exactly, and report which code ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from gleanrl.collectors import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from gleanrl.collectors.distributed import DistributedSyncDataCollector, RayCollector
from gleanrl.data import LazyTensorStorage, TensorDictReplayBuffer
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv
from gleanrl.envs.utils import RandomPolicy
from gleanrl.errors import InvalidArgumentError, UnsupportedError


def cartpole() -> Any:
    """Return an environment whose actions are indices."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


ENVS: dict[str, Callable[[], Any]] = {
    "single": cartpole,
    "serial": lambda: SerialEnv(2, cartpole),
    "parallel": lambda: ParallelEnv(2, cartpole),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True),
}


def net(seed: int = 0, *more: nn.Module, outputs: int = 2) -> nn.Sequential:
    """Return a network of random weights, with further modules before its last layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        last = nn.Linear(32, outputs)
        nn.init.zeros_(last.bias)  # otherwise one action would often be the best one for all observations
        return nn.Sequential(nn.Linear(4, 32, bias=False), nn.Tanh(), *more, last)


class Greedy(nn.Module):
    """Returns the index of the largest output of a network."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the index."""
        return self.inner(observation).argmax(-1)


class Branch(nn.Module):
    """A network that the core can't compute, because its `forward` has a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(outputs=4)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return numbers like an observation."""
        if observation.dim() > 5:
            return observation
        return self.inner(observation)


def greedy(seed: int = 0, *more: nn.Module) -> TensorDictModule:
    """Return a policy without random numbers."""
    return TensorDictModule(Greedy(net(seed, *more)), ["observation"], ["action"])


def sampling(inner: nn.Module | None = None, key: str = "observation") -> ProbabilisticTensorDictSequential:
    """Return a policy that draws actions and writes their log-probabilities."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(inner or net(1), [key], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def tossing() -> ProbabilisticTensorDictSequential:
    """Return a policy whose draws don't depend on the observations."""
    inner = nn.Linear(4, 2)
    nn.init.zeros_(inner.weight)
    nn.init.zeros_(inner.bias)
    return sampling(inner)


def mixed() -> TensorDictSequential:
    """Return a policy with a member that only torch can compute, before native ones."""
    return TensorDictSequential(
        TensorDictModule(Branch(), ["observation"], ["hidden"]), sampling(net(2), "hidden")
    )


def collected(collector: Any, seed: int | None = 0) -> list[TensorDictBase]:
    """Return all batches of a collector, which is seeded first and shut down afterwards."""
    try:
        if seed is not None:
            collector.set_seed(seed)
        return list(collector)
    finally:
        collector.shutdown()


def leaves(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    """Return the leaves of a batch."""
    return dict(batch.items(True, True))


def check_equal(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """Check that two batches have the same keys and values, up to rounding of floats that the policy wrote."""
    found, expected = leaves(ours), leaves(theirs)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")
    assert torch.equal(ours["action"], theirs["action"])


def check_all_equal(ours: list[TensorDictBase], theirs: list[TensorDictBase]) -> None:
    """Check that two lists of batches are equal and contain several actions."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        check_equal(one, other)
    assert len(torch.cat([batch["action"].reshape(-1) for batch in ours]).unique()) == 2


def actions(batches: Any) -> torch.Tensor:
    """Return the actions of a single environment in the order of its steps."""
    return torch.cat([batch["action"] for batch in batches])


class TestSameBatches:
    """The native way gives torch's batches for policies without random numbers."""

    @pytest.mark.parametrize("kind", ENVS)
    def test_greedy_policy_collects_equal_batches(self, kind: str) -> None:
        batches = [
            collected(
                SyncDataCollector(
                    ENVS[kind](), greedy(), frames_per_batch=60, total_frames=240, policy_backend=backend
                )
            )
            for backend in ("native", "auto", "torch")
        ]
        check_all_equal(batches[0], batches[2])
        check_all_equal(batches[1], batches[2])

    @pytest.mark.parametrize("kind", ENVS)
    def test_workers_collect_equal_batches(self, kind: str) -> None:
        batches = [
            collected(
                MultiSyncDataCollector(
                    [ENVS[kind]] * 2, greedy(), frames_per_batch=60, total_frames=180, policy_backend=backend
                )
            )
            for backend in ("native", "torch")
        ]
        check_all_equal(*batches)

    def test_worker_that_collects_ahead_collects_equal_batches(self) -> None:
        batches = [
            collected(
                aSyncDataCollector(
                    cartpole, greedy(), frames_per_batch=50, total_frames=200, policy_backend=backend
                )
            )
            for backend in ("native", "torch")
        ]
        check_all_equal(*batches)

    def test_asynchronous_workers_collect_equal_batches(self) -> None:
        found: list[dict[int, list[TensorDictBase]]] = []
        for backend in ("native", "torch"):
            by_worker: dict[int, list[TensorDictBase]] = {0: [], 1: []}
            for batch in collected(
                MultiaSyncDataCollector(
                    [cartpole] * 2, greedy(), frames_per_batch=40, total_frames=400, policy_backend=backend
                )
            ):
                by_worker[int(batch["collector", "traj_ids"][0]) % 2].append(batch)
            found.append(by_worker)
        pairs = [pair for worker in (0, 1) for pair in zip(found[0][worker], found[1][worker], strict=False)]
        assert pairs
        for ours, theirs in pairs:
            check_equal(ours, theirs)

    def test_first_frames_are_random_and_equal_torchs(self) -> None:
        found = []
        for backend in ("native", "torch"):
            collector = SyncDataCollector(
                cartpole(),
                greedy(),
                frames_per_batch=40,
                total_frames=160,
                init_random_frames=80,
                policy_backend=backend,
            )
            collector.set_seed(0)
            batches = [collector.next(), collector.next()]
            assert collector.stats().policy == ()
            batches += list(collector)
            assert collector.stats().policy == (("Greedy: native",) if backend == "native" else ())
            found.append(batches)
        check_all_equal(*found)

    @pytest.mark.parametrize("extend", [True, False])
    def test_buffers_get_equal_rows(self, extend: bool) -> None:
        rows = []
        for backend in ("native", "torch"):
            buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(200), batch_size=10)
            collected(
                SyncDataCollector(
                    cartpole(),
                    greedy(),
                    frames_per_batch=50,
                    total_frames=200,
                    replay_buffer=buffer,
                    extend_buffer=extend,
                    policy_backend=backend,
                )
            )
            assert len(buffer) == 200
            rows.append(buffer[:])
        check_equal(*rows)

    def test_whole_trajectories_are_equal(self) -> None:
        batches = [
            collected(
                SyncDataCollector(
                    cartpole(),
                    greedy(),
                    frames_per_batch=50,
                    total_frames=300,
                    trajs_per_batch=2,
                    policy_backend=backend,
                )
            )
            for backend in ("native", "torch")
        ]
        check_all_equal(*batches)


class TestRollout:
    """`env.rollout` has the argument, too."""

    @pytest.mark.parametrize("kind", ["single", "serial"])
    def test_rollout_equals_torchs(self, kind: str) -> None:
        env, found = ENVS[kind](), []
        for backend in ("native", "auto", "torch"):
            env.set_seed(3)
            with torch.no_grad():
                found.append(env.rollout(80, greedy(), break_when_any_done=False, policy_backend=backend))
        check_all_equal(found[:1], found[2:])
        check_all_equal(found[1:2], found[2:])

    def test_rollout_begins_natively_if_outputs_are_found_by_a_call(self) -> None:
        """Torch's global generator gives the key only, so its other numbers don't matter."""
        found = []
        for policy in (sampling(), sampling()):
            env = cartpole()
            env.set_seed(0)
            torch.manual_seed(5)
            with torch.no_grad():
                found.append(env.rollout(30, policy, break_when_any_done=False, policy_backend="native"))
        check_all_equal(found[:1], found[1:])

    def test_gradients_are_torchs(self) -> None:
        env, policy = cartpole(), sampling()
        with pytest.raises(UnsupportedError, match="gradients are enabled"):
            env.rollout(5, policy, policy_backend="native")
        rollout = env.rollout(5, policy, policy_backend="auto")
        assert rollout["action_log_prob"].requires_grad

    def test_random_actions_refuse_native(self) -> None:
        env = cartpole()
        for policy in (None, RandomPolicy(env.full_action_spec), env.rand_step):
            with pytest.raises(UnsupportedError, match="random actions are drawn in one call anyway"):
                env.rollout(5, policy, policy_backend="native")
            assert env.rollout(5, policy, policy_backend="auto")["action"].shape[0] > 0

    def test_other_values_are_refused(self) -> None:
        with pytest.raises(
            InvalidArgumentError, match="policy_backend: expected 'auto', 'torch' or 'native'"
        ):
            cartpole().rollout(5, greedy(), policy_backend="fast")


class TestRandomNumbers:
    """Drawn actions continue exactly, and don't depend on how frames are cut into batches."""

    @pytest.mark.parametrize("make_policy", [sampling, mixed])
    def test_actions_do_not_depend_on_the_length_of_batches(self, make_policy: Any) -> None:
        found = []
        for frames in (7, 50, 1):
            collector = SyncDataCollector(
                cartpole(), make_policy(), frames_per_batch=frames, total_frames=350, policy_backend="auto"
            )
            batches = collected(collector, 3)
            assert any(text.endswith("native") for text in collector.stats().policy)
            found.append(torch.cat(batches, -1).reshape(-1))
        for other in found[1:]:
            for key in ("action", "observation", "action_log_prob", ("next", "done")):
                assert torch.equal(found[0][key], other[key]), key

    def test_seeds_make_runs_reproducible(self) -> None:
        def run(seed: int | None) -> torch.Tensor:
            collector = SyncDataCollector(
                cartpole(), tossing(), frames_per_batch=100, total_frames=200, policy_backend="native"
            )
            return actions(collected(collector, seed))

        assert torch.equal(run(1), run(1))
        assert not torch.equal(run(1), run(2))
        torch.manual_seed(0)
        first = run(None)
        torch.manual_seed(0)
        assert torch.equal(run(None), first)
        assert 60 < int(first.sum()) < 140

    def test_second_seed_begins_anew(self) -> None:
        collector = SyncDataCollector(
            cartpole(), sampling(), frames_per_batch=30, total_frames=-1, policy_backend="native"
        )
        found = []
        for _ in range(2):
            collector.set_seed(4)
            found.append(torch.cat([collector.next(), collector.next()]))
        collector.shutdown()
        assert torch.equal(found[0]["action"], found[1]["action"])
        assert torch.equal(found[0]["observation"], found[1]["observation"])

    @pytest.mark.parametrize("kind", ["single", "serial"])
    def test_state_continues_with_the_same_actions(self, kind: str) -> None:
        def make() -> SyncDataCollector:
            return SyncDataCollector(
                ENVS[kind](), tossing(), frames_per_batch=26, total_frames=-1, policy_backend="native"
            )

        first, second = make(), make()
        second.set_seed(9)
        second.next()
        for _ in range(3):
            first.next()
        state = first.state_dict()
        second.load_state_dict(state)
        for _ in range(3):
            assert torch.equal(first.next()["action"], second.next()["action"])
        first.shutdown(), second.shutdown()

    def test_state_without_random_numbers_loads_and_begins_anew(self) -> None:
        first, second, third = (
            SyncDataCollector(
                cartpole(), tossing(), frames_per_batch=60, total_frames=-1, policy_backend=backend
            )
            for backend in ("torch", "native", "native")
        )
        first.next()
        second.load_state_dict(first.state_dict())  # torch's way draws none of these numbers
        assert second.next()["action"].shape == (60,)
        third.next()
        state = first.state_dict()
        del state["source"]["random"]  # a state of an earlier release
        third.load_state_dict(state)
        assert third.next()["action"].shape == (60,)
        for collector in (first, second, third):
            collector.shutdown()

    @pytest.mark.parametrize("make", [MultiSyncDataCollector, MultiaSyncDataCollector])
    def test_workers_continue_with_the_same_actions(self, make: Any) -> None:
        workers = 2 if make is MultiSyncDataCollector else 1
        collectors = [
            make(
                [cartpole] * workers,
                tossing(),
                frames_per_batch=40,
                total_frames=-1,
                policy_backend="native",
            )
            for _ in range(3)
        ]
        try:
            first, *others = collectors
            for _ in range(2):
                first.next()
            state = first.state_dict()
            for other in others:
                other.load_state_dict(state)
            expected = first.next()["action"] if make is MultiSyncDataCollector else None
            ours, theirs = (other.next()["action"] for other in others)
            assert torch.equal(ours, theirs)
            assert expected is None or torch.equal(
                ours, expected
            )  # an asynchronous worker is ahead of its state
        finally:
            for collector in collectors:
                collector.shutdown()

    def test_workers_draw_different_numbers(self) -> None:
        collector = MultiSyncDataCollector(
            [cartpole] * 2, tossing(), frames_per_batch=200, total_frames=200, policy_backend="native"
        )
        (batch,) = collected(collector, 0)
        assert not torch.equal(*batch["action"])

    def test_batched_environments_draw_different_numbers(self) -> None:
        collector = SyncDataCollector(
            ENVS["serial"](), tossing(), frames_per_batch=200, total_frames=200, policy_backend="native"
        )
        (batch,) = collected(collector, 0)
        assert not torch.equal(*batch["action"])


def marking(version: int = 0) -> TensorDictSequential:
    """Return a policy that writes a number, which its weights hold, in two places."""
    marks = [nn.Linear(4, 1) for _ in range(2)]
    for mark in marks:
        nn.init.zeros_(mark.weight)
        nn.init.constant_(mark.bias, float(version))
    return TensorDictSequential(
        TensorDictModule(marks[0], ["observation"], ["before"]),
        greedy(),
        TensorDictModule(marks[1], ["observation"], ["after"]),
    )


class TestWeights:
    """A batch is collected with one version of the weights, the one that frames carry."""

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda *args, **kwargs: SyncDataCollector(cartpole(), *args, **kwargs), id="single"),
            pytest.param(
                lambda *args, **kwargs: MultiSyncDataCollector([cartpole] * 2, *args, **kwargs), id="sync"
            ),
            pytest.param(
                lambda *args, **kwargs: MultiaSyncDataCollector([cartpole] * 2, *args, **kwargs), id="async"
            ),
        ],
    )
    def test_pushed_version_fills_whole_batches(self, make: Any) -> None:
        collector = make(
            marking(),
            frames_per_batch=20,
            total_frames=400,
            track_policy_version=True,
            policy_backend="native",
        )
        try:
            versions = set()
            for number, batch in enumerate(collector, 1):
                # Of a synchronous collector every share has the same version.
                (version,) = batch["policy_version"].unique().tolist()
                assert bool((batch["before"] == version).all()) and bool((batch["after"] == version).all())
                if not isinstance(collector, MultiaSyncDataCollector):
                    assert version == number - 1
                versions.add(version)
                collector.update_policy_weights_(marking(number))
            assert len(versions) > 3
        finally:
            collector.shutdown()

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(
                lambda policy, **kwargs: SyncDataCollector(cartpole(), policy, **kwargs), id="single"
            ),
            pytest.param(
                lambda policy, **kwargs: MultiSyncDataCollector([cartpole] * 2, policy, **kwargs), id="sync"
            ),
        ],
    )
    def test_weights_changed_in_place_take_effect_in_the_next_batch(self, make: Any) -> None:
        policy = marking()
        collector = make(policy, frames_per_batch=20, total_frames=100, policy_backend="native")
        try:
            for number, batch in enumerate(collector):
                assert batch["before"].unique().tolist() == batch["after"].unique().tolist() == [number]
                with torch.no_grad():
                    for index in (0, 2):
                        policy[index].module.bias.data += 1  # changes no version counter
        finally:
            collector.shutdown()

    def test_greedy_policy_with_pushed_weights_collects_equal_batches(self) -> None:
        found = []
        for backend in ("native", "torch"):
            collector = SyncDataCollector(
                cartpole(), greedy(), frames_per_batch=40, total_frames=240, policy_backend=backend
            )
            collector.set_seed(0)
            batches: list[TensorDictBase] = []
            for batch in collector:
                batches.append(batch)
                collector.update_policy_weights_(greedy(len(batches)))
            found.append(batches)
        check_all_equal(*found)


class TestChanges:
    """A policy that changes between two batches is looked at again."""

    @staticmethod
    def batches(change: Callable[[Any], Any], backend: str) -> tuple[list[TensorDictBase], list[Any]]:
        """Return batches before and after a change of the policy, and the texts of `stats` after each."""
        policy = greedy(0, nn.Dropout(0.5)).eval()
        collector = SyncDataCollector(
            cartpole(), policy, frames_per_batch=60, total_frames=180, policy_backend=backend
        )
        collector.set_seed(0)
        found, said = [], []
        for number, batch in enumerate(collector):
            found.append(batch)
            said.append(collector.stats().policy)
            if not number:
                torch.manual_seed(0)
                change(policy)
        return found, said

    @staticmethod
    def exchange(policy: Any) -> None:
        """Replace a layer of the policy."""
        policy.module.inner[3] = net(7)[-1]

    @staticmethod
    def activate(policy: Any) -> None:
        """Replace an activation of the policy."""
        policy.module.inner[1] = nn.ReLU()

    @pytest.mark.parametrize("change", [exchange, activate])
    def test_exchanged_layer_stays_native(self, change: Any) -> None:
        ours, said = self.batches(change, "native")
        theirs, _ = self.batches(change, "torch")
        check_all_equal(ours, theirs)
        assert said == [("Greedy: native",)] * 3

    def test_training_mode_is_torchs_and_says_why(self) -> None:
        ours, said = self.batches(lambda policy: policy.train(), "auto")
        theirs, _ = self.batches(lambda policy: policy.train(), "torch")
        check_all_equal(ours, theirs)
        assert said[0] == ("Greedy: native",)
        assert len(said[1]) == 1 and said[1][0].startswith("Greedy: torch (") and "Dropout" in said[1][0]
        assert said[2] == said[1]

    def test_training_mode_refuses_native(self) -> None:
        with pytest.raises(UnsupportedError, match=r"policy_backend='native': Greedy: torch \(.*Dropout"):
            self.batches(lambda policy: policy.train(), "native")

    def test_hooks_are_called(self) -> None:
        calls: list[int] = []

        def hook(policy: Any) -> None:
            policy.module.inner[0].register_forward_hook(lambda *args: calls.append(1))

        _, said = self.batches(hook, "auto")
        assert len(calls) == 120
        assert said[1][0].startswith("Greedy: torch (") and "hook" in said[1][0]

    def test_policy_returns_to_native(self) -> None:
        policy = greedy(0, nn.Dropout(0.5)).train()
        collector = SyncDataCollector(
            cartpole(), policy, frames_per_batch=20, total_frames=40, policy_backend="auto"
        )
        collector.next()
        assert "torch" in collector.stats().policy[0]
        policy.eval()
        collector.next()
        assert collector.stats().policy == ("Greedy: native",)
        collector.shutdown()


SINGLE = pytest.param(
    lambda policy=None, **kwargs: SyncDataCollector(cartpole(), policy, frames_per_batch=20, **kwargs),
    id="single",
)
SYNC = pytest.param(
    lambda policy=None, **kwargs: MultiSyncDataCollector(
        [cartpole] * 2, policy, frames_per_batch=20, **kwargs
    ),
    id="sync",
)
ASYNC = pytest.param(
    lambda policy=None, **kwargs: MultiaSyncDataCollector(
        [cartpole] * 2, policy, frames_per_batch=20, **kwargs
    ),
    id="async",
)
ALONE = pytest.param(
    lambda policy=None, **kwargs: aSyncDataCollector(cartpole, policy, frames_per_batch=20, **kwargs),
    id="alone",
)
RAY = pytest.param(
    lambda policy=None, **kwargs: RayCollector(
        cartpole, policy, num_collectors=1, frames_per_batch=20, remote_configs={"num_cpus": 0}, **kwargs
    ),
    id="ray",
)
OTHER_MACHINES = pytest.param(
    lambda policy=None, **kwargs: DistributedSyncDataCollector(
        [cartpole], policy, frames_per_batch=20, **kwargs
    ),
    id="distributed",
)


class TestErrors:
    """Mistakes are told before anything starts, and other errors arrive unchanged."""

    @pytest.mark.parametrize("make", [SINGLE, SYNC, ASYNC, ALONE, RAY, OTHER_MACHINES])
    @pytest.mark.parametrize("value", ["fast", None, True, "Native"])
    def test_other_values_are_refused(self, make: Any, value: Any) -> None:
        with pytest.raises(
            InvalidArgumentError, match="policy_backend: expected 'auto', 'torch' or 'native'"
        ):
            make(greedy(), policy_backend=value)

    @pytest.mark.parametrize("make", [SINGLE, SYNC, ASYNC, ALONE, RAY, OTHER_MACHINES])
    def test_random_actions_refuse_native(self, make: Any) -> None:
        with pytest.raises(UnsupportedError, match="random actions are drawn in one call anyway"):
            make(policy_backend="native")

    @pytest.mark.parametrize("make", [SINGLE, SYNC])
    def test_random_policies_refuse_native(self, make: Any) -> None:
        for keywords in ({"policy": RandomPolicy()}, {"policy_factory": RandomPolicy}):
            with pytest.raises(UnsupportedError, match="random actions are drawn in one call anyway"):
                make(policy_backend="native", **keywords)

    def test_random_step_refuses_native(self) -> None:
        env = cartpole()
        with pytest.raises(UnsupportedError, match="random actions are drawn in one call anyway"):
            SyncDataCollector(env, env.rand_step, frames_per_batch=20, policy_backend="native")

    @pytest.mark.parametrize("make", [SINGLE, SYNC, ALONE])
    @pytest.mark.parametrize("name", ["compile_policy", "cudagraph_policy"])
    def test_compiled_policies_refuse_native(self, make: Any, name: str) -> None:
        for value in (True, {}):
            with pytest.raises(UnsupportedError, match=f"{name}: policy_backend='native'"):
                make(greedy(), policy_backend="native", **{name: value})

    def test_compiled_policy_is_torchs(self) -> None:
        collector = SyncDataCollector(
            cartpole(),
            greedy(),
            frames_per_batch=20,
            compile_policy={"backend": "eager"},
            policy_backend="auto",
        )
        collector.next()
        (text,) = collector.stats().policy
        collector.shutdown()
        assert text.startswith("Greedy: torch (") and "compiled" in text

    @pytest.mark.parametrize("make", [SINGLE, SYNC, ASYNC, ALONE])
    def test_policy_of_torch_refuses_native(self, make: Any) -> None:
        collector = make(mixed(), policy_backend="native")
        try:
            with pytest.raises(
                UnsupportedError, match=r"policy_backend='native': Branch: torch \("
            ) as caught:
                collector.next()
            assert type(caught.value) is UnsupportedError
            assert collector.stats().policy[0].startswith("Branch: torch (")
            assert collector.stats().delivered == 0
        finally:
            collector.shutdown()

    def test_collector_continues_after_the_policy_is_repaired(self) -> None:
        policy = greedy(0, nn.Dropout()).train()
        collector = SyncDataCollector(cartpole(), policy, frames_per_batch=20, policy_backend="native")
        with pytest.raises(UnsupportedError):
            collector.next()
        policy.eval()
        assert collector.next().shape == (20,)
        collector.shutdown()


class TestStats:
    """`stats` tells which code computed the policy."""

    @pytest.mark.parametrize("make", [SINGLE, SYNC, ASYNC, ALONE])
    def test_each_module_has_its_text(self, make: Any) -> None:
        collector = make(mixed(), policy_backend="auto")
        try:
            assert collector.stats().policy == ()
            collector.next()
            branch, *others = collector.stats().policy
            assert branch.startswith("Branch: torch (")
            assert others == ["Sequential: native", "ProbabilisticTensorDictModule: native"]
        finally:
            collector.shutdown()
        assert collector.stats().policy == (branch, *others)

    @pytest.mark.parametrize("make", [SINGLE, SYNC])
    def test_torch_says_nothing(self, make: Any) -> None:
        collector = make(greedy(), policy_backend="torch")
        collector.next()
        assert collector.stats().policy == ()
        collector.shutdown()

    @pytest.mark.parametrize("make", [SINGLE, SYNC])
    def test_auto_is_the_default(self, make: Any) -> None:
        collector = make(greedy())
        collector.next()
        assert collector.stats().policy == ("Greedy: native",)
        collector.shutdown()

    def test_random_policy_says_nothing(self) -> None:
        collector = SyncDataCollector(cartpole(), frames_per_batch=20, policy_backend="auto")
        collector.next()
        assert collector.stats().policy == ()
        collector.shutdown()

    def test_workers_with_different_policies_give_all_texts(self) -> None:
        factories = [
            greedy,
            lambda: TensorDictModule(Greedy(net(0, nn.Dropout())), ["observation"], ["action"]),
        ]
        collector = MultiSyncDataCollector(
            [cartpole] * 2, policy_factory=factories, frames_per_batch=20, policy_backend="auto"
        )
        try:
            collector.next()
            native, torchs = collector.stats().policy
            assert native == "Greedy: native" and torchs.startswith("Greedy: torch (")
        finally:
            collector.shutdown()

    def test_long_texts_are_cut(self) -> None:
        long = type("Long" * 100, (Branch,), {})
        members = [TensorDictModule(long(), ["observation"], [f"out{number}"]) for number in range(40)]
        policy = TensorDictSequential(greedy(), *members)
        collector = MultiSyncDataCollector([cartpole], policy, frames_per_batch=2, policy_backend="auto")
        try:
            collector.next()
            first, *others = collector.stats().policy
            assert first == "Greedy: native" and 10 < len(others) < 40
            assert all(text.startswith("LongLong") for text in others[:-1])
        finally:
            collector.shutdown()


@pytest.fixture
def node(ray_session: Any) -> Iterator[Callable[..., RayCollector]]:
    """Yield a function that makes a collector with one node, which is shut down at the end."""
    made: list[RayCollector] = []

    def make(policy: Any, **keywords: Any) -> RayCollector:
        made.append(
            RayCollector(
                cartpole,
                policy,
                num_collectors=1,
                frames_per_batch=40,
                remote_configs={"num_cpus": 0},
                **keywords,
            )
        )
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def test_ray_node_collects_equal_batches(node: Callable[..., RayCollector]) -> None:
    found = []
    for backend in ("native", "torch"):
        collector = node(greedy(), total_frames=160, policy_backend=backend)
        found.append(collected(collector))
        assert collector.stats().policy == (("Greedy: native",) if backend == "native" else ())
    check_all_equal(*found)


def test_ray_node_refuses_a_policy_of_torch(node: Callable[..., RayCollector]) -> None:
    collector = node(mixed(), policy_backend="native")
    with pytest.raises(UnsupportedError, match=r"policy_backend='native': Branch: torch \(") as caught:
        collector.next()
    assert type(caught.value) is UnsupportedError
