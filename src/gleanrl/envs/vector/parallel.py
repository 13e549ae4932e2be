"""`ParallelEnv`, a batch of environments in worker processes, and `EnvWorkerPool`, its worker pool.

`EnvWorkerPool` distributes the environments over workers and attributes an error to its environment.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tensordict import TensorDictBase

from gleanrl._arrays.devices import on_cpu
from gleanrl._process.shared_columns import SharedSegment
from gleanrl._process.worker import Timeouts, WorkerPlan
from gleanrl._process.worker_pool import WorkerAnswer, WorkerPool
from gleanrl._rollout.errors import StepFault, explain
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Lease, Stepper
from gleanrl._util import is_native, positive_or_none
from gleanrl.data.specs.mapping import Changes
from gleanrl.envs.base import REPLACED
from gleanrl.envs.vector.base import MEMBERWISE, BatchedEnv, BatchOptions, as_timeouts
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.members import RandomRequest, ResetRequest
from gleanrl.envs.vector.parallel_stepper import ParallelStepper
from gleanrl.envs.vector.serial import SerialEnv
from gleanrl.envs.vector.worker import MASKED, RUN_CODE, SEED, MemberShare, pack, unpack
from gleanrl.errors import InvalidArgumentError, WorkerError

PRELOAD = ("gleanrl.envs",)
"""Modules that the fork server imports before it forks workers; they import torch, tensordict and gymnasium."""


def split(num_envs: int, num_processes: int) -> list[range]:
    """Return the environment numbers of each process: consecutive, sizes differ by one at most, larger ones first."""
    size, more = divmod(num_envs, num_processes)
    starts = [w * size + min(w, more) for w in range(num_processes + 1)]
    return [range(begin, end) for begin, end in zip(starts, starts[1:], strict=False)]


class EnvWorkerPool:
    """Workers with their shares of the environments. One thread at a time may use it.

    Every call is a barrier: it returns when all addressed workers have answered. If one worker is lost, all workers
    are ended, since the environments of a batch step together.

    Args:
        factories: one for each environment.
        num_processes: number of workers, at most one for each environment.
        timeouts: how long workers may take.
        num_threads: torch threads of each worker.
        width: number of environments in each environment, more than 1 if these are batches. Errors count environments
            in the flattened batch.

    Attributes:
        is_started: whether all environments were made. It stays True after `close`.
    """

    def __init__(
        self,
        factories: Sequence[Factory],
        num_processes: int,
        timeouts: Timeouts,
        num_threads: int,
        width: int,
    ) -> None:
        self.shares = split(len(factories), num_processes)
        self._factories, self._width = factories, width
        self._plan = WorkerPlan(timeouts, num_threads, PRELOAD, self._where)
        self._during = "construction"
        self._pool: WorkerPool | None = None
        self.is_started = False

    def start(self) -> None:
        """Start the workers and wait until they have made their environments.

        Raises:
            StepFault: an environment can't be made, or its worker ended or hung; ``during`` is ``"construction"``.
            CapacityError, UnsupportedError, LaunchError: see `WorkerPool`.
        """
        factories = self._factories
        try:
            self._pool = WorkerPool(
                [MemberShare(factories[share.start : share.stop], share.start) for share in self.shares],
                self._plan,
            )
            self._gather()
            self.is_started = True
        except BaseException:
            with suppress(Exception):  # the error of the start matters more than one of the clean-up
                self.close(0.0)
            raise

    @property
    def _running(self) -> WorkerPool:
        assert self._pool is not None
        return self._pool

    @property
    def segment(self) -> SharedSegment:
        """The memory shared with the workers."""
        return self._running.segment

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._running.workers]

    def signal(self, code: bytes, during: str) -> None:
        """Send a one-byte signal to every worker and wait for all answers.

        Args:
            code: one of the codes in `worker`.
            during: the operation, for messages.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()  # a worker's environment may set a mask: cached conclusions about specs become invalid
        if not self._pool.signal(code):  # type: ignore[union-attr]  # called at every step, so no property
            self._gather()

    def run(self) -> None:
        """Let every worker make all steps of its block, and wait for all workers.

        The halt flag of an earlier `break_off` is cleared here, before any worker reads it. `break_off` itself
        couldn't clear it reliably: an interrupt could skip that, and the next run would end early.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        for worker in self._running.workers:
            worker.halt(False)
        self.signal(RUN_CODE, "step")

    def break_off(self) -> None:
        """Stop the workers of an interrupted `run` after their present step, and drop their answers."""
        pool = self._running
        for worker in pool.workers:
            worker.halt()
        pool.forget()

    def seed_redraws(self, seed: int | None) -> None:
        """Set the `redraw_seed` of the block that the workers bind next."""
        for worker in self._running.workers:
            worker.progress[SEED] = -1 if seed is None else seed

    def may_be_masked(self) -> bool:
        """Return whether a mask may restrict an environment's actions, as the workers last reported."""
        return any(worker.progress[MASKED] for worker in self._running.workers)

    def made(self) -> list[int]:
        """Return the number of steps of the block that each environment has made."""
        return self._made(())

    def confirm(self, num_steps: int) -> None:
        """Check that every worker has made all steps of the block.

        An answer alone doesn't show how many steps the worker made, so its step counter is compared.

        Raises:
            WorkerError: naming the first worker with another number of steps.
        """
        for worker in self._running.workers:
            if worker.step != num_steps:
                raise WorkerError(
                    f"worker {worker.index} (process {worker.pid}) made {worker.step} of the {num_steps} steps of the "
                    "block and answered that it was done; the batch is discarded, reset the environments before "
                    "the next one"
                )

    def ask(self, during: str, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of the services of some workers; return the results by worker.

        Args:
            during: the operation, for messages.
            name: the method of `EnvService`.
            arguments: its arguments, by worker.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()
        pool = self._running
        pool.forget()  # answers that an earlier, interrupted call didn't take
        for worker, args in arguments.items():
            pool.post(worker, name, *args)
        return self._gather()

    def ask_all(self, during: str, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's service with the same arguments; return the results. See `ask`."""
        everybody = dict.fromkeys(range(len(self.shares)), arguments)
        return list(self.ask(during, name, everybody).values())

    def each(self, answers: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the workers' lists, concatenated."""
        return [item for answer in answers for item in answer]

    def by_worker(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the items, one for each environment, split into one list for each worker."""
        return [items[share.start : share.stop] for share in self.shares]

    @property
    def is_closed(self) -> bool:
        """Whether the workers were ended."""
        return self._running.closed

    @property
    def is_idle(self) -> bool:
        """Whether the workers live and have answered everything."""
        return self._running.is_idle

    def close(self, seconds: float | None = None) -> None:
        """Close the environments and end the workers.

        Args:
            seconds: how long workers may take for it; None for the limit of the timeouts.

        Raises:
            Exception: the error that an environment raised when it was closed.
        """
        if self._pool is not None:
            self._pool.close(seconds)

    # ------------------------------------------------------------------ faults
    def _gather(self) -> dict[int, Any]:
        """Wait for all answers; return the values by worker.

        Raises:
            StepFault: for a lost worker, after the other workers were ended; otherwise for the first environment that
                raised.
        """
        answers = self._running.wait_all()
        # A loss takes precedence over an exception: it ends the pool.
        failed = max((a for a in answers if a.error), key=lambda answer: answer.lost, default=None)
        if failed is None:
            return {answer.worker: answer.value for answer in answers}
        if failed.lost:
            lost = f"worker {failed.worker} was lost: {type(failed.error).__name__}"
            with suppress(Exception):  # the loss matters more than errors of closing the other workers
                self._running.close(because=lost)
        raise self._fault(failed, answers)

    def _fault(self, answer: WorkerAnswer, answers: Sequence[WorkerAnswer]) -> StepFault:
        """Return a worker's error as a fault of an environment in the flattened batch.

        A fault during a step also holds the number of steps that each environment has made of the block.
        """
        error, worker = answer.error, self._running.workers[answer.worker]
        assert error is not None
        first, in_step = self.shares[answer.worker].start, self._during == "step"
        made = self._made(answers) if in_step else None
        if isinstance(error, StepFault):
            return error.counted_from(first * self._width, made)
        step = worker.step if answer.lost and in_step else 0
        return StepFault(step, (first + worker.item) * self._width, self._during, error, made)

    def _made(self, answers: Sequence[WorkerAnswer]) -> list[int]:
        """Return the number of steps of the block that each environment has made.

        The numbers differ after an error, since workers don't wait for one another within a step or a run.
        """
        faults = {answer.worker: answer.error for answer in answers}
        made: list[int] = []
        for worker, share in zip(self._running.workers, self.shares, strict=True):
            fault = faults.get(worker.index)
            if isinstance(fault, StepFault):
                made += fault.made(len(share) * self._width)
            else:  # a lost worker's progress shows its last step, and which of its environments had made it
                made += [
                    worker.step + (i < worker.item) for i in range(len(share)) for _ in range(self._width)
                ]
        return made

    def _where(self, worker: int, index: int, step: int) -> str:
        env = self.shares[worker].start + index
        at = f", step {step} of the batch" if self._during == "step" else ""
        return f"during the {self._during} of environment {env}{at}"


class ParallelEnv(BatchedEnv):
    """Several environments in worker processes that step as one, ``[num_workers, *batch]``.

    The data are bit for bit equal to the data of a `SerialEnv` with the same environments and seeds. Gradients don't
    flow through steps. In a rollout the workers write their rows into shared memory, from which the policy reads. Each
    batch is copied once. Single calls of `step` and `reset` send TensorDicts through pipes, which is slower.

    The workers start at the first use. They are forked from a process that has imported torch but not your program, so
    your main module needs no ``if __name__ == "__main__"``. Its functions, lambdas and classes are pickled by value.
    The workers end with `close`, with the last reference to the batch, or with your program, even if it is killed.
    Linux only.

    An exception of an environment is raised in the calling process, with the same type if that is possible. Its cause
    shows the worker's traceback. If a worker ends unexpectedly, a `WorkerCrashedError` is raised. If it spends more
    time on one environment than `timeouts` allow, a `WorkerTimeoutError` is raised. Both errors name the environment
    and show the worker's stack. After either of them the batch is closed.

    See `SerialEnv` for the other arguments and errors.

    Args:
        num_processes: number of worker processes, which share the environments evenly; None for one for each
            environment.
        num_sub_threads: torch threads of each worker.
        serial_for_single: whether to return a `SerialEnv` if `num_workers` is 1.
        mp_start_method: ``"fork"``, ``"forkserver"``, ``"spawn"`` or None; accepted for compatibility, without effect.
            Workers are always forked from a separate process, and inherit no threads of yours.
        daemon: no effect; workers always end with this process.
        timeouts: how long workers may take; None for the defaults of `Timeouts`.

    Raises:
        InvalidArgumentError: for a value that isn't supported, or if the environments' devices differ and `device` is
            None (also a ValueError).
        InvalidTypeError: if `timeouts` isn't a `Timeouts` (also a TypeError).
        LengthError: if a list doesn't have one entry for each environment (also a RuntimeError).

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.set_seed(1)
        2
        >>> env.rollout(5, break_when_any_done=False).shape
        torch.Size([2, 5])
        >>> env.close()
    """

    def __new__(cls, num_workers: Any = None, create_env_fn: Any = None, **kwargs: Any) -> Any:
        """Return a `ParallelEnv`, or a `SerialEnv` if `serial_for_single` is set and there is one environment.

        The `SerialEnv` ignores `num_processes`, `timeouts` and `num_sub_threads`.
        """
        if kwargs.get("serial_for_single") and num_workers == 1:
            for name in ("num_processes", "timeouts", "num_sub_threads"):
                kwargs.pop(name, None)
            return SerialEnv(num_workers, create_env_fn, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        num_processes: int | None = None,
        create_env_kwargs: Any = None,
        pin_memory: bool = False,
        share_individual_td: bool | None = None,
        shared_memory: bool = True,
        memmap: bool = False,
        policy_proof: Any = None,
        device: Any = None,
        allow_step_when_done: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        serial_for_single: bool = False,
        non_blocking: bool = False,
        mp_start_method: str | None = None,
        use_buffers: bool | None = None,
        consolidate: bool = True,
        daemon: bool = False,
        timeouts: Timeouts | None = None,
    ) -> None:
        options = BatchOptions.of(locals())
        self._crew: EnvWorkerPool | None = None
        super().__init__(num_workers, create_env_fn, create_env_kwargs, options)
        wanted = positive_or_none("num_processes", num_processes) or num_workers
        if wanted > num_workers:
            raise InvalidArgumentError(
                f"num_processes: expected at most the {num_workers} environments, got {wanted}"
            )
        self.num_processes = wanted
        self._num_sub_threads = positive_or_none("num_sub_threads", num_sub_threads) or 1
        self.timeouts = as_timeouts(timeouts)

    # ------------------------------------------------------------------- life
    @property
    def is_started(self) -> bool:
        """Whether the environments were made. It stays True after `close`."""
        return self._crew is not None and self._crew.is_started

    def _start(self, makers: Sequence[Factory]) -> None:
        width = self.numel() // self.num_workers
        self._end()  # an earlier start may have been interrupted twice, which leaves its workers running
        worker_pool = EnvWorkerPool(makers, self.num_processes, self.timeouts, self._num_sub_threads, width)
        self._crew = worker_pool
        # The batch may be dropped without `close`, and its workers must not outlive it.
        weakref.finalize(self, worker_pool.close)
        try:
            worker_pool.start()
        except StepFault as fault:
            raise explain(fault, self) from fault.cause

    def _end(self) -> None:
        if self._crew is not None:
            self._crew.close()

    def _forget(self) -> None:
        self._crew = None

    @property
    def _running(self) -> EnvWorkerPool:
        assert self._crew is not None
        return self._crew

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers; empty before the start."""
        return self._running.processes if self.is_started else []

    def _check_open(self) -> None:
        if self.is_started and self._running.is_closed and not self.is_closed:
            self.close()  # the loss of a worker has ended the pool
        super()._check_open()

    # ------------------------------------------------------------------ steps
    def _step_members(self, roots: Sequence[TensorDictBase | None]) -> list[TensorDictBase]:
        worker_pool = self._running
        parts = worker_pool.by_worker([pack(root) for root in roots])
        answers = worker_pool.ask("step", "step", {w: (part,) for w, part in enumerate(parts)})
        return [unpack(outcome) for outcome in worker_pool.each(list(answers.values()))]

    def _reset_members(self, requests: Mapping[int, ResetRequest]) -> dict[int, TensorDictBase]:
        return self._ask_some("reset", "reset", {i: (r.tensordict, r.kwargs) for i, r in requests.items()})

    def _rand_members(self, requests: Mapping[int, RandomRequest]) -> dict[int, TensorDictBase]:
        arguments = {i: (r.tensordict, r.seed) for i, r in requests.items()}
        return self._ask_some("rand_action", "rand_actions", arguments)

    def _live_specs(self, members: Sequence[int]) -> dict[int, Any]:
        if not self._running.may_be_masked():
            return dict.fromkeys(members)
        return dict(enumerate(self._running.each(self._ask_all("rand_action", "action_specs"))))

    def _ask_some(
        self, during: str, name: str, requests: Mapping[int, tuple[TensorDictBase | None, Any]]
    ) -> dict[int, TensorDictBase]:
        """Call a method for some environments, each with a TensorDict and another argument; return TensorDicts."""
        worker_pool = self._running
        arguments: dict[int, tuple[Any, ...]] = {}
        for w, share in enumerate(worker_pool.shares):
            own = {i - share.start: requests[i] for i in share if i in requests}
            if own:
                arguments[w] = ({i: (pack(td), other) for i, (td, other) in own.items()},)
        answers = worker_pool.ask(during, name, arguments)
        return {
            worker_pool.shares[w].start + i: unpack(packed)
            for w, answer in answers.items()
            for i, packed in answer.items()
        }

    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Start the batch, and return a stepper whose workers write into the rows of a block.

        Such a stepper requires equal shapes, a batch and environments on the CPU, and no subclass that overrides the
        way the batch steps. Otherwise the stepper calls the batch's `step` and `reset`.
        """
        stepper = self.host_stepper(rules) if on_cpu(self.device) else None
        return super().make_stepper(rules) if stepper is None else stepper

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Start the batch; return a stepper with rows on the CPU for a batch on any device, or None.

        There is none if the environments' shapes differ, if an environment isn't on the CPU, or if a subclass
        overrides the way the batch steps.
        """
        self.start()
        if self.unlike_shapes or not is_native(self, *REPLACED, *MEMBERWISE, of=ParallelEnv):
            return None
        if not all(on_cpu(metadata.device) for metadata in self.meta_data):
            return None
        may_mask = any(metadata.may_mask for metadata in self.meta_data)
        return ParallelStepper(self._running, self.batch_size, rules, Lease(self.usage), may_mask)

    # --------------------------------------------------------------- dispatch
    def _ask_all(self, during: str, name: str, *arguments: Any) -> list[Any]:
        try:
            return self._running.ask_all(during, name, *arguments)
        except StepFault as fault:
            raise explain(fault, self) from fault.cause

    def _ask_each(self, during: str, name: str, items: Sequence[Any], *arguments: Any) -> list[Any]:
        """Call a method of every worker's service with its share of `items`."""
        worker_pool = self._running
        requests = {w: (part, *arguments) for w, part in enumerate(worker_pool.by_worker(items))}
        try:
            return list(worker_pool.ask(during, name, requests).values())
        except StepFault as fault:
            raise explain(fault, self) from fault.cause

    def _seed_members(self, seeds: Sequence[int], static_seed: bool) -> None:
        self._ask_each("set_seed", "seed", seeds, static_seed)

    def _attribute(self, name: str) -> Any:
        answers = self._running.each(self._ask_all(name, "attribute", name))
        if not all(is_callable for is_callable, _ in answers):
            return [value for _, value in answers]

        def method(*args: Any, **kwargs: Any) -> list[Any]:
            self._check_open()
            return self._running.each(self._ask_all(name, "call", name, args, kwargs))

        method.__name__ = name
        return method

    def _member_states(self) -> list[dict[str, Any]]:
        return self._running.each(self._ask_all("state_dict", "state_dicts"))

    def _states_at_the_end(self) -> list[dict[str, Any]] | None:
        # The batch is about to be closed: it doesn't wait for workers that are busy or hang.
        return self._member_states() if self._running.is_idle else None

    def _parse_members(self, states: Sequence[Any], strict: bool) -> None:
        self._ask_each("load_state_dict", "parse_states", states, strict)

    def adopt_state(self, value: Any) -> None:
        """Let every member continue from the state that it parsed last; do nothing if the workers were ended.

        `value` is ignored, since the workers keep the parsed states.
        """
        # After an interrupt this is called a second time, possibly after the workers were ended.
        if not self._running.is_closed:
            self._ask_all("load_state_dict", "adopt_states")
