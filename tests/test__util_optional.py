"""Libraries of optional extras are imported, or an error names the missing extra."""

from __future__ import annotations

import sys

import pytest

from gleanrl import _util
from gleanrl.errors import MissingLibraryError


def test_missing_h5py_raises_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _util.h5py().__name__ == "h5py"
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingLibraryError, match=r"gleanrl\[h5\]"):
        _util.h5py()


def test_missing_ray_raises_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _util.ray().__name__ == "ray"
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingLibraryError, match=r"gleanrl\[ray\]"):
        _util.ray()
