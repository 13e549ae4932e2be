"""A buffer in an actor behaves as the same local buffer; one actor serves all tests of this file."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl import Checkpoint
from gleanrl._process.serialization import PickledBatch
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from gleanrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RayReplayBuffer,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.ray.buffer import RemotePart
from gleanrl.data.replay_buffers.scheduler import LinearScheduler
from gleanrl.envs import GymEnv, RewardScaling
from gleanrl.errors import (
    CheckpointError,
    EmptyBufferError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)


def parts() -> dict[str, Any]:
    return {
        "storage": LazyTensorStorage(64),
        "sampler": PrioritizedSampler(64, 0.7, 0.5),
        "batch_size": 8,
        "prefetch": 4,
        "seed": 5,
    }


@pytest.fixture(scope="module")
def actor(ray_session):
    buffer = RemoteTensorDictReplayBuffer(**parts())
    yield buffer
    buffer.shutdown()


@pytest.fixture
def remote(actor):
    """Return the buffer in an initial state."""
    actor.set_storage(LazyTensorStorage(64))
    actor.set_sampler(PrioritizedSampler(64, 0.7, 0.5))
    actor.set_seed(5)
    return actor


@pytest.fixture
def local():
    return TensorDictReplayBuffer(**parts())


def rows(start: int, stop: int) -> TensorDict:
    x = torch.arange(start, stop)
    return TensorDict({"x": x, "next": {"image": x[:, None].expand(-1, 300).to(torch.uint8)}}, [stop - start])


def same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, tuple):
        for pair in zip(first, second, strict=True):
            same(*pair)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            same(first[key], second[key])
    elif isinstance(first, (torch.Tensor, TensorDict)):
        assert first.shape == second.shape and bool((first == second).all())
    else:
        assert first == second


def test_all_calls_return_the_results_of_a_local_buffer(remote, local, tmp_path):
    def learn(buffer: Any, start: int) -> Any:
        batches = []
        for _ in range(start, start + 3):
            batch = buffer.sample()
            batch["td_error"] = batch["x"].float() + 1
            buffer.update_tensordict_priority(batch)
            batches.append(batch)
        return tuple(batches)

    steps = [
        lambda buffer: buffer.extend(rows(0, 40)),
        lambda buffer: learn(buffer, 0),
        lambda buffer: buffer.add(rows(40, 41)[0]),
        lambda buffer: buffer.sample(return_info=True),
        lambda buffer: buffer.sample(keys=["x", ("next", "image")]),
        lambda buffer: buffer.update_priority(torch.tensor([3, 4]), torch.tensor([9.0, 0.1])),
        lambda buffer: (len(buffer), buffer.write_count, buffer.batch_size, buffer.dim_extend),
        lambda buffer: (buffer[3]["x"], buffer[2:5]["x"], buffer["x"], buffer["next", "image"]),
        lambda buffer: buffer.__setitem__(slice(0, 2), rows(90, 92)),
        lambda buffer: learn(buffer, 3),
        lambda buffer: buffer.generation(torch.arange(5)),
        lambda buffer: buffer.set_seed(11),
        lambda buffer: learn(buffer, 6),
        lambda buffer: buffer.verify().ok,
    ]
    for number, step in enumerate(steps):
        print(number)  # names the step if a comparison fails
        same(step(remote), step(local))
    # States and checkpoints can be exchanged in both directions, with prefetched batches.
    twin = TensorDictReplayBuffer(**parts())
    twin.load_state_dict(remote.state_dict())
    remote.dumps(tmp_path)
    same(learn(remote, 9), learn(twin, 9))
    remote.loads(tmp_path)
    twin.loads(tmp_path)
    same(learn(remote, 12), learn(twin, 12))
    for buffer in (remote, twin):
        buffer.empty()
    assert len(remote) == len(twin) == 0


def test_actor_buffer_is_saved_in_a_checkpoint(remote, local, tmp_path):
    model = torch.nn.Linear(2, 1)
    remote.extend(rows(0, 40))
    remote.sample()
    checkpoint = Checkpoint(buffer=remote, model=model)
    checkpoint.save(tmp_path / "a")
    same(remote.extend(rows(40, 50)), torch.arange(40, 50))  # no save blocks writers any more
    Checkpoint(buffer=local, model=model).load(tmp_path / "a")
    checkpoint.load(tmp_path / "a")
    assert len(remote) == len(local) == 40
    for _ in range(3):
        same(remote.sample()["x"], local.sample()["x"])
    local.set_sampler(RandomSampler())
    Checkpoint(buffer=local, model=model).save(tmp_path / "b")
    with torch.no_grad():
        model.weight.fill_(3.0)
    with pytest.raises(SchemaError, match="buffer"):
        checkpoint.load(tmp_path / "b")
    assert (model.weight == 3.0).all() and remote.verify().ok and len(remote) == 40


def test_a_state_that_was_checked_is_adopted_once(remote):
    remote.extend(rows(0, 5))
    first = remote.loading(remote.checkpointed_state())
    remote.extend(rows(5, 9))
    second = remote.loading(remote.checkpointed_state())
    with pytest.raises(UnsupportedError, match="another state was checked since"):
        first()
    second()
    remote.extend(rows(9, 12))
    second()
    assert len(remote) == 12


def test_relative_paths_refer_to_the_callers_folder(remote, local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remote.extend(rows(0, 9))
    remote.save("a")
    remote.empty()
    remote.load("a")
    assert remote.dump("a", wait=False).wait()
    local.load("a")
    assert len(remote) == len(local) == 9


def test_background_checkpoints_hold_the_moment_of_the_call(remote, local, tmp_path):
    remote.extend(rows(0, 40))
    dump = remote.dumps(tmp_path / "a", wait=False)
    remote.extend(rows(40, 50))
    assert dump.wait() and dump.done() and dump.wait(1.0)
    local.loads(tmp_path / "a")
    assert len(local) == 40 and len(remote) == 50
    (tmp_path / "file").touch()
    failing = remote.dumps(tmp_path / "file" / "b", wait=False)
    with pytest.raises(CheckpointError, match="expected a folder of checkpoints"):
        failing.wait()
    assert failing.done()


def test_epochs_equal_a_local_buffers(remote, local):
    for buffer in (remote, local):
        buffer.set_sampler(SamplerWithoutReplacement())
        buffer.set_seed(3)
        buffer.extend(rows(0, 20))
    for _ in range(2):
        epoch = [batch["x"] for batch in remote]
        same(tuple(epoch), tuple(batch["x"] for batch in local))
        assert sorted(torch.cat(epoch).tolist()) == list(range(20))
    assert [None if batch is None else len(batch) for batch in (remote.next() for _ in range(5))] == [
        8,
        8,
        4,
        None,
        8,
    ]


def test_a_sample_is_the_callers_own(remote):
    remote.extend(rows(0, 8))
    first = remote.sample()
    first["next", "image"].zero_()
    first["x"].fill_(-1)
    assert (remote["x"] == torch.arange(8)).all()
    view = remote[2:4]  # a copy, unlike a local buffer's view
    view["x"].zero_()
    assert (remote["x"] == torch.arange(8)).all()


def test_large_batches_come_one_by_one(remote, local):
    for buffer in (remote, local):
        x = torch.arange(12)
        buffer.extend(TensorDict({"x": x, "image": x[:, None].expand(-1, 100_000).to(torch.uint8)}, [12]))
    for _ in range(8):
        found = remote.sample()
        same(found, local.sample())
        found["image"].zero_()


def test_prefetched_batches_that_are_overwritten_are_not_served(remote):
    remote.extend(rows(0, 64))
    remote.sample()
    remote.extend(rows(100, 164))
    assert min(remote.sample()["x"].tolist()) >= 100


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, None])
def test_samples_equal_a_local_buffers_after_prefetched_rows_are_overwritten(remote, local, sampler):
    for buffer in (remote, local):
        if sampler is not None:
            buffer.set_sampler(sampler())
            buffer.set_seed(5)
        buffer.extend(rows(0, 64))
    for turn in range(30):
        same(remote.sample(), local.sample())
        if turn % 2:
            start = 100 * turn
            for buffer in (remote, local):
                buffer.extend(rows(start, start + 9))


def test_late_priorities_are_dropped_and_counted(remote):
    remote.extend(rows(0, 64))
    batch = remote.sample()
    batch["td_error"] = torch.ones(8)
    remote.extend(rows(100, 164))
    dropped = remote.stats().priorities_dropped
    remote.update_tensordict_priority(batch)
    assert remote.stats().priorities_dropped == dropped + len(batch["index"].unique())


def test_errors_of_the_actor_reach_the_caller(remote):
    with pytest.raises(EmptyBufferError) as caught:
        remote.sample()
    assert type(caught.value) is EmptyBufferError and "Host.ahead" in str(caught.value.__cause__)
    remote.extend(rows(0, 8))
    remote.sample()  # the earlier error on its way is discarded
    for error, call in [
        (InvalidArgumentError, lambda: remote.extend(3)),
        (SchemaError, lambda: remote.extend(rows(0, 3).exclude("x"))),
        (IndexRangeError, lambda: remote[99]),
        (InvalidTypeError, lambda: remote.sample(keys=[3])),
        (InvalidArgumentError, lambda: remote.update_priority(0, -1.0)),
        (AttributeError, lambda: remote.nothing),
        (AttributeError, lambda: remote._nothing),
        (AttributeError, lambda: remote.sampler.nothing),
    ]:
        with pytest.raises(error):
            call()
    assert len(remote) == 8 and not hasattr(remote, "nothing")
    with pytest.warns(UserWarning, match="batch_size=3 differs"):
        assert len(remote.sample(3)) == 3


def test_an_actor_describes_its_records(remote):
    data = rows(0, 6)
    data["next"] = TensorDict({"reward": torch.ones(6), "done": torch.arange(6)[:, None] % 3 == 2}, [6])
    remote.extend(data)
    local = ReplayBuffer(storage=LazyTensorStorage(len(remote)))
    local.extend(data)
    without_size = [
        {key: one._replace(megabytes=0) for key, one in rb.describe().items()} for rb in (remote, local)
    ]
    assert without_size[0] == without_size[1] and str(remote.describe()).startswith("key")
    assert str(remote.episodes()) == str(local.episodes()) and len(remote.episodes()) == 2
    assert "<table" in remote._repr_html_() and "reward" in remote._repr_html_()


def test_parts_stay_and_are_reached(remote):
    remote.sampler.beta = 0.9
    assert remote.sampler.beta == 0.9 and "PrioritizedSampler" in repr(remote.sampler)
    schedule = LinearScheduler(remote, "beta", final_value=1.0, num_steps=1)
    schedule.step()
    assert remote.sampler.beta == 1.0
    remote.extend(rows(0, 10))
    storage = remote.storage
    assert len(storage) == 10 and storage.ndim == 1 and storage.get(3)["x"] == 3 and storage[3]["x"] == 3
    assert remote.set_sampler(RandomSampler()) is None and not len(remote.transforms)
    remote.priority_key = "other"
    assert remote.priority_key == "other"
    remote.priority_key = "td_error"
    with pytest.raises(InvalidArgumentError, match="of this process"):
        ReplayBufferEnsemble(remote, remote)


class Narrow(ReplayBuffer):
    """Takes no keyword in `extend`, and has a callable attribute."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.score = abs
        self.sampler.score = abs

    def extend(self, data: Any) -> Any:
        return super().extend(data)


