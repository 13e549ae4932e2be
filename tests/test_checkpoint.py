"""A `Checkpoint` saves and loads all parts of a training in one commit."""

from __future__ import annotations

import io
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import gleanrl
from gleanrl import Checkpoint
from gleanrl._checkpoint.folder import Folder
from gleanrl._state.rng import GENERATORS
from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictReplayBuffer,
)
from gleanrl.envs import GymEnv, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import RewardSum, StepCounter
from gleanrl.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    WorkerCrashedError,
)


class Training:
    """Collector, buffer, model, optimizer, scheduler and progress of one training."""

    def __init__(self, width: int = 3) -> None:
        self.net = nn.Linear(4, width)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        env = SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=9)))
        self.collector = SyncDataCollector(env, None, frames_per_batch=12)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(50), sampler=PrioritizedSampler(50, 0.7, 0.5), batch_size=4
        )
        self.progress: dict[str, Any] = {"updates": 0, "curve": []}
        self.checkpoint = Checkpoint(
            net=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            collector=self.collector,
            buffer=self.buffer,
            progress=self.progress,
        )

    def step(self) -> list[Any]:
        batch = self.collector.next()
        assert batch is not None
        self.buffer.extend(batch.reshape(-1))
        sample = self.buffer.sample()
        self.optimizer.zero_grad()
        (self.net(sample["observation"]) * torch.rand(())).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.buffer.update_priority(sample["index"], torch.rand(4))
        self.progress["updates"] += 1
        self.progress["curve"].append((float("nan"), 1))
        return [batch["observation"], sample["observation"], self.net.weight.detach().clone(), torch.rand(2)]


@pytest.fixture(autouse=True)
def as_before() -> Any:
    with GENERATORS.preserved():
        yield


def test_loaded_training_continues_as_the_saved_one(tmp_path: Path) -> None:
    first = Training()
    for _ in range(3):
        first.step()
    first.checkpoint.save(tmp_path)
    expected = [first.step() for _ in range(3)]
    torch.manual_seed(99)
    second = Training()
    second.checkpoint.load(tmp_path)
    assert second.progress["updates"] == 3 and second.progress["curve"][0][1] == 1
    for wanted in expected:
        for one, other in zip(wanted, second.step(), strict=True):
            assert torch.equal(one, other)


def test_load_restores_the_saved_training_in_place(tmp_path: Path) -> None:
    training = Training()
    training.step()
    training.checkpoint.save(tmp_path)
    expected = training.step()
    training.checkpoint.load(tmp_path)
    for one, other in zip(expected, training.step(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("late", ["net", "optimizer", "scheduler", "buffer", "collector", "progress"])
def test_load_of_a_mismatching_part_changes_nothing(tmp_path: Path, late: str) -> None:
    first = Training()
    first.step()
    state: dict[str, Any] = {**first.checkpoint.parts}

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: Any) -> None:
            pass

    state[late] = Broken() if late != "progress" else nn.Linear(1, 1)
    Checkpoint(**state).save(tmp_path)
    second = Training()
    second.step()
    weights, updates, random = (
        second.net.weight.detach().clone(),
        dict(second.progress),
        torch.get_rng_state(),
    )
    frames, learned = second.collector.stats(), second.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    if late == "scheduler":  # torch's schedulers accept any state
        second.scheduler.load_state_dict = _refuse  # type: ignore[method-assign]
    if late == "progress":
        with GENERATORS.preserved():
            second.checkpoint.parts["progress"] = nn.Linear(2, 2)
    with pytest.raises(
        (SchemaError, CorruptCheckpointError), match=f"Checkpoint: '{late}'|without a storage"
    ):
        second.checkpoint.load(tmp_path)
    assert torch.equal(second.net.weight, weights) and second.progress == updates
    assert repr(second.collector.stats()) == repr(frames) and len(second.buffer) == 12
    assert torch.equal(second.optimizer.state_dict()["state"][0]["exp_avg"], learned)
    assert torch.equal(torch.get_rng_state(), random)


def _refuse(state: Any) -> None:
    if "n" in state:
        raise ValueError("no scheduler's")


def test_parts_have_the_same_names(tmp_path: Path) -> None:
    Checkpoint(a=nn.Linear(1, 1), b={}).save(tmp_path)
    with pytest.raises(SchemaError, match=r"lacks \['c'\], and also holds \['b'\]"):
        Checkpoint(a=nn.Linear(1, 1), c={}).load(tmp_path)


def test_part_without_state_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="step: expected a collector"):
        Checkpoint(step=3)


