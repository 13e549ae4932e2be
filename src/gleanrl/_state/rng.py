"""Random generators: the ones that a part owns, a user's own, and the ones that the whole process shares.

A part's generator takes its seed at the first use and is saved with the part's state.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy import empty, float64, frombuffer, int64
from torch import from_numpy

from gleanrl._arrays.native import Random
from gleanrl._os.interrupts import ForkSafeLock, renew_in_child
from gleanrl._state.state import Stateful, StateReader
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError

_TWISTER = "MT19937"


@contextmanager
def torch_rng_preserved() -> Iterator[None]:
    """Restore torch's global generators at the end of a ``with`` block: the CPU's, and CUDA's if CUDA is in use."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


class Places(NamedTuple):
    """Positions in the sequences of the process's generators."""

    torch: torch.Tensor
    """``(n,)`` uint8."""
    cuda: tuple[torch.Tensor, ...]
    """One state for each CUDA device; empty before the first use of CUDA."""
    numpy: tuple[torch.Tensor, int, int, float] | None
    """``(624,)`` int64, the position, and the two fields of NumPy's pending normal draw. None if the program installed
    another kind of generator.
    """
    python: tuple[torch.Tensor, float | None]
    """``(625,)`` int64, and the pending normal draw."""


class GlobalGenerators(Stateful[Places]):
    """The process-wide generators of torch, ``numpy.random`` and ``random``. CUDA's are included once CUDA is used."""

    def snapshot(self) -> Places:
        """Return the current positions."""
        kind, words, *rest = cast(Any, np.random.get_state(legacy=True))
        twister = (torch.from_numpy(words.astype(np.int64)), *rest) if kind == _TWISTER else None
        _, numbers, waiting = random.getstate()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return Places(
            torch.get_rng_state(),
            tuple(cuda),
            twister,
            (torch.tensor(numbers, dtype=torch.int64, device="cpu"), waiting),
        )

    def parse(self, state: Any) -> Places:
        """Return the positions in a saved state, or raise `SchemaError`.

        Each state except CUDA's is set in a temporary generator first, so that `adopt` can't fail later.
        """
        reader = StateReader(state, "the process's generators")
        own = reader.tensor("torch", torch.uint8, (None,))
        try:
            torch.Generator().set_state(own)
            cuda = tuple(torch.as_tensor(words, dtype=torch.uint8).clone() for words in reader.get("cuda"))
            numpy, (numbers, waiting) = reader.get("numpy"), reader.get("python")
            if numpy is not None:
                numpy = (numpy[0].clone(), *numpy[1:])
                trial = np.random.RandomState()
                trial.set_state(_numpy(numpy))
                check_position(trial.get_state(legacy=False))
            python = (numbers.clone(), waiting)
            random.Random().setstate(_python(python))
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, OverflowError) as cause:
            raise SchemaError(f"load_state_dict: the process's generators: {cause}") from cause
        return Places(own, cuda, numpy, python)

    def adopt(self, value: Places) -> None:
        """Set the generators to the given positions.

        Devices that this process lacks are skipped. NumPy's state is skipped if the program installed another kind of
        generator.
        """
        torch.set_rng_state(value.torch)
        for device, words in zip(range(torch.cuda.device_count()), value.cuda, strict=False):
            torch.cuda.set_rng_state(words, device)
        if value.numpy is not None and cast(Any, np.random.get_state(legacy=True))[0] == _TWISTER:
            np.random.set_state(_numpy(value.numpy))
        random.setstate(_python(value.python))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the generators at the end of a ``with`` block, also after an error."""
        before = self.snapshot()
        try:
            yield
        finally:
            self.adopt(before)


def check_position(state: Any) -> None:
    """Raise `ValueError` if a NumPy generator's position lies outside of its state. NumPy would read out of bounds.

    Only MT19937 and Philox have such a position; states of other kinds pass.
    """
    kind = state["bit_generator"]
    most = {_TWISTER: 624, "Philox": 4}.get(kind)
    position = state["state"]["pos"] if kind == _TWISTER else state.get("buffer_pos", 0)
    if most is not None and not 0 <= position <= most:
        raise ValueError(f"expected a position in [0, {most}] of a {kind}, got {position}")


def _numpy(state: tuple[torch.Tensor, int, int, float]) -> tuple[Any, ...]:
    words, *rest = state
    return (_TWISTER, words.numpy().astype(np.uint32), *rest)


def _python(state: tuple[torch.Tensor, float | None]) -> tuple[Any, ...]:
    return 3, tuple(state[0].tolist()), state[1]


GENERATORS = GlobalGenerators()
"""The generators of this process."""


_SEED_RANGE = 2**63 - 1
_WORDS = 4


def new_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed in ``[0, 2**63 - 1)`` from `generator`, or from torch's global generator, and return it."""
    return int(torch.randint(_SEED_RANGE, (), device="cpu", generator=generator))


