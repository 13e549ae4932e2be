"""gleanrl: data collection and replay storage for reinforcement learning in PyTorch."""

import importlib
import sys
from typing import Any

if sys.platform == "win32":  # before an import whose error does not name Windows
    raise ImportError(
        "gleanrl supports Linux and macOS, not Windows: install Linux with `wsl --install`, then gleanrl inside it"
    )

from gleanrl import compat

__version__ = "0.1.0"

compat.install()


def __getattr__(name: str) -> Any:
    """Return `gleanrl.checkpoint.Checkpoint` as `gleanrl.Checkpoint`.

    The class is imported at its first use, since it imports all other packages.
    """
    if name == "Checkpoint":
        return importlib.import_module("gleanrl.checkpoint").Checkpoint
    raise compat.absent(__name__, name)
