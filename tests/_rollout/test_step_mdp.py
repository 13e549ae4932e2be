"""`step_mdp` equals an oracle on plain dictionaries, for every combination of its flags."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase

from gleanrl._arrays.tensordicts import Path, as_key, flatten
from gleanrl._rollout.step_mdp import advance, following_root, paths_of, step_mdp
from tests.fakes_base import TeamEnv

FLAGS = ("done", "terminated", "truncated")
OPTIONS = ("keep_other", "exclude_reward", "exclude_done", "exclude_action")
KEYS: dict[str, Any] = {
    "reward_keys": ["reward", ("agents", "reward")],
    "done_keys": ["done", ("agents", "done")],
    "action_keys": ["action", ("agents", "action"), ("hand", "grip")],
}


def record(width: int = 2) -> TensorDict:
    """Return the result of a step, ``[2]``, with a different number in each leaf."""
    numbers = itertools.count()

    def leaf(*shape: int) -> torch.Tensor:
        return torch.full((2, *shape), float(next(numbers)))

    root = [
        "observation",
        "action",
        "memory",
        "reward",
        ("agents", "seen"),
        ("agents", "action"),
        ("agents", "own"),
    ]
    root += [("hand", "grip"), ("deep", "er", "memory"), *FLAGS, *(("agents", flag) for flag in FLAGS)]
    after = ["observation", "reward", "late", ("agents", "seen"), ("agents", "reward"), ("deep", "er", "new")]
    after += [*FLAGS, *(("agents", flag) for flag in FLAGS)]
    data = TensorDict({}, [2])
    for key in root:
        data.set(key, leaf(width))
    for key in after:
        data.set(("next", *((key,) if isinstance(key, str) else key)), leaf(width))
    return data


def oracle(leaves: dict[Path, Any], keys: dict[str, Any], **on: bool) -> dict[Path, Any]:
    """Return the root of the following step as a flat dictionary."""

    def paths(name: str) -> set[Path]:
        return {(key,) if isinstance(key, str) else key for key in keys[name]}

    actions = paths("action_keys")
    out: dict[Path, Any] = {}
    for path, value in leaves.items():
        if path[0] != "next" and (on["keep_other"] or path in actions):
            out[path] = value
    out.update({path[1:]: value for path, value in leaves.items() if path[0] == "next"})
    for name in list(out):
        if (
            on["exclude_reward"]
            and name in paths("reward_keys")
            or on["exclude_done"]
            and name in paths("done_keys")
            or on["exclude_action"]
            and name in actions
        ):
            del out[name]
    return out


def same(found: TensorDictBase, expected: dict[Path, Any]) -> None:
    leaves = flatten(found)
    assert set(leaves) == set(expected)
    for path, value in expected.items():
        assert torch.equal(leaves[path], value), path


COMBINATIONS = [dict(zip(OPTIONS, on, strict=True)) for on in itertools.product([False, True], repeat=4)]


@pytest.mark.parametrize("on", COMBINATIONS, ids=lambda on: "".join(str(int(v)) for v in on.values()))
class TestFlags:
    def test_nested_keys_follow_the_flags(self, on: dict[str, bool]) -> None:
        data = record()
        before = flatten(data)
        out = step_mdp(data, **on, **KEYS)
        same(out, oracle(before, KEYS, **on))
        assert out.batch_size == (2,) and flatten(data).keys() == before.keys()
        for path, leaf in flatten(out).items():
            sources = {id(before.get(("next", *path))), id(before.get(path))}
            assert id(leaf) in sources, "entries aren't copied"
        for key, value in out.items():
            if isinstance(value, TensorDictBase):
                value.set("mine", torch.zeros(2))
                assert not value.is_empty(), key
        assert flatten(data).keys() == before.keys(), "the input's groups aren't shared"

    def test_lazy_stacks_of_different_shapes_are_stepped(self, on: dict[str, bool]) -> None:
        pieces = [record(width) for width in (2, 3)]
        out = step_mdp(LazyStackedTensorDict.lazy_stack(pieces, 1), **on, **KEYS)
        assert isinstance(out, LazyStackedTensorDict) and out.batch_size == (2, 2) and out.stack_dim == 1
        for piece, found in zip(pieces, out.unbind(1), strict=True):
            same(found, oracle(flatten(piece), KEYS, **on))

    def test_nested_lazy_stack_is_stepped(self, on: dict[str, bool]) -> None:
        teams, afters = [], []
        for width in (2, 3):
            data = record(width)
            teams.append(data["agents"])
            afters.append(data["next", "agents"])
        data = record()
        data.set("agents", LazyStackedTensorDict.lazy_stack(teams, 1))
        data.set(("next", "agents"), LazyStackedTensorDict.lazy_stack(afters, 1))
        out = step_mdp(data, **on, **KEYS)
        for k in range(2):
            leaves = {("agents", *path): leaf for path, leaf in flatten(teams[k]).items()}
            leaves |= {("next", "agents", *path): leaf for path, leaf in flatten(afters[k]).items()}
            expected = oracle(leaves, KEYS, **on)
            same(out["agents"][:, k], {path[1:]: leaf for path, leaf in expected.items()})


def test_default_keys_apply_to_the_root_only() -> None:
    out = step_mdp(record(), exclude_done=True)
    assert ("agents", "reward") in out.keys(True) and ("agents", "done") in out.keys(True)
    assert not {"reward", "action", "done"} & set(out.keys())
    assert {"terminated", "truncated"} <= set(out.keys()), "only the keys that were named are left out"


def test_groups_with_only_excluded_entries_are_dropped() -> None:
    assert "hand" not in step_mdp(record(), **KEYS).keys()
    assert "hand" in step_mdp(record(), **{**KEYS, "action_keys": "action"}).keys()


def test_target_is_updated_and_keeps_other_entries() -> None:
    target = TensorDict({"observation": torch.zeros(2, 2), "mine": torch.ones(2)}, [2])
    data = record()
    assert step_mdp(data, target, **KEYS) is target
    assert torch.equal(target["observation"], data["next", "observation"]) and target["mine"].all()


def test_strings_are_kept() -> None:
    data = record()
    data.set("text", NonTensorStack("a", "b"))
    data.set(("next", "word"), NonTensorStack("c", "d"))
    out = step_mdp(data, **KEYS)
    assert out.get("text").tolist() == ["a", "b"] and out.get("word").tolist() == ["c", "d"]


def test_missing_next_raises() -> None:
    with pytest.raises(KeyError, match="next"):
        step_mdp(TensorDict({"observation": torch.zeros(1)}, [1]))


def test_reset_mask_is_dropped() -> None:
    data = record()
    data.set("_reset", torch.ones(2, 1, dtype=torch.bool))
    assert "_reset" not in step_mdp(data).keys()


def test_advance_takes_the_keys_of_the_environment() -> None:
    env = TeamEnv(batch_size=(2,), nested_flags=True)
    data = env.step(env.rand_action(env.reset()))
    keys = {name: getattr(env, name) for name in KEYS}
    expected = oracle(
        flatten(data), keys, keep_other=True, exclude_reward=True, exclude_done=False, exclude_action=True
    )
    same(advance(data, env), expected)
    assert as_key(("agents", "reward")) not in advance(data, env).keys(True)


@pytest.mark.parametrize("kind", ["flat", "nested", "lazy"])
def test_next_root_equals_step_mdp(kind: str) -> None:
    data: Any = record()
    if kind == "flat":
        whole = [key for key in data.keys() if isinstance(data[key], torch.Tensor)]
        after = data["next"].exclude("agents", "deep")
        data = data.select(*whole, "_reset", strict=False).set("next", after)
    if kind == "lazy":
        data = LazyStackedTensorDict.lazy_stack([record()[0], record()[1]])
    data["_reset"] = torch.ones(2, 1)
    expected = step_mdp(data, **KEYS)
    excluded = paths_of(KEYS["reward_keys"]) | paths_of(KEYS["action_keys"]) | {("next",), ("_reset",)}
    found = following_root(data.exclude("next"), data["next"], excluded)
    assert type(found) is type(expected) and found.batch_size == expected.batch_size
    wanted = flatten(expected)
    assert flatten(found).keys() == wanted.keys()
    for path, leaf in flatten(found).items():
        assert torch.equal(leaf, wanted[path])  # type: ignore[arg-type]
