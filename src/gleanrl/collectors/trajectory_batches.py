"""A source of whole trajectories: it holds steps back until their trajectory has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from gleanrl._arrays.ragged import as_entry, as_leaf
from gleanrl._arrays.tensordicts import as_key
from gleanrl._os.interrupts import to_the_end
from gleanrl._state.state import StateReader, objects_from, plain
from gleanrl.collectors.frame_accounting import CollectorStats, Episode
from gleanrl.collectors.source import BudgetSpent, Collected, Grant, Grants, Loading, Source
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.errors import UnsupportedError

Pieces = tuple[TensorDictBase, ...]
"""Fragments of one trajectory, ``[t]`` each."""


class _Retained(NamedTuple):
    """The held-back trajectories, an immutable value.

    One assignment replaces it as a whole, so that an interrupt can't leave it half changed.
    """

    under_way: Mapping[int, Pieces]
    """Open trajectories, by id."""
    complete: tuple[Pieces, ...] = ()
    """Ended trajectories, in the order of their ends."""
    open: int = 0
    """Number of ended trajectories in the open batch."""
    discards: Mapping[str, int] = {}
    """Discarded frames by reason."""

    def frames(self) -> int:
        return _frames(self.under_way.values()) + _frames(self.complete)

    def without(self, reason: str, under_way: Iterable[int] = (), num_complete: int = 0) -> _Retained:
        """Return a copy without some trajectories, whose frames are counted as discarded, and without an open batch.

        Args:
            reason: reason of the discards.
            under_way: ids of the open trajectories to remove.
            num_complete: number of the first ended trajectories to remove.
        """
        gone = [self.under_way[name] for name in under_way]
        lost = _frames(gone) + _frames(self.complete[:num_complete])
        left = {name: pieces for name, pieces in self.under_way.items() if name not in set(under_way)}
        discards = {**self.discards, reason: self.discards.get(reason, 0) + lost} if lost else self.discards
        return _Retained(left, self.complete[num_complete:], 0, discards)


class CompleteTrajectories(Source):
    """Join the fragments of trajectories from another source, and deliver whole trajectories only.

    The counters exclude held-back frames, just as they exclude an open batch. Some trajectories can't end any more:
    after a reset or a failure, and at the end of the budget. They are counted as discarded, with the reason
    ``"unfinished"``.

    Args:
        source: makes batches ``[*batch, T]``, each in its own memory.
        count: trajectories of a batch. None delivers all trajectories that end in a batch of `source`, concatenated.
        padded: whether the trajectories of a batch are padded, one per row. Otherwise they are concatenated.
    """

    steady = False

    def __init__(self, source: Source, count: int | None, padded: bool = True) -> None:
        self._source, self._count = source, count
        self._padded = padded and count is not None
        self.num_envs, self.batch_size = source.num_envs, source.batch_size
        self.done_paths = source.done_paths
        self._done_keys = [as_key(path) for path in source.done_paths]
        self._retained = _Retained({})

    def more(self, budget: Grants) -> bool:
        """Return whether another batch is available, provided that enough trajectories end."""
        return self._enough() or self._source.more(budget)

    def _enough(self) -> bool:
        return self._count is not None and len(self._retained.complete) >= self._count

    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return ``[count, T]``, padded; or ``[frames]``, which may be empty without a count.

        With a count, batches of the source are collected until enough trajectories have ended. `lend` has no effect.

        Raises:
            BudgetSpent: the budget is spent, and not enough trajectories have ended. They stay held back until `close`.
        """
        while not self._enough():
            if not self._source.more(budget):
                raise BudgetSpent
            collected = self._source.next(budget)
            retained = self._with(collected)
            to_the_end(partial(self._keep, collected, retained))
            if self._count is None:
                break
        retained = self._retained
        ready = retained.complete if self._count is None else retained.complete[: self._count]
        # Marks the trajectories as open: until `deliver`, `lose` counts them as discarded.
        self._retained = retained._replace(open=len(ready))
        if not ready:
            return Collected(collected.batch.reshape(-1)[:0], retained)
        batch: Any = torch.cat([piece for pieces in ready for piece in pieces])
        if self._padded:
            batch = split_trajectories(batch, prefix="collector")
        return Collected(batch, retained._replace(complete=retained.complete[len(ready) :]))

    def _with(self, collected: Collected) -> _Retained:
        """Return the held-back trajectories after a batch of the source was added."""
        batch, (part, num_parts) = collected.batch, collected.part
        rows = batch.reshape(self.num_envs, batch.shape[-1])
        under_way, complete, going_on = dict(self._retained.under_way), list(self._retained.complete), set()
        for name, piece, ended in sorted(self._pieces(rows), key=lambda found: found[-1]):
            pieces = (*under_way.pop(name, ()), piece)
            if ended < 0:
                under_way[name] = pieces
                going_on.add(name)
            else:
                complete.append(pieces)
        # Open trajectories that the batch should continue but doesn't: their environments were reset.
        stale = {name for name in under_way.keys() - going_on if name % num_parts == part}
        return self._retained._replace(under_way=under_way, complete=tuple(complete)).without(
            "unfinished", stale
        )

    def _pieces(self, rows: TensorDictBase) -> Iterator[tuple[int, TensorDictBase, int]]:
        """Yield each trajectory of ``[P, T]``: its id, its steps and the index of its end, or -1 if it continues."""
        ids = rows["collector", "traj_ids"].tolist()
        done = torch.stack([rows[key].flatten(2).any(-1) for key in self._done_keys]).any(0).tolist()
        for env, names in enumerate(ids):
            begin = 0
            for end in range(1, len(names) + 1):
                if end < len(names) and names[end] == names[begin]:
                    continue
                if names[begin] >= 0:  # id -1: steps that are no frames
                    yield names[begin], rows[env, begin:end], end - 1 if done[env][end - 1] else -1
                begin = end

    def deliver(self, collected: Collected, batch: TensorDictBase) -> TensorDictBase:
        """Release the trajectories of the open batch and return `batch`, its post-processed form."""
        return (batch, self._commit(collected.after))[0]

    def _commit(self, retained: _Retained) -> Any:
        self._retained = retained

    def _keep(self, collected: Collected, retained: _Retained) -> None:
        """Deliver a batch of the source into the held-back trajectories, so that each frame is counted exactly once."""
        self._source.deliver(collected, collected.batch)
        self._retained = retained

    def lose(self, reason: str) -> None:
        """Count the open batch as discarded, and an open batch of the source, too."""
        self._source.lose(reason)
        if self._retained.open:
            self._retained = self._retained.without(reason, num_complete=self._retained.open)

    def collect(self, grant: Grant) -> Collected:
        """Raise an error: a batch outside the budget would leave gaps in trajectories."""
        raise UnsupportedError(
            "rollout: not available with trajs_per_batch, whose trajectories would have gaps; iterate instead"
        )

    @property
    def spent(self) -> int:
        """Frames that count against the budget, including held-back frames."""
        return self._source.spent

    def stats(self) -> CollectorStats:
        """Return a snapshot of the counters."""
        retained, found = self._retained, self._source.stats()
        unfinished, away = sum(retained.discards.values()), retained.frames()
        return replace(
            found,
            delivered=found.delivered - away - unfinished,
            discarded=found.discarded + unfinished,
            reasons={
                name: found.reasons.get(name, 0) + retained.discards.get(name, 0)
                for name in {**found.reasons, **retained.discards}
            },
        )

    def recent_episodes(self) -> Sequence[Episode]:
        """Return the last ended episodes."""
        return self._source.recent_episodes()

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset environments.

        A reset of all environments also discards all held-back frames, ended trajectories included. After a reset of
        some, their open trajectories are discarded with the next batch of the source.
        """
        self._source.reset(index, **kwargs)
        if index is None:
            self._empty()

    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environments and the random actions, and reset. Return the last seed that was used.

        All held-back frames are discarded.
        """
        last = self._source.set_seed(seed, static_seed)
        self._empty()
        return last

    def _empty(self) -> None:
        self._retained = self._retained.without(
            "unfinished", self._retained.under_way, len(self._retained.complete)
        )

    @property
    def policy_version(self) -> int:
        """How often the policy got new weights."""
        return self._source.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._source.policy_version = version

    @property
    def oldest_version(self) -> int:
        """The lowest policy version of the workers."""
        return self._source.oldest_version

    def push_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Set the weights of the policy that collects."""
        self._source.push_weights(weights, worker_ids)

    def stop_following(self) -> None:
        """Stop sending the user's current weights."""
        self._source.stop_following()

    def save(self) -> dict[str, Any]:
        """Return the state of the source, with the held-back trajectories under ``("source", "held")``."""
        state, retained = self._source.save(), self._retained
        state["source"]["held"] = {
            "under_way": {
                name: _saved(torch.cat(list(pieces))) for name, pieces in retained.under_way.items()
            },
            "whole": [_saved(torch.cat(list(pieces))) for pieces in retained.complete],
            "discards": dict(retained.discards),
        }
        return state

    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Check a saved state and return the change that loads it. The change can't fail if the source's can't."""
        load = self._source.loading(state, strict, keep_ids, **kwargs)
        source = state.get("source", {})
        retained = _read(source["held"], load.renamed) if "held" in source else _Retained({})

        def change() -> None:
            load.change()
            self._retained = (
                retained if self._source.goes_on else retained.without("unfinished", retained.under_way)
            )

        # Delivered trajectories had ended, so none of them is cut.
        return Loading(partial(to_the_end, change), continued=load.continued, renamed=load.renamed)

    def close(self, close_env: bool = True) -> None:
        """Close the source and discard the held-back frames."""
        self._empty()
        self._source.close(close_env)


