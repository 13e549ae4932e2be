"""The random generators that a whole process shares: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from gleanrl.errors import SchemaError
from gleanrl.state import Stateful, StateReader

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
