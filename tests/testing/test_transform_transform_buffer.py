from __future__ import annotations

from typing import Any

import pytest

from gleanrl.errors import ConformanceError
from gleanrl.testing import check_transform
from gleanrl.testing.transform import IN_BUFFERS
from tests.testing.broken_transforms import BATCH, BROKEN_IN_BUFFERS


@pytest.mark.parametrize("broken", BROKEN_IN_BUFFERS, ids=lambda kind: kind.__name__)
def test_each_rule_of_buffers_detects_its_violation(broken: Any) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_transform(broken, batch=BATCH)
    assert caught.value.rule == broken.__doc__
    skipped = check_transform(broken, batch=BATCH, skip=[*IN_BUFFERS]).skipped
    assert set(skipped) == set(IN_BUFFERS)
