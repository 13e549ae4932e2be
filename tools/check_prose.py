"""Check that a change edits only prose: `python tools/check_prose.py REVISION [REVISION]`.

Prints the name of each file whose code differs between the two revisions, apart from docstrings, comments and layout.
By default the second revision is the working tree.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A comment of C++, or a literal. Literals are matched because they may contain characters that begin a comment.
COMMENT_OR_LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


class WithoutProse(ast.NodeTransformer):
    """Drops each statement that is only a string: docstrings of modules, classes, functions and attributes."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        alone = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if alone else node


def code(name: str, text: str) -> str:
    """Return the code of a file in a normal form: files that differ only in prose and layout have equal forms."""
    if name.endswith(".py"):
        return ast.dump(WithoutProse().visit(ast.parse(text)))
    found = COMMENT_OR_LITERAL.sub(lambda one: " " if one[0][0] == "/" else one[0], text)
    return " ".join(re.sub(r"([^\w\s])", r" \1 ", found).split())


def text_at(revision: str | None, name: str) -> str:
    return (ROOT / name).read_text() if revision is None else git("show", f"{revision}:{name}")


def differing(old: str, new: str | None) -> list[str]:
    """Return the names of Python and C++ files whose code differs, or which were added or removed."""
    revisions = [old] if new is None else [old, new]
    lines = git("diff", "--name-status", "--no-renames", *revisions, "--", "*.py", "*.cc", "*.h").splitlines()
    found = []
    for status, name in (line.split("\t") for line in lines):
        if status != "M" or code(name, text_at(old, name)) != code(name, text_at(new, name)):
            found.append(name)
    return found


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    found = differing(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None)
    for name in found:
        print(f"{name}: its code differs")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
