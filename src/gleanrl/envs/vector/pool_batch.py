"""A pool of environments as a batch: all are asked at once and waited for, as by any batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase

from gleanrl.envs.vector.base import BatchedEnv, moved
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.members import RandomRequest, ResetRequest
from gleanrl.envs.vector.metadata import EnvMetaData
from gleanrl.envs.vector.options import BatchOptions
from gleanrl.envs.vector.pool_host import Host
from gleanrl.envs.vector.pool_requests import RESET, STEP, Request, Requests
from gleanrl.envs.vector.pool_rows import INDEX, index_entry, with_index
from gleanrl.errors import InvalidArgumentError
from gleanrl.rollouts.faults import StepFault, explain

STACKS = ("dense", "maybe_dense", "lazy")


class PooledEnv(BatchedEnv):
    """Abstract: a batch of environments that are asked one by one, wherever they live.

    Args:
        makers: one for each environment.
        create_env_kwargs: keyword arguments of the callables, for all or a list with one for each.
        stack: how rows become one TensorDict.
        options: the rest.

    Attributes:
        stack: see above.
        host: where the environments live, a `Host`; None before the start.
    """

    def __init__(
        self, makers: Sequence[Any], create_env_kwargs: Any, stack: str, options: BatchOptions
    ) -> None:
        if stack not in STACKS:
            raise InvalidArgumentError(f"stack: expected one of {STACKS}, got {stack!r}")
        self.stack = stack
        self._requests: Requests | None = None
        self.host: Any = None
        super().__init__(len(makers), makers, create_env_kwargs, options)
        if stack == "dense" and not self.stackable:
            raise InvalidArgumentError(
                "stack: 'dense', but the environments' data differ in keys, shapes or dtypes; pass stack='lazy'"
            )

    @abstractmethod
    def _make_host(self, makers: Sequence[Factory]) -> Host:
        """Return where the environments are to live, each made by its maker; not started."""

    def _declare(self, given: Any, each: Sequence[EnvMetaData]) -> None:
        super()._declare(given, tuple(map(with_index, each)))

    # ------------------------------------------------------------------- life
    @property
    def is_started(self) -> bool:
        """Whether the environments live."""
        return self._requests is not None

    def _start(self, makers: Sequence[Factory]) -> None:
        self._end()  # two interrupts of an earlier start may have left its workers
        host = self.host = self._make_host(makers)
        try:
            host.start()
            self._requests = Requests(host)
        except StepFault as fault:
            raise explain(fault, self) from fault.cause
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                self._end()
            raise

    def _end(self) -> None:
        if self._requests is not None:
            self._requests.close()
        elif self.host is not None:
            self.host.close()

    def _forget(self) -> None:
        self._requests = self.host = None

    @property
    def _running(self) -> Requests:
        assert self._requests is not None
        return self._requests

    # ------------------------------------------------------------------ steps
    def _together(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        if self.stack == "dense":
            return super()._together(parts)
        placed = [moved(part, self.device) for part in parts]
        if self.stack == "maybe_dense":
            return LazyStackedTensorDict.maybe_dense_stack(placed, 0)
        return LazyStackedTensorDict.lazy_stack(placed, 0)

    def _step_members(self, roots: Sequence[TensorDictBase | None]) -> list[Any]:
        rows = {env: root.exclude(INDEX) for env, root in enumerate(roots) if root is not None}
        came = self._running.ask({env: Request(STEP, (row,)) for env, row in rows.items()})
        return [came.get(env) for env in range(len(roots))]

    def _reset_members(self, requests: Mapping[int, ResetRequest]) -> dict[int, TensorDictBase]:
        roots = {env: request.tensordict for env, request in requests.items()}
        rows = {env: None if root is None else root.exclude(INDEX) for env, root in roots.items()}
        asked = {env: Request(RESET, (rows[env], request.kwargs)) for env, request in requests.items()}
        return self._running.ask(asked)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        numbers = [index_entry(env, self.batch_size[1:]) for env in range(self.num_workers)]
        return super()._reset(tensordict, **kwargs).set(INDEX, NonTensorStack(*numbers))

    def _rand_members(self, requests: Mapping[int, RandomRequest]) -> dict[int, TensorDictBase]:
        asked = {i: (r.tensordict.exclude(INDEX), r.seed) for i, r in requests.items()}
        return self._running.ask({i: Request("rand_action", given) for i, given in asked.items()})

    def _live_specs(self, members: Sequence[int]) -> dict[int, Any]:
        masked, busy = self.host.may_be_masked, self._running.busy
        # The busy ones can't be asked before their answers are received.
        free = [env for env in members if env not in busy]
        asked = {env: Request("action_spec", ()) for env in free if masked(env)}
        try:
            return dict.fromkeys(free) | self._running.ask(asked)
        except StepFault as fault:
            raise explain(fault, self) from fault.cause

    def _ask_each(
        self, name: str, arguments: Sequence[tuple[Any, ...]], during: str | None = None
    ) -> list[Any]:
        """Call a method of every member, each with its arguments; `during` is what errors call it."""
        requests = {env: Request(name, given) for env, given in enumerate(arguments)}
        try:
            return list(self._running.ask(requests).values())
        except StepFault as fault:
            raise explain(StepFault(0, fault.env, during or name, fault.cause), self) from fault.cause

    def _seed_members(self, seeds: Sequence[int], static_seed: bool) -> None:
        self._ask_each("set_seed", [(seed, static_seed) for seed in seeds])

    def _attribute(self, name: str) -> Any:
        answers = self._ask_each("attribute", [(name,)] * self.num_workers, name)
        if not all(is_callable for is_callable, _ in answers):
            return [value for _, value in answers]

        def method(*args: Any, **kwargs: Any) -> list[Any]:
            self.start()
            return self._ask_each("call", [(name, args, kwargs)] * self.num_workers, name)

        method.__name__ = name
        return method

    def _member_states(self) -> list[dict[str, Any]]:
        return self._ask_each("state_dict", [()] * self.num_workers)

    def _states_at_the_end(self) -> list[dict[str, Any]] | None:
        # Who is busy isn't waited for.
        return None if self._running.busy else self._member_states()

    def _parse_members(self, states: Sequence[Any], strict: bool) -> None:
        self._ask_each("parse_state", [(state, strict) for state in states])

    def adopt_state(self, value: Any) -> None:
        """Let every member go on from its value, which it keeps: from those that were parsed last."""
        if not self.was_closed:
            self._ask_each("adopt_state", [()] * self.num_workers)
