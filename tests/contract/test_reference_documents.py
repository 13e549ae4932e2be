"""The code of the reference documents runs under this library's name and prints the documented layouts.

The documents are not part of this repository: `GLEANRL_REFERENCE` names the folder that holds them. They are web pages
saved as text, so the tests find code by its form. 000 has bare lines without indentation. 001 has each doctest in one
line. 002 has a doctest without indentation. 003 has intact doctests.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from gleanrl.envs import GymWrapper
from tests.contract.helpers import check_stream, snapshot
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv

FOLDER = os.environ.get("GLEANRL_REFERENCE")
pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(
        not FOLDER, reason="GLEANRL_REFERENCE does not name the folder of the reference documents"
    ),
]
Layout = dict[tuple[str, ...], tuple[Any, ...]]
FIELD = re.compile(
    r"(?P<name>\w+): Tensor\(shape=torch\.Size\(\[(?P<shape>[\d, ]*)\]\), device=(?P<device>\w+), "
    r"dtype=torch\.(?P<dtype>\w+), is_shared=(?P<shared>\w+)\)"
    r"|(?:(?P<nested>\w+): )?TensorDict\( ?fields=\{"
    r"|\}, batch_size=torch\.Size\(\[(?P<size>[\d, ]*)\]\), device=(?P<place>\w+), is_shared=(?P<held>\w+)\)"
)


def document(number: str) -> str:
    """Return the text of a document with the other library's name replaced."""
    (path,) = Path(str(FOLDER)).glob(f"{number}_*.txt")
    return path.read_text(encoding="utf-8").replace("torchrl", "gleanrl")


def parse_layout(printed: str) -> Layout:
    """Return {path: (shape, dtype, device)} of leaves, {path: (batch_size, device)} of tensordicts.

    `printed` begins with a printed TensorDict; the text after it is ignored.
    """
    text = re.sub(r"\s+", " ", printed)
    text = text[text.index("TensorDict(") :]
    layout: Layout = {}
    path: list[str] = []
    depth = 0
    for match in FIELD.finditer(text):
        if match["name"]:
            layout[(*path, match["name"])] = (match["shape"], match["dtype"], match["device"])
        elif match["place"]:
            depth -= 1
            layout[tuple(path)] = (match["size"], match["place"])
            if depth == 0:
                return layout
            path.pop()
        else:
            depth += 1
            if match["nested"]:
                path.append(match["nested"])
    raise AssertionError(f"no complete printed TensorDict in {printed[:200]!r}")


def print_out(data: TensorDictBase) -> str:
    """Return the long form of `print(data)`."""
    with tensordict.set_printoptions(compact=False):
        return repr(data)


def printed_layouts(text: str) -> list[Layout]:
    """Return the layouts of all TensorDicts that a document prints, in order."""
    return [
        parse_layout(text[match.start() :]) for match in re.finditer(r"(?<!: )TensorDict\(\s*fields=", text)
    ]


def indent(lines: list[str]) -> str:
    """Restore lost indentation: a line that ends in a colon opens a block, `break` ends all blocks."""
    depth, out, brackets = 0, [], 0
    for line in lines:
        out.append("    " * depth + line)
        brackets += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
        if line.endswith(":") and not brackets:
            depth += 1
        elif line == "break":
            depth = 0
    return "\n".join(out)


def tutorial_code(text: str) -> str:
    """Return the code of 000: all lines that are statements, and the body of each block up to its `break`."""
    statement = re.compile(
        r"import \w+$|from [\w.]+ import [\w, ]+$|[a-z_]+(\.\w+)*\([^ ].*\)$|[a-z_]+ = [\w.]+\(.*\)$"
        r"|for \w+ in \w+:$|break$|assert len\(.*$"
    )
    lines = text[: text.index("Next steps")].splitlines()
    return indent(
        [line for line in lines if statement.match(line) and not line.startswith(("tensor(", "warnings."))]
    )


def running_doctests(text: str) -> list[str]:
    """Return the doctests of 001, split at their prompts and without output. Each doctest is one line there."""
    blocks = []
    for line in text.splitlines():
        if not line.lstrip().startswith(">>> ") and " >>> " not in line:
            continue
        statements: list[list[str]] = []
        for prompt, code in re.findall(r"(>>>|\.\.\.) (.*?)(?= (?:>>>|\.\.\.) |$)", line):
            code = re.split(r"(?<=break) TensorDict\(", code)[0].strip()
            if prompt == ">>>":
                statements.append([])
            statements[-1].append(code)
        blocks.append("\n".join(indent(statement) for statement in statements))
    return blocks


def first_doctest(text: str) -> str:
    """Return the first block of prompted lines, without prompts and with its indentation restored."""
    lines = text[text.index(">>> ") :].splitlines()
    block: list[str] = []
    for line in lines:
        match = re.match(r"(?:>>>|\.\.\.) ?(.*)", line)
        if not match:
            break
        block.append(match[1].strip())
    return indent(block)


