"""`ParallelEnv`: several environments in processes of their own that step as one.

The worker processes of a `ParallelEnv`: who has which environments, and whose fault it was.
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
"""What the launcher imports: with it torch, tensordict and gymnasium."""


def split(num_envs: int, num_processes: int) -> list[range]:
    """Return the numbers of each process's environments: neighbours, as evenly as can be, the first ones more."""
    size, more = divmod(num_envs, num_processes)
    starts = [w * size + min(w, more) for w in range(num_processes + 1)]
    return [range(begin, end) for begin, end in zip(starts, starts[1:], strict=False)]


class EnvCrew:
    """Workers with their shares of the environments. One thread at a time.

    Every call is a barrier: it ends when all workers that were asked have answered. The loss of one worker ends all.

    Args:
        factories: one for each environment.
        num_processes: how many workers, at most as many as environments.
        timeouts: how long they may take.
        num_threads: torch threads of each.
        width: environments that each environment is itself (a batch in a batch), to count them in the flat batch.

    Attributes:
        is_started: whether all environments were made.
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
        self._crew: WorkerPool | None = None
        self.is_started = False

    def start(self) -> None:
        """Start the workers and let them make their environments.

        Raises:
            StepFault: if an environment couldn't be made; ``during`` is ``"construction"``.
        """
        given = self._factories
        try:
            self._crew = WorkerPool(
                [MemberShare(given[share.start : share.stop], share.start) for share in self.shares],
                self._plan,
            )
            self._gather()
            self.is_started = True
        except BaseException:
            with suppress(Exception):  # the first error is the cause
                self.close(0.0)
            raise

    @property
    def _running(self) -> WorkerPool:
        assert self._crew is not None
        return self._crew

    @property
    def segment(self) -> SharedSegment:
        """The memory shared with the workers."""
        return self._running.segment

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers."""
        return [worker.pid for worker in self._running.workers]

    def signal(self, code: bytes, during: str) -> None:
        """Send a signal to every worker and wait.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()  # a worker's environment may get a mask
        if not self._crew.signal(code):  # type: ignore[union-attr]  # it's called at every step
            self._gather()

    def run(self) -> None:
        """Let every worker take all steps of its block, and wait.

        The owner takes back the word of an earlier `break_off` here, before the workers can read it: then no
        interrupt of a clean-up can leave it to a later run.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        for worker in self._running.workers:
            worker.halt(False)
        self.signal(RUN_CODE, "step")

    def break_off(self) -> None:
        """End a run of steps that an interrupt kept its owner from waiting for."""
        crew = self._running
        for worker in crew.workers:
            worker.halt()
        crew.forget()

    def seed_redraws(self, seed: int | None) -> None:
        """Tell the workers the `redraw_seed` of the block that they bind next."""
        for worker in self._running.workers:
            worker.progress[SEED] = -1 if seed is None else seed

    def may_be_masked(self) -> bool:
        """Return whether a mask may restrict the actions of an environment at present; nobody is asked."""
        return any(worker.progress[MASKED] for worker in self._running.workers)

    def made(self) -> list[int]:
        """Return the steps of the block that each environment has made."""
        return self._made(())

    def confirm(self, num_steps: int) -> None:
        """Raise unless every worker has made so many steps of the block.

        Raises:
            WorkerError: naming the first worker that has made fewer, or more.
        """
        for worker in self._running.workers:
            if worker.step != num_steps:
                raise WorkerError(
                    f"worker {worker.index} (process {worker.pid}) made {worker.step} of the {num_steps} steps of the "
                    "block and answered that it was done; the batch is discarded, reset the environments before "
                    "the next one"
                )

    def ask(self, during: str, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of some workers' servants; return what each gave, by worker.

        Args:
            during: what the environments do, for the message.
            name: the method.
            arguments: its arguments, by worker.

        Raises:
            StepFault: if an environment raised, or a worker ended or hung.
        """
        self._during = during
        Changes.note()
        crew = self._running
        crew.forget()
        for worker, given in arguments.items():
            crew.post(worker, name, *given)
        return self._gather()

    def ask_all(self, during: str, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's servant; return what each gave."""
        everybody = dict.fromkeys(range(len(self.shares)), arguments)
        return list(self.ask(during, name, everybody).values())

    def each(self, answers: Sequence[Sequence[Any]]) -> list[Any]:
        """Return one list of what the workers' lists hold."""
        return [item for answer in answers for item in answer]

    def by_worker(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the items, one for each environment, as one list for each worker."""
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
        """End the workers; their environments are closed there first.

        Args:
            seconds: how long they have for that; None for what the timeouts say.

        Raises:
            Exception: what the close of an environment raised.
        """
        if self._crew is not None:
            self._crew.close(seconds)

    # ------------------------------------------------------------------ faults
    def _gather(self) -> dict[int, Any]:
        """Wait for what is due; return what the workers gave.

        Raises:
            StepFault: for a worker that ended or hung, which ends the crew; or for the first that raised.
        """
        answers = self._running.wait_all()
        failed = max((a for a in answers if a.error), key=lambda answer: answer.lost, default=None)
        if failed is None:
            return {answer.worker: answer.value for answer in answers}
        if failed.lost:
            lost = f"worker {failed.worker} was lost: {type(failed.error).__name__}"
            with suppress(Exception):  # what the others' ends raise matters less
                self._running.close(because=lost)
        raise self._fault(failed, answers)

    def _fault(self, answer: WorkerAnswer, answers: Sequence[WorkerAnswer]) -> StepFault:
        """Return the fault of an environment of the flat batch, with what all of them have made of the block."""
        error, worker = answer.error, self._running.workers[answer.worker]
        assert error is not None
        first, in_step = self.shares[answer.worker].start, self._during == "step"
        made = self._made(answers) if in_step else None
        if isinstance(error, StepFault):
            return error.counted_from(first * self._width, made)
        step = worker.step if answer.lost and in_step else 0
        return StepFault(step, (first + worker.place) * self._width, self._during, error, made)

    def _made(self, answers: Sequence[WorkerAnswer]) -> list[int]:
        """Return the steps of the block that each environment has made: workers don't wait for the one that failed."""
        faults = {answer.worker: answer.error for answer in answers}
        made: list[int] = []
        for worker, share in zip(self._running.workers, self.shares, strict=True):
            fault = faults.get(worker.index)
            if isinstance(fault, StepFault):
                made += fault.made(len(share) * self._width)
            else:  # whoever was lost says by its place which of its environments had made the step
                made += [
                    worker.step + (i < worker.place) for i in range(len(share)) for _ in range(self._width)
                ]
        return made

    def _where(self, worker: int, place: int, step: int) -> str:
        env = self.shares[worker].start + place
        at = f", step {step} of the batch" if self._during == "step" else ""
        return f"during the {self._during} of environment {env}{at}"


class ParallelEnv(BatchedEnv):
    """Several environments in processes of their own that step as one, ``[num_workers, *batch]``.

    Data are those of a `SerialEnv` of the same environments and seeds, bit for bit; gradients don't pass.
    In a rollout the workers write their rows into shared memory that the policy reads; each batch is copied from
    there once. Steps through TensorDicts (`step`, `reset`) go through pipes, which is slower.

    The workers start at the first use: forked from a clean process that has imported torch once, they never
    import your program's main module, which needs no ``if __name__ == "__main__"``. Functions, lambdas and classes of
    it reach them all the same. They end with `close`, with the last reference, or with your program, however that
    ends. Linux only.

    What an environment raises is raised here, as the same type where that is possible, with the worker's
    traceback as its cause. When a worker ends by itself (a signal, say) or stays at one environment for longer than
    `timeouts` allow, a `WorkerCrashedError` or `WorkerTimeoutError` tells which environment it was at, with its stack;
    the batch is closed then.

    The other arguments are those of `SerialEnv`.

    Args:
        num_processes: worker processes, which share the environments evenly; None for one each.
        num_sub_threads: torch threads of each worker.
        serial_for_single: whether one environment gives a `SerialEnv` instead.
        mp_start_method: ``"fork"``, ``"forkserver"``, ``"spawn"`` or None: needs nothing, as workers are forked from a
            clean process anyway, which takes the shortest of the three ways and copies none of this one's threads.
        daemon: no effect: workers end with this process in any case.
        timeouts: how long workers may take; None for the defaults of `Timeouts`.

    Raises:
        InvalidArgumentError: for a value that isn't supported, or unlike devices without `device` (also a
            ValueError).
        InvalidTypeError: if `timeouts` is something else (also a TypeError).
        LengthError: if a list hasn't one entry for each environment (also a RuntimeError).

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
        """Make the batch, or a `SerialEnv` for one environment if that is wanted."""
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
        self._crew: EnvCrew | None = None
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
        """Whether the workers live."""
        return self._crew is not None and self._crew.is_started

    def _start(self, makers: Sequence[Factory]) -> None:
        width = self.numel() // self.num_workers
        self._end()  # two interrupts of an earlier start may have left its workers
        crew = EnvCrew(makers, self.num_processes, self.timeouts, self._num_sub_threads, width)
        self._crew = crew
        weakref.finalize(self, crew.close)
        try:
            crew.start()
        except StepFault as fault:
            raise explain(fault, self) from fault.cause

    def _end(self) -> None:
        if self._crew is not None:
            self._crew.close()

    def _forget(self) -> None:
        self._crew = None

    @property
    def _running(self) -> EnvCrew:
        assert self._crew is not None
        return self._crew

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers; none before the start."""
        return self._running.processes if self.is_started else []

    def _check_open(self) -> None:
        if self.is_started and self._running.is_closed and not self.is_closed:
            self.close()  # a worker was lost
        super()._check_open()

    # ------------------------------------------------------------------ steps
    def _step_members(self, roots: Sequence[TensorDictBase | None]) -> list[TensorDictBase]:
        crew = self._running
        parts = crew.by_worker([pack(root) for root in roots])
        answers = crew.ask("step", "step", {w: (part,) for w, part in enumerate(parts)})
        return [unpack(outcome) for outcome in crew.each(list(answers.values()))]

    def _reset_members(self, requests: Mapping[int, ResetRequest]) -> dict[int, TensorDictBase]:
        return self._ask_some("reset", "reset", {i: (r.tensordict, r.kwargs) for i, r in requests.items()})

    def _rand_members(self, requests: Mapping[int, RandomRequest]) -> dict[int, TensorDictBase]:
        given = {i: (r.tensordict, r.seed) for i, r in requests.items()}
        return self._ask_some("rand_action", "rand_actions", given)

    def _live_specs(self, members: Sequence[int]) -> dict[int, Any]:
        if not self._running.may_be_masked():
            return dict.fromkeys(members)
        return dict(enumerate(self._running.each(self._ask_all("rand_action", "action_specs"))))

    def _ask_some(
        self, during: str, name: str, given: Mapping[int, tuple[TensorDictBase | None, Any]]
    ) -> dict[int, TensorDictBase]:
        """Call a method of the servants of some environments, each with a TensorDict and something else."""
        crew = self._running
        arguments: dict[int, tuple[Any, ...]] = {}
        for w, share in enumerate(crew.shares):
            mine = {i - share.start: given[i] for i in share if i in given}
            if mine:
                arguments[w] = ({i: (pack(td), other) for i, (td, other) in mine.items()},)
        answers = crew.ask(during, name, arguments)
        return {
            crew.shares[w].start + i: unpack(came)
            for w, answer in answers.items()
            for i, came in answer.items()
        }

    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Return the part that lets the workers step into the rows of a block.

        If the environments differ in shapes, their data don't live on the CPU, or the batch's don't, or a subclass
        overrides how the batch steps, it goes through `step` and `reset` instead.
        """
        stepper = self.host_stepper(rules) if on_cpu(self.device) else None
        return super().make_stepper(rules) if stepper is None else stepper

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Return the same, wherever the batch's data are; None if an environment's don't live on the CPU."""
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
        """Call a method of every worker's servant with its share of `items`."""
        crew = self._running
        given = {w: (part, *arguments) for w, part in enumerate(crew.by_worker(items))}
        try:
            return list(crew.ask(during, name, given).values())
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
        # Workers that are still at work, or hang, aren't waited for.
        return self._member_states() if self._running.is_idle else None

    def _parse_members(self, states: Sequence[Any], strict: bool) -> None:
        self._ask_each("load_state_dict", "parse_states", states, strict)

    def adopt_state(self, value: Any) -> None:
        """Let every member go on from its value, which the workers keep: from those that were parsed last."""
        if not self._running.is_closed:  # whoever ends a change that broke off does it again
            self._ask_all("load_state_dict", "adopt_states")
