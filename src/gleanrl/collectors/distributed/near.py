"""How nodes get their orders: those on their owner's machine lend it memory, and have pipes; all others have Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gleanrl.collectors.distributed.attending import Arrivals, Message
from gleanrl.collectors.distributed.lending import Borrowed, Name, Offer, Place
from gleanrl.collectors.distributed.node import Order, Outcome
from gleanrl.collectors.distributed.shares import Share


class NearNodes:
    """The nodes on their owner's machine, by their numbers. One thread at a time.

    Args:
        ray: the module.
    """

    def __init__(self, ray: Any) -> None:
        self._borrowed: dict[int, Borrowed] = {}
        self._arrivals = Arrivals(ray)

    def meet(self, number: int, name: Name | None, offer: Offer) -> None:
        """Take note of a node, if it is a near one; see `Borrowed.opened`."""
        found = Borrowed.opened(name, offer)
        if found is not None:
            self._borrowed[number] = found

    def forget(self, number: int) -> None:
        """Forget a node, if it's one of these."""
        self._borrowed.pop(number, None)

    def __contains__(self, number: int) -> bool:
        """Return whether a node is one of these."""
        return number in self._borrowed

    def share(self, number: int, place: Place) -> Share:
        """Return a batch that a node has lent."""
        return self._borrowed[number].share(place)

    def give(self, number: int, actor: Any, order: Order, last: Outcome) -> tuple[Any, Any]:
        """Give a node an order; return where its outcome and its batch will be, see `Call`.

        One whose last batch was lent gets it through its pipe: what is answered there is small.

        Args:
            number: the node's.
            actor: the node's.
            order: with all that its weights are.
            last: what came of its last order.
        """
        weights = order.weights
        known = weights._replace(refs=())  # Ray keeps books of every reference
        if last.batch.place is not None and number in self._borrowed:
            line = self._borrowed[number].line
            line.attend(actor, weights)
            return line.give(order._replace(weights=known)), None
        weights = known if weights.number == last.weights else weights
        order = order._replace(weights=weights, after=self.let_go(number))
        outcome, batch = actor.collect.options(num_returns=2).remote(order)
        return outcome, batch

    def let_go(self, number: int) -> int:
        """Have a node leave its pipe for a call of Ray; return how many orders it was given there before."""
        return self._borrowed[number].line.leave() if number in self._borrowed else 0

    def first(self, number: int) -> Message | None:
        """Return the first answer of a node that has come and wasn't dropped."""
        return self._borrowed[number].line.first() if number in self._borrowed else None

    def drop(self, number: int) -> None:
        """Drop that answer."""
        if number in self._borrowed:
            self._borrowed[number].line.drop()

    def go_on(self, number: int, actor: Any) -> None:
        """Have a node attend that was given orders which it hasn't carried out."""
        self._borrowed[number].line.attend(actor)

    @property
    def attendances(self) -> dict[Any, int]:
        """The nodes, by Ray's references to calls in which they attend: they are there if one ended, or its node."""
        lines = {number: borrowed.line for number, borrowed in self._borrowed.items()}
        return {line.attendance: number for number, line in lines.items() if line.attendance is not None}

    def ended(self, number: int) -> None:
        """Note that a node doesn't attend any more."""
        self._borrowed[number].line.ended()

    def wait(self, numbers: Sequence[int], refs: Sequence[Any], seconds: float | None) -> list[Any]:
        """Wait until an answer of one of the nodes has come, or a reference is there; see `Arrivals.wait`."""
        return self._arrivals.wait([self._borrowed[number].line for number in numbers], refs, seconds)
