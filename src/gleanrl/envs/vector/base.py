"""`BatchedEnv`, the base class of all batches of environments, and their common options.

A batch starts at the first call that needs its members, for example a step, a reset, a seed, a rollout, a read or load
of its state, or access to a member's attribute.
Before the start, the batch knows the metadata of its members only, and can be copied and pickled. After the start it
owns the members until `close`. A reset of a closed batch makes new members, as does a rollout that begins with a
reset.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from gleanrl._arrays.devices import as_device, columns_device
from gleanrl._arrays.tensordicts import as_key, as_path, flatten
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.env_traits import EnvTraits
from gleanrl._rollout.errors import StepFault, explain
from gleanrl._util import overridden, positive_or_none
from gleanrl.data.specs import is_masked, without_masks
from gleanrl.envs.base import EnvBase
from gleanrl.envs.env_specs import ROLES
from gleanrl.envs.env_state import check_state
from gleanrl.envs.outcomes import reset_masks, reset_rows
from gleanrl.envs.vector.factories import (
    EnvMetaData,
    Factory,
    alike,
    common_batch_size,
    common_device,
    existing,
    factories,
    read_metadata,
    same_keys,
    stackable,
    stacked_on,
    stacked_spec,
)
from gleanrl.envs.vector.independence import require_independent
from gleanrl.envs.vector.members import RANDOM, RESET, STEP, member_states
from gleanrl.errors import (
    EnvironmentContractError,
    InvalidArgumentError,
    InvalidTypeError,
    LengthError,
    UnsupportedError,
)

_REFUSED = ("pin_memory", "policy_proof", "allow_step_when_done")


@dataclass(frozen=True)
class BatchOptions:
    """Options of a batch of environments.

    Attributes:
        device: device of its TensorDicts; None for the device of the environments.
        num_threads: torch threads of this process while the batch is open; None leaves their number unchanged.
        share_individual_td: False requires data that can be stacked densely.
    """

    device: Any = None
    num_threads: int | None = None
    share_individual_td: bool | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> BatchOptions:
        """Return the options among a constructor's arguments, after a check of all of them.

        Args:
            arguments: the constructor's ``locals()``, taken in its first statement.

        Raises:
            InvalidArgumentError: for an argument that supports its default only, for a `num_threads` that isn't a
                positive integer, or for an unknown start method.
            UnsupportedError: if both `memmap` and `shared_memory` are set (also a RuntimeError).
        """
        for name in _REFUSED:
            if arguments[name]:
                raise InvalidArgumentError(f"{name}: {arguments[name]!r} isn't supported; leave it out")
        if arguments["memmap"] and arguments["shared_memory"]:
            raise UnsupportedError(
                "memmap: expected shared_memory=False with memmap=True, got True for both; neither has an effect"
            )
        start_method = arguments["mp_start_method"]
        if start_method not in (None, "fork", "forkserver", "spawn"):
            raise InvalidArgumentError(
                f"mp_start_method: expected 'fork', 'forkserver' or 'spawn', got {start_method!r}"
            )
        num_threads = positive_or_none("num_threads", arguments["num_threads"])
        return cls(arguments["device"], num_threads, arguments["share_individual_td"])


def as_timeouts(timeouts: Any) -> Timeouts:
    """Return `timeouts`, or the defaults if it is None.

    Raises:
        InvalidTypeError: if it is neither a `Timeouts` nor None.
    """
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise InvalidTypeError(f"timeouts: expected Timeouts(…), got {type(timeouts).__name__}")
    return timeouts or Timeouts()


class ThreadCap:
    """Sets the number of torch threads of this process while a batch is open.

    Args:
        num_threads: the number; None leaves it unchanged.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads
        self._before: int | None = None

    def apply(self) -> None:
        """Set the number and remember the former one."""
        if self._num_threads is not None:
            self._before = torch.get_num_threads()
            torch.set_num_threads(self._num_threads)

    def lift(self) -> None:
        """Restore the former number."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


MEMBERWISE = ("_step_members", "_reset_members", "_together")
"""Methods of `BatchedEnv` that a memberwise stepper bypasses, in addition to `gleanrl.envs.base.REPLACED`.

