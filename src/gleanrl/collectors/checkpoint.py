"""The state of a collection, with its environment and its policy, as users save it.

Where the environments of a collection stand, so that another one goes on in the middle of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from gleanrl._os.interrupts import to_the_end
from gleanrl._rollout.plan import RolloutPlan
from gleanrl._rollout.protocol import Carry, Stepper
from gleanrl._state.rng import GENERATORS, Places
from gleanrl._state.state import StateReader
from gleanrl.collectors.frame_accounting import FrameCounts, Numbering, TrajectoryIds
from gleanrl.collectors.policy_weights import PolicyWeights, check_loads
from gleanrl.collectors.source import Loading, warn
from gleanrl.envs.env_state import check_state
from gleanrl.envs.simulator_state import adopt_memory, check_memory, remember
from gleanrl.errors import InvalidTypeError, MissingKeyError, SchemaError, UnsupportedError


@dataclass(frozen=True)
class EpisodePosition:
    """Where the environments stand, and the generators that they share with the policy and the program.

    Attributes:
        carry: the observations that no action followed yet; None for a reset to come.
        memory: what the environments live by; None if that can't be told.
        why: why not.
        generators: of the process; None to leave them.
    """

    carry: Carry | None = None
    memory: dict[str, Any] | None = None
    why: str = ""
    generators: Places | None = None

    @classmethod
    def of(cls, env: Any, stepper: Stepper, reset_first: bool) -> EpisodePosition:
        """Return the place of environments that `stepper` steps, or that are to be reset."""
        try:
            memory = remember(env)
        except UnsupportedError as cause:
            return cls(None, None, str(cause), GENERATORS.snapshot())
        carry = None if reset_first else stepper.snapshot()
        return cls(carry, memory, "", GENERATORS.snapshot())

    @classmethod
    def read(cls, state: Any, env: Any, stepper: Stepper) -> EpisodePosition:
        """Return the place of a saved state; without a carry for environments that can't be taken there."""
        reader = StateReader(state, "the environments' place")
        why = reader.text("why")
        generators = reader.optional("generators", lambda name: GENERATORS.parse(reader.get(name)))
        memory = reader.get("memory")
        try:
            if memory is not None:
                check_memory(env, memory)
            carry = reader.optional("carry", lambda name: stepper.parse(reader.get(name)))
        except SchemaError as cause:
            return cls(None, None, str(cause), generators)
        return cls(carry, memory, why, generators)

    def take_up(self, env: Any, stepper: Stepper) -> None:
        """Take the environments there, and the process's generators."""
        if self.memory is not None:
            adopt_memory(env, self.memory)
        if self.carry is not None:
            stepper.adopt(self.carry)
        if self.generators is not None:
            GENERATORS.adopt(self.generators)


class Collects(Protocol):
    """A collection: what collects in one process."""

    env: Any
    plan: RolloutPlan
    weights: PolicyWeights
    numbering: Numbering | None

    @property
    def ledger(self) -> FrameCounts:
        """The counts."""

    @property
    def trajectories(self) -> TrajectoryIds:
        """Where they stand."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it lives by, beside its environment and its policy."""

    def snapshot(self) -> Any:
        """Return that as a value."""

    def parse(self, state: Any) -> Any:
        """Return the value of a saved state."""

    def adopt(self, value: Any) -> None:
        """Go on from a value."""


class SavedCollector(NamedTuple):
    """What a saved state stands for."""

    value: Any
    """What the collection lives by."""
    env: Any
    """The environment's state; nothing if there is none."""
    strict: bool
    cut: tuple[int, ...]
    """Ids of the trajectories that were under way and can't go on."""
    kept: tuple[int, ...]
    """Ids of those that go on."""
    renamed: Mapping[int, int]
    """Their new ids, by those that they had, of those that get one."""


def saved(collection: Collects) -> dict[str, Any]:
    """Return the state of the environment, of the policy, and of the collection under ``"source"``."""
    ledger = collection.ledger
    state: dict[str, Any] = {
        "env_state_dict": dict(collection.env.state_dict()),
        "frames": ledger.spent,
        "iter": ledger.batches,
        "source": collection.state_dict(),
    }
    policy = collection.plan.policy
    if isinstance(policy, torch.nn.Module):
        collection.weights.refresh()
        state["policy_state_dict"] = policy.state_dict()
    return state


