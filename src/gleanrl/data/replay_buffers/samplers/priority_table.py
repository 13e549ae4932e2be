"""The priorities of a storage's rows, kept in sync with the storage; checks of the priorities that users pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import Priorities, Random, TensorUpdates
from gleanrl._arrays.results import Draw
from gleanrl._arrays.sample_tensors import Made, maker
from gleanrl._arrays.schema import has_memory
from gleanrl._state.state import Stateful, StateReader
from gleanrl._util import positive_or_none
from gleanrl.data.replay_buffers.change_log import (
    Change,
    Follower,
    changes_since,
    version_from,
    version_state,
)
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import ranges_of
from gleanrl.data.replay_buffers.storages.slots import UNBOUNDED
from gleanrl.errors import (
    EmptyBufferError,
    GleanError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)

_DIRECT = {
    torch.float32: (torch.float32,),
    torch.float64: (torch.float32, torch.float64),
    torch.int64: (torch.int64,),
}
_REDUCTIONS = ("max", "min", "mean", "median", "sum")


def number(name: str, value: Any) -> float:
    """Return `value` as a float; raise `InvalidArgumentError` unless it is a finite number of 0 or more, not a bool."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise InvalidArgumentError(f"{name}: expected a finite number of 0 or more, got {value!r}")
    return found


def reduce_priority(values: torch.Tensor, count: int, reduction: str) -> torch.Tensor:
    """Return one priority for each of `count` items, ``(count,)``, reduced from ``(count, ...)`` values.

    Of an even number of values, the median is the lower middle one. Sums and means are float64.

    Raises:
        SchemaError: the first dimension isn't `count`.
    """
    if values.shape[:1] != (count,):
        raise SchemaError(f"priority: expected {count} items, got shape {tuple(values.shape)}")
    flat = values.flatten(1) if values.ndim > 1 else values[:, None]
    if flat.shape[1] == 1 or not count:
        return flat.reshape(-1)
    if reduction in ("max", "min"):
        return getattr(flat, f"a{reduction}")(1)
    return flat.median(1).values if reduction == "median" else getattr(flat.double(), reduction)(1)


def check_reduction(reduction: str) -> str:
    """Return `reduction` if `reduce_priority` knows it; raise `InvalidArgumentError` otherwise."""
    if reduction not in _REDUCTIONS:
        raise InvalidArgumentError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
    return reduction


