"""The TensorDict stepper equals a naive loop over the environment's public methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import as_key, as_path, flatten
from gleanrl._rollout.errors import BATCH, StepFault
from gleanrl._rollout.loop import collect
from gleanrl._rollout.plan import action_fields
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl._rollout.step_mdp import step_mdp
from gleanrl._rollout.tensordict_stepper import TensorDictStepper, UndeclaredKeyWarning, make_stepper
from gleanrl.data import Composite, Unbounded
from gleanrl.errors import EnvironmentContractError
from tests.fakes import Script
from tests.fakes_base import (
    CountingEnv,
    CrookedEnv,
    ForgetfulEnv,
    GreedyEnv,
    PayingEnv,
    ReusingBase,
    StepCountEnv,
    StillDoneEnv,
    TeamEnv,
    TwoActionEnv,
)

SCRIPT = Script(seed=5, high=4)
LONG = Script(lengths=(50,))
T = 7


class Fixed:
    """Writes prepared actions."""

    primed = ()

    def __init__(self, actions: dict[Any, torch.Tensor], start: int = 0) -> None:
        self.actions, self.start = actions, start

    def bind(self, block: Block) -> None:
        for path, values in self.actions.items():
            values = values[self.start : self.start + block.num_steps]
            block.column(path).movedim(block.time_dim, 0).copy_(values)
        self.start += block.num_steps

    def check(self) -> None:
        pass


def actions(env: Any, steps: int) -> dict[Any, torch.Tensor]:
    drawn = env.full_action_spec.rand((steps,))
    return flatten(drawn)


def naive(env: Any, given: dict[Any, torch.Tensor], steps: int, limit: int | None = None) -> TensorDictBase:
    """Return the record of a user's loop, ``[*batch, steps]``."""
    keys = {name: getattr(env, name) for name in ("reward_keys", "done_keys", "action_keys")}
    rows, root = [], env.reset().clone()
    for t in range(steps):
        td = root.clone()
        for path, values in given.items():
            td.set(as_key(path), values[t].clone())
        seen = td.clone()
        stepped = env.step(td).clone()
        seen.set("next", stepped["next"])
        rows.append(seen)
        root = step_mdp(stepped, **keys).clone()
        done = [as_path(key) for key in env.done_keys if as_path(key)[-1] == "done"]
        if any(root.get(as_key(path)).any() for path in done):
            for path in done:
                root.set(as_key((*path[:-1], "_reset")), root.get(as_key(path)).clone())
            root = env.reset(root).clone()
    return torch.stack(rows, -1)


def make_block(env: Any, stepper: TensorDictStepper, steps: int = T) -> Block:
    fields = {**stepper.schema().items(), **action_fields(env, len(env.batch_size))}
    return Block(Schema(fields), env.batch_size, steps)


def run(env: Any, stepper: TensorDictStepper, steps: int = T, given: Any = None) -> TensorDictBase:
    block = make_block(env, stepper, steps)
    assert collect(given or Fixed(actions(env, steps)), stepper, block) == steps
    return block.batch()


def same(found: TensorDictBase, expected: TensorDictBase) -> None:
    got, wanted = flatten(found), flatten(expected)
    assert set(got) == set(wanted)
    for path, value in wanted.items():
        assert got[path].dtype == value.dtype and torch.equal(got[path], value), path


KINDS: list[Any] = [
    CountingEnv,
    StepCountEnv,
    TwoActionEnv,
    TeamEnv,
    lambda *args: TeamEnv(*args, nested_flags=True),
    ReusingBase,
    ForgetfulEnv,
    GreedyEnv,
    lambda *args: PayingEnv("pay", torch.float64, script=args[0], batch_size=args[1]),
    lambda *args: CountingEnv(*args, flags=("done",)),
    lambda *args: CountingEnv(*args, flags=("terminated", "truncated")),
]


@pytest.mark.parametrize("size", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=range(len(KINDS)))
def test_stepper_equals_a_naive_loop(kind: Any, size: tuple[int, ...]) -> None:
    given = actions(kind(SCRIPT, size), 3 * T)
    expected = naive(kind(SCRIPT, size), given, 3 * T)
    env = kind(SCRIPT, size)
    stepper, actor = TensorDictStepper(env), Fixed(given)
    batches = [run(env, stepper, T, actor) for _ in range(3)]
    same(torch.cat(batches, -1), expected)
    assert expected["next", "done"].any()


def steps_of(batch: TensorDictBase, key: Any = "observation") -> torch.Tensor:
    return batch[key][..., 2]