def test_methods_and_attributes_of_a_users_class_are_reached(ray_session):
    remote = RayReplayBuffer(replay_buffer_cls=Narrow, storage=LazyTensorStorage(8))
    assert remote.extend(rows(0, 4)).tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="update_priority"):
        remote.extend(rows(0, 4), update_priority=True)
    assert remote.score(-3) == remote.sampler.score(-3) == 3
    assert type(remote.writer.storage) is RemotePart and len(remote.writer.storage) == 4
    remote.shutdown()


def test_both_names_of_transforms_reach_the_actors(ray_session):
    remote = RayReplayBuffer(
        storage=LazyTensorStorage(8), transform=RewardScaling(0.0, 2.0, in_keys=["x"]), batch_size=2
    )
    for transforms in (remote.transform, remote.transforms):
        assert type(transforms) is RemotePart and len(transforms) == 1
        assert type(transforms[0]) is RewardScaling
        assert (transforms(rows(0, 4).float())["x"] == 2 * torch.arange(4)).all()
    remote.shutdown()


def test_collector_writes_into_the_actor(remote):
    seen = []
    collector = SyncDataCollector(
        GymEnv("CartPole-v1"),
        frames_per_batch=20,
        total_frames=60,
        replay_buffer=remote,
        postproc=lambda batch: seen.append(batch.clone()) or batch,
    )
    collector.start()
    while collector.is_running():
        if len(remote):
            assert remote.sample().batch_size == (8,)
    collector.shutdown()
    assert (remote["observation"] == torch.cat(seen)["observation"]).all() and len(remote) == 60


