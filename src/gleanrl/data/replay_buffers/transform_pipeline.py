"""The transforms of a buffer, which act on records that are written and on batches that are read."""

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
class Restorable(Protocol):
    """A transform that a write changes."""

    def restorer(self) -> Callable[[], None]:
        """Return a function that undoes the changes of further writes. It can't fail."""


@runtime_checkable
class HoldsSteps(Restorable, Protocol):
    """A transform that holds steps back until later steps are written."""

    def end_retained(self, ids: Collection[int]) -> set[int]:
        """Mark the last held-back step of abandoned trajectories as truncated and done.

        Returns:
            The ids whose last step was held back. No stored step of these trajectories is the last one.
        """


class Stage:
    """One transform with its two directions.

    An object with `inv` acts in both directions. The object itself (or its `forward`) acts on batches that are read,
    and `inv` acts on records that are written.

    A plain callable acts on batches, with one exception. If it changes the batch shape of data with more batch
    dimensions than the storage has, it acts on writes. The buffer finds out at the first write, by calling it on a
    clone of the data's corner. The direction is fixed once a write has succeeded.

    A `torch.nn.Module` is put into evaluation mode. Its modules that learn in use (`Stateful.learns`) stay in training
    mode.

    Args:
        transform: the object or callable.
        invert: whether to swap the two directions. A plain callable then acts on writes only.

    Raises:
        InvalidTypeError: the transform is neither callable nor has `forward`.
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
        """Set the directions; `on_write` says whether a plain callable acts on writes."""
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
        """Return the plain callable's result for a clone of `corner`; None if it raises.

        A callable for batches may fail on the corner, which has another shape. A real error shows at the first batch.
        """
        try:
            return self.transform(corner.clone())
        except Exception:
            return None


class Pipeline(Stateful[tuple[Any, ...]]):
    """The transforms of one buffer, in the order in which batches pass; written records pass in reverse order.

    Not thread-safe: the buffer changes it, and writes through it, under its lock.
    """

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self.settled = False
        """Whether a write has succeeded, which fixes the directions."""
        self.reads: tuple[Callable[[Any], Any], ...] = ()
        self.writes: tuple[tuple[Callable[[Any], Any], bool], ...] = ()

    def __len__(self) -> int:
        """Return the number of transforms."""
        return len(self._stages)

    def __getitem__(self, position: int) -> Any:
        """Return the transform at a position, as the user passed it."""
        return self._stages[position].transform

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the transforms, as the user passed them."""
        return (stage.transform for stage in self._stages)

    def __call__(self, batch: Any) -> Any:
        """Return the result of `read`."""
        return self.read(batch)

    def __repr__(self) -> str:
        """Show the transforms."""
        return f"{type(self).__name__}({', '.join(map(repr, self))})"

    @property
    def transforms(self) -> list[Any]:
        """The transforms, as the user passed them."""
        return list(self)

    # Programs call the methods of `torch.nn.Module` from `parameters` to `requires_grad_` on a chain of transforms.
    # They act on the transforms that are modules.

    def _modules(self) -> nn.ModuleList:
        return nn.ModuleList(transform for transform in self if isinstance(transform, nn.Module))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of the modules."""
        return self._modules().parameters(recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield the buffers of the modules."""
        return self._modules().buffers(recurse)

    def children(self) -> Iterator[nn.Module]:
        """Yield the transforms that are modules."""
        return self._modules().children()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules and all their submodules."""
        return islice(self._modules().modules(), 1, None)

    def to(self, *args: Any, **kwargs: Any) -> Pipeline:
        """Move the modules, as `torch.nn.Module.to` does; return this pipeline."""
        self._modules().to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Pipeline:
        """Set the modules to training mode; return this pipeline."""
        self._modules().train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set the modules to evaluation mode; return this pipeline."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Pipeline:
        """Set whether the modules' parameters require gradients; return this pipeline."""
        self._modules().requires_grad_(requires_grad)
        return self

    def take(self, other: Pipeline) -> None:
        """Replace all transforms by another pipeline's; later insertions into either don't affect the other."""
        self.settled = other.settled
        self._set([*other._stages])

    def insert(self, position: Any, transform: Any, invert: bool) -> None:
        """Insert a transform before the one at `position`, in ``[-len, len]``; see `Stage`.

        Raises:
            InvalidArgumentError: another position.
            InvalidTypeError: see `Stage`.
        """
        count = len(self._stages)
        if isinstance(position, bool) or not isinstance(position, int) or not -count <= position <= count:
            raise InvalidArgumentError(
                f"index: expected a position in [{-count}, {count}] for {count} transforms, got {position!r}"
            )
        stage = Stage(transform, invert)
        stages = [*self._stages]
        stages.insert(position, stage)
        # `reads` and `writes` must match the stages despite an interrupt.
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
        """Determine which plain callables act on writes, and set their directions.

        Called at every write until one has succeeded; later calls do nothing. Each plain callable may be called once.

        Args:
            data: the written data.
            slot_dims: the number of its batch dimensions that the storage takes as slots.
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
        """Return a copy of each transform's state; None for transforms without one."""
        return tuple(
            copy.deepcopy(stage.transform.state_dict()) if hasattr(stage.transform, "state_dict") else None
            for stage in self._stages
        )

    def parse(self, state: Any) -> tuple[Any, ...]:
        """Return the values of the transforms' saved states.

        A transform of another library loads its state into a copy as a check. A different number of transforms is
        accepted if neither the saved nor the present ones have a state; the present ones then stay unchanged.

        Raises:
            SchemaError: the states of other transforms, or a state that doesn't fit.
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
                    "have a state: load into a buffer with the saved transforms, and append others afterwards"
                )
            return own
        return tuple(
            _parsed(position, stage.transform, saved)
            for position, (stage, saved) in enumerate(zip(self._stages, state, strict=True))
        )

    def adopt(self, value: tuple[Any, ...]) -> None:
        """Take over a value that `parse` returned."""
        for stage, part in zip(self._stages, value, strict=True):
            if isinstance(stage.transform, Stateful):
                stage.transform.adopt(part)
            elif part is not None:
                stage.transform.load_state_dict(copy.deepcopy(part))

    def write(self, data: Any, slot_dims: int) -> Any:
        """Return transformed data to store; None if a transform holds all of it back.

        Transforms get a shallow copy of a TensorDict, dictionary or tuple, so new and replaced entries don't reach
        `data`. A change of a tensor in place does. Records of a list are transformed one by one.

        Args:
            data: the written data.
            slot_dims: the number of its batch dimensions that the storage takes as slots. A plain callable that acts on
                writes skips data with no more dimensions than that.
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

    def end_retained(self, ids: Collection[int]) -> set[int]:
        """Mark the held-back last steps of abandoned trajectories and return their ids; see `HoldsSteps`."""
        return set[int]().union(
            *(module.end_retained(ids) for module in _modules_of(self._stages, HoldsSteps))
        )

    def restorer(self) -> Callable[[], None]:
        """Return a function that undoes the changes of further writes to transforms; see `Restorable`."""
        # Only an inverted transform learns from writes; others that learn would be copied in vain.
        inverted = [stage for stage in self._stages if stage.invert]
        changing = [*_modules_of(self._stages, HoldsSteps), *_modules_of(inverted, Restorable)]
        restorers = [module.restorer() for module in changing]

        def restore() -> None:
            for each in restorers:
                each()

        return restore

    def read(self, batch: Any) -> Any:
        """Return a batch after all transforms, which may change `batch` in place.

        Raises:
            InvalidTypeError: a transform returned None, for example because it changes the batch in place only.
        """
        for transform in self.reads:
            batch = transform(batch)
            if batch is None:
                raise none_returned("transform", transform)
        return batch


def _modules_of(stages: list[Stage], kind: type) -> list[Any]:
    """Return the modules of a kind in the transforms of some stages."""
    modules = (stage.transform for stage in stages if isinstance(stage.transform, nn.Module))
    # By `issubclass`, which caches its result, because every write passes here. `isinstance` takes 20 us a module.
    return [module for chain in modules for module in chain.modules() if issubclass(type(module), kind)]


def _says_something(state: Any) -> bool:
    """Return whether a state has any value other than None, at any depth."""
    if isinstance(state, Mapping):
        return any(map(_says_something, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_says_something, state))
    return state is not None


def _parsed(position: int, transform: Any, state: Any) -> Any:
    """Return the value of one transform's saved state."""
    where = f"load_state_dict: transform {position} ({type(transform).__name__})"
    has_state = hasattr(transform, "load_state_dict")
    if (state is None) is has_state:
        raise SchemaError(f"{where}: expected {'a state' if has_state else 'no state'}, got {state!r:.80}")
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
    """Return a copy of records that transforms may change."""
    return _pytree.tree_map(
        lambda leaf: leaf.clone() if hasattr(leaf, "clone") else copy.deepcopy(leaf),
        records,
        is_leaf=is_tensor_collection,
    )
