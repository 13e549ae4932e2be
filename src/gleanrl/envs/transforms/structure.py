"""Which keys there are: `RenameTransform`, `SelectTransform`, `ExcludeTransform`, `RemoveEmptySpecs`."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from gleanrl.data.specs import Composite
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.keys import Keys, as_keys
from gleanrl.envs.transforms.rows import Record, Row
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, UnsupportedError
from gleanrl.overrides import overridden
from gleanrl.tree import FLAGS, NestedKey, as_key, as_path


class RenameTransform(Transform):
    """Gives entries other keys: what comes out from `in_keys` to `out_keys`, what goes in from `out_keys_inv`.

    Flags can't be renamed: environments and collectors look for them.

    Args:
        in_keys: the environment's keys of what comes out.
        out_keys: the user's keys for them.
        in_keys_inv: the environment's keys of what goes in.
        out_keys_inv: the user's keys for them.
        create_copy: whether the old keys stay too.
    """

    on_rows = True
    by_keys = True

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.pairs(), self.pairs_inv()  # raise if they don't fit
        self.create_copy = create_copy
        flags = [key for pair in self.pairs() for key in pair if as_path(key)[-1] in FLAGS]
        if flags:
            raise UnsupportedError(f"RenameTransform: {flags} are flags, which keep their names")

    def _call(self, tensordict: Record) -> Record:
        return self._moved(tensordict, self.pairs())

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._called(tensordict_reset)

    def _inv_call(self, tensordict: Record) -> Record:
        return self._moved(tensordict, [(out_key, in_key) for in_key, out_key in self.pairs_inv()])

    def _moved(self, record: Record, pairs: list[tuple[NestedKey, NestedKey]]) -> Record:
        # All are taken before the first is set: two keys may change places.
        for source, target, value in [(*pair, self._taken(record, pair[0])) for pair in pairs]:
            if value is not None:
                record.set(target, value)
            elif not self.missing_tolerance:
                raise self._missing(source, record)
        return record

    def _taken(self, record: Record, key: NestedKey) -> Any:
        if not self.create_copy:
            return record.pop(key, None)
        value = record.get(key, None)
        return None if value is None else value.clone()

    def _spec(self, role: str, spec: Any) -> Any:
        if role == "done":
            return spec
        return self._renamed(spec, self.pairs() if role in ("observation", "reward") else self.pairs_inv())

    def _renamed(self, spec: Composite, pairs: list[tuple[NestedKey, NestedKey]]) -> Composite:
        known = keys_of(spec)
        leaves = {out_key: spec[in_key] for in_key, out_key in pairs if in_key in known}
        gone = [] if self.create_copy else [in_key for in_key, _ in pairs if in_key in known]
        out = spec.clone()
        for key in gone:
            del out[key]
        for key, leaf in leaves.items():
            out[key] = leaf.clone()
        return out


class _Keeping(Transform):
    """Keeps some of what comes out."""

    on_rows = True

    def _keeps(self, key: NestedKey) -> bool:
        raise UnsupportedError("a subclass says what is kept")

    def _call(self, tensordict: Record) -> Record:
        if isinstance(
            tensordict, Row
        ):  # what the specs don't declare isn't recorded; values made here would be
            for key in [key for key in tensordict.made if not self._keeps(key)]:
                tensordict.pop(key)
            return tensordict
        assert isinstance(tensordict, TensorDictBase)
        keys = [as_key(as_path(key)) for key in tensordict.keys(True, True)]
        return tensordict.exclude(*[key for key in keys if not self._keeps(key)])

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._call(tensordict_reset)

    def _spec(self, role: str, spec: Any) -> Any:
        out = spec.clone()
        for key in keys_of(spec) if role in ("observation", "reward", "done") else ():
            if not self._keeps(key):
                del out[key]
        return out


class SelectTransform(_Keeping):
    """Drops what comes out but for some keys.

    Args:
        selected_keys: what stays; a key of a group keeps all of it.
        keep_rewards: whether rewards stay.
        keep_dones: whether flags stay; done and terminated always do.
    """

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        if not selected_keys:
            raise MissingArgumentError("SelectTransform: expected at least one key")
        self.selected_keys = as_keys("selected_keys", list(selected_keys)) or []
        self.keep_rewards, self.keep_dones = keep_rewards, keep_dones

    def _keeps(self, key: NestedKey) -> bool:
        path = as_path(key)
        if any(path[: len(as_path(kept))] == as_path(kept) for kept in self.selected_keys):
            return True
        parent = self.parent
        if parent is None:
            return False
        if path[-1] in FLAGS:
            # Without done nobody would know of an episode's end.
            return self.keep_dones or path[-1] in ("done", "terminated")
        return self.keep_rewards and key in parent.reward_keys

    def extra_repr(self) -> str:
        """Show the keys."""
        return f"{self.selected_keys}"


class ExcludeTransform(_Keeping):
    """Drops some keys of what comes out, or of what goes in.

    Args:
        excluded_keys: what is dropped; a key of a group drops all of it.
        inverse: whether that is done to what goes in (what is written to a buffer) instead.
    """

    on_rows = True

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        super().__init__()
        if not excluded_keys:
            raise MissingArgumentError("ExcludeTransform: expected at least one key")
        self.excluded_keys = as_keys("excluded_keys", list(excluded_keys)) or []
        self.inverse = inverse
        if any(as_path(key)[-1] == "done" for key in self.excluded_keys) and not inverse:
            raise InvalidArgumentError(
                "ExcludeTransform: 'done' can't be dropped: it tells where episodes end"
            )

    def _keeps(self, key: NestedKey) -> bool:
        path = as_path(key)
        return self.inverse or not any(path[: len(as_path(k))] == as_path(k) for k in self.excluded_keys)

    def _call(self, tensordict: Record) -> Record:
        return tensordict if self.inverse else super()._call(tensordict)

    def _inv_call(self, tensordict: Record) -> Record:
        if self.inverse and isinstance(tensordict, TensorDictBase):
            return tensordict.exclude(*self.excluded_keys)
        return tensordict

    def inverts(self) -> bool:
        """Return False, but for a subclass's own way: steppers read the keys that they need and no others."""
        return bool(overridden(self, "_inv_call", of=ExcludeTransform))

    def extra_repr(self) -> str:
        """Show the keys."""
        return f"{self.excluded_keys}, inverse={self.inverse}"


class RemoveEmptySpecs(Transform):
    """Drops groups without entries from the specs, and from what comes out."""

    on_rows = True

    def _call(self, tensordict: Record) -> Record:
        if isinstance(tensordict, TensorDictBase):
            for key in sorted(_groups(tensordict), key=len, reverse=True):
                if tensordict.get(as_key(key)).is_empty():
                    tensordict = tensordict.exclude(as_key(key))
        return tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._call(tensordict_reset)

    def _transformed(self, specs: Composite, *roles: str) -> Composite:
        return _without_empty(specs)


def _groups(batch: TensorDictBase) -> list[tuple[str, ...]]:
    leaves = set(batch.keys(True, True))
    return [as_path(key) for key in batch.keys(True) if key not in leaves]


def _without_empty(specs: Composite) -> Composite:
    out = specs.clone()
    for name in specs.keys():
        part = out[name]
        leaves = set(part.keys(True, True))
        for key in sorted((as_path(k) for k in part.keys(True) if k not in leaves), key=len, reverse=True):
            if part[as_key(key)].is_empty():
                del part[as_key(key)]
    return out