@pytest.mark.parametrize(
    ("kind", "options"), [(MultiSyncDataCollector, {"cat_results": 0}), (MultiaSyncDataCollector, {})]
)
def test_collectors_with_workers_write_into_the_actor(remote, kind, options):
    making = [partial(GymEnv, "CartPole-v1")] * 2
    collector = kind(making, frames_per_batch=20, total_frames=60, replay_buffer=remote, **options)
    try:
        assert list(collector) == [None] * 3
        stats = collector.stats()
    finally:
        collector.shutdown()
    found = remote[:]
    assert stats.delivered == len(remote) == 60
    # Within a trajectory, each observation equals the next observation of the step before.
    for name in found["collector", "traj_ids"].unique():
        own = found[found["collector", "traj_ids"] == name]
        assert (own["observation"][1:] == own["next", "observation"][:-1]).all()


def test_other_processes_write_and_read(remote, ray_session):
    remote.extend(rows(0, 8))

    def work(buffer):  # sends the buffer itself
        assert isinstance(buffer, RayReplayBuffer)
        record = buffer[0]
        record["x"] = torch.tensor(77)
        buffer.add(record)
        buffer.shutdown()  # closes only this process's connection
        return record["x"]

    task = ray_session.remote(num_cpus=0)(work)
    assert ray_session.get(task.remote(remote)) == 77
    assert len(remote) == 9 and remote[8]["x"] == 77


