"""Where the environments of a collection stand, so that another one goes on in the middle of an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gleanrl.envs.memory import adopt_memory, check_memory, remember
from gleanrl.errors import SchemaError, UnsupportedError
from gleanrl.randomness import GENERATORS, Places
from gleanrl.rollouts.protocol import Carry, Stepper
from gleanrl.state import StateReader


@dataclass(frozen=True)
class Place:
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
    def of(cls, env: Any, stepper: Stepper, reset_first: bool) -> Place:
        """Return the place of environments that `stepper` steps, or that are to be reset."""
        try:
            memory = remember(env)
        except UnsupportedError as cause:
            return cls(None, None, str(cause), GENERATORS.snapshot())
        carry = None if reset_first else stepper.snapshot()
        return cls(carry, memory, "", GENERATORS.snapshot())

    @classmethod
    def read(cls, state: Any, env: Any, stepper: Stepper) -> Place:
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
