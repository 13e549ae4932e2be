"""Random state that a part owns: one generator each, seeded at first use, part of the part's state.

The random generators that a whole process shares: torch's, NumPy's and Python's.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from threading import RLock
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy import empty, float64, frombuffer, int64
from torch import from_numpy

from gleanrl._arrays.native import Random
from gleanrl._os.interrupts import renew_in_child
from gleanrl._state.state import Stateful, StateReader
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError

_TWISTER = "MT19937"


@contextmanager
def torch_kept() -> Iterator[None]:
    """Let torch's generators of the CPU and of CUDA be as before after a ``with`` block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


class Places(NamedTuple):
    """Places in the sequences of the process's generators."""

    torch: torch.Tensor
    """``(n,)`` uint8."""
    cuda: tuple[torch.Tensor, ...]
    """Of each CUDA device; none before CUDA is used."""
    numpy: tuple[torch.Tensor, int, int, float] | None
    """``(624,)`` int64, position, and the normal draw that waits; None for a generator that a program has put there."""
    python: tuple[torch.Tensor, float | None]
    """``(625,)`` int64, and the normal draw that waits."""


class GlobalGenerators(Stateful[Places]):
    """The generators of torch (CUDA's included, once it is used), ``numpy.random`` and ``random``."""

    def snapshot(self) -> Places:
        """Return where they are."""
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
        """Return the places that a saved state stands for."""
        reader = StateReader(state, "the process's generators")
        own = reader.tensor("torch", torch.uint8, (None,))
        try:
            torch.Generator().set_state(own)
            cuda = tuple(torch.as_tensor(words, dtype=torch.uint8).clone() for words in reader.get("cuda"))
            numpy, (numbers, waiting) = reader.get("numpy"), reader.get("python")
            if numpy is not None:
                numpy = (numpy[0].clone(), *numpy[1:])
                place = np.random.RandomState()
                place.set_state(_numpy(numpy))
                check_position(place.get_state(legacy=False))
            python = (numbers.clone(), waiting)
            random.Random().setstate(_python(python))
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, OverflowError) as cause:
            raise SchemaError(f"load_state_dict: the process's generators: {cause}") from cause
        return Places(own, cuda, numpy, python)

    def adopt(self, value: Places) -> None:
        """Let them go on from there."""
        torch.set_rng_state(value.torch)
        for device, words in zip(range(torch.cuda.device_count()), value.cuda, strict=False):
            torch.cuda.set_rng_state(words, device)
        if value.numpy is not None and cast(Any, np.random.get_state(legacy=True))[0] == _TWISTER:
            np.random.set_state(_numpy(value.numpy))
        random.setstate(_python(value.python))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let them be as before after a ``with`` block."""
        before = self.snapshot()
        try:
            yield
        finally:
            self.adopt(before)


def check_position(state: Any) -> None:
    """Raise `ValueError` for a NumPy generator's position outside of what it holds: NumPy would read there."""
    kind = state["bit_generator"]
    most = {_TWISTER: 624, "Philox": 4}.get(kind)
    place = state["state"]["pos"] if kind == _TWISTER else state.get("buffer_pos", 0)
    if most is not None and not 0 <= place <= most:
        raise ValueError(f"position {place} of {most} in a {kind}")


def _numpy(state: tuple[torch.Tensor, int, int, float]) -> tuple[Any, ...]:
    words, *rest = state
    return (_TWISTER, words.numpy().astype(np.uint32), *rest)


def _python(state: tuple[torch.Tensor, float | None]) -> tuple[Any, ...]:
    return 3, tuple(state[0].tolist()), state[1]


GENERATORS = GlobalGenerators()
"""Those of this process."""


_SEED_RANGE = 2**63 - 1
_WORDS = 4


def fresh_seed(generator: torch.Generator | None = None) -> int:
    """Return a seed drawn from `generator`, or from torch's global one, in ``[0, 2**63 - 1)``."""
    return int(torch.randint(_SEED_RANGE, (), device="cpu", generator=generator))


def derived_seed(owned: OwnedTorchGenerator | None = None) -> int:
    """Return a seed that follows from the place of `owned`, or of torch's global generator, in its sequence.

    Nothing is drawn: the sequence continues as if this had not been called.
    """
    state = torch.get_rng_state() if owned is None else owned.get().get_state()
    return int.from_bytes(blake2b(state.numpy().data, digest_size=7).digest(), "big")


_seeds: ContextVar[torch.Generator | str | None] = ContextVar("seeds", default=None)
"""Where what is saved before its first use has its seed from; None for the global generator."""
_LATER = "later"


@contextmanager
def seeds_later() -> Iterator[None]:
    """Save what was never used without a seed: the process's generators are saved, too, and give it one later."""
    token = _seeds.set(_LATER)
    try:
        yield
    finally:
        _seeds.reset(token)