def derived_seed(owned: OwnedTorchGenerator | None = None) -> int:
    """Return a seed in ``[0, 2**56)`` computed from the state of `owned`, or of torch's global generator.

    Nothing is drawn, so the sequence continues as without this call. But an unused `owned` takes its own seed first,
    which advances the global generator.
    """
    state = torch.get_rng_state() if owned is None else owned.get().get_state()
    return int.from_bytes(blake2b(state.numpy().data, digest_size=7).digest(), "big")


_seeds: ContextVar[torch.Generator | str | None] = ContextVar("seeds", default=None)
"""The source of seeds for generators that are saved before their first use; None for the global generator."""
_LATER = "later"


@contextmanager
def seeds_later() -> Iterator[None]:
    """Save unused generators without a seed while the context is open.

    The caller saves the process's generators in the same checkpoint. After a load, an unused generator draws its seed
    from them at its first use, as it would have done without the checkpoint.
    """
    token = _seeds.set(_LATER)
    try:
        yield
    finally:
        _seeds.reset(token)


@contextmanager
def distinct_seeds() -> Iterator[None]:
    """Save several unused generators with different seeds, in the order in which they are saved.

    The seeds are the ones that the global generator would draw next; it doesn't advance. Within `seeds_later`,
    generators are still saved without a seed.
    """
    token = _seeds.set(_seeds.get() or _like_the_global())
    try:
        yield
    finally:
        _seeds.reset(token)


def _like_the_global() -> torch.Generator:
    """Return a copy of torch's global generator, which predicts the global generator's draws without advancing it."""
    generator = torch.Generator("cpu")
    generator.set_state(torch.get_rng_state())
    return generator


Words = np.ndarray[Any, Any] | torch.Tensor
"""The content of a generator's state; see `GeneratorState`."""


class GeneratorState(NamedTuple):
    """A position in a random sequence."""

    generator: Words | None
    """The position: ``(4,)`` int64, not all 0, or None for a seed to be drawn at the first use.

    A `UserGenerator` stores the state of its ``torch.Generator`` instead, a uint8 tensor.
    """


class RandomSource(Stateful[GeneratorState]):
    """A source of random numbers for one part. Not thread-safe: the part that owns it locks."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Start the sequence of `seed`; raise `InvalidArgumentError` unless it is an integer in ``[0, 2**63)``."""

    def begin(self) -> None:
        """Draw the seed now if there is none, so that a snapshot taken now leads back to this position.

        The base class does nothing.
        """
        return

    @abstractmethod
    def integers(self, high: int, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, high)``, int64 on the CPU."""

    @abstractmethod
    def uniforms(self, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, 1)``, float64 on the CPU."""

    def for_core(self, count: int) -> torch.Tensor | Random:
        """Return an argument for the native core that yields the numbers of `uniforms`.

        It is an array or the generator itself.
        """
        return self.uniforms(count)

    @abstractmethod
    def permutation(self, size: int) -> torch.Tensor:
        """Return the numbers of ``[0, size)`` in random order, int64 on the CPU."""


def _apart(start: bytes, lineage: tuple[int, ...]) -> int:
    """Return the seed of a forked child's sequence; it differs for each position of the parent and for each child."""
    return int.from_bytes(blake2b(start + repr(lineage).encode(), digest_size=8).digest(), "big") >> 1


def _drawn_by(lineage: tuple[int, ...], seed: int) -> int:
    """Return the seed of a sequence whose `seed` was drawn from the global generator of a process of this lineage.

    A forked child has a copy of its parent's global generator, so both draw the same seed. The lineage tells them
    apart.
    """
    return _apart(seed.to_bytes(8, "big"), lineage) if lineage else seed


