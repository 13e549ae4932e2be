"""The documentation is right: its examples run, and the tests, links and pages that it names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
TEST = re.compile(r"tests/[\w/]+\.py::[\w:]+")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[tuple[int, str]]:
    """Return each block of Python and the line at which it begins."""
    return [(text[: found.start(1)].count("\n"), found.group(1)) for found in BLOCK.finditer(text)]


def run(text: str, name: str) -> None:
    """Run the blocks of a page in order, in one namespace; errors show the page's line numbers."""
    namespace = {"__name__": name}
    for line, source in blocks(text):
        exec(compile("\n" * line + source, name, "exec"), namespace)


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


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p.read_text())], ids=page_name)
def test_every_example_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run(page.read_text(), page_name(page))


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


def test_a_false_page_is_found(tmp_path):
    with pytest.raises(NameError):
        run("```python\na = 1\n```\ntext\n```python\nassert a == 1\nb\n```\n", "page")
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