If a subclass overrides one of them, the batch is stepped through its public methods.
"""


class BatchedEnv(EnvBase):
    """Base class of several environments that step as one, ``[n, *batch]``.

    A public attribute that this class lacks is looked up in every member. The result is the list of the members'
    values, or a function that calls the method of every member. Such a look-up starts the batch. Not thread-safe.

    Args:
        num_envs: n.
        create_env_fn: a callable or an unused environment for all, or a list with one for each.
        create_env_kwargs: keyword arguments of the callables, for all or a list with one for each.
        options: see `BatchOptions`.

    Attributes:
        num_workers: n.
        meta_data: metadata of each environment.
        stackable: whether the environments' data can be stacked densely: equal keys and dtypes, equal and fixed
            shapes.
        unlike_shapes: whether the environments have equal keys, dtypes and numbers of dimensions but different shapes.
    """

    in_process = False
    """Whether the members live in this process."""

    _runner: Any = None
    """See `runner`; None before the first attempt to start the batch."""

    def __init__(
        self, num_envs: Any, create_env_fn: Any, create_env_kwargs: Any, options: BatchOptions
    ) -> None:
        makers, each = read_metadata(factories(num_envs, create_env_fn, create_env_kwargs))
        device = as_device(options.device) if options.device is not None else common_device(each)
        super().__init__(
            device=device,
            batch_size=(num_envs, *common_batch_size(each)),
            allow_done_after_reset=any(metadata.traits.allow_done_after_reset for metadata in each),
        )
        self.num_workers: int = num_envs
        self.options = options
        self._declare(makers, each)
        if not self.stackable and options.share_individual_td is False:
            raise InvalidArgumentError(
                "share_individual_td: False, but the environments' data differ in keys, shapes or dtypes and "
                "can't be stacked in one TensorDict; leave it out"
            )
        require_independent(self.stepped_here(started=False), started=False)
        self._ended = False  # whether all members were closed, which an interrupt of `close` may prevent
        self._cap = ThreadCap(options.num_threads)
        self._last_states: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def _declare(self, makers: tuple[Factory, ...], each: tuple[EnvMetaData, ...]) -> None:
        """Store the members' factories and metadata, and derive the specs of the batch."""
        self._factories = makers
        self._may_mask = any(metadata.may_mask for metadata in each)
        self._masks_declared = any(is_masked(metadata.specs["action"]) for metadata in each)
        self.meta_data = each
        self.stackable = stackable(each)
        self.unlike_shapes = same_keys(each) and not alike(each)
        for role in ROLES:
            setattr(self, f"full_{role}_spec", stacked_spec(role, each, self.device))

    @property
    def traits(self) -> EnvTraits:
        """The traits of the batch, derived from its members' traits; see `EnvTraits`."""
        each = [metadata.traits for metadata in self.meta_data]
        return replace(
            super().traits,
            masks_frames=any(traits.masks_frames for traits in each),
            loses_last=any(traits.loses_last for traits in each),
            stackable=same_keys(self.meta_data),
            actions_vary=any(traits.actions_vary for traits in each),
            notes_masks=all(traits.notes_masks for traits in each)
            and not overridden(self, "live_action_spec", of=BatchedEnv),
            own_actions=bool(overridden(self, "rand_action", of=BatchedEnv)) or self._members_choose,
            primed_keys=tuple(dict.fromkeys(key for traits in each for key in traits.primed_keys)),
        )

    # --------------------------------------------------------- random actions
    @property
    def _members_choose(self) -> bool:
        """Whether a member's `rand_action` does more than draw from its action spec."""
        return any(metadata.traits.own_actions for metadata in self.meta_data)

    def live_action_spec(self) -> Any:
        """Return the full action spec with the members' present masks.

        Each call asks the members, unless their last answers showed that they have no mask.
        """
        specs = self.present_action_specs(range(self.num_workers))
        return self.full_action_spec if specs is None else stacked_on(specs, self.device)

    def present_action_specs(self, members: Sequence[int]) -> list[Any] | None:
        """Return the action specs of some members with their present masks; None if the declared specs apply.

        The declared specs apply if the batch isn't started or is closed, or if masks are neither possible, declared nor
        present. Otherwise a member without a mask gets its declared spec without masks, and a member that can't be
        asked gets its declared spec.
        """
        if self.is_closed or not self.is_started or not self._may_mask:
            return None
        specs = self._live_specs(members)
        unmasked = all(member in specs and specs[member] is None for member in members)
        if unmasked and not self._masks_declared:
            return None
        declared = [self.meta_data[member].specs["action"] for member in members]
        return [
            specs.get(member, spec) or without_masks(spec)
            for member, spec in zip(members, declared, strict=True)
        ]

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions that the masks allow into `tensordict`, and return it; None makes a new TensorDict.

        If a member's `rand_action` does more than draw from its action spec, the batch starts, and every member is
        asked for its action. Each member draws with its own seed from torch's global generator. So the actions don't
        depend on how the members are distributed over processes.

        Raises:
            EnvironmentFailure: if a member that was asked raised.
        """
        if not self._members_choose:
            return super().rand_action(tensordict)
        self.start()
        root = self._blank() if tensordict is None else tensordict
        parts = self._rows_of(root)
        seeds = torch.randint(torch.iinfo(torch.int64).max, (len(parts),), device="cpu").tolist()
        requests = {i: (part, seed) for (i, part), seed in zip(parts.items(), seeds, strict=True)}
        drawn = self._ask(RANDOM, requests)
        one = root.ndim < self.ndim
        return root.update(moved(drawn[0], self.device) if one else self._together(drawn))

    def _rows_of(self, tensordict: TensorDictBase) -> dict[int, TensorDictBase]:
        """Return the rows of `tensordict` by member; pools override this for TensorDicts of some members."""
        return dict(enumerate(self._parts(tensordict)))

    # ------------------------------------------------------------ for subclasses
    @abstractmethod
    def _make_runner(self, makers: Sequence[Factory]) -> Any:
        """Return a runner of members that the factories make; `start` starts it. See `runner`."""

    @property
    def live_members(self) -> Sequence[Any]:
        """The members of a started batch that live in this process."""
        return ()

    def stepped_here(self, started: bool) -> Sequence[Any]:
        """Return the members that live in this process. Members in other processes share no objects with it.

        Args:
            started: whether to start the batch first. If False, an unstarted batch returns the environments that were
                passed to it as instances.
        """
        if not self.in_process:
            return ()
        if started:
            self.start()
        return self.live_members if self.is_started else existing(self._factories)

    # ---------------------------------------------------------------- members
    @property
    def runner(self) -> Any:
        """The caller of the members: a `MemberGroup`, an `EnvWorkerPool`, or the `Requests` of an `AsyncEnvPool`."""
        assert self._runner is not None
        return self._runner

    def _ask(
        self, name: str, requests: Mapping[int, tuple[Any, ...]], during: str | None = None
    ) -> list[Any]:
        """Call a method of some members; return the results in the order of `requests`.

        Args:
            name: the method of `EnvMember`.
            requests: its arguments, by member.
            during: the operation, for messages; None for `name`.

        Raises:
            GleanError: if a member raised; see `explain`.
        """
        try:
            answers = self.runner.ask(name, requests, during)
        except StepFault as fault:
            raise explain(fault, self) from fault.cause
        return [answers[member] for member in requests]

    def _ask_all(self, name: str, *arguments: Any, during: str | None = None) -> list[Any]:
        return self._ask(name, dict.fromkeys(range(self.num_workers), arguments), during)

    def _live_specs(self, members: Sequence[int]) -> dict[int, Any]:
        """Return the action spec of each of `members` that can be asked; None for a member without a mask."""
        asked = [member for member in members if self.runner.may_be_masked(member)]
        specs = self._ask("action_spec", dict.fromkeys(asked, ())) if asked else []
        return dict.fromkeys(members) | dict(zip(asked, specs, strict=True))

    def _step_members(self, roots: Sequence[TensorDictBase | None]) -> list[Any]:
        """Step every member that has a root; return the outcomes, None for the other members.

        Raises:
            StepFault: if a member raised.
        """
        requests = {member: (root,) for member, root in enumerate(roots) if root is not None}
        answers = self.runner.ask(STEP, requests)
        return [answers.get(member) for member in range(len(roots))]

    def _reset_members(
        self, requests: Mapping[int, tuple[TensorDictBase | None, Mapping[str, Any]]]
    ) -> dict[int, TensorDictBase]:
        """Reset some members and return their roots.

        Args:
            requests: by member: the input of its `reset`, with the ``"_reset"`` masks or None, and keyword arguments.

        Raises:
            StepFault: if a member raised.
        """
        roots: dict[int, TensorDictBase] = self.runner.ask(RESET, requests)
        return roots

    def _seed_members(self, seeds: Sequence[int], static_seed: bool) -> None:
        self._ask("set_seed", {member: (seed, static_seed) for member, seed in enumerate(seeds)})

    def _attribute(self, name: str) -> Any:
        """Return the list of the members' attributes, or a function that calls the method of every member."""
        answers = self._ask_all("attribute", name, during=name)
        if not all(is_callable for is_callable, _ in answers):
            return [value for _, value in answers]

        def method(*args: Any, **kwargs: Any) -> list[Any]:
            self.start()
            return self._ask_all("call", name, args, kwargs, during=name)

        method.__name__ = name
        return method

    def _member_states(self) -> list[dict[str, Any]]:
        """Return the state of every member."""
        return self._ask_all("state_dict")

    def _parse_members(self, states: Sequence[Any], strict: bool) -> Any:
        """Parse a state for every member, without a change; return the value for `adopt_state`."""
        requests = {member: (state, strict) for member, state in enumerate(states)}
        self._ask("parse_state", requests, "load_state_dict")

    def adopt_state(self, value: Any) -> None:
        """Let every member continue from the state that it parsed last; do nothing if the members were closed.

        `value` is ignored, since members in workers and threads keep the parsed states.
        """
        # After an interrupt this is called a second time, possibly after the workers were ended.
        if not self.runner.is_closed:
            self._ask_all("adopt_state", during="load_state_dict")

    # ------------------------------------------------------------------- life
    @property
    def is_started(self) -> bool:
        """Whether the members were made. It stays True after `close`."""
        return self._runner is not None and self._runner.is_started

    @property
    def is_closed(self) -> bool:
        """Whether there are no live members: the batch hasn't been started, or was closed."""
        return self._closed or not self.is_started

    @is_closed.setter
    def is_closed(self, closed: bool) -> None:
        self._closed = closed

    @property
    def was_closed(self) -> bool:
        """Whether the batch was closed."""
        return self._closed

    def _check_open(self) -> None:
        runner = self._runner
        if runner is not None and runner.is_started and runner.is_closed and not self._closed:
            self.close()  # the loss of a worker has ended the workers
        super()._check_open()

    def start(self) -> None:
        """Make the members, unless they exist. The first use of the batch calls it.

        It also sets the number of torch threads, until `close`. After an error there are no members, and the next use
        tries again.

        Raises:
            ClosedError: if the batch was closed.
            Exception: if a member can't be made.
        """
        self._check_open()
        if not self.is_started:
            try:
                self._cap.apply()
                self._end()  # an earlier start may have been interrupted twice, which leaves its workers running
                self._runner = self._make_runner(self._factories)
                self._runner.start()
            except StepFault as fault:
                self._cap.lift()
                raise explain(fault, self) from fault.cause
            except BaseException:
                self._cap.lift()
                raise

    def close(self, **kwargs: Any) -> None:
        """Close every member. If an interrupt ended the first call, a second one closes the remaining members.

        The members' states are stored first, for `state_dict` of the closed batch. The former number of torch threads
        is restored.

        Raises:
            Exception: the first error that a member raised; the batch is closed nevertheless.
        """
        if self._ended:
            return
        if self.is_started and not self._closed:
            # A batch with requests under way doesn't wait for members that are busy or hang. A member that can't give
            # its state can still be closed.
            with suppress(Exception):
                self._last_states = self._member_states() if self.runner.is_idle else self._last_states
        self.is_closed = True
        self._cap.lift()
        try:
            self._end()
        except Exception:
            self._ended = True
            raise
        self._ended = True

    def _end(self) -> None:
        """Close the members, including members of an interrupted start."""
        if self._runner is not None:
            self._runner.close()

    def _reopen(self) -> None:
        if not self._ended:
            return
        self._runner = None
        self.is_closed = self._ended = False
        try:
            self.start()
        except BaseException:
            self.is_closed = self._ended = True
            raise

    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add keyword arguments for the members' callables, for all or a list with one for each.

        The specs are read again, for which environments are made and closed.

        Raises:
            InvalidArgumentError: if the batch was started.
            UnsupportedError: for a member that was passed as an environment without `update_kwargs`.
            LengthError: if the list doesn't have one entry for each environment.
        """
        if self.is_started:
            raise InvalidArgumentError(
                "update_kwargs: the environments exist already; call it before their first use"
            )
        extra = [kwargs] * self.num_workers if isinstance(kwargs, Mapping) else list(kwargs)
        if len(extra) != self.num_workers:
            raise LengthError(f"update_kwargs: expected {self.num_workers} mappings, got {len(extra)}")
        merged = [{**old.kwargs, **new} for old, new in zip(self._factories, extra, strict=True)]
        makers = factories(self.num_workers, [factory.source for factory in self._factories], merged)
        self._replace_makers(
            replace(new, truncated=old.truncated) for old, new in zip(self._factories, makers, strict=True)
        )

    def _replace_makers(self, makers: Iterable[Factory]) -> None:
        """Replace the members' factories, and read their metadata again."""
        self._declare(*read_metadata(tuple(makers)))

    def add_truncated_keys(self) -> Any:
        """Raise, since the members couldn't set a flag that the batch adds.

        Raises:
            UnsupportedError: always (also a RuntimeError).
        """
        raise UnsupportedError(
            f"add_truncated_keys: {type(self).__name__} can't add flags to its environments; "
            "call it on the environment inside create_env_fn"
        )

    def _know_truncated(self) -> None:
        if self.is_started:
            self.add_truncated_keys()  # raises
        self._replace_makers(replace(factory, truncated=True) for factory in self._factories)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of an unstarted batch for copies and pickles.

        Raises:
            InvalidArgumentError: if the batch was started, since a copy would continue from the same state.
        """
        if self.is_started:
            raise InvalidArgumentError(
                f"{type(self).__name__}: a started batch can't be copied or pickled; pass a callable that makes it"
            )
        return self.__dict__.copy()

    # ------------------------------------------------------------------ steps
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.start()
        parts: Sequence[TensorDictBase] = self._parts(tensordict)
        mask = tensordict.get("_step", None)
        wanted = (
            [True] * self.num_workers if mask is None else mask.reshape(self.num_workers, -1).any(-1).tolist()
        )
        if not any(wanted):
            raise InvalidArgumentError("step: expected at least one True in the '_step' mask, got none")
        try:
            outcomes = self._step_members([part if wanted[i] else None for i, part in enumerate(parts)])
        except StepFault as fault:
            raise explain(fault, self, action=self._action_of(tensordict, fault)) from fault.cause
        stepped = {i: outcome for i, outcome in enumerate(outcomes) if wanted[i]}
        return self._together(
            [stepped[i] if wanted[i] else self._unchanged_row(parts[i], stepped) for i in range(len(parts))]
        )

    def _parts(self, tensordict: TensorDictBase) -> list[TensorDictBase]:
        """Return the members' rows, each on the device of its member."""
        return [at_home(part, each) for part, each in zip(tensordict.unbind(0), self.meta_data, strict=True)]

    def _action_of(self, tensordict: TensorDictBase, fault: StepFault) -> Any:
        """Return the action of the failed environment for the message; None if it can't be told."""
        if fault.env < 0 or len(self.action_keys) != 1:
            return None
        action = tensordict.unbind(0)[fault.env // max(1, self.numel() // self.num_workers)]
        return action.get(self.action_keys[0], None)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.start()
        each = self._kwargs_of_each(kwargs)
        if tensordict is None:
            everybody = {i: (None, each[i]) for i in range(self.num_workers)}
            return self._together(list(self._reset_some(everybody).values()))
        parts = self._parts(tensordict)
        masks = reset_masks(tensordict, [as_path(key)[:-1] for key in self.reset_keys])
        rows = reset_rows(masks, self.batch_size).reshape(self.num_workers, -1).any(-1) if masks else None
        wanted = [rows is None or bool(rows[i]) for i in range(self.num_workers)]
        requests = {i: (parts[i], each[i]) for i in range(self.num_workers) if wanted[i]}
        roots = self._reset_some(requests)
        unchanged = {
            i: self._unchanged_row(parts[i], roots) for i in range(self.num_workers) if not wanted[i]
        }
        return self._together([roots[i] if wanted[i] else unchanged[i] for i in range(self.num_workers)])

    def _kwargs_of_each(self, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the keyword arguments of each member's reset."""
        kwargs_list = kwargs.pop("list_of_kwargs", None)
        if kwargs_list is None:
            return [kwargs] * self.num_workers
        if len(kwargs_list) != self.num_workers:
            raise LengthError(
                f"reset: list_of_kwargs: expected {self.num_workers} entries, got {len(kwargs_list)}"
            )
        return [{**kwargs, **own} for own in kwargs_list]

    def _reset_some(self, requests: Mapping[int, Any]) -> dict[int, TensorDictBase]:
        try:
            return self._reset_members(requests)
        except StepFault as fault:
            raise explain(fault, self) from fault.cause

    def _unchanged_row(self, part: TensorDictBase, changed: Mapping[int, TensorDictBase]) -> TensorDictBase:
        """Return the row of a member that isn't stepped or reset, with the keys of the other members' fresh rows.

        If the rows will be stacked densely, keys that this row lacks are filled with zeros.
        """
        actions = [*self.action_keys, *self.reward_keys]
        row = part.exclude("next", *self.reset_keys, *actions)
        if not changed or not self.stackable:
            return row
        model = next(iter(changed.values()))
        out = model.apply(torch.zeros_like)
        assert out is not None
        return out.update(row.select(*map(as_key, flatten(model)), strict=False))

    def _together(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        """Return the members' rows as one TensorDict: a dense stack, or a lazy one if their specs differ."""
        if not self.stackable:
            return LazyStackedTensorDict.lazy_stack([moved(part, self.device) for part in parts], 0)
        try:
            stacked: Any = torch.stack(list(parts), 0)
            return moved(stacked, self.device)
        except (RuntimeError, KeyError) as cause:
            raise EnvironmentContractError(
                f"{type(self).__name__}: the environments' outcomes can't be stacked, though their specs "
                f"agree: {cause}"
            ) from cause

    def _blank(self) -> TensorDictBase:
        if self.stackable:
            return super()._blank()
        rows = [TensorDict({}, self.batch_size[1:], device=self.device) for _ in range(self.num_workers)]
        return LazyStackedTensorDict.lazy_stack(rows, 0)

    def _seed_all(self, seed: int, static_seed: bool) -> None:
        self.start()
        width = self.numel() // self.num_workers
        seeds = [seed if static_seed else seed + i * width for i in range(self.num_workers)]
        self._seed_members(seeds, static_seed)

    # --------------------------------------------------------------- dispatch
    def _elsewhere(self, name: str) -> Any:
        """Return the members' attributes of that name as a list, or a function that calls their methods."""
        if "meta_data" not in self.__dict__:
            return super()._elsewhere(name)
        self.start()
        return self._attribute(name)

    # ------------------------------------------------------------------ state
    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:  # type: ignore[override]
        """Return the state of every member, under ``"worker0"``, ``"worker1"``, ….

        An unstarted batch is started. A closed batch returns the states before `close`. If `close` couldn't ask the
        members, it returns the states before an earlier `close`, or none. The arguments have no effect.
        """
        if not self._closed:
            self.start()
        states = self._last_states if self._closed else self._member_states()
        return OrderedDict((f"worker{i}", state) for i, state in enumerate(states))

    def parse_state(self, state: Any, strict: bool = True) -> Any:
        """Return the parsed states of the members, from the result of `state_dict` or from one member's state for all.

        An unstarted batch is started. Members in workers or pools keep the parsed states themselves.

        Raises:
            ClosedError: if the batch was closed.
            MissingKeyError: if the state of some members is missing.
            SchemaError: if a member's state doesn't fit.
        """
        check_state(self, state)
        self.start()
        return self._parse_members(member_states(state, self.num_workers), strict)

    def __repr__(self) -> str:
        """Return the class, the members' classes, the batch size and the device."""
        names = ", ".join(dict.fromkeys(metadata.name for metadata in self.meta_data))
        return f"{type(self).__name__}({names}, batch_size={tuple(self.batch_size)}, device={self.device})"


def at_home(part: TensorDictBase, metadata: EnvMetaData) -> TensorDictBase:
    """Return a member's row on the device of the member."""
    return part if part.device == metadata.device else part.to(columns_device(metadata.device))


def moved(part: TensorDictBase, device: torch.device | None) -> TensorDictBase:
    """Return members' rows on the batch's device; None drops the device of the TensorDict but moves no data."""
    if part.device == device:
        return part
    if device is None:
        return TensorDict(dict(part.items()), part.batch_size)
    return part.to(device)


def dispatched(name: str, answers: Sequence[Any], call: Callable[..., list[Any]]) -> Any:
    """Return a list of `answers`, or, if all of them are callable, a function that calls all members' methods."""
    if not all(callable(answer) for answer in answers):
        return list(answers)

    def method(*args: Any, **kwargs: Any) -> list[Any]:
        return call(name, args, kwargs)

    method.__name__ = name
    return method
