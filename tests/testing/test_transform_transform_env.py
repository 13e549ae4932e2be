from __future__ import annotations

from typing import Any

import pytest

from gleanrl.errors import ConformanceError
from gleanrl.testing import check_transform
from tests.testing.broken import Walk
from tests.testing.broken_transforms import BROKEN


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_each_rule_detects_its_violation(broken: Any) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_transform(broken, env=Walk, num_steps=40)
    assert caught.value.rule == broken.__doc__
