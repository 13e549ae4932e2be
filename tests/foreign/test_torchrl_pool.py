"""One program gets the same rows from TorchRL's AsyncEnvPool and from gleanrl's (`make test-foreign`)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

torchrl = pytest.importorskip("torchrl")

from torchrl import envs as foreign  # noqa: E402

from gleanrl import envs as ours  # noqa: E402
from gleanrl._arrays.tensordicts import flatten  # noqa: E402
from tests.foreign import torchrl_envs  # noqa: E402 - it imports TorchRL

pytestmark = pytest.mark.filterwarnings("default")

BACKENDS = ("threading", "multiprocessing")
has_pool = pytest.mark.skipif(not hasattr(foreign, "AsyncEnvPool"), reason="the release has no AsyncEnvPool")


def rows(batch):
    """Return each row's leaves, by environment."""
    found = {}
    for row in batch.unbind(0):
        leaves = {path: leaf for path, leaf in flatten(row).items() if isinstance(leaf, torch.Tensor)}
        found[row["env_index"]] = {path: (leaf.dtype, leaf.tolist()) for path, leaf in leaves.items()}
    return found


def program(library, backend):
    """Return all rows that the program receives."""
    pool = library.AsyncEnvPool(
        [partial(torchrl_envs.Episodes, length) for length in (3, 4, 5)], backend=backend
    )
    assert pool.batch_size == (3,) and pool.num_envs == 3 and pool.min_get == 1 and pool.backend == backend

    def acting(td, t):
        return td.set("action", torch.full((*td.batch_size, 2), float(t % 2)))

    seen = []
    root = pool.reset()
    assert list(root["env_index"]) == [0, 1, 2]
    seen.append(rows(root))
    pool.async_step_send(acting(root, 0))
    stepped = pool.async_step_recv(3)
    seen.append(rows(stepped))
    two = pool.step_mdp(stepped)[[0, 2]]
    pool.async_step_send(acting(two, 1))
    seen.append(rows(pool.async_step_recv(min_get=2)))
    pool.async_reset_send(root[1])
    one = pool.async_reset_recv(1)
    assert one.batch_size == (1,)
    seen.append(rows(one.exclude("action")))
    single = acting(one[0], 0).exclude("env_index")
    pool.async_step_send(single, env_index=1)
    found = pool.async_step_recv(env_index=1)
    assert found.batch_size == () and found["env_index"] == 1
    root = pool.reset()
    for t in range(12):
        pool.async_step_and_maybe_reset_send(acting(root, t))
        stepped, root = pool.async_step_and_maybe_reset_recv(min_get=3)
        root = root.exclude("action")
        seen += [rows(stepped), rows(root)]
    ended = [
        row["next", "done"][1] for batch in seen[4:] for row in batch.values() if ("next", "done") in row
    ]
    assert [True] in ended and [False] in ended
    with pytest.raises(RuntimeError):
        pool.async_step_recv()
    root = acting(root, 0)
    pool.async_step_send(root[:1])
    with pytest.raises(RuntimeError):
        pool.async_step_send(root[:1])
    with pytest.raises(RuntimeError):
        pool.step(root)
    pool.async_step_recv()
    rollout = pool.rollout(4, break_when_any_done=False)
    assert rollout.get("env_index").tolist() == [[i] * 4 for i in range(3)]
    pool.close()
    return seen


@has_pool
@pytest.mark.parametrize(
    "backend",
    # TorchRL's processes start slowly.
    ["threading", pytest.param("multiprocessing", marks=pytest.mark.slow)],
)
def test_same_program_gets_the_same_rows(backend):
    theirs, mine = program(foreign, backend), program(ours, backend)
    assert len(theirs) == len(mine)
    for number, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        assert a == b, number


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchrl_environments_run_in_the_pool(backend):
    with ours.AsyncEnvPool([torchrl_envs.cartpole for _ in range(2)], backend=backend) as pool:
        ours.check_env_specs(pool)
        roots = pool.reset()
        for _ in range(5):
            pool.async_step_and_maybe_reset_send(pool.rand_action(roots))
            stepped, roots = pool.async_step_and_maybe_reset_recv(min_get=2)
        assert list(stepped["env_index"]) == [0, 1]
