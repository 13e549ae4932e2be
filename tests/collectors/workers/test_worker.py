"""The service of a collector worker, run in the test's process."""

from __future__ import annotations

import pytest
import torch

from gleanrl._process.shared_columns import SharedRows, SharedSegment
from gleanrl._process.worker_main import WorkerContext
from gleanrl.collectors.build import CollectorConfig
from gleanrl.collectors.frame_accounting import Numbering
from gleanrl.collectors.source import CollectionOptions, Grant
from gleanrl.collectors.workers.shared_counters import SERVED, SharedCounters
from gleanrl.collectors.workers.worker import SERVE, Bound, CollectorMaker, PickledPolicy
from gleanrl.envs.vector.factories import Factory
from gleanrl.errors import WorkerError
from tests.collectors.helpers import Net
from tests.collectors.workers.crews import Stream


def test_grants_fill_blocks_and_ids_are_numbered() -> None:
    segment = SharedSegment(1)
    station = WorkerContext(0, segment, segment.progress(0))
    maker = CollectorMaker(
        Factory(Stream(0)),
        PickledPolicy.of(Net(), None),
        CollectorConfig(CollectionOptions()),
        Numbering(1, 3),
        2,
        first_id=5,
    )
    servant = maker(station)
    found = servant.describe()
    region = segment.region("rows", SharedRows(found.schema, torch.Size((1,)), 4), 2)
    servant.bind(Bound(region, 0))
    words, blocks = SharedCounters(segment.progress(0), 2), [segment.block(region, k) for k in range(2)]
    for number in range(3):
        words.grant(Grant(4), False)
        servant.signal(SERVE)
        share = words.share(number)
        assert (share.failed, share.num_steps, share.frames) == (False, 4, 4) and words.words[
            SERVED
        ] == number + 1
        ids = blocks[number % 2].column(("collector", "traj_ids"))
        assert (ids % 3 == 1).all() and (ids // 3 >= 5).all()
    servant.signal(SERVE)  # there is no grant
    assert words.words[SERVED] == 3
    with pytest.raises(WorkerError, match="no signal"):
        servant.signal(b"?")
    servant.close()


def test_unpicklable_policy_names_policy_factory() -> None:
    with pytest.raises(WorkerError, match="policy: .*policy_factory="):
        PickledPolicy.of((x for x in ()), None)
