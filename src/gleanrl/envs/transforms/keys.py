"""Transforms of keys: `RenameTransform`, `SelectTransform`, `ExcludeTransform`, `RemoveEmptySpecs`."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import FLAGS, NestedKey, as_key, as_path
from gleanrl._util import overridden
from gleanrl.data.replay_buffers.storages.record_formats import ADDED_KEYS
from gleanrl.data.specs import Composite
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.envs.transforms.base import Keys, Transform, as_keys, missing_key
from gleanrl.envs.transforms.row_view import Record, Row
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.errors import UnsupportedError


class RenameTransform(Transform):
    """Renames outputs from `in_keys` to `out_keys`, and inputs from `out_keys_inv` to `in_keys_inv`.

    The key of a group renames all entries in it. Flags can't be renamed, because environments and collectors read them.

    Args:
        in_keys: the environment's keys of outputs.
        out_keys: the user's keys of these outputs.
        in_keys_inv: the environment's keys of inputs.
        out_keys_inv: the user's keys of these inputs.
        create_copy: whether the entries remain under the old keys too. The new keys then get copies.

    Raises:
        InvalidArgumentError: if lists of keys have different lengths.
        UnsupportedError: if an output key is a flag.
        MissingKeyError: at use, if an entry is absent, except at a reset.
    """

    on_rows = True
    on_host = True
    by_keys = True
    call_on_reset = True

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.pairs(), self.pairs_inv()  # raise if the lists have different lengths
        self.create_copy = create_copy
        flags = [key for pair in self.pairs() for key in pair if as_path(key)[-1] in FLAGS]
        if flags:
            raise UnsupportedError(
                f"RenameTransform: {flags} are flags, which can't be renamed; remove them from the keys"
            )

    def _find_pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return `in_keys` with `out_keys`, pair by pair. A group of the environment yields a pair for each entry."""
        return self._by_entry(super()._find_pairs(), "full_observation_spec", "full_reward_spec")

    def _find_pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return `in_keys_inv` with `out_keys_inv`, pair by pair. A group yields a pair for each entry."""
        return self._by_entry(super()._find_pairs_inv(), "full_action_spec", "full_state_spec")

    def _by_entry(
        self, pairs: list[tuple[NestedKey, NestedKey]], *specs: str
    ) -> list[tuple[NestedKey, NestedKey]]:
        known = (
            [as_path(key) for name in specs for key in keys_of(getattr(self.parent, name))]
            if self.parent
            else []
        )
        found = []
        for in_key, out_key in pairs:
            source, target = as_path(in_key), as_path(out_key)
            below = [path for path in known if path[: len(source)] == source]
            found += [(as_key(path), as_key((*target, *path[len(source) :]))) for path in below or [source]]
        return found

    def _call(self, tensordict: Record) -> Record:
        return self._without_empty(self._moved(tensordict, self.pairs()))

    def _without_empty(self, record: Record) -> Record:
        """Drop groups whose entries have all been renamed."""
        if isinstance(record, TensorDictBase) and not self.create_copy:
            for key in self.in_keys:
                group = record.get(key, None)
                if isinstance(group, TensorDictBase) and group.is_empty():
                    record = record.exclude(key)
        return record

    def _inv_call(self, tensordict: Record) -> Record:
        return self._moved(tensordict, [(out_key, in_key) for in_key, out_key in self.pairs_inv()])

    def _moved(self, record: Record, pairs: list[tuple[NestedKey, NestedKey]]) -> Record:
        # All values are read before the first is set, so that two keys can be swapped.
        for source, target, value in [(*pair, self._extract(record, pair[0])) for pair in pairs]:
            if value is not None:
                record.set(target, value)
            elif not self.missing_tolerance:
                raise missing_key(self, source, record)
        return record

    def _extract(self, record: Record, key: NestedKey) -> Any:
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
        for key in () if self.create_copy else (*self.in_keys, *self.in_keys_inv):
            if (
                key in out.keys(True)
                and isinstance(out[key], SpecMapping)
                and out[key].is_empty(recurse=True)
            ):
                del out[key]
        for key, leaf in leaves.items():
            out[key] = leaf.clone()
        return out


class _Keeping(Transform):
    """Base class: keeps the outputs that `_keeps` selects, and drops groups without a kept entry."""

    on_rows = True
    on_host = True

    def _keeps(self, key: NestedKey) -> bool:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _keeps")

    def _call(self, tensordict: Record) -> Record:
        if isinstance(tensordict, Row):
            # A block has no column for keys that the specs don't declare. But a value that an earlier transform set in
            # the row would be written, so it is dropped here.
            for key in [key for key in tensordict.made if not self._keeps(key)]:
                tensordict.pop(key)
            return tensordict
        assert isinstance(tensordict, TensorDictBase)
        paths = [as_path(key) for key in tensordict.keys(True, True)]
        retained = {path for path in paths if self._keeps(as_key(path))}
        dropped = [path for path in paths if path not in retained]
        empty = [
            group for group in _groups(tensordict) if all(path[: len(group)] != group for path in retained)
        ]
        dropped += [group for group in empty if not self._keeps(group)]
        return tensordict.exclude(*map(as_key, dropped))

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._call(tensordict_reset)

    def _spec(self, role: str, spec: Any) -> Any:
        out = spec.clone()
        for key in keys_of(spec) if role in ("observation", "reward", "done") else ():
            if not self._keeps(key):
                del out[key]
        return out


class SelectTransform(_Keeping):
    """Keeps only some keys of the outputs. In a buffer the index and the weights of a sample stay too.

    Args:
        selected_keys: keys to keep; the key of a group keeps all entries in it.
        keep_rewards: whether rewards stay; in a buffer this means ``"reward"`` at the root.
        keep_dones: whether flags stay; without them no episode ends. In a buffer this means ``"done"`` at the root.
    """

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = as_keys("selected_keys", list(selected_keys)) or []
        self.keep_rewards, self.keep_dones = keep_rewards, keep_dones

    def _keeps(self, key: NestedKey) -> bool:
        path = as_path(key)
        if any(path[: len(as_path(selected))] == as_path(selected) for selected in self.selected_keys):
            return True
        parent = self.parent
        if parent is None:  # a batch of a buffer
            stays = {"done": self.keep_dones, "reward": self.keep_rewards}
            return len(path) == 1 and (path[0] in ADDED_KEYS or stays.get(path[0], False))
        if path[-1] in FLAGS:
            return self.keep_dones
        return self.keep_rewards and key in parent.reward_keys

    def extra_repr(self) -> str:
        """Show the keys."""
        return f"{self.selected_keys}"


class ExcludeTransform(_Keeping):
    """Drops some keys of the outputs, or of the inputs.

    If done is dropped in an environment, it is derived from the remaining flags of its group. Without any flag no
    episode ends.

    Args:
        excluded_keys: keys to drop; the key of a group drops all entries in it. No keys drop nothing.
        inverse: whether keys of the inputs are dropped instead; in a buffer, of written batches.
    """

    on_rows = True

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        super().__init__()
        self.excluded_keys = as_keys("excluded_keys", list(excluded_keys)) or []
        self.inverse = inverse

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
        """Return whether a subclass overrides `_inv_call`.

        Dropping keys alone needs no call in rollouts: steppers read only the keys that they need.
        """
        return bool(overridden(self, "_inv_call", of=ExcludeTransform))

    def extra_repr(self) -> str:
        """Show the keys."""
        return f"{self.excluded_keys}, inverse={self.inverse}"


class RemoveEmptySpecs(Transform):
    """Drops groups without entries from the specs and from the outputs."""

    on_rows = True
    on_host = True

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
