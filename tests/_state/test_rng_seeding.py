"""Components own random generators that are seeded, saved, copied and forked."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gleanrl._state.rng import (
    OwnedGenerator,
    OwnedTorchGenerator,
    UserGenerator,
    distinct_seeds,
    new_seed,
    seeds_later,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError


def numbers(owned: OwnedGenerator) -> list[int]:
    return owned.integers(1_000_000, 5).tolist()


def test_a_seed_fixes_the_sequence():
    assert numbers(OwnedGenerator(3)) == numbers(OwnedGenerator(3))
    assert numbers(OwnedGenerator(3)) != numbers(OwnedGenerator(4))


def test_first_use_without_a_seed_draws_one_from_the_global_generator():
    torch.manual_seed(1)
    first = OwnedGenerator()
    expected = numbers(first)
    torch.manual_seed(1)
    second = OwnedGenerator()
    assert numbers(second) == expected
    before = torch.get_rng_state()
    numbers(second)
    assert torch.equal(torch.get_rng_state(), before), "only the first use touches the global generator"


def test_saving_before_use_holds_a_seed():
    torch.manual_seed(1)
    owned, other, before = OwnedGenerator(), OwnedGenerator(3), torch.get_rng_state()
    other.load_state_dict(owned.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert numbers(other) == numbers(owned)


def test_seeds_are_deferred_if_the_process_state_is_saved():
    torch.manual_seed(1)
    owned, other, before = OwnedGenerator(), OwnedGenerator(3), torch.get_rng_state()
    with seeds_later():
        other.load_state_dict(owned.state_dict())
    drawn, expected = torch.rand(2), numbers(owned)
    torch.set_rng_state(before)
    assert torch.equal(torch.rand(2), drawn) and numbers(other) == expected


def test_several_saved_generators_have_different_seeds():
    torch.manual_seed(1)
    one, other, before = OwnedGenerator(), OwnedGenerator(), torch.get_rng_state()
    with distinct_seeds():
        states = [one.state_dict(), other.state_dict()]
    assert torch.equal(torch.get_rng_state(), before)
    expected = numbers(one), numbers(other)
    one.load_state_dict(states[0]), other.load_state_dict(states[1])
    assert (numbers(one), numbers(other)) == expected


def test_begun_generator_can_return_to_a_snapshot():
    owned = OwnedGenerator()
    owned.begin()
    place = owned.snapshot()
    expected = numbers(owned)
    owned.begin()
    assert numbers(owned) != expected
    owned.adopt(place)
    assert numbers(owned) == expected


def test_fresh_seeds_come_from_the_global_generator():
    torch.manual_seed(5)
    one, two = new_seed(), new_seed()
    torch.manual_seed(5)
    assert (new_seed(), new_seed()) == (one, two)
    assert one != two
    assert 0 <= one < 2**63


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_restored_generator_continues(cut):
    owned = OwnedGenerator(7)
    for _ in range(cut):
        numbers(owned)
    state = owned.state_dict()
    expected = numbers(owned)
    other = OwnedGenerator()
    other.load_state_dict(state)
    assert numbers(other) == expected
    owned.load_state_dict(state)
    assert numbers(owned) == expected, "the state is a copy"


def test_the_state_passes_a_safe_load(tmp_path):
    owned = OwnedGenerator(7)
    torch.save(owned.state_dict(), tmp_path / "state.pt")
    other = OwnedGenerator()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert numbers(other) == numbers(owned)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_continue_independently(clone):
    owned = OwnedGenerator(7)
    other = clone(owned)
    expected = numbers(owned)
    assert numbers(other) == expected


def test_generator_returns_to_a_saved_position():
    owned = OwnedGenerator(7)
    place = owned.snapshot()
    expected = numbers(owned)
    for _ in range(2):
        owned.adopt(place)
        assert numbers(owned) == expected, "a place stays what it is"


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "1"])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(InvalidArgumentError, match="seed: expected an integer"):
        OwnedGenerator(seed)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"generator": 3},
        {"generator": False},
        {"generator": torch.zeros(4, dtype=torch.int64)},
        {"generator": torch.ones(3, dtype=torch.int64)},
        {"generator": torch.ones(4)},
        None,
    ],
)
def test_a_bad_state_changes_nothing(state):
    owned = OwnedGenerator(7)
    with pytest.raises(SchemaError, match="generator"):
        owned.load_state_dict(state)
    assert numbers(owned) == numbers(OwnedGenerator(7))


def test_a_default_device_changes_nothing():
    torch.manual_seed(2)
    owned = OwnedGenerator()
    expected = owned.integers(50, 5).tolist(), owned.permutation(9).tolist(), new_seed()
    torch.manual_seed(2)
    with torch.device("meta"):
        other = OwnedGenerator()
        found = other.integers(50, 5).tolist(), other.permutation(9).tolist(), new_seed()
        assert found == expected
        third = OwnedGenerator()
        third.load_state_dict(owned.state_dict())
        again = pickle.loads(pickle.dumps(owned))
        assert third.permutation(9).tolist() == again.permutation(9).tolist() == other.permutation(9).tolist()


class TestTorchGenerator:
    """A private generator for torch's random functions."""

    def test_generator_continues_after_a_save_a_copy_and_a_pickle(self):
        owned = OwnedTorchGenerator(3)
        torch.rand(5, generator=owned.get())
        loaded = OwnedTorchGenerator()
        loaded.load_state_dict(owned.state_dict())
        others = [loaded, copy.deepcopy(owned), pickle.loads(pickle.dumps(owned))]
        want = torch.rand(5, generator=owned.get())
        assert all(torch.equal(torch.rand(5, generator=other.get()), want) for other in others)

    def test_the_global_generator_gives_the_first_seed_only(self):
        torch.manual_seed(1)
        want = torch.rand(2, generator=OwnedTorchGenerator().get())
        torch.manual_seed(1)
        owned = OwnedTorchGenerator()
        assert owned.snapshot() is None
        assert torch.equal(torch.rand(2, generator=owned.get()), want)
        before = torch.get_rng_state()
        torch.rand(2, generator=owned.get())
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("used", [False, True])
    def test_forked_children_draw_different_numbers(self, used):
        owned = OwnedTorchGenerator(device="cpu")
        if used:
            torch.rand(1, generator=owned.get())
        found = []
        for _ in range(2):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writer, torch.rand(1, generator=owned.get()).numpy().tobytes())
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            found.append(os.read(reader, 4))
            os.close(reader)
            os.close(writer)
        found.append(torch.rand(1, generator=owned.get()).numpy().tobytes())
        assert len(set(found)) == 3

    def test_generator_replaces_the_global_one_in_a_block(self):
        one, other = OwnedTorchGenerator(4), OwnedTorchGenerator(4)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="inside"), one.as_global():
            drawn = torch.rand(3)
            raise ValueError("inside")
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(torch.rand(3, generator=other.get()), drawn)
        assert torch.equal(torch.rand(3, generator=other.get()), torch.rand(3, generator=one.get()))

    def test_generators_used_globally_in_several_threads_keep_their_sequences(self):
        def draw(seed):
            owned, drawn = OwnedTorchGenerator(seed), []
            start.wait()
            for _ in range(300):
                with owned.as_global():
                    drawn += [torch.rand(()) for _ in range(3)]
            return torch.stack(drawn)

        before, interval = torch.get_rng_state(), sys.getswitchinterval()
        start = threading.Barrier(3)
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(3) as pool:
                found = list(pool.map(draw, range(3)))
        finally:
            sys.setswitchinterval(interval)
        for seed, drawn in enumerate(found):
            generator = torch.Generator().manual_seed(seed)
            expected = torch.stack([torch.rand((), generator=generator) for _ in range(900)])
            assert torch.equal(drawn, expected)
        assert torch.equal(torch.get_rng_state(), before)

    def test_child_forked_during_global_use_can_use_its_generator_globally(self):
        inside, leave = threading.Event(), threading.Event()

        def lend():
            with OwnedTorchGenerator(1).as_global():
                inside.set()
                leave.wait()

        thread = threading.Thread(target=lend)
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends the child if it waits for the lock
            with OwnedTorchGenerator(2).as_global():
                os._exit(0)
        leave.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0

    @pytest.mark.parametrize("state", [3, "x", torch.zeros(4), torch.zeros(1, 5056, dtype=torch.uint8)])
    def test_a_bad_state_is_refused(self, state):
        owned = OwnedTorchGenerator(3)
        with pytest.raises(SchemaError, match="generator state"):
            owned.parse(state)
        owned.adopt(None)
        assert owned.snapshot() is None