def test_progress_that_is_no_plain_value_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"parts.*progress.*f.*function"):
        Checkpoint(progress={"f": _refuse}).save(tmp_path)
    with pytest.raises(IncompleteCheckpointError):
        Checkpoint(progress={}).load(tmp_path)


def test_checkpoints_of_other_kinds_are_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(torch.arange(3))
    buffer.dumps(tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match="got one of a ReplayBuffer"):
        Checkpoint(buffer=buffer).load(tmp_path)


@pytest.mark.parametrize("parts", [None, [], "x", 3])
def test_checkpoint_without_parts_is_refused(tmp_path: Path, parts: Any) -> None:
    Folder(tmp_path).commit("Checkpoint", {"generators": GENERATORS.state_dict(), "parts": parts})
    with pytest.raises(SchemaError, match="holds no parts"):
        Checkpoint(a={}).load(tmp_path)


def test_load_of_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    Checkpoint(model=model).save(tmp_path)
    data = next(tmp_path.glob("ckpt-*/*.bin"))
    data.chmod(0o600)
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    before = model.weight.detach().clone()
    with pytest.raises(CorruptCheckpointError):
        Checkpoint(model=model).load(tmp_path)
    assert torch.equal(model.weight, before)


def test_several_buffers_go_back_together(tmp_path: Path) -> None:
    def member(sampler: Any = None) -> ReplayBuffer:
        made = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=2)
        made.extend(TensorDict({"a": torch.rand(5)}, [5]))
        return made

    parts = {
        "one": member(SamplerWithoutReplacement()),
        "both": ReplayBufferEnsemble(member(), member(), batch_size=4),
    }
    checkpoint = Checkpoint(**parts)
    checkpoint.save(tmp_path)
    expected = [parts["one"].sample(), parts["both"].sample()]
    parts["one"].empty()
    checkpoint.load(tmp_path)
    found = [parts["one"].sample(), parts["both"].sample()]
    assert all((one == other).all() for one, other in zip(expected, found, strict=True))


def test_buffers_over_one_storage_need_the_reader_as_a_sampler(tmp_path: Path) -> None:
    def made() -> tuple[ReplayBuffer, ReplayBuffer]:
        storage = LazyTensorStorage(20)
        return ReplayBuffer(storage=storage, batch_size=4), ReplayBuffer(
            storage=storage, sampler=SamplerWithoutReplacement(), batch_size=4
        )

    writer, reader = made()
    with pytest.raises(InvalidArgumentError, match=r"reader: .*'writer'.*reader=buffer\.sampler"):
        Checkpoint(writer=writer, reader=reader)
    writer.extend(torch.arange(10))
    reader.sample()
    Checkpoint(writer=writer, draws=reader.sampler).save(tmp_path)
    other, others = made()
    Checkpoint(writer=other, draws=others.sampler).load(tmp_path)
    for _ in range(3):
        assert torch.equal(others.sample(), reader.sample())


def test_background_save_holds_the_state_at_the_call(tmp_path: Path) -> None:
    first = Training()
    first.step()
    dump = first.checkpoint.save(tmp_path, wait=False)
    expected = first.step()
    assert dump is not None and dump.wait()
    second = Training()
    second.checkpoint.load(tmp_path)
    assert second.progress["updates"] == 1
    for one, other in zip(expected, second.step(), strict=True):
        assert torch.equal(one, other)


def test_keep_limits_the_number_of_checkpoints(tmp_path: Path) -> None:
    checkpoint = Checkpoint(progress={"n": 1})
    for _ in range(4):
        checkpoint.save(tmp_path, keep=2)
    assert len(list(tmp_path.glob("ckpt-*"))) == 2


class Deadly(nn.Module):  # ends a process when it is loaded
    def __init__(self, process: int) -> None:
        super().__init__()
        self.process = process

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with suppress(ProcessLookupError):  # the second load undoes the first one
            os.kill(self.process, signal.SIGKILL)


