"""An environment's specs by role, and the table by which missing flags are completed."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch

from gleanrl.data import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs.env_specs import ROLES, EnvSpecs, complete_flags
from gleanrl.errors import EnvironmentContractError, InvalidTypeError, MissingKeyError

FLAGS = ("done", "terminated", "truncated")
SIZE = torch.Size([3])


def flag(*shape: int) -> Categorical:
    return Categorical(2, shape=torch.Size(shape), dtype=torch.bool)


def make() -> EnvSpecs:
    return EnvSpecs(SIZE, None)


class TestRoles:
    def test_default_specs_exist_without_a_declaration(self) -> None:
        specs = make()
        assert specs.keys("reward") == ["reward"] and specs.short("reward").shape == (3, 1)
        assert specs.keys("done") == ["done", "terminated"] and specs.full("done")["done"].shape == (3, 1)
        assert all(specs.keys(role) == [] for role in ("observation", "action", "state"))
        assert all(specs.full(role).shape == SIZE for role in ROLES)

    @pytest.mark.parametrize("role", ["action", "reward", "done"])
    def test_single_leaf_gets_its_roles_name_as_key(self, role: str) -> None:
        specs = make()
        specs.set(role, flag(3, 1) if role == "done" else Unbounded(shape=(3, 2)))
        assert role in specs.keys(role) and isinstance(specs.full(role), Composite)
        assert (specs.short(role) is specs.full(role)) == (role == "done")

    @pytest.mark.parametrize("role", ["observation", "state"])
    def test_roles_without_a_default_key_need_a_composite(self, role: str) -> None:
        with pytest.raises(InvalidTypeError, match=f"{role}_spec: expected a Composite"):
            make().set(role, Unbounded(shape=(3, 2)))

    def test_value_other_than_a_spec_is_refused_and_none_clears(self) -> None:
        with pytest.raises(InvalidTypeError, match="action_spec: expected a spec, got int"):
            make().set("action", 3)  # type: ignore[arg-type]
        specs = make()
        specs.set("action", Unbounded(shape=(3,)))
        specs.set("action", None)
        assert specs.keys("action") == []

    @pytest.mark.parametrize("shape", [(), (2, 3), (4,)])
    def test_leaf_without_the_batch_dimensions_is_refused(self, shape: tuple[int, ...]) -> None:
        for spec in (Unbounded(shape=shape), Composite({("a", "b"): Unbounded(shape=shape)})):
            with pytest.raises(EnvironmentContractError, match=r"action_spec: .*batch size \(3,\)"):
                make().set("action", spec)

    def test_keys_are_sorted_by_depth(self) -> None:
        specs = make()
        deep = {("x", "y", "z"): Unbounded(shape=(3,)), ("x", "y"): Composite({}, shape=(3,))}
        specs.set(
            "action", Composite({("g", "a"): Unbounded(shape=(3,)), "b": Unbounded(shape=(3,))}, shape=(3,))
        )
        assert specs.keys("action") == ["b", ("g", "a")] and deep

    def test_only_key_raises_unless_there_is_one(self) -> None:
        specs = make()
        assert specs.only_key("reward") == "reward" and specs.only_key("done") == "done"
        with pytest.raises(
            MissingKeyError, match=r"action_key: expected exactly one, the environment has \[\]"
        ):
            specs.only_key("action")
        specs.set("reward", Composite(a=Unbounded(shape=(3, 1)), b=Unbounded(shape=(3, 1)), shape=(3,)))
        with pytest.raises(KeyError, match=r"\['a', 'b'\]; use reward_keys"):
            specs.only_key("reward")
        assert specs.short("reward") is specs.full("reward")

    def test_specs_move_to_the_device(self) -> None:
        specs = EnvSpecs(SIZE, torch.device("cpu"))
        assert {specs.full(role).device for role in ROLES} == {torch.device("cpu")}
        specs.settle(SIZE, torch.device("meta"))
        assert {specs.full(role).device for role in ROLES} == {torch.device("meta")}
        specs.set("action", Unbounded(shape=(3, 2)))
        assert specs.full("action")["action"].device == torch.device("meta")


def declared(*paths: Any) -> Composite:
    spec = Composite({}, shape=SIZE)
    for path in paths:
        spec[path] = flag(3, 2, 1) if isinstance(path, tuple) else flag(3, 1)
    return spec


class TestLeaves:
    def test_leaves_follow_new_declarations(self) -> None:
        specs = make()
        for locked in (True, False, True):
            specs.lock(locked)
            specs.set(
                "reward", Composite({("a", "b"): Unbounded((3, 1)), "r": Unbounded((3, 1))}, shape=(3,))
            )
            assert specs.keys("reward") == ["r", ("a", "b")]
            assert specs.leaves("reward")["a", "b"] is specs.full("reward")["a", "b"]
            specs.set("reward", Unbounded((3, 1)))
            assert specs.keys("reward") == ["reward"]

    def test_leaves_follow_changes_of_unlocked_composites(self) -> None:
        specs = make()
        specs.set("observation", Composite(a=Composite(b=Unbounded(3), shape=(3,)), shape=(3,)))
        specs.lock(True)
        for spec in (specs, copy.deepcopy(specs), pickle.loads(pickle.dumps(specs))):
            assert spec.keys("observation") == [("a", "b")]
            full = spec.full("observation")
            full.unlock_()["a", "c"] = Unbounded(3)
            full.lock_()
            assert spec.keys("observation") == [("a", "b"), ("a", "c")]

    def test_non_recursive_lock_allows_changes_below(self) -> None:
        specs = make()
        specs.set("observation", Composite(a=Composite(b=Unbounded(3), shape=(3,)), shape=(3,)))
        full = specs.full("observation").lock_(recurse=False)
        assert specs.keys("observation") == [("a", "b")] and not full.is_fixed
        full["a"].set("c", Unbounded(3))
        assert specs.keys("observation") == [("a", "b"), ("a", "c")]

    def test_lists_of_keys_are_the_callers(self) -> None:
        specs = make()
        specs.lock(True)
        specs.keys("done").clear()
        assert specs.keys("done") == ["done", "terminated"]


class TestFlagSpecs:
    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("group", [(), ("agents",), ("a", "b")])
    def test_done_and_terminated_are_always_there(self, group: tuple[str, ...], count: int) -> None:
        for names in itertools.permutations(FLAGS, count):
            specs = make()
            spec = declared(*((*group, name) if group else name for name in names))
            specs.set("done", spec)
            keys = {(*group, name) if group else name for name in {*names, "done", "terminated"}}
            assert set(specs.keys("done")) == keys and specs.groups() == [group]
            shape = (3, 2, 1) if group else (3, 1)
            assert all(specs.full("done")[key].shape == shape for key in keys)
            assert len(list(spec.keys(True, True))) == count, "the given spec is left alone"

    def test_groups_are_in_order_of_declaration(self) -> None:
        names = [("z", "done"), ("y", "terminated"), ("x", "done")]
        specs = make()
        specs.set("done", declared(*names, "truncated"))
        assert specs.groups() == [(), ("z",), ("y",), ("x",)]

    def test_group_without_flags_is_refused(self) -> None:
        with pytest.raises(
            EnvironmentContractError, match=r"end in done, terminated or truncated, got \['over'\]"
        ):
            make().set("done", declared("over"))

    def test_add_truncated_adds_a_flag_to_each_group(self) -> None:
        specs = make()
        specs.set("done", declared("done", ("agents", "done"), ("others", "truncated")))
        specs.add_truncated()
        specs.add_truncated()
        groups = ((), ("agents",), ("others",))
        expected = {(*group, name) if group else name for group in groups for name in FLAGS}
        assert set(specs.keys("done")) == expected
        assert specs.full("done")["agents", "truncated"].shape == (3, 2, 1)


# Returned flags -> done, terminated, truncated. The table states the rule case by case.
F, T = False, True
TABLE = [
    ({}, (F, F, F)),
    *(({"done": d}, (d, d, F)) for d in (F, T)),
    *(({"terminated": t}, (t, t, F)) for t in (F, T)),
    *(({"truncated": c}, (c, F, c)) for c in (F, T)),
    *(({"terminated": t, "truncated": c}, (t or c, t, c)) for t in (F, T) for c in (F, T)),
    *(({"done": d, "terminated": t}, (d, t, F)) for d in (F, T) for t in (F, T)),
    *(
        ({"done": d, "terminated": t, "truncated": c}, (d, t, c))
        for d in (F, T)
        for t in (F, T)
        for c in (F, T)
    ),
]


class TestFlags:
    @pytest.mark.parametrize(("came", "expected"), TABLE)
    @pytest.mark.parametrize("with_truncated", [False, True])
    def test_missing_flags_are_completed_by_the_table(
        self, came: dict[str, bool], expected: tuple[bool, ...], with_truncated: bool
    ) -> None:
        names = FLAGS if with_truncated or "truncated" in came else FLAGS[:2]
        zeros = {name: torch.zeros(1, dtype=torch.bool) for name in names}
        flags = {name: torch.tensor([value]) for name, value in came.items()}
        found = complete_flags(flags, zeros)
        assert {name: bool(value) for name, value in found.items()} == dict(
            zip(names, expected, strict=False)
        )
        assert all(found[name] is flags[name] for name in flags) and set(flags) == set(came)
        tensors = [id(value) for value in found.values()]
        assert len(set(tensors)) == len(tensors) and not any(value is zeros[n] for n, value in found.items())

    def test_done_and_truncated_alone_are_ambiguous(self) -> None:
        flags = {name: torch.ones(1, dtype=torch.bool) for name in ("done", "truncated")}
        with pytest.raises(EnvironmentContractError, match="without terminated"):
            complete_flags(flags, {name: torch.zeros(1, dtype=torch.bool) for name in FLAGS})


def test_an_action_spec_draws_with_the_batch_dimensions() -> None:
    specs = make()
    specs.set("action", Bounded(low=-1.0, high=1.0, shape=(3, 2)))
    assert specs.full("action").rand()["action"].shape == (3, 2)
