"""`AsyncEnvPool`: several environments that are stepped as they come."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.arguments import positive
from gleanrl.data.specs import stack_specs
from gleanrl.envs.vector.base import at_home, moved
from gleanrl.envs.vector.env_crew import split
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.options import BatchOptions, as_timeouts
from gleanrl.envs.vector.pool_batch import PooledEnv
from gleanrl.envs.vector.pool_host import Host
from gleanrl.envs.vector.pool_requests import RESET, STEP, STEP_AND_RESET, Request, Wanted
from gleanrl.envs.vector.pool_rows import INDEX, RowIndex, index_entry, is_number
from gleanrl.envs.vector.process_host import ProcessHost, affinity_masks
from gleanrl.envs.vector.thread_host import ThreadHost
from gleanrl.errors import GleanError, InvalidArgumentError, MissingKeyError
from gleanrl.rollouts.faults import StepFault, explain
from gleanrl.system.clock import Deadline
from gleanrl.workers.handle import Timeouts

_EXCHANGES = (None, "auto", "queue", "shm")


class AsyncEnvPool(PooledEnv):
    """Several environments that are stepped as they come, in threads or in processes of their own.

    It can be used as any other batch of environments, ``[n, *batch]``, with `step`, `reset`, `rollout` and in
    collectors: then all wait for all. Beyond that, environments can be asked one by one: ``async_step_send`` (or
    ``async_reset_send``, ``async_step_and_maybe_reset_send``) returns at once, and the ``…_recv`` of the same kind
    gives the answers that have arrived, at least `min_get` of them.

    - ``"env_index"`` says which environment a row is of: an integer, as non-tensor data. It stands at the root of all
      that the pool returns, and tells where a row is sent to, unless the argument `env_index` does.
    - Answers come in the order of their environments' numbers. If `max_get` leaves some for later, those that arrived
      first come first. What is received is fresh memory, as is what an environment gets.
    - Each environment does one thing at a time: its answer has to be received before it's asked again, also by
      `step`, `reset`, `set_seed` and the like; else a `PendingError` names it.
    - What an environment raises is raised by the ``recv`` that would give its answer, with the traceback; the error's
      `env_index` says which it was. It can be asked again then, and the answers of the others are kept.
    - An environment whose process ended, or that stayed at one request for longer than `timeouts` allow, is *lost*,
      which is reported likewise. A reset makes it anew (unseeded); anything else raises until then. Environments in one
      process are lost together. A thread that hangs is left alone, but the program can't end before it does.
    - Ctrl-C, or another exception of a signal handler, loses nothing: what was sent can be received afterwards.

    In processes, environments start and end as those of a `ParallelEnv`, and gradients don't pass. In threads they do,
    where grad mode is on in the thread that sends. One thread of yours at a time may use the pool.

    Args:
        env_makers: a callable that makes an environment, or one that nobody has used; or a list of them.
        backend: ``"threading"`` or ``"multiprocessing"``; None for the class's own, threads for this class.
        stack: ``"dense"``: rows are stacked, for environments that are alike; ``"lazy"``: they come as lazy stacks;
            ``"maybe_dense"``: as lazy stacks where they can't be stacked.
        exchange: ``"auto"``, ``"queue"``, ``"shm"`` or None: needs nothing, as rows travel in one way here.
        worker_affinity: the processors that each process may run on, or a function from its number to them; None for
            all.
        envs_per_worker: environments that share a process, and take turns in it.
        create_env_kwargs: keyword arguments of the callables, for all or a list with one for each.
        device: where TensorDicts live; None for where the environments' do.
        timeouts: how long environments may take; None for the defaults of `Timeouts`.

    Attributes:
        min_get: how many answers to receive at least where nothing else is said; 1 at first.
        env_makers: what makes the environments.
        num_envs: n.
        backend: ``"threading"`` or ``"multiprocessing"``.
        stack: see above.
        envs_per_worker: see above.

    Raises:
        InvalidArgumentError: for a value that isn't supported (also a ValueError).
        InvalidTypeError: if `timeouts` is something else (also a TypeError).

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
        """Make a pool of the class for the backend."""
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
                f"backend: {type(self).__name__} has {self.backend!r}, got {backend!r}"
            )
        if exchange not in _EXCHANGES:
            raise InvalidArgumentError(f"exchange: expected one of {_EXCHANGES}, got {exchange!r}")
        makers = list(env_makers) if isinstance(env_makers, Sequence) else [env_makers]
        if not makers:
            raise InvalidArgumentError("env_makers: expected at least one")
        super().__init__(makers, create_env_kwargs, stack, BatchOptions(device))
        self.env_makers, self.num_envs, self.min_get = makers, len(makers), 1
        self.timeouts, self._rows = as_timeouts(timeouts), RowIndex(self.batch_size)
        self._share(positive("envs_per_worker", envs_per_worker), worker_affinity)

    @abstractmethod
    def _share(self, envs_per_worker: int, affinity: Any) -> None:
        """Take over how environments are spread."""

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

    # ------------------------------------------------------------ what it is
    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """The batch size of each environment."""
        return [metadata.batch_size for metadata in self.meta_data]

    @property
    def resolved_exchange(self) -> str:
        """How rows travel: ``"queue"``."""
        return "queue"

    @property
    def exchange_keys(self) -> tuple[Any, ...]:
        """The entries that stand in shared memory: none."""
        return ()

    def stats(self, *, reset: bool = False) -> dict[str, float | int]:
        """Return what is counted of an exchange through shared memory: nothing, with or without `reset`."""
        return {}

    # -------------------------------------------------------------------- send
    def async_step_send(self, tensordict: TensorDictBase, env_index: Any = None) -> None:
        """Let environments take the actions in `tensordict`, and don't wait for them.

        Args:
            tensordict: rows of several environments, ``[k, *batch]``, or that of one, ``[*batch]``; copied.
            env_index: which environments, an integer or several; None for what ``"env_index"`` in `tensordict` says,
                and for all if it isn't there and there are n rows.

        Raises:
            PendingError: if the last answer of one of them wasn't received; nothing is sent then.
            MissingKeyError: if an action, or ``"env_index"``, is missing.
            SchemaError, LengthError: if the batch size isn't that of these environments.
            IndexRangeError: if there's no such environment.
            WorkerError: if one of them is lost.
        """
        self._send(STEP, tensordict, env_index)

    def async_step_and_maybe_reset_send(self, tensordict: TensorDictBase, env_index: Any = None) -> None:
        """Let environments take the actions in `tensordict`, then reset those that are done; see `async_step_send`."""
        self._send(STEP_AND_RESET, tensordict, env_index)

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: Any = None) -> None:
        """Let environments begin new episodes, and don't wait for them; see `async_step_send`.

        Args:
            tensordict: as for `reset`; None for nothing.
            env_index: which environments; None for what `tensordict` says, all without one.
        """
        self._send(RESET, tensordict, env_index)

    def _send(self, name: str, tensordict: TensorDictBase | None, env_index: Any) -> None:
        self.start()
        call, requests = f"async_{name}_send", {}
        for env, part in self._rows.rows(call, tensordict, env_index).items():
            root = None if part is None else at_home(part.exclude(INDEX), self.meta_data[env]).clone()
            requests[env] = Request(name, (root, {}) if name == RESET else (root,))
            if name != RESET and root is not None:
                missing = [key for key in self._action_keys(env) if root.get(key, None) is None]
                if missing:
                    raise MissingKeyError(f"{call}: the action {missing} of environment {env} is missing")
        self.usage.direct()
        self._running.send(requests)

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
        return {env: at_home(part, self.meta_data[env]) for env, part in rows.items() if part is not None}

    # ----------------------------------------------------------------- receive
    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return steps that were sent, as `step` does.

        Args:
            min_get: wait for so many; None for the pool's `min_get`.
            env_index: wait for that environment, or all of those, instead; `min_get` and `max_get` don't matter then.
            max_get: return at most so many; None for all that have arrived.
            timeout: seconds to wait at most; None for as long as environments may take.

        Returns:
            The rows that were sent with their ``"next"``, ``[k, *batch]``; ``[*batch]`` for one `env_index`.

        Raises:
            PendingError: if fewer are under way (also a RuntimeError).
            NotReadyError: if fewer arrive in time; those that did are kept (also a TimeoutError).
            EnvironmentFailure, WorkerError: if an environment raised, or is lost; its `env_index` says which.
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
        """Return steps that were sent and the roots of those that follow, as `step_and_maybe_reset` does.

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
        """Return roots of new episodes, as `reset` does; see `async_step_recv`."""
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
                raise InvalidArgumentError(f"max_get: expected min_get, {least}, or more, got {max_get}")
            wanted = Wanted(name, least, max_get)
        try:
            found = self._running.received(wanted, deadline)
        except StepFault as fault:
            raise self._error(fault) from fault.cause
        return found if env_index is None else {env: found[env] for env in envs}

    def _error(self, fault: StepFault) -> GleanError:
        """Return the error for an answer that failed, which is received by that."""
        root, keys = self._running.release([fault.env])[fault.env].arguments[0], self._action_keys(fault.env)
        action = None if root is None or len(keys) != 1 else root.get(keys[0], None)
        error = explain(fault, self, action=action)
        error.__dict__["env_index"] = fault.env
        return error

    def _handed_out(
        self, received: Mapping[int, Request], parts: Sequence[TensorDictBase], env_index: Any
    ) -> TensorDictBase:
        batch = self._stacked(list(received), parts, env_index)
        self._running.release(received)
        return batch

    def _stacked(
        self, envs: Sequence[int], parts: Sequence[TensorDictBase], env_index: Any
    ) -> TensorDictBase:
        for env, part in zip(envs, parts, strict=True):
            part.set(INDEX, index_entry(env, part.batch_size))
        return moved(parts[0], self.device) if is_number(env_index) else self._together(parts)


class ThreadingAsyncEnvPool(AsyncEnvPool):
    """An `AsyncEnvPool` of environments in threads, one each, which make, step and close them."""

    backend, in_process = "threading", True

    def _share(self, envs_per_worker: int, affinity: Any) -> None:
        if envs_per_worker != 1:
            raise InvalidArgumentError(
                f"envs_per_worker: environments have a thread each, expected 1, got {envs_per_worker}; "
                "pass backend='multiprocessing'"
            )
        if affinity is not None:
            raise InvalidArgumentError(
                "worker_affinity: there are no processes; pass backend='multiprocessing'"
            )
        self.envs_per_worker = 1

    @property
    def live_members(self) -> Sequence[Any]:
        """The environments, once the pool is started."""
        return self.host.envs if self.is_started else ()

    def _make_host(self, makers: Sequence[Factory]) -> Host:
        return ThreadHost(makers, self.timeouts)


class ProcessorAsyncEnvPool(AsyncEnvPool):
    """An `AsyncEnvPool` of environments in processes. Linux only."""

    backend = "multiprocessing"

    def _share(self, envs_per_worker: int, affinity: Any) -> None:
        self.envs_per_worker = envs_per_worker
        self._shares = split(self.num_envs, -(-self.num_envs // envs_per_worker))
        self._affinity = None if affinity is None else affinity_masks(affinity, len(self._shares))

    def _make_host(self, makers: Sequence[Factory]) -> Host:
        host = ProcessHost(makers, self._shares, self.timeouts, self._affinity)
        weakref.finalize(self, host.close)
        return host

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers; none before the start."""
        return self.host.processes if self.is_started else []


def _stepped(request: Request, outcome: TensorDictBase) -> TensorDictBase:
    root: TensorDictBase = request.arguments[0]
    return root.set("next", outcome)
