"""The report of a takeover attributes the program's time to its calls."""

import re

from gleanrl._takeover.report import Times, _location, _room


def test_modules_are_assigned_to_report_rows():
    assert _room("gleanrl.collectors.single") == "collectors"
    assert _room("torchrl.objectives.ppo") == "losses" and _room("torchrl.modules.models") == "modules"
    assert _room("__main__") == _room("torchrl_tricks") == _room("numpy") == "the program's own code"
    assert _room("gleanrl._process.worker_pool") == "waiting for processes"
    assert _room("runpy") == _room("gleanrl.__main__") == ""


class Stack:
    """Imitates a stack of frames, outermost first, with the attributes that `Times` reads."""

    def __init__(self, *modules):
        self.f_globals = {"__name__": modules[-1]}
        self.f_back = Stack(*modules[:-1]) if modules[1:] else None


def test_time_is_attributed_to_the_called_and_the_running_module():
    inside = Stack(
        "runpy", "gleanrl.__main__", "__main__", "gleanrl.collectors.single", "__main__", "torch.nn"
    )
    assert _location(inside) == ("collectors", "modules")
    assert _location(Stack("__main__", "helpers")) == ("the program's own code",) * 2


def test_a_table_adds_up():
    times = Times()
    times.start()
    total = sum(k * k for k in range(2_000_000))
    times.stop()
    assert total > 0
    total, *parts = [line for line in times.table().splitlines() if not line.startswith("    ")]
    seconds = [float(re.search(r" ([0-9.]+) s", line)[1]) for line in (total, *parts)]
    assert abs(sum(seconds[1:]) - seconds[0]) < 0.1 and parts


def test_a_main_thread_without_a_frame_is_the_programs_own_time():
    times = Times()
    times._main = -1  # the id of a thread that has ended
    times.start()
    while not times._spent:
        pass
    times.stop()
    assert list(times._spent) == [("the program's own code",) * 2]
