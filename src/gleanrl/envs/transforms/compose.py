"""`Compose`: a chain of transforms. `as_transform` turns plain callables into transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl._arrays.tensordicts import NestedKey
from gleanrl.data.specs import Composite
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.row_view import Record
from gleanrl.errors import ContainerError, InvalidTypeError, UnsupportedError

# The converter for TorchRL's transforms. `transforms.torchrl` registers it here: an import would be a cycle.
FOREIGN: list[Callable[[Any], Transform]] = []


class Compose(Transform):
    """A chain of transforms. Outputs pass the first transform first, inputs pass the last transform first.

    A chain supports indexing and iteration. `append`, `insert`, `pop`, ``del`` and assignment change it, also while it
    is in an environment.

    Args:
        transforms: transforms or callables (see `as_transform`).

    Raises:
        ContainerError: if a transform is in another container (also an AttributeError).

    Examples:
        >>> from gleanrl.envs.transforms import InitTracker, StepCounter
        >>> len(Compose(StepCounter(), InitTracker()))
        2
    """

    on_rows = True
    # Whether other containers may take its transforms while it is in no container. True for clones only.
    lends = False

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(as_transform(transform) for transform in transforms)
        for transform in self.chain():
            transform.set_container(self)

    @classmethod
    def uncontained(cls, transforms: Iterable[Transform]) -> Compose:
        """Return a chain of `transforms` without changing their containers."""
        new = cls()
        new.transforms = nn.ModuleList(transforms)
        return new

    def clone(self) -> Any:
        """Return a deep copy that is in no container.

        While the copy is outside an environment, other containers may take its transforms.
        """
        copy = super().clone()
        copy.lends = True
        return copy

    def set_container(self, container: Any) -> None:
        """Put the chain into `container`, empty the caches, and call `enter`.

        Raises:
            ContainerError: if the chain, or one of its transforms, is in another container (also an AttributeError).
        """
        for transform in self.chain() if self.lends else ():
            if transform.holder is not self:
                raise ContainerError(
                    f"{type(transform).__name__} was put from this Compose into another one; put transform.clone() "
                    "there"
                )
        super().set_container(container)

    def chain(self) -> list[Any]:
        """Return the transforms in order."""
        return list(self.transforms)

    def __len__(self) -> int:
        """Return the number of transforms."""
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        """Iterate over the transforms."""
        return iter(self.chain())

    def __getitem__(self, index: int | slice) -> Any:
        """Return the transform at `index`; for a slice, return a `Compose` of clones."""
        if isinstance(index, slice):
            return Compose(*(transform.clone() for transform in self.chain()[index]))
        return self.transforms[index]

    def append(self, transform: Any) -> None:
        """Add a transform, or a callable, at the end; see `insert`."""
        self.insert(len(self), transform)

    def insert(self, index: int, transform: Any) -> None:
        """Insert a transform, or a callable, before the one at `index`, which may be negative; ``len(self)`` appends.

        The caches of the chain and of its container are emptied. After an error nothing has changed.

        Raises:
            IndexError: if `index` is out of range.
            ContainerError: if the transform is in a container already, this one included (also an AttributeError).
            InvalidTypeError, UnsupportedError: see `as_transform`.
        """
        if not -len(self) <= index <= len(self):
            raise IndexError(f"insert: expected an index from {-len(self)} to {len(self)}, got {index}")
        transform = as_transform(transform)
        self._take(transform)
        self.transforms.insert(index if index >= 0 else len(self) + index, transform)
        self._changed()

    def pop(self, index: int = -1) -> Any:
        """Remove the transform at `index` and return it. It is then in no container.

        Raises:
            IndexError: if there is none.
        """
        transform = self[index]
        del self[index]
        return transform

    def __delitem__(self, index: int | slice) -> None:
        """Remove the transforms at `index`, which are then in no container; raise `IndexError` if there is none."""
        removed = self.chain()[index] if isinstance(index, slice) else [self[index]]
        del self.transforms[index]
        for transform in removed:
            transform.reset_parent()
        self._changed()

    def __setitem__(self, index: int, transform: Any) -> None:
        """Replace the transform at `index` by another transform or a callable; the same transform changes nothing.

        Raises:
            IndexError: if there is no transform at `index`.
            ContainerError: if the new transform is in a container already (also an AttributeError).
            InvalidTypeError: if `index` is a slice.
        """
        if isinstance(index, slice):
            raise InvalidTypeError(f"Compose: expected the index of one transform to replace, got {index}")
        before, transform = self[index], as_transform(transform)
        if transform is before:
            return
        self._take(transform)
        self.transforms[index] = transform
        before.reset_parent()
        self._changed()

    def _take(self, transform: Any) -> None:
        if transform.holder is self:
            raise ContainerError(
                f"{type(transform).__name__} is in this Compose already; use transform.clone()"
            )
        transform.set_container(self)

    def _changed(self) -> None:
        (self if self.holder is None else self.holder).empty_cache()

    # ----------------------------------------------------------------- hooks
    def _call(self, tensordict: Record) -> Record:
        for transform in self.chain():
            tensordict = transform._call(tensordict)
        return tensordict

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for transform in self.chain():
            next_tensordict = transform._step(tensordict, next_tensordict)
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        for transform in self.chain():
            tensordict_reset = transform._reset(tensordict, tensordict_reset)
        return tensordict_reset

    def _inv_call(self, tensordict: Record) -> Record:
        for transform in reversed(self.chain()):
            tensordict = transform.inverting()(tensordict)
            if tensordict is None:
                return None
        return tensordict

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        for transform in reversed(self.chain()):
            tensordict = transform._reset_env_preprocess(tensordict)
        return tensordict

    def forward(self, tensordict: Any) -> Any:
        """Return a sampled batch after all transforms, the first one first; the batch may be changed in place."""
        for transform in self.chain():
            tensordict = transform(tensordict)
        return tensordict

    def takes_rows(self) -> bool:
        """Return whether all transforms, and the chain's own hooks, accept a `Row`."""
        return super().takes_rows() and all(transform.takes_rows() for transform in self.chain())

    def inverts(self) -> bool:
        """Return whether any transform may change inputs."""
        return any(transform.inverts() for transform in self.chain())

    def keeps_first(self, rows: torch.Tensor | None) -> bool:
        """Return whether any transform has kept first observations; see `Transform.keeps_first`."""
        return any(transform.keeps_first(rows) for transform in self.chain())

    def written_keys(self) -> list[NestedKey]:
        """Return the output keys that any transform may write."""
        return list(dict.fromkeys(key for transform in self.chain() for key in transform.written_keys()))

    # ----------------------------------------------------------------- specs
    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Return the spec of all outputs of the last transform."""
        return self._through("transform_output_spec", output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the spec of all inputs of the last transform."""
        return self._through("transform_input_spec", input_spec)

    def _spec(self, role: str, spec: Any) -> Any:
        return self._through(f"transform_{role}_spec", spec)

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        """Return the device on the user's side, after the last transform."""
        return self._through("transform_env_device", device)

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        """Return the batch size on the user's side, after the last transform."""
        return self._through("transform_env_batch_size", batch_size)

    def _through(self, method: str, value: Any) -> Any:
        for transform in self.chain():
            value = getattr(transform, method)(value)
        return value

    # ------------------------------------------------------------- container
    def environment_before(self, child: Transform, after: Sequence[Transform] = ()) -> Any:
        """Return the environment with the transforms before `child`, followed by `after`.

        None if the chain is in no environment.
        """
        if self.holder is None:
            return None
        position = next(i for i, transform in enumerate(self.chain()) if transform is child)
        return self.holder.environment_before(self, [*self.chain()[:position], *after])

    def enter(self) -> None:
        """Switch the chain to evaluation mode if it is in an environment, and call `enter` of its transforms.

        Transforms that belong to another container aren't changed; see `uncontained`.
        """
        self.training = self.training and self.container is None
        for transform in self.chain():
            if transform.holder is self:
                transform.enter()

    def close(self) -> None:
        """Call `close` of all transforms, in order, also after an error; the last error is raised."""
        with ExitStack() as stack:
            for transform in reversed(self.chain()):
                stack.callback(transform.close)

    def dump(self, **kwargs: Any) -> None:
        """Call `dump` of all transforms, so that they write out their recordings."""
        for transform in self.chain():
            transform.dump(**kwargs)

    def empty_cache(self) -> None:
        """Forget keys and specs of all transforms that were derived from the environment."""
        super().empty_cache()
        for transform in getattr(self, "transforms", ()):
            transform.empty_cache()

    def set_missing_tolerance(self, mode: bool) -> None:
        """Set for all transforms whether absent keys are skipped; see `Transform.set_missing_tolerance`."""
        super().set_missing_tolerance(mode)
        for transform in self.chain():
            transform.set_missing_tolerance(mode)

    def __repr__(self) -> str:
        """Show the transforms, one on each line."""
        inner = "".join(f"\n    {transform!r}," for transform in self.chain())
        return f"{type(self).__name__}({inner}\n)" if inner else f"{type(self).__name__}()"