@contextmanager
def seeds_in_turn() -> Iterator[None]:
    """Save several that were never used with a seed each, in the order in which they are saved."""
    token = _seeds.set(_seeds.get() or _like_the_global())
    try:
        yield
    finally:
        _seeds.reset(token)


def _like_the_global() -> torch.Generator:
    """Return a copy of torch's global generator: what that would draw can be known without drawing."""
    generator = torch.Generator("cpu")
    generator.set_state(torch.get_rng_state())
    return generator


Words = np.ndarray[Any, Any] | torch.Tensor
"""What a generator's state consists of: see `GeneratorState`."""


class GeneratorState(NamedTuple):
    """A place in a random sequence."""

    generator: Words | None
    """``(4,)`` int64, not all 0, or None for a seed to be taken at the first use; of a `GivenGenerator` the state of
    the ``torch.Generator``, a uint8 tensor."""


class RandomSource(Stateful[GeneratorState]):
    """What a part draws its random numbers from. Not thread-safe: its owner locks."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Start the sequence of `seed`; `InvalidArgumentError` unless it is an integer in ``[0, 2**63)``."""

    def begin(self) -> None:
        """Take a seed now where the first draw would take one: the place in the sequence is one to come back to."""
        return

    @abstractmethod
    def integers(self, high: int, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, high)``, int64 on the CPU."""

    @abstractmethod
    def uniforms(self, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, 1)``, float64 on the CPU."""

    def for_core(self, count: int) -> torch.Tensor | Random:
        """Return what stands for `uniforms` in a call of the native core: those numbers, or what draws them there."""
        return self.uniforms(count)

    @abstractmethod
    def permutation(self, size: int) -> torch.Tensor:
        """Return the numbers of ``[0, size)`` in random order, int64 on the CPU."""


def _apart(start: bytes, lineage: tuple[int, ...]) -> int:
    """Return the seed of a forked child's sequence: another for every place in the parent's, and for every child."""
    return int.from_bytes(blake2b(start + repr(lineage).encode(), digest_size=8).digest(), "big") >> 1


