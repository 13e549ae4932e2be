"""The native core maps skipped rows exactly as the transforms map the other rows, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import RowMaps
from gleanrl._arrays.tensordicts import flatten
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Unbounded
from gleanrl.envs import GymWrapper
from gleanrl.envs.transforms import (
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
    row_skipping,
)
from gleanrl.errors import PolicyError
from tests.envs.transforms.ways import (
    SCRIPT,
    OnTensorDicts,
    collect_both_ways,
    needs_row_maps,
    team,
)
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv
from tests.interrupts import interruptions

pytestmark = needs_row_maps
LONG = Script(lengths=(9, 4, 30))
SIZES = (20, 1, 2, 33, 7)


@pytest.fixture
def rows_run(monkeypatch):
    """List the rows that the core mapped."""
    found = []

    class Watched(RowMaps):
        def run(self, t):
            ran = super().run(t)
            if ran:
                found.append(t)
            return ran

    monkeypatch.setattr(row_skipping, "RowMaps", Watched)
    return found


def doubles():
    return GymWrapper(
        OracleEnv(script=LONG, dtype=np.float64, action_space=spaces.Box(-1.0, 1.0, (2,), np.float64))
    )


def long_batched():
    return CountingEnv(LONG, (3,))


def long_single():
    return GymWrapper(OracleEnv(script=LONG))


def norm(**kwargs):
    return ObservationNorm(0.3, 1.7, in_keys=["observation"], **kwargs)


def by_column():
    return ObservationNorm(
        torch.tensor([0.1, -2.0, 3.0]),
        torch.tensor([3.0, 1.7, 0.2]),
        ["observation"],
        standard_normal=True,
    )


CHAINS = {
    "affine": lambda: [norm()],
    "standard": lambda: [norm(standard_normal=True)],
    "by column": lambda: [by_column(), StepCounter(7), RewardSum()],
    "another key": lambda: [norm(out_keys=["seen"]), StepCounter(7)],
    "twice": lambda: [
        norm(out_keys=["seen"]),
        ObservationNorm(0.3, 1.7, ["seen"], ["twice"]),
        norm(standard_normal=True),
    ],
    "in a row": lambda: [norm(), norm(standard_normal=True), RewardScaling(0.5, 1.7), RewardSum()],
    "rewards": lambda: [RewardScaling(0.5, 1.7), RewardSum(), StepCounter()],
    "sums before": lambda: [RewardSum(), StepCounter(7), RewardScaling(0.5, 1.7, standard_normal=True)],
    "sums before and after": lambda: [
        RewardSum(out_keys=["raw"]),
        RewardScaling(0.5, 1.7),
        RewardSum(out_keys=["scaled"]),
        StepCounter(7),
    ],
    "kept beside": lambda: [RewardSum(), RewardScaling(0.5, 1.7, out_keys=["scaled"])],
    "wider": lambda: [norm(), DTypeCastTransform(torch.float32, torch.float64, ["observation"]), RewardSum()],
}


@pytest.mark.parametrize("policy", [None, "observation"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("env", [long_single, long_batched])
def test_skipped_rows_equal_transformed_rows(env, chain, policy, rows_run):
    collect_both_ways(env, CHAINS[chain], sizes=SIZES, policy=policy and act(policy))
    assert len(rows_run) > 30


def act(key):
    """Return a policy that reads the value at `key`."""
    return TensorDictModule(
        lambda x: (x[..., :1].float().cos() * 0.9).expand(*x.shape[:-1], 2).clone(), [key], ["action"]
    )


def test_policy_with_unknown_reads_sees_mapped_values(rows_run):
    def policy(tensordict):
        seen = tensordict["observation"][..., :1] + tensordict["step_count"]
        return tensordict.set("action", seen.cos().expand(*tensordict.shape, 2))

    collect_both_ways(long_batched, lambda: [norm(), StepCounter(7)], sizes=SIZES, policy=policy)
    assert rows_run


def test_loc_and_scale_may_differ_by_environment(rows_run):
    scale = torch.arange(1.0, 10.0).reshape(3, 3)
    collect_both_ways(
        long_batched, lambda: [ObservationNorm(torch.tensor(0.5), scale, ["observation"])], sizes=SIZES
    )
    assert rows_run


def test_nested_observations_of_agents_are_mapped(rows_run):
    keys = [("agents", "observation")]
    collect_both_ways(team, lambda: [ObservationNorm(0.3, 1.7, keys), StepCounter(4)], sizes=SIZES)
    assert rows_run


@pytest.mark.parametrize("more", [lambda: [], lambda: [norm()], lambda: [RewardSum(), StepCounter(5)]])
def test_doubles_are_cast_in_skipped_rows(more, rows_run):
    collect_both_ways(doubles, lambda: [DoubleToFloat(), *more()], sizes=SIZES)
    assert len(rows_run) > 20


@pytest.mark.parametrize(
    "chain",
    [
        lambda: [norm(), RewardClipping(-0.5, 0.5)],
        lambda: [VecNorm(["observation"]), RewardScaling(0.5, 1.7)],
        lambda: [ObservationNorm(torch.zeros(()).double(), torch.ones(()).double(), ["observation"])],
        lambda: [RewardScaling(0, 2)],
        lambda: [
            RewardSum(),
            norm(),
            RewardScaling(0.5, 1.7),
            RewardSum(out_keys=["more"]),
            RewardClipping(-1.0, 1.0),
        ],
        # The summed values are scaled rewards, but not the final ones.
        lambda: [RewardScaling(0.5, 1.7), RewardSum(), RewardScaling(0.5, 1.7)],
        lambda: [
            StepCounter(7),
            norm(in_keys=["step_count"]) if False else RewardSum(),
            VecNorm(["observation"]),
        ],
    ],
)
def test_transforms_without_plain_arithmetic_run_in_every_row(chain, rows_run):
    collect_both_ways(long_batched, chain, sizes=SIZES)
    assert not rows_run


class Wide(CountingEnv):
    """Has an observation of many numbers."""

    def _declare(self):
        super()._declare()
        spec = self.observation_spec
        spec["wide"] = Unbounded((3, 400))
        self.observation_spec = spec

    def _package(self, flags):
        return super()._package(flags).set("wide", self._clock[:, None].expand(3, 400).float())


def test_large_rows_are_left_to_torch(rows_run):
    collect_both_ways(
        lambda: Wide(LONG, (3,)), lambda: [ObservationNorm(0.3, 1.7, ["wide"]), RewardSum()], sizes=SIZES
    )
    assert not rows_run


class Own(RewardScaling):
    """A user's transform with unknown arithmetic."""

    def _apply_transform(self, value):
        return super()._apply_transform(value).abs()


