"""`verify` accepts right records, and reports the first place of each kind of mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
)


def steps(count: int, start: int = 0, episode: int = 4) -> TensorDict:
    t = torch.arange(start, start + count)
    truncated = ((t + 1) % episode == 0)[:, None]
    flags = {"terminated": torch.zeros_like(truncated), "truncated": truncated, "done": truncated.clone()}
    following = TensorDict({"observation": t.float() + 1, "reward": t[:, None].float(), **flags}, [count])
    return TensorDict(
        {"observation": t.float(), "next": following, "collector": {"traj_ids": t // episode}}, [count]
    )


def stored(data: TensorDict, capacity: int = 20, ndim: int = 1) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim))
    buffer.extend(data)
    return buffer


def found(buffer: ReplayBuffer) -> list[tuple[str, int, int]]:
    report = buffer.verify()
    assert report.ok is (not report.problems)
    return [(problem.rule, problem.rows, problem.slot) for problem in report.problems]


VALUES = ("not finite", "constant column")
ALL = ("schema", "generations", "flags", "next observation", "ids", *VALUES)


@pytest.mark.parametrize("count", [1, 18, 20, 53])
def test_right_records_pass_wrapped_or_not(count):
    report = stored(steps(count)).verify()
    assert report.ok and report.rows == min(count, 20) and report.checks == ALL
    assert report.trajectories == len({t // 4 for t in range(max(0, count - 20), count)})


def test_a_mistake_across_the_end_of_a_ring_is_found():
    data = steps(42)
    data["next", "observation"][39] += 1  # row 19 of the ring, and 40 is row 0
    data["collector", "traj_ids"][39] = 10
    data["next", "truncated"][39] = data["next", "done"][39] = False
    assert found(stored(data)) == [("next observation", 1, 19)]


def test_streams_are_looked_at_one_by_one():
    columns = [steps(6, start) for start in (0, 40, 80)]
    assert stored(torch.stack(columns), 30, ndim=2).verify().ok
    columns[1]["next", "observation"][2] += 1
    assert found(stored(torch.stack(columns), 30, ndim=2)) == [("next observation", 1, 2 * 3 + 1)]
    columns = [steps(6, start) for start in (0, 0, 80)]
    assert found(stored(torch.stack(columns), 30, ndim=2)) == [("ids", 2, 1)]


MISTAKES: dict[str, tuple[Callable[[TensorDict], object], list[tuple[str, int, int]]]] = {
    "an observation": (lambda d: d["observation"][6].add_(1), [("next observation", 1, 5)]),
    "two at trajectory ends": (lambda d: d["next", "observation"][[3, 7]].add_(1), []),
    "NaN on one side": (lambda d: d["observation"][2].fill_(torch.nan), [("next observation", 1, 1)]),
    "done alone": (lambda d: d["next", "done"][5].fill_(True), [("flags", 1, 5), ("ids", 1, 6)]),
    "an id that comes again": (lambda d: d["collector", "traj_ids"][8:].fill_(0), [("ids", 1, 8)]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found_at_its_first_place(mistake):
    change, expected = MISTAKES[mistake]
    data = steps(12)
    change(data)
    assert found(stored(data)) == expected


@pytest.mark.parametrize("keys", [{"traj_key": "level"}, {"end_key": ("next", "cut")}], ids=["ids", "ends"])
def test_trajectories_end_by_the_keys_of_the_sampler(keys):
    data = torch.cat([steps(3, start) for start in (0, 40, 80)]).select(
        "observation", ("next", "observation")
    )
    data["level"], data["next", "cut"] = torch.arange(9) // 3, torch.arange(9) % 3 == 2
    sampler = SliceSampler(slice_len=1, **keys)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    buffer.extend(data)
    assert buffer.verify().ok and buffer.verify().trajectories == 3
    buffer.storage.get(slice(None))["observation"][4] += 1
    assert found(buffer) == [("next observation", 1, 3)]
    assert found(stored(data)) == []  # nothing tells where trajectories end


def test_truncated_trajectory_that_continues_is_right():
    data = steps(12)
    data["collector", "traj_ids"] = torch.zeros(
        12, dtype=torch.int64
    )  # as after `set_truncated=True` of a collector
    assert stored(data).verify().ok
    data["observation"][4] += 0.5
    assert found(stored(data)) == [("ids", 1, 4)]
    data["next", "terminated"][7] = True
    data["next", "done"][7] = True
    assert found(stored(data)) == [("ids", 2, 4)]


def test_rows_that_are_no_steps_are_not_looked_at():
    data = torch.stack([steps(8)])
    data["collector", "mask"] = (torch.arange(8) < 5)[None]
    data["next", "observation"][0, 5:] = 7.0
    data["collector", "traj_ids"][0, 5:] = -1
    assert stored(data, ndim=2).verify().ok


def test_nan_on_both_sides_is_the_same():
    data = steps(8)
    data["observation"][2] = data["next", "observation"][1] = torch.nan
    assert stored(data).verify().ok


def test_rows_that_look_further_ahead_have_another_next_observation():
    data = steps(8)
    data["next", "observation"][0] += 1
    data["next", "done"][0] = data["next", "truncated"][0] = True  # flags of the later step
    assert not stored(data).verify().ok
    data["steps_to_next_obs"] = torch.ones(8, dtype=torch.int64)
    data["steps_to_next_obs"][0] = 2
    assert [rule for rule, *_ in found(stored(data))] == []


def test_verify_skips_checks_that_need_columns_or_order():
    objects = ReplayBuffer(storage=ListStorage(5))
    objects.extend([1, "two", None])
    assert objects.verify() == (3, None, ("schema", "generations", *VALUES), (), ())
    best = ReplayBuffer(storage=LazyTensorStorage(5), writer=TensorDictMaxValueWriter())
    best.extend(steps(12))
    report = best.verify()
    assert report.ok and report.trajectories is None and report.checks == (*ALL[:3], *VALUES)
    plain = ReplayBuffer(storage=LazyTensorStorage(5))
    plain.extend(torch.arange(3))
    assert plain.verify().checks == ("schema", "generations", "constant column")
    assert ReplayBuffer(storage=LazyTensorStorage(5)).verify().ok


NOT_FINITE = [("next", "reward"), ("group", "action"), "observation", ("logits", "deep")]


@pytest.mark.parametrize("key", NOT_FINITE)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("made", [LazyTensorStorage, ListStorage])
def test_values_that_are_not_finite_fail_in_rewards_and_actions_and_warn_elsewhere(made, key, value):
    data = TensorDict({key: torch.arange(12.0).view(6, 2), "other": torch.arange(6)}, [6])
    data[key][torch.tensor([2, 4]), 1] = value
    buffer = ReplayBuffer(storage=made(10))
    buffer.extend(data)
    report = buffer.verify()
    fails = key in NOT_FINITE[:2]
    assert report.ok is not fails and not (report.warnings if fails else report.problems)
    ((rule, rows, slot, message),) = report.problems if fails else report.warnings
    assert (rule, rows, slot) == ("not finite", 2, 2) and message.startswith(repr(key))


@pytest.mark.parametrize(("real", "bits"), [(np.float32, 0x7F800001), (np.float64, 0x7FF0000000000001)])
def test_signalling_nans_of_complex_columns_are_reported_without_a_warning(real, bits):
    """NumPy warns of such values in comparisons of complex numbers; warnings fail the tests."""
    parts = np.arange(12, dtype=real)
    parts.view(np.uint32 if real == np.float32 else np.uint64)[4] = bits
    values = torch.from_numpy(parts).view(6, 2)
    data = TensorDict({"action": torch.view_as_complex(values), "other": torch.arange(6)}, [6])
    data["observation"] = data["next", "observation"] = data["action"]
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(data)
    assert ("not finite", 1, 2) in [problem[:3] for problem in buffer.verify().problems]
    assert buffer.describe()["action"].num_nan == 1


def test_constant_columns_only_warn():
    data = steps(12)
    data["next", "reward"].fill_(1.0)
    data["goal"] = torch.tensor([1.0, torch.nan]).expand(12, 2)
    report = stored(data).verify()
    assert (
        report.ok
        and [one[:3] for one in report.warnings if one.rule == "constant column"]
        == [("constant column", 12, 0)] * 2
    )
    assert {one.message.split(" is")[0] for one in report.warnings if one.rule == "constant column"} == {
        "('next', 'reward')",
        "'goal'",
    }
    assert not stored(data[:1].exclude("goal")).verify().warnings  # one row tells nothing
    assert "warnings" not in repr(stored(steps(12)).verify()) and "warnings=(" in repr(report)
    shown = [line for line in repr(report).splitlines() if line.startswith(" " * 8 + "AuditProblem(")]
    assert len(shown) == len(report.warnings) == report._repr_html_().count("AuditProblem(") > 2


def test_column_without_values_is_not_constant():
    data = steps(12)
    data["nothing"] = torch.zeros(12, 0)
    buffer = stored(data)
    assert buffer.verify().ok and not buffer.verify().warnings and not buffer.describe()["nothing"].constant


def test_flags_and_ids_of_collectors_may_be_constant():
    data = steps(4, episode=9)
    data["is_init"] = torch.zeros(4, 1, dtype=torch.bool)
    data["collector", "mask"] = torch.ones(4, dtype=torch.bool)
    assert not stored(data).verify().warnings


def test_contradictory_generations_are_found():
    buffer = stored(steps(6))
    buffer.storage.generations.counters[3] = 0
    ((rule, rows, slot, message),) = buffer.verify().problems
    assert (rule, rows, slot) == ("schema", 1, 0) and "never written" in message
