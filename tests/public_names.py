"""The public names: all modules and names that README, pages, examples and `gleanrl.testing` mention.

`python -m tests.public_names` adds the names mentioned today to `public_names.txt`. Only a person removes names.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from inspect import isclass
from pathlib import Path
from types import ModuleType

from gleanrl.compat.names import ALIASES, MODULES

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".txt")
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in DOCS if page.name != "names.md")]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
TESTING = sorted((ROOT / "src" / "gleanrl" / "testing").glob("*.py"))

DOTTED = re.compile(r"\bgleanrl(?:\.\w+)+")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
MEMBERS = re.compile(r"^::: ([\w.]+)\n +options:\n +members: \[(.*)\]$", re.M)
ENTRY = re.compile(r"^::: ([\w.]+)$", re.M)
NOT_IMPORTED = ("gleanrl.takeover",)
"""Modules whose import changes the process."""


def listed() -> list[str]:
    """Return the names of the list."""
    return LIST.read_text().split() if LIST.exists() else []


def imported(source: str) -> Iterator[str]:
    """Yield the dotted names that import statements take from the package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gleanrl":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def in_page(text: str) -> set[str]:
    """Return the names in a page: dotted names, imported names, and selected members of an API entry."""
    names = set(DOTTED.findall(text))
    names |= {name for block in BLOCK.findall(text) for name in imported(block)}
    for owner, members in MEMBERS.findall(text):
        names |= {f"{owner}.{member}" for member in members.split(", ")}
    return names


def resolved(name: str) -> object:
    """Return the module or the attribute that a dotted name denotes, resolved as an import statement does."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def members(name: str, described: bool) -> set[str]:
    """Return the names in a module's ``__all__``. A module without it lists its classes, if a page describes it."""
    module = resolved(name)
    found = set(getattr(module, "__all__", ()))
    if described and isinstance(module, ModuleType) and not found:
        found = {
            key
            for key, value in vars(module).items()
            if isclass(value) and value.__module__ == module.__name__
        }
    return {f"{name}.{member}" for member in found if not member.startswith("_")}


def mentioned() -> set[str]:
    """Return all mentioned names, including the names of mentioned modules."""
    texts = [page.read_text() for page in PAGES]
    names = set().union(*map(in_page, texts), *(imported(file.read_text()) for file in EXAMPLES))
    names |= {name for file in TESTING for name in DOTTED.findall(docstring_of(file))}
    names |= {f"{alias.module}.{alias.name}" for alias in ALIASES} | set(MODULES) | {"gleanrl.testing"}
    described = {name for text in texts for name in ENTRY.findall(text)}
    return names.union(*(members(name, name in described) for name in names if name not in NOT_IMPORTED))


def docstring_of(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text())) or ""


def main() -> None:
    LIST.write_text("".join(f"{name}\n" for name in sorted({*listed(), *mentioned()})))


if __name__ == "__main__":
    main()
