"""The grants of a node are found by its count of collected frames."""

from __future__ import annotations

from gleanrl.collectors.distributed.actor import Allowance
from gleanrl.collectors.source import Grant


def test_grants_are_taken_in_order_and_missing_frames_granted_again():
    allowance = Allowance(2)
    assert allowance.grant(0) is None and allowance.left(0) == 0
    allowance.add([Grant(5, random=True), Grant(5), Grant(3, most=5)], 0)
    assert allowance.left(0) == 25
    assert allowance.grant(0) == Grant(5, True, 10)
    assert allowance.grant(7) == Grant(2, True, 3)  # two of these steps were no frames
    assert allowance.grant(10) == Grant(5, False, 10)
    assert allowance.grant(20) == Grant(3, False, 5)
    assert allowance.grant(25) is None and allowance.left(25) == 0
    allowance.add([Grant(1)], 25)
    assert allowance.grant(25) == Grant(1, False, 2)
    allowance.clear(30)
    assert allowance.left(30) == 0 and allowance.grant(30) is None
    allowance.add([Grant(4)], 30)
    assert allowance.grant(30) == Grant(4, False, 8)
