"""The documentation is right: its examples run, and the tests, links and pages that it names exist."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
OPTIONAL = {"ale_py", "minari", "mujoco", "ray", "stable_baselines3", "tensorboard", "torchrl", "wandb"}
"""Packages that an example may need and that an environment of the tests may lack."""
WIDTH = 88
ALL = float(os.environ.get("GLEANRL_CHAOS", 0)) >= 1
"""Whether the examples run that start many processes."""
TEST = re.compile(r"tests/[\w/]+\.py::[\w:]+")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(text: str) -> list[tuple[int, str, str]]:
    """Return the line of each fenced block, its language and its content."""
    return [(text[: found.start(2)].count("\n"), *found.groups()) for found in BLOCK.finditer(text)]


def examples(page: Path) -> list[Any]:
    """Return the blocks of Python of a page as parameters of a test."""
    return [
        pytest.param(page, line, source, id=f"{page_name(page)}:{line}")
        for line, language, source in fences(page.read_text())
        if language.startswith("py")
    ]


def run(source: str, line: int, name: str) -> None:
    """Run one block in a new namespace, as its readers would; errors show the page's line numbers.

    Skip it if one of the optional packages is absent.
    """
    try:
        exec(compile("\n" * line + source, name, "exec"), {"__name__": name})
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")


@cache
def body_of(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text()).body if file.exists() else []


def has_test(path: str, names: list[str]) -> bool:
    """Return whether the file defines the test: a function, a method of a class, or a test class."""
    body = body_of(ROOT / path)
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and node.name == name
            and name.lower().startswith("test")
        ]
        if not found:
            return False
        body = found[0].body
    return True


def missing_tests(text: str) -> list[str]:
    named = [found.split("::") for found in TEST.findall(text)]
    return ["::".join(parts) for parts in named if not has_test(parts[0], parts[1:])]


def rows(text: str) -> list[str]:
    """Return the rows of all tables, without header rows and separators."""
    lines = text.splitlines()
    return [
        line
        for k, line in enumerate(lines)
        if line.startswith("|")
        and not line.startswith("| ---")
        and not (k + 1 < len(lines) and lines[k + 1].startswith("| ---"))
    ]


def broken_links(text: str, folder: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    return [target for target in targets if not (folder / target).exists()]


EXAMPLES = [example for page in PAGES for example in examples(page)]
ON_RAY = [example for example in EXAMPLES if "Ray" in example.values[2]]


@pytest.mark.parametrize(("page", "line", "source"), [e for e in EXAMPLES if e not in ON_RAY])
def test_every_example_runs_alone(page, line, source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(source, line, page_name(page))


@pytest.mark.skipif(not ALL, reason="starts Ray actors for a minute: make chaos runs it")
@pytest.mark.parametrize(("page", "line", "source"), ON_RAY)
def test_every_example_on_ray_runs_alone(page, line, source, tmp_path, monkeypatch, capsys, ray_session):
    monkeypatch.chdir(tmp_path)
    run(source, line, page_name(page))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=page_name)
def test_code_fits_the_column(page):
    wide = [
        (line + k, row)
        for line, _, source in fences(page.read_text())
        for k, row in enumerate(source.splitlines(), 1)
        if len(row) > WIDTH
    ]
    assert wide == []


def test_the_tests_that_the_pitfalls_name_exist():
    text = (DOCS / "pitfalls.md").read_text()
    assert missing_tests(text) == []
    assert [row for row in rows(text.partition("## Not yet")[0]) if not TEST.search(row)] == []


@pytest.mark.parametrize("page", ["other-releases.md", "reliability.md"])
def test_every_row_has_its_tests(page):
    text = (DOCS / page).read_text()
    assert missing_tests(text) == []
    for row in rows(text):
        files = re.findall(r"tests/[\w/]+\.py", row)
        assert files and all((ROOT / file).exists() for file in files), row


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    assert broken_links(page.read_text(), page.parent) == []


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^\s*- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}


@pytest.mark.parametrize(
    "word",
    ["framestack", "GAE", "SB3", "CleanRL", "Minari", "D4RL", "LeRobot", "wandb", "Jupyter", "Windows"],
)
def test_readers_find_the_words_of_other_libraries(word):
    """The search of the site matches whole words."""
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    assert [page.name for page in DOCS.glob("*.md") if pattern.search(page.read_text())]


def test_the_gallery_shows_every_example():
    shown = set(re.findall(r"`(\w+\.py)`", (DOCS / "examples.md").read_text()))
    assert shown == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_a_false_page_is_found(tmp_path):
    text = "```python\na = 1\n```\ntext\n```py\nassert a == 1\n```\n"
    first, second = fences(text)
    run(first[2], first[0], "page")
    with pytest.raises(NameError):
        run(second[2], second[0], "page")
    with pytest.raises(ModuleNotFoundError):
        run("import nowhere", 0, "page")
    here = "tests/docs/test_docs.py::"
    names = [
        "test_a_false_page_is_found",
        "TestNothing::test_it",
        "rows",
        "test_a_false_page_is_found::test_x",
    ]
    assert missing_tests("\n".join(here + name for name in names)) == [here + name for name in names[1:]]
    assert missing_tests("tests/nowhere.py::test_it") == ["tests/nowhere.py::test_it"]
    assert rows("| a |\n| --- |\n| b |\n") == ["| b |"]
    (tmp_path / "there.md").touch()
    assert broken_links("[x](there.md#part) [y](gone.md) [z](https://a.b/c)", tmp_path) == ["gone.md"]
