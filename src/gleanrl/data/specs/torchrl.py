"""Conversion of specs between gleanrl and TorchRL, and an import hook so that TorchRL's modules accept our specs.

Programs pass `env.action_spec` to TorchRL's actors, exploration modules and losses. These look up the class of a spec
in tables and call its private methods, so they need one of TorchRL's own specs. The hook therefore wraps each function
of `torchrl.modules` and `torchrl.objectives` that has a parameter named after specs: constructors, `register_spec` and
setters. The wrapper converts our specs among the arguments by `to_torchrl`, also inside dictionaries, lists and
tuples. Functions of classes are replaced in place, so that every import path of a class shows the wrapped one.

The hook is a finder at the front of `sys.meta_path`. It lets the other finders find a module of these packages, and
wraps the functions right after the module has been executed. Modules that are imported already are wrapped at once.
The hook imports nothing itself, so that it has no effect if TorchRL isn't installed.

`from_torchrl` reads a spec through public attributes and selects the class by its name, so it needs no import of
TorchRL. `to_torchrl` imports it. Each conversion makes a copy.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from tensordict import NonTensorData

from gleanrl.data.specs.base import TensorSpec, stack
from gleanrl.data.specs.boxes import Bounded, Unbounded
from gleanrl.data.specs.categorical import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.non_tensor import Constant, ConstantStack, NonTensor
from gleanrl.errors import InvalidTypeError


def from_torchrl(spec: Any) -> Any:
    """Convert a spec of TorchRL to a gleanrl spec; return a gleanrl spec or None unchanged.

    The function selects the gleanrl class by the name of the spec's class, or of one of its base classes. It reads the
    public attributes that TorchRL's specs have: `shape`, `device`, `dtype`, `n`, `nvec`, `mask`, `space`, `items`,
    `dim` and `unbind`. The result is a copy: it doesn't show later changes of `spec`, for example of its mask. A copy
    of a locked composite is unlocked. Names of dimensions aren't copied.

    Args:
        spec: a spec.

    Raises:
        InvalidTypeError: if no class of the spec has the name of a gleanrl spec, or the spec is a `Choice`.
    """
    if spec is None or isinstance(spec, TensorSpec):
        return spec
    return _counterpart(spec, _READERS)(spec)


def to_torchrl(spec: Any) -> Any:
    """Convert a gleanrl spec to a spec of TorchRL; return any other object unchanged.

    The result is a copy: it doesn't show later changes of `spec`, for example of its mask. A copy of a locked composite
    is locked. Names of dimensions and provisional numbers of choices aren't copied.

    Args:
        spec: a spec.

    Raises:
        ImportError: if TorchRL isn't installed.
        InvalidTypeError: if the spec is an instance of a user's class that derives from none of the concrete specs.
    """
    if not isinstance(spec, TensorSpec):
        return spec
    return _counterpart(spec, _WRITERS)(spec, importlib.import_module("torchrl.data"))


def _counterpart(spec: Any, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    for cls in type(spec).__mro__:
        if cls.__name__ in table:
            return table[cls.__name__]
    raise InvalidTypeError(
        f"spec: {type(spec).__name__} has no counterpart; expected one of {sorted(table)}, or a class that "
        "derives from one of that name"
    )


def _composite(spec: Any) -> Composite:
    entries = {key: from_torchrl(entry) for key, entry in spec.items()}
    return Composite(
        entries,
        shape=spec.shape,
        device=spec.device,
        data_cls=_newer(spec, "data_cls"),
        step_mdp_static=bool(_newer(spec, "step_mdp_static")),
    )


def _stacked(spec: Any) -> Any:
    return stack([from_torchrl(part) for part in spec.unbind(spec.dim)], spec.dim)


def _with_mask(spec: Any, mask: Any) -> Any:
    """Set the mask of a `Binary`, whose constructor takes none; return the spec."""
    if mask is not None:
        spec.update_mask(mask.clone())
    return spec


def _newer(spec: Any, name: str) -> Any:
    """Return an attribute that only newer releases of TorchRL have, or None."""
    return vars(spec).get(name)


_READERS: dict[str, Callable[[Any], Any]] = {
    "Binary": lambda s: _with_mask(Binary(shape=s.shape, device=s.device, dtype=s.dtype), s.mask),
    "Bounded": lambda s: Bounded(s.space.low, s.space.high, s.shape, s.device, s.dtype, _newer(s, "domain")),
    "Categorical": lambda s: Categorical(s.space.n, s.shape, s.device, s.dtype, s.mask),
    "Composite": _composite,
    "MultiCategorical": lambda s: MultiCategorical(s.nvec, s.shape, s.device, s.dtype, s.mask),
    "MultiOneHot": lambda s: MultiOneHot(s.nvec, s.shape, s.device, s.dtype, mask=s.mask),
    "NonTensor": lambda s: NonTensor(
        s.shape, s.device, example_data=s.example_data, feature_dims=_newer(s, "feature_dims")
    ),
    "OneHot": lambda s: OneHot(s.n, s.shape, s.device, s.dtype, mask=s.mask),
    "Stacked": _stacked,
    "StackedComposite": _stacked,
    "Unbounded": lambda s: Unbounded(s.shape, s.device, s.dtype, _newer(s, "domain")),
}


def _to_composite(spec: Composite, torchrl_specs: Any) -> Any:
    entries = {key: to_torchrl(entry) for key, entry in spec.items()}
    newer: dict[str, Any] = {}
    if spec.data_cls is not None:
        newer["data_cls"] = spec.data_cls
    if spec.step_mdp_static:
        newer["step_mdp_static"] = True
    made = torchrl_specs.Composite(entries, shape=spec.shape, device=spec.device, **newer)
    return made.lock_() if spec.is_locked else made


_WRITERS: dict[str, Callable[[Any, Any], Any]] = {
    "Binary": lambda s, t: _with_mask(t.Binary(shape=s.shape, device=s.device, dtype=s.dtype), s.mask),
    "Bounded": lambda s, t: t.Bounded(
        *(bound.clone() for bound in s.bounds), s.shape, s.device, s.dtype, domain=s.domain
    ),
    "Categorical": lambda s, t: t.Categorical(s.space.n, s.shape, s.device, s.dtype, _copied(s.mask)),
    "Choice": lambda s, t: t.Choice([_to_choice(choice) for choice in s.choices]),
    "Composite": _to_composite,
    "MultiCategorical": lambda s, t: t.MultiCategorical(s.nvec, s.shape, s.device, s.dtype, _copied(s.mask)),
    "MultiOneHot": lambda s, t: t.MultiOneHot(s.nvec, s.shape, s.device, s.dtype, mask=_copied(s.mask)),
    "NonTensor": lambda s, t: t.NonTensor(
        s.shape, s.device, example_data=s.example_data, feature_dims=s.feature_dims
    ),
    "OneHot": lambda s, t: t.OneHot(s.n, s.shape, s.device, s.dtype, mask=_copied(s.mask)),
    "Stacked": lambda s, t: t.Stacked(*map(to_torchrl, s.specs), dim=s.stack_dim),
    "StackedComposite": lambda s, t: t.StackedComposite(*map(to_torchrl, s.specs), dim=s.stack_dim),
    "Unbounded": lambda s, t: t.Unbounded(s.shape, s.device, s.dtype, domain=s.domain),
}


def _to_choice(spec: Any) -> Any:
    if isinstance(spec, ConstantStack):
        return spec.rand()
    if isinstance(spec, Constant):
        return NonTensorData(spec.example_data, batch_size=spec.shape, device=spec.device)
    return to_torchrl(spec)


def _copied(mask: Any) -> Any:
    return None if mask is None else mask.clone()


PACKAGES = ("torchrl.modules", "torchrl.objectives")
WORDS = ("spec", "action_space")


def install() -> None:
    """Install the import hook, and wrap modules that are imported already.

    The package calls this once on import. Another call would install a second hook.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            adapt(module)
    sys.meta_path.insert(0, _Finder())


