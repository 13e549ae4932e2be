"""The device arguments of a collector resolve by one table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.collectors.build import Devices
from gleanrl.errors import InvalidArgumentError

CPU, CPU0, META = torch.device("cpu"), torch.device("cpu:0"), torch.device("meta")


@pytest.mark.parametrize(
    ("device", "env", "policy", "storing", "own", "expected"),
    [
        (None, None, None, None, None, (None, None, None)),
        (None, None, None, None, CPU, (CPU, None, CPU)),
        ("cpu", None, None, None, None, (CPU, CPU, CPU)),
        ("cpu", None, None, None, META, (CPU, CPU, CPU)),
        ("cpu", None, "cpu:0", None, None, (CPU, CPU0, CPU)),
        ("cpu", "cpu:0", None, "meta", None, (CPU0, CPU, META)),
        (None, None, "cpu:0", None, CPU, (CPU, CPU0, None)),
        (None, None, "cpu", None, None, (None, CPU, None)),
        (None, "cpu:0", "cpu:0", None, CPU, (CPU0, CPU0, CPU0)),
        (None, "cpu", None, None, META, (CPU, None, CPU)),
        (None, None, None, "cpu:0", CPU, (CPU, None, CPU0)),
        (torch.device("cpu"), None, None, None, "cpu:0", (CPU, CPU, CPU)),
    ],
)
def test_unset_devices_are_filled(
    device: Any, env: Any, policy: Any, storing: Any, own: Any, expected: tuple[Any, ...]
) -> None:
    found = Devices.of(device, env, policy, storing, own)
    assert (found.env, found.policy, found.storing) == expected


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'toaster'"):
        Devices.of(None, None, "toaster", None, None)