def _checked(seed: int) -> int:
    """Return `seed`, or raise `InvalidArgumentError` unless it is an integer in ``[0, 2**63)``."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _SEED_RANGE:
        raise InvalidArgumentError(f"seed: expected an integer in [0, 2**63), got {seed!r}")
    return seed


def _torch_state(state: Any, device: torch.device) -> torch.Tensor:
    """Return a copy of a ``torch.Generator`` state for that device; raise `SchemaError` for any other value."""
    try:
        words: torch.Tensor = state.to("cpu", copy=True)
        if words.ndim != 1:
            raise TypeError("expected one dimension")
        torch.Generator(device).set_state(words)
    except (AttributeError, TypeError, RuntimeError) as cause:
        raise SchemaError(
            f"generator state: expected that of a torch.Generator, got {state!r:.100}"
        ) from cause
    return words


class OwnedGenerator(RandomSource):
    """A random generator that belongs to one part.

    Without a seed, it draws one from torch's global generator at its first use. So ``torch.manual_seed`` makes a
    program reproducible, and later draws of the part leave the global sequence alone.

    Saving a state isn't a use, but pickling and copying are. An unused generator is saved with the seed that it would
    draw now, and the global generator doesn't advance.

    The sequence doesn't depend on how many numbers a call requests. A forked child continues with a different sequence
    than its parent, and the same one in every run of the program. Not thread-safe: the part that owns it locks.

    Args:
        seed: a seed in ``[0, 2**63)``; None to draw one at the first use.

    Examples:
        >>> import torch
        >>> a, b = OwnedGenerator(3), OwnedGenerator()
        >>> b.load_state_dict(a.state_dict())
        >>> torch.equal(a.uniforms(2), b.uniforms(2))
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        self._native: Random | None = None
        self._lineage: tuple[int, ...] = ()
        renew_in_child(self)
        if seed is not None:
            self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed`.

        Raises:
            InvalidArgumentError: unless `seed` is an integer in ``[0, 2**63)``.
        """
        self._native = Random(_checked(seed))

    def begin(self) -> None:
        """Draw a seed now if there is none. Counts as the first use."""
        if self._native is None:
            self._seeded()

    def _seeded(self) -> Random:
        """Draw a seed from torch's global generator, and return the generator that starts from it."""
        self._native = Random(_drawn_by(self._lineage, new_seed()))
        return self._native

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Continue with the child's own sequence."""
        self._lineage = lineage
        if self._native is not None:
            self.seed(_apart(self._native.save(), lineage))

    def integers(self, high: int, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, high)``, int64 on the CPU."""
        # NumPy allocates small arrays faster than torch does.
        drawn = from_numpy(empty(count, int64))
        (self._native or self._seeded()).integers(high, drawn.data_ptr(), count)
        return drawn

    def uniforms(self, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, 1)``, float64 on the CPU."""
        drawn = from_numpy(empty(count, float64))
        (self._native or self._seeded()).uniforms(drawn.data_ptr(), count)
        return drawn

    def permutation(self, size: int) -> torch.Tensor:
        """Return the numbers of ``[0, size)`` in random order, int64 on the CPU."""
        drawn = from_numpy(empty(size, int64))
        (self._native or self._seeded()).permutation(drawn.data_ptr(), size)
        return drawn

    def for_core(self, count: int) -> Random:
        """Return the generator: the core draws the same numbers from it, without an array of them."""
        return self._native or self._seeded()

    @staticmethod
    def _words(native: Random) -> np.ndarray[Any, Any]:
        return frombuffer(native.save(), int64)

    def snapshot(self) -> GeneratorState:
        """Return the position in the sequence.

        `seeds_later` and `distinct_seeds` decide how an unused generator is saved.
        """
        if self._native is not None:
            return GeneratorState(self._words(self._native))
        source = _seeds.get() or _like_the_global()
        seed = None if isinstance(source, str) else new_seed(source)
        return GeneratorState(None if seed is None else self._words(Random(_drawn_by(self._lineage, seed))))

    def parse(self, state: Any) -> GeneratorState:
        """Return the position in a saved state; raise `SchemaError` for any other value."""
        reader = StateReader(state, "a random generator")
        words = reader.optional("generator", lambda name: reader.tensor(name, torch.int64, (_WORDS,)))
        if words is not None and not words.any():
            raise reader.wrong("generator", f"{_WORDS} numbers that aren't all 0", words.tolist())
        return GeneratorState(None if words is None else words.numpy())

    def adopt(self, value: GeneratorState) -> None:
        """Continue from a position in a sequence."""
        generator = None
        if value.generator is not None:
            generator = Random(0)
            # Pickles of earlier releases hold a tensor here.
            generator.load(np.asarray(value.generator).tobytes())
        self._native = generator

    def __getstate__(self) -> list[int]:
        """Return the generator's state for pickle, as a list.

        Counts as the first use, so that a copy has the same sequence.

        A tensor would not do: torch sends one to another process through a file descriptor.
        """
        words: list[int] = self._words(self._native or self._seeded()).tolist()
        return words

    def __setstate__(self, state: list[int]) -> None:
        """Restore from a pickle, at the same position. The copy has no lineage of forks."""
        self.__init__()  # type: ignore[misc]
        self.adopt(GeneratorState(np.array(state, int64)))


class UserGenerator(RandomSource):
    """A user's ``torch.Generator`` as the random source of a part. The user and the part draw from one sequence.

    The generator's state is part of the part's state, so loading the part sets the user's generator. A forked child
    keeps the copied state; the user seeds it there if the sequences must differ.

    Args:
        generator: on any device.

    Raises:
        InvalidTypeError: `generator` isn't a ``torch.Generator``.

    Examples:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(3)
        >>> source = UserGenerator(generator)
        >>> first = source.integers(100, 5)
        >>> torch.equal(torch.randint(100, (5,), generator=generator.manual_seed(3)), first)
        True
    """

    def __init__(self, generator: torch.Generator) -> None:
        if not isinstance(generator, torch.Generator):
            raise InvalidTypeError(f"generator: expected a torch.Generator, got {generator!r}")
        self.generator = generator
        """The user's generator."""

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed` in the user's generator.

        Raises:
            InvalidArgumentError: unless `seed` is an integer in ``[0, 2**63)``.
        """
        self.generator.manual_seed(_checked(seed))

    def integers(self, high: int, count: int) -> torch.Tensor:
        """Return the numbers that ``torch.randint`` draws from ``[0, high)``, int64 on the CPU."""
        generator = self.generator
        return torch.randint(high, (count,), generator=generator, device=generator.device).cpu()

    def uniforms(self, count: int) -> torch.Tensor:
        """Return the numbers that ``torch.rand`` draws in double precision, on the CPU."""
        generator = self.generator
        drawn = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
        return drawn.cpu()

    def permutation(self, size: int) -> torch.Tensor:
        """Return the permutation that ``torch.randperm`` draws, int64 on the CPU."""
        return torch.randperm(size, generator=self.generator, device=self.generator.device).cpu()

    def snapshot(self) -> GeneratorState:
        """Return the generator's state."""
        return GeneratorState(self.generator.get_state())

    def parse(self, state: Any) -> GeneratorState:
        """Return the position in a saved state; raise `SchemaError` if it belongs to another kind of generator."""
        words = StateReader(state, "a torch.Generator").tensor("generator", torch.uint8, (None,))
        return GeneratorState(_torch_state(words, self.generator.device))

    def adopt(self, value: GeneratorState) -> None:
        """Set the user's generator to a position in its sequence."""
        assert isinstance(value.generator, torch.Tensor)
        self.generator.set_state(value.generator)


