"""Each pair of hooks converts TensorDicts to trajectories and back exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from gleanrl.data import (
    Flat2TED,
    H5Combine,
    H5Split,
    LazyTensorStorage,
    Nested2TED,
    ReplayBuffer,
    TED2Flat,
    TED2Nested,
)
from gleanrl.errors import CheckpointError, CorruptCheckpointError, UnsupportedError


def data(shape: tuple[int, ...], noise: float) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    steps = (*shape[:-1], shape[-1] + 1)
    observation = torch.rand(*steps, 2, generator=generator)
    done = torch.rand(*steps, 1, generator=generator) < 0.3
    last = len(shape) - 1
    now, then = (observation.narrow(last, begin, shape[-1]).clone() for begin in (0, 1))
    then[torch.rand(shape, generator=generator) < noise] += 1
    flags, after = (done.narrow(last, begin, shape[-1]) for begin in (0, 1))
    return TensorDict(
        {
            "agent": {"obs": now},
            "done": flags,
            "next": {"agent": {"obs": then}, "done": after, "reward": now.sum(-1)},
        },
        shape,
    )


def chain(*hooks: Callable[[Any], TensorDictBase], of: TensorDictBase) -> TensorDictBase:
    for hook in hooks:
        of = hook(of)
    return of


@pytest.mark.parametrize(
    "hooks", [(TED2Flat, Flat2TED), (TED2Nested, Nested2TED), (TED2Nested, H5Split, H5Combine, Nested2TED)]
)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    steps=st.integers(1, 9),
    noise=st.sampled_from([0, 0.5, 1]),
    shift=st.integers(0, 8),
)
def test_data_come_back_exactly(hooks: Any, batch: list[int], steps: int, noise: float, shift: int) -> None:
    given_, made = data((*batch, steps), noise), [hook() for hook in hooks]
    made[0].shift = shift % steps
    found = chain(*made, of=given_)
    assert found.batch_size == given_.batch_size and set(found.keys(True, True)) == set(
        given_.keys(True, True)
    )
    assert (found == given_).all()


def test_each_observation_is_stored_once_and_trajectories_can_be_read() -> None:
    given_ = data((1, 6), 0)
    flat, nested = TED2Flat()(given_), TED2Nested()(given_)
    count = len(nested)
    assert len(flat["agent", "obs"]) == 6 + count and ("next", "agent", "obs") not in flat.keys(True)
    assert flat["trajectories", "offsets"].diff().tolist() == nested["trajectories", "lengths"].tolist()
    lengths = [len(row) for row in nested["agent", "obs"].unbind()]
    assert lengths == (nested["trajectories", "lengths"] + 1).tolist()
    parts = H5Split()(nested)
    assert sorted(parts.keys())[0] == "traj_0000" and len(parts.keys()) == count
    assert torch.equal(parts["traj_0000", "agent", "obs"], flat["agent", "obs"][: lengths[0]])


def test_flat_data_go_into_files_and_into_data_that_are_there(tmp_path: Path) -> None:
    given_ = data((6,), 0)
    TED2Flat()(given_, tmp_path)
    out = given_.apply(torch.zeros_like)
    assert Flat2TED()(TensorDict.load_memmap(tmp_path), out) is out
    assert (out == given_).all()


def test_other_data_are_refused() -> None:
    for wrong in (TensorDict({"a": torch.zeros(2)}, []), TensorDict({"shift": torch.zeros(2)}, [2])):
        with pytest.raises(CheckpointError):
            TED2Flat()(wrong)
    with pytest.raises(CheckpointError, match="at least one step"):
        TED2Nested()(TensorDict({"a": torch.zeros(0)}, [0]))
    empty = TensorDict({"a": torch.zeros(2, 0), "next": {"a": torch.zeros(2, 0)}}, [2, 0])
    assert Flat2TED()(TED2Flat()(empty)).batch_size == (2, 0)
    for hook in (Flat2TED(), Nested2TED()):
        with pytest.raises(CorruptCheckpointError):
            hook(TensorDict({}, [2]))
    assert TED2Flat(shift_key="oldest")(TensorDict({"shift": torch.zeros(2)}, [2]))["oldest"] == 0


@pytest.mark.parametrize(
    ("save", "load", "form"),
    [(TED2Flat, Flat2TED, "flat"), (TED2Nested, Nested2TED, "nested"), (H5Split, H5Combine, "h5")],
)
def test_registered_hooks_choose_the_form_of_checkpoints(
    save: Any, load: Any, form: str, tmp_path: Path
) -> None:
    if form == "h5":
        pytest.importorskip("h5py")
    buffer, copy = (ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2))
    buffer.extend(data((6,), 0))
    buffer.register_save_hook(save())
    copy.storage.register_load_hook(load())
    assert buffer.storage.checkpointer.form == form
    buffer.dumps(tmp_path)
    copy.loads(tmp_path)
    assert (copy[:] == buffer[:]).all()


@pytest.mark.parametrize("save", [TED2Flat, TED2Nested])
def test_flags_of_a_registered_hook_reach_the_checkpointer(save: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(9))
    buffer.register_save_hook(save(done_keys=("over",), reward_keys=("gain",)))
    found = buffer.storage.checkpointer
    assert (found.done_keys, found.reward_keys) == (("over",), ("gain",))


def test_other_hooks_of_buffers_are_refused() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(9))
    derived = [type("Derived", (hook,), {})() for hook in (TED2Flat, Flat2TED)]
    saving, loading = buffer.register_save_hook, buffer.register_load_hook
    for register, wrong in (
        (saving, Flat2TED()),
        (loading, print),
        *zip((saving, loading), derived, strict=True),
    ):
        with pytest.raises(UnsupportedError, match=r"expected one of .* derive from StorageCheckpointerBase"):
            register(wrong)
