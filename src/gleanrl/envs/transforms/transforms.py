"""All transforms, under the path that existing programs import them from."""

from gleanrl.envs.transforms import *  # noqa: F403
from gleanrl.envs.transforms import __all__ as _names
from gleanrl.envs.transforms.spec_tools import apply_to_composite as _apply_to_composite
from gleanrl.envs.transforms.spec_tools import apply_to_composite_inv as _apply_to_composite_inv

__all__ = [*_names, "_apply_to_composite", "_apply_to_composite_inv"]
