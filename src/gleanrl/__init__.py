"""gleanrl: data collection and replay storage for reinforcement learning in PyTorch."""

import importlib
from typing import Any

from gleanrl import compat

__version__ = "0.1.0"

compat.install()


def __getattr__(name: str) -> Any:
    """Return `gleanrl.checkpoint.Checkpoint` under its short name: it needs all the rest, which need not be here."""
    if name == "Checkpoint":
        return importlib.import_module("gleanrl.checkpoint").Checkpoint
    raise compat.absent(__name__, name)
