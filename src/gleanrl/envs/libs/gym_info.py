"""Readers that copy entries of gymnasium's info dictionaries into TensorDicts."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path
from gleanrl.data.specs import Composite, TensorSpec, Unbounded
from gleanrl.envs.libs.gym_codecs import Array, ArrayCodec, as_array
from gleanrl.errors import EnvironmentContractError, InvalidArgumentError, InvalidTypeError


class BaseInfoDictReader(ABC):
    """Reads entries of info dictionaries. Derive from it for entries that `default_info_dict_reader` can't read."""

    @abstractmethod
    def __call__(self, info: Mapping[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write entries of `info` into `tensordict` and return it."""

    @property
    @abstractmethod
    def info_spec(self) -> Composite | None:
        """The specs of the entries; None while they are unknown."""


class default_info_dict_reader(BaseInfoDictReader):
    """Reads numbers and arrays of numbers from info into entries of the same names.

    An entry that an info lacks is zero in that step; some environments report entries only at the end of an episode.
    Dictionaries inside info give nested entries.

    If no spec is given, the reader learns its entries when it is set on an environment. The environment is reset and
    takes one random step, and the two infos fix the shapes and dtypes. Python integers give int64, Python floats
    torch's default dtype.

    Args:
        keys: the entries to read. Nested entries are tuples, and a group includes all of its entries. None reads all
            entries of `spec` or, without a spec, every number and array of numbers.
        spec: the specs of the entries: a mapping, a Composite, or a sequence parallel to `keys`. The spec of a group is
            a mapping or a Composite.
        ignore_private: whether to skip names that begin with an underscore.

    Raises:
        InvalidArgumentError: if `keys` and `spec` don't match.
        InvalidTypeError: if `keys` is a string, or `spec` holds anything but specs.

    Examples:
        >>> reader = default_info_dict_reader(["speed"], spec=[Unbounded((2,))])
        >>> reader.info_spec["speed"].shape
        torch.Size([2])
    """

    def __init__(
        self,
        keys: Sequence[NestedKey] | None = None,
        spec: Mapping[Any, TensorSpec] | Sequence[TensorSpec] | Composite | None = None,
        ignore_private: bool = True,
    ) -> None:
        if isinstance(keys, str):
            raise InvalidTypeError(f"keys: expected a list of keys, got the string {keys!r}")
        self.ignore_private = ignore_private
        self.keys = None if keys is None else self._public([as_path(key) for key in keys])
        self._codecs: tuple[ArrayCodec, ...] | None = None
        specs = _specs_by_path(self.keys, spec)
        if specs is not None:
            self._codecs = tuple(ArrayCodec(path, specs[path]) for path in self._public(list(specs)))

    @property
    def info_spec(self) -> Composite | None:
        """The specs of the entries; None while they are unknown."""
        if self._codecs is None:
            return None
        return Composite({as_key(codec.key): codec.spec for codec in self._codecs})

    @property
    def codecs(self) -> tuple[ArrayCodec, ...]:
        """The codec of each entry, in the order of `encode`.

        Raises:
            InvalidArgumentError: if the entries aren't known yet.
        """
        if self._codecs is None:
            raise InvalidArgumentError(
                "info reader: its entries aren't known yet: set it on an environment, or pass spec"
            )
        return self._codecs

    def learn(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Fix the entries, shapes and dtypes from `infos`. If infos differ in an entry, the later one counts.

        With `keys` None, entries that aren't numbers are left out with a warning. Entries that were known are replaced.

        Raises:
            EnvironmentContractError: if none of the infos has one of `keys`, or its value isn't numeric.
        """
        found: dict[Path, TensorSpec] = {}
        strange: dict[Path, str] = {}
        for info in infos:
            for path, value in _entries(info):
                spec = _spec_of(value)
                if spec is None:
                    strange[path] = type(value).__name__
                else:
                    found[path] = spec
        if self.keys is None:
            wanted = self._public(list(found))
            left = sorted(str(as_key(path)) for path in self._public(list(strange)) if path not in found)
            if left:
                warnings.warn(f"info entries that aren't numbers are left out: {left}", stacklevel=3)
        else:
            wanted = [path for key in self.keys for path in self._public(_within(key, found)) or [key]]
        unknown = [as_key(path) for path in wanted if path not in found]
        if unknown:
            raise EnvironmentContractError(
                f"info reader: {unknown} aren't numbers in the infos of a reset and a step, which hold "
                f"{[as_key(path) for path in (*found, *strange)]}; pass their specs to read them nevertheless"
            )
        self._codecs = tuple(ArrayCodec(path, found[path]) for path in wanted)

    def encode(self, info: Mapping[str, Any]) -> list[Array]:
        """Return one array for each of `codecs`, zeros for entries that `info` lacks. Arrays may share memory with it.

        Raises:
            EnvironmentContractError: if a value doesn't fit its spec.
            InvalidArgumentError: if the entries aren't known yet.
        """
        out: list[Array] = []
        for codec in self.codecs:
            value: Any = info
            for part in codec.key:
                value = value.get(part) if isinstance(value, Mapping) else None
            out.append(np.zeros(codec.shape, codec.dtype) if value is None else codec.encode(value))
        return out

    def __call__(self, info: Mapping[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries of `info` into `tensordict`, as copies on the CPU, and return it.

        If the entries aren't known yet, they are learned from `info`; see `learn`.
        """
        if self._codecs is None:
            self.learn([info])
        for codec, array in zip(self.codecs, self.encode(info), strict=True):
            tensordict.set(as_key(codec.key), torch.from_numpy(np.array(array)))
        return tensordict

    def _public(self, paths: list[Path]) -> list[Path]:
        if not self.ignore_private:
            return paths
        return [path for path in paths if not any(part.startswith("_") for part in path)]


class FunctionReader(BaseInfoDictReader):
    """Reader made of a function ``read(info, tensordict)``. Its entries are the tensors that the function writes.

    Args:
        function: writes into the TensorDict. It may return another TensorDict, which is then used instead.
        infos: sample infos. The function is called with each of them once, to learn its entries.
    """

    def __init__(self, function: Callable[..., Any], infos: Sequence[Mapping[str, Any]]) -> None:
        self._function = function
        entries: TensorDictBase = TensorDict({}, [])
        for info in infos:
            entries = self(info, entries)
        found = {key: value for key, value in entries.items(True, True) if isinstance(value, torch.Tensor)}
        self._spec = Composite(
            {key: Unbounded(value.shape, dtype=value.dtype) for key, value in found.items()}
        )

    @property
    def info_spec(self) -> Composite | None:
        """The specs of the entries; None if the function wrote none."""
        return None if self._spec.is_empty() else self._spec

    def __call__(self, info: Mapping[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Call the function and return its result, or `tensordict` if it returns None."""
        out: TensorDictBase | None = self._function(info, tensordict)
        return tensordict if out is None else out


def _specs_by_path(
    keys: list[Path] | None, spec: Mapping[Any, TensorSpec] | Sequence[TensorSpec] | Composite | None
) -> dict[Path, TensorSpec] | None:
    if spec is None:
        return None
    if isinstance(spec, (Composite, Mapping)):
        specs = dict(spec_entries(spec))
    elif keys is not None and len(keys) == len(spec):
        specs = dict(spec_entries(dict(zip(keys, spec, strict=True))))
    else:
        raise InvalidArgumentError(
            f"spec: a sequence needs as many keys, got {len(spec)} specs and keys {keys}"
        )
    if keys is None:
        return specs
    wanted = {path: _within(path, specs) for path in keys}
    missing = [as_key(path) for path, found in wanted.items() if not found]
    if missing:
        raise InvalidArgumentError(f"spec: no spec for the keys {missing}; got {list(map(as_key, specs))}")
    return {path: specs[path] for found in wanted.values() for path in found}


def _within(group: Path, paths: Iterable[Path]) -> list[Path]:
    """Return the paths that equal `group` or lie below it."""
    return [path for path in paths if path[: len(group)] == group]


def _entries(info: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in info.items():
        path = (*prefix, str(name))
        if isinstance(value, Mapping):
            yield from _entries(value, path)
        else:
            yield path, value


def _spec_of(value: Any) -> TensorSpec | None:
    """Return the spec for values like `value`; None if it isn't numeric."""
    try:
        array, chosen = as_array(value)
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    except (ValueError, TypeError):
        return None
    if not chosen and dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return Unbounded(shape=array.shape, dtype=dtype)


def ready_reader(requested: Any, ignore_private: bool, sample: Callable[[], list[Mapping[str, Any]]]) -> Any:
    """Return a reader with known entries from the argument of `GymLikeEnv.set_info_dict_reader`.

    Args:
        requested: the reader; None for one that reads every numeric entry.
        ignore_private: for `requested` None: whether to skip names that begin with an underscore.
        sample: returns infos from which the reader learns its entries.

    Raises:
        InvalidArgumentError: if the reader has no `info_spec` and writes nothing.
        EnvironmentContractError: see `default_info_dict_reader.learn`.
    """
    reader = default_info_dict_reader(ignore_private=ignore_private) if requested is None else requested
    if isinstance(reader, default_info_dict_reader) and reader.info_spec is None:
        reader.learn(sample())
    if inspect.isroutine(reader):
        reader = FunctionReader(reader, sample())
    if not callable(reader) or getattr(reader, "info_spec", None) is None:
        raise InvalidArgumentError(
            "info_dict_reader: expected a callable whose info_spec declares its entries, or a function that writes "
            f"entries for the infos of a reset and a step, got {requested!r}"
        )
    return reader


def with_reader_entries(reader: Any, spec: Composite, reserved: Collection[str]) -> Composite:
    """Return a copy of `spec` with the entries of `reader` added.

    Raises:
        InvalidArgumentError: if the key of an entry is taken, or begins with one of the `reserved` names.
    """
    spec = spec.clone()
    used = {as_path(key) for key in spec.keys(True, True)}
    for path, leaf in spec_entries(reader.info_spec):
        if path in used or path[0] in reserved:
            raise InvalidArgumentError(
                f"info_dict_reader: the key {as_key(path)!r} is taken by the environment itself"
            )
        spec[as_key(path)] = leaf
    return spec


def spec_entries(spec: Any) -> Iterator[tuple[Path, TensorSpec]]:
    """Yield the path and spec of each leaf of a Composite or a mapping, including nested leaves.

    Raises:
        InvalidTypeError: if an entry isn't a spec.
    """
    for key, entry in spec.items():
        if isinstance(entry, (Composite, Mapping)):
            yield from (((*as_path(key), *path), leaf) for path, leaf in spec_entries(entry))
        elif isinstance(entry, TensorSpec):
            yield as_path(key), entry
        else:
            raise InvalidTypeError(f"spec: expected a spec for {key!r}, got {type(entry).__name__}")
