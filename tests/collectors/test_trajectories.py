"""`split_trajectories` equals a slow plain oracle and avoids known mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    tensorclass,
)

from gleanrl.collectors import utils
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.errors import (
    GleanError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # a warning of torch

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def batch_of(
    done: torch.Tensor, ids: torch.Tensor | None = None, mask: torch.Tensor | None = None
) -> TensorDict:
    """Return a batch of shape ``done.shape`` whose ``"serial"`` numbers the steps from 1."""
    serial = torch.arange(1, done.numel() + 1).reshape(done.shape)
    batch = TensorDict(
        {
            "serial": serial,
            "pixels": (serial % 255)[..., None, None].expand(*done.shape, 2, 2).to(torch.uint8),
            "next": {"reward": serial[..., None] / 2, "done": done[..., None], "terminated": done[..., None]},
        },
        done.shape,
        names=[*(None,) * (done.ndim - 1), "time"],
    )
    if ids is not None:
        batch[IDS] = ids
    if mask is not None:
        batch[MASK] = mask
    return batch


def flags(*values: int) -> torch.Tensor:
    """Return a bool tensor of `values`."""
    return torch.tensor(values, dtype=torch.bool)


def slow_pieces(done: torch.Tensor, ids: torch.Tensor | None, mask: torch.Tensor | None) -> list[list[int]]:
    """Return the trajectories of ``[P, T]`` rows as lists of flat positions."""
    pieces: list[list[int]] = []
    rows, length = done.shape
    for row in range(rows):
        piece: list[int] = []
        for t in range(length):
            real = mask is None or bool(mask[row, t])
            if piece and (not real or (ids is not None and ids[row, t] != ids[row, t - 1])):
                pieces.append(piece)
                piece = []
            if real:
                piece.append(row * length + t)
                if done[row, t]:
                    pieces.append(piece)
                    piece = []
        if piece:
            pieces.append(piece)
    return pieces


def check(batch: TensorDict, pieces: list[list[int]], **arguments: Any) -> TensorDict:
    """Compare the padded and the nested result with the oracle's pieces; return the padded one."""
    before, depth = batch.clone(), batch.batch_dims
    out = split_trajectories(batch, **arguments)
    nested = split_trajectories(batch, as_nested=True, **arguments)
    assert batch.names == before.names and set(batch.keys(True)) == set(before.keys(True))
    assert (batch == before).all()
    longest = max(map(len, pieces), default=0)
    assert out.batch_size == (len(pieces), longest) and out.names == [None, "time"]
    assert nested.batch_size == (len(pieces), -1)
    assert set(out.keys(True, True)) - {MASK, "mask", ("a", "mask")} == set(nested.keys(True, True))
    for key in batch.exclude(MASK).keys(True, True):
        leaf = batch[key].reshape(-1, *batch[key].shape[depth:])
        assert out[key].dtype == leaf.dtype and nested[key].dtype == leaf.dtype
        shared = out[key].untyped_storage().data_ptr() == batch[key].untyped_storage().data_ptr()
        assert not shared or leaf.numel() == 0
        ragged = nested[key].unbind()
        for row, piece in enumerate(pieces):
            assert torch.equal(out[key][row, : len(piece)], leaf[piece]), (key, row)
            assert not out[key][row, len(piece) :].any(), (key, row)
            assert torch.equal(ragged[row], leaf[piece]), (key, row)
    return out


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_batch_agrees_with_the_slow_oracle(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(1,), (7,), (1, 5), (3, 4), (4, 1), (2, 2, 3), (2, 1, 3, 2)]))
    count = torch.Size(shape).numel()

    def column(values: Any) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count))).reshape(shape)

    done = column(st.booleans())
    ids = column(st.integers(0, 3)) if data.draw(st.booleans()) else None
    mask = column(st.booleans()) if data.draw(st.booleans()) else None
    batch = batch_of(done, ids, mask)
    rows = (-1, shape[-1])
    pieces = slow_pieces(*(None if part is None else part.reshape(rows) for part in (done, ids, mask)))
    out = check(batch, pieces, prefix="collector")
    for row, piece in enumerate(pieces):
        assert out[MASK][row].tolist() == [t < len(piece) for t in range(out.shape[1])]
        if ids is None:
            assert out[IDS][row].tolist() == [row if t < len(piece) else 0 for t in range(out.shape[1])]
    assert out[IDS].dtype == torch.int64 and out[MASK].dtype == torch.bool


