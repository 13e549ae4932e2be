"""Rename classes of the package by the table `tools/names.tsv`, in all code and pages.

    python tools/rename_names.py            # in a clean checkout of the new layout; then run `make format`

Each line of the table has a module of the old layout, a class and its new name. Code changes in files that define the
class or import it from that module. Comments, docstrings and pages change where they have the class in backticks.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "gleanrl"
MOVED = PACKAGE / "compat" / "moved.py"
ROWS = [
    line.split("\t")
    for line in (ROOT / "tools" / "names.tsv").read_text().splitlines()
    if line and not line.startswith("#")
]


def present_module(old: str) -> str:
    """Return the present module of the classes of a module of the old layout."""
    return moved().get(f"gleanrl.{old}", f"gleanrl.{old}")


@cache
def moved() -> dict[str, str]:
    """Return the new module of each module that has moved."""
    namespace: dict[str, dict[str, str]] = {}
    exec(MOVED.read_text(), namespace)
    return namespace["MOVED"]


def module_of(path: Path) -> str:
    """Return the dotted name of a file."""
    base = ROOT / "src" if path.is_relative_to(ROOT / "src") else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def bindings(
    path: Path, tree: ast.Module, table: dict[tuple[str, str], str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the new names of renamed classes that a file defines or imports, and the modules that it imports."""
    own = module_of(path)
    classes = {
        node.name: table[own, node.name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and (own, node.name) in table
    }
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (node.module, alias.name) in table:
                    classes[alias.name] = table[node.module, alias.name]
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            modules |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return classes, modules


def renamed(path: Path, table: dict[tuple[str, str], str]) -> str:
    """Return the source of a file with the new names."""
    source = path.read_text()
    classes, modules = bindings(path, ast.parse(source), table)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines(keepends=True)
    changes: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    for place, token in enumerate(tokens):
        text = token.string
        new = text
        if token.type == tokenize.NAME:
            after_dot = place > 0 and tokens[place - 1].string == "."
            if not after_dot and text in classes:
                new = classes[text]
            elif after_dot and tokens[place - 2].type == tokenize.NAME:
                new = table.get((modules.get(tokens[place - 2].string, ""), text), text)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            if text.strip("\"'") in classes and "\n" not in text:
                new = text.replace(text.strip("\"'"), classes[text.strip("\"'")])
            else:
                new = re.sub(r"`(\w+)(?=[`.(])", lambda found: "`" + classes.get(found[1], found[1]), text)
        if new != text:
            changes.append((token.start, token.end, new))
    for (row, column), (last, end), new in reversed(changes):
        lines[row - 1 : last] = [lines[row - 1][:column] + new + lines[last - 1][end:]]
    return "".join(lines)


def main() -> None:
    """Write the new names."""
    table = {(present_module(old), name): new for old, name, new in ROWS}
    defined = {
        (module_of(path), node.name)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    if set(table) - defined:
        sys.exit(f"names.tsv: expected classes of the package, got {sorted(set(table) - defined)}")
    names = {name for _, name in defined}
    taken = {new for new in table.values() if new in names or list(table.values()).count(new) > 1}
    if taken:
        sys.exit(f"names.tsv: expected unused new names, got {sorted(taken)}")
    written = {
        path: renamed(path, table)
        for top in ("src/gleanrl", "tests", "benchmarks", "examples")
        for path in (ROOT / top).rglob("*.py")
    }
    times = Counter(name for _, name in defined)
    alone = {name: new for (_, name), new in table.items() if times[name] == 1}
    for path in [*(ROOT / "docs").rglob("*.md")]:
        written[path] = re.sub(
            r"`(\w+)(?=[`.(])", lambda found: "`" + alone.get(found[1], found[1]), path.read_text()
        )
    for path, text in written.items():
        if path.read_text() != text:
            path.write_text(text)
    rows = "".join(f'    "gleanrl.{old}.{name}": "{new}",\n' for old, name, new in sorted(ROWS))
    MOVED.write_text(
        MOVED.read_text()
        + "\nRENAMED: dict[str, str] = {\n"
        + rows
        + '}\n"""Class at its old path -> its new name."""\n'
    )
    subprocess.run([sys.executable, "-m", "ruff", "check", "--fix", "--quiet", "."], cwd=ROOT, check=False)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", "."], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
