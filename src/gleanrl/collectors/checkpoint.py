"""Saving and loading the state of a single-process source, with its environment and its policy."""

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
    """Positions of the environments within their episodes, and the global random generators.

    The generators belong to it because environments, the policy and the user's program share them.

    Attributes:
        carry: the observations that no action has followed yet; None if a reset comes next.
        memory: internal state of the environments; None if it can't be read.
        why: the reason if it can't be read.
        generators: state of the process's random generators; None to leave them unchanged.
    """

    carry: Carry | None = None
    memory: dict[str, Any] | None = None
    why: str = ""
    generators: Places | None = None

    @classmethod
    def of(cls, env: Any, stepper: Stepper, reset_first: bool) -> EpisodePosition:
        """Return the current positions, without carry and memory if the environments' state can't be read.

        Args:
            env: the environments.
            stepper: the stepper that steps them.
            reset_first: whether a reset comes next.
        """
        try:
            memory = remember(env)
        except UnsupportedError as cause:
            return cls(None, None, str(cause), GENERATORS.snapshot())
        carry = None if reset_first else stepper.snapshot()
        return cls(carry, memory, "", GENERATORS.snapshot())

    @classmethod
    def read(cls, state: Any, env: Any, stepper: Stepper) -> EpisodePosition:
        """Return the positions of a saved state, without carry and memory if the environments can't be restored.

        Raises:
            SchemaError: the entries ``"why"`` or ``"generators"`` don't fit, or ``"memory"`` is missing.
        """
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
        """Restore the environments, the stepper and the process's generators. Parts that are None stay unchanged."""
        if self.memory is not None:
            adopt_memory(env, self.memory)
        if self.carry is not None:
            stepper.adopt(self.carry)
        if self.generators is not None:
            GENERATORS.adopt(self.generators)


class Collects(Protocol):
    """The parts of a single-process source that are saved and loaded."""

    env: Any
    plan: RolloutPlan
    weights: PolicyWeights
    numbering: Numbering | None

    @property
    def counts(self) -> FrameCounts:
        """The frame counts."""

    @property
    def trajectories(self) -> TrajectoryIds:
        """The open trajectories."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the environment and the policy's weights."""

    def snapshot(self) -> Any:
        """Return that state as an immutable value."""

    def parse(self, state: Any) -> Any:
        """Return the value of a saved state."""

    def adopt(self, value: Any) -> None:
        """Resume from a value."""


class SavedCollector(NamedTuple):
    """A saved state after all checks."""

    value: Any
    """The value that the source adopts."""
    env: Any
    """The environment's state; None if there is none."""
    strict: bool
    cut: tuple[int, ...]
    """Ids of the open trajectories that can't be continued."""
    continued: tuple[int, ...]
    """Ids of the open trajectories that continue."""
    renamed: Mapping[int, int]
    """Maps saved ids of continued trajectories to their new ids, where they changed."""


