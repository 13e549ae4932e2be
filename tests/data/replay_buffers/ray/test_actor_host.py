"""The actor's side, tested without an actor, undoes and repeats draws for clients as a local buffer does."""

from __future__ import annotations

import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl._process.serialization import PickledBatch
from gleanrl.data import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.ray.actor import BufferHost, BufferReply, Caller, Opened, Token
from gleanrl.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


def sent(data: Any) -> Any:
    return pickle.loads(pickle.dumps(PickledBatch(data), 5))


def rows(*values: int) -> TensorDict:
    return TensorDict({"x": torch.arange(*values)}, [len(range(*values))])


class Client:
    """A client that sends one request after the other."""

    def __init__(self, host: BufferHost, name: bytes = b"a") -> None:
        self.host, self.name, self.era, self.taken = host, name, 0, 0
        self.here: list[Any] = []
        self.stale: set[int] = set()
        self.depth: int | None = None

    @property
    def caller(self) -> Caller:
        return Caller(self.name, self.era, self.taken)

    def ahead(self) -> tuple[int, list[int]] | None:
        (found,) = self.message(self.taken)
        return found

    def message(self, *due: int) -> list[tuple[int, list[int]] | None]:
        """Return the batches in one message, for requests at the given counts of received batches."""
        parcel = self.host.ahead(self.name, self.era, due)
        return [
            found and (found[0], found[1].batch["x"].tolist())
            for found in pickle.loads(pickle.dumps(parcel, 5)).open()
        ]

    def again(self, number: int) -> list[int] | None:
        reply = self.note(self.host.again(self.caller, number))
        found = reply.value and pickle.loads(pickle.dumps(reply.value, 5)).open()
        return found and found.batch["x"].tolist()

    def note(self, reply: BufferReply) -> BufferReply:
        """Process a reply as a client does."""
        self.stale |= {*reply.stale}
        self.depth = reply.depth
        return reply

    def sample(self, depth: int) -> list[int]:
        """Return the next batch, with `depth` batches requested ahead."""
        if self.depth == 0:  # this sampler draws nothing ahead
            parcel = self.note(self.host.serve(self.caller, None, None, True)).value
            return pickle.loads(pickle.dumps(parcel, 5)).open().batch["x"].tolist()
        while True:
            self.here += self.message(*[self.taken] * (depth + 1 - len(self.here)))
            found = self.here.pop(0)
            if found is not None:
                number, batch = found
                batch = self.again(number) if number in self.stale else batch
                self.taken = number
                return batch

    def call(self, *path: str, args: tuple[Any, ...] = ()) -> BufferReply:
        return self.host.call(self.caller, path, sent((args, {})))


def opened(**options: Any) -> tuple[BufferHost, Opened]:
    host = BufferHost()
    return host, host.open(sent((TensorDictReplayBuffer, (), options)), 0)


def made(**options: Any) -> tuple[Client, TensorDictReplayBuffer]:
    """Return a client of a buffer of 12 records, and an equal local buffer."""
    buffers = [{"storage": LazyTensorStorage(12), "batch_size": 4, "seed": 3, **options} for _ in range(2)]
    client, local = Client(opened(**buffers[0])[0]), TensorDictReplayBuffer(**buffers[1])
    client.call("extend", args=(rows(12),))
    local.extend(rows(12))
    return client, local


def test_open_returns_depth_and_batch_size():
    assert opened(storage=LazyTensorStorage(9))[1] == Opened(0, None)
    assert opened(storage=LazyTensorStorage(9), prefetch=3, batch_size=2)[1] == Opened(3, 2)
    ensemble = BufferHost()
    members = [ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2)]
    assert ensemble.open(sent((ReplayBufferEnsemble, members, {"batch_size": 6})), 0) == Opened(0, 6)
    with pytest.raises(UnsupportedError, match="rate_limiter"):
        opened(storage=LazyTensorStorage(9), rate_limiter=SamplesPerInsert(1.0))
    members[1] = ReplayBuffer(storage=LazyTensorStorage(9), rate_limiter=SamplesPerInsert(1.0))
    with pytest.raises(UnsupportedError, match="rate_limiter"):
        BufferHost().open(sent((ReplayBufferEnsemble, members, {})), 0)


def test_batches_equal_a_local_buffers_and_undelivered_ones_come_again():
    client, local = made(prefetch=2)
    expected = [local.sample()["x"].tolist() for _ in range(8)]
    first = [client.ahead() for _ in range(3)]
    assert [batch for _, batch in first] == expected[:3]
    client.taken = first[0][0]  # the client handed out one batch
    client.era += 1
    assert [client.ahead()[1] for _ in range(3)] == expected[1:4]
    client.era -= 1
    assert client.ahead() is None  # requested in the earlier era
    client.era += 1
    assert client.ahead()[1] == expected[4]


def test_one_message_brings_several_batches_in_order():
    client, local = made(prefetch=3, sampler=SamplerWithoutReplacement())
    (first, *others), last = client.message(0, 0, 0), client.message(0, 1)
    # The epoch ends after the third batch.
    assert [number for number, _ in (first, *others)] == [1, 2, 3] and last == [None, None]
    found = [first, *others, *client.message(3, 3)]
    assert [batch for _, batch in found] == [local.sample()["x"].tolist() for _ in range(5)]