def test_a_users_subclass_and_a_replaced_method_are_called(rows_run):
    collect_both_ways(long_batched, lambda: [Own(0.5, 1.7)], sizes=SIZES)

    def replaced():
        one = RewardScaling(0.5, 1.7)
        one._apply_transform = lambda value: value.neg()
        return [one]

    parts = collect_both_ways(long_batched, replaced, sizes=SIZES)
    assert not rows_run
    assert bool((parts[0]["next", "reward"] <= 0).all())


def change_in_place(one):
    one.loc.add_(1.0)
    one.scale.mul_(2.0)


def assign(one):
    one.loc, one.scale = torch.tensor(4.0), torch.tensor([1.0, 2.0, 3.0])


def load(one):
    one.load_state_dict({"loc": torch.tensor(4.0), "scale": torch.tensor(9.0)})


def give_other_memory(one):
    one.loc.data = torch.tensor(4.0)


def make_square(one):
    one.loc, one.scale = torch.arange(9.0).reshape(3, 3), torch.ones(())


def turn_over(one):
    one.loc.data = one.loc.data.T  # the same memory with other strides


@pytest.mark.parametrize(
    "changes",
    [
        [change_in_place],
        [assign],
        [load],
        [give_other_memory],
        [lambda one: one.double()],
        [make_square, turn_over],
    ],
)
def test_changed_loc_and_scale_apply_to_the_next_batch(changes, rows_run):
    def collected(*more):
        one = norm(standard_normal=True)
        env = TransformedEnv(CountingEnv(Script(lengths=(50,)), (3,)), Compose(one, *more))
        collector = SyncDataCollector(env, None, frames_per_batch=30, total_frames=-1)
        yield collector.next()
        for change in changes:
            change(one)
            yield collector.next()
            yield collector.next()

    torch.manual_seed(0)
    fast = list(collected())
    assert rows_run
    torch.manual_seed(0)
    slow = list(collected(OnTensorDicts()))
    for left, right in zip(fast, slow, strict=True):
        assert torch.equal(left["observation"], right["observation"])
        assert torch.equal(left["next", "observation"], right["next", "observation"])


def add_in_place(one):
    one.loc.add_(1.0)


def exchange(one):
    one.loc = torch.tensor(7.0)


def widen(one):
    one.loc, one.scale = torch.arange(3.0), torch.arange(1.0, 4.0)


def share(one):
    one.share_memory()
    one.loc.fill_(7.0)


