"""`AsyncEnvPool`: a batch of environments that can be stepped one by one, without waiting for all.

Change `RowIndex` for the addressing of rows by ``"env_index"``.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.errors import StepFault, explain
from gleanrl._util import non_negative, positive
from gleanrl.data.specs import NonTensor, stack_specs
from gleanrl.envs.vector.async_requests import EnvThreads, Request, RequestHost, Requests, Wanted
from gleanrl.envs.vector.base import BatchedEnv, BatchOptions, as_timeouts, at_home, moved
from gleanrl.envs.vector.factories import EnvMetaData, Factory, is_several
from gleanrl.envs.vector.members import RESET, STEP, STEP_AND_RESET
from gleanrl.envs.vector.worker_pool import EnvWorkerPool
from gleanrl.errors import (
    GleanError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    LengthError,
    MissingKeyError,
    SchemaError,
)

INDEX = "env_index"
"""Key of the entry that holds the number of a row's environment: an integer, as non-tensor data."""


class RowIndex:
    """Maps rows of TensorDicts to environments, by the argument `env_index` or by the entry ``"env_index"``.

    Args:
        batch_size: of the pool, ``[n, *batch]``.
    """

    def __init__(self, batch_size: torch.Size) -> None:
        self._batch_size = batch_size

    def rows(
        self, call: str, tensordict: TensorDictBase | None, env_index: Any
    ) -> dict[int, TensorDictBase | None]:
        """Return the row of each addressed environment; None for each if `tensordict` is None.

        Args:
            call: name of the public call, for messages.
            tensordict: rows of several environments, ``[k, *batch]``, or one row, ``[*batch]``.
            env_index: an integer or several; None to read the entry of the TensorDict.

        Raises:
            InvalidArgumentError: if an environment occurs twice.
            LengthError: if the number of rows differs from the number of environments.
            SchemaError: if a row doesn't have the environments' batch size.
            MissingKeyError, InvalidTypeError, IndexRangeError: see `envs`.
        """
        envs = self.envs(call, tensordict, env_index)
        if len(set(envs)) != len(envs):
            raise InvalidArgumentError(f"{call}: expected each environment once, got {envs}")
        if tensordict is None:
            return dict.fromkeys(envs)
        parts = [tensordict] if self.is_one(tensordict) else tensordict.unbind(0)
        if len(parts) != len(envs):
            raise LengthError(
                f"{call}: expected a row for each of the environments {envs}, got {len(parts)} rows"
            )
        for env, part in zip(envs, parts, strict=True):
            if part.batch_size != self._batch_size[1:]:
                raise SchemaError(
                    f"{call}: expected rows of batch size {tuple(self._batch_size[1:])}, got "
                    f"{tuple(part.batch_size)} for environment {env}"
                )
        return dict(zip(envs, parts, strict=True))

    def envs(self, call: str, tensordict: TensorDictBase | None, env_index: Any) -> list[int]:
        """Return the numbers of the addressed environments.

        The argument `env_index` takes precedence over the entry of the TensorDict. Without both, all n environments
        are addressed, if there is no TensorDict or if it has n rows.

        Raises:
            MissingKeyError: if neither is given and the TensorDict doesn't have n rows.
            InvalidTypeError: if a number isn't an integer.
            IndexRangeError: if a number isn't in ``[0, n)``.
        """
        if env_index is not None:
            return self._checked(call, np.asarray(_plain(env_index)).reshape(-1))
        found = None if tensordict is None else tensordict.get(INDEX, None)
        if tensordict is not None and found is not None:
            rows = 1 if self.is_one(tensordict) else tensordict.shape[0]
            return self._checked(call, np.asarray(_plain(found)).reshape(rows, -1)[:, 0])
        if tensordict is None or tensordict.batch_size == self._batch_size:
            return list(range(self._batch_size[0]))
        raise MissingKeyError(
            f"{call}: {INDEX!r} is missing: set it in the TensorDict, or pass env_index=; "
            f"got batch size {tuple(tensordict.batch_size)}"
        )

    def is_one(self, tensordict: TensorDictBase) -> bool:
        """Return whether a TensorDict is the row of a single environment."""
        return tensordict.ndim < len(self._batch_size)

    def _checked(self, call: str, index: np.ndarray[Any, Any]) -> list[int]:
        if not np.issubdtype(index.dtype, np.integer):
            raise InvalidTypeError(f"{call}: env_index: expected integers, got {index.tolist()}")
        if not ((index >= 0) & (index < self._batch_size[0])).all():
            raise IndexRangeError(
                f"{call}: env_index: expected 0 to {self._batch_size[0] - 1}, got {index.tolist()}"
            )
        return [int(number) for number in index]


