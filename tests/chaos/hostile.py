"""A program that loads damaged checkpoints: `python -m tests.chaos.hostile FOLDER MUTATIONS FLIPS SEED`.

It loads each checkpoint into a buffer like the saved one. Either the load raises a typed error and leaves the buffer
unchanged, or the buffer is usable. An audit hook reports code that runs and files that are opened. Memory is limited.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from gleanrl import Checkpoint
from gleanrl._checkpoint.row_segments import SegmentLayout
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper
from gleanrl.errors import CorruptCheckpointError, GleanError
from tests._checkpoint.specimens import SPECIMENS, as_values, filled
from tests.chaos.mutations import SIGNED, UNSIGNED, Files, flip_a_bit

MEMORY_BYTES = 64 << 20
LONGEST_S = 1.0
FORBIDDEN = (
    *("exec", "compile", "import", "pickle.find_class", "os.system", "os.exec", "os.fork", "os.posix_spawn"),
    *(
        "subprocess.Popen",
        "ctypes.dlopen",
        "ctypes.dlsym",
        "socket.connect",
        "marshal.loads",
        "os.remove",
        "os.rename",
    ),
)


class Training:
    """A collector that is saved in mid-episode; the attributes of its environment are its state.

    Each attribute must keep its kind of value. All types of `NUMBERS` may replace each other, and None may replace
    data.
    """

    def __init__(self) -> None:
        self._simulator = gymnasium.make("CartPole-v1")
        self._collector = SyncDataCollector(GymWrapper(self._simulator), frames_per_batch=4, total_frames=-1)
        self._collector.next()
        self._checkpoint = Checkpoint(collector=self._collector)
        self.dumps = self._checkpoint.save

    def loads(self, path: Path) -> None:
        before = self._attributes()
        # An attribute that its class also defines may disappear, because the class's value replaces it.
        classes = {(type(env).__name__, name) for env, name in self._named() if hasattr(type(env), name)}
        self._checkpoint.load(path)
        after = self._attributes()
        for place, now in after.items():
            was = before.get(place)
            known = now is None or was is None or type(now) is type(was)
            assert known or (isinstance(now, NUMBERS) and isinstance(was, NUMBERS)), (
                f"{place}: {was!r} is {now!r}"
            )
        gone = [
            was
            for place, was in before.items()
            if after.get(place) is None and was is not None and (place in after or place not in classes)
        ]
        assert all(isinstance(was, (*NUMBERS, str, dict, np.random.Generator)) for was in gone), gone
        assert not any(callable(getattr(type(env), name, None)) for env, name in self._named()), (
            "a method is hidden"
        )

    def state_dict(self) -> dict[str, Any]:
        return self._collector.state_dict()

    def sample(self) -> None:
        self._collector.next()

    def _named(self) -> list[tuple[Any, str]]:
        found, env = [], self._simulator
        while True:
            found += [(env, name) for name in vars(env)]
            if env is self._simulator.unwrapped:
                return found
            env = env.env

    def _attributes(self) -> dict[tuple[str, str], Any]:
        return {(type(env).__name__, name): getattr(env, name) for env, name in self._named()}


NUMBERS = (bool, int, float, complex, np.generic, np.ndarray, tuple, list, torch.Tensor)
MADE: dict[str, Callable[[], Any]] = {
    **{name: make for name, make in SPECIMENS.items() if name != "mapped"},  # it has private files
    "training": Training,
}
NAMES = tuple(MADE)


def made_and_used(name: str) -> Any:
    """Return a specimen to be saved."""
    return Training() if name == "training" else filled(name)


class Watch:
    """The audit events that Python reports during a load.

    Args:
        below: the folder in which files may be opened.
    """

    def __init__(self, below: Path) -> None:
        # The library itself reads the amount of free memory from /proc and /sys.
        self._allowed, self._is_on = (f"{below}/", "/proc/", "/sys/fs/cgroup/"), False
        self.events: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event in FORBIDDEN or (event == "open" and not str(arguments[0]).startswith(self._allowed)):
            self.events.append(f"{event} {arguments!r:.200}")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record events within a ``with`` block."""
        self.events.clear()
        gc.disable()  # finalizers of earlier targets may print tracebacks, which opens sources
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            gc.enable()


