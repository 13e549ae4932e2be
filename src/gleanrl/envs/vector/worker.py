"""What a worker process of a `ParallelEnv` works on: its share of the environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gleanrl.block import Block
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.members import MemberGroup, RandomRequest, ResetRequest, make_all
from gleanrl.envs.vector.packing import pack, unpack
from gleanrl.envs.vector.steppers import MemberSteppers
from gleanrl.errors import WorkerError
from gleanrl.objects import Objects
from gleanrl.rollouts.protocol import EpisodeRules
from gleanrl.rollouts.usage import Lease
from gleanrl.schema import Field
from gleanrl.tree import Path
from gleanrl.workers.main import Station
from gleanrl.workers.segment import HALT, OWN, PLACE, STEP, Region

STEP_CODE = b"s"
"""Step every environment with the actions of the next row."""
RUN_CODE = b"r"
"""Step every environment with the actions of all the rows that are left of the block."""
BIND_CODE = b"b"
"""Begin with row 0 of the block again."""
SEED, MASKED = OWN, OWN + 1
"""Words of a worker's progress: the block's `redraw_seed`, -1 for None, which the owner writes; and whether a member
may have a mask at present, which the worker writes after each request that can change it."""


@dataclass(frozen=True)
class BlockPlan:
    """Where the rows of a rollout stand in the shared memory.

    Attributes:
        region: of all environments, this worker's among them.
        actions_ready: whether all actions stand there already.
        primed: see `Stepper.bind`.
    """

    region: Region
    actions_ready: bool
    primed: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Share:
    """The environments of one worker: a function of its station makes what serves them.

    Attributes:
        factories: how they are made.
        first: number of the first one.
    """

    factories: Sequence[Factory]
    first: int

    def __call__(self, station: Station) -> EnvServant:
        """Make the environments."""
        made = make_all(self.factories, station.progress)
        return EnvServant(MemberGroup(made, station.progress), station, self.first)


class EnvServant:
    """Serves requests about environments; the methods are those that the owner asks for.

    Args:
        group: the environments; `place` is the worker's progress.
        station: the worker's station.
        first: number of its first environment in the batch.
    """

    def __init__(self, group: MemberGroup, station: Station, first: int) -> None:
        self._group, self._station, self._first = group, station, first
        self._progress = station.progress
        self._steppers: MemberSteppers | None = None
        self._parsed: list[Any] = []
        self._bound: tuple[Block, bool, tuple[Path, ...]] | None = None
        self._t = 0
        self._step: Callable[[int], None] = self._unbound
        self._progress[MASKED] = True  # unknown

    def signal(self, code: bytes) -> None:
        """Step, or begin a block; see the codes.

        Raises:
            StepFault: if an environment raised.
        """
        if code == STEP_CODE:
            self._take(self._t)
        elif code == RUN_CODE:
            self._run()
        elif code == BIND_CODE:
            self._rebind()
        else:
            raise WorkerError(f"there's no signal {code!r}")

    def _run(self) -> None:
        end = 0 if self._bound is None else self._bound[0].num_steps
        while self._t < end and not self._progress[HALT]:  # if it's set, nobody will look at the rows
            self._take(self._t)

    def _take(self, t: int) -> None:
        """Step every environment; the worker's words say, whenever it is killed, which of them have made the step."""
        self._progress[MASKED] = True  # unknown: to look costs too much here
        self._t = t + 1
        self._step(t)
        self._progress[PLACE], self._progress[STEP] = 0, t + 1

    def _unbound(self, t: int) -> None:
        raise WorkerError("a step was asked for before a block was bound")

    # ------------------------------------------------------------ TensorDicts
    def step(self, roots: Sequence[Any]) -> list[Any]:
        """Step every environment; roots and outcomes are packed."""
        outcomes = [pack(outcome) for outcome in self._group.step([unpack(root) for root in roots])]
        self._progress[MASKED] = self._group.masked()
        return outcomes

    def reset(self, requests: Mapping[int, tuple[Any, Mapping[str, Any]]]) -> dict[int, Any]:
        """Reset some environments, by their number in this worker."""
        given = {i: ResetRequest(unpack(root), kwargs) for i, (root, kwargs) in requests.items()}
        fresh = {i: pack(root) for i, root in self._group.reset(given).items()}
        self._progress[MASKED] = self._group.masked()
        return fresh

    # --------------------------------------------------------- random actions
    def action_specs(self) -> list[Any]:
        """Return the action spec of every environment with its present masks; None where it has none."""
        specs = self._group.action_specs()
        self._progress[MASKED] = any(spec is not None for spec in specs)
        return specs

    def rand_actions(self, requests: Mapping[int, tuple[Any, int]]) -> dict[int, Any]:
        """Return random actions of some environments, by their number in this worker."""
        given = {i: RandomRequest(unpack(root), seed) for i, (root, seed) in requests.items()}
        return {i: pack(drawn) for i, drawn in self._group.rand_actions(given).items()}

    # --------------------------------------------------------------- dispatch
    def seed(self, seeds: Sequence[int], static_seed: bool) -> None:
        """Seed every environment."""
        self._group.seed(seeds, static_seed)

    def attribute(self, name: str) -> list[tuple[bool, Any]]:
        """Return for every environment whether the attribute is callable, and its value if it isn't."""
        found = self._group.attribute(name)
        return [(True, None) if callable(value) else (False, value) for value in found]

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call the method of every environment."""
        self._progress[MASKED] = True  # unknown, also if the method raises
        return self._group.call(name, args, kwargs)

    def state_dicts(self) -> list[Any]:
        """Return the state of every environment."""
        return self._group.state_dicts()

    def parse_states(self, states: Sequence[Any], strict: bool) -> None:
        """Parse a state for every environment, and keep the values for `adopt_states`."""
        self._parsed = self._group.parse_states(states, strict)

    def adopt_states(self) -> None:
        """Let every environment go on from the value that was parsed last."""
        self._progress[MASKED] = True  # unknown
        self._group.adopt_states(self._parsed)

    # ----------------------------------------------------------------- blocks
    def new_steppers(self, rules: EpisodeRules) -> None:
        """Make fresh steppers."""
        self._steppers = MemberSteppers(self._group.steppers(rules), Lease(), self._group.place)
        self._bound, self._step = None, self._unbound

    @property
    def _current(self) -> MemberSteppers:
        assert self._steppers is not None
        return self._steppers

    def schema(self) -> dict[Path, Field]:
        """Return the columns; environments that never were are reset."""
        self._progress[MASKED] = True  # unknown
        return self._current.schema().items()

    def reset_rows(self, mask: Any) -> None:
        """Reset into the carry; `mask` is packed, None for all."""
        self._progress[MASKED] = True  # unknown
        self._current.reset(None if mask is None else torch.from_numpy(np.array(mask)))

    def root(self) -> Any:
        """Return the carry's leaves."""
        leaves = self._current.root().items()
        return {path: leaf if isinstance(leaf, Objects) else leaf.numpy() for path, leaf in leaves}

    def steps(self) -> Any:
        """Return the steps that each episode has taken."""
        return self._current.steps.numpy()

    def load(self, roots: Any, steps: Any) -> None:
        """Take a packed root of these environments as the carry, and the steps of their episodes."""
        self._current.load(unpack(roots), torch.from_numpy(np.array(steps)))

    def bind(self, plan: BlockPlan) -> dict[Path, Objects]:
        """Step into a block of the shared memory from now on; return the lists of its first root."""
        whole = self._station.segment.block(plan.region)
        mine = slice(self._first, self._first + len(self._group))
        part = Block(
            whole.schema,
            (len(self._group), *plan.region.rows.batch_size[1:]),
            whole.num_steps,
            columns=[column[mine] for column in whole.columns],
        )
        self._bound = (part, plan.actions_ready, plan.primed)
        self._rebind()
        return self._lists(-1)

    def step_lists(self, t: int, given: Mapping[Path, Objects]) -> dict[Path, Objects]:
        """Step every environment with the actions of row `t`, where columns don't hold everything.

        Args:
            t: the row.
            given: its lists that the environments read.

        Returns:
            The lists of the row's outcome and of the root that follows.
        """
        assert self._bound is not None
        for path, objects in given.items():
            self._bound[0].time_first(path)[t].copy_(objects)
        self._take(t)
        return self._lists(t)

    def _lists(self, t: int) -> dict[Path, Objects]:
        """Return what the lists hold of step `t` and of the root that follows it."""
        assert self._bound is not None
        block, mine = self._bound[0], self._current.schema()
        found: dict[Path, Objects] = {}
        for path in block.schema.lists:
            row = t if path[0] == "next" else t + 1
            if path in mine and 0 <= row < block.num_steps:
                found[path] = block.time_first(path)[row]
        return found

    def _rebind(self) -> None:
        assert self._bound is not None
        seed = self._progress[SEED]
        self._bound[0].redraw_seed = None if seed < 0 else seed + self._first * self._current.width
        self._current.bind(*self._bound)
        self._t, self._step = 0, self._current.step
        self._progress[PLACE], self._progress[STEP] = 0, 0

    def stop(self, num_steps: int) -> None:
        """End the block at that row."""
        self._current.stop(num_steps)

    def close(self) -> None:
        """Close every environment."""
        self._group.close()
