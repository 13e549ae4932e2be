"""Typical user programs reach the same return on TorchRL, under takeover, and ported (`make test-programs`)."""

import pytest

from tests.programs.runs import HERE, MOST_S, PROGRAMS, WAYS, has_core, outcome

pytest.importorskip("torchrl")

pytestmark = pytest.mark.timeout(MOST_S + 20)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_stated_return_is_reached(program, way, tmp_path):
    if way == "torchrl" and program.needs_core and not has_core():
        pytest.skip("torchrl's compiled core is for another release of torch")
    assert outcome(program, way, tmp_path).value >= program.reaches


def test_every_program_is_run():
    others = {"__init__", "runs", "test_programs"}
    assert {path.stem for path in HERE.glob("*.py")} - others == {
        program.name for program in PROGRAMS.values()
    }