class CallableTransform(Transform):
    """Applies a function to the results of an environment's steps and resets, or to the sampled batches of a buffer.

    Args:
        function: takes a TensorDict and returns it, or another one.

    Raises:
        InvalidTypeError: at use, if the function returns None.
    """

    on_rows = False

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def _call(self, tensordict: Record) -> Record:
        out = self.function(tensordict)
        if out is None:
            raise InvalidTypeError(
                f"transform {self.function!r}: expected it to return the TensorDict, got None; a function that "
                "changes it in place has to return it as well"
            )
        return out

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._call(tensordict_reset)

    def writes_anything(self) -> bool:
        """Return True: a user's function may write any key."""
        return True

    def extra_repr(self) -> str:
        """Show the function."""
        return repr(self.function)


def as_transform(transform: Any) -> Any:
    """Return `transform` as a `Transform`.

    A plain callable becomes a `CallableTransform`. A transform of TorchRL's is converted, in most cases to a
    `ForeignTransform`.

    Raises:
        InvalidTypeError: if it is neither a transform nor a callable (also a TypeError).
        UnsupportedError: if it is a transform of a library other than TorchRL.
    """
    if isinstance(transform, Transform):
        return transform
    if hasattr(transform, "transform_observation_spec"):
        if any(cls.__module__.startswith("torchrl.") for cls in type(transform).__mro__):
            return FOREIGN[0](transform)
        raise UnsupportedError(
            f"transform: {type(transform).__name__} is another library's ({type(transform).__module__}); wrap an "
            "environment of that library in its own TransformedEnv, or take the transform of gleanrl.envs.transforms"
        )
    if not callable(transform):
        raise InvalidTypeError(f"transform: expected a Transform or a callable, got {transform!r}")
    return CallableTransform(transform)


def flattened(transform: Transform) -> list[Transform]:
    """Return the transforms of nested chains in order, as one list. A subclass of `Compose` isn't flattened."""
    if type(transform) is Compose:
        return [inner for child in transform.chain() for inner in flattened(child)]
    return [transform]