def test_an_id_that_comes_again_gives_separate_trajectories() -> None:
    out = check(batch_of(flags(0, 0, 0, 0, 0), torch.tensor([7, 7, 3, 7, 7])), [[0, 1], [2], [3, 4]])
    assert out[IDS].tolist() == [[7, 7], [3, 0], [7, 7]]


def test_a_done_within_one_id_ends_the_trajectory() -> None:
    check(batch_of(flags(0, 1, 0, 0), torch.tensor([5, 5, 5, 5])), [[0, 1], [2, 3]])


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2), (2, 1, 2)])
def test_environments_never_merge_though_they_share_an_id(shape: tuple[int, ...]) -> None:
    done = torch.zeros(shape, dtype=torch.bool)
    check(batch_of(done, torch.zeros(shape, dtype=torch.int64)), [[0, 1], [2, 3]])
    check(batch_of(done), [[0, 1], [2, 3]])


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3)])
def test_equally_long_trajectories_are_padded_by_no_step(shape: tuple[int, ...]) -> None:
    done = torch.zeros(shape, dtype=torch.bool)
    done[..., -1] = True
    out = check(batch_of(done), [list(range(i, i + 3)) for i in range(0, done.numel(), 3)])
    assert out.batch_dims == 2 and out["mask"].all()


def test_masked_steps_are_left_out_and_join_nothing() -> None:
    # An interruption cut row 0 short. Row 1 has the extra reset row of a vector environment.
    done = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    ids = torch.tensor([[0, 0, -1, -1], [1, -1, 1, 1]])
    out = check(batch_of(done, ids, ids >= 0), [[0, 1], [4], [6, 7]])
    assert (out[IDS] >= 0).all()


def test_batch_without_real_steps_gives_an_empty_result() -> None:
    out = check(batch_of(flags(0, 0), torch.tensor([-1, -1]), flags(0, 0)), [])
    assert out["pixels"].shape == (0, 0, 2, 2)
    assert check(batch_of(torch.zeros(2, 0, dtype=torch.bool)), []).shape == (0, 0)


def test_splitting_twice_changes_nothing() -> None:
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    once = split_trajectories(batch_of(done), prefix="collector")
    assert (split_trajectories(once) == once).all()


def test_n_step_rows_end_only_at_their_own_flags() -> None:
    # Two episodes of 3 steps with n = 2: the last two steps of each carry the end's flags.
    batch = batch_of(flags(0, 1, 1, 0, 1, 1))
    batch["steps_to_next_obs"] = torch.tensor([2, 2, 1, 2, 2, 1])[:, None]
    check(batch, [[0, 1, 2], [3, 4, 5]])


def test_which_keys_are_read_and_written() -> None:
    done, ids = flags(0, 0, 0), torch.tensor([4, 4, 9])

    def keys(batch: TensorDict, **arguments: Any) -> set[Any]:
        return set(split_trajectories(batch, **arguments).keys(True, True)) - set(batch.keys(True, True))

    collected = batch_of(done, ids)
    assert keys(collected) == {MASK}
    assert keys(batch_of(done)) == {"traj_ids", "mask"}
    assert keys(batch_of(done), prefix="collector") == {IDS, MASK}
    assert keys(batch_of(done), prefix=("a", "b")) == {("a", "b", "traj_ids"), ("a", "b", "mask")}
    assert keys(batch_of(done), trajectory_key="episode", prefix="ignored") == {"episode", "mask"}
    assert keys(batch_of(done), trajectory_key=("a", "episode")) == {("a", "episode"), ("a", "mask")}
    # The collector's ids separate trajectories for any key. The ids under the named key separate them in addition.
    collected["episode"] = torch.tensor([0, 1, 1])[:, None]
    check(collected, [[0], [1], [2]], trajectory_key="episode")
    check(collected, [[0, 1], [2]], trajectory_key="absent")
    root = batch_of(done)
    root["traj_ids"] = ids
    check(root, [[0, 1], [2]])


