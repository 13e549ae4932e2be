"""Ids, flags and the write cursor end a trajectory, for each choice of keys of the sampler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.slices import sampler as make
from tests.contract.buffers.tape import IDS, chunks

L = 3
T = 20


def rows(**columns: Any) -> TensorDict:
    """Return T rows: `t` counts, further columns are requested by name (`episode`, `ids`, `other`, `done`, `end`)."""
    places = {"ids": IDS, "done": ("next", "done")}
    data = TensorDict({"t": torch.arange(T)}, [T])
    for name, values in columns.items():
        if name in ("done", "end", "flat"):
            flags = torch.zeros(T, 1, dtype=torch.bool)
            flags[list(values)] = True
            data[places.get(name, "end")] = flags if name != "flat" else flags[:, 0]
        else:
            data[places.get(name, name)] = torch.tensor(values, dtype=torch.int64)
    return data


def starts(data: TensorDict, capacity: int = T, **kwargs: Any) -> set[int]:
    """Return the first steps of all drawn slices of length `L`; all slices are checked to be consecutive."""
    buffer = parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(capacity),
        sampler=make(slice_len=L, truncated_key=None, **kwargs),
        batch_size=300 * L,
    )
    for start, stop in chunks(len(data)):
        buffer.extend(data[start:stop])
    return drawn(buffer)


def drawn(buffer: Any) -> set[int]:
    """Return the first steps of all slices in four batches."""
    found: set[int] = set()
    for _ in range(4):
        t = buffer.sample()["t"].view(-1, L)
        assert torch.equal(t, t[:, :1] + torch.arange(L))
        found |= set(t[:, 0].tolist())
    return found


def between(*ends: int, first: int = 0) -> set[int]:
    """Return the possible starts in trajectories whose last steps are `ends`."""
    found: set[int] = set()
    for end in ends:
        found |= set(range(first, end - L + 2))
        first = end + 1
    return found


CONST = [5] * T
RUNS = [0] * 4 + [1] * 6 + [0] * 7 + [1] * 3  # an id that returns later names another trajectory


@pytest.mark.parametrize(
    ("columns", "kwargs", "ends"),
    [
        ({"done": [3, 9]}, {}, (3, 9, 19)),
        ({"done": [3, 9]}, {"end_key": ("next", "done")}, (3, 9, 19)),
        ({"end": [4, 12]}, {"end_key": "end"}, (4, 12, 19)),
        ({"flat": [4, 12]}, {"end_key": "end"}, (4, 12, 19)),
        ({"episode": RUNS}, {}, (3, 9, 16, 19)),
        ({"episode": RUNS}, {"traj_key": "episode"}, (3, 9, 16, 19)),
        ({"other": RUNS}, {"traj_key": "other"}, (3, 9, 16, 19)),
        ({"other": RUNS}, {"trajectory_key": "other"}, (3, 9, 16, 19)),
        ({"ids": RUNS}, {"traj_key": IDS}, (3, 9, 16, 19)),
        ({"ids": RUNS}, {"trajectory_key": IDS}, (3, 9, 16, 19)),
        ({"ids": RUNS, "done": [12]}, {"traj_key": IDS}, (3, 9, 12, 16, 19)),
        ({"ids": CONST, "done": [3, 9]}, {"traj_key": IDS}, (3, 9, 19)),
        ({"episode": CONST, "done": [3, 9]}, {}, (3, 9, 19)),
        ({"ids": RUNS, "other": CONST}, {"traj_key": "other"}, (3, 9, 16, 19)),
        ({"ids": RUNS, "end": [6]}, {"end_key": "end"}, (3, 6, 9, 16, 19)),
        ({"ids": RUNS, "done": [6]}, {"end_key": ("next", "done")}, (3, 6, 9, 16, 19)),
        ({"ids": RUNS, "done": [6]}, {}, (3, 6, 9, 16, 19)),
        ({"end": [4], "done": [9]}, {"end_key": "end"}, (4, 9, 19)),
        ({"end": [4], "done": [9], "ids": RUNS}, {"end_key": "end"}, (3, 4, 9, 16, 19)),
        ({"done": []}, {}, (19,)),
    ],
)
def test_trajectories_end_by_the_chosen_keys(
    columns: dict[str, Any], kwargs: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert starts(rows(**columns), **kwargs) == between(*ends)


def test_the_cursor_is_an_end_in_a_full_ring() -> None:
    # 13 slots hold the steps 7 to 19; the cursor is between 19 and 7.
    assert starts(rows(done=[12]), capacity=13) == between(12, 19, first=7)
    assert starts(rows(ids=CONST), capacity=13, traj_key=IDS) == between(19, first=7)


def test_missing_trajectory_and_end_keys_raise() -> None:
    with pytest.raises(KeyError):
        starts(rows())
    with pytest.raises(KeyError, match="nothing"):
        starts(rows(), traj_key="nothing")
    with pytest.raises(KeyError, match="nothing"):
        starts(rows(done=[3]), end_key="nothing")


def test_a_missing_trajectory_key_falls_back_to_the_ends() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sampler may warn about the fallback
        assert starts(rows(done=[3, 9]), traj_key="nothing") == between(3, 9, 19)


@pytest.mark.parametrize("how", ["ends", "trajectories"])
def test_boundaries_that_are_given(how: str) -> None:
    data = rows()
    if how == "ends":
        given = torch.zeros(T, dtype=torch.bool)
        given[[3, 9, T - 1]] = True
        expected = between(3, 9, 19)
    else:
        given, expected = torch.tensor(RUNS), between(3, 9, 16, 19)
    assert starts(data, cache_values=True, **{how: given}) == expected


@pytest.mark.parametrize(
    "kwargs",
    [
        {"ends": torch.ones(T, dtype=torch.bool)},
        {"trajectories": torch.zeros(T, dtype=torch.int64)},
        {"ends": torch.ones(T, dtype=torch.bool), "end_key": "end", "cache_values": True},
        {"trajectories": torch.tensor(RUNS), "traj_key": "episode", "cache_values": True},
        {"ends": torch.ones(T, dtype=torch.bool), "trajectories": torch.tensor(RUNS), "cache_values": True},
    ],
)
def test_given_boundaries_want_a_cache_and_no_keys(kwargs: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError):
        parts.SliceSampler(slice_len=L, **kwargs)


def test_a_written_row_moves_the_boundaries() -> None:
    data = rows(ids=CONST, done=[])
    buffer = parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(T),
        sampler=make(slice_len=L, truncated_key=None, traj_key=IDS),
        batch_size=300 * L,
    )
    buffer.extend(data)
    assert drawn(buffer) == between(19)
    row = data[8].clone()
    row["next", "done"].fill_(True)
    buffer[8] = row
    assert drawn(buffer) == between(8, 19)
    other = data[14:15].clone()
    other[IDS].fill_(99)
    buffer[14:15] = other
    assert drawn(buffer) == between(8, 13, 14, 19)


def test_a_column_that_is_written_moves_the_boundaries() -> None:
    data = rows(ids=CONST, done=[])
    buffer = parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(T),
        sampler=make(slice_len=L, truncated_key=None, traj_key=IDS),
        batch_size=300 * L,
    )
    buffer.extend(data)
    buffer[IDS] = torch.tensor(RUNS)
    assert drawn(buffer) == between(3, 9, 16, 19)


def test_rows_of_two_sources_never_share_a_slice() -> None:
    # Two asynchronous workers deliver alternately. Ids separate their rows, although neither trajectory is done.
    ids = [7] * 5 + [8] * 5 + [7] * 5 + [8] * 5
    assert starts(rows(ids=ids, done=[])) == between(4, 9, 14, 19)


def test_another_sampler_or_storage_knows_the_boundaries() -> None:
    data = rows(ids=RUNS, done=[6])
    buffer = parts.ReplayBuffer(storage=parts.LazyTensorStorage(T), batch_size=300 * L)
    buffer.extend(data)
    buffer.set_sampler(make(slice_len=L, truncated_key=None))
    expected = between(3, 6, 9, 16, 19)
    assert drawn(buffer) == expected
    buffer.set_storage(parts.TensorStorage(rows(ids=CONST, done=[4])))
    assert drawn(buffer) == between(4, 19)
    buffer.extend(rows(ids=RUNS, done=[6]))
    assert drawn(buffer) == expected


def test_a_state_loaded_brings_its_boundaries() -> None:
    saved = parts.ReplayBuffer(storage=parts.LazyTensorStorage(T), sampler=make(slice_len=L), batch_size=30)
    saved.extend(rows(ids=RUNS, done=[6]))
    other = parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(T), sampler=make(slice_len=L, truncated_key=None), batch_size=300 * L
    )
    other.extend(rows(ids=CONST, done=[4]))
    assert drawn(other) == between(4, 19)
    other.load_state_dict(saved.state_dict())
    assert drawn(other) == between(3, 6, 9, 16, 19)


def test_end_signals_of_another_number_of_dimensions_are_refused() -> None:
    data = rows(done=[3])
    data["wide"] = torch.zeros(T, 2, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="wide"):
        starts(data, end_key="wide")


def test_in_n_step_data_an_end_is_where_one_step_is_left() -> None:
    # Rows 7 to 9 all lead to the end of the episode (three, two and one step ahead), but only row 9 is its last.
    data = rows(done=[7, 8, 9], steps_to_next_obs=[3] * 8 + [2, 1] + [3] * 10)
    assert starts(data) == between(9, 19)
    assert starts(rows(ids=CONST, done=[7, 8, 9], steps_to_next_obs=[3] * 8 + [2, 1] + [3] * 10)) == between(
        9, 19
    )


@pytest.mark.parametrize("how", ["ends", "trajectories"])
def test_boundaries_that_are_given_for_two_columns(how: str) -> None:
    data = torch.stack([rows(), rows()])
    data["column"] = torch.arange(2)[:, None].expand(2, T)
    if how == "ends":
        given = torch.zeros(T, 2, dtype=torch.bool)
        given[[3, 9, T - 1], 0] = True
        given[[6, T - 1], 1] = True
        expected = {0: between(3, 9, 19), 1: between(6, 19)}
    else:
        given = torch.stack([torch.tensor(RUNS), torch.tensor(CONST)], 1)
        expected = {0: between(3, 9, 16, 19), 1: between(19)}
    buffer = parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(2 * T, ndim=2),
        sampler=make(slice_len=L, truncated_key=None, cache_values=True, **{how: given}),
        batch_size=600 * L,
    )
    buffer.extend(data)
    found: dict[int, set[int]] = {0: set(), 1: set()}
    for _ in range(3):
        batch = buffer.sample()
        t, column = batch["t"].view(-1, L), batch["column"].view(-1, L)
        assert torch.equal(t, t[:, :1] + torch.arange(L)) and (column == column[:, :1]).all()
        for where, start in zip(column[:, 0].tolist(), t[:, 0].tolist(), strict=True):
            found[where].add(start)
    assert found == expected
