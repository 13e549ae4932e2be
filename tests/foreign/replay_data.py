"""Input data for buffers of gleanrl and TorchRL, and comparison of their results."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    tensorclass,
)


@tensorclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


def rows(count: int, first: int = 0) -> TensorDict:
    """Return steps of trajectories of five, ``[count]``."""
    i = torch.arange(first, first + count)
    done = (i % 5 == 4)[:, None]
    obs = i.float()[:, None].expand(count, 3)
    flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    return TensorDict(
        {
            "i": i,
            "obs": obs.clone(),
            "action": i[:, None] % 2 == 0,
            "next": {"obs": obs + 1, "reward": i.float()[:, None], **flags},
            "collector": {"traj_ids": i // 5},
        },
        [count],
    )


def streams(count: int, steps: int, first: int = 0) -> TensorDict:
    """Return steps of several environments, ``[count, steps]``."""
    return rows(count * steps, first).reshape(count, steps)


def _tree(count: int, first: int) -> dict[str, Any]:
    return {
        "a": (torch.arange(first, first + count), [torch.ones(count)]),
        "b": {"c": torch.zeros(count, 2)},
    }


KINDS = {
    "TensorDict": lambda n, f: TensorDict({"x": torch.arange(f, f + n), "g": {"y": torch.ones(n, 1)}}, [n]),
    "steps": rows,
    "tensorclass": lambda n, f: Record(x=torch.arange(f, f + n), y=torch.ones(n, 1), batch_size=[n]),
    "tensor": lambda n, f: torch.arange(f, f + n),
    "matrix": lambda n, f: torch.arange(f, f + n)[:, None].expand(n, 2).float(),
    "dictionary": lambda n, f: {"a": torch.arange(f, f + n), "b": torch.zeros(n, 2)},
    "tuple": lambda n, f: (torch.arange(f, f + n), torch.zeros(n, 2)),
    "tree": _tree,
    "texts": lambda n, f: TensorDict(
        {"x": torch.arange(f, f + n), "s": NonTensorStack(*(f"s{k}" for k in range(f, f + n)))}, [n]
    ),
    "group": lambda n, f: TensorDict({"x": torch.arange(f, f + n), "e": TensorDict({}, [n])}, [n]),
    "list of TensorDicts": lambda n, f: [TensorDict({"x": torch.tensor(k)}) for k in range(f, f + n)],
    "list of tensors": lambda n, f: [torch.tensor(k) for k in range(f, f + n)],
    "list of numbers": lambda n, f: [*range(f, f + n)],
    "list of texts": lambda n, f: [f"s{k}" for k in range(f, f + n)],
    "list of dictionaries": lambda n, f: [
        {"a": torch.tensor(k), "b": torch.zeros(2)} for k in range(f, f + n)
    ],
    "list of tuples": lambda n, f: [(torch.tensor(k), torch.zeros(2)) for k in range(f, f + n)],
}


class Shape:
    """A result of which only structure, shapes and dtypes are determined."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Raised:
    """The exception that a call raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


OURS_OR_ELSEWHERE = ("index", "_weight", "priority_weight", "_generation", "generation")
"""Entries that gleanrl adds to samples, while TorchRL stores them or names them differently."""


def plain(value: Any, values: bool = True) -> Any:
    """Return a comparable form of a result; it is equal for equal results of both libraries."""
    if isinstance(value, Shape):
        return plain(value.value, False)
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.tolist() if values else None)
    if isinstance(value, (NonTensorData, NonTensorStack)):
        return ("other", tuple(value.batch_size), value.tolist() if values else None)
    if isinstance(value, LazyStackedTensorDict):
        parts = [plain(part, values) for part in value.unbind(value.stack_dim)]
        return ("lazy", parts if values else (len(parts), [*value.keys()] and None))
    if is_tensor_collection(value):
        entries = ((key, value.get(key)) for key in value.keys())
        return (
            type(value).__name__,
            tuple(value.batch_size),
            {key: plain(entry, values) for key, entry in entries if key not in OURS_OR_ELSEWHERE},
        )
    if isinstance(value, dict):
        return {
            str(key): plain(entry, values)
            for key, entry in value.items()
            if key not in OURS_OR_ELSEWHERE or key == "index"
        }
    return (
        (type(value), [plain(part, values) for part in value]) if isinstance(value, (list, tuple)) else value
    )


def outcome(call: Any) -> Any:
    """Return the comparable result of a call, or the exception that it raised."""
    torch.manual_seed(0)
    try:
        found = call()
        return found if isinstance(found, Raised) else plain(found)
    except Exception as error:
        return Raised(error)


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differing results of calls that succeed on TorchRL; programs can't rely on any other call."""
    return {
        name: (found, ours.get(name))
        for name, found in theirs.items()
        if not isinstance(found, Raised) and found != ours.get(name)
    }
