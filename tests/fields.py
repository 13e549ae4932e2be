"""Fields of several dtypes and depths, and sizes of batches, for schemas and blocks."""

from __future__ import annotations

import torch

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path

FIELDS: dict[Path, Field] = {
    ("image",): Field(torch.Size([2, 2]), torch.uint8),
    ("next", "reward"): Field(torch.Size([1]), torch.float32),
    ("next", "stats", "half"): Field(torch.Size([]), torch.bfloat16),
    ("done",): Field(torch.Size([]), torch.bool),
}
SIZES = [(), (3,), (2, 3)]