def test_an_epoch_ends_before_the_next_one_begins():
    client, local = made(prefetch=3, sampler=SamplerWithoutReplacement())
    epoch = [client.ahead() for _ in range(5)]
    assert epoch[3:] == [None, None]
    assert sorted(sum((batch for _, batch in epoch[:3]), [])) == list(range(12))
    client.taken = epoch[2][0]
    client.call("extend", args=(rows(100, 112),))
    assert min(client.ahead()[1]) >= 100


def test_a_write_names_the_batches_that_it_overtakes_and_nothing_else():
    client, _ = made(prefetch=1)
    number, batch = client.ahead()
    spared = next(slot for slot in range(12) if slot not in batch)
    overwrite = (slice(spared, spared + 1), rows(50, 51))
    assert client.call("__setitem__", args=overwrite).stale == ()
    assert client.call("mark_update", args=(0,)).stale == ()
    assert client.call("extend", args=(rows(100, 112),)).stale == (number,)
    assert min(client.again(number)) >= 100
    client.taken = number
    assert client.call("extend", args=(rows(12),)).stale == ()  # the batch was handed out
    assert client.again(number) is None
    number, _ = client.ahead()
    reply = client.call("storage", "clear")
    assert reply.void and reply.stale == ()


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, partial(ConsumingSampler, 99)])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_overwritten_batches_are_drawn_again_as_a_local_buffer_draws_them(sampler, prefetch):
    for seed in range(8):
        client, local = made(prefetch=prefetch, sampler=sampler(), seed=seed)
        act = random.Random(seed)
        client.note(client.call("mark_update", args=(0,)))  # its reply contains the depth of prefetching
        for turn in range(40):
            if act.random() < 0.5:
                start = 100 * turn
                slot, count = act.randrange(12), act.randrange(1, 6)
                if act.random() < 0.5:
                    local[slot] = rows(start, start + 1)[0]
                    client.note(client.call("__setitem__", args=(slot, rows(start, start + 1)[0])))
                else:
                    local.extend(rows(start, start + count))
                    client.note(client.call("extend", args=(rows(start, start + count),)))
            else:
                assert client.sample(prefetch) == local.sample()["x"].tolist(), (seed, turn)


def test_call_that_changes_draws_takes_back_sent_batches():
    client, local = made(prefetch=2)
    client.ahead(), client.ahead()
    client.era += 1
    assert not client.call("set_seed", args=(7,)).void
    local.set_seed(7)
    assert [client.ahead()[1] for _ in range(2)] == [local.sample()["x"].tolist() for _ in range(2)]


def test_state_holds_batches_that_were_not_handed_out():
    client, local = made(prefetch=2, sampler=PrioritizedSampler(12, 0.7, 0.5))
    expected = [local.sample()["x"].tolist() for _ in range(6)]
    ahead = [client.ahead() for _ in range(3)]
    client.taken = ahead[0][0]
    reply = client.call("state_dict")
    assert not reply.void
    other = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12), sampler=PrioritizedSampler(12, 0.7, 0.5), batch_size=4, prefetch=2
    )
    other.load_state_dict(pickle.loads(pickle.dumps(reply.value, 5)).open())
    assert [other.sample()["x"].tolist() for _ in range(4)] == expected[1:5]
    assert [client.ahead()[1] for _ in range(2)] == expected[3:5]


def test_batches_sent_to_another_client_are_not_drawn_again():
    client, _ = made(prefetch=1, sampler=SamplerWithoutReplacement())
    other = Client(client.host, b"b")
    first, second, third = client.ahead(), other.ahead(), client.ahead()
    client.era += 1  # The third batch is taken back. The first one precedes a batch of another client.
    assert client.ahead()[1] == third[1]
    assert sorted(first[1] + second[1] + third[1]) == list(range(12))


def test_samplers_that_do_not_draw_ahead_send_nothing():
    client, _ = made(prefetch=2)
    assert client.call("set_sampler", args=(SamplerWithoutReplacement(),)).depth == 2
    assert client.ahead() is not None
    client.era += 1
    reply = client.call("set_sampler", args=(ConsumingSampler(),))
    assert reply.depth == 0 and not reply.void and reply.value is Token.PART
    assert client.ahead() is None


@pytest.mark.filterwarnings("default")
def test_warnings_are_passed_on():
    client, _ = made(prefetch=2)
    reply = client.host.serve(client.caller, 3, None, False)
    assert "batch_size=3 differs" in str(reply.warnings[0])


def test_attributes_are_read_and_set_in_the_actor():
    client, _ = made()
    assert client.host.get(("storage", "get")) is Token.METHOD
    assert client.call("append_transform", args=(lambda batch: batch,)).value is Token.BUFFER
    client.host.set(("priority_key",), sent("other"))
    assert pickle.loads(pickle.dumps(client.host.get(("priority_key",)))).open() == "other"
