"""The specs under their other import path; the code is in `gleanrl.data.specs`."""

from __future__ import annotations

from gleanrl.data.specs import *  # noqa: F403
from gleanrl.data.specs import __all__ as __all__