def is_number(env_index: Any) -> bool:
    """Return whether `env_index` is a single number, so that the result has no leading dimension."""
    return env_index is not None and np.ndim(_plain(env_index)) == 0


def index_entry(env: int, batch_size: Sequence[int]) -> Any:
    """Return the value of the entry ``"env_index"`` in an environment's row, as non-tensor data."""
    return NonTensorData(env, batch_size=batch_size)


def with_index(metadata: EnvMetaData) -> EnvMetaData:
    """Return the metadata of an environment with the entry ``"env_index"`` added to its state spec.

    Raises:
        InvalidArgumentError: if a spec of the environment has that entry already, for example because it is a pool.
    """
    if any(INDEX in spec.keys() for spec in metadata.specs.values()):
        raise InvalidArgumentError(
            f"env_makers: expected environments without an entry {INDEX!r}, which the pool adds, got {metadata.name}; "
            "rename the entry; a pool can't hold pools"
        )
    state = metadata.specs["state"].clone()
    state[INDEX] = NonTensor(shape=metadata.batch_size, example_data=0)
    return replace(metadata, specs={**metadata.specs, "state": state})


def _plain(numbers: Any) -> Any:
    """Return a tensor, an array or non-tensor data as Python numbers; return other values unchanged."""
    kinds = (torch.Tensor, np.ndarray, NonTensorData, NonTensorStack)
    return numbers.tolist() if isinstance(numbers, kinds) else numbers


STACKS = ("dense", "maybe_dense", "lazy")


_EXCHANGES = (None, "auto", "queue", "shm")


