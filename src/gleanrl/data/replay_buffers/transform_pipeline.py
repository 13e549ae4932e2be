"""Transforms of a buffer: what records go through on their way in and batches on their way out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import nn
from torch.utils import _pytree

from gleanrl._os.interrupts import to_the_end
from gleanrl._state.state import Stateful
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError


@runtime_checkable
class HoldsSteps(Protocol):
    """A transform that holds steps back until later ones are written."""

    def end_held(self, ids: Collection[int]) -> set[int]:
        """Mark the last step of trajectories that nobody goes on with as truncated, and done, if it's held back.

        Returns:
            The ids of those of which it is: none of their stored steps is the last.
        """


class Stage:
    """One transform in its two directions.

    An object with `inv` acts in both: itself (or its `forward`) on batches that are read, `inv` on records
    that are written. A plain callable acts on batches, except one that changes the batch shape of data with
    more batch dimensions than the storage has: that one acts on the way in. Which it is shows at the buffer's
    first write, by calling it on a clone of the data's corner, and stays so.

    Args:
        transform: the object or callable.
        invert: whether the two directions change places; a plain callable then acts on the way in only.
    """

    def __init__(self, transform: Any, invert: bool = False) -> None:
        inverse, read = getattr(transform, "inv", None), transform
        if not callable(transform) and callable(inverse):
            read = getattr(transform, "forward", None)
        if not callable(read):
            raise InvalidTypeError(
                f"transform: expected a callable or an object with forward and inv, got {transform!r}"
            )
        if isinstance(transform, nn.Module):
            learning = [m for m in transform.modules() if isinstance(m, Stateful) and m.learns and m.training]
            transform.eval()
            for module in learning:
                module.train()
        self.transform, self._read = transform, read
        self.invert = invert
        self.is_plain = not callable(inverse)
        self.on_read: Callable[[Any], Any] | None = None
        self.on_write: Callable[[Any], Any] | None = None
        self.face(on_write=False)

    def face(self, on_write: bool) -> None:
        """Set the directions; `on_write` says whether a plain callable acts on the way in."""
        transform = self.transform
        forward: Callable[[Any], Any] | None = None if self.is_plain and on_write else self._read
        backward: Callable[[Any], Any] | None = None
        if not self.is_plain:
            backward = transform.inv
        elif on_write:
            backward = transform
        swap = self.invert and not (self.is_plain and on_write)
        self.on_read, self.on_write = (backward, forward) if swap else (forward, backward)

    def try_on(self, corner: TensorDictBase) -> Any:
        """Return what the plain callable makes of a clone of `corner`; None if it raises.

        A callable that is made for samples, which have another shape, may well raise here: what is wrong with
        it, if anything, shows at the first sample.
        """
        try:
            return self.transform(corner.clone())
        except Exception:
            return None


class Pipeline(Stateful[tuple[Any, ...]]):
    """The transforms of one buffer, in the order in which batches pass; records pass the other way round.

    Not thread-safe: the buffer changes it, and writes through it, under its lock.
    """

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self.settled = False
        """Whether a first write succeeded: the directions stay as they are."""
        self.reads: tuple[Callable[[Any], Any], ...] = ()
        self.writes: tuple[tuple[Callable[[Any], Any], bool], ...] = ()

    def __len__(self) -> int:
        """Return the number of transforms."""
        return len(self._stages)

    def __getitem__(self, place: int) -> Any:
        """Return the transform at a place, as it was given."""
        return self._stages[place].transform

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the transforms, as they were given."""
        return (stage.transform for stage in self._stages)

    def __call__(self, batch: Any) -> Any:
        """Return what `read` makes of a batch."""
        return self.read(batch)

    def __repr__(self) -> str:
        """Show the transforms."""
        return f"{type(self).__name__}({', '.join(map(repr, self))})"

    @property
    def transforms(self) -> list[Any]:
        """The transforms, as they were given."""
        return list(self)

    # What programs ask a chain of modules for, of those transforms that are modules.

    def _modules(self) -> nn.ModuleList:
        return nn.ModuleList(transform for transform in self if isinstance(transform, nn.Module))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield what may be learned."""
        return self._modules().parameters(recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield what modules hold beside."""
        return self._modules().buffers(recurse)

    def children(self) -> Iterator[nn.Module]:
        """Yield the modules."""
        return self._modules().children()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules, and all that are in them."""
        return islice(self._modules().modules(), 1, None)

    def to(self, *args: Any, **kwargs: Any) -> Pipeline:
        """Move the modules, as `torch.nn.Module.to` does; return this."""
        self._modules().to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Pipeline:
        """Put the modules into training mode; return this."""
        self._modules().train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put the modules into evaluation mode; return this."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Pipeline:
        """Say whether what may be learned is; return this."""
        self._modules().requires_grad_(requires_grad)
        return self

    # Changes

    def take(self, other: Pipeline) -> None:
        """Begin with the transforms of another one, to which further ones can be added."""
        self.settled = other.settled
        self._set([*other._stages])

    def insert(self, position: Any, transform: Any, invert: bool) -> None:
        """Put a transform before the one at `position`, in ``[-len, len]``; see `Stage`."""
        count = len(self._stages)
        if isinstance(position, bool) or not isinstance(position, int) or not -count <= position <= count:
            raise InvalidArgumentError(
                f"index: expected a place among {count} transforms, in [{-count}, {count}], got {position!r}"
            )
        stage = Stage(transform, invert)
        stages = [*self._stages]
        stages.insert(position, stage)
        to_the_end(lambda: self._set(stages))

    def _set(self, stages: list[Stage]) -> None:
        self._stages = stages
        self._bind()

    def _bind(self) -> None:
        self.reads = tuple(stage.on_read for stage in self._stages if stage.on_read is not None)
        self.writes = tuple(
            (stage.on_write, stage.is_plain and not stage.invert)
            for stage in reversed(self._stages)
            if stage.on_write is not None
        )

    def settle(self, data: Any, slot_dims: int) -> None:
        """Find out, at the first write, which plain callables act on the way in.

        Args:
            data: what is written.
            slot_dims: how many batch dimensions of it the storage takes as slots.
        """
        if self.settled:
            return
        plain = [stage for stage in reversed(self._stages) if stage.is_plain and not stage.invert]
        for stage in plain:
            stage.face(on_write=False)
        if is_tensor_collection(data) and data.numel():
            corner = data[(slice(1),) * data.ndim] if data.ndim > slot_dims else data
            for stage in plain:
                if corner.ndim <= slot_dims:
                    break
                result = stage.try_on(corner)
                if is_tensor_collection(result) and result.batch_size != corner.batch_size:
                    stage.face(on_write=True)
                    corner = result
        self._bind()

    def snapshot(self) -> tuple[Any, ...]:
        """Return a copy of the state of each transform that has one, None for the others."""
        return tuple(
            copy.deepcopy(stage.transform.state_dict()) if hasattr(stage.transform, "state_dict") else None
            for stage in self._stages
        )

    def parse(self, state: Any) -> tuple[Any, ...]:
        """Return the values of the transforms' saved states; those that aren't ours are tried on a copy.

        Other transforms than were saved are fine as long as none of either has a state.

        Raises:
            SchemaError: states of other transforms than these, or one that doesn't fit.
        """
        if not isinstance(state, (list, tuple)):
            raise SchemaError(
                f"load_state_dict: expected a list of the transforms' states, got {type(state).__name__}"
            )
        if len(state) != len(self._stages):
            own = self.snapshot()
            if _says_something(state) or _says_something(own):
                raise SchemaError(
                    f"load_state_dict: the state has {len(state)} transforms, the buffer {len(self._stages)}, and some "
                    "have a state: load into a buffer with those that were saved, and append others afterwards"
                )
            return own
        return tuple(
            _parsed(place, stage.transform, saved)
            for place, (stage, saved) in enumerate(zip(self._stages, state, strict=True))
        )

    def adopt(self, value: tuple[Any, ...]) -> None:
        """Go on from what `parse` returned."""
        for stage, part in zip(self._stages, value, strict=True):
            if isinstance(stage.transform, Stateful):
                stage.transform.adopt(part)
            elif part is not None:
                stage.transform.load_state_dict(copy.deepcopy(part))

    def write(self, data: Any, slot_dims: int) -> Any:
        """Return `data` as it is to be stored, None if a transform holds it back; `data` stays as it is.

        Args:
            data: what is written.
            slot_dims: how many batch dimensions of it the storage takes as slots; a plain callable that acts
                on the way in has nothing to do with data that has no more.
        """
        if isinstance(data, list):
            written = [self.write(record, slot_dims - 1) for record in data]
            return [record for record in written if record is not None] or None
        for inverse, only_deeper in self.writes:
            if is_tensor_collection(data):
                if only_deeper and data.ndim <= slot_dims:
                    continue
                data = data.clone(recurse=False)
            elif isinstance(data, (dict, tuple)):
                data = _pytree.tree_map(lambda leaf: leaf, data)
            data = inverse(data)
            if data is None:
                return None
        return data

    def end_held(self, ids: Collection[int]) -> set[int]:
        """Mark the last steps of trajectories that nobody goes on with, if they are held back: see `HoldsSteps`."""
        holding = [module for module in self.modules() if isinstance(module, HoldsSteps)]
        return set[int]().union(*(module.end_held(ids) for module in holding))

    def read(self, batch: Any) -> Any:
        """Return a batch as the user gets it.

        Raises:
            InvalidTypeError: a transform returned None, as one does that changes the batch in place only.
        """
        for transform in self.reads:
            batch = transform(batch)
            if batch is None:
                raise none_returned("transform", transform)
        return batch


def _says_something(state: Any) -> bool:
    """Return whether there is anything in a state, however deep."""
    if isinstance(state, Mapping):
        return any(map(_says_something, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_says_something, state))
    return state is not None


def _parsed(place: int, transform: Any, state: Any) -> Any:
    """Return the value of one transform's saved state."""
    where = f"load_state_dict: transform {place} ({type(transform).__name__})"
    has_state = hasattr(transform, "load_state_dict")
    if (state is None) is has_state:
        raise SchemaError(f"{where}: expected {'a state' if has_state else 'none'}, got {state!r:.80}")
    if not has_state:
        return None
    try:
        if isinstance(transform, Stateful):
            return transform.parse(state)
        copy.deepcopy(transform).load_state_dict(copy.deepcopy(state))
    except SchemaError:
        raise
    except Exception as cause:
        raise SchemaError(f"{where}: {cause}") from cause
    return copy.deepcopy(state)


def none_returned(kind: str, function: Callable[[Any], Any]) -> InvalidTypeError:
    """Return the error for a transform or `collate_fn` that returned None instead of a batch."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return InvalidTypeError(
        f"{kind} {name}: expected it to return the batch, got None; one that changes the batch in place has "
        "to return it as well"
    )


def copied(records: Any) -> Any:
    """Return a copy of records for transforms to change."""
    return _pytree.tree_map(
        lambda leaf: leaf.clone() if hasattr(leaf, "clone") else copy.deepcopy(leaf),
        records,
        is_leaf=is_tensor_collection,
    )