def adapt(module: ModuleType) -> None:
    """Wrap the functions that take specs, in place: functions of the module, and methods of the classes it defines.

    Setters of properties are wrapped if the name of the property contains "spec".
    """
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType) and _takes_specs(value):
            setattr(module, name, _converting(value))
        elif isinstance(value, type):
            _adapt_class(value)


def _adapt_class(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType) and _takes_specs(member):
            setattr(cls, name, _converting(member))
        elif isinstance(member, property) and member.fset is not None and "spec" in name:
            setattr(cls, name, member.setter(_converting(member.fset)))


def _takes_specs(function: FunctionType) -> bool:
    return any(word in name for name in inspect.signature(function).parameters for word in WORDS)


def _converting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `function` that converts gleanrl specs among its arguments."""

    @functools.wraps(function)
    def converting(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_converted, args), **{name: _converted(arg) for name, arg in kwargs.items()})

    return converting


def _converted(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return to_torchrl(value)
    if type(value) is dict:
        return {key: _converted(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_converted, value))
    return value


class _Finder(MetaPathFinder):
    """Finds modules through the other finders, and lets `adapt` run after their execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PACKAGES):
            return None
        other_finders = (finder for finder in sys.meta_path if finder is not self)
        found = next(
            (spec for f in other_finders if (spec := f.find_spec(fullname, path, target)) is not None), None
        )
        if found is not None and found.loader is not None:
            found.loader.exec_module = _adapting(found.loader.exec_module)  # type: ignore[assignment, method-assign]
        return found


def _adapting(run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        run(module)
        adapt(module)

    return exec_module
