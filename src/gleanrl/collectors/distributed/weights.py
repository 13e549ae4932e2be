"""Transport of the policy's weights to the nodes: one put into the object store per version, fetched by each node."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path, as_key, flatten
from gleanrl._process.serialization import PickledBatch
from gleanrl.collectors.distributed.actor import Published
from gleanrl.collectors.policy_weights import check_loads, matched_weights, weights_of
from gleanrl.collectors.workers.weights import FollowedWeights
from gleanrl.errors import PolicyError


class BroadcastWeights:
    """The owner's side. One thread may call `push` and `mark` while another thread calls `refresh`.

    While the nodes follow the user's policy, its weights are put again only if they have changed. That is checked by
    comparing them with the last put.

    Args:
        ray: the module `ray`.
        policy: the user's policy, whose current weights the nodes follow; None if only the nodes have one.
        fields: shapes and dtypes of the nodes' weights; None if the policy has none.
        following: until when nodes follow the policy.
        interval: number of batches after which a node gets the policy's current weights, regardless of earlier pushes;
            None for never.
    """

    def __init__(
        self,
        ray: Any,
        policy: Any,
        fields: Mapping[Path, Field] | None,
        following: FollowedWeights,
        interval: int | None = None,
    ) -> None:
        self._ray, self._following, self._interval = ray, following, interval
        self._policy = policy if fields is not None and isinstance(policy, torch.nn.Module) else None
        self._fields = fields
        self._follows = self._policy is not None
        self._all, self._own = Published(), dict[int, Published]()
        # The weights that were last published to all nodes, in the object store's memory.
        self._last: dict[Path, torch.Tensor] | None = None
        self._batches = 0
        self._lock = threading.Lock()
        """Held while weights are published."""
        self.puts = 0
        """Number of puts into the object store."""

    @property
    def version(self) -> int:
        """Number of updates by the user, which is the latest version of any node."""
        return max(self._all.version, *(own.version for own in self._own.values()), 0)

    def oldest_version(self, num_nodes: int) -> int:
        """Return the lowest version that is published for any of the first `num_nodes` nodes."""
        return min(self.latest(node).version for node in range(num_nodes))

    def latest(self, node: int) -> Published:
        """Return the weights for a node's next batch."""
        return self._own.get(node, self._all)

    def refresh(self, batches: int) -> None:
        """Publish the current weights of the user's policy if nodes follow it, or if the interval has passed.

        Weights that equal the last publication, or have no values yet, are not published. Publishing replaces weights
        of single nodes.

        Args:
            batches: mean number of batches per node so far.
        """
        with self._lock:
            due = self._interval is not None and batches - self._batches >= max(self._interval, 1)
            if self._policy is None or not (self._follows or due):
                return
            self._batches = batches
            found = _leaves(self._policy)
            if not any(leaf.is_meta for leaf in found.values()) and self._changed(found):
                self._put(found, self.version)

    def _changed(self, found: Mapping[Path, torch.Tensor]) -> bool:
        """Return whether the policy's weights differ from the last publication to all nodes."""
        last = self._last
        if last is None or last.keys() != found.keys() or self._own:
            return True
        return not all(torch.equal(leaf, last[path]) for path, leaf in found.items())

    def push(self, weights: Any, nodes: list[int] | None, batches: int) -> None:
        """Publish weights under the next version. Nodes use them from their next batch on.

        The call may end the following of the user's policy; see `FollowedWeights`. Without `weights` and `nodes`, only
        the version of a policy without weights is incremented.

        Args:
            weights: see `PolicyWeights.push`.
            nodes: which nodes; None for all.
            batches: see `refresh`.

        Raises:
            PolicyError: weights were passed for a policy without weights, or none were passed and only the nodes have
                the policy.
            SchemaError, InvalidTypeError: the weights don't fit. Nothing has changed.
        """
        if self._fields is None:
            if weights is not None:
                raise PolicyError("update_policy_weights_: the policy isn't a module and has no weights")
            if nodes is None:
                self.mark(self.version + 1)
            return
        if weights is None and self._policy is None:
            raise PolicyError(
                "update_policy_weights_: the policy was made in the nodes; pass the weights: a TensorDict, a module "
                "like the policy, or its state_dict()"
            )
        replaces_policy = weights is not None or nodes is not None
        source = self._policy if weights is None else weights
        found = self._matched(weights_of(source))
        ends = FollowedWeights.UNTIL_REPLACED if replaces_policy else FollowedWeights.UNTIL_UPDATED
        with self._lock:
            self._put(found, self.version + 1, nodes)
            self._follows &= self._following not in (ends, FollowedWeights.UNTIL_UPDATED)
            self._batches = batches

    def _put(self, found: Mapping[Path, torch.Tensor], version: int, nodes: list[int] | None = None) -> None:
        """Put weights into the object store and publish them, to all nodes or to some."""
        ref = self._ray.put(PickledBatch(_record(found)))
        self.puts += 1
        made = Published(self.puts, version, (ref,))
        if nodes is None:
            self._last = flatten(self._ray.get(ref).view())
            self._all, self._own = made, {}
        else:
            self._own = {**self._own, **dict.fromkeys(nodes, made)}

    def mark(self, version: int) -> None:
        """Let frames carry a later version of the same weights, after a weight updater sent weights by other means."""
        with self._lock:
            self._all = self._all._replace(version=version)
            self._own = {node: own._replace(version=version) for node, own in self._own.items()}

    def stop_following(self) -> None:
        """Stop publishing the user's current weights. From now on only `push` publishes."""
        with self._lock:
            self._follows = False

    def _matched(self, weights: TensorDictBase) -> dict[Path, torch.Tensor]:
        """Return weights by their paths in the nodes' policy; raise an error if they don't fit."""
        assert self._fields is not None
        target = _record({path: _blank(field) for path, field in self._fields.items()})
        pairs = matched_weights(weights, target)
        return {path: _here(value) for path, (_, value) in zip(flatten(target), pairs, strict=True)}

    # ------------------------------------------------------------------- state
    def parse(self, states: Mapping[int, Any], strict: bool, arguments: Mapping[str, Any]) -> LoadedPolicy:
        """Check saved policies of nodes.

        Args:
            states: state dictionaries by node.
            strict: whether a missing or unexpected entry is an error.
            arguments: further arguments of the policy's `load_state_dict`.

        Raises:
            SchemaError, InvalidTypeError: the states don't fit.
        """
        assert self._fields is not None
        states = {node: self._unwrapped(state) for node, state in states.items()}
        first = next(iter(states.values()))
        known, policy_state = dict(self._last or {}), dict[str, Any]()
        if self._policy is not None:
            names = {".".join(path) for path in self._fields} - set(self._policy.state_dict())
            policy_state = {name: value for name, value in first.items() if name not in names}
            check_loads(self._policy, policy_state, strict, arguments)
            known = known or _leaves(self._policy)
        current = {".".join(path): leaf for path, leaf in known.items()}
        found = {node: self._matched(weights_of({**current, **state})) for node, state in states.items()}
        return LoadedPolicy(found, policy_state, strict, arguments)

    def _unwrapped(self, state: Any) -> Any:
        """Return a state dictionary under the names of the user's policy.

        A node's policy may be wrapped, which puts ``"module."`` before each name.
        """
        prefix = "module."
        own = any(path[0] == "module" for path in self._fields or ())
        if own or not isinstance(state, Mapping) or not all(name.startswith(prefix) for name in state):
            return state
        return {name.removeprefix(prefix): value for name, value in state.items()}

    def adopt(self, loaded: LoadedPolicy) -> None:
        """Load checked weights into the user's policy and publish them to the nodes under the last version.

        The user's policy gets the weights of the first saved node. Nodes with other weights get their own, and the
        nodes then no longer follow the user's policy.
        """
        first = next(iter(loaded.found.values()))
        if self._policy is not None:
            self._policy.load_state_dict(loaded.policy_state, strict=loaded.strict, **loaded.arguments)
        with self._lock:
            self._put(first, self.version)
            for node, found in loaded.found.items():
                # A node with other weights gets its own publication. Following must stop, as it would overwrite these.
                if not all(torch.equal(leaf, first[path]) for path, leaf in found.items()):
                    self._put(found, self.version, [node])
                    self._follows = False


class LoadedPolicy(NamedTuple):
    """Saved policies after all checks."""

    found: Mapping[int, Mapping[Path, torch.Tensor]]
    """Weights by node."""
    policy_state: Mapping[str, Any]
    """State dictionary for the user's policy."""
    strict: bool
    arguments: Mapping[str, Any]


def _leaves(policy: torch.nn.Module) -> dict[Path, torch.Tensor]:
    return {path: _here(leaf) for path, leaf in flatten(TensorDict.from_module(policy)).items()}


def _here(leaf: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values on the CPU, without a copy if they are there."""
    return leaf.detach() if leaf.is_meta else leaf.detach().cpu()


def _blank(field: Field) -> torch.Tensor:
    return torch.empty((), dtype=field.dtype, device="cpu").expand(field.shape)


def _record(leaves: Mapping[Path, torch.Tensor]) -> TensorDict:
    return TensorDict({as_key(path): leaf for path, leaf in leaves.items()})
