"""What a conformance suite found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EnvReport:
    """The outcome of `check_env` on an environment that keeps all rules; one that breaks a rule raises instead.

    Attributes:
        name: the environment.
        num_steps: steps of each run.
        num_episodes: episodes that ended in the first run, all environments of a batch together.
        passed: the rules that were checked.
        skipped: the rules that weren't, and why.
    """

    name: str
    num_steps: int
    num_episodes: int
    passed: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for each rule."""
        head = f"{self.name}: {self.num_steps} steps, {self.num_episodes} episodes"
        return _lines(head, self.passed, self.skipped)


@dataclass(frozen=True)
class PartReport:
    """The outcome of a suite on a part that keeps all rules; one that breaks a rule raises instead.

    Attributes:
        name: what was checked.
        passed: the rules that were checked.
        skipped: the rules that weren't, and why.
    """

    name: str
    passed: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for each rule."""
        return _lines(self.name, self.passed, self.skipped)


def _lines(head: str, passed: tuple[str, ...], skipped: Mapping[str, str]) -> str:
    lines = [f"  passed   {rule}" for rule in passed]
    return "\n".join([head, *lines, *(f"  skipped  {rule}: {reason}" for rule, reason in skipped.items())])
