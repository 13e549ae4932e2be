"""Every collector inherits iteration, `next` and the refusal of wrong calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.errors import UnsupportedError


class Numbers(DataCollectorBase):
    """Yields the numbers from its state up to 3; raises once before each number in `faults`."""

    def __init__(
        self, faults: tuple[int, ...] = (), events: list[str] | None = None, ready: bool = True
    ) -> None:
        self.n, self.faults, self.events = 0, list(faults), [] if events is None else events
        self._ready = ready

    def iterator(self) -> Iterator[TensorDictBase]:
        while self.n < 4:
            if self.n in self.faults:
                self.faults.remove(self.n)
                raise ValueError(f"before {self.n}")
            self.n += 1
            yield TensorDict({"n": torch.tensor([self.n - 1])}, [1], device="cpu")

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        return seed

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None: ...

    def update_policy_weights_(self, policy_weights: TensorDictBase | None = None) -> None: ...


def test_next_returns_batches_and_then_none() -> None:
    collector = Numbers()
    batches = [collector.next() for _ in range(4)]
    assert [int(b["n"]) for b in batches if b is not None] == [0, 1, 2, 3]
    assert all(b is not None and b.device is None for b in batches)
    assert [collector.next(), collector.next()] == [None, None]


def test_builtin_next_returns_batches_and_stops() -> None:
    collector = Numbers(faults=(1,))
    assert int(next(collector)["n"]) == 0
    with pytest.raises(ValueError, match="before 1"):
        next(collector)
    assert [int(next(collector)["n"]), int(next(iter(collector))["n"])] == [1, 2]
    assert int(next(collector)["n"]) == 3
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(collector)
    assert next(collector, None) is None


def test_second_iteration_continues_the_first() -> None:
    collector = Numbers()
    for batch in collector:
        assert batch.device == torch.device("cpu")
        break
    assert int(collector.next()["n"]) == 1
    assert [int(b["n"]) for b in collector] == [2, 3]


def test_next_continues_after_an_error() -> None:
    collector = Numbers(faults=(0, 2))
    found = []
    for _ in range(7):
        try:
            batch = collector.next()
            found.append(None if batch is None else int(batch["n"]))
        except ValueError as error:
            found.append(str(error))
    assert found == ["before 0", 0, 1, "before 2", 2, 3, None]


def test_collectors_are_neither_generic_nor_indexed() -> None:
    with pytest.raises(UnsupportedError, match="can't be subscripted"):
        DataCollectorBase[int]
    with pytest.raises(UnsupportedError, match="iterate over it"):
        Numbers()[0]


@pytest.mark.parametrize("ready", [True, False])
def test_deleting_a_constructed_collector_shuts_it_down(ready: bool) -> None:
    events: list[str] = []
    collector = Numbers(events=events, ready=ready)
    del collector
    gc.collect()
    assert events == ["shutdown"] * ready


def test_the_methods_of_a_collector_are_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        DataCollectorBase()  # type: ignore[abstract]
