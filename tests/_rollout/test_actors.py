"""An actor writes the policy's output for each row into the block."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._rollout.actors import PolicyActor, RandomActor
from gleanrl._rollout.policies import RandomPolicy
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl.data import Bounded, Categorical, Composite, OneHot
from gleanrl.errors import PolicyError
from tests._rollout.blocks import ACTION, ROOT, T, drive, layout, make_block, rows

SIZES = [(), (3,), (2, 2)]
CPU = torch.device("cpu")


def check(
    policy: Any, fields: dict[Path, Field], size: tuple[int, ...], modules: bool, device: Any = None
) -> None:
    block = make_block(fields, size)
    actor = PolicyActor(policy, fields, layout(fields, size, device))
    assert actor.by_modules is modules
    before = [block.column(path).clone() for path in ROOT]
    expected = [policy(root) for root in rows(block)]
    drive(actor, block)
    for path in fields:
        for t in range(T):
            got = block.column(path).select(block.time_dim, t)
            assert torch.equal(got, expected[t].get(as_key(path)).detach()), (path, t)
    assert all(torch.equal(block.column(p), old) for p, old in zip(ROOT, before, strict=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def as_function(td: TensorDictBase) -> TensorDictBase:
    """Return its input with an action, and a value under a nested key."""
    td.set("action", td["observation"][..., :2] * 2)
    return td.set(("stats", "value"), td["robot", "clock"].double() / 4)


def fresh(td: TensorDictBase) -> TensorDictBase:
    return TensorDict({"action": td["observation"][..., 1:]}, td.batch_size)


VALUE = {("stats", "value"): Field(torch.Size([]), torch.float64)}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("device", [None, CPU], ids=str)
class TestAgainstThePolicy:
    def test_module_outputs_are_written(self, size: tuple[int, ...], device: Any) -> None:
        check(TensorDictModule(network(), ["observation"], ["action"]), ACTION, size, True, device)

    def test_sequence_with_private_outputs_is_written(self, size: tuple[int, ...], device: Any) -> None:
        policy = TensorDictSequential(
            TensorDictModule(
                lambda x, n: x * n.unsqueeze(-1), ["observation", ("robot", "clock")], ["_hidden"]
            ),
            TensorDictModule(
                lambda x: (x[..., :2], x.sum(-1).double()), ["_hidden"], ["action", ("stats", "value")]
            ),
        )
        check(policy, {**ACTION, **VALUE}, size, True, device)

    def test_outputs_are_detached(self, size: tuple[int, ...], device: Any) -> None:
        policy = TensorDictModule(torch.enable_grad()(network().forward), ["observation"], ["action"])
        check(policy, ACTION, size, True, device)

    def test_bfloat16_outputs_are_written(self, size: tuple[int, ...], device: Any) -> None:
        policy = TensorDictModule(lambda x: x[..., :2].bfloat16() / 3, ["observation"], ["action"])
        check(policy, {("action",): Field(torch.Size([2]), torch.bfloat16)}, size, True, device)

    def test_strided_outputs_are_written(self, size: tuple[int, ...], device: Any) -> None:
        policy = TensorDictModule(lambda x: x.flip(-1)[..., ::2], ["observation"], ["action"])
        check(policy, ACTION, size, True, device)

    @pytest.mark.parametrize("policy", [as_function, fresh], ids=["same", "fresh"])
    def test_outputs_of_callables_are_written(self, policy: Any, size: tuple[int, ...], device: Any) -> None:
        fields = {**ACTION, **VALUE} if policy is as_function else ACTION
        check(policy, fields, size, False, device)

    def test_root_entries_set_by_a_policy_do_not_reach_the_next_row(
        self, size: tuple[int, ...], device: Any
    ) -> None:
        def policy(td: TensorDictBase) -> TensorDictBase:
            td.set("action", td["observation"][..., :2])
            return td.set("observation", td["observation"] * 0).set("done", ~td["done"])

        check(policy, ACTION, size, False, device)


class TestRandomActor:
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_random_actor_draws_all_rows_in_one_call(self, size: tuple[int, ...]) -> None:
        arm = Bounded(low=-1.0, high=1.0, shape=(*size, 2), dtype=torch.float32)
        policy = RandomPolicy(
            Composite(arm=arm, hand=Composite(grip=Categorical(5, shape=size), shape=size), shape=size)
        )
        fields = {
            ("arm",): Field(torch.Size([2]), torch.float32),
            ("hand", "grip"): Field(torch.Size([]), torch.int64),
            ("value",): Field(torch.Size([2]), torch.float32),
        }
        block = make_block(fields, size)
        actor = RandomActor(policy, fields)
        torch.manual_seed(4)
        assert actor.bind(block) is None
        torch.manual_seed(4)
        drawn = policy.draw((T,))
        for path, value in drawn.items():  # (T, *batch, *leaf)
            assert torch.equal(block.column(path).movedim(block.time_dim, 0), value)
        assert not block.column(("value",)).any(), "another policy's extras are zero"

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.int32], ids=str)
    @pytest.mark.parametrize("mask", [None, [True, False, True, True]], ids=["all", "masked"])
    def test_discrete_draws_equal_the_spec(self, dtype: torch.dtype, mask: Any) -> None:
        spec = OneHot(4, dtype=dtype, mask=None if mask is None else torch.tensor(mask))
        fields = {("action",): Field(torch.Size([4]), dtype)}
        block, policy = make_block(fields, ()), RandomPolicy(Composite(action=spec))
        assert RandomActor(policy, fields, generator=OwnedTorchGenerator(3)).bind(block) is None
        drawn = policy.draw((T,), OwnedTorchGenerator(3))
        assert torch.equal(block.column(("action",)), drawn[("action",)])

    def test_replaced_rand_method_is_used(self) -> None:
        spec = OneHot(4, dtype=torch.int64)
        spec.rand = lambda shape, generator=None: torch.eye(4, dtype=torch.int64)[[2] * shape[0]]
        fields = {("action",): Field(torch.Size([4]), torch.int64)}
        block = make_block(fields, ())
        RandomActor(RandomPolicy(Composite(action=spec)), fields, generator=OwnedTorchGenerator(3)).bind(
            block
        )
        assert block.column(("action",)).argmax(-1).unique().tolist() == [2]

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (Bounded(low=-1.0, high=1.0, shape=(2,), dtype=torch.float32), r"\(5, 3, 2\).*\(5, 2\)"),
            (Bounded(low=-1.0, high=1.0, shape=(3, 2), dtype=torch.float64), "float32.*float64"),
            (Composite(action=Bounded(-1.0, 1.0, (3, 2)), more=Bounded(-1.0, 1.0, (3,)), shape=(3,)), "more"),
        ],
        ids=["shape", "dtype", "key"],
    )
    def test_unfitting_spec_is_refused(self, spec: Any, message: str) -> None:
        actor = RandomActor(RandomPolicy(spec), ACTION)
        with pytest.raises(PolicyError, match=message):
            actor.bind(make_block(ACTION, (3,)))


class TestRefused:
    def act(self, policy: Any, fields: dict[Path, Field] = ACTION, size: tuple[int, ...] = (3,)) -> None:
        drive(PolicyActor(policy, fields, layout(fields, size)), make_block(fields, size))

    def module(self, function: Any, ins: Any = "observation", outs: Any = "action") -> TensorDictModule:
        return TensorDictModule(function, in_keys=ins, out_keys=outs)

    @pytest.mark.parametrize("size", [(), (3,)], ids=str)
    @pytest.mark.parametrize(
        ("output", "message"),
        [
            (lambda x: x[..., :1], r"expected shape .*2,?\) torch.float32, got .*1,?\)"),
            (lambda x: x[..., 0], "expected shape"),
            (lambda x: x[..., :2].to(torch.complex64), "float32.*complex64"),
        ],
    )
    def test_action_of_another_shape_or_dtype_is_refused(
        self, output: Any, message: str, size: tuple[int, ...]
    ) -> None:
        with pytest.raises(PolicyError, match=f"(?s)'action'.*{message}"):
            self.act(self.module(output), size=size)
        with pytest.raises(PolicyError, match=f"(?s)'action'.*{message}"):
            self.act(lambda td: td.set("action", output(td["observation"])), size=size)

    @pytest.mark.parametrize("output", [lambda x: x[..., :2].double(), lambda x: x[..., :2, None]])
    def test_only_actions_are_converted(self, output: Any) -> None:
        fields = {**ACTION, ("value",): ACTION["action",]}
        module = self.module(lambda x: (x[..., :2], output(x)), outs=["action", "value"])
        with pytest.raises(PolicyError, match=r"'value' expected .*only actions are cast"):
            self.act(module, fields)

    def test_unknown_input_key_is_refused(self) -> None:
        with pytest.raises(
            PolicyError, match=r"\['goal'\] aren't offered.*'observation'.*\('robot', 'clock'\)"
        ):
            self.act(self.module(torch.add, ["observation", "goal"]))
        with pytest.raises(PolicyError, match="'obsrvation'.*; did you mean 'observation'"):
            self.act(self.module(torch.neg, ["obsrvation"]))

    def test_missing_action_is_refused(self) -> None:
        with pytest.raises(PolicyError, match="a tensor under 'action', got nothing"):
            self.act(lambda td: TensorDict({}, td.batch_size))
        with pytest.raises(PolicyError, match="a tensor under 'action', got nothing"):
            self.act(self.module(lambda x: x, outs="act"))

    def test_output_without_a_column_is_refused(self) -> None:
        calls: list[int] = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            calls.append(1)
            td.update({"action": td["observation"][..., :2], "_private": td["observation"]})
            return td if len(calls) < 3 else td.set("late", td["observation"])

        with pytest.raises(PolicyError, match=r"\['late'\], which its first call didn't return"):
            self.act(policy)
        assert len(calls) == 3

    @pytest.mark.parametrize(
        "late", [("some", "late"), ("some", "deep", "late"), ("some", "bare", "late"), ("robot", "late")]
    )
    def test_additional_output_in_a_group_is_refused(self, late: tuple[str, ...]) -> None:
        calls: list[int] = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            calls.append(1)
            action = td["observation"][..., :2]
            td.set("action", action).set(("some", "early"), action).set(("some", "deep", "early"), action)
            td.set(("some", "bare"), TensorDict({}, td.batch_size))
            return td if len(calls) < 3 else td.set(late, action)

        fields = {
            **ACTION,
            ("some", "early"): ACTION["action",],
            ("some", "deep", "early"): ACTION["action",],
        }
        with pytest.raises(PolicyError, match=rf"\[{re.escape(repr(late))}\], which its first call didn't"):
            self.act(policy, fields)
        assert len(calls) == 3

    def test_group_missing_in_some_steps_is_accepted(self) -> None:
        calls: list[int] = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            calls.append(1)
            td = td.set("action", td["observation"][..., :2])
            return td.exclude("robot") if len(calls) % 2 else td

        self.act(policy)
        assert len(calls) > 2

    @pytest.mark.parametrize("late", ["late", ("some", "late"), "some"])
    def test_output_that_changes_its_key_is_refused(self, late: Any) -> None:
        calls: list[int] = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            calls.append(1)
            out = td.empty().set("action", td["observation"][..., :2])
            return out.set(("some", "early") if len(calls) < 3 else late, out["action"])

        fields = {**ACTION, ("some", "early"): ACTION["action",]}
        with pytest.raises(PolicyError, match=rf"\[{re.escape(repr(late))}\], which its first call didn't"):
            self.act(policy, fields)

    def test_private_state_under_a_new_name_is_carried(self) -> None:
        seen: list[list[str]] = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            seen.append([key for key in td.keys() if key.startswith("_")])
            state = "_early" if len(seen) < 3 else "_late"
            return td.empty().set("action", td["observation"][..., :2]).set(state, td["observation"])

        self.act(policy)
        assert seen[2:4] == [["_early"], ["_late"]]

    def test_policy_that_returns_no_tensordict_is_refused(self) -> None:
        with pytest.raises(PolicyError, match=r"\['action'\], got Tensor"):
            self.act(lambda td: td["observation"])

    def test_output_that_is_not_a_tensor_is_refused(self) -> None:
        with pytest.raises(PolicyError, match="a tensor under 'action', got str"):
            self.act(self.module(lambda x: "left"))


def test_primed_actor_writes_its_first_outputs_once() -> None:
    calls: list[int] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        calls.append(1)
        return td.set("action", td["observation"][..., :2])

    block = make_block(ACTION, (3,))
    first = {("action",): torch.full((3, 2), -7.0), ("other",): torch.zeros(3)}
    actor = PolicyActor(policy, ACTION, layout(ACTION, (3,)), first)
    drive(actor, block)
    expected = block.column(("observation",))[..., :2].clone()
    expected[:, 0] = -7
    assert torch.equal(block.column(("action",)), expected) and len(calls) == T - 1
    again = make_block(ACTION, (3,))
    drive(actor, again)
    assert torch.equal(again.column(("action",)), again.column(("observation",))[..., :2])


class TestState:
    """Outputs of a policy other than its actions are its inputs in the next row."""

    def test_state_is_carried_until_forget(self) -> None:
        fields = {**ACTION, ("hidden",): Field(torch.Size([1]), torch.float32)}
        noise: list[float] = []

        def policy(td: TensorDictBase) -> TensorDictBase:
            hidden = td.get("hidden", None)
            hidden = torch.zeros(3, 1) if hidden is None else hidden + 1
            last = td.get("_noise", None)
            noise.append(0.0 if last is None else float(last[0]) + 2)
            td.set("_noise", torch.full((3,), noise[-1]))
            return td.update({"hidden": hidden, "action": torch.zeros(3, 2)})

        actor = PolicyActor(policy, fields, layout(fields, (3,)))
        for start in (0, T):  # also from one block to the next
            block = make_block(fields, (3,))
            drive(actor, block)
            assert block.column(("hidden",))[0].squeeze(-1).tolist() == [float(start + t) for t in range(T)]
        assert noise == [2.0 * t for t in range(2 * T)]
        actor.carry.clear()
        block = make_block(fields, (3,))
        drive(actor, block)
        assert float(block.column(("hidden",))[0, 0]) == 0.0 and noise[2 * T] == 0.0

    def test_module_that_reads_its_output_gets_none_first(self) -> None:
        fields = {**ACTION, ("hidden",): Field(torch.Size([2]), torch.float32)}
        module = TensorDictModule(
            lambda x, h: (x[..., :2], x[..., :2] if h is None else h + 1),
            ["observation", "hidden"],
            ["action", "hidden"],
        )
        block = make_block(fields, (3,))
        actor = PolicyActor(module, fields, layout(fields, (3,)))
        assert not actor.by_modules
        drive(actor, block)
        hidden = block.column(("hidden",))
        assert torch.equal(hidden[:, -1], hidden[:, 0] + (T - 1))


class TestInPlace:
    """A policy that changes its input would change the record."""

    @pytest.mark.parametrize(
        "policy",
        [
            TensorDictModule(
                nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), ["observation"], ["action"]
            ),
            lambda td: td.set("action", td["observation"].mul_(2)[..., :2].clone()),
        ],
        ids=["module", "tensordict"],
    )
    def test_policy_that_changes_its_input_in_place_is_refused(self, policy: Any) -> None:
        with pytest.raises(PolicyError, match=r"changed its input \['observation'\] in place at step 0"):
            drive(PolicyActor(policy, ACTION, layout(ACTION, (3,))), make_block(ACTION, (3,)))


def test_a_policy_that_is_changed_between_blocks_takes_effect() -> None:
    module = TensorDictModule(lambda x: x[..., :2].clone(), ["observation"], ["action"])
    actor = PolicyActor(module, ACTION, layout(ACTION, (3,)))
    block = make_block(ACTION, (3,))
    drive(actor, block)
    before = block.column(("action",)).clone()
    handle = module.register_forward_hook(lambda mod, args, out: out.set("action", out["action"] + 1))
    drive(actor, block)
    assert torch.equal(block.column(("action",)), before + 1) and not actor.by_modules
    handle.remove()
    module.module = lambda x: x[..., :2] * 3
    drive(actor, block)
    assert torch.equal(block.column(("action",)), before * 3) and actor.by_modules