class TestLimit:
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("limit", [1, 3])
    def test_episodes_are_truncated(self, limit: int, nested: bool) -> None:
        script = Script(lengths=(2, 5, 7), ending="terminated")
        env = TeamEnv(script, (3,), nested_flags=nested)
        stepper = TensorDictStepper(env, EpisodeRules(max_steps=limit))
        batch = torch.cat([run(env, stepper) for _ in range(3)], -1)
        triples = batch["next", "agents", "observation"][..., 0, :].long()
        for p, t in torch.cartesian_prod(torch.arange(3), torch.arange(3 * T)).tolist():
            terminated, _ = script.flags(*triples[p, t].tolist())
            truncated = triples[p, t, 2].item() == limit
            for group in ("next", ("next", "agents")) if nested else ("next",):
                flags = batch[group]
                assert flags["terminated"][p, t].all() == terminated
                assert flags["truncated"][p, t].all() == truncated == flags["truncated"][p, t].any()
                assert flags["done"][p, t].all() == (terminated or truncated)
        ended = batch["next", "done"][:, :-1, 0]
        assert torch.equal(triples[:, 1:, 2] == 1, ended), "every end begins an episode, nothing else does"
        assert not batch["done"].any() and not batch["truncated"].any()

    def test_a_reset_by_hand_starts_the_count_again(self) -> None:
        env = CountingEnv(LONG, (2,))
        stepper = TensorDictStepper(env, EpisodeRules(max_steps=4))
        run(env, stepper, 3)
        stepper.reset(torch.tensor([True, False]))
        batch = run(env, stepper, 4)
        assert batch["next", "truncated"][..., 0].tolist() == [
            [False] * 3 + [True],
            [True, False, False, False],
        ]

    def test_without_a_truncated_flag_done_is_set(self) -> None:
        env = CountingEnv(LONG, flags=("done", "terminated"))
        stepper = TensorDictStepper(env, EpisodeRules(max_steps=2))
        batch = run(env, stepper, 4)
        assert batch["next", "done"][:, 0].tolist() == [False, True, False, True]
        assert not batch["next", "terminated"].any()


class TestCarry:
    def test_partial_reset_follows_its_mask(self) -> None:
        env = CountingEnv(LONG, (3,))
        stepper = TensorDictStepper(env)
        run(env, stepper, 2)
        mask = torch.tensor([False, True, False])
        stepper.reset(mask)
        assert env.masks[-1] is not None and env.masks[-1].tolist() == [[False], [True], [False]]
        assert stepper.root()["observation",][:, 2].tolist() == [2, 0, 2]
        assert mask.tolist() == [False, True, False]
        assert steps_of(run(env, stepper, 2)).tolist() == [[2, 3], [0, 1], [2, 3]]

    def test_partial_reset_reaches_every_group(self) -> None:
        env = TeamEnv(LONG, (3,), nested_flags=True)
        stepper = TensorDictStepper(env)
        run(env, stepper, 2)
        stepper.reset(torch.tensor([True, False, False]))
        assert stepper.root()["agents", "observation"][:, :, 2].tolist() == [[0, 0], [2, 2], [2, 2]]

    def test_a_first_reset_resets_all(self) -> None:
        env = CountingEnv(LONG, (3,))
        stepper = TensorDictStepper(env)
        stepper.reset(torch.tensor([False, True, False]))
        assert env.masks == [None] and stepper.root()["observation",].shape == (3, 3)

    def test_one_reset_serves_schema_root_and_first_block(self) -> None:
        env = CountingEnv(LONG)
        stepper = TensorDictStepper(env)
        stepper.schema(), stepper.root()
        assert steps_of(run(env, stepper, 2)).tolist() == [0, 1] and len(env.masks) == 1

    def test_load_continues_from_the_environments_state(self) -> None:
        env = CountingEnv(LONG)
        root = env.step(env.rand_action(env.reset()))["next"].exclude("reward")
        before = root.clone()
        stepper = TensorDictStepper(env)
        stepper.load(root)
        assert steps_of(run(env, stepper, 3)).tolist() == [1, 2, 3] and len(env.masks) == 1
        assert root.keys() == before.keys() and (root == before).all()

    def test_without_resets_the_next_root_is_the_last_observation(self) -> None:
        env = CountingEnv(Script(lengths=(2,), ending="terminated"))
        stepper = TensorDictStepper(env, EpisodeRules(reset_when_done=False))
        block = make_block(env, stepper, 3)
        assert collect(Fixed(actions(env, 3)), stepper, block, lambda t: t == 1) == 2
        batch = block.batch()
        assert batch["observation"][2].tolist() == batch["next", "observation"][1].tolist() == [0, 0, 2]
        assert batch["done"][:, 0].tolist() == [False, False, True] and len(env.masks) == 1
        assert stepper.root()["done",].all()

    def test_the_record_is_no_view_of_the_environment(self) -> None:
        env = ReusingBase(LONG)
        stepper = TensorDictStepper(env)
        first = run(env, stepper)
        frozen = first.clone()
        run(env, stepper)
        assert (first == frozen).all()


class Foreign:
    """Follows the public protocol without being an EnvBase; its rewards are float64."""

    def __init__(self, env: CountingEnv) -> None:
        self.env = env
        names = ("batch_size", "device", "action_keys", "reward_keys", "done_keys", "state_keys")
        for name in (
            *names,
            "full_observation_spec",
            "full_reward_spec",
            "full_done_spec",
            "full_action_spec",
        ):
            setattr(self, name, getattr(env, name))
        self.reset, self.maybe_reset = env.reset, env.maybe_reset

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = self.env.step(tensordict)
        for key in self.reward_keys:
            out.set(("next", key), out.get(("next", key)).double())
        return out


