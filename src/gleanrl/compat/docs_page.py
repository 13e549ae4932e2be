"""Generator of `docs/names.md`, the page about names of other releases: ``python -m gleanrl.compat.docs_page``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gleanrl.compat.names import ALIASES, KEYWORDS, MODULES, UNSERVED_KEYWORDS
from gleanrl.compat.unserved import UNSERVED, UNSERVED_MEMBERS, UNSERVED_MODULES

_INTRODUCTION = """# Names in other releases

Programs for TorchRL 0.5 to 0.14 use these names, paths and keywords; each works here after the change of the import
root. The documentation uses the names on the right.
"""


def page() -> str:
    """Return the page, as Markdown."""
    aliases = ((row.module, row.name, row.target.rpartition(":")[2], row.releases) for row in ALIASES)
    keywords = (
        (name, before, now) for name, words in sorted(KEYWORDS.items()) for before, now in words.items()
    )
    unserved = (
        (name, keyword, row.why)
        for name, words in UNSERVED_KEYWORDS.items()
        for keyword, row in words.items()
    )
    paths = ((path, ", ".join(sources)) for path, sources in MODULES.items() if not path.endswith("__"))
    parts = [
        _INTRODUCTION,
        "## Second names\n",
        _table(("in", "name", "here", "releases"), (row for row in aliases if not row[1].startswith("_"))),
        "## Module paths\n",
        _table(("path", "re-exports"), paths),
        "## Keywords\n",
        _table(("of", "keyword", "here"), keywords),
        "## Keywords that aren't served\n",
        "A value that turns the feature off (usually None) is accepted. Any other value raises an error with this "
        "advice.\n",
        _table(("of", "keyword", "what to use"), unserved, plain_last=True),
        "## Members that aren't served\n",
        "Methods, attributes and arguments of methods. Reading a member raises an AttributeError with this advice.\n",
        _table(("of", "members", "what to use"), UNSERVED_MEMBERS, plain_last=True),
        "## Names that aren't served\n",
        "`hasattr(module, name)` is False, and importing one raises an ImportError with this advice. If a program\n"
        "imports such a name without using it, remove the import, or import the name from TorchRL.\n",
        _table(("in", "names", "what to use"), UNSERVED, plain_last=True),
        "## Modules that aren't served\n",
        _table(("in", "modules", "what to use"), UNSERVED_MODULES, plain_last=True),
    ]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], plain_last: bool = False) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [f"`{cell}`" for cell in row]
        if plain_last:
            cells[-1] = row[-1]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
