"""Device arguments are normalised to `torch.device`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl._arrays.devices import as_device, columns_device
from gleanrl.errors import InvalidArgumentError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("cpu", CPU),
        (CPU, CPU),
        ("cpu:0", torch.device("cpu:0")),
        ("meta", torch.device("meta")),
        ("cuda:1", torch.device("cuda:1")),
        (torch.device("cuda", 3), torch.device("cuda:3")),
    ],
)
def test_known_devices_are_normalised(given: Any, expected: torch.device | None) -> None:
    assert as_device(given) == expected


def test_an_accelerator_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert as_device("cuda") == torch.device("cuda:2")


@pytest.mark.parametrize("given", ["cup", "", "cuda:x", 1.5, object()])
def test_unknown_devices_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="device: torch doesn't know"):
        as_device(given)


def test_columns_of_no_device_are_on_the_cpu() -> None:
    assert columns_device(None) == CPU and columns_device(torch.device("cuda:1")) == torch.device("cuda:1")
