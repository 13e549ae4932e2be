"""`TensorDictPrimer` adds entries at each reset, and keeps the values that a policy writes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs import ParallelEnv, SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    Compose,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    UnaryTransform,
)
from gleanrl.errors import InvalidArgumentError, PolicyError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single
from tests.fakes import Script
from tests.fakes_base import CountingEnv


@pytest.mark.parametrize("env", [single, batched])
def test_primed_entries_exist_after_the_reset(env):
    def chain():
        return [TensorDictPrimer({"h": Unbounded((4,))}, default_value=2.0), StepCounter()]

    batch = joined(collect_both_ways(env, chain))
    assert batch["h"].shape == (*batch.shape, 4)
    assert bool((batch["h"] == 2).all())
    assert bool((batch["next", "h"] == 2).all())
    check_env_specs(TransformedEnv(env(), Compose(*chain())))


def test_written_state_is_read_in_the_next_step():
    def count(h, observation):
        return observation[..., :2].clamp(-1, 1), h + 1

    policy = TensorDictModule(count, in_keys=["h", "observation"], out_keys=["action", ("next", "h")])
    env = TransformedEnv(single(), TensorDictPrimer(h=Unbounded((1,))))
    root = env.reset()
    for step in range(3):
        assert float(root["h"]) == step
        stepped = env.step(policy(root))
        root = stepped["next"].exclude("reward")


@pytest.mark.parametrize("env", [single, batched])
def test_collector_runs_a_recurrent_policy(env):
    def recur(h, observation):
        return observation[..., :2].clamp(-1, 1), h + 1

    def policy():
        return TensorDictModule(recur, in_keys=["h", "observation"], out_keys=["action", ("next", "h")])

    def chain():
        return [TensorDictPrimer(h=Unbounded((1,))), StepCounter()]

    for given in (policy(), lambda td: policy()(td)):
        batch = joined(collect_both_ways(env, chain, policy=given))
        assert torch.equal(batch["h"], batch["step_count"].float())
        assert torch.equal(batch["next", "h"], batch["next", "step_count"].float())
    collector = SyncDataCollector(
        TransformedEnv(env(), Compose(*chain())),
        policy(),
        frames_per_batch=6,
        total_frames=-1,
        init_random_frames=6,
    )
    assert not bool(collector.next()["next", "h"].any())
    collector.next()


def primed():
    """Return an environment with a primed state. Its episodes end after 3 and 5 steps by turns."""
    return TransformedEnv(
        CountingEnv(Script(lengths=(3, 5))), Compose(TensorDictPrimer(h=Unbounded((1,))), StepCounter())
    )


def both_primed(inner):
    return TransformedEnv(inner, TensorDictPrimer(h=Unbounded((1,))))


@pytest.mark.parametrize("written", ["h", ("next", "h")], ids=["over", "below"])
@pytest.mark.parametrize(
    "make",
    [
        primed,
        lambda: SerialEnv(2, primed),
        lambda: ParallelEnv(2, primed),
        lambda: TransformedEnv(primed(), RewardSum(), auto_unwrap=False),
        lambda: TransformedEnv(SerialEnv(2, primed), RewardSum()),
        lambda: TransformedEnv(ParallelEnv(2, primed), RewardSum()),
        lambda: TransformedEnv(
            ParallelEnv(2, primed),
            UnaryTransform([], [], ["action"], ["action"], fn=None, inv_fn=lambda a: a),
        ),
        lambda: SerialEnv(2, lambda: TransformedEnv(SerialEnv(1, primed), RewardSum())),
        lambda: SerialEnv(2, lambda: ParallelEnv(1, primed)),
        lambda: both_primed(SerialEnv(2, primed)),
        lambda: both_primed(ParallelEnv(2, primed)),
    ],
    ids=[
        "alone",
        "in_serial",
        "in_parallel",
        "nested",
        "serial",
        "parallel",
        "inverts",
        "deep",
        "mirrored",
        "twice",
        "twice_parallel",
    ],
)
def test_state_reaches_a_nested_primer(make, written):
    def recur(h, observation):
        return observation[..., :2].clamp(-1, 1), h + 1

    policy = TensorDictModule(recur, in_keys=["h", "observation"], out_keys=["action", written])
    env = make()
    rolled = env.rollout(7, policy, break_when_any_done=False)
    with torch.no_grad():
        unrolled = env.rollout(7, policy, break_when_any_done=False)
    stepped, root = [], env.reset()
    for _ in range(7):
        step, root = env.step_and_maybe_reset(policy(root))
        stepped.append(step)
    by_hand = torch.stack(stepped, len(env.batch_size))
    collector = SyncDataCollector(env, policy, frames_per_batch=16, total_frames=32)
    try:
        for batch in (rolled, unrolled, by_hand, *collector):
            # The policy wrote a new value over the one that it read.
            found = batch["h"] - 1 if written == "h" else batch["h"]
            assert torch.equal(found, batch["step_count"].float())
            assert torch.equal(batch["next", "h"], batch["next", "step_count"].float())
            assert bool((batch["step_count"] > 1).any())
    finally:
        collector.shutdown()
        env.close()


@pytest.mark.parametrize("grad", [True, False])
def test_previous_action_can_be_primed(grad):
    env = TransformedEnv(CountingEnv(Script(lengths=(9,))), TensorDictPrimer(action=Unbounded((2,))))
    policy = TensorDictModule(lambda action: action + 1, in_keys=["action"], out_keys=["action"])
    with torch.set_grad_enabled(grad):
        rolled = env.rollout(3, policy)
    collected = next(iter(SyncDataCollector(env, policy, frames_per_batch=3, total_frames=3)))
    for batch in (rolled, collected):
        assert batch["action"][:, 0].tolist() == batch["next", "action"][:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("written", ["h", ("next", "h")])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_gradients_flow_through_a_policys_state(written, batch):
    env = TransformedEnv(
        CountingEnv(Script(lengths=(9,)), batch),
        TensorDictPrimer(Composite(h=Unbounded((*batch, 2)), shape=batch), expand_specs=False),
    )
    weight = torch.full((2, 2), 0.5, requires_grad=True)

    def recur(h):
        h = torch.tanh(h @ weight + 1)
        return h, h

    policy = TensorDictModule(recur, in_keys=["h"], out_keys=["action", written])
    (of_rollout,) = torch.autograd.grad(env.rollout(3, policy)["action"].sum(), weight)
    h, total = torch.zeros(*batch, 2), 0.0
    for _ in range(3):
        h = recur(h)[0]
        total = total + h.sum()
    (by_hand,) = torch.autograd.grad(total, weight)
    torch.testing.assert_close(of_rollout, by_hand)


def test_policy_that_writes_other_next_entries_is_refused():
    policy = TensorDictModule(
        lambda x: (x[..., :2] * 0, x), ["observation"], ["action", ("next", "observation")]
    )
    env = TransformedEnv(single(), TensorDictPrimer(h=Unbounded((1,))))
    with pytest.raises(PolicyError, match="next"):
        SyncDataCollector(env, policy, frames_per_batch=6, total_frames=-1)
    with pytest.raises(PolicyError, match="next"):
        SyncDataCollector(env, lambda td: env.rand_step(td), frames_per_batch=6, total_frames=-1)


def test_primer_fills_random_values_and_values_by_key():
    env = TransformedEnv(batched(), TensorDictPrimer(Composite(z=Bounded(2.0, 3.0, (2,))), random=True))
    z = env.reset()["z"]
    assert z.shape == (3, 2)
    assert bool(((z >= 2) & (z <= 3)).all())
    assert len(z.unique()) > 1
    primer = TensorDictPrimer(
        a=Unbounded((1,)), n=Categorical(5, shape=()), default_value={"a": 1.5, "n": lambda: 3}
    )
    root = TransformedEnv(batched(), primer).reset()
    assert root["a"].flatten().tolist() == [1.5] * 3
    assert root["n"].tolist() == [3] * 3


def test_a_partial_reset_renews_its_rows_only():
    env = TransformedEnv(batched(), TensorDictPrimer(h=Unbounded((1,)), default_value=1.0))
    root = env.reset()
    root["h"] = torch.tensor([[5.0], [6.0], [7.0]])
    fresh = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
    assert fresh["h"].flatten().tolist() == [5.0, 1.0, 7.0]


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 1), ()])
@pytest.mark.parametrize("expand", [None, True])
def test_primer_specs_describe_one_environment_by_default(shape, expand):
    for primers in ({"h": Unbounded(shape)}, Composite(h=Unbounded(shape))):
        outside = TransformedEnv(
            SerialEnv(2, lambda: CountingEnv(Script())), TensorDictPrimer(primers, expand_specs=expand)
        )
        assert outside.reset()["h"].shape == outside.observation_spec["h"].shape == (2, *shape)


def test_composite_batch_shape_marks_specs_of_all_environments():
    env = SerialEnv(2, lambda: CountingEnv(Script()))
    whole = TensorDictPrimer(Composite(h=Unbounded((2, 2)), shape=(2,)))
    assert TransformedEnv(env, whole).reset()["h"].shape == (2, 2)
    for wrong in (Composite(h=Unbounded((3, 2)), shape=(3,)), Composite(h=Unbounded((1, 2)), shape=(1,))):
        with pytest.raises(InvalidArgumentError, match=r"'h' has shape .* environment's batch, \(2,\)"):
            TransformedEnv(SerialEnv(2, lambda: CountingEnv(Script())), TensorDictPrimer(wrong)).reset()
    as_it_is = TensorDictPrimer(h=Unbounded((2, 5)), expand_specs=False)
    assert TransformedEnv(SerialEnv(2, lambda: CountingEnv(Script())), as_it_is).reset()["h"].shape == (2, 5)


def test_buffer_adds_missing_entries():
    primer = TensorDictPrimer(h=Unbounded((2,)), default_value=1.0)
    out = primer(TensorDict({"a": torch.zeros(3)}, [3]))
    assert out["h"].shape == (3, 2)
    kept = primer(TensorDict({"h": torch.zeros(3, 2)}, [3]))
    assert not bool(kept["h"].any())


def test_invalid_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="not both"):
        TensorDictPrimer(h=Unbounded((1,)), random=True, default_value=1.0)
    with pytest.raises(InvalidArgumentError, match="already"):
        TransformedEnv(single(), TensorDictPrimer(observation=Unbounded((1,)))).reset()
    with pytest.raises(InvalidArgumentError, match="expand_specs"):
        TransformedEnv(batched(), TensorDictPrimer(h=Unbounded((1,)), expand_specs=False)).reset()
    with pytest.raises(InvalidArgumentError, match="nothing for 'h'"):
        TransformedEnv(single(), TensorDictPrimer(h=Unbounded((1,)), default_value={"g": 1.0})).reset()


@pytest.mark.parametrize("size", [(), (3,)], ids=str)
@pytest.mark.parametrize("some_only", [False, True])
def test_one_default_function_fills_all_entries(size, some_only):
    asked = []

    def give(reset):
        asked.append(reset.clone())
        rows = TensorDict({"task": torch.full((*size, 2), float(len(asked))), "goal": torch.ones(size)}, size)
        return rows[reset] if some_only and size else rows

    primers = {"task": Unbounded((2,)), "goal": Unbounded(())}
    primer = TensorDictPrimer(primers, default_value=give, single_default_value=True)
    env = TransformedEnv(CountingEnv(Script(lengths=(2, 3)), size), primer)
    data = env.rollout(6, break_when_any_done=False)
    assert asked[0].shape == size and asked[0].all()
    assert torch.equal(data["task"], data["next", "task"]) and (data["goal"] == 1).all()
    ends = data["next", "done"][..., :-1, 0]
    assert ends.any() and torch.equal(data["task"].diff(dim=-2)[..., 0] > 0, ends)


def test_reset_may_be_given_entries_in_advance():
    class Placed(CountingEnv):
        places = []

        def _reset(self, tensordict=None, **kwargs):
            self.places.append(None if tensordict is None else tensordict.get("place", None))
            return super()._reset(tensordict, **kwargs)

    primer = TensorDictPrimer(place=Unbounded((2,)), default_value=3.0, call_before_env_reset=True)
    env = TransformedEnv(Placed(Script(lengths=(2,))), primer)
    data = env.rollout(5, break_when_any_done=False)
    assert (
        all(place.tolist() == [3.0, 3.0] for place in env.base_env.places) and len(env.base_env.places) == 3
    )
    assert (data["place"] == 3).all() and (data["next", "place"] == 3).all()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("default", "expected"),
    [
        (None, 0.0),
        (4.0, 4.0),
        ({"h": 4.0}, 4.0),
        (lambda: TensorDict(h=torch.full((3,), 4.0)), 4.0),
        (lambda reset: TensorDict(h=torch.full((3,), 4.0)), 4.0),
        (lambda: {"h": torch.full((3,), 4.0)}, 4.0),
    ],
)
def test_single_default_value_fills_every_kind(default, expected, many):
    primer = TensorDictPrimer(h=Unbounded((3,)), default_value=default, single_default_value=True)
    env = TransformedEnv(SerialEnv(2, single) if many else single(), primer)
    found = env.rollout(2)["h"]
    assert found.shape == (*env.batch_size, 2, 3) and found.unique().tolist() == [expected]


def test_single_default_value_fills_samples_of_a_buffer():
    primer = TensorDictPrimer(
        h=Unbounded((3,)), default_value=lambda: TensorDict(h=torch.ones(3)), single_default_value=True
    )
    out = primer(TensorDict(a=torch.zeros(4), batch_size=[4]))
    assert torch.equal(out["h"], torch.ones(4, 3))
