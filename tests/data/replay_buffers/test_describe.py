"""`describe` and `episodes` agree with NumPy and with plain loops over random histories."""

from __future__ import annotations

import random
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    Storage,
    TensorDictMaxValueWriter,
)
from gleanrl.errors import MissingKeyError, UnsupportedError

SEEDS = range(6)


# ------------------------------------------------------------------ describe
def columns(rng: np.random.Generator, count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return random columns, of which some hold NaN and infinities, and some are constant."""
    holes = rng.normal(size=(count, 2, 3)).astype(np.float32)
    holes[rng.random(holes.shape) < 0.1] = np.nan
    endless = rng.normal(size=count)
    endless[rng.random(count) < 0.1] = np.inf
    return {
        "holes": holes,
        "endless": endless,
        "half": rng.normal(size=(count, 1)).astype(np.float16),
        "bytes": rng.integers(0, 256, (count, 5), np.uint8),
        "wide": rng.integers(0, 2**16, count, np.uint16),
        "long": rng.integers(-(2**40), 2**40, count),
        "flag": rng.random((count, 1)) < 0.3,
        "goal": np.broadcast_to(np.array([1.0, np.nan]), (count, 2)).copy(),
        "nothing": np.full(count, np.nan),
        "complex": rng.normal(size=count) + 1j,
    }


def check(found: Any, column: np.ndarray[Any, Any]) -> None:
    """Compare the statistics of a column with NumPy."""
    assert found.rows == len(column) and found.shape == column.shape[1:]
    assert str(found.dtype).removeprefix("torch.") == column.dtype.name
    rows = column.reshape(len(column), -1)
    bad = ~np.isfinite(rows).all(1)
    assert found.num_nan == np.isnan(rows).sum() and found.nonfinite_rows == bad.sum()
    assert found.first_nonfinite == (int(bad.argmax()) if bad.any() else None)
    same = (rows == rows[:1]) | (np.isnan(rows) & np.isnan(rows[:1]))
    assert found.constant == (len(rows) > 1 and bool(same.all()))
    known = rows[~np.isnan(rows)]
    if not known.size or column.dtype.kind == "c":
        assert (found.min, found.mean, found.max) == (None, None, None)
    else:
        assert (found.min, found.max) == (known.min(), known.max())
        assert found.mean == pytest.approx(known.mean(dtype=np.float64), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "made", [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]
)
def test_describe_agrees_with_numpy_after_wraps(made: type[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 40))
    buffer, total = ReplayBuffer(storage=made(capacity)), 0
    kept: dict[str, np.ndarray[Any, Any]] = {}
    for count in rng.integers(1, 30, 4).tolist():
        new = columns(rng, count)
        if made is CompressedListStorage:  # zlib's bytes can't be read as complex numbers or uint16
            new = {key: column for key, column in new.items() if key not in ("complex", "wide")}
        buffer.extend(TensorDict({key: torch.from_numpy(column) for key, column in new.items()}, [count]))
        for key, column in new.items():
            ring = kept.setdefault(key, np.empty((capacity, *column.shape[1:]), column.dtype))
            ring[np.arange(total, total + count)[-capacity:] % capacity] = column[-capacity:]
        total += count
    described = buffer.describe()
    assert described.keys() == kept.keys()
    for key, ring in kept.items():
        check(described[key], ring[: min(total, capacity)])
        if made in (LazyTensorStorage, LazyMemmapStorage):
            assert described[key].megabytes == ring.nbytes / 1e6
    lines = str(described).splitlines()
    assert len(lines) == 1 + len(kept) and [line.split()[0] for line in lines[1:]] == list(kept)


def test_describe_reads_large_columns_in_pieces() -> None:
    # Rows of 2 MB are read by twos, and the pieces differ in their extremes.
    pixels = torch.zeros(5, 1 << 21, dtype=torch.uint8)
    pixels[4, -1], pixels[1] = 200, 3
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(TensorDict({"pixels": pixels}, [5]))
    check(buffer.describe()["pixels"], pixels.numpy())
    buffer[4] = TensorDict({"pixels": pixels[0]}, [])
    buffer[1] = TensorDict({"pixels": pixels[0]}, [])
    assert buffer.describe()["pixels"].constant
    holes = torch.zeros(3, 1 << 20)
    holes[1:, 5] = torch.nan
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend(TensorDict({"holes": holes}, [3]))
    check(buffer.describe()["holes"], holes.numpy())


def test_describe_leaves_padding_out() -> None:
    mask = torch.tensor([[True, True, False, True]])
    data = TensorDict({"x": torch.tensor([[1.0, 3.0, 99.0, 5.0]]), "collector": {"mask": mask}}, [1, 4])
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
    buffer.extend(data)
    found = buffer.describe()["x"]
    assert (found.rows, found.min, found.mean, found.max) == (3, 1.0, 3.0, 5.0)


def test_describe_takes_any_object_and_rows_of_different_shapes() -> None:
    buffer = ReplayBuffer(storage=ListStorage(10))
    buffer.extend([1, "two", None, {"a": np.ones(3)}, {"a": torch.zeros(2, dtype=torch.float64)}])
    found = buffer.describe()
    assert found["tensor"].dtype is None and found["tensor"].rows == 3 and found["tensor"].max == 1
    assert found["a"].shape == (-1,) and found["a"].mean == 0.6 and not found["a"].constant
    ragged = ReplayBuffer(storage=LazyTensorStorage(4))
    ragged.extend([TensorDict({"words": torch.arange(n), "text": "a" * n}, []) for n in (1, 3)])
    found = ragged.describe()
    assert (found["words"].rows, found["words"].shape, found["words"].max) == (2, (-1,), 2)
    assert (found["text"].rows, found["text"].dtype, found["text"].mean) == (2, None, None)


def test_the_first_row_that_is_not_finite_is_found_among_rows_of_different_shapes() -> None:
    values = [torch.zeros(2), torch.full((3,), torch.nan), torch.zeros(3), torch.tensor([torch.nan, 0.0])]
    buffer = ReplayBuffer(storage=ListStorage(4))
    buffer.extend([TensorDict({"x": value}, []) for value in values])
    assert buffer.describe()["x"].first_nonfinite == buffer.verify().warnings[0].slot == 1


def test_describe_of_bfloat16_and_of_views_of_conjugates() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(2))
    buffer.extend(TensorDict({"b": torch.tensor([1.5, torch.nan], dtype=torch.bfloat16)}, [2]))
    assert buffer.describe()["b"][6:9] == (1.5, 1, 1) and buffer.describe()["b"].dtype == torch.bfloat16
    objects = ReplayBuffer(storage=ListStorage(2))
    objects.extend([torch.tensor([1j, torch.nan]).conj(), torch.eye(2).to_sparse()])
    assert objects.describe()["tensor"].num_nan == 1 and objects.describe()["tensor"].rows == 2


def test_descriptions_of_empty_buffers_are_empty() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    assert buffer.describe() == {} and str(buffer.describe()).startswith("key")
    buffer.extend(TensorDict({"x": torch.ones(3)}, [3]))
    buffer.empty()
    found = buffer.describe()["x"]
    assert found.rows == 0 and found.dtype == torch.float32 and found.mean is None and not found.constant


def test_descriptions_show_one_moment_while_a_writer_runs() -> None:
    # Each write stores rows of one number, so the two columns always hold the same values.
    buffer, stop = ReplayBuffer(storage=LazyTensorStorage(3000)), threading.Event()
    write(buffer, 0)

    def run() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            write(buffer, number)

    writer = threading.Thread(target=run)
    writer.start()
    try:
        for _ in range(50):
            first, second = buffer.describe().values()
            assert first == second
    finally:
        stop.set()
        writer.join()


def write(buffer: ReplayBuffer, number: int) -> None:
    rows = torch.full((700,), float(number))
    buffer.extend(TensorDict({"a": rows, "b": rows}, [700]))


# ------------------------------------------------------------------ episodes
class Step(NamedTuple):
    """One step of a history."""

    id: int
    number: int
    reward: float
    terminated: bool
    truncated: bool


def histories(rng: random.Random, streams: int, count: int, cuts: bool) -> list[list[Step]]:
    """Return the steps of each stream. With `cuts` a truncation may leave the trajectory unfinished."""
    found = []
    for stream in range(streams):
        steps, own, number = [], stream, 0
        for _ in range(count):
            end = rng.random()
            step = Step(own, number, float(rng.randint(-5, 5)), end < 0.15, 0.1 < end < 0.3)
            steps.append(step)
            number += 1
            if step.terminated or (step.truncated and not (cuts and rng.random() < 0.5)):
                own, number = own + streams, 0
        found.append(steps)
    return found


def batch(streams: list[list[Step]]) -> TensorDict:
    """Return steps as data ``[streams, T]``."""

    def column(values: Any) -> torch.Tensor:
        return torch.tensor([[values(step) for step in steps] for steps in streams])

    here = column(lambda step: float(1000 * step.id + step.number))
    flags = {
        flag: column(lambda s, flag=flag: getattr(s, flag))[..., None] for flag in ("terminated", "truncated")
    }
    outcome = {"observation": here + 1, "reward": column(lambda step: [step.reward]), **flags}
    outcome["done"] = flags["terminated"] | flags["truncated"]
    ids = {"traj_ids": column(lambda step: step.id)}
    return TensorDict({"observation": here, "next": outcome, "collector": ids}, [*here.shape])


def runs(steps: list[Step], slots: list[Any], lost: bool) -> list[tuple[Any, ...]]:
    """Return first slot, length, return, complete, terminated, truncated and id of each run of a stream."""
    found: list[tuple[Any, ...]] = []
    begin = 0
    for at, step in enumerate(steps):
        ended = step.terminated or step.truncated
        if ended or at + 1 == len(steps) or steps[at + 1].id != step.id:
            part = steps[begin : at + 1]
            complete = ended and part[0].number == 0 and not (lost and begin == 0)
            total = sum(one.reward for one in part)
            found.append((slots[begin], len(part), total, complete, step.terminated, step.truncated, step.id))
            begin = at + 1
    return found


def listed(buffer: ReplayBuffer) -> list[tuple[Any, ...]]:
    found = buffer.episodes()
    fields = (
        found.first,
        found.length,
        found.returns["reward"],
        found.complete,
        found.terminated,
        found.truncated,
    )
    assert len(found) == len(found.length)
    rows = zip(*(field.tolist() for field in (*fields, found.ids)), strict=True)
    return [tuple(tuple(v) if isinstance(v, list) else v for v in row) for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("streams", [0, 1, 3])
def test_episodes_agree_with_a_loop_over_the_history(streams: int, cuts: bool, seed: int) -> None:
    rng = random.Random(seed)
    capacity, count = rng.randint(5, 40), rng.randint(1, 100)
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity * max(streams, 1), ndim=2 if streams else 1))
    steps = histories(rng, max(streams, 1), count, cuts)
    at = 0
    while at < count:
        stop = min(at + rng.randint(1, 12), count)
        data = batch([one[at:stop] for one in steps])
        buffer.extend(data if streams else data[0])
        at = stop
    begin = max(0, count - capacity)
    expected = []
    for stream, one in enumerate(steps):
        slots = [(step % capacity, stream) if streams else step % capacity for step in range(begin, count)]
        expected += runs(one[begin:], slots, begin > 0)
    assert listed(buffer) == expected
    assert buffer.verify().ok


@pytest.mark.parametrize("seed", SEEDS)
def test_fragments_that_workers_write_in_turn_are_not_complete(seed: int) -> None:
    rng = random.Random(seed)
    steps = histories(rng, 3, 40, False)
    written: list[Step] = []
    buffer, at = ReplayBuffer(storage=LazyTensorStorage(200)), [0, 0, 0]
    while min(at) < 40:
        worker, count = rng.randrange(3), rng.randint(1, 9)
        part = steps[worker][at[worker] : at[worker] + count]
        if part:
            buffer.extend(batch([part])[0])
            written += part
            at[worker] += count
    assert listed(buffer) == runs(written, [*range(len(written))], False)


def test_episodes_follow_the_keys_and_the_rule_of_the_sampler() -> None:
    steps = TensorDict({"level": torch.tensor([0, 0, 1, 1, 1]), "next": {"reward": torch.ones(5)}}, [5])
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=1, traj_key="level"))
    buffer.extend(steps)
    found = buffer.episodes()
    assert found.length.tolist() == [2, 3] and found.ids is not None and found.ids.tolist() == [0, 1]
    assert (found.complete, found.terminated, found.truncated) == (None, None, None)
    plain = ReplayBuffer(storage=buffer.storage)
    with pytest.raises(MissingKeyError, match="where trajectories end"):
        plain.episodes()


def test_a_flag_that_was_changed_through_a_view_counts() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=1), batch_size=1)
    buffer.extend(TensorDict({"next": {"reward": torch.ones(5), "done": torch.zeros(5, 1).bool()}}, [5]))
    buffer.sample()
    assert buffer.episodes().length.tolist() == [5]
    buffer[:]["next", "done"][1] = True
    assert buffer.episodes().length.tolist() == [2, 3]


def test_rewards_of_groups_are_added_for_each_agent() -> None:
    done = torch.tensor([False, True, False])[:, None]
    group = TensorDict({"reward": torch.arange(6.0).view(3, 2, 1)}, [3, 2])
    steps = TensorDict({"next": {"agents": group, "reward": torch.ones(3, 1), "done": done}}, [3])
    buffer = ReplayBuffer(storage=LazyTensorStorage(9))
    buffer.extend(steps)
    found = buffer.episodes()
    assert found.returns["agents", "reward"].tolist() == [[[2.0], [4.0]], [[4.0], [5.0]]]
    assert found.returns["reward"].tolist() == [2.0, 1.0] and found.complete.tolist() == [True, False]
    assert "return of ('agents', 'reward')" in str(found) and "(2, 4)" in str(found)


def test_padding_is_no_episode() -> None:
    data = batch(histories(random.Random(0), 1, 8, False))
    data["collector", "mask"] = torch.arange(8)[None] < 5
    buffer = ReplayBuffer(storage=LazyTensorStorage(9, ndim=2))
    buffer.extend(data)
    assert int(buffer.episodes().length.sum()) == 5


def test_flags_of_later_steps_do_not_end_n_step_rows() -> None:
    done = torch.tensor([False, True, True])[:, None]
    rows = TensorDict({"next": {"reward": torch.ones(3), "terminated": done}}, [3])
    rows["steps_to_next_obs"] = torch.tensor([2, 2, 1])
    buffer = ReplayBuffer(storage=LazyTensorStorage(9))
    buffer.extend(rows)
    found = buffer.episodes()
    assert found.length.tolist() == [3] and found.terminated.tolist() == [True]
    buffer = ReplayBuffer(storage=LazyTensorStorage(9))
    buffer.extend(rows[:2])
    assert buffer.episodes().terminated.tolist() == buffer.episodes().complete.tolist() == [False]


def test_storages_without_order_or_columns_have_no_episodes() -> None:
    for storage, writer in ((ListStorage(5), None), (LazyTensorStorage(5), TensorDictMaxValueWriter())):
        buffer = ReplayBuffer(storage=storage, writer=writer)
        buffer.extend(batch(histories(random.Random(1), 1, 9, False))[0].set("td_error", torch.arange(9.0)))
        with pytest.raises(UnsupportedError, match="episodes: .*; use a"):
            buffer.episodes()


@pytest.mark.parametrize("ndim", [1, 2])
def test_an_empty_buffer_has_no_episodes(ndim: int) -> None:
    found = ReplayBuffer(storage=LazyTensorStorage(5, ndim=ndim)).episodes()
    assert len(found) == 0 and found.first.shape[0] == 0 and found.returns == {} and "length" in str(found)


def test_trajectories_written_after_empty_are_complete() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    for _ in range(2):
        buffer.empty()
        buffer.extend(batch([[Step(7, number, 1.0, number == 2, False) for number in range(3)]])[0])
        found = buffer.episodes().complete
        assert found is not None and found.tolist() == [True]


def test_a_complete_trajectory_stays_complete_if_its_rows_are_replaced() -> None:
    done = torch.tensor([[False], [True]])
    steps = TensorDict({"x": torch.zeros(2), "next": {"done": done}}, [2])
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(steps)
    for _ in range(2):
        buffer[0] = steps[0]
    assert buffer.episodes().complete.tolist() == [True]


def test_trajectories_without_ids_or_overwritten_ones_begin_at_ends() -> None:
    done = torch.tensor([0, 1, 0, 0, 1, 0])[:, None].bool()
    rows = TensorDict({"next": {"reward": torch.ones(6), "done": done}}, [6])
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(rows[:5])
    assert str(buffer.episodes().complete) == "tensor([True, True])"
    buffer.extend(rows[5:])
    assert buffer.episodes().first.tolist() == [1, 2, 0]
    assert str(buffer.episodes().complete) == "tensor([False,  True, False])"


def test_a_fragment_whose_beginning_was_overwritten_is_not_complete() -> None:
    first = [Step(0, number, 1.0, False, number == 5) for number in range(6)]
    second = [Step(1, number, 1.0, False, False) for number in range(3)]
    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    for part in (first[:3], second, first[3:]):  # two workers that write in turn
        buffer.extend(batch([part])[0])
    found = buffer.episodes()
    assert found.truncated.tolist() == [False, True] and found.complete.tolist() == [False, False]


def test_storages_of_users_are_described() -> None:
    class Own(Storage):
        def __init__(self) -> None:
            super().__init__(5)
            self.rows: dict[int, TensorDict] = {}

        def get(self, index: Any) -> Any:
            rows = [self.rows[int(at)] for at in torch.as_tensor(index).reshape(-1)]
            return torch.stack(rows)

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            at = torch.as_tensor(cursor).reshape(-1).tolist()
            self.rows.update(zip(at, data if len(at) > 1 else [data], strict=True))

    buffer = ReplayBuffer(storage=Own())
    buffer.extend(TensorDict({"x": torch.tensor([1.0, torch.nan, 4.0])}, [3]))
    found = buffer.describe()["x"]
    assert (found.rows, found.mean, found.num_nan, found.first_nonfinite) == (3, 2.5, 1, 1)
    assert [one.rule for one in buffer.verify().warnings] == ["not finite"]


def test_long_lists_are_shortened() -> None:
    done = torch.ones(100, 1, dtype=torch.bool)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    buffer.extend(TensorDict({"next": {"reward": torch.ones(100), "done": done}}, [100]))
    lines = str(buffer.episodes()).splitlines()
    assert len(lines) == 22 and lines[11].split()[0] == "..." and lines[-1].split()[0] == "99"
    assert buffer.episodes()._repr_html_().count("<tr>") == 22


# ------------------------------------------------------------------ showing
def test_ensembles_describe_each_member() -> None:
    members = [ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
    for number, member in enumerate(members):
        member.extend(batch(histories(random.Random(number), 1, 3 + number, False))[0])
    ensemble = ReplayBufferEnsemble(*members)
    assert [found["observation"].rows for found in ensemble.describe()] == [3, 4]
    assert [int(found.length.sum()) for found in ensemble.episodes()] == [3, 4]
    assert [found.rows for found in ensemble.verify()] == [3, 4]
    assert "<table" in ensemble._repr_html_()


def test_markup_in_keys_is_escaped() -> None:
    key = "<script>alert('x')</script>"
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(
        TensorDict({key: torch.tensor([1.0, torch.nan]), "next": {"done": torch.ones(2, 1).bool()}}, [2])
    )
    shown = [buffer, buffer.describe(), buffer.verify(), buffer.episodes(), buffer.stats()]
    for html in (one._repr_html_() for one in shown):
        assert html.startswith("<table") and html.endswith("</table>") and "<script" not in html
    assert "&lt;script&gt;" in buffer._repr_html_() and "&lt;script&gt;" in buffer.describe()._repr_html_()


def test_a_repr_reads_no_record() -> None:
    class Unreadable(ListStorage):
        def get(self, index: Any) -> Any:
            raise AssertionError

        def fetch(self, slots: Any, paths: Any = None) -> Any:
            raise AssertionError

    assert issubclass(Unreadable, Storage)
    buffer = ReplayBuffer(storage=Unreadable(5), batch_size=3)
    buffer.extend([1, 2])
    assert repr(buffer).splitlines() == [
        "ReplayBuffer(",
        "    storage=Unreadable(2 of 5 objects),",
        "    sampler=RandomSampler(),",
        "    writer=RoundRobinWriter(),",
        "    batch_size=3)",
    ]
    assert "Unreadable(2 of 5 objects)" in buffer._repr_html_()


def test_a_trajectory_whose_beginning_was_never_stored_is_not_complete() -> None:
    step = torch.arange(100)
    flags = {"reward": torch.ones(100, 1), "done": (step % 25 == 24)[:, None]}
    rows = TensorDict({"x": step[:, None], "next": flags}, [100])
    buffer = ReplayBuffer(storage=LazyTensorStorage(40))
    buffer.extend(rows)  # leaves the first 60 steps out
    found = buffer.episodes()
    assert found.length.tolist() == [15, 25] and found.complete.tolist() == [False, True]
    larger = ReplayBuffer(storage=LazyTensorStorage(80))
    larger.load_state_dict(buffer.state_dict())
    assert larger.episodes().complete.tolist() == [False, True]