def test_a_given_generator_and_its_user_draw_from_one_sequence():
    generator = torch.Generator().manual_seed(7)
    source = UserGenerator(generator)
    drawn = [source.integers(50, 4), source.uniforms(3), source.permutation(5)]
    twin = torch.Generator().manual_seed(7)
    expected = [
        torch.randint(50, (4,), generator=twin),
        torch.rand(3, dtype=torch.float64, generator=twin),
        torch.randperm(5, generator=twin),
    ]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(drawn, expected, strict=True))
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=twin))
    source.seed(7)
    assert torch.equal(source.integers(50, 4), drawn[0])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
def test_state_of_a_given_generator_is_saved_and_loaded(clone):
    source = UserGenerator(torch.Generator().manual_seed(7))
    source.uniforms(3)
    state, copied = source.state_dict(), clone(source)
    expected = source.integers(50, 4)
    assert torch.equal(copied.integers(50, 4), expected)
    source.load_state_dict(state)
    assert torch.equal(source.integers(50, 4), expected)
    for other in (OwnedGenerator(3).state_dict(), {"generator": torch.ones(3, dtype=torch.uint8)}, {}):
        with pytest.raises(SchemaError):
            source.load_state_dict(other)
    with pytest.raises(InvalidTypeError, match=r"expected a torch\.Generator"):
        UserGenerator(3)
