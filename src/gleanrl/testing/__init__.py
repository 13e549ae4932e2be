"""Conformance suites for users' environments, transforms and buffer parts; no other module imports them."""

from gleanrl.testing.env import check_env
from gleanrl.testing.report import EnvReport, PartReport
from gleanrl.testing.sampler import check_sampler
from gleanrl.testing.storage import check_storage
from gleanrl.testing.transform import check_transform
from gleanrl.testing.writer import check_writer

__all__ = [
    "EnvReport",
    "PartReport",
    "check_env",
    "check_sampler",
    "check_storage",
    "check_transform",
    "check_writer",
]
