"""What tests of conversions share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def during_conversion(change: Callable[[], Any]) -> Iterator[None]:
    """Run `change` when a conversion warns of terminated steps: after its flags and before all other arrays."""
    changed = []

    def warned(*_: Any, **__: Any) -> None:
        changed.append(True)
        change()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned
        yield
    assert changed == [True]