def saved(collection: Collects) -> dict[str, Any]:
    """Return the state of the environment and the policy, and of the source under ``"source"``.

    A copied policy first gets the user's current weights, if it follows them; see `PolicyWeights.refresh`.
    """
    counts = collection.counts
    state: dict[str, Any] = {
        "env_state_dict": dict(collection.env.state_dict()),
        "frames": counts.spent,
        "iter": counts.batches,
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
    """Check a saved state and return the change that loads it; see `Source.loading` and `parse`.

    Warn at once if open trajectories of the state can't be continued.
    """
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
        why = found.value.place.why or "the state holds no positions of its environments"
        warn(
            f"load_state_dict: {len(found.cut)} trajectories end where they were saved, and new ones begin: {why}"
        )
    return Loading(partial(adopt, collection, found, load_policy), found.cut, found.continued, found.renamed)


def parse(
    collection: Collects, state: Any, strict: bool, has_policy: bool = False, keep_ids: bool = False
) -> SavedCollector:
    """Check a saved state and return it as a `SavedCollector`.

    Args:
        collection: the source that is to resume from the state.
        state: a result of `saved`.
        strict: whether a missing or unexpected entry is an error.
        has_policy: whether the state must contain the policy's weights.
        keep_ids: see `Source.loading`.

    Raises:
        InvalidTypeError, MissingKeyError, SchemaError: see `check_entries`. `SchemaError` also if a value doesn't fit.
    """
    needed = {"env_state_dict", "frames", "iter"} | ({"policy_state_dict"} if has_policy else set())
    check_entries(state, needed, strict, f"expected {sorted(needed)}")
    # Older states have no "source". `frames` and `iter` come from the state, the other counters and the ids from the
    # running source. A reset follows.
    has_source = "source" in state
    value = (
        collection.parse(state["source"])
        if has_source
        else replace(collection.snapshot(), place=EpisodePosition())
    )
    go_on = value.place.carry is not None
    name = collection.numbering or int
    under_way = tuple(name(number) for number in _under_way(state["source"])) if has_source else ()
    cut, continued = ((), under_way) if go_on else (under_way, ())
    counts = with_counts(value.ledger, state, type(collection).__name__)
    before = after = value.trajectories
    # Frames delivered since the save may be kept by the learner, so their ids must not be used again.
    if not keep_ids:
        after = before.apart_from(collection.trajectories, go_on)
    value = replace(value, ledger=counts.cutting(len(cut)), trajectories=after)
    ids = zip(before.ids.tolist(), after.ids.tolist(), strict=True)
    renamed = {name(old): name(new) for old, new in ids if old != new} if go_on else {}
    env_state = state.get("env_state_dict")
    if env_state is not None:
        check_state(collection.env, env_state)
    return SavedCollector(value, env_state, strict, cut, continued, renamed)


def ahead(state: dict[str, Any], handed_out: TrajectoryIds | None = None) -> dict[str, Any]:
    """Remove the environments' positions from a result of `saved`, in place, and return it.

    The owner of a worker saves the worker after frames that the owner has not delivered. The worker's positions are
    therefore ahead of the owner's state.

    Args:
        state: a result of `saved`.
        handed_out: the open trajectories after the last frames in the owner's state; None if unknown.
    """
    state["source"]["place"].update(carry=None, why="workers collect ahead of what was handed out")
    if handed_out is not None:
        state["source"]["under_way"] = handed_out.local_ids
    return state


def _under_way(source: Any) -> Sequence[int]:
    """Return the local ids of the trajectories that were open in the delivered frames."""
    reader = StateReader(source, "a collection")
    if "under_way" in reader:
        return reader.numbers("under_way", int)
    return TrajectoryIds.read(reader.get("trajectories")).local_ids


def check_entries(state: Any, needed: Set[str], strict: bool, hint: str) -> None:
    """Raise an error if a saved state lacks entries or has unexpected ones.

    Args:
        state: the value that the user passed.
        needed: the required entries. ``"source"`` is always optional, because older states lack it.
        strict: whether a missing or unexpected entry is an error.
        hint: end of the message about unexpected entries.

    Raises:
        InvalidTypeError: the state is not a mapping, regardless of `strict`.
        MissingKeyError: an entry is missing.
        SchemaError: an entry is unexpected.
    """
    if not isinstance(state, Mapping):
        raise InvalidTypeError(f"load_state_dict: expected a mapping, got {type(state).__name__}")
    missing, unexpected = sorted(needed - set(state)), sorted(set(state) - needed - {"source"})
    if strict and missing:
        raise MissingKeyError(f"load_state_dict: missing {missing}; got {sorted(state)}")
    if strict and unexpected:
        raise SchemaError(f"load_state_dict: unexpected {unexpected}; {hint}")


def with_counts(counts: FrameCounts, state: Mapping[str, Any], of: str) -> FrameCounts:
    """Return `counts` with the frames and batches that a saved state has; `of` names the owner in errors."""
    reader = StateReader(state, of)
    spent = reader.integer("frames") if "frames" in reader else counts.spent
    batches = reader.integer("iter") if "iter" in reader else counts.batches
    return replace(counts, spent=spent, batches=batches)


def adopt(collection: Collects, found: SavedCollector, also: Callable[[], None] | None = None) -> None:
    """Resume from a saved state. If the environment's `load_state_dict` raises, nothing else has changed.

    Args:
        collection: the source that resumes.
        found: a result of `parse`.
        also: a further part of the same change, called first. It can't fail, and a second call has no further effect.
    """
    if found.env:  # comes first: the environment checks and changes in one call, so it may still fail
        collection.env.load_state_dict(found.env, strict=found.strict)

    def change() -> None:
        if also is not None:
            also()
        collection.adopt(found.value)

    to_the_end(change)
