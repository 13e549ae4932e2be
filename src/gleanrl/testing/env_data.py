"""Rules of `check_env` about the data that an environment returns."""

from __future__ import annotations

from collections.abc import Collection

import torch

from gleanrl.data.specs import TensorSpec
from gleanrl.data.specs.geometry import fits
from gleanrl.errors import ConformanceError
from gleanrl.objects import values_of
from gleanrl.rollouts.traits import EnvTraits
from gleanrl.testing.runs import Leaves, Runs, rows, same, shown
from gleanrl.tree import FLAGS, Path, as_key, as_path


def contract(runs: Runs) -> None:
    """A run doesn't break off."""
    _ = runs.first


def inputs(runs: Runs) -> None:
    """A step changes nothing that it is given."""
    for place, path in runs.first.changed:
        raise ConformanceError(
            "input", f"{as_key(path)!r}, which {place} was given", "the same value afterwards", "another one"
        )


def specs(runs: Runs) -> None:
    """Keys, shapes, dtypes and values are as declared."""
    root, outcome = runs.declared
    for place, leaves, after in runs.places():
        if after:
            as_declared("specs", place, leaves, outcome, runs.states)
        else:
            as_declared("specs", place, leaves, root, leaves)


def as_declared(
    rule: str, place: str, leaves: Leaves, declared: dict[Path, TensorSpec], besides: Collection[Path]
) -> None:
    """Check keys, shapes, dtypes and domains of `leaves`.

    Args:
        rule: the rule that messages name.
        place: where the data came from.
        leaves: the data.
        declared: path -> spec.
        besides: what may be there, too.
    """
    missing, extra = set(declared) - set(leaves), set(leaves) - set(declared) - set(besides)
    if missing or extra:
        keys = sorted(map(str, map(as_key, missing or extra)))
        got = f"no {keys}" if missing else f"{keys} beside them"
        raise ConformanceError(rule, place, f"the keys {sorted(map(str, map(as_key, declared)))}", got)
    for path, spec in declared.items():
        leaf, where = leaves[path], f"{as_key(path)!r} of {place}"
        numbers = isinstance(leaf, torch.Tensor)
        if numbers and (not _shaped(leaf.shape, spec.shape) or leaf.dtype != spec.dtype):
            raise ConformanceError(
                rule, where, f"{tuple(spec.shape)} {spec.dtype}", f"{tuple(leaf.shape)} {leaf.dtype}"
            )
        if not all(part.is_in(value) for value, part in values_of(leaf, spec)):
            raise ConformanceError(rule, where, f"a value of {spec!r}", shown(leaf))


def _shaped(shape: torch.Size, wanted: torch.Size) -> bool:
    return len(shape) == len(wanted) and fits(shape, wanted)


def finite(runs: Runs) -> None:
    """No NaN and no infinity in observations and rewards; last observations that are lost may be NaN."""
    lost = EnvTraits.of(runs.env).loses_last
    for place, leaves, after in runs.places():
        if lost and after and bool(leaves[("done",)].any()):
            continue
        for path in runs.declared[1]:
            leaf = leaves.get(path)
            if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
                continue
            if not bool(leaf.isfinite().all()):
                raise ConformanceError(
                    "finite", f"{as_key(path)!r} of {place}", "finite numbers", shown(leaf)
                )


def flags(runs: Runs) -> None:
    """Done is terminated or truncated; after a reset all flags are False."""
    groups = {as_path(key)[:-1] for key in runs.env.done_keys}
    for place, leaves, _ in runs.places():
        for group in groups:
            done, terminated = leaves[(*group, "done")], leaves[(*group, "terminated")]
            either = terminated | leaves.get((*group, "truncated"), torch.zeros_like(terminated))
            if not torch.equal(done, either):
                where = f"{as_key((*group, 'done'))!r} of {place}"
                got = f"done {done.tolist()}, terminated or truncated {either.tolist()}"
                raise ConformanceError("flags", where, "terminated or truncated", got)
    may = EnvTraits.of(runs.env).allow_done_after_reset
    starts = [("reset", runs.first.first, torch.ones(runs.subject.batch_size, dtype=torch.bool))]
    starts += [
        (f"the reset after step {t}", step.following, step.fresh) for t, step in enumerate(runs.first.steps)
    ]
    for place, leaves, fresh in starts:
        for group in groups:
            for name in FLAGS:
                flag = leaves.get((*group, name))
                if flag is not None and not may and bool(rows(flag, fresh).any()):
                    raise ConformanceError(
                        "flags", f"{as_key((*group, name))!r} of {place}", "False", shown(flag)
                    )


def aliasing(runs: Runs) -> None:
    """A tensor that was returned never changes later."""
    for held in runs.first.held:
        if not same(held.leaf, held.copy):
            raise ConformanceError(
                "aliasing",
                f"{as_key(held.path)!r} of {held.place}",
                f"{shown(held.copy)} for good, as it was returned",
                f"{shown(held.leaf)} later: the environment overwrites its own tensors; return copies",
            )