def test_done_key_is_the_only_flag_that_counts() -> None:
    batch = batch_of(flags(1, 1, 1))
    batch["next", "agents", "over"] = flags(0, 1, 0)
    check(batch, [[0, 1], [2]], done_key=("agents", "over"))
    check(batch, [[0], [1], [2]])


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_dtype_is_padded(dtype: torch.dtype) -> None:
    batch = batch_of(flags(0, 1, 0))
    batch["x"] = torch.tensor([1, 2, 3]).to(dtype)
    out = split_trajectories(batch)
    assert out["x"].dtype == dtype
    assert out["x"].to(torch.complex128 if dtype.is_complex else torch.float64).tolist() == [[1, 2], [3, 0]]


def test_nan_stays_on_its_step() -> None:
    batch = batch_of(flags(0, 1, 0))
    batch["x"] = torch.tensor([float("nan"), float("nan"), 1.0])
    out = split_trajectories(batch)["x"]
    assert out.isnan().tolist() == [[True, True], [False, False]]


def test_groups_keep_their_own_batch_dimensions() -> None:
    batch = batch_of(torch.zeros(2, 3, dtype=torch.bool))
    batch["next", "agents"] = TensorDict({"reward": torch.ones(2, 3, 4)}, [2, 3, 4])
    batch["empty"] = TensorDict({}, [2, 3])
    out = split_trajectories(batch)
    assert out["next", "agents"].batch_size == (2, 3, 4)
    assert out["empty"].is_empty() and out["next"].names == [None, "time"]


def test_strided_stacked_and_locked_batches_are_split() -> None:
    done = torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    batch = batch_of(done)
    expected = split_trajectories(batch)
    strided = batch.transpose(0, 1).contiguous().transpose(0, 1)
    assert (split_trajectories(strided) == expected).all()
    assert (split_trajectories(LazyStackedTensorDict(*batch.unbind(0))) == expected).all()
    out = split_trajectories(batch.lock_())
    assert (out == expected).all() and not out.is_locked


def test_nested_results_are_padded_by_the_container() -> None:
    batch = batch_of(flags(0, 1, 0))
    padded = split_trajectories(batch, as_nested=True).to_padded_tensor(mask_key="mask")
    assert (padded == split_trajectories(batch)).all() and padded.batch_size == (2, 2)


def test_nested_results_can_be_computed_with() -> None:
    nested = split_trajectories(batch_of(flags(0, 1, 0)), as_nested=True)
    assert [part.tolist() for part in (nested["serial"] * nested["traj_ids"]).unbind()] == [[0, 0], [3]]
    assert nested[1]["serial"].tolist() == [3]


def test_one_value_for_all_steps_is_kept() -> None:
    batch = batch_of(flags(0, 1, 0))
    batch["task"] = NonTensorData("walk", batch_size=[3])
    batch["next", "task"] = NonTensorData("run", batch_size=[3])
    out = split_trajectories(batch)
    assert (out["task"], out["next", "task"]) == ("walk", "run")
    assert split_trajectories(batch, as_nested=True)["task"] == "walk"


def test_gradients_flow_through_the_padding() -> None:
    batch = batch_of(flags(0, 1, 0))
    batch["x"] = torch.ones(3, requires_grad=True)
    split_trajectories(batch)["x"].pow(2).sum().backward()
    assert batch["x"].grad is not None and batch["x"].grad.tolist() == [2, 2, 2]