class AsyncEnvPool(BatchedEnv):
    """A batch of environments in threads or worker processes that can be stepped one by one.

    The pool works like any other batch of environments, ``[n, *batch]``, with `step`, `reset`, `rollout` and
    collectors. Such a call waits for all environments. In addition, each environment can be sent a request without
    waiting. ``async_step_send``, ``async_reset_send`` and ``async_step_and_maybe_reset_send`` return at once. The
    ``…_recv`` method of the same kind returns the answers that have arrived, and waits for at least `min_get` of them.

    - The entry ``"env_index"`` holds the number of a row's environment, an integer as non-tensor data. The pool sets
      it in the root of every TensorDict that it returns. A ``send`` call addresses the environments by it, unless the
      argument `env_index` is passed.
    - A ``recv`` call orders its rows by environment number, or as its argument `env_index`. If `max_get` limits their
      number, the earliest answers are returned first. All data are copied on the way to and from the environments.
    - Each environment has at most one request under way. Its answer must be received before the next request, which
      may also be a `step`, `reset` or `set_seed`. Otherwise a `PendingError` names the environment.
    - An exception of an environment is raised by the ``recv`` call that would return its answer, with the traceback.
      The attribute `env_index` of the error names the environment. That environment accepts requests again, and the
      answers of the other environments are kept.
    - An environment is *lost* if its process ended, or if one request took longer than `timeouts` allow. The loss is
      reported as an error in the same way. A lost environment accepts only a reset, which makes a new one, without a
      seed. Environments that share a process are lost together. A hanging thread can't be stopped: the program can't
      end before that thread does.
    - Ctrl-C, or another exception of a signal handler, loses no request. Answers can be received afterwards.

    Processes start and end like the workers of a `ParallelEnv`, and gradients don't flow through steps. In threads,
    gradients flow if grad mode is on in the thread that sends. The pool isn't thread-safe: one thread at a time may
    use it.

    Args:
        env_makers: a callable that makes an environment, or an unused environment; or a list of them.
        backend: ``"threading"`` or ``"multiprocessing"``; None for the backend of the class, which for `AsyncEnvPool`
            itself is threads.
        stack: ``"dense"`` stacks the rows, which must have equal keys, shapes and dtypes. ``"lazy"`` returns lazy
            stacks. ``"maybe_dense"`` returns lazy stacks only for rows that can't be stacked.
        exchange: ``"auto"``, ``"queue"``, ``"shm"`` or None; accepted for compatibility, without effect.
        worker_affinity: the processors that each process may run on, or a function of the process number that returns
            them; None for all.
        envs_per_worker: environments in each process; a process serves one of them at a time.
        create_env_kwargs: keyword arguments of the callables, for all or a list with one for each.
        device: device of the TensorDicts; None for the device of the environments.
        timeouts: how long environments may take; None for the defaults of `Timeouts`.

    Attributes:
        min_get: the default of the argument `min_get`; 1 at first.
        env_makers: the environments or callables.
        num_envs: n.
        backend: ``"threading"`` or ``"multiprocessing"``.
        stack: see above.
        envs_per_worker: see above.

    Raises:
        InvalidArgumentError: for a value that isn't supported (also a ValueError).
        InvalidTypeError: if `timeouts` isn't a `Timeouts`, or a maker is neither callable nor an environment (also a
            TypeError).
        LengthError: if `create_env_kwargs` or `worker_affinity` doesn't have one entry for each environment or process.
        ClosedError: if an environment was closed.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> with AsyncEnvPool([lambda: GymEnv("CartPole-v1")] * 3) as pool:
        ...     roots = pool.reset()
        ...     for _ in range(10):
        ...         pool.async_step_and_maybe_reset_send(pool.rand_action(roots))
        ...         stepped, roots = pool.async_step_and_maybe_reset_recv(min_get=1)
    """

    backend: str

    def __new__(cls, env_makers: Any = None, *, backend: str | None = None, **kwargs: Any) -> Any:
        """Return an instance of the subclass for the backend; of `cls` itself if that is a subclass.

        Raises:
            InvalidArgumentError: if there is no such backend.
        """
        if cls is not AsyncEnvPool:
            return super().__new__(cls)
        for kind in (ThreadingAsyncEnvPool, ProcessorAsyncEnvPool):
            if backend in (None, kind.backend):
                return super().__new__(kind)
        raise InvalidArgumentError(f"backend: expected 'threading' or 'multiprocessing', got {backend!r}")

    def __init__(
        self,
        env_makers: Any,
        *,
        backend: str | None = None,
        stack: str = "dense",
        exchange: str | None = None,
        worker_affinity: Sequence[Sequence[int]] | Callable[[int], Sequence[int]] | None = None,
        envs_per_worker: int = 1,
        create_env_kwargs: Any = None,
        device: Any = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        if backend not in (None, self.backend):
            raise InvalidArgumentError(
                f"backend: expected {self.backend!r} for a {type(self).__name__}, got {backend!r}; use AsyncEnvPool"
            )
        if exchange not in _EXCHANGES:
            raise InvalidArgumentError(f"exchange: expected one of {_EXCHANGES}, got {exchange!r}")
        makers = list(env_makers) if is_several(env_makers) else [env_makers]
        if not makers:
            raise InvalidArgumentError("env_makers: expected at least one environment or callable, got none")
        if stack not in STACKS:
            raise InvalidArgumentError(f"stack: expected one of {STACKS}, got {stack!r}")
        self.stack = stack
        super().__init__(len(makers), makers, create_env_kwargs, BatchOptions(device))
        if stack == "dense" and not self.stackable:
            raise InvalidArgumentError(
                "stack: 'dense', but the environments' data differ in keys, shapes or dtypes; pass stack='lazy'"
            )
        self.env_makers, self.num_envs, self.min_get = makers, len(makers), 1
        self.timeouts, self._rows = as_timeouts(timeouts), RowIndex(self.batch_size)
        self._share(positive("envs_per_worker", envs_per_worker), worker_affinity)

    @abstractmethod
    def _share(self, envs_per_worker: int, affinity: Any) -> None:
        """Check and store how the environments are distributed over processes."""

    # ------------------------------------------------------------------- life
    def shutdown(self) -> None:
        """Close the pool."""
        self.close()

    def __enter__(self) -> AsyncEnvPool:
        """Return the pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the pool."""
        self.close()

    # ------------------------------------------------------------- properties
    @property
    def host(self) -> Any:
        """The `RequestHost` that runs the environments; None before the start."""
        return self.runner.host if self.is_started else None

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """The batch size of each environment."""
        return [metadata.batch_size for metadata in self.meta_data]

    @property
    def resolved_exchange(self) -> str:
        """The way that rows travel: always ``"queue"``."""
        return "queue"

    @property
    def exchange_keys(self) -> tuple[Any, ...]:
        """The entries that are exchanged through shared memory: always none."""
        return ()

    def stats(self, *, reset: bool = False) -> dict[str, float | int]:
        """Return the statistics of an exchange through shared memory: always empty, as there is none."""
        return {}

    # -------------------------------------------------------------------- send
    def async_step_send(self, tensordict: TensorDictBase, env_index: Any = None) -> None:
        """Send environments the actions in `tensordict` and return without waiting for the steps.

        Args:
            tensordict: rows of several environments, ``[k, *batch]``, or one row, ``[*batch]``; copied.
            env_index: the environments, an integer or several. If None, the entry ``"env_index"`` of `tensordict`
                names them. Without that entry, `tensordict` must have n rows, one for each environment.

        Raises:
            ClosedError: if the pool was closed. An unstarted pool is started.
            PendingError: if the last answer of one of them wasn't received; nothing is sent then.
            InvalidArgumentError: if an environment occurs twice.
            InvalidTypeError: if a number of an environment isn't an integer.
            MissingKeyError: if an action, or ``"env_index"``, is missing.
            SchemaError, LengthError: if the batch size isn't that of these environments.
            IndexRangeError: if there is no such environment.
            WorkerError: if one of them is lost.
        """
        self._send(STEP, tensordict, env_index)

    def async_step_and_maybe_reset_send(self, tensordict: TensorDictBase, env_index: Any = None) -> None:
        """Send environments the actions in `tensordict`, and reset each environment whose episode ends.

        See `async_step_send`.
        """
        self._send(STEP_AND_RESET, tensordict, env_index)

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: Any = None) -> None:
        """Send environments a reset and return without waiting for it; see `async_step_send`.

        Args:
            tensordict: as for `reset`; None for no input.
            env_index: the environments. If None, the entry ``"env_index"`` of `tensordict` names them; without a
                `tensordict` all are reset. Lost environments are replaced by new ones first.
        """
        self._send(RESET, tensordict, env_index)

    def _send(self, name: str, tensordict: TensorDictBase | None, env_index: Any) -> None:
        self.start()
        call, requests = f"async_{name}_send", {}
        for env, part in self._rows.rows(call, tensordict, env_index).items():
            root = None if part is None else self._own(env, part).clone()
            requests[env] = Request(name, (root, {}) if name == RESET else (root,))
            if name != RESET and root is not None:
                missing = [key for key in self._action_keys(env) if root.get(key, None) is None]
                if missing:
                    raise MissingKeyError(f"{call}: the action {missing} of environment {env} is missing")
        self.usage.direct()
        self.runner.send(requests)

    def _action_keys(self, env: int) -> list[Any]:
        return list(self.meta_data[env].specs["action"].keys(True, True))

    def _action_spec_for(self, tensordict: TensorDictBase) -> Any:
        if tensordict.batch_size == self.batch_size:
            return super()._action_spec_for(tensordict)
        envs = self._rows.envs("rand_action", tensordict, None)
        specs = self.present_action_specs(envs) or [self.meta_data[env].specs["action"] for env in envs]
        return specs[0] if self._rows.is_one(tensordict) else stack_specs(specs, 0)

    def _rows_of(self, tensordict: TensorDictBase) -> dict[int, TensorDictBase]:
        if tensordict.batch_size == self.batch_size:
            return super()._rows_of(tensordict)
        rows = self._rows.rows("rand_action", tensordict, None)
        return {env: self._own(env, part) for env, part in rows.items() if part is not None}

    def _parts(self, tensordict: TensorDictBase) -> list[TensorDictBase]:
        return [self._own(env, part) for env, part in enumerate(tensordict.unbind(0))]

    def _own(self, env: int, part: TensorDictBase) -> TensorDictBase:
        """Return an environment's row on its device, without the entry that the pool adds."""
        return at_home(part.exclude(INDEX), self.meta_data[env])

    # ----------------------------------------------------------------- receive
    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Receive the steps of `async_step_send`, in the form that `step` returns.

        Args:
            min_get: number of answers to wait for; None for the pool's `min_get`.
            env_index: wait for the answers of all of these environments, an integer or several, and return only these,
                in this order. `min_get` and `max_get` are ignored then.
            max_get: maximal number of rows to return; None for all answers that have arrived.
            timeout: seconds to wait at most; None for no limit except the pool's `timeouts`.

        Returns:
            The rows that were sent, with their ``"next"``, ``[k, *batch]``; ``[*batch]`` if `env_index` is a single
            number.

        Raises:
            PendingError: if fewer requests of this kind are under way (also a RuntimeError).
            NotReadyError: if fewer answers arrive in time; the pool keeps them (also a TimeoutError).
            EnvironmentFailure, WorkerError: if an environment raised or is lost; the error's `env_index` names it. Its
                answer is removed, and the pool keeps all other answers.
            InvalidArgumentError: if `min_get` or `max_get` isn't a positive integer, or `max_get` is below `min_get`.
            IndexRangeError: if there is no environment `env_index`.
        """
        received = self._received(STEP, min_get, env_index, max_get, timeout)
        stepped = [_stepped(request, request.value) for request in received.values()]
        return self._handed_out(received, stepped, env_index)

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Receive the answers of `async_step_and_maybe_reset_send`: the steps, and the roots of the following steps.

        See `async_step_recv`.
        """
        received = self._received(STEP_AND_RESET, min_get, env_index, max_get, timeout)
        stepped = [_stepped(request, request.value[0]) for request in received.values()]
        roots = [request.value[1] for request in received.values()]
        after = self._stacked(list(received), roots, env_index)
        return self._handed_out(received, stepped, env_index), after

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Receive the roots of new episodes, in the form that `reset` returns; see `async_step_recv`."""
        received = self._received(RESET, min_get, env_index, max_get, timeout)
        return self._handed_out(received, [request.value for request in received.values()], env_index)

    def _received(
        self, name: str, min_get: int | None, env_index: Any, max_get: int | None, timeout: float | None
    ) -> dict[int, Request]:
        self.start()
        deadline = Deadline(timeout)
        if env_index is not None:
            envs = self._rows.envs(f"async_{name}_recv", None, env_index)
            wanted = Wanted(name, len(envs), None, envs)
        else:
            least = positive("min_get", self.min_get if min_get is None else min_get)
            if max_get is not None and positive("max_get", max_get) < least:
                raise InvalidArgumentError(f"max_get: expected at least min_get={least}, got {max_get}")
            wanted = Wanted(name, least, max_get)
        try:
            found = self.runner.received(wanted, deadline)
        except StepFault as fault:
            raise self._error(fault) from fault.cause
        return found if env_index is None else {env: found[env] for env in envs}

    def _error(self, fault: StepFault) -> GleanError:
        """Return the user's error for a failed answer, and release that answer."""
        root, keys = self.runner.release([fault.env])[fault.env].arguments[0], self._action_keys(fault.env)
        action = None if root is None or len(keys) != 1 else root.get(keys[0], None)
        error = explain(fault, self, action=action)
        error.__dict__["env_index"] = fault.env
        return error

    def _handed_out(
        self, received: Mapping[int, Request], parts: Sequence[TensorDictBase], env_index: Any
    ) -> TensorDictBase:
        batch = self._stacked(list(received), parts, env_index)
        self.runner.release(received)
        return batch

    def _stacked(
        self, envs: Sequence[int], parts: Sequence[TensorDictBase], env_index: Any
    ) -> TensorDictBase:
        for env, part in zip(envs, parts, strict=True):
            part.set(INDEX, index_entry(env, part.batch_size))
        return moved(parts[0], self.device) if is_number(env_index) else self._together(parts)

    @abstractmethod
    def _make_host(self, makers: Sequence[Factory]) -> RequestHost:
        """Return a host for the environments of these factories."""

    def _make_runner(self, makers: Sequence[Factory]) -> Requests:
        return Requests(self._make_host(makers))

    def _declare(self, makers: Any, each: Sequence[EnvMetaData]) -> None:
        super()._declare(makers, tuple(map(with_index, each)))

    # ------------------------------------------------------------------ steps
    def _together(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        if self.stack == "dense":
            return super()._together(parts)
        placed = [moved(part, self.device) for part in parts]
        if self.stack == "maybe_dense":
            return LazyStackedTensorDict.maybe_dense_stack(placed, 0)
        return LazyStackedTensorDict.lazy_stack(placed, 0)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        numbers = [index_entry(env, self.batch_size[1:]) for env in range(self.num_workers)]
        return super()._reset(tensordict, **kwargs).set(INDEX, NonTensorStack(*numbers))

    def _live_specs(self, members: Sequence[int]) -> dict[int, Any]:
        # An environment accepts no request before its last answer was received.
        busy = self.runner.busy
        return super()._live_specs([env for env in members if env not in busy])


class ThreadingAsyncEnvPool(AsyncEnvPool):
    """An `AsyncEnvPool` with one thread for each environment. The thread makes, steps and closes it."""

    backend, in_process = "threading", True

    def _share(self, envs_per_worker: int, affinity: Any) -> None:
        if envs_per_worker != 1:
            raise InvalidArgumentError(
                f"envs_per_worker: environments have a thread each, expected 1, got {envs_per_worker}; "
                "pass backend='multiprocessing'"
            )
        if affinity is not None:
            raise InvalidArgumentError(
                "worker_affinity: expected None for environments in threads; pass backend='multiprocessing'"
            )
        self.envs_per_worker = 1

    @property
    def live_members(self) -> Sequence[Any]:
        """The environments, once the pool is started."""
        return () if self.host is None else self.host.envs

    def _make_host(self, makers: Sequence[Factory]) -> RequestHost:
        return EnvThreads(makers, self.timeouts)


class ProcessorAsyncEnvPool(AsyncEnvPool):
    """An `AsyncEnvPool` with environments in worker processes. Linux only."""

    backend = "multiprocessing"

    def _share(self, envs_per_worker: int, affinity: Any) -> None:
        self.envs_per_worker = envs_per_worker
        self._num_processes = -(-self.num_envs // envs_per_worker)
        self._affinity = None if affinity is None else affinity_masks(affinity, self._num_processes)

    def _make_host(self, makers: Sequence[Factory]) -> RequestHost:
        host = EnvWorkerPool(makers, self._num_processes, self.timeouts, affinity=self._affinity)
        # The pool may be dropped without `close`, and its workers must not outlive it.
        weakref.finalize(self, host.close)
        return host

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers; empty before the start."""
        return [] if self.host is None else self.host.processes


def _stepped(request: Request, outcome: TensorDictBase) -> TensorDictBase:
    root: TensorDictBase = request.arguments[0]
    return root.set("next", outcome)


def affinity_masks(affinity: Any, num_workers: int) -> list[list[int]]:
    """Return the processors of each worker.

    Args:
        affinity: a sequence for each worker, or a function of the worker's number that returns one.
        num_workers: number of workers.

    Raises:
        LengthError: if the number of sequences isn't `num_workers`.
        InvalidTypeError: if `affinity` is neither a sequence nor a function.
        InvalidArgumentError: if an entry isn't a sequence, is empty, or holds anything but processor numbers.
    """
    masks = [affinity(w) for w in range(num_workers)] if callable(affinity) else affinity
    if not isinstance(masks, Iterable):
        raise InvalidTypeError(
            "worker_affinity: expected a list of processor numbers for each process, for example [[0], [1]], or a "
            f"function of the process number that returns one, got {masks!r}"
        )
    masks = list(masks)
    if len(masks) != num_workers:
        raise LengthError(
            f"worker_affinity: expected {num_workers} entries, one for each process, got {len(masks)}"
        )
    return [_processors(worker, mask) for worker, mask in enumerate(masks)]


def _processors(worker: int, mask: Any) -> list[int]:
    """Return the processors of one worker as a list.

    Raises:
        InvalidArgumentError: if `mask` isn't a sequence, is empty, or holds anything but processor numbers.
    """
    with suppress(TypeError, InvalidArgumentError):
        if found := [non_negative("worker_affinity", cpu) for cpu in mask]:
            return found
    raise InvalidArgumentError(
        f"worker_affinity: expected a list of processor numbers for process {worker}, for example [{worker}], got "
        f"{mask!r}; pass one list for each process, as in [[0], [1]]"
    )
