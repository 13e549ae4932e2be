"""The priorities of a storage's rows, kept in step with it.

Priorities as users give them: numbers, one or several for a record.
"""

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
    """Return `value` if it is a finite number of 0 or more."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise InvalidArgumentError(f"{name}: expected a finite number of 0 or more, got {value!r}")
    return found


def reduce_priority(values: torch.Tensor, count: int, reduction: str) -> torch.Tensor:
    """Return one priority for each of `count` items out of ``(count, ...)`` values."""
    if values.shape[:1] != (count,):
        raise SchemaError(f"priority: expected {count} items, got {tuple(values.shape)}")
    flat = values.flatten(1) if values.ndim > 1 else values[:, None]
    if flat.shape[1] == 1 or not count:
        return flat.reshape(-1)
    if reduction in ("max", "min"):
        return getattr(flat, f"a{reduction}")(1)
    return flat.median(1).values if reduction == "median" else getattr(flat.double(), reduction)(1)


def check_reduction(reduction: str) -> str:
    """Return `reduction` if it is one that `reduce_priority` knows."""
    if reduction not in _REDUCTIONS:
        raise InvalidArgumentError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
    return reduction


def per_slot(name: str, values: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` as ``(count,)`` of `dtype` on the CPU."""
    if isinstance(values, torch.Tensor) and not has_memory(values):
        raise InvalidTypeError(f"{name}: expected numbers, got a tensor without memory")
    if isinstance(values, torch.Tensor) and values.shape == (count,) and values.dtype in _DIRECT[dtype]:
        # What a training loop brings.
        found = values.detach() if values.requires_grad else values
        found = found if found.is_cpu else found.cpu()
        if found.dtype != dtype:
            found = found.to(dtype)  # not free for what fits
        return found.resolve_neg().contiguous()
    try:
        # By way of NumPy: torch takes Python's numbers for single precision.
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
    """Raise `InvalidArgumentError` unless a row could have each of the priorities ``(n,)`` under this rule."""
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
    """Return the library's error for one of the core."""
    if isinstance(error, IndexError):
        return IndexRangeError(f"index: {error}")
    return InvalidArgumentError(str(error))


_NORMALISATIONS = ("buffer", "batch")
_SIZES = 64  # of draws whose makers are remembered
_BY_CORE = None if EXCHANGE is None else TensorUpdates(EXCHANGE, torch.Tensor)


class PriorityState(NamedTuple):
    """The rule, and the rows of a storage at some version."""

    alpha: float
    beta: float
    eps: float
    dropped: int
    raw: torch.Tensor
    """``(rows,)`` float64, raw priorities."""
    mark: torch.Tensor
    """``(rows,)`` int32, what the core keeps of each row beside (see `Priorities.save`)."""
    max_seen: float | None
    """The largest priority that an update brought."""
    version: Sequence[int] | None
    """What they are in step with (see `version_state`); None if nothing tells."""