@tensorclass
class Extra:
    """A group with its own type."""

    value: torch.Tensor


def bad_calls() -> dict[str, tuple[TensorDictBase, dict[str, Any], type[GleanError], type[Exception], str]]:
    """Return for each mistake the batch, the arguments, both expected error types and a part of the message."""
    good = batch_of(flags(0, 1, 0))
    action_mask = torch.ones(3, 5, dtype=torch.bool)
    jagged = torch.nested.nested_tensor_from_jagged(torch.zeros(4), torch.tensor([0, 1, 2, 4]))
    extra = Extra(value=torch.zeros(3), batch_size=[3])
    return {
        "nothing to go by": (
            good.exclude("next"),
            {},
            MissingKeyError,
            KeyError,
            "mark the ends of trajectories",
        ),
        "done_key": (good, {"done_key": "over"}, MissingKeyError, KeyError, "'over'"),
        "no batch": (
            TensorDict({"next": {"done": flags(0)}}, []),
            {},
            SchemaError,
            RuntimeError,
            "batch_size",
        ),
        "action mask at the key of the mask": (
            good.clone().set("mask", action_mask),
            {},
            SchemaError,
            RuntimeError,
            "'mask'",
        ),
        "wide ids": (
            good.clone().set("traj_ids", torch.zeros(3, 2)),
            {},
            SchemaError,
            ValueError,
            "'traj_ids'",
        ),
        "ids at the mask": (
            good,
            {"trajectory_key": ("a", "mask")},
            InvalidArgumentError,
            ValueError,
            "mask",
        ),
        "nested leaf": (good.clone().set("x", jagged), {}, UnsupportedError, RuntimeError, "'x'"),
        "tensorclass": (good.clone().set("extra", extra), {}, UnsupportedError, RuntimeError, "Extra"),
    }


def test_strings_have_no_nested_form() -> None:
    batch = batch_of(flags(0, 1, 0)).set("text", NonTensorStack(*"abc"))
    with pytest.raises(UnsupportedError, match="'text'.*exclude the key"):
        split_trajectories(batch, as_nested=True)


def test_strings_and_tensors_of_unlike_shapes_are_padded() -> None:
    batch = batch_of(flags(0, 1, 0)).set("text", NonTensorStack(*"abc"))
    out = split_trajectories(batch)
    assert out["text"] == [["a", "b"], ["c", None]] and out["next", "done"].shape[:2] == (2, 2)
    steps = [part.set("x", torch.full((i, 2), i)) for i, part in enumerate(batch.clone().unbind(0), 1)]
    unlike = split_trajectories(LazyStackedTensorDict.lazy_stack(steps))
    assert [[step["x"].tolist() for step in row.unbind(0)] for row in unlike.unbind(0)] == [
        [[[1, 1]], [[2, 2]] * 2],
        [[[3, 3]] * 3, []],
    ]
    assert unlike["text"] == out["text"] and unlike["mask"].tolist() == out["mask"].tolist()
    assert unlike.names == [None, "time"]


@pytest.mark.parametrize("case", bad_calls())
@pytest.mark.parametrize("as_nested", [False, True])
def test_bad_calls_raise_at_the_cause(case: str, as_nested: bool) -> None:
    batch, arguments, ours, usual, part = bad_calls()[case]
    with pytest.raises(ours) as caught:
        split_trajectories(batch, as_nested=as_nested, **arguments)
    assert isinstance(caught.value, usual)
    assert part in str(caught.value)


def test_the_public_path_is_the_same_function() -> None:
    assert utils.split_trajectories is split_trajectories


def test_batch_argument_has_two_names() -> None:
    batch = TensorDict({"next": {"done": torch.tensor([False, True, False])}}, [3])
    assert split_trajectories(rollout_tensordict=batch).shape == (2, 2)
    assert split_trajectories(rollout=batch).shape == (2, 2)
    with pytest.raises(InvalidTypeError, match="split_trajectories: expected a TensorDict, got NoneType"):
        split_trajectories()
