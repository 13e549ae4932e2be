"""The one place of imports that wait: libraries that are installed with an extra, and needed by few programs."""

from __future__ import annotations

import importlib
from typing import Any

from gleanrl.errors import MissingLibraryError


def h5py() -> Any:
    """Return h5py.

    Raises:
        MissingLibraryError: it isn't installed; the message names the extra.
    """
    return _imported("h5py", "h5", "HDF5 files need")


def ray() -> Any:
    """Return Ray.

    Raises:
        MissingLibraryError: it isn't installed; the message names the extra.
    """
    return _imported("ray", "ray", "collectors and buffers on Ray need")


def _imported(library: str, extra: str, who_needs: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as cause:
        raise MissingLibraryError(
            f"{who_needs} {library}, which can't be imported: pip install 'gleanrl[{extra}]'"
        ) from cause