def per_slot(name: str, values: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` as ``(count,)`` of `dtype` on the CPU; one number is repeated for all slots.

    The result may share the memory of `values`.

    Raises:
        InvalidTypeError: the values aren't real numbers, or aren't integers where `dtype` is int64.
        SchemaError: their number is neither one nor `count`.
    """
    if isinstance(values, torch.Tensor) and not has_memory(values):
        raise InvalidTypeError(f"{name}: expected numbers, got a tensor without memory (a meta tensor?)")
    if isinstance(values, torch.Tensor) and values.shape == (count,) and values.dtype in _DIRECT[dtype]:
        # The fast path for tensors of training loops: calls without effect are skipped, because they take time.
        found = values.detach() if values.requires_grad else values
        found = found if found.is_cpu else found.cpu()
        if found.dtype != dtype:
            found = found.to(dtype)
        # The core reads the memory itself, which a lazy negation leaves unchanged.
        return found.resolve_neg().contiguous()
    try:
        # NumPy comes first, because torch would convert Python's floats to single precision.
        tensor = torch.as_tensor(values if isinstance(values, torch.Tensor) else np.asarray(values)).detach()
    except (TypeError, ValueError, RuntimeError) as cause:
        raise InvalidTypeError(f"{name}: expected numbers, got {values!r}") from cause
    if (
        tensor.dtype == torch.bool
        or tensor.dtype.is_complex
        or (dtype == torch.int64 and tensor.dtype.is_floating_point)
    ):
        raise InvalidTypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    tensor = tensor.resolve_neg().to("cpu", dtype)
    if tensor.numel() == 1 and count != 1 and tensor.ndim == 0:
        return tensor.expand(count).contiguous()
    if tensor.numel() != count or tensor.shape[:1] not in ((count,), ()):
        raise SchemaError(
            f"{name}: expected one number or {count}, one for each index, got shape {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1).contiguous()


def check_priorities(values: torch.Tensor, alpha: float, eps: float, dtype: torch.dtype) -> None:
    """Raise `InvalidArgumentError` unless ``(n,)`` `values` are valid priorities under the given rule."""
    count = values.shape[0]
    priorities = per_slot("priority", values, count, torch.float64)
    rows = torch.zeros(max(count, 1), dtype=torch.int64, device="cpu")
    table = Priorities(1, dtype == torch.float32)
    try:
        table.set_rule(alpha, eps)
        table.update(rows.data_ptr(), priorities.data_ptr(), count, 1, rows.data_ptr(), 0)
    except ValueError as error:
        raise as_ours(error) from error


def as_ours(error: ValueError | IndexError) -> GleanError:
    """Return the library's error for an error of the core."""
    if isinstance(error, IndexError):
        return IndexRangeError(f"index: {error}")
    return InvalidArgumentError(str(error))


_NORMALISATIONS = ("buffer", "batch")
_SIZES = 64  # batch sizes whose makers of tensors are cached
_BY_CORE = None if EXCHANGE is None else TensorUpdates(EXCHANGE, torch.Tensor)


class PriorityState(NamedTuple):
    """The rule, and the rows of a storage at one version."""

    alpha: float
    beta: float
    eps: float
    dropped: int
    raw: torch.Tensor
    """Raw priorities, ``(rows,)`` float64."""
    mark: torch.Tensor
    """Further bits that the core keeps of each row, ``(rows,)`` int32 (see `Priorities.save`)."""
    max_seen: float | None
    """The largest priority that an update has set."""
    version: Sequence[int] | None
    """The storage's version that the rows belong to (see `version_state`); None if unknown."""


class PriorityTable(Follower[Storage], Stateful[PriorityState]):
    """Raw priorities, and the rule that turns them into probabilities and weights.

    A row is drawn with a probability in proportion to ``(priority + eps) ** alpha``. Its importance weight is
    ``probability ** -beta``, divided by the largest such weight: that of all stored rows (``"buffer"``) or that of the
    batch (``"batch"``). New rows get the largest priority that was ever set, or 1 before the first. With
    `within_buffer` they get the largest priority stored, or 1 if that is 0 or nothing is stored. Records keep their
    priority if only a column of them is replaced. Masked rows are never drawn.

    Not thread-safe: the buffer calls it under its lock.

    Args:
        max_capacity: the least number of rows to have room for. A storage that rounded its size up gets room for all of
            its rows. None for as many rows as the storage has.
        alpha: 0 draws uniformly, 1 in proportion; 0 or more. Can be set at any time.
        beta: 0 makes all weights 1, 1 corrects the draw in full; 0 or more. Can be set at any time.
        eps: constant added to every priority; 0 or more.
        dtype: dtype in which priorities are kept, float32 or float64.
        within_buffer: see above.
        normalize: ``"buffer"`` or ``"batch"``.
    """

    def __init__(
        self,
        max_capacity: int | None,
        alpha: float | None,
        beta: float | None,
        eps: float,
        dtype: torch.dtype,
        within_buffer: bool,
        normalize: str,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UnsupportedError(f"dtype: priorities are kept in float32 or float64, got {dtype}")
        if normalize not in _NORMALISATIONS:
            raise InvalidArgumentError(f"normalize: expected one of {_NORMALISATIONS}, got {normalize!r}")
        self.max_capacity = positive_or_none("max_capacity", max_capacity)
        self.dtype = dtype
        self.within_buffer = bool(within_buffer)
        self.by_batch = normalize == "batch"
        self.dropped = 0
        self._alpha = number("alpha", alpha)
        self._beta = number("beta", beta)
        self._eps = number("eps", eps)
        self._native: Priorities | None = None
        self._makers: dict[int, Callable[[], Made]] = {}  # makers of a draw's tensors, by batch size
        self._saved: PriorityState | None = None  # loaded rows, which the storage of the next `sync` gets
        self.renewals = 0
        """How often the native table was cleared or replaced; `BlockedRows` then blocks its rows again."""

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._set_rule(number("alpha", value), self._eps)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = number("beta", value)

    @property
    def eps(self) -> float:
        """Constant added to every priority."""
        return self._eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._set_rule(self._alpha, number("eps", value))

    def _set_rule(self, alpha: float, eps: float) -> None:
        if self._native is not None:
            _set_rule(self._native, alpha, eps)
        self._alpha, self._eps = alpha, eps

    @property
    def default(self) -> float:
        """The priority of new rows."""
        if self._native is None:
            return 1.0
        largest = self._native.default_priority(self.within_buffer)
        # `_fill` has set the new rows to 0. If 0 is the largest priority, they may be the only rows.
        return largest or 1.0 if self.within_buffer else largest

    def of(self, storage: Storage) -> Priorities:
        """Return the native table in sync with `storage`; rows written since the last call are new ones.

        If the storage has another content than before, all its rows are new ones, or get the priorities of a loaded
        state that fits.

        Raises:
            InvalidArgumentError: the storage has more than `max_capacity` rows.
        """
        if storage.version != self.followed:
            self.sync(storage)
        self._saved = None
        assert self._native is not None
        return self._native

    def reset(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give `slots`, ``(n,)`` int64, the priority of new rows.

        With `within_buffer`, their present priorities don't count for it.
        """
        native = self.of(storage)
        self._fill(native, [(start, start + count) for start, count in ranges_of(slots)])

    def _look_at_all(self, storage: Storage) -> None:
        native = self._native
        if native is None or native.capacity < self._room(storage):
            native = self._native = self._make(storage)
        self.renewals += 1
        native.clear()
        saved = self._saved
        changes = [Change(0, len(storage), False)]
        if saved is not None:
            since = changes_since(saved.version, storage)
            # A state of another version applies if it has as many rows as the storage. A state of an earlier version of
            # this storage applies with fewer, too: the changes since then tell which rows are new.
            rows = saved.raw.shape[0]
            if rows == len(storage) or (since is not None and rows < len(storage)):
                native.load(saved.raw.data_ptr(), saved.mark.data_ptr(), rows)
                native.max_seen = saved.max_seen
                changes = since or []
        if changes:
            self._look_at(storage, changes)

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        native, stored = self._native, len(storage)
        assert native is not None
        # The first write may round the storage's size up, and an unbounded storage grows.
        if native.capacity < self._room(storage):
            self.renewals += 1
            native = self._native = self._grown(native, storage)
        written = [(c.start, min(c.stop, stored)) for c in changes if not c.amended and c.start < stored]
        self._fill(native, written)
        if storage.has_mask:
            for start, stop, _ in changes:
                if start < (stop := min(stop, stored)):
                    slots = torch.arange(start, stop, device="cpu")
                    masked = storage.masked(slots)
                    assert masked is not None
                    native.block(slots.data_ptr(), stop - start, masked.data_ptr())

    def check_room(self, storage: Storage) -> None:
        """Raise `InvalidArgumentError` if `storage` has more than `max_capacity` rows."""
        # A storage rounds its size up to whole time steps, which adds less than one step of rows. Any larger
        # difference is a user's mistake.
        most = self.max_capacity
        if most is not None and storage.max_size - max(storage.rows_per_step, 1) >= most:
            raise InvalidArgumentError(
                f"max_capacity={most} is less than the {storage.max_size} rows of the storage; raise it or leave it out"
            )

    def _make(self, storage: Storage) -> Priorities:
        self.check_room(storage)
        room = max(self._room(storage), self.max_capacity or 1)
        if storage.max_size == UNBOUNDED:
            room *= 2  # doubling: the copies of all growth together cost O(rows)
        native = Priorities(room, self.dtype == torch.float32)
        _set_rule(native, self._alpha, self._eps)
        return native

    def _room(self, storage: Storage) -> int:
        """Return the number of rows that `storage` needs room for."""
        return storage.max_size if storage.max_size < UNBOUNDED else len(storage)

    def _grown(self, native: Priorities, storage: Storage) -> Priorities:
        """Return a larger table that holds the same rows."""
        raw, mark = _rows_of(native)
        grown = self._make(storage)
        grown.load(raw.data_ptr(), mark.data_ptr(), raw.shape[0])
        grown.max_seen = native.max_seen
        return grown

    def _fill(self, native: Priorities, spans: list[tuple[int, int]]) -> None:
        """Give the rows ``[start, stop)`` of each span the priority of new rows."""
        if self.within_buffer:
            for start, stop in spans:
                native.fill(start, stop - start, 0.0)  # overwritten priorities don't count for `default`
        default = self.default
        for start, stop in spans:
            native.fill(start, stop - start, default)

    def draw(
        self, storage: Storage, count: int, uniforms: torch.Tensor | Random, served: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw rows in proportion to their priorities.

        Args:
            storage: storage to draw from.
            count: n, 1 or more.
            uniforms: ``(n,)`` float64 in [0, 1), or the core's generator, which draws them.
            served: whether to remember the rows at once (see `remember`).

        Returns:
            Slots ``(n,)`` int64, importance weights ``(n,)`` of `dtype`, generations ``(n,)`` int64.

        Raises:
            EmptyBufferError: every stored row has probability 0.
        """
        native = self.of(storage)
        make = self._makers.get(count) or self._maker(count)
        (slots, weight, generation), (slots_at, weight_at, generation_at) = make()
        source = uniforms if isinstance(uniforms, Random) else uniforms.data_ptr()
        counters_at, beta, by_batch = storage.counters_at, self._beta, self.by_batch
        try:
            native.draw(
                source, count, beta, by_batch, counters_at, slots_at, weight_at, generation_at, served
            )
        except RuntimeError as cause:  # the core raises it here only if no row can be drawn
            raise EmptyBufferError(
                "can't sample: all stored priorities are 0 and eps is 0; give a row a priority above 0, or set eps"
            ) from cause
        return slots, weight if self.dtype == torch.float32 else weight.to(self.dtype), generation

    def _maker(self, count: int) -> Callable[[], Made]:
        if len(self._makers) >= _SIZES:
            self._makers.clear()
        make = maker([((count,), torch.int64), ((count,), torch.float32), ((count,), torch.int64)])
        self._makers[count] = make
        return make

    def remember(self, storage: Storage, draw: Draw) -> Draw:
        """Remember the rows of a draw, in their generations, as drawn last; return the draw with generations.

        A later update without generations applies only to a row that is still in the remembered generation.
        """
        if draw.generation is None:
            draw = draw._replace(generation=storage.generation(draw.slots))
        assert draw.generation is not None
        slots = draw.slots
        self.of(storage).remember(slots.data_ptr(), slots.shape[0], draw.generation.data_ptr())
        return draw

    def check(self, values: torch.Tensor) -> None:
        """Raise `InvalidArgumentError` unless ``(n,)`` `values` are valid priorities of rows."""
        check_priorities(values, self._alpha, self._eps, self.dtype)

    def update(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Set priorities ``(n,)`` of slots ``(n,)`` (-1 skips one); drop late ones and count them in `dropped`.

        An update is late if the slot isn't in the given generation any more. Without generations, the one that
        `remember` noted last counts. After an error no priority has changed.

        Raises:
            IndexRangeError: a slot is outside the stored part.
            InvalidArgumentError: a priority is negative or not finite, or too large for the rule.
            InvalidTypeError: priorities or generations aren't numbers.
            SchemaError: there are neither one nor n priorities.
        """
        dropped = None
        if _BY_CORE is not None and isinstance(priority, torch.Tensor) and not priority.is_neg():
            dropped = self._updated(storage, slots, priority, generation, _BY_CORE.update)
        # The core declines all but vectors of certain dtypes on the CPU: convert these, then call it again.
        if dropped is None:
            count = slots.shape[0]
            single = isinstance(priority, torch.Tensor) and priority.dtype == torch.float32
            values = per_slot("priority", priority, count, torch.float32 if single else torch.float64)
            expected = None if generation is None else per_slot("generation", generation, count, torch.int64)
            dropped = self._updated(storage, slots, values, expected, _by_address)
        self.dropped += dropped

    def _updated(
        self,
        storage: Storage,
        slots: torch.Tensor,
        priority: Any,
        generation: Any,
        update: Callable[..., Any],
    ) -> Any:
        """Set all priorities or none; return the number of late ones, or None if `update` declines the tensors.

        No user code may run in `update`: it could replace the storage's counters, whose address `update` holds.
        """
        native = self.of(storage)
        stored = len(storage)
        try:
            return update(native, slots, priority, generation, stored, storage.counters_at)
        except ValueError as error:
            raise as_ours(error) from error
        except IndexError as error:
            # The storage was cleared or loaded since the draw and holds fewer rows: updates of the missing rows are
            # late, too. Without generations, or beyond the storage's size, the caller's index is wrong instead.
            gone = (slots >= stored) & (slots < storage.max_size)
            if generation is None or not gone.any():
                raise as_ours(error) from error
            rest = torch.where(gone, -1, slots)
            return int(gone.sum()) + self._updated(storage, rest, priority, generation, update)

    def snapshot(self) -> PriorityState:
        """Return rule and rows."""
        native, saved = self._native, self._saved
        if saved is not None:
            rows: tuple[Any, ...] = saved[-4:]
        else:
            rows = (
                *_rows_of(native),
                None if native is None else native.max_seen,
                version_state(self.followed),
            )
        return PriorityState(self._alpha, self._beta, self._eps, self.dropped, *rows)

    def parse(self, state: Any) -> PriorityState:
        """Return the value of a saved state; raise `SchemaError` for any other state."""
        reader = StateReader(state, "a prioritized sampler")
        alpha, beta, eps = (reader.number(name, 0.0) for name in ("alpha", "beta", "eps"))
        raw = reader.tensor("raw", torch.float64, (None,))
        mark = reader.tensor("mark", torch.int32, (raw.shape[0],))
        seen = reader.optional("max_seen", lambda name: reader.number(name, 0.0))
        probe = Priorities(max(raw.shape[0], 1), self.dtype == torch.float32)
        try:  # the core checks rule and rows here, so that `adopt` can't fail
            probe.set_rule(alpha, eps)
            probe.load(raw.data_ptr(), mark.data_ptr(), raw.shape[0])
            probe.max_seen = seen
        except (ValueError, RuntimeError) as cause:
            raise reader.wrong(
                "raw", "priorities that rows can have under the saved rule", str(cause)
            ) from cause
        version = version_state(version_from(reader.get("version")))
        return PriorityState(alpha, beta, eps, reader.integer("dropped"), raw, mark, seen, version)

    def adopt(self, value: PriorityState) -> None:
        """Continue from a state: the rule applies at once, the rows with the storage of the next draw or write."""
        self.unfollow()
        if self._native is not None:
            # Before the rule is set: the core refuses a rule under which a stored row has no valid probability.
            self._native.clear()
        self._set_rule(value.alpha, value.eps)
        self._beta, self.dropped = value.beta, value.dropped
        self._saved = value

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, with the rows as plain tensors."""
        return {
            **self.__dict__,
            "_native": None,
            "_makers": {},
            "_saved": self.snapshot(),
            "followed": None,
        }

    def check_valid(self) -> None:
        """Raise if the native table is inconsistent; for tests."""
        if self._native is not None:
            self._native.check_valid()


def _by_address(
    native: Priorities,
    slots: torch.Tensor,
    values: torch.Tensor,
    expected: torch.Tensor | None,
    limit: int,
    written_at: int,
) -> int:
    """Call the core's update with addresses, for vectors that are known to have one length."""
    expected_at = 0 if expected is None else expected.data_ptr()
    single = values.dtype == torch.float32
    at = slots.data_ptr(), values.data_ptr()
    return native.update(*at, slots.shape[0], limit, written_at, expected_at, single)


def _set_rule(native: Priorities, alpha: float, eps: float) -> None:
    try:
        native.set_rule(alpha, eps)
    except ValueError as error:
        raise as_ours(error) from error


def _rows_of(native: Priorities | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return raw priorities and marks of the rows in use, ``(rows,)`` float64 and int32."""
    count = 0 if native is None else native.end
    raw = torch.empty(count, dtype=torch.float64, device="cpu")
    mark = torch.empty(count, dtype=torch.int32, device="cpu")
    if native is not None:
        native.save(raw.data_ptr(), mark.data_ptr())
    return raw, mark