class TestForeign:
    @pytest.mark.parametrize("key", ["reward", "pay"])
    def test_foreign_environment_is_stepped(self, key: str) -> None:
        env = Foreign(PayingEnv(key, script=SCRIPT, batch_size=(3,)))
        stepper = make_stepper(env)
        assert type(stepper) is TensorDictStepper
        batch = run(env, stepper)
        assert batch["next", key].dtype == torch.float32 and torch.equal(
            batch["next", key][..., 0], steps_of(batch["next"])
        )

    def test_only_rewards_are_cast(self) -> None:
        class Observing(PayingEnv):
            def _declare(self) -> None:
                super()._declare()
                self.observation_spec = Composite(
                    {"observation": Unbounded(shape=(3,)), ("robot", "reward"): Unbounded(shape=(1,))},
                    shape=(),
                )

            def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
                wide = torch.float64 if self.actions else torch.float32
                return super()._package(flags).set(("robot", "reward"), torch.zeros(1, dtype=wide))

        env = Observing("pay", script=LONG)
        with pytest.raises(StepFault, match=r"expected dtype torch.float32, got torch.float64"):
            run(env, TensorDictStepper(env))

    def test_environment_may_provide_its_own_stepper(self) -> None:
        class Fast:
            def make_stepper(self, rules: EpisodeRules) -> EpisodeRules:
                return rules

        rules = EpisodeRules(max_steps=3)
        assert make_stepper(Fast(), rules) is rules


class TestFaults:
    @pytest.mark.parametrize("size", [(), (3,)], ids=str)
    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("missing", r"returned no \('next', 'observation'\), expected \(3,\) float32"),
            ("dtype", "'observation' expected dtype torch.float32, got torch.float64"),
            ("shape", r"'observation' expected shape \(.*3,?\) torch.float32, got \(.*2,?\)"),
            ("raise", "the fake broke on purpose"),
        ],
    )
    def test_failing_step_names_its_row(self, fault: str, message: str, size: tuple[int, ...]) -> None:
        env = CrookedEnv(fault, at=4, script=LONG, batch_size=size)
        stepper = TensorDictStepper(env)
        block = make_block(env, stepper)
        with pytest.raises(StepFault, match=message) as caught:
            collect(Fixed(actions(env, T)), stepper, block)
        found = caught.value
        assert (found.t, found.during, found.env) == (3, "step", BATCH if size else 0)
        assert found.__cause__ is found.cause and block.num_complete == 3
        steps = steps_of(run(env, stepper, 2))
        assert steps.reshape(-1, 2).tolist() == [[0, 1]] * env.numel(), "it starts afresh"

    def test_a_key_that_no_spec_declares_is_left_out(self) -> None:
        env = CrookedEnv("extra", at=4, script=LONG)
        stepper = TensorDictStepper(env)
        block = make_block(env, stepper)
        with pytest.warns(UndeclaredKeyWarning, match=r"step returned \['surprise'\]") as caught:
            collect(Fixed(actions(env, T)), stepper, block)
        assert len(caught) == 1 and ("next", "surprise") not in block.batch().keys(True)

    def test_failing_reset_names_its_row(self) -> None:
        class Failing(CountingEnv):
            def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
                if len(self.masks) == 1:
                    self.masks.append(None)
                    raise OSError("no new episode")
                return super()._reset(tensordict, **kwargs)

        env = Failing(Script(lengths=(3,)))
        stepper = TensorDictStepper(env)
        block = make_block(env, stepper)
        with pytest.raises(StepFault) as caught:
            collect(Fixed(actions(env, T)), stepper, block)
        assert (caught.value.t, caught.value.during) == (2, "reset") and block.num_complete == 3
        batch = block.batch(3)
        assert batch["next", "done"][:, 0].tolist() == [False, False, True]

    def test_failing_first_reset_names_the_reset(self) -> None:
        with pytest.raises(StepFault) as caught:
            TensorDictStepper(StillDoneEnv()).schema()
        assert (caught.value.t, caught.value.during) == (0, "reset")
        assert isinstance(caught.value.cause, EnvironmentContractError)


class Paid(CountingEnv):
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        stepped = super().step(tensordict)
        stepped["next", "reward"].fill_(7)
        return stepped


class Asked(CountingEnv):
    asked = 0

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.asked += 1
        return super().maybe_reset(tensordict)


def test_overridden_methods_are_called() -> None:
    assert (run(env := Paid(Script(lengths=(50,))), make_stepper(env))["next", "reward"] == 7).all()
    run(asked := Asked(Script(lengths=(50,))), make_stepper(asked))
    assert asked.asked > 1


class InPlace(CountingEnv):
    """Writes into the root in `maybe_reset`."""

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.update(super().maybe_reset(tensordict))


def test_root_changed_in_place_by_maybe_reset_is_recorded() -> None:
    ours, given = CountingEnv(Script(lengths=(2,))), actions(CountingEnv(), T)
    theirs = InPlace(Script(lengths=(2,)))
    found, wanted = (run(env, make_stepper(env), given=Fixed(given)) for env in (theirs, ours))
    same(found, wanted)
