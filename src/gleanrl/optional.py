"""The one place of imports that wait: libraries that are installed with an extra, and needed by few programs."""

from __future__ import annotations

from typing import Any

from gleanrl.errors import MissingLibraryError


def h5py() -> Any:
    """Return h5py.

    Raises:
        MissingLibraryError: it isn't installed; the message names the extra.
    """
    try:
        import h5py
    except ImportError as cause:
        raise MissingLibraryError(
            "HDF5 files need h5py, which can't be imported: pip install 'gleanrl[h5]'"
        ) from cause
    return h5py


def ray() -> Any:
    """Return Ray.

    Raises:
        MissingLibraryError: it isn't installed; the message names the extra.
    """
    try:
        import ray
    except ImportError as cause:
        raise MissingLibraryError(
            "collectors and buffers on Ray need ray, which can't be imported: pip install 'gleanrl[ray]'"
        ) from cause
    return ray