def test_worker_lost_during_load_raises_and_restores_the_progress(tmp_path: Path) -> None:
    cart = partial(GymEnv, "CartPole-v1")
    collector = MultiSyncDataCollector([cart] * 2, frames_per_batch=30, total_frames=-1)
    progress = {"updates": 1}
    try:
        checkpoint = Checkpoint(collector=collector, deadly=Deadly(collector.processes[0]), progress=progress)
        checkpoint.save(tmp_path)
        progress["updates"] = 2
        with pytest.raises(WorkerCrashedError, match="SIGKILL"):
            checkpoint.load(tmp_path)
    finally:
        collector.shutdown()
    assert progress == {"updates": 2}


def drawn_by_a_program(saves: Any, sampler: Any, prefetch: int | None) -> list[Any]:
    """Run a program whose parts have no seed; call `saves` at several moments, and return its draws."""
    torch.manual_seed(4)
    collector = SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=8)
    collector.set_seed(4)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler(), batch_size=4, prefetch=prefetch
    )
    both = ReplayBufferEnsemble(buffer, batch_size=2, sample_from_all=False)
    found = []
    for _ in range(2):
        saves(collector=collector, buffer=buffer, both=both)
        batch = collector.next()
        assert batch is not None
        buffer.extend(batch)
        for source in (buffer, both, buffer):
            saves(collector=collector, buffer=buffer, both=both)
            found += [source.sample()["observation"], torch.rand(2)]
    return found


@pytest.mark.parametrize(
    ("sampler", "prefetch"),
    [
        (RandomSampler, None),
        (RandomSampler, 2),
        (SamplerWithoutReplacement, None),
        (lambda: PrioritizedSampler(50, 0.7, 0.5), 2),
        (lambda: SliceSampler(num_slices=2, strict_length=False), None),
    ],
)
def test_saving_does_not_change_later_draws(tmp_path: Path, sampler: Any, prefetch: int | None) -> None:
    def save(**parts: Any) -> None:
        Checkpoint(**parts).save(tmp_path / "all")
        parts["buffer"].dumps(tmp_path / "buffer")
        for part in parts.values():
            part.state_dict()

    expected = drawn_by_a_program(lambda **parts: None, sampler, prefetch)
    found = drawn_by_a_program(save, sampler, prefetch)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_sampler_takes_its_seed_after_a_save_when_it_would_have_without_one(tmp_path: Path) -> None:
    def made() -> tuple[ReplayBuffer, Checkpoint]:
        buffer: ReplayBuffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
        return buffer, Checkpoint(buffer=buffer)

    (buffer, checkpoint), (other, again) = made(), made()
    buffer.extend(TensorDict({"n": torch.arange(50)}, [50]))
    checkpoint.save(tmp_path)
    expected = torch.rand(2), buffer.sample()["n"], torch.rand(2)
    again.load(tmp_path)
    assert all(map(torch.equal, expected, (torch.rand(2), other.sample()["n"], torch.rand(2))))


def test_checkpoint_is_imported_lazily_from_the_package() -> None:
    assert gleanrl.Checkpoint is Checkpoint and repr(Checkpoint(a={})) == "Checkpoint(a=dict)"
    with pytest.raises(AttributeError, match="Nothing"):
        gleanrl.Nothing  # noqa: B018


def every_component() -> dict[str, Any]:
    training = Training()
    training.step()
    held = SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=7, trajs_per_batch=1)
    held.next()
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), RewardSum())
    env.rollout(3, break_when_any_done=False)
    storages = StorageEnsemble(LazyTensorStorage(3), LazyTensorStorage(3))
    buffer = training.buffer
    return {
        "collector": training.collector,
        "holding collector": held,
        "buffer": buffer,
        "storage": buffer.storage,
        "sampler": buffer.sampler,
        "writer": buffer.writer,
        "env": env,
        "transform": env.transform,
        "storages": storages,
        "generators": GENERATORS,
        "ensemble": ReplayBufferEnsemble(buffer, batch_size=2),
    }


def test_every_components_state_is_safe_to_load() -> None:
    for name, part in every_component().items():
        file = io.BytesIO()
        torch.save(part.state_dict(), file)
        file.seek(0)
        assert torch.load(file, weights_only=True) is not None, name