def _checked(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _SEED_RANGE:
        raise InvalidArgumentError(f"seed: expected an integer in [0, 2**63), got {seed!r}")
    return seed


def _torch_state(state: Any, device: torch.device) -> torch.Tensor:
    """Return a copy of the state of a ``torch.Generator`` of that device; `SchemaError` for anything else."""
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

    Without a seed it takes one from torch's global generator at its first use, so that ``torch.manual_seed``
    makes a program reproducible while later draws of the part disturb nobody. To save it is no use: until then it's
    saved with the seed that it would take now, which nobody loses by that. The sequence doesn't depend on how many
    numbers a call asks for. A forked child goes on with another sequence than its parent, the same one in every
    run of the program. Not thread-safe: its owner locks.

    Args:
        seed: a seed in ``[0, 2**63)``; None for one drawn at first use.

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
        """Take a seed now, if there is none: the first use."""
        if self._native is None:
            self._seeded()

    def _seeded(self) -> Random:
        """Return the generator; the first call without a seed takes one from torch's global generator."""
        self._native = self._from_seed(fresh_seed())
        return self._native

    def _from_seed(self, seed: int) -> Random:
        # A child's global generator is like its parent's.
        return Random(_apart(seed.to_bytes(8, "big"), self._lineage) if self._lineage else seed)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Go on with a sequence of the child's own."""
        self._lineage = lineage
        if self._native is not None:
            self.seed(_apart(self._native.save(), lineage))

    def integers(self, high: int, count: int) -> torch.Tensor:
        """Return `count` independent draws from ``[0, high)``, int64 on the CPU."""
        # In NumPy because that is cheaper than in torch.
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
        """Return the generator: the same numbers, and no array of them."""
        return self._native or self._seeded()

    @staticmethod
    def _words(native: Random) -> np.ndarray[Any, Any]:
        return frombuffer(native.save(), int64)

    def snapshot(self) -> GeneratorState:
        """Return the place in the sequence; see `seeds_later` for what was never used."""
        if self._native is not None:
            return GeneratorState(self._words(self._native))
        source = _seeds.get() or _like_the_global()
        seed = None if isinstance(source, str) else fresh_seed(source)
        return GeneratorState(None if seed is None else self._words(self._from_seed(seed)))

    def parse(self, state: Any) -> GeneratorState:
        """Return the place that a saved state stands for; `SchemaError` for anything else."""
        reader = StateReader(state, "a random generator")
        words = reader.optional("generator", lambda name: reader.tensor(name, torch.int64, (_WORDS,)))
        if words is not None and not words.any():
            raise reader.wrong("generator", f"{_WORDS} numbers that aren't all 0", words.tolist())
        return GeneratorState(None if words is None else words.numpy())

    def adopt(self, value: GeneratorState) -> None:
        """Go on from a place in a sequence."""
        generator = None
        if value.generator is not None:
            generator = Random(0)
            # A tensor in pickles of before.
            generator.load(np.asarray(value.generator).tobytes())
        self._native = generator

    def __getstate__(self) -> list[int]:
        """Pickle as the generator's state; not as a tensor, which torch would send to a process by a descriptor.

        Counts as the first use: a copy has the same sequence.
        """
        words: list[int] = self._words(self._native or self._seeded()).tolist()
        return words

    def __setstate__(self, state: list[int]) -> None:
        """Restore from a pickle."""
        self.__init__()  # type: ignore[misc]
        self.adopt(GeneratorState(np.array(state, int64)))


class GivenGenerator(RandomSource):
    """A user's ``torch.Generator`` as the source of a part: both continue one sequence, whoever draws from it.

    Its state is part of the part's state: loading one sets the user's generator. In a forked child it stays what the
    user's copy is; seeding that is the user's business.

    Args:
        generator: on any device.

    Raises:
        InvalidTypeError: no ``torch.Generator``.

    Examples:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(3)
        >>> source = GivenGenerator(generator)
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
        """Start the sequence of `seed`."""
        self.generator.manual_seed(_checked(seed))

    def integers(self, high: int, count: int) -> torch.Tensor:
        """Return what ``torch.randint`` draws."""
        generator = self.generator
        return torch.randint(high, (count,), generator=generator, device=generator.device).cpu()

    def uniforms(self, count: int) -> torch.Tensor:
        """Return what ``torch.rand`` draws in double precision."""
        generator = self.generator
        drawn = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
        return drawn.cpu()

    def permutation(self, size: int) -> torch.Tensor:
        """Return what ``torch.randperm`` draws."""
        return torch.randperm(size, generator=self.generator, device=self.generator.device).cpu()

    def snapshot(self) -> GeneratorState:
        """Return the generator's state."""
        return GeneratorState(self.generator.get_state())

    def parse(self, state: Any) -> GeneratorState:
        """Return the place that a saved state stands for; `SchemaError` for one of another kind of generator."""
        words = StateReader(state, "a torch.Generator").tensor("generator", torch.uint8, (None,))
        return GeneratorState(_torch_state(words, self.generator.device))

    def adopt(self, value: GeneratorState) -> None:
        """Set the user's generator to a place in its sequence."""
        assert isinstance(value.generator, torch.Tensor)
        self.generator.set_state(value.generator)


class _Lending:
    """The lock of the thread that has exchanged the state of torch's global generator."""

    def __init__(self) -> None:
        self.after_fork(())
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Take a fresh lock: the thread that held the old one doesn't exist in the child."""
        self.lock = RLock()


_lending = _Lending()


class OwnedTorchGenerator(Stateful[torch.Tensor | None]):
    """A generator that belongs to one part, for torch's own functions: ``torch.rand(3, generator=owned.get())``.

    It begins as `OwnedGenerator` does, and goes on so in a forked child. Its state before the first use is None. Not
    thread-safe: its owner locks.

    Args:
        seed: a seed; None for one drawn at first use.
        device: where numbers are drawn.
    """

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._torch: torch.Generator | None = None
        self._lineage: tuple[int, ...] = ()
        renew_in_child(self)
        if seed is not None:
            self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed`."""
        self._torch = torch.Generator(self._device).manual_seed(seed)

    def get(self) -> torch.Generator:
        """Return the generator; the first call without a seed takes one from torch's global generator."""
        if self._torch is None:
            seed = fresh_seed()
            self.seed(_apart(seed.to_bytes(8, "big"), self._lineage) if self._lineage else seed)
            assert self._torch is not None
        return self._torch

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Go on with a sequence of the child's own; other devices than the CPU can't be used there."""
        self._lineage = lineage
        if self._torch is not None and self._device.type == "cpu":
            self.seed(_apart(self._torch.get_state().numpy().tobytes(), lineage))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let torch's global generator continue this sequence within a ``with`` block, for code that asks for no other.

        For generators of the CPU. The global generator is as before afterwards. Costs some microseconds. Another thread
        that lends a generator waits meanwhile, as both would draw from one global generator.
        """
        generator = self.get()
        with _lending.lock:
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
        """Return the state that `snapshot` gave, checked."""
        if state is None:
            return None
        return _torch_state(state, self._device)

    def adopt(self, value: torch.Tensor | None) -> None:
        """Go on with the sequence of a state."""
        self._torch = None
        if value is not None:
            self._torch = torch.Generator(self._device)
            self._torch.set_state(value)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as the generator's state."""
        return {"generator": self.snapshot(), "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        self.__init__(device=state["device"])  # type: ignore[misc]
        self.adopt(state["generator"])