def loading(
    collection: Collects, state: Mapping[str, Any], strict: bool, keep_ids: bool, arguments: Mapping[str, Any]
) -> Loading:
    """Return what goes on from a saved state; see `Source.loading`."""
    policy: Any = collection.plan.policy
    has_policy = isinstance(policy, torch.nn.Module)
    found = parse(collection, state, strict, has_policy, keep_ids)
    weights = state.get("policy_state_dict") if has_policy else None
    if weights is not None:
        check_loads(policy, weights, strict, arguments)

    def load_policy() -> None:
        if weights is not None:
            policy.load_state_dict(weights, strict=strict, **arguments)
            collection.weights.loaded()

    if found.cut:
        why = found.value.place.why or "the state doesn't say where its environments stood"
        warn(f"load_state_dict: {len(found.cut)} trajectories end where they were saved, others begin: {why}")
    return Loading(partial(adopt, collection, found, load_policy), found.cut, found.kept, found.renamed)


def parse(
    collection: Collects, state: Any, strict: bool, has_policy: bool = False, keep_ids: bool = False
) -> SavedCollector:
    """Return what a saved state stands for, checked.

    Args:
        collection: that is to go on from it.
        state: from `saved`.
        strict: whether a missing or unexpected entry is an error.
        has_policy: whether the policy's weights are to be in it.
        keep_ids: see `Source.loading`.
    """
    needed = {"env_state_dict", "frames", "iter"} | ({"policy_state_dict"} if has_policy else set())
    check_entries(state, needed, strict, f"expected {sorted(needed)}")
    told = "source" in state
    value = (
        collection.parse(state["source"]) if told else replace(collection.snapshot(), place=EpisodePosition())
    )
    go_on = value.place.carry is not None
    name = collection.numbering or int
    under_way = tuple(name(number) for number in _under_way(state["source"])) if told else ()
    cut, kept = ((), under_way) if go_on else (under_way, ())
    ledger = with_counts(value.ledger, state, type(collection).__name__)
    before = after = value.trajectories
    if not keep_ids:
        after = before.apart_from(collection.trajectories, go_on)
    value = replace(value, ledger=ledger.cutting(len(cut)), trajectories=after)
    ids = zip(before.ids.tolist(), after.ids.tolist(), strict=True)
    renamed = {name(old): name(new) for old, new in ids if old != new} if go_on else {}
    env_state = state.get("env_state_dict")
    if env_state is not None:
        check_state(collection.env, env_state)
    return SavedCollector(value, env_state, strict, cut, kept, renamed)


def ahead(state: dict[str, Any], handed_out: TrajectoryIds | None = None) -> dict[str, Any]:
    """Return a state that `saved` returned without where the environments stand in their episodes, in place.

    For a collection whose owner saves it after frames that the owner's state lacks.

    Args:
        state: from `saved`.
        handed_out: where the trajectories stood after the last frames that the owner's state has; None for unknown.
    """
    state["source"]["place"].update(carry=None, why="workers collect ahead of what was handed out")
    if handed_out is not None:
        state["source"]["under_way"] = handed_out.local_ids
    return state


def _under_way(source: Any) -> Sequence[int]:
    """Return the local ids of the trajectories that were under way in what had been handed out."""
    reader = StateReader(source, "a collection")
    if "under_way" in reader:
        return reader.numbers("under_way", int)
    return TrajectoryIds.read(reader.get("trajectories")).local_ids


def check_entries(state: Any, needed: Set[str], strict: bool, hint: str) -> None:
    """Raise unless a saved state has the entries that it should have.

    Args:
        state: what was given.
        needed: its entries, beside ``"source"``, which older states lack.
        strict: whether a missing or unexpected entry is an error.
        hint: what the message says of unexpected ones.
    """
    if not isinstance(state, Mapping):
        raise InvalidTypeError(f"load_state_dict: expected a mapping, got {type(state).__name__}")
    missing, unexpected = sorted(needed - set(state)), sorted(set(state) - needed - {"source"})
    if strict and missing:
        raise MissingKeyError(f"load_state_dict: missing {missing}; got {sorted(state)}")
    if strict and unexpected:
        raise SchemaError(f"load_state_dict: unexpected {unexpected}; {hint}")


def with_counts(ledger: FrameCounts, state: Mapping[str, Any], of: str) -> FrameCounts:
    """Return a ledger with the frames and batches that a saved state names; `of` is what it's a state of."""
    reader = StateReader(state, of)
    spent = reader.integer("frames") if "frames" in reader else ledger.spent
    batches = reader.integer("iter") if "iter" in reader else ledger.batches
    return replace(ledger, spent=spent, batches=batches)


def adopt(collection: Collects, found: SavedCollector, also: Callable[[], None] | None = None) -> None:
    """Go on from a saved state.

    Args:
        collection: that goes on.
        found: from `parse`.
        also: what else is part of the change.
    """
    if found.env:  # the one part that checks and changes in one call: it comes first
        collection.env.load_state_dict(found.env, strict=found.strict)

    def change() -> None:
        if also is not None:
            also()
        collection.adopt(found.value)

    to_the_end(change)