@pytest.mark.parametrize("change", [add_in_place, exchange, widen, load, share, give_other_memory])
def test_changed_loc_and_scale_apply_to_the_next_row(change, rows_run):
    def collected(*more):
        one, calls = norm(standard_normal=True, out_keys=["seen"]), 0

        def policy(observation):
            nonlocal calls
            calls += 1
            if calls == 5:
                change(one)
            return torch.zeros(3, 2)

        env = TransformedEnv(CountingEnv(Script(lengths=(50,)), (3,)), Compose(one, RewardSum(), *more))
        module = TensorDictModule(policy, ["observation"], ["action"])
        return SyncDataCollector(env, module, frames_per_batch=60, total_frames=-1).next()

    fast, slow = flatten(collected()), flatten(collected(OnTensorDicts()))
    for path in fast:
        assert torch.equal(fast[path], slow[path]), path
    assert len(rows_run) > (2 if change is widen else 15)


@pytest.mark.parametrize("chain", ["another key", "in a row", "sums before", "twice"])
def test_state_saved_in_mid_batch_is_of_the_last_row(chain, rows_run):
    roots = []

    def policy(observation):
        if (observation[0, -1] % 3).bool():
            roots.append({path: value.clone() for path, value in stepper.root().items()})
        return torch.zeros(3, 2)

    env = TransformedEnv(CountingEnv(LONG, (3,)), Compose(*CHAINS[chain]()))
    module = TensorDictModule(policy, ["observation"], ["action"])
    collector = SyncDataCollector(env, module, frames_per_batch=60, total_frames=-1)
    stepper = collector.plan.stepper
    roots.clear()
    batch = flatten(collector.next())
    rows = [t for t in range(20) if (batch[("observation",)][0, t, -1] % 3).bool()]
    assert len(roots) == len(rows) > 3
    for t, root in zip(rows, roots, strict=True):
        for path, value in root.items():
            assert torch.equal(value, batch[path][:, t]), (t, path)
    assert rows_run


@pytest.mark.parametrize("at", [1, 4, 8, 9])
@pytest.mark.parametrize("chain", ["standard", "in a row", "sums before"])
def test_a_batch_that_fails_leaves_the_root_of_its_last_whole_row(chain, at, rows_run):
    """The next batch begins with the values mapped before the policy failed."""

    def parts(*more):
        calls = 0

        def policy(observation):
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise RuntimeError("no")
            return torch.zeros(3, 2)

        env = TransformedEnv(long_batched(), Compose(*CHAINS[chain](), *more))
        module = TensorDictModule(policy, ["observation"], ["action"])
        collector = SyncDataCollector(env, module, frames_per_batch=60, total_frames=-1)
        with pytest.raises((RuntimeError, PolicyError)):
            collector.next()
        return [collector.next(), collector.next()]

    for left, right in zip(parts(), parts(OnTensorDicts()), strict=True):
        left, right = flatten(left), flatten(right)
        for path in left:
            assert torch.equal(left[path], right[path]), path
    assert rows_run


@pytest.mark.slow
def test_interrupt_leaves_complete_rows():
    def make():
        env = TransformedEnv(
            CountingEnv(SCRIPT, (2,)), Compose(norm(out_keys=["seen"]), RewardSum(), RewardScaling(1.0, 2.0))
        )
        return SyncDataCollector(env, act("seen"), frames_per_batch=20, total_frames=-1)

    for collector, place in interruptions(make, lambda collector: collector.next(), most=60):
        for _ in range(2):
            batch = collector.next()
            for part in (batch, batch["next"]):
                assert torch.equal(part["seen"], part["observation"] * 1.7 + 0.3), place
            raw = (batch["next", "reward"] - 1.0) / 2.0
            assert torch.allclose(batch["next", "episode_reward"], batch["episode_reward"] + raw), place
            same = batch["collector", "traj_ids"][:, 1:] == batch["collector", "traj_ids"][:, :-1]
            assert torch.equal(batch["seen"][:, 1:][same], batch["next", "seen"][:, :-1][same]), place
        collector.shutdown()


def test_declared_arithmetic_equals_apply_transform():
    value = torch.randn(5, 3)
    for one in (norm(), norm(standard_normal=True), RewardScaling(0.3, 1.7)):
        after = torch.zeros(1, 5, 3)
        maps = [(value[None].numpy(), after.numpy(), None, [*map(tuple, one.arithmetic(torch.float32))])]
        RowMaps(EXCHANGE, torch.Tensor, maps).run(0)
        assert torch.equal(after[0], one._apply_transform(value))
        assert one.arithmetic(torch.float64) is None
    assert [op.name for op in DoubleToFloat().arithmetic(torch.float64)] == ["float32"]
    assert DoubleToFloat().arithmetic(torch.int64) is None
    assert ObservationNorm(in_keys=["a"]).arithmetic(torch.float32) is None
