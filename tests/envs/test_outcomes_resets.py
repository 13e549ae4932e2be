"""Partial resets merge each row from the right source, compared with a loop over rows and agents."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl._arrays.tensordicts import Path, as_key, flatten
from gleanrl.envs.outcomes import (
    due_resets,
    is_partial,
    merge_reset,
    own_request,
    put_root,
    reset_masks,
    reset_rows,
    terminated_or_truncated,
    without_masks,
)
from gleanrl.errors import MissingKeyError
from tests.fakes_marl import SurvivorEnv

ROOT: Path = ()
TEAM: Path = ("agents",)
P, A = 3, 2


def side(value: float, size: tuple[int, ...] = (P,)) -> TensorDict:
    """Return a root filled with `value`: plain, with trailing dimensions, scalar rows, and per agent."""

    def full(*shape: int) -> torch.Tensor:
        return torch.full((*size, *shape), value)

    out = TensorDict(
        {"observation": full(3), "image": full(2, 2), "scalar": full(), "done": full(1).bool()}, size
    )
    out.set(("agents", "seen"), full(A, 4)).set(("agents", "done"), full(A, 1).bool())
    return out.set(("agents", "rank"), full(A)).set(("agents", "shared"), full(5))


def check(merged: TensorDict, root_rows: list[bool], agents: list[list[bool]]) -> None:
    """Check each row: reset values are 0, kept values are 1."""
    for p, fresh in enumerate(root_rows):
        for key in ("observation", "image", "scalar", "done"):
            assert merged[key][p].eq(0 if fresh else 1).all(), (key, p)
        assert merged["agents", "shared"][p].eq(0 if any(agents[p]) else 1).all()
        for a, one in enumerate(agents[p]):
            for key in ("seen", "done", "rank"):
                assert merged["agents", key][p, a].eq(0 if one else 1).all(), (key, p, a)


SHAPES = [(P, 1), (P,)]


@pytest.mark.parametrize("rows", list(itertools.product([False, True], repeat=P))[:-1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_root_mask_merges_rows(rows: tuple[bool, ...], shape: tuple[int, ...]) -> None:
    masks = {ROOT: torch.tensor(rows).reshape(shape)}
    check(merge_reset(side(0.0), side(1.0), masks), list(rows), [[row] * A for row in rows])


@pytest.mark.parametrize("shape", [(P, A, 1), (P, A)], ids=str)
@pytest.mark.parametrize("root", [None, [True, False, False]])
def test_group_mask_merges_agents(root: Any, shape: tuple[int, ...]) -> None:
    for bits in itertools.product([False, True], repeat=P * A):
        own = torch.tensor(bits).reshape(P, A)
        masks = {TEAM: own.reshape(shape)} | (
            {} if root is None else {ROOT: torch.tensor(root).unsqueeze(-1)}
        )
        rows = [bool(own[p].any()) or bool(root and root[p]) for p in range(P)]
        check(merge_reset(side(0.0), side(1.0), masks), rows, own.tolist())


def test_agents_of_an_unbatched_environment_merge() -> None:
    masks = {TEAM: torch.tensor([[True], [False]])}
    merged = merge_reset(side(0.0, ()), side(1.0, ()), masks)
    assert merged["agents", "seen"].tolist() == [[0] * 4, [1] * 4] and (merged["observation"] == 0).all()


def test_rows_of_two_batch_dimensions_merge() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    merged = merge_reset(side(0.0, (2, 2)), side(1.0, (2, 2)), {ROOT: mask.unsqueeze(-1)})
    assert torch.equal(merged["image"], (~mask).float()[..., None, None].expand(2, 2, 2, 2))


def test_merge_leaves_its_inputs_unchanged() -> None:
    fresh, before = side(0.0), side(1.0)
    merge_reset(fresh, before, {ROOT: torch.tensor([[True], [False], [False]])})
    assert (fresh == side(0.0)).all() and (before == side(1.0)).all()


def test_dtypes_are_not_promoted() -> None:
    mask = torch.tensor([True, False, False])
    fresh = TensorDict({"x": torch.zeros(P, dtype=torch.uint8), "h": torch.zeros(P).half()}, [P])
    merged = merge_reset(fresh, fresh + 1, {ROOT: mask})
    assert {path: leaf.dtype for path, leaf in flatten(merged).items()} == {
        ("x",): torch.uint8,
        ("h",): torch.float16,
    }


def test_observation_missing_for_kept_rows_warns() -> None:
    with pytest.warns(UserWarning, match="no 'observation' for the rows that aren't reset"):
        merged = merge_reset(
            side(0.0), side(1.0).exclude("observation"), {ROOT: torch.tensor([True, False, False])}
        )
    assert (merged["observation"] == 0).all(), "they hold what the environment returned"


def test_missing_rows_of_a_flag_warn() -> None:
    with pytest.warns(UserWarning, match="no 'done'"):
        merged = merge_reset(side(0.0), side(1.0).exclude("done"), {ROOT: torch.tensor([True, False, False])})
    assert not merged["done"].any()


class TestMasks:
    def test_reset_masks_copies_the_masks_of_groups(self) -> None:
        root = side(1.0)
        assert reset_masks(None, [ROOT, TEAM]) == {} == reset_masks(root, [ROOT, TEAM])
        root["agents", "_reset"] = mask = torch.ones(P, A, 1, dtype=torch.bool)
        assert reset_masks(root, [ROOT]) == {}
        found = reset_masks(root, [ROOT, TEAM])
        assert list(found) == [TEAM] and found[TEAM] is not mask and found[TEAM].all()

    def test_reset_rows_are_rows_with_any_mask(self) -> None:
        masks = {ROOT: torch.tensor([[True], [False], [False]]), TEAM: torch.zeros(P, A, 1, dtype=torch.bool)}
        masks[TEAM][2, 1] = True
        assert reset_rows(masks, torch.Size([P])).tolist() == [True, False, True]
        assert is_partial(masks) and is_partial({ROOT: torch.tensor(False)})
        assert not is_partial({}) and not is_partial({ROOT: torch.ones(P, 1, dtype=torch.bool)})

    def test_request_holds_copies_of_the_masks(self) -> None:
        root = side(1.0)
        for group in (ROOT, TEAM):
            root.set(as_key((*group, "_reset")), torch.zeros(P, 1, dtype=torch.bool))
        masks = reset_masks(root, [ROOT, TEAM])
        request = own_request(root, masks)
        assert request is not None and request["observation"] is root["observation"]
        request["_reset"].fill_(True)
        request["agents", "_reset"].fill_(True)
        request["mine"] = torch.ones(P)
        assert not root["_reset"].any() and not root["agents", "_reset"].any() and "mine" not in root.keys()
        assert own_request(None, {}) is None


class TestDueResets:
    """The reset masks follow from the flags of a root."""

    def test_environment_flags_take_precedence_over_agents(self) -> None:
        flags = {"done": torch.tensor([[True], [False]])}
        agents = torch.tensor([[[False], [True]], [[True], [False]]])
        root = TensorDict({**flags, "agents": TensorDict({"done": agents}, [2, 2])}, [2])
        due = due_resets(root, [(), ("agents",)])
        assert due[()].tolist() == [[True], [False]]
        assert due["agents",].tolist() == [[[True], [True]], [[False], [False]]]
        due["agents",].fill_(True)
        assert not root["done"][1].any()

    def test_groups_without_parent_flags_reset_separately(self) -> None:
        red, blue = torch.tensor([[True], [False]]), torch.tensor([[False]])
        root = TensorDict(
            {"red": TensorDict({"done": red}, [2]), "blue": TensorDict({"done": blue}, [1])}, []
        )
        due = due_resets(root, [("red",), ("blue",)])
        assert due["red",].tolist() == red.tolist() and due["blue",].tolist() == blue.tolist()


class TestTerminatedOrTruncated:
    """Whether an episode ended, and where."""

    def test_any_flag_writes_a_reset_mask(self) -> None:
        for flag in ("done", "terminated", "truncated"):
            data = TensorDict({name: torch.zeros(3, 1, dtype=torch.bool) for name in ("done", flag)}, [3])
            assert not terminated_or_truncated(data) and "_reset" not in data
            assert not terminated_or_truncated(data, write_full_false=True) and not data["_reset"].any()
            data[flag][1] = True
            assert terminated_or_truncated(data) and data["_reset"].flatten().tolist() == [False, True, False]
            before = set(data.keys())
            assert terminated_or_truncated(data, key=None) and set(data.keys()) == before
            data["_reset"].fill_(True)
            assert int(data[flag].sum()) == 1

    def test_environment_flags_take_precedence_over_agents(self) -> None:
        env = SurvivorEnv("all", batch_size=(2,))
        data = env.rollout(3, break_when_any_done=False)[:, -1]["next"]
        assert data["red", "done"][0].all() and not terminated_or_truncated(data, env.full_done_spec)
        data["truncated"][1] = True
        assert terminated_or_truncated(data, env.full_done_spec, key="over")
        assert data["over"].flatten().tolist() == [False, True]
        assert data["red", "over"].flatten(1).tolist() == [[False] * 2, [True] * 2]

    def test_data_without_flags_raise(self) -> None:
        with pytest.raises(MissingKeyError):
            terminated_or_truncated(TensorDict({"x": torch.zeros(1)}, []))


class TestResetResult:
    """The result of a reset is merged with its request."""

    KEYS = ("_reset", ("agents", "_reset"))

    def asked(self) -> TensorDict:
        """Return a request with both masks."""
        out = side(1.0).set("_reset", torch.ones(P, 1, dtype=torch.bool))
        return out.set(("agents", "_reset"), torch.ones(P, A, 1, dtype=torch.bool))

    def test_returned_masks_are_removed(self) -> None:
        fresh, plain = self.asked(), side(0.0)
        assert without_masks(plain, self.KEYS) is plain
        found = without_masks(fresh, self.KEYS)
        assert set(found.keys(True, True)) == set(plain.keys(True, True))
        assert "_reset" in fresh.keys(), "the environment's own TensorDict was written"

    @pytest.mark.parametrize("keys", [KEYS[:1], KEYS])
    @pytest.mark.parametrize("lazy", [False, True])
    def test_result_is_written_into_the_request(self, keys: Any, lazy: bool) -> None:
        request, expected = self.asked(), self.asked()
        fresh = side(0.0).exclude("image", ("agents", "shared")).set(("agents", "new"), torch.ones(P, A, 2))
        fresh = LazyStackedTensorDict.lazy_stack(list(fresh.unbind(0))) if lazy else fresh
        found = put_root(request, fresh, keys)
        assert found is request
        expected = expected.exclude(*keys, inplace=True).update(fresh)
        assert set(found.keys(True, True)) == set(expected.keys(True, True))
        assert (found == expected).all()

    def test_locked_request_raises_and_stays_unchanged(self) -> None:
        request = self.asked().lock_()
        with pytest.raises(RuntimeError, match="lock"):
            put_root(request, side(0.0), self.KEYS)
        assert (request == self.asked()).all() and "_reset" in request.keys()
