"""Conformance suites to run on one's own parts; nothing in the library imports them."""

from gleanrl.testing.env import check_env
from gleanrl.testing.report import EnvReport

__all__ = ["EnvReport", "check_env"]
