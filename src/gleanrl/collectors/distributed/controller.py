"""The owner's side of nodes: sends orders and requests, receives outcomes, and restarts lost nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gleanrl._os import clock
from gleanrl._os.clock import Deadline
from gleanrl._process.ray import RayRuntime
from gleanrl._process.remote_errors import Report
from gleanrl.collectors.distributed.actor import (
    Allowance,
    NodeAnswer,
    NodeDescription,
    NodeMaker,
    NodeRecipe,
    Order,
    Outcome,
    Published,
    Starting,
    unlike,
)
from gleanrl.collectors.distributed.local_transport import (
    Arrivals,
    MemoryLocation,
    Message,
    Name,
    NodeMemory,
    NodeShare,
    Offer,
    StoredShare,
)
from gleanrl.collectors.distributed.progress import Call, NodeProgress, NodeState, ReceivedShare
from gleanrl.collectors.frame_accounting import FrameCounts
from gleanrl.collectors.source import Grant
from gleanrl.collectors.workers.progress import Restarts
from gleanrl.errors import WorkerCrashedError, WorkerTimeoutError


class LocalNodes:
    """The nodes on the owner's machine, by index. One thread at a time.

    Args:
        ray: the module `ray`.
    """

    def __init__(self, ray: Any) -> None:
        self._memories: dict[int, NodeMemory] = {}
        self._arrivals = Arrivals(ray)

    def add(self, number: int, name: Name | None, offer: Offer) -> None:
        """Add a node if this process can open its memory; see `NodeMemory.opened`."""
        found = NodeMemory.opened(name, offer)
        if found is not None:
            self._memories[number] = found

    def forget(self, number: int) -> None:
        """Remove a node, if it is one of these."""
        self._memories.pop(number, None)

    def __contains__(self, number: int) -> bool:
        """Return whether a node lends its memory to this process."""
        return number in self._memories

    def share(self, number: int, location: MemoryLocation) -> NodeShare:
        """Return a batch in memory lent by a node."""
        return self._memories[number].share(location)

    def send_order(self, number: int, actor: Any, order: Order, last: Outcome) -> tuple[Any, Any]:
        """Send an order to a node. Return the future outcome and batch, as in `Call`.

        If the node's last batch was lent, the order goes through its pipe, because the answer is small. Otherwise it
        goes through Ray.

        Args:
            number: index of the node.
            actor: Ray handle of the node.
            order: the order, with the references of its weights.
            last: the outcome of the node's last order.
        """
        weights = order.weights
        known = weights._replace(refs=())  # Ray tracks every reference that it passes, which costs time
        if last.batch.location is not None and number in self._memories:
            line = self._memories[number].line
            line.attend(actor, weights)
            return line.send_order(order._replace(weights=known)), None
        weights = known if weights.number == last.weights else weights
        order = order._replace(weights=weights, after=self.leave_pipe(number))
        outcome, batch = actor.collect.options(num_returns=2).remote(order)
        return outcome, batch

    def leave_pipe(self, number: int) -> int:
        """Make a node leave its pipe before a Ray call. Return the number of pipe orders sent before."""
        return self._memories[number].line.leave() if number in self._memories else 0

    def first(self, number: int) -> Message | None:
        """Return a node's first answer that has arrived and was not dropped; None if there is none."""
        return self._memories[number].line.first() if number in self._memories else None

    def drop(self, number: int) -> None:
        """Drop the first answer of a node."""
        if number in self._memories:
            self._memories[number].line.drop()

    def go_on(self, number: int, actor: Any) -> None:
        """Make a node attend its pipe again with the same weights, unless it does, because it has orders left there."""
        self._memories[number].line.attend(actor)

    @property
    def attendances(self) -> dict[Any, int]:
        """Nodes by the reference of their current `attend` call. It is ready once the call or the node has ended."""
        lines = {number: memory.line for number, memory in self._memories.items()}
        return {line.attendance: number for number, line in lines.items() if line.attendance is not None}

    def ended(self, number: int) -> None:
        """Record that a node's `attend` call has ended."""
        self._memories[number].line.ended()

    def wait(self, numbers: Sequence[int], refs: Sequence[Any], seconds: float | None) -> list[Any]:
        """Wait until an answer of a node arrives or a reference is ready; see `Arrivals.wait`."""
        return self._arrivals.wait([self._memories[number].line for number in numbers], refs, seconds)


