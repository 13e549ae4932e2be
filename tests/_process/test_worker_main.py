"""The worker process sets up its surroundings and serves requests."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from gleanrl._process.worker import WorkerPlan
from gleanrl._process.worker_main import seed_globals
from gleanrl._process.worker_pool import WorkerPool
from tests._process.crews import ask, started
from tests._process.servants import Clerk


@pytest.fixture(scope="module")
def crew():
    """Return a pool of two workers."""
    made = started(Clerk, Clerk)
    made.wait_all()
    yield made
    made.close()


def test_worker_inherits_the_owners_surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("GLEANRL_TEST_MARK", "here")
    monkeypatch.chdir(tmp_path)
    crew = WorkerPool([Clerk], WorkerPlan(num_threads=3))
    crew.wait_any()
    (found,) = ask(crew, "surroundings")
    assert found["mark"] == "here" and found["folder"] == str(tmp_path) and found["threads"] == 3
    assert found["main"] is None and found["pid"] == crew.workers[0].pid != os.getpid()
    crew.close()


@pytest.mark.parametrize("older", [False, True])
def test_torch_is_seeded_alike_in_all_releases(monkeypatch, older):
    def none():  # as torch 2.6 does
        raise RuntimeError("Cannot access accelerator device when none is available.")

    if older:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    seed_globals([1, 2])
    drawn = torch.rand(3)
    torch.manual_seed(int(np.random.SeedSequence([1, 2]).generate_state(3, np.uint32)[0]))
    assert torch.equal(drawn, torch.rand(3))


def test_no_two_workers_draw_the_same(crew):
    draws = ask(crew, "draws")
    for left, right in zip(*draws, strict=True):
        assert left != right


def test_draws_follow_the_owners_seed():
    before = torch.random.get_rng_state()
    torch.manual_seed(3)
    crew = WorkerPool([Clerk], WorkerPlan())
    assert torch.equal(torch.random.get_rng_state(), torch.manual_seed(3).get_state()), "it took nothing"
    crew.close()
    torch.random.set_rng_state(before)


def test_worker_has_few_descriptors(crew):
    """A worker has pipes, the shared memory, stack files, a link to the fork server, and standard streams."""
    assert all(found["descriptors"] <= 10 for found in ask(crew, "surroundings"))


def test_lambdas_and_classes_of_any_module_are_sent(crew):
    number = 3
    functions = ask(crew, "echo", lambda: number)
    assert [function() for function in functions] == [3, 3]