# Reentrant, because an `as_global` block may contain another one in the same thread.
_global_generator_lock = ForkSafeLock()


class OwnedTorchGenerator(Stateful[torch.Tensor | None]):
    """A ``torch.Generator`` that belongs to one part, for torch's functions: ``torch.rand(3, generator=owned.get())``.

    It takes its seed at the first use, and changes its sequence in a forked child, as `OwnedGenerator` does. Its state
    before the first use is None. Not thread-safe: the part that owns it locks.

    Args:
        seed: a seed; None to draw one at the first use.
        device: the device of the generator.
    """

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._torch: torch.Generator | None = None
        self._lineage: tuple[int, ...] = ()
        renew_in_child(self)
        if seed is not None:
            self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed` in a new ``torch.Generator``; results of earlier `get` calls are left behind."""
        self._torch = torch.Generator(self._device).manual_seed(seed)

    def get(self) -> torch.Generator:
        """Return the generator. The first call without a seed draws one from torch's global generator."""
        if self._torch is None:
            self.seed(_drawn_by(self._lineage, new_seed()))
            assert self._torch is not None
        return self._torch

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Continue with the child's own sequence. CUDA generators are left alone: a forked child can't use CUDA."""
        self._lineage = lineage
        if self._torch is not None and self._device.type == "cpu":
            self.seed(_apart(self._torch.get_state().numpy().tobytes(), lineage))

    @contextmanager
    def as_global(self) -> Iterator[None]:
        """Let torch's global generator continue this sequence within a ``with`` block.

        This is for code that accepts no generator, and only for CPU generators. After the block, also after an error,
        the global generator has its previous state, and this sequence continues behind the numbers drawn in the block.
        A block costs some microseconds. Other threads that lend a generator wait meanwhile, because all of them would
        draw from one global generator.
        """
        generator = self.get()
        with _global_generator_lock.lock:
            before = torch.get_rng_state()
            torch.set_rng_state(generator.get_state())
            try:
                yield
            finally:
                generator.set_state(torch.get_rng_state())
                torch.set_rng_state(before)

    def snapshot(self) -> torch.Tensor | None:
        """Return the generator's state, uint8; None before the first use."""
        return None if self._torch is None else self._torch.get_state()

    def parse(self, state: Any) -> torch.Tensor | None:
        """Return a copy of a state that `snapshot` returned, or raise `SchemaError`."""
        if state is None:
            return None
        return _torch_state(state, self._device)

    def adopt(self, value: torch.Tensor | None) -> None:
        """Continue the sequence from a state, in a new ``torch.Generator``; with None, draw a seed at the next use."""
        self._torch = None
        if value is not None:
            self._torch = torch.Generator(self._device)
            self._torch.set_state(value)

    def __getstate__(self) -> dict[str, Any]:
        """Return the generator's state and device for pickle."""
        return {"generator": self.snapshot(), "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.__init__(device=state["device"])  # type: ignore[misc]
        self.adopt(state["generator"])


class CounterPosition(NamedTuple):
    """A position in the sequence of a `CounterGenerator`."""

    key: int | None
    """The key in ``[0, 2**63)``; None before the first use."""
    step: int


class CounterGenerator(Stateful[CounterPosition]):
    """The source of random numbers of natively run policies: a key, and the number of the next step.

    Each number is a function of key, environment, step and operation (see ``cpp/core/philox.h``), so the sequence
    doesn't depend on how steps are grouped into batches. Without a seed, the key is drawn from torch's global generator
    at the first use, as `OwnedTorchGenerator` does. Not thread-safe: the part that owns it locks.
    """

    def __init__(self) -> None:
        self._key: int | None = None
        self._step = 0
        self._followed: Any = None
        self._lineage: tuple[int, ...] = ()
        renew_in_child(self)

    @property
    def key(self) -> int:
        """The key. The first call without a seed draws one from torch's global generator."""
        if self._key is None:
            self._key = _drawn_by(self._lineage, new_seed())
        return self._key

    @property
    def step(self) -> int:
        """The next step."""
        if self._followed is not None:
            self._step = self._followed.next_step
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._followed, self._step = None, value

    def follow(self, program: Any) -> None:
        """Let ``program.next_step`` be the next step from now on."""
        self._followed = program

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed` at step 0."""
        self._key, self.step = _apart(repr(seed).encode(), ()), 0

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Continue with the child's own sequence."""
        self._lineage = lineage
        if self._key is not None:
            self._key = _apart(self._key.to_bytes(8, "big"), lineage)

    def snapshot(self) -> CounterPosition:
        """Return the position."""
        return CounterPosition(self._key, self.step)

    def parse(self, state: Any) -> CounterPosition:
        """Return the position in a saved state, or raise `SchemaError`. None, of earlier releases, is the beginning."""
        if state is None:
            return CounterPosition(None, 0)
        reader = StateReader(state, "a counter-based generator")
        key = reader.optional("key", reader.integer)
        return CounterPosition(key, reader.integer("step"))

    def adopt(self, value: CounterPosition) -> None:
        """Continue from a position."""
        self._key, self.step = value