class Drill:
    """Loads checkpoints of all specimens.

    Args:
        folder: folder of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watch = Watch(folder)
        self._targets: dict[str, Any] = {}  # the objects that load the checkpoints
        self._places: dict[str, Path] = {}
        self._files: dict[str, Files] = {}
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        folder.mkdir()
        repr(torch.ones(2))  # imports the modules that messages need
        for name in NAMES:
            made = made_and_used(name)
            made.dumps(folder / name)
            (self._places[name],) = (folder / name).glob("ckpt-*")
            self._files[name] = {p.name: p.read_bytes() for p in self._places[name].iterdir()}
            self._targets[name] = MADE[name]()
            self._targets[name].loads(folder / name)
            self._use(name)
            with self._watch.on():  # the first load above made all late imports
                self._targets[name].loads(folder / name)
        assert not self._watch.events, self._watch.events

    def run(self, draw: random.Random, mutations: Any, name: str) -> str:
        """Mutate a specimen's checkpoint and load it; return the outcome."""
        mutation = draw.choice(mutations)
        files = dict(self._files[name])
        mutation(draw, files)
        changed = [key for key in self._files[name] if files.get(key) is not self._files[name][key]]
        for key in changed:
            if key in files:
                (self._places[name] / key).write_bytes(files[key])
            else:
                (self._places[name] / key).unlink()
        same = all(files.get(key) == data for key, data in self._files[name].items())
        try:
            outcome = self._loaded(name, mutation in SIGNED or same, draw.random() < 0.1)
        finally:
            for key in changed:
                (self._places[name] / key).write_bytes(self._files[name][key])
        self.outcomes[f"{mutation.__name__}: {outcome}"] += 1
        return outcome

    def _loaded(self, name: str, may_load: bool, look: bool) -> str:
        target = self._targets[name]
        before = digest(target) if look else 0
        begin = time.process_time()
        try:
            with self._watch.on():
                target.loads(self._folder / name)
        except GleanError as error:
            assert not self._watch.events, self._watch.events
            assert not look or digest(target) == before, f"changed, though {error!r}"
            assert may_load or isinstance(error, CorruptCheckpointError), repr(error)
            return type(error).__name__
        finally:
            self.longest_s = max(self.longest_s, time.process_time() - begin)
        assert not self._watch.events, self._watch.events
        assert may_load, "damage wasn't found"
        try:
            return f"loaded, {self._use(name)}"
        finally:
            self._targets[name] = MADE[name]()  # an intact, empty one for the next load

    def _use(self, name: str) -> str:
        """Use a loaded buffer. Its records may cause errors, but the process must survive."""
        target = self._targets[name]
        try:
            if name == "storages":
                target[0].get(range(len(target[0])))
            else:
                target.sample()
        except Exception as error:
            return f"then {type(error).__name__}"
        return "used"


def digest(target: Any) -> int:
    """Return a hash that distinguishes states."""
    return hash(repr(as_values(target.state_dict())))


def main(folder: Path, mutations: int, flips: int, seed: int) -> dict[str, Any]:
    """Load mutated and flipped checkpoints, `mutations` and `flips` of them; return the outcomes."""
    # The rows of each specimen are in four segments, and two segments share a file.
    SegmentLayout.fitting = classmethod(  # type: ignore[assignment, method-assign]
        lambda cls, fields, rows, capacity: cls(tuple(fields), rows, 2, 2)
    )
    drill = Drill(folder)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    wrong: list[str] = []
    for number in range(mutations + flips):
        draw = random.Random(f"{seed} {number}")
        name = NAMES[number % len(NAMES)]
        try:
            drill.run(draw, (flip_a_bit,) if number >= mutations else SIGNED * 4 + UNSIGNED, name)
        except Exception as error:
            wrong.append(f"{number} {name}: {error!r:.200} at {traceback.format_tb(error.__traceback__)[-1]}")
    return {"outcomes": dict(drill.outcomes.most_common()), "longest": drill.longest_s, "wrong": wrong[:20]}


if __name__ == "__main__":
    faulthandler.enable()
    warnings.simplefilter("ignore")  # for example of entries that aren't stored
    torch.set_num_threads(1)
    arguments = [int(argument) for argument in sys.argv[2:]]
    print(json.dumps(main(Path(sys.argv[1]), *arguments)))
