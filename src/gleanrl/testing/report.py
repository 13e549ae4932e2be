"""What conformance suites share: rules are checked one after the other, and a report says which."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gleanrl.errors import ConformanceError, InvalidArgumentError, InvalidTypeError


class Skip(Exception):
    """A rule can't be checked here; the message says why."""


def left_out(skip: Iterable[str], rules: Collection[str]) -> set[str]:
    """Return the names of rules to leave out; `InvalidArgumentError` for one that isn't among `rules`."""
    names = set(skip)
    if unknown := sorted(names - set(rules)):
        raise InvalidArgumentError(f"skip: there is no {unknown} to leave out; there are {[*rules]}")
    return names


def made(make: Callable[[], Any], kind: type) -> Any:
    """Return what `make` makes; `InvalidTypeError` unless it is a `kind`."""
    first = make()
    if not isinstance(first, kind):
        raise InvalidTypeError(f"make: expected it to return a {kind.__name__}, got {first!r}")
    return first


def check_rules(
    rules: Mapping[str, Callable[[], None]], without: Collection[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Check rules in order, but for those `without`; return which were checked, and why the others weren't."""
    passed: list[str] = []
    skipped: dict[str, str] = {}
    for name, rule in rules.items():
        if name in without:
            skipped[name] = "left out by the caller"
            continue
        try:
            rule()
            passed.append(name)
        except Skip as reason:
            skipped[name] = str(reason)
    return tuple(passed), skipped


def expect(rule: str, where: str, kept: bool, expected: str, got: Any) -> None:
    """Raise `ConformanceError` unless the rule was kept."""
    if not kept:
        raise ConformanceError(rule, where, expected, str(got))


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


def part_report(
    name: str,
    rules: Mapping[str, Callable[[Any], None]],
    subject: Callable[[str], Any],
    skip: Iterable[str],
    unknown: Mapping[str, str],
) -> PartReport:
    """Check the rules of a suite in order and report which.

    Args:
        name: what is checked.
        rules: each takes a subject.
        subject: makes one for the rule of that name.
        skip: rules that the caller leaves out.
        unknown: rules that can't be asked for here, and why.

    Raises:
        ConformanceError: at the first broken rule.
        InvalidArgumentError: if `skip` names an unknown rule.
    """

    def check(rule: str) -> None:
        if rule in unknown:
            raise Skip(unknown[rule])
        rules[rule](subject(rule))

    return PartReport(
        name, *check_rules({rule: partial(check, rule) for rule in rules}, left_out(skip, rules))
    )


def _lines(head: str, passed: tuple[str, ...], skipped: Mapping[str, str]) -> str:
    lines = [f"  passed   {rule}" for rule in passed]
    return "\n".join([head, *lines, *(f"  skipped  {rule}: {reason}" for rule, reason in skipped.items())])
