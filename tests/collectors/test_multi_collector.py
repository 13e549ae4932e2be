"""One name for both collectors with workers."""

from __future__ import annotations

import pytest

from gleanrl.collectors import (
    MultiaSyncDataCollector,
    MultiCollector,
    MultiSyncDataCollector,
    aSyncDataCollector,
)
from gleanrl.errors import MissingArgumentError
from tests.collectors.workers.crews import Stream


@pytest.mark.parametrize(("sync", "cls"), [(True, MultiSyncDataCollector), (False, MultiaSyncDataCollector)])
def test_it_makes_either_with_the_same_arguments(sync: bool, cls: type) -> None:
    collector = MultiCollector(Stream(0), sync=sync, num_workers=2, frames_per_batch=8, total_frames=8)
    assert type(collector) is cls and isinstance(collector, MultiCollector)
    assert sum(batch.numel() for batch in collector) == 8


def test_it_has_to_be_told_which() -> None:
    with pytest.raises(MissingArgumentError, match="sync: expected True .* or False"):
        MultiCollector([Stream(0)], frames_per_batch=8)
    assert issubclass(aSyncDataCollector, MultiCollector) and not issubclass(Stream, MultiCollector)
