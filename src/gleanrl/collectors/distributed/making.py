"""How nodes are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gleanrl.collectors.distributed.lending import Offer
from gleanrl.collectors.distributed.node import Node, NodeDescription, NodeRecipe
from gleanrl.errors import SchemaError
from gleanrl.system.clock import Deadline


@dataclass(frozen=True)
class NodeMaker:
    """How a node's actor is made.

    Attributes:
        recipe: of its collector.
        given: where what its policy is made of stands in the object store.
        options: of the actor.
        num_lent: batches that it may have lent at once; 0 if all go through the object store.
    """

    recipe: NodeRecipe
    given: Any
    options: Mapping[str, Any]
    num_lent: int = 0

    def started(self, ray: Any, recipe: NodeRecipe, deadline: Deadline) -> Starting:
        """Have an actor made, and what it works on, by a recipe like this one's."""
        offer = Offer.of(self.num_lent) if self.num_lent else None
        actor = ray.remote(Node).options(**self.options).remote()
        return Starting(actor, actor.start.remote(replace(recipe, offer=offer), self.given), deadline, offer)


class Starting(NamedTuple):
    """A node that is being made."""

    actor: Any
    ref: Any
    """Where its answer will be."""
    deadline: Deadline
    """By when it must be there."""
    offer: Offer | None


def unlike(found: Mapping[int, NodeDescription], number: int) -> SchemaError | None:
    """Return the error if a node isn't like the others."""
    other = min(found)
    one, first = found[number], found[other]
    if one == first._replace(weights=one.weights, memory=one.memory):
        return None
    return SchemaError(
        f"create_env_fn: node {number} makes batches {tuple(one.batch_size)} with the flags {one.done_paths}, node "
        f"{other} {tuple(first.batch_size)} with {first.done_paths}; use a collector for each kind"
    )
