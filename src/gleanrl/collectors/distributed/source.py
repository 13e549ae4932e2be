"""`NodeSource`: the common part of synchronous and asynchronous collection on Ray nodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from gleanrl._os.clock import Deadline
from gleanrl._process.ray import RayRuntime
from gleanrl._state.state import StateReader, plain
from gleanrl.collectors import checkpoint
from gleanrl.collectors.distributed.actor import NodeMaker, NodeRecipe
from gleanrl.collectors.distributed.controller import NodeController
from gleanrl.collectors.distributed.weights import BroadcastWeights, LoadedPolicy
from gleanrl.collectors.frame_accounting import (
    NUM_RECENT,
    CollectorStats,
    Episode,
    FrameCounts,
    Numbering,
    WorkerStats,
    means_of,
    texts_of_workers,
)
from gleanrl.collectors.source import Collected, Loading, Source
from gleanrl.collectors.workers.controller import UNFINISHED
from gleanrl.collectors.workers.progress import Consumed, Restarts
from gleanrl.collectors.workers.weights import FollowedWeights
from gleanrl.errors import ClosedError, IndexRangeError, LengthError

_SETTLE_S, _CLOSE_S = 1.0, 5.0
_LATER = 40
"""Added nodes have local ids from multiples of 2**40 on, which the ids of the first nodes never reach."""


@dataclass(frozen=True)
class NodesConfig:
    """Config of all nodes of a source.

    Attributes:
        makers: configs of the nodes.
        restarts: decides whether lost nodes are restarted.
        policy: the user's policy, whose weights the nodes follow; None if the nodes make the policy.
        following: until when nodes follow the policy.
        interval: see `BroadcastWeights`.
        start_s: how many seconds a node may take to start; None for no limit.
        ahead: number of batches that a node is granted at once.
        by_reference: whether batches stay in the object store, for a buffer that accepts references.
    """

    makers: Sequence[NodeMaker]
    restarts: Restarts
    policy: Any
    following: FollowedWeights
    interval: int | None = None
    start_s: float | None = None
    ahead: int = 1
    by_reference: bool = False


class NodeSource(Source):
    """Collect on Ray nodes. One caller thread at a time, except for `push_weights`.

    Args:
        runtime: Ray.
        config: config of the nodes.
    """

    pushes_anytime = True

    def __init__(self, runtime: RayRuntime, config: NodesConfig) -> None:
        self._runtime = runtime
        self._recipes = [maker.recipe for maker in config.makers]
        self._seed: tuple[int, bool, int] | None = None
        self._last_state: dict[str, Any] | None = None
        self.controller = NodeController(
            runtime, config.makers, config.restarts, self._made_again, config.start_s
        )
        self.description = self.controller.description
        self.done_paths = self.description.done_paths
        self.weights = BroadcastWeights(
            runtime.ray, config.policy, self.description.weights, config.following, config.interval
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including nodes that are being restarted."""
        return len(self._recipes)

    @property
    def width(self) -> int:
        """Number of environments of a node that step at once."""
        return max(1, self.description.batch_size.numel())

    def add(self, makers: Sequence[NodeMaker]) -> None:
        """Start further nodes, with trajectory ids that no other node uses.

        Raises:
            ClosedError: the nodes have ended.
            Exception: see `NodeController.add`. No node was added.
        """
        if self.controller.closed:
            raise ClosedError("add_collectors: the nodes have ended; make a new collector")
        first, count = self._recipes[0].numbering.num_workers, len(self._recipes)
        new_makers = []
        for number, maker in enumerate(makers, count):
            # Node i of the first N has the global ids that are i modulo N. A new node shares the remainder of an old
            # one, but begins at a local id that the old node never reaches.
            row, remainder = divmod(number, first)
            recipe = replace(
                maker.recipe,
                numbering=Numbering(remainder, first),
                first_id=row << _LATER,
                seed=self._seed_of(number, 1),
            )
            new_makers.append(replace(maker, recipe=recipe))
        self._recipes += [maker.recipe for maker in new_makers]
        try:
            self.controller.add(new_makers)
        except BaseException:
            del self._recipes[count:]
            raise

    def _made_again(self, number: int) -> NodeRecipe:
        """Return the config of a lost node's replacement, with new seeds and unused trajectory ids."""
        recipe, node = self._recipes[number], self.controller.now.nodes[number]
        generation = node.losses.number
        return replace(
            recipe,
            entropy=(*recipe.entropy, generation),
            first_id=max(recipe.first_id, node.next_id),
            seed=self._seed_of(number, generation),
        )

    def _seed_of(self, number: int, generation: int) -> tuple[int, bool] | None:
        """Return a private seed for a replacement or for an added node; None without a seed."""
        if self._seed is None:
            return None
        seed, static_seed, step = self._seed
        entropy = np.random.SeedSequence([seed + number * step, generation])
        return int(entropy.generate_state(1)[0]) >> 1, static_seed

    @abstractmethod
    def lay_out(self, num_steps: int) -> None:
        """Store the number of steps of a full batch, once it is known."""

    # ---------------------------------------------------------------- weights
    @property
    @abstractmethod
    def rounds(self) -> int:
        """Mean number of delivered batches per node."""

    def refresh_weights(self) -> None:
        """Publish the current weights of the user's policy if nodes follow it."""
        self._runtime.check()  # without this check, a call after the end of Ray would start Ray again
        self.weights.refresh(self.rounds)

    @property
    def policy_version(self) -> int:
        """Number of weight updates by the user."""
        return self.weights.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.weights.mark(version)

    @property
    def oldest_version(self) -> int:
        """The lowest version that is published for a node."""
        return self.weights.oldest_version(self.num_nodes)

    def push_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Publish weights. Nodes use them from their next batch on.

        Args:
            weights: the weights, for all of `worker_ids`; None for the current weights of the user's policy.
            worker_ids: indices of nodes, one or several; None for all.

        Raises:
            IndexRangeError: there is no such node.
            ClosedError: Ray was shut down.
            PolicyError, SchemaError, InvalidTypeError: see `BroadcastWeights.push`.
        """
        self._runtime.check()
        nodes = None
        if worker_ids is not None:
            nodes = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
            for number in nodes:
                if number not in range(self.num_nodes) or isinstance(number, bool):
                    raise IndexRangeError(
                        f"worker_ids: expected numbers of nodes below {self.num_nodes}, got {number!r}"
                    )
        self.weights.push(weights, nodes, self.rounds)

    def stop_following(self) -> None:
        """Stop publishing the user's current weights. From now on only `push_weights` publishes."""
        self.weights.stop_following()

    # --------------------------------------------------------------- controls
    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments of all nodes, or of the nodes selected by `index`, a list of bools.

        Batches of these nodes that aren't delivered are discarded. `kwargs` go to each environment's `reset`.

        Raises:
            LengthError: `index` has another length than the number of nodes.
        """
        chosen: Sequence[int] = range(self.num_nodes)
        if index is not None:
            flags = [bool(flag) for flag in index]
            if len(flags) != self.num_nodes:
                raise LengthError(
                    f"reset: expected {self.num_nodes} flags, one for each node, got {len(flags)}"
                )
            chosen = [number for number, wanted in enumerate(flags) if wanted]
        self._begin_anew("reset", dict.fromkeys(chosen, (kwargs,)))

    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environments of all nodes, and reset. Return the last seed that was used.

        The nodes' global generators are seeded, too. Batches that aren't delivered are discarded. Restarted and added
        nodes get seeds that derive from this one.
        """
        # The first node's answer shows how many seeds a node uses.
        (last,) = self._begin_anew("seed", {0: (seed, static_seed)})
        step = 0 if static_seed else last - seed + 1
        self._seed = seed, static_seed, step
        remaining = {number: (seed + number * step, static_seed) for number in range(1, self.num_nodes)}
        found: list[int] = [last, *self._begin_anew("seed", remaining)]
        return found[-1]

    def _begin_anew(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Send nodes a request that resets them. Their frames since the last delivered batch are discarded."""
        for number in arguments:
            self.controller.discard(number, "reset")
        answers = self.controller.ask(name, arguments)
        for number in arguments:
            self.controller.now = self.controller.now.with_node(number, reset=False)
        return answers

    def save(self) -> dict[str, Any]:
        """Return the state of each node under ``"worker0"`` and so on, without batches under way.

        The call waits for the orders under way. Their batches can still be delivered. After the end, return the state
        that `end` saved.

        Raises:
            ClosedError: `end` could not save the state.
        """
        if self.controller.closed:
            if self._last_state is None:
                raise ClosedError(
                    "state_dict: the nodes have ended without saving their state; call state_dict() before they end"
                )
            return self._last_state
        self.controller.settle()
        counts = self.controller.now.counts
        under_way = sorted(name for names in self.controller.now.under_way.values() for name in names)
        state: dict[str, Any] = {"frames": counts.spent, "iter": counts.batches}
        state["source"] = {**plain(counts), "under_way": under_way}
        state.update((f"worker{number}", found) for number, found in enumerate(self.controller.ask("save")))
        return state

    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Check a saved state for the same number of nodes, and return the change that loads it.

        Every trajectory begins anew, with a new id, because nodes collect ahead of the delivered frames. The change
        raises if a node is lost for good or can't load its part.
        """
        names = [f"worker{number}" for number in range(self.num_nodes)]
        checkpoint.check_entries(
            state, {"frames", "iter", *names}, strict, f"this collector has {self.num_nodes} nodes"
        )
        saved_counts = FrameCounts.read(state["source"]) if "source" in state else None
        counted = checkpoint.with_counts(
            saved_counts or self.controller.now.counts, state, type(self).__name__
        )
        reader = StateReader(state.get("source", {}), type(self).__name__)
        cut = tuple(reader.numbers("under_way", int)) if "under_way" in reader else ()
        parts = {number: state[name] for number, name in enumerate(names) if name in state}
        arguments = {number: (part, strict) for number, part in parts.items()}
        loaded = self._parsed_policies(parts, strict, kwargs)
        self.controller.ask("parse", arguments)  # everything is checked before anything changes

        def change() -> None:
            self.controller.settle()
            loaded_nodes = self.controller.ask("load", arguments)
            if loaded is not None:
                self.weights.adopt(loaded)
            self.controller.discard_all("state")
            now = self.controller.now
            for number, (found, _) in zip(parts, loaded_nodes, strict=True):
                outcome = now.nodes[number].outcome._replace(stats=found, left=0, weights=0)
                now = now.with_node(number, reset=False, outcome=outcome)
            # The state doesn't say when episodes ended, so the nodes' episodes are interleaved.
            ranked = [(-rank, one) for _, recent in loaded_nodes for rank, one in enumerate(reversed(recent))]
            recent = tuple(one for _, one in sorted(ranked, key=lambda one: one[0])[-NUM_RECENT:])
            counts = replace(saved_counts or now.counts, spent=counted.spent, batches=counted.batches)
            self.controller.now = now._replace(counts=counts.cutting(len(cut)), under_way={}, recent=recent)

        return Loading(change, cut)

    def _parsed_policies(
        self, parts: Mapping[int, Mapping[str, Any]], strict: bool, arguments: Mapping[str, Any]
    ) -> LoadedPolicy | None:
        """Check the policies in the nodes' states; None if there are none."""
        found = {number: part.get("worker0", part).get("policy_state_dict") for number, part in parts.items()}
        policies = {number: policy for number, policy in found.items() if policy is not None}
        if not policies or self.description.weights is None:
            return None
        return self.weights.parse(policies, strict, arguments)

    # ------------------------------------------------------------------ counts
    @property
    def spent(self) -> int:
        """Delivered frames that count against the budget."""
        return self.controller.now.counts.spent

    def stats(self) -> CollectorStats:
        """Return a snapshot of the counters, for the batches that have arrived."""
        workers = tuple(self._worker_stats(number) for number in range(self.num_nodes))
        mean_return, mean_length = means_of(self.controller.now.recent)
        return replace(
            self.controller.now.counts.stats(),
            episodes=sum(worker.episodes for worker in workers),
            mean_return=mean_return,
            mean_length=mean_length,
            workers=workers,
            policy=texts_of_workers(node.outcome.stats.policy for node in self.controller.now.nodes),
        )

    def recent_episodes(self) -> Sequence[Episode]:
        """Return the last ended episodes of all nodes, in the order of arrival."""
        return self.controller.now.recent

    def _worker_stats(self, number: int) -> WorkerStats:
        node = self.controller.now.nodes[number]
        outcome, (frames, episodes) = node.outcome, node.former
        stats = outcome.stats
        return WorkerStats(
            frames=stats.stepped + frames,
            episodes=stats.episodes + episodes,
            mean_return=stats.mean_return,
            mean_length=stats.mean_length,
            frames_per_s=stats.frames_per_s,
            idle_share=outcome.idle_share,
            versions_behind=max(self.weights.latest(number).number - outcome.weights, 0),
            restarts=node.losses.number,
        )

    def deliver(self, collected: Collected, batch: TensorDictBase) -> TensorDictBase:
        """Count the open batch as delivered and return `batch`, its post-processed form."""
        # One line: an interrupt comes before the assignment, or after the batch was returned.
        return (batch, self._commit(collected.after))[0]

    def _commit(self, consumed: Consumed) -> Any:
        self.controller.now = self.controller.now.delivering(consumed)

    def end(self) -> None:
        """End the nodes. Their batches under way are discarded.

        The state is saved first, so that `save` works after the end. That is skipped if orders under way take longer
        than a second, if a node is down, or if saving raises. No effect after the end of the nodes or of Ray.
        """
        controller = self.controller
        if controller.closed or self._runtime.ended:
            return
        with suppress(Exception):
            controller.discard_all(UNFINISHED)
            controller.settle(Deadline(_SETTLE_S))
            if not any(node.calls or node.down for node in controller.now.nodes):
                self._last_state = self.save()
        controller.close(_CLOSE_S)

    def close(self, close_env: bool = True) -> None:
        """End the nodes and release Ray."""
        try:
            self.end()
        finally:
            self._runtime.release()
