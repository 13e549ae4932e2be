"""`replay_buffer=` of collectors with workers gives each kind of storage exact, private rows."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.collectors import MultiSyncDataCollector
from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.envs import ParallelEnv
from gleanrl.envs.transforms import RewardScaling
from tests.collectors.workers.crews import KINDS, Stream, collecting
from tests.contract.helpers import IDS, snapshot
from tests.contract.multi import NEVER, SCRIPT, check_workers, makers
from tests.contract.test_reference_documents import FOLDER, document, first_doctest, run

BOTH = pytest.mark.parametrize("kind", KINDS)
STORAGES = {
    "tensor": lambda size, ndim, folder: LazyTensorStorage(size, ndim=ndim),
    "memmap": lambda size, ndim, folder: LazyMemmapStorage(size, ndim=ndim, scratch_dir=str(folder)),
}


def check_records(data: Any) -> None:
    """Check each stored record: its next row follows, and reward and flags match the script."""
    data = data.reshape(-1)
    roots, nexts = data["observation"].long(), data["next", "observation"].long()
    assert torch.equal(nexts, roots + torch.tensor([0, 0, 1]))
    flags = [SCRIPT.flags(*place) for place in nexts.tolist()]
    assert data["next", "terminated"].squeeze(-1).tolist() == [flag[0] for flag in flags]
    assert data["next", "reward"].squeeze(-1).tolist() == [SCRIPT.reward(*place) for place in nexts.tolist()]


def whole(data: Any) -> set[tuple[int, ...]]:
    return {tuple(row) for row in data["observation"].reshape(-1, 3).long().tolist()}


@pytest.mark.parametrize(
    ("kind", "env", "cat", "storage"),
    [
        ("sync", "single", "stack", "memmap"),
        ("sync", "single", 0, "tensor"),
        ("sync", "batched", "stack", "tensor"),
        ("sync", "batched", -1, "memmap"),
        ("async", "single", None, "memmap"),
        ("async", "batched", None, "tensor"),
    ],
)
def test_columns_hold_exact_rows(kind: str, storage: str, env: str, cat: Any, tmp_path: Path) -> None:
    ndim = (env == "batched") + (cat == "stack") + 1
    rb = ReplayBuffer(storage=STORAGES[storage](480, ndim, tmp_path), batch_size=16)
    kwargs = {"cat_results": cat} if kind == "sync" else {}
    with collecting(
        kind, makers(2, kind=env), frames=48, total_frames=480, replay_buffer=rb, **kwargs
    ) as collector:
        assert list(collector) == [None] * 10
        assert len(rb) == 480 == collector.stats().delivered
    held = rb[:]
    check_records(held)
    assert len(whole(held)) == 480, "every frame once"
    if kind == "sync" and cat == "stack":
        check_workers([held.reshape(2, -1, held.shape[-1]) if env == "batched" else held], 2, "stack")
    check_records(rb.sample())


@pytest.mark.parametrize(("kind", "env"), [("sync", "single"), ("async", "batched")])
def test_list_storage_keeps_private_records(kind: str, env: str) -> None:
    rb = ReplayBuffer(storage=ListStorage(1000), batch_size=4, collate_fn=torch.stack)
    with collecting(kind, makers(2, kind=env), frames=24, total_frames=120, replay_buffer=rb) as collector:
        frozen = []
        while True:
            before = len(rb)
            if collector.next() is None and len(rb) == before:
                break
            frozen += [snapshot(rb[i]) for i in range(before, len(rb))]
            for i in range(len(rb)):
                for key, value in frozen[i].items():
                    stored = rb[i][key]
                    assert torch.equal(stored, value) and not stored.is_shared()
    places = set()
    for i in range(len(rb)):
        check_records(rb[i].reshape(-1) if rb[i].ndim else rb[i].unsqueeze(0))
        places |= whole(rb[i])
    assert len(places) == 120


@pytest.mark.parametrize("kind", ["async"])
def test_prioritized_buffer_gets_exact_rows(kind: str) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=LazyTensorStorage(200), batch_size=16, priority_key="td_error"
    )
    cat = {"cat_results": 0} if kind == "sync" else {}
    with collecting(kind, makers(2), frames=20, total_frames=200, replay_buffer=rb, **cat) as collector:
        for _ in collector:
            sample = rb.sample()
            check_records(sample)
            sample["td_error"] = sample["observation"][..., 2] + 1
            rb.update_tensordict_priority(sample)
    assert len(rb) == 200
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200),
        transform=RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]),
        batch_size=16,
    )
    with collecting(kind, makers(2), frames=20, total_frames=200, replay_buffer=rb, **cat) as collector:
        for _ in collector:
            sample = rb.sample()
            expected = [
                SCRIPT.reward(*place) * 2 + 1 for place in sample["next", "observation"].long().tolist()
            ]
            assert torch.allclose(sample["next", "reward"].squeeze(-1), torch.tensor(expected))


@pytest.mark.parametrize("kind", ["sync"])
def test_flattened_by_a_callable_on_the_way_in(kind: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=lambda data: data.reshape(-1), batch_size=8)
    with collecting(
        kind, makers(2, kind="batched"), frames=20, total_frames=100, replay_buffer=rb
    ) as collector:
        list(collector)
    held = rb[:]
    assert held.batch_size == (100,) and len(whole(held)) == 100
    check_records(held)


@pytest.mark.parametrize("kind", ["async"])
def test_step_by_step_and_post_processed(kind: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    cat = {"cat_results": 0} if kind == "sync" else {}
    with collecting(
        kind, makers(2), frames=20, total_frames=60, replay_buffer=rb, extend_buffer=False, **cat
    ) as collector:
        list(collector)
    assert len(rb) == 60
    check_records(rb[:])
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)

    def postproc(batch: Any) -> Any:
        return batch.set("twice", batch["observation"] * 2)

    with collecting(
        kind, makers(2), frames=20, total_frames=60, replay_buffer=rb, postproc=postproc, **cat
    ) as collector:
        list(collector)
    assert torch.equal(rb[:]["twice"], rb[:]["observation"] * 2)


@pytest.mark.parametrize("kind", ["sync"])
def test_a_full_ring_keeps_the_newest(kind: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(36), batch_size=8)
    cat = {"cat_results": 0} if kind == "sync" else {}
    delivered: list[Any] = []
    with collecting(
        kind,
        makers(2),
        frames=24,
        total_frames=120,
        replay_buffer=rb,
        post_collect_hook=lambda batch: delivered.append(batch.clone()),
        **cat,
    ) as collector:
        list(collector)
    assert len(rb) == 36 and whole(rb[:]) == whole(torch.cat(delivered)[-36:])


@pytest.mark.parametrize("kind", ["sync"])
def test_slices_are_of_one_trajectory(kind: str) -> None:
    ndim = 2 if kind == "sync" else 1
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(400, ndim=ndim),
        sampler=SliceSampler(slice_len=4, traj_key=IDS, strict_length=True),
        batch_size=32,
    )
    with collecting(
        kind, makers(3, NEVER), frames=60, total_frames=600, replay_buffer=rb, max_frames_per_traj=9
    ) as collector:
        for _ in collector:
            slices = rb.sample().reshape(8, 4)
            steps, ids = slices["observation"], slices[IDS]
            assert (ids == ids[:, :1]).all()
            assert torch.equal(steps[:, 1:], steps[:, :-1] + torch.tensor([0.0, 0.0, 1.0]))


@BOTH
def test_preempted_steps_are_not_stored(kind: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    cat = {"cat_results": -1} if kind == "sync" else {}
    with collecting(
        kind, makers(3), frames=60, total_frames=300, replay_buffer=rb, preemptive_threshold=0.3, **cat
    ) as collector:
        list(collector)
        delivered = collector.stats().delivered
    assert len(rb) == delivered >= 300
    check_records(rb[:])
    assert (rb[:][IDS] >= 0).all()


reference = [
    pytest.mark.reference,
    pytest.mark.skipif(
        not FOLDER, reason="GLEANRL_REFERENCE does not name the folder of the reference documents"
    ),
]
BLOCKS = ["MultiSyncDataCollector + regular env", "MultiSyncDataCollector + parallel env"]


def block(number: int) -> str:
    text = document("003")
    end = BLOCKS[number + 1] if number + 1 < len(BLOCKS) else "Using replay buffers"
    return first_doctest(text[text.index(BLOCKS[number]) : text.index(end)])


@reference[0]
@reference[1]
@pytest.mark.parametrize("number", [0, 1])
def test_blocks_of_the_reference_run(number: int) -> None:
    """Document 003: both blocks with MultiSyncDataCollector. The endless loops end after three batches."""
    code = block(number)
    assert f"LazyTensorStorage(N, ndim={number + 2})" in code and 'cat_results="stack"' in code
    batches: list[Any] = []

    def collector(*args: Any, **kwargs: Any) -> Any:
        made = MultiSyncDataCollector(*args, **kwargs)
        for batch in itertools.islice(made, 3):
            batches.append(batch)
            yield batch
        made.shutdown()

    names: dict[str, Any] = {
        "N": 240,
        "make_env": Stream(0, SCRIPT),
        "policy": None,
        "ParallelEnv": ParallelEnv,
        "ReplayBuffer": ReplayBuffer,
        "LazyTensorStorage": LazyTensorStorage,
        "SliceSampler": SliceSampler,
        "MultiSyncDataCollector": collector,
    }
    run(code, names)
    assert [tuple(batch.shape) for batch in batches] == [((4, 60), (4, 2, 30))[number]] * 3
    memory = names["memory"]
    assert len(memory) == 240, "the last batch of 240 replaced the others"
    assert memory[:].shape == batches[-1].shape
    assert torch.equal(memory[:]["observation"], batches[-1]["observation"])
    for _ in range(20):
        slices = memory.sample(8).reshape(4, 2)
        assert torch.equal(slices[IDS][:, 0], slices[IDS][:, 1])
        steps = slices["observation"][..., 2]
        assert torch.equal(steps[:, 0] + 1, steps[:, 1])


@reference[0]
@reference[1]
def test_scripts_without_a_main_guard_run(tmp_path: Path) -> None:
    """Both blocks run unchanged as a script, because workers don't import the main module again."""
    code = "\nshow()\n".join(block(number) for number in (0, 1))
    assert code.count("total_frames=-1") == 2
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\n"
        "from gleanrl.collectors import MultiSyncDataCollector\n"
        "from gleanrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler\n"
        "from gleanrl.envs import GymEnv, ParallelEnv\n"
        "N, policy = 240, None\n"
        "def make_env():\n    return GymEnv('CartPole-v1')\n"
        "def show():\n    print(len(memory), tuple(memory.sample(8).shape))\n"
        + code.replace("total_frames=-1", "total_frames=3 * N")
        + "\nshow()\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines() == ["once", *["240 (8,)"] * 2]


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = MultiSyncDataCollector(makers(2), None, frames_per_batch=12, total_frames=24)
        list(collector)
