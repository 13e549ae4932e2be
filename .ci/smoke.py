"""Test an installed wheel: run README's program, then collect, store, sample and show.

Run it in a folder from which the sources can't be imported.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import torch

import gleanrl
from gleanrl.__main__ import main
from gleanrl._arrays import native
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv, RandomPolicy

place = Path(native.__file__)
assert "site-packages" in place.parts, f"gleanrl comes from {place}, not from the wheel"

readme = (Path(__file__).parents[1] / "README.md").read_text()
program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
assert program, "expected a program in README.md, found none"
names: dict[str, Any] = {}
exec(compile(program.group(1), "README.md", "exec"), names)
assert len(names["buffer"]) == 1000 and names["sample"].batch_size == torch.Size([64])

environment = GymEnv("CartPole-v1")
collector = SyncDataCollector(
    environment, RandomPolicy(environment.action_spec), frames_per_batch=100, total_frames=300, progress=True
)
for storage in (LazyTensorStorage(1000), LazyMemmapStorage(1000)):
    buffer = ReplayBuffer(storage=storage, batch_size=32)
    collector.reset()
    batch = next(iter(collector))
    buffer.extend(batch)
    sample = buffer.sample()
    assert len(buffer) == 100 and sample.batch_size == torch.Size([32])
    rows = (sample["observation"][:, None] == batch["observation"][None]).all(-1)
    assert bool(rows.any(1).all()), "expected only collected observations in the sample, got another one"
collector.shutdown()
with tempfile.TemporaryDirectory() as folder:
    buffer.dumps(f"{folder}/run")
    main(["show", f"{folder}/run", "--html", f"{folder}/run.html"])
    page = Path(f"{folder}/run.html").read_text()
    assert "uPlot" in page and "STEPS.episodes" in page, "expected a page with its scripts"
print(f"gleanrl {gleanrl.__version__}: the wheel runs README's program, collects, stores, samples and shows")