def _frames(trajectories: Iterable[Pieces]) -> int:
    return sum(piece.numel() for pieces in trajectories for piece in pieces)


def _read(state: Any, renamed: Mapping[int, int]) -> _Retained:
    """Return saved held-back trajectories, the open ones with new ids; raise `SchemaError` for anything else."""
    reader = StateReader(state, "what is held back")
    discards = reader.part("discards")
    try:
        names = {int(name): saved for name, saved in reader.get("under_way").items()}
        under_way = {renamed.get(name, name): (_steps(saved),) for name, saved in names.items()}
        complete = tuple((_steps(saved),) for saved in reader.get("whole"))
        for name, (steps,) in under_way.items():
            steps["collector", "traj_ids"].fill_(name)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as cause:
        raise reader.wrong("under_way", f"trajectories ({cause})") from cause
    return _Retained(under_way, complete, 0, {reason: discards.integer(reason) for reason in discards})


def _saved(steps: Any) -> dict[str, Any]:
    """Return steps as plain values."""
    entries = {
        key: _saved(entry)
        if is_tensor_collection(entry) and not is_non_tensor(entry)
        else plain(as_leaf(entry))
        for key, entry in steps.items()
    }
    device = None if steps.device is None else str(steps.device)
    return {"entries": entries, "size": list(steps.batch_size), "names": list(steps.names), "device": device}


def _steps(saved: Any) -> TensorDict:
    """Return the steps from a result of `_saved`."""
    entries = {key: _entry(entry) for key, entry in saved["entries"].items()}
    return TensorDict(entries, saved["size"], device=saved["device"], names=saved["names"])


def _entry(saved: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return saved.clone()
    return _steps(saved) if "entries" in saved else as_entry(objects_from(saved))