def run(code: str, names: dict[str, Any]) -> list[Any]:
    """Run `code` on `names` and return the printed values."""
    shown: list[Any] = []
    names["print"] = lambda *values: shown.extend(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, "<reference document>", "exec"), names)
    return shown


def test_the_tutorial_runs_and_prints_its_layouts() -> None:
    """000: collect, inspect, store, sample; batch and sample have the printed layouts, field by field."""
    text = document("000")
    code = tutorial_code(text)
    for part in (
        "env.set_seed(0)",
        "buffer.extend(data)",
        "assert len(buffer)",
        "    break",
    ):
        assert part in code, f"the extraction lost {part!r}:\n{code}"
    names: dict[str, Any] = {}
    data, ids, sample = run(code, names)
    batch_layout, sample_layout = printed_layouts(text)
    assert parse_layout(print_out(data)) == batch_layout
    assert parse_layout(print_out(sample)) == sample_layout
    assert torch.equal(ids, data["collector", "traj_ids"])
    assert ids[0] == 0 and set(ids.diff().tolist()) == {0, 1}, "ids count up by one from zero"
    assert torch.equal(ids.diff() != 0, data["next", "done"][:-1, 0])
    assert set(sample.keys(True, True)) == set(data.keys(True, True))
    stored = {tuple(row) for row in data["observation"].tolist()}
    assert {tuple(row) for row in sample["observation"].tolist()} <= stored


def test_the_class_references_example_runs_and_prints_its_layout() -> None:
    """001: the example of SyncDataCollector. Its print lacks `terminated`, whose layout comes from 000."""
    text = document("001")
    example, names_example, *_ = running_doctests(text)
    names: dict[str, Any] = {"SyncDataCollector": SyncDataCollector}
    (data,) = run(example, names)
    (expected,) = printed_layouts(text)
    for path in ((), ("next",)):
        expected.setdefault((*path, "terminated"), expected[(*path, "truncated")])
    assert parse_layout(print_out(data)) == expected
    assert int(data["next", "step_count"].max()) == 50
    assert torch.equal(data["next", "truncated"], data["next", "step_count"] == 50)
    assert "collector" not in names
    names_example = names_example.strip()
    assert names_example == 'assert data.names[-1] == "time"'
    run(names_example, names)


SCRIPT = Script(seed=51)


@pytest.mark.parametrize("number", ["002", "003"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_buffer_with_a_flattening_transform_holds_transitions(number: str, shape: tuple[int, ...]) -> None:
    """002 and 003: a buffer with `transform=lambda data: data.reshape(-1)` holds transitions."""
    code = first_doctest(document(number))
    assert "reshape(-1)" in code and code.count("\n") == 4
    env = CountingEnv(SCRIPT, shape) if shape else GymWrapper(OracleEnv(script=SCRIPT))
    kept: list[TensorDict] = []

    def keep(batch: TensorDict) -> TensorDict:
        kept.append(batch.clone())
        return batch

    collector = SyncDataCollector(env, None, frames_per_batch=12, total_frames=48, postproc=keep)
    names = {
        "N": 100,
        "collector": collector,
        "ReplayBuffer": ReplayBuffer,
        "LazyTensorStorage": LazyTensorStorage,
    }
    run(code, names)
    check_stream(kept, SCRIPT)
    memory = names["memory"]
    assert len(memory) == 48
    held = memory[:]
    assert held.batch_size == torch.Size([48])
    collected = torch.cat([batch.reshape(-1) for batch in kept])
    frozen = snapshot(collected)
    assert all(torch.equal(held[key], frozen[key]) for key in frozen)
    sample = memory.sample(16)
    assert sample.batch_size == torch.Size([16])
    steps = sample["observation"][:, 2]
    assert torch.equal(sample["next", "observation"][:, 2], steps + 1)


def test_documented_slices_of_a_single_environment_run() -> None:
    """003: the buffer of slices on one environment. Its endless loop ends after a few batches."""
    text = document("003")
    start = text.index(">>> # Single environment")
    code = first_doctest(text[start : text.index(">>> # Batched environments")])
    assert "SliceSampler(num_slices=4, trajectory_key=" in code
    env = GymWrapper(OracleEnv(script=SCRIPT))
    names: dict[str, Any] = {
        "N": 60,
        "env": env,
        "policy": None,
        "ReplayBuffer": ReplayBuffer,
        "LazyTensorStorage": LazyTensorStorage,
        "SliceSampler": SliceSampler,
        "SyncDataCollector": lambda *args, **kwargs: itertools.islice(SyncDataCollector(*args, **kwargs), 3),
    }
    run(code, names)
    memory = names["memory"]
    assert len(memory) == 60, "the third batch of 60 replaced the others"
    for _ in range(20):
        slices = memory.sample(8).view(4, 2)
        ids, steps = slices["collector", "traj_ids"], slices["observation"][..., 2]
        assert torch.equal(ids[:, 0], ids[:, 1]) and torch.equal(steps[:, 0] + 1, steps[:, 1])