class PriorityTable(Follower[Storage], Stateful[PriorityState]):
    """Raw priorities with the rule that turns them into probabilities and weights.

    A row is drawn with a probability in proportion to ``(priority + eps) ** alpha``; its importance weight is
    ``probability ** -beta``, divided by the largest weight that a stored row would have (``"buffer"``) or that
    a row of the batch has (``"batch"``). New rows get the largest priority that was ever given, or with
    `within_buffer` the largest one stored (1 if that is 0, or nothing is); 1 before the first. Records of which a
    column was replaced keep theirs. Rows that aren't steps are never drawn.

    Not thread-safe: the buffer calls it under its lock.

    Args:
        max_capacity: rows there is room for, at least; a storage that rounded its size up gets as many as it
            has. None for as many as the storage has.
        alpha: 0 draws uniformly, 1 in proportion; 0 or more, may be set at any time.
        beta: 0 makes all weights 1, 1 corrects the draw in full; 0 or more, may be set at any time.
        eps: what is added to every priority; 0 or more.
        dtype: what priorities are kept in, float32 or float64.
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
        self._makers: dict[int, Callable[[], Made]] = {}  # of a draw's tensors, by its size
        self._saved: PriorityState | None = None  # rows for the storage of the next `sync`
        self.renewals = 0
        """How often everything that the native table knew was dropped, blocks of rows included."""

    # The rule

    @property
    def alpha(self) -> float:
        """The exponent of priorities."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._set_rule(number("alpha", value), self._eps)

    @property
    def beta(self) -> float:
        """The exponent of importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = number("beta", value)

    @property
    def eps(self) -> float:
        """What is added to every priority."""
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
        # Rows that are about to get it stand there with 0: alone they tell nothing.
        return largest or 1.0 if self.within_buffer else largest

    # Rows that come and go

    def of(self, storage: Storage) -> Priorities:
        """Return the native table of what `storage` holds; rows written since the last call are new ones."""
        if storage.version != self.followed:
            self.sync(storage)
        self._saved = None
        assert self._native is not None
        return self._native

    def reset(self, storage: Storage, slots: torch.Tensor) -> None:
        """Give `slots`, ``(n,)`` int64, the priority of new rows."""
        native = self.of(storage)
        for start, count in ranges_of(slots):
            self._fill(native, [(start, start + count)])

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
            # A state that says nothing of this storage is of its rows if it has as many.
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
        if native.capacity < self._room(storage):  # the first write rounded the size up, or there is none
            self.renewals += 1
            native = self._native = self._grown(native, storage)
        fresh = [(c.start, min(c.stop, stored)) for c in changes if not c.amended and c.start < stored]
        self._fill(native, fresh)
        if storage.has_mask:
            for start, stop, _ in changes:
                if start < (stop := min(stop, stored)):
                    slots = torch.arange(start, stop, device="cpu")
                    masked = storage.masked(slots)
                    assert masked is not None
                    native.block(slots.data_ptr(), stop - start, masked.data_ptr())

    def check_room(self, storage: Storage) -> None:
        """Raise `InvalidArgumentError` if `storage` has more than `max_capacity` rows."""
        # A storage rounds its size up to whole time steps; anything else is a mistake.
        most = self.max_capacity
        if most is not None and storage.max_size - max(storage.rows_per_step, 1) >= most:
            raise InvalidArgumentError(
                f"max_capacity={most} is less than the {storage.max_size} rows of the storage"
            )

    def _make(self, storage: Storage) -> Priorities:
        self.check_room(storage)
        room = max(self._room(storage), self.max_capacity or 1)
        if storage.max_size == UNBOUNDED:
            room *= 2  # so that growing costs no more than filling
        native = Priorities(room, self.dtype == torch.float32)
        _set_rule(native, self._alpha, self._eps)
        return native

    def _room(self, storage: Storage) -> int:
        """Return the rows to have room for."""
        return storage.max_size if storage.max_size < UNBOUNDED else len(storage)

    def _grown(self, native: Priorities, storage: Storage) -> Priorities:
        """Return a larger table of the same rows, without what was blocked."""
        raw, mark = _rows_of(native)
        grown = self._make(storage)
        grown.load(raw.data_ptr(), mark.data_ptr(), raw.shape[0])
        grown.max_seen = native.max_seen
        return grown

    def _fill(self, native: Priorities, spans: list[tuple[int, int]]) -> None:
        """Give rows ``[start, stop)`` the priority of new ones."""
        if self.within_buffer:
            for start, stop in spans:
                native.fill(start, stop - start, 0.0)  # what is overwritten doesn't count any more
        default = self.default
        for start, stop in spans:
            native.fill(start, stop - start, default)

    # Draws and updates

    def draw(
        self, storage: Storage, count: int, uniforms: torch.Tensor | Random, served: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw rows in proportion.

        Args:
            storage: what to draw from.
            count: n, 1 or more.
            uniforms: ``(n,)`` float64 in [0, 1), or the generator of the core that draws them.
            served: whether they are remembered at once (see `remember`).

        Returns:
            Slots ``(n,)`` int64, importance weights ``(n,)`` of `dtype`, generations ``(n,)`` int64.

        Raises:
            EmptyBufferError: every stored row has probability 0.
        """
        native = self.of(storage)
        make = self._makers.get(count) or self._maker(count)
        (slots, weight, generation), (slots_at, weight_at, generation_at) = make()
        given = uniforms if isinstance(uniforms, Random) else uniforms.data_ptr()
        counters_at, beta, by_batch = storage.counters_at, self._beta, self.by_batch
        try:
            native.draw(given, count, beta, by_batch, counters_at, slots_at, weight_at, generation_at, served)
        except RuntimeError as cause:  # the only one that the core raises here
            raise EmptyBufferError(
                "can't sample: all stored priorities are 0, and eps is; give some row a priority above 0"
            ) from cause
        return slots, weight if self.dtype == torch.float32 else weight.to(self.dtype), generation

    def _maker(self, count: int) -> Callable[[], Made]:
        if len(self._makers) >= _SIZES:
            self._makers.clear()
        make = maker([((count,), torch.int64), ((count,), torch.float32), ((count,), torch.int64)])
        self._makers[count] = make
        return make

    def remember(self, storage: Storage, draw: Draw) -> Draw:
        """Take the rows of a draw as drawn last, in the generations that it has; return it with these."""
        if draw.generation is None:
            draw = draw._replace(generation=storage.generation(draw.slots))
        assert draw.generation is not None
        slots = draw.slots
        self.of(storage).remember(slots.data_ptr(), slots.shape[0], draw.generation.data_ptr())
        return draw

    def check(self, values: torch.Tensor) -> None:
        """Raise `InvalidArgumentError` unless rows can have the priorities ``(n,)``."""
        check_priorities(values, self._alpha, self._eps, self.dtype)

    def update(self, storage: Storage, slots: torch.Tensor, priority: Any, generation: Any) -> None:
        """Take priorities ``(n,)`` of slots ``(n,)`` (-1 for "skip") and drop those that come too late."""
        dropped = None
        if _BY_CORE is not None and isinstance(priority, torch.Tensor) and not priority.is_neg():
            dropped = self._updated(storage, slots, priority, generation, _BY_CORE.update)
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
        """Have all priorities taken, or none; return how many came too late, or what else `update` returns.

        Nothing of a user's may run in `update`: it gets the address of the storage's counters.
        """
        native = self.of(storage)
        stored = len(storage)
        try:
            return update(native, slots, priority, generation, stored, storage.counters_at)
        except ValueError as error:
            raise as_ours(error) from error
        except IndexError as error:
            # Records that were forgotten since their draw: too late as well, if they can have been drawn at all.
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
        """Return the value that a saved state stands for; `SchemaError` for anything else."""
        reader = StateReader(state, "a prioritized sampler")
        alpha, beta, eps = (reader.number(name, 0.0) for name in ("alpha", "beta", "eps"))
        raw = reader.tensor("raw", torch.float64, (None,))
        mark = reader.tensor("mark", torch.int32, (raw.shape[0],))
        seen = reader.optional("max_seen", lambda name: reader.number(name, 0.0))
        probe = Priorities(max(raw.shape[0], 1), self.dtype == torch.float32)
        try:  # by the rule and the rows, whatever the core may say of them
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
        """Take a state: the rule at once, the rows with the storage of the next draw or write."""
        self.unfollow()
        if self._native is not None:
            self._native.clear()  # so that no row contradicts the rule
        self._set_rule(value.alpha, value.eps)
        self._beta, self.dropped = value.beta, value.dropped
        self._saved = value

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the rows as plain tensors."""
        return {
            **self.__dict__,
            "_native": None,
            "_makers": {},
            "_saved": self.snapshot(),
            "followed": None,
        }

    def check_valid(self) -> None:
        """Raise if the native table contradicts itself; for tests."""
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
    """Do what `TensorUpdates` does, with what is known to be vectors of one length."""
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
