"""Shared code of the conformance suites: it checks rules in order and reports the outcome."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gleanrl.errors import ConformanceError, InvalidArgumentError, InvalidTypeError


class Skip(Exception):
    """Raised by a rule that can't be checked; the message gives the reason."""


def left_out(skip: Iterable[str], rules: Collection[str]) -> set[str]:
    """Return the names of the rules to leave out; raise `InvalidArgumentError` for a name that isn't in `rules`."""
    names = set(skip)
    if unknown := sorted(names - set(rules)):
        raise InvalidArgumentError(f"skip: expected names of {[*rules]}, got {unknown}")
    return names


def made(make: Callable[[], Any], kind: type) -> Any:
    """Return the result of `make`; raise `InvalidTypeError` unless it is a `kind`."""
    first = make()
    if not isinstance(first, kind):
        raise InvalidTypeError(f"make: expected it to return a {kind.__name__}, got {first!r}")
    return first


def check_rules(
    rules: Mapping[str, Callable[[], None]], without: Collection[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Check rules in order, except the ones in `without`; the error of a broken rule ends the checks.

    Returns:
        The names of the checked rules, and the reasons of the skipped ones by name.
    """
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


def expect(rule: str, where: str, holds: bool, expected: str, got: Any) -> None:
    """Raise `ConformanceError` unless `holds` is True."""
    if not holds:
        raise ConformanceError(rule, where, expected, str(got))


@dataclass(frozen=True)
class EnvReport:
    """The outcome of `check_env` for an environment that keeps all rules; a broken rule raises instead.

    Attributes:
        name: class name of the environment.
        num_steps: steps of each run.
        num_episodes: episodes that ended in the first run, in all environments of a batch together.
        passed: the rules that were checked.
        skipped: the rules that weren't checked, and the reasons.
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
    """The outcome of a suite for a part that keeps all rules; a broken rule raises instead.

    Attributes:
        name: class name of the part.
        passed: the rules that were checked.
        skipped: the rules that weren't checked, and the reasons.
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
    """Check the rules of a suite in order and return the report.

    Args:
        name: name of the checked part.
        rules: checks by rule; each takes a subject.
        subject: returns the subject for the rule of a given name.
        skip: rules that the caller leaves out.
        unknown: rules of `rules` that don't apply to this part, and the reasons; the report lists them as skipped.

    Raises:
        ConformanceError: the first broken rule.
        InvalidArgumentError: `skip` names a rule that isn't in `rules`.
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