LOST = "worker"
"""Reason for which the frames of a lost node are discarded."""


class NodeController:
    """Send orders to nodes, receive their outcomes, and restart lost nodes. One thread at a time.

    `now` holds the authoritative state. An interrupt comes before or after each change of it, never in between. If an
    interrupt hides that an order was sent, the order is sent again with the same number. The node does not carry it out
    twice.

    The constructor starts the nodes and waits for them; for its errors see `add`.

    Args:
        runtime: Ray.
        makers: configs of the nodes.
        restarts: decides whether lost nodes are restarted.
        made_again: returns the config of a lost node's replacement, by index.
        start_s: how many seconds a node may take to start, including placement; None for no limit.

    Attributes:
        now: state of the collection.
        actors: Ray handles of the nodes.
    """

    def __init__(
        self,
        runtime: RayRuntime,
        makers: Sequence[NodeMaker],
        restarts: Restarts,
        made_again: Callable[[int], NodeRecipe],
        start_s: float | None,
    ) -> None:
        self._runtime, self._ray = runtime, runtime.ray
        self._restarts, self._made_again, self._start_s = restarts, made_again, start_s
        self.now = NodeProgress(FrameCounts(), ())
        self.actors: list[Any] = []
        self._makers: list[NodeMaker] = []
        self._starting: dict[int, Starting] = {}
        self._local_nodes = LocalNodes(self._ray)
        self._descriptions: dict[int, NodeDescription] = {}
        self.closed = False
        self.add(makers)

    @property
    def description(self) -> NodeDescription:
        """Description of the nodes' collectors; all are alike."""
        return self._descriptions[0]

    # ----------------------------------------------------------------- nodes
    def add(self, makers: Sequence[NodeMaker]) -> None:
        """Start further nodes, and wait for them. If one can't be started, all new nodes are ended and removed.

        Raises:
            SchemaError: their batch size or done flags differ from the other nodes'.
            WorkerTimeoutError: a node did not start in time.
            Exception: the exception of a node's collector constructor.
        """
        first = len(self._makers)
        new = range(first, first + len(makers))
        self._makers += makers
        self.actors += [None] * len(makers)
        self.now = self.now._replace(nodes=(*self.now.nodes, *[NodeState()] * len(makers)))
        try:
            for number in new:
                self._start(number, self._makers[number].recipe)
            while any(self.now.nodes[number].down for number in new):
                self.wait()
        except BaseException:
            for number in new:
                self._kill(number)
                self._starting.pop(number, None)
            del self._makers[first:], self.actors[first:]
            self.now = self.now._replace(nodes=self.now.nodes[:first])
            raise

    def _start(self, number: int, recipe: NodeRecipe) -> None:
        self._starting[number] = self._makers[number].started(self._ray, recipe, Deadline(self._start_s))
        self.actors[number] = self._starting[number].actor

    def _started(self, number: int, ref: Any) -> None:
        """Record that a node has started, or handle its failure.

        A failure of a replacement counts as a loss of the node. A failure of a first start is raised, since the
        arguments are probably wrong.
        """
        offer = self._starting.pop(number).offer
        answer = self._got(number, ref)
        if answer is None:
            return
        error = None if answer.report is None else answer.report.error(self._origin(number))
        if error is None:
            self._descriptions[number] = answer.value
            if offer is not None:
                self._local_nodes.add(number, answer.value.memory, offer)
            error = unlike(self._descriptions, number)
        if error is None:
            self.now = self.now.with_node(number, down=False)
        elif self.now.nodes[number].losses.number:
            self._lost(number, error)
        else:
            raise error

    def _late(self, number: int) -> None:
        """Handle a node that did not start in time, like a failed start."""
        del self._starting[number]
        error = WorkerTimeoutError(
            f"node {number} didn't start within {self._start_s} s: it asks for {dict(self._makers[number].options)}, "
            f"the cluster has {self._ray.cluster_resources()}, and {self._ray.available_resources()} are free; "
            "pass remote_configs that fit, or timeouts with a longer start_s"
        )
        if not self.now.nodes[number].losses.number:
            raise error
        self._lost(number, error)

    def _origin(self, number: int) -> str:
        return f"node {number}"

    # ------------------------------------------------------------------ orders
    def order(
        self, number: int, grants: Sequence[Grant], num_envs: int, weights: Published, afresh: bool = False
    ) -> None:
        """Order a batch from a node, which must not be down. The call does not wait for the batch.

        Args:
            number: index of the node.
            grants: grants in addition to earlier ones.
            num_envs: number of environments of the node that step at once.
            weights: the weights to collect with.
            afresh: whether earlier grants that are left are dropped.
        """
        node = self.now.nodes[number]
        afresh |= node.afresh
        lends = number in self._local_nodes
        order = Order(node.num_orders, tuple(grants), weights, afresh, node.reset, node.wanted, lends)
        outcome, batch = self._local_nodes.send_order(number, self.actors[number], order, node.outcome)
        frames = sum(Allowance.frames(grant, num_envs) for grant in grants)
        call = Call(node.num_orders, frames, outcome, batch)
        self.now = self.now.with_node(
            number,
            num_orders=node.num_orders + 1,
            calls=(*node.calls, call),
            reset=False,
            afresh=False,
            outcome=node.outcome._replace(left=0) if afresh else node.outcome,
        )

    def wait(self, *extra_refs: Any) -> None:
        """Wait for an outcome, for the start of a node or its due restart, or for one of `extra_refs` to be ready.

        Outcomes and starts are recorded, and lost nodes are started when they are due. The call may return before
        anything has happened.

        Raises:
            Exception: the exception of a node whose batch is wanted, or of a node's first start.
            WorkerError: a node was lost and is not restarted. All nodes have ended.
            ClosedError: Ray was shut down.
        """
        self._runtime.check()
        self._revive()
        # A node answers in order, so only its first order under way can be answered next.
        heads = {number: node.calls[0].outcome for number, node in enumerate(self.now.nodes) if node.calls}
        local = [number for number, head in heads.items() if isinstance(head, int)]
        if any(self._heard(number) for number in local):
            return
        takers = {head: (self._receive, number) for number, head in heads.items() if number not in local}
        takers |= {one.ref: (self._started, number) for number, one in self._starting.items()}
        takers |= {ref: (self._attended, number) for ref, number in self._local_nodes.attendances.items()}
        remaining = [deadline.remaining() for deadline in self._deadlines()]
        soonest = min((seconds for seconds in remaining if seconds is not None), default=None)
        refs = [*takers, *extra_refs]
        if not refs and not local:
            clock.sleep(soonest or 0.0)
            return
        found = self._local_nodes.wait(local, refs, soonest)
        for number in local:
            self._heard(number)
        for ref in found:
            if ref in takers:
                take, number = takers[ref]
                take(number, ref)
        for number, one in list(self._starting.items()):
            if one.deadline.passed():
                self._late(number)

    def _deadlines(self) -> Iterable[Deadline]:
        yield from (one.deadline for one in self._starting.values())
        for number, node in enumerate(self.now.nodes):
            if node.down and number not in self._starting and isinstance(node.losses.verdict, Deadline):
                yield node.losses.verdict

    def _heard(self, number: int) -> bool:
        """Process the answers in a node's pipe. Return whether there were any."""
        heard = False
        while (message := self._local_nodes.first(number)) is not None:
            heard, calls = True, self.now.nodes[number].calls
            if calls and calls[0].outcome == message.ticket:
                self._answered(number, message.value)
            elif any(call.outcome == message.ticket for call in calls):
                break  # an earlier order's answer comes through Ray; this one waits for it
            self._local_nodes.drop(number)
        calls = self.now.nodes[number].calls
        if calls and isinstance(calls[0].outcome, int):
            self._local_nodes.go_on(number, self.actors[number])
        return heard

    def _answered(self, number: int, value: Any) -> None:
        """Process the answer of a node's first order under way, which came through its pipe."""
        if isinstance(value, Report):
            self._unsent(number)
            raise value.error(self._origin(number))
        outcome, batch = value
        self._arrived(number, outcome, batch and StoredShare(batch))

    def _attended(self, number: int, ref: Any) -> None:
        """Record the end of a node's `attend` call. If the call failed, the node is lost."""
        if self._local_nodes.attendances.get(ref) == number:
            try:
                self._ray.get(ref)
            except Exception as error:
                self._lost(number, error)
            else:
                self._local_nodes.ended(number)

    def _receive(self, number: int, ref: Any) -> None:
        """Process the outcome of a node's first order under way, which came through Ray."""
        calls = self.now.nodes[number].calls
        if calls and calls[0].outcome == ref:  # otherwise the node was lost just now
            outcome = self._got(number, ref)
            if outcome is not None:
                self._arrived(number, outcome, calls[0].batch)

    def _arrived(self, number: int, outcome: Outcome, batch: Any) -> None:
        """Record an outcome. Raise its exception if the batch is wanted or the node's collector has ended."""
        wanted = not self.now.nodes[number].unwanted
        location = outcome.batch.location
        batch = self._local_nodes.share(number, location) if location else batch
        self.now = self.now.arriving(number, outcome, batch)
        if outcome.report is None:
            return
        error = outcome.report.error(self._origin(number))
        if outcome.is_final:
            self._lost(number, error)
        elif wanted:
            raise error

    def _got(self, number: int, ref: Any) -> Any:
        """Return the result of a node's call.

        If the node was lost, handle the loss and return None. An exception of the call itself is raised here. If the
        call was the first order under way, the order is dropped.
        """
        try:
            return self._ray.get(ref)
        except self._runtime.losses as error:
            self._lost(number, error)
            return None
        except self._ray.exceptions.RayTaskError as error:
            calls = self.now.nodes[number].calls
            if calls and calls[0].outcome == ref:
                self._unsent(number)
            raise error.as_instanceof_cause() from None

    def _unsent(self, number: int) -> None:
        """Drop a node's first order under way, whose batch can't be sent.

        The counters of the next outcome include the batch's frames.
        """
        self.now = self.now.with_node(number, calls=self.now.nodes[number].calls[1:])

    def fetched(self, number: int, arrival: ReceivedShare) -> NodeShare | None:
        """Return a node's batch.

        If it was lost with its machine, discard all undelivered batches and orders of the node, and return None.
        """
        if isinstance(arrival.batch, NodeShare):
            return arrival.batch
        try:
            return StoredShare(self._ray.get(arrival.batch))
        except self._runtime.losses:
            self.discard(number, LOST)
            return None

    def discard(self, number: int, reason: str) -> None:
        """Discard a node's batches that aren't delivered.

        Batches of orders under way are discarded when they arrive. The next order begins with a reset and drops earlier
        grants.
        """
        self.now = self.now.discarding(number, reason)

    def discard_all(self, reason: str) -> None:
        """Discard the batches of all nodes that have ready batches or orders under way; see `discard`."""
        for number, node in enumerate(self.now.nodes):
            if node.calls or node.ready:
                self.discard(number, reason)

    def settle(self, deadline: Deadline | None = None) -> None:
        """Wait until no order is under way, or the deadline has passed; raise the errors of `wait`."""
        while any(node.calls for node in self.now.nodes) and not (deadline and deadline.passed()):
            self.wait()

    # ------------------------------------------------------------------ losses
    def _lost(self, number: int, error: BaseException) -> None:
        """Count the frames of a lost node as discarded, and kill its actor.

        If it will not be restarted, all nodes are ended and an error is raised.
        """
        node = self.now.nodes[number]
        before = [other.losses for other in self.now.nodes]
        losses = self._restarts.after_loss(before, number, node.served, node.owed)
        self.now = self.now.losing(number, node.owed, LOST, losses)
        # After the count: if an interrupt comes earlier, the dead actor still reports the loss.
        self._kill(number)
        self._starting.pop(number, None)
        if isinstance(losses.verdict, str):
            with suppress(Exception):
                self.close()
            raise WorkerCrashedError(f"node {number} was lost: {error}; {losses.verdict}") from error

    def _revive(self) -> None:
        """Start the lost nodes whose restart is due."""
        for number, node in enumerate(self.now.nodes):
            verdict = node.losses.verdict
            if node.down and number not in self._starting and isinstance(verdict, Deadline):
                if verdict.passed():
                    self._start(number, self._made_again(number))

    def _kill(self, number: int) -> None:
        """Kill a node's actor, if it has one, and close the memory that it lends. Errors of Ray are ignored."""
        actor, self.actors[number] = self.actors[number], None
        self._local_nodes.forget(number)
        if actor is not None and not self._runtime.ended:
            with suppress(Exception):
                self._ray.kill(actor)

    # ---------------------------------------------------------------- requests
    def ask(self, name: str, arguments: Mapping[int, tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of nodes and return the results, in node order.

        Nodes answer after the orders that were sent before. A node that is lost meanwhile is asked again after its
        restart.

        Args:
            name: name of the method.
            arguments: positional arguments by node; None calls all nodes without arguments.

        Raises:
            Exception: the exception that a node raised, after all nodes have answered; or an error of `wait`.
        """
        self._runtime.check()
        requests = dict.fromkeys(range(len(self.actors)), ()) if arguments is None else dict(arguments)
        sent: dict[int, tuple[Any, Any]] = {}
        answers: dict[int, NodeAnswer] = {}
        while len(answers) < len(requests):
            for number, values in requests.items():
                actor = self.actors[number]
                if number not in answers and not self.now.nodes[number].down:
                    # A restarted node has a new actor, which has not been asked yet.
                    if number not in sent or sent[number][0] is not actor:
                        after = self._local_nodes.leave_pipe(number)
                        sent[number] = actor, actor.ask.remote(name, *values, after=after)
            refs = {ref: number for number, (_, ref) in sent.items() if number not in answers}
            self.wait(*refs)
            for ref in self._ray.wait([*refs], num_returns=len(refs), timeout=0)[0] if refs else ():
                number = refs[ref]
                if sent[number][0] is self.actors[number]:
                    answer = self._got(number, ref)
                    if answer is not None:
                        answers[number] = answer
        for number in requests:
            report = answers[number].report
            if report is not None:
                raise report.error(self._origin(number))
        return [answers[number].value for number in requests]

    def close(self, close_s: float = 0.0) -> None:
        """End all nodes and kill their actors.

        With `close_s`, nodes first have that many seconds in all to shut their collectors down.
        """
        self.closed = True
        try:
            if close_s and not self._runtime.ended:
                refs = [
                    actor.ask.remote("close", after=self._local_nodes.leave_pipe(number))
                    for number, actor in enumerate(self.actors)
                    if actor is not None
                ]
                if refs:
                    self._ray.wait(refs, num_returns=len(refs), timeout=close_s)
        finally:
            for number in range(len(self.actors)):
                self._kill(number)