def test_references_to_stored_batches_are_extended_in_the_actor(remote, ray_session):
    refs = [ray_session.put(PickledBatch(rows(start, start + 10))) for start in (0, 10)]
    for ref in refs:
        remote.extend(ref)
    assert remote["x"].tolist() == list(range(20))


@pytest.fixture
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_share_the_actor_buffer(remote, threads_take_turns_often):
    remote.extend(rows(0, 64))
    failed: list[BaseException] = []

    def sample() -> None:
        try:
            for _ in range(50):
                batch = remote.sample()
                assert (batch["x"] == batch["index"]).all()
                remote.update_priority(batch["index"], 1.0, batch["_generation"])
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=sample) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed


def test_invalid_options_are_refused():
    for error, options in [
        (InvalidArgumentError, {"remote_config": {"max_restarts": 2}}),
        (InvalidTypeError, {"replay_buffer_cls": list}),
        (InvalidTypeError, {"replay_buffer_cls": RayReplayBuffer}),
        (UnsupportedError, {"pin_memory": True}),
        (UnsupportedError, {"transport": "distributed"}),
    ]:
        with pytest.raises(error, match=next(iter(options))):
            RayReplayBuffer(**options)
    assert issubclass(RayReplayBuffer, ReplayBuffer)
    assert issubclass(RemoteTensorDictReplayBuffer, (TensorDictReplayBuffer, RayReplayBuffer))
