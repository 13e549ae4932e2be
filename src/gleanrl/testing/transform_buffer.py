"""Rules of `check_transform` about transforms in replay buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from gleanrl.errors import ConformanceError
from gleanrl.testing.report import Skip
from gleanrl.testing.runs import same, snapshot
from gleanrl.tree import as_key, as_path, iter_leaves


def read(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """`forward` returns a batch, and writes into none of the tensors that it is given."""
    given = batch.clone()
    tensors, before = dict(iter_leaves(given)), snapshot(given)
    out = make().eval()(given)
    if not isinstance(out, TensorDictBase):
        raise ConformanceError("read", "forward", "the batch that it made", f"{type(out).__name__}")
    for path, value in before.items():
        if not same(tensors[path], value):
            raise ConformanceError(
                "read", f"{as_key(path)!r}", "a new tensor: this one may be a buffer's memory", "it, changed"
            )


def written(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """`inv` returns what is to be written, or None, and leaves what it is given as it is."""
    given = batch.clone()
    before = snapshot(given)
    out = make().eval().inv(given)
    if out is not None and not isinstance(out, TensorDictBase):
        raise ConformanceError("written", "inv", "what is to be written, or None", f"{type(out).__name__}")
    after = snapshot(given)
    for path in before.keys() | after.keys():
        if path not in before or path not in after or not same(before[path], after[path]):
            raise ConformanceError(
                "written", f"{as_key(path)!r}", "what the user gave, unchanged", "it, changed"
            )


def inverse(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """What was written is read as it was."""
    transform = make().eval()
    both = set(transform.pairs()) & set(transform.pairs_inv())
    if not both or set(transform.pairs()) != set(transform.pairs_inv()):
        raise Skip("no key is mapped in both directions, or some aren't")
    stored = transform.inv(batch.clone())
    if stored is None:
        raise Skip("the batch is held back")
    out, want = snapshot(transform(stored)), snapshot(batch)
    for key in sorted({out_key for _, out_key in both}, key=str):
        path = as_path(key)
        if path in want and (path not in out or not same(out[path], want[path])):
            raise ConformanceError("inverse", f"{key!r}", "the value that was written", "another one")
