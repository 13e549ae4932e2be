"""Move and merge the modules of `src/gleanrl` by the table `tools/modules.tsv`, with their tests and all references.

    python tools/move_modules.py            # in a clean checkout of the old layout; then run `make format`

Each line of the table has an old path and a new path under `src/gleanrl`. Modules with the same new path are merged.
The merged module has all imports first, then the bodies, each after the modules that it imports. If the table lacks a
module, or if two merged modules give different meanings to one name, the script fails and writes nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "gleanrl"
TABLE = ROOT / "tools" / "modules.tsv"
# Names that two modules define which are merged: (old module, name) -> new name.
RENAMED = {
    ("gleanrl.workers.ending", "_TERM_S"): "_ENDING_TERM_S",
    ("gleanrl.checkpoint.strict_json", "_LARGEST"): "_LARGEST_INTEGER",
}
# Imported names with another meaning in a module that is merged with this one: (old module, name) -> new name.
RENAMED_IMPORTS = {("gleanrl.data.replay_buffers.storages.memmap", "Path"): "FilePath"}
# Definitions to drop, since a module that is merged with this one imports the same object: (old module, name) -> its
# name in the new layout.
DROPPED = {
    (
        "gleanrl.data.replay_buffers.checkpointers.trajectories",
        "Array",
    ): "gleanrl._checkpoint.row_segments.Array",
    ("gleanrl.envs.transforms.arithmetic", "Array"): "gleanrl.envs.transforms.counting.Array",
}
# Docstrings of the packages that are new in this layout.
NEW_PACKAGES = {
    "_arrays": "Tensors, TensorDicts and blocks of rows: memory, schemas and conversions.",
    "_state": "State as plain values: parsing, attributes of objects, random generators.",
    "_os": "The operating system: files, time, processes, shared memory and fault points.",
}


PROBLEMS: list[str] = []


def dotted(path: str) -> str:
    """Return the module name of a path under the package."""
    return ".".join(["gleanrl", *path.removesuffix(".py").removesuffix("/__init__").split("/")]).removesuffix(
        ".__init__"
    )


def is_list_of_names(node: ast.stmt) -> TypeGuard[ast.Assign]:
    """Return whether a statement is ``__all__ = [...]``."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def is_dropped(module: Module, node: ast.stmt) -> bool:
    """Return whether a statement is left out of the new module's body."""
    if is_list_of_names(node):
        return True
    return isinstance(node, ast.Assign) and (module.name, ast.unparse(node.targets[0])) in DROPPED


@dataclass
class Module:
    """An old module: its source, its syntax tree and its lines."""

    name: str
    source: str
    tree: ast.Module = field(init=False)
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.source)
        self.lines = self.source.splitlines(keepends=True)

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree, clean=False) or ""

    def public(self) -> list[str]:
        """Return the names of ``__all__``."""
        return [
            name for node in self.tree.body if is_list_of_names(node) for name in ast.literal_eval(node.value)
        ]

    def hidden(self) -> set[str]:
        """Return the names that arguments and assignments bind anywhere in the module."""
        found = {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        return found | {
            node.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }

    def imports(self) -> Iterator[ast.Import | ast.ImportFrom]:
        return (node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))

    def defined(self) -> set[str]:
        """Return the names that statements other than imports bind at the top level."""
        found: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {
                    n.id
                    for target in targets
                    for n in ast.walk(target)
                    if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                }
        return {name for name in found if (self.name, name) not in DROPPED}


class Layout:
    """The old modules and the table: the new module of each old name."""

    def __init__(self) -> None:
        self.old = {
            dotted(path.relative_to(PACKAGE).as_posix()): path for path in sorted(PACKAGE.rglob("*.py"))
        }
        rows = [
            line.split("\t") for line in TABLE.read_text().splitlines() if line and not line.startswith("#")
        ]
        self.target = {dotted(old): new for old, new in rows}
        missing = {name for name, path in self.old.items() if path.name != "__init__.py"} - set(self.target)
        gone = set(self.target) - set(self.old)
        if missing or gone:
            sys.exit(
                f"{TABLE.name}: expected each module of the package; add {sorted(missing)}, remove {sorted(gone)}"
            )
        self.new = {name: dotted(path) for name, path in self.target.items()}
        # A package moves to the folder that most of its modules move to.
        for name, path in self.old.items():
            if path.name == "__init__.py" and name not in self.new:
                self.new[name] = self._package(name)
        self.moves = {
            path: place
            for path in sorted((ROOT / "tests").rglob("*"))
            if path.is_file()
            and "__pycache__" not in path.parts
            and (place := moved_test(path, self)) != path
        }
        self.tests = {test_name(path): test_name(place) for path, place in self.moves.items()}
        self.tests |= {
            f"tests{old.removeprefix('gleanrl')}": f"tests{new.removeprefix('gleanrl')}"
            for old, new in self.new.items()
            if self.old[old].name == "__init__.py" and old != new
        }

    def _package(self, name: str) -> str:
        folders: dict[str, int] = defaultdict(int)
        for module, new in self.new.items():
            if module.rpartition(".")[0] == name and self.old[module].name != "__init__.py":
                folders[new.rpartition(".")[0]] += 1
        most = max(folders, key=lambda folder: folders[folder], default=name)
        return (
            name if name in folders or most == name.rpartition(".")[0] else most
        )  # or a module takes its place

    def place(self, module: str, name: str) -> tuple[str, str | None]:
        """Return the new module and name for ``from module import name``; the name is None for a module itself."""
        if f"{module}.{name}" in self.old:
            return self.new[f"{module}.{name}"], None
        return self.new.get(module, module), RENAMED.get((module, name), name)


@dataclass(frozen=True, order=True)
class Binding:
    """The object of an imported name: `module`, or `name` in it."""

    module: str
    name: str | None


def rewritten(
    module: Module, layout: Layout, here: str | None, taken: set[str]
) -> tuple[str, dict[str, Binding]]:
    """Return a module's source with the names of the new layout but without imports, and the bindings of the imports.

    Args:
        module: the old module.
        layout: the old and the new layout.
        here: the new module of the source. It binds names that were imported from it already.
        taken: names that the new module binds to other objects. An imported module with such a name keeps its old name.
    """
    bindings: dict[str, Binding] = {}
    renames: dict[
        str, str
    ] = {}  # old local name -> new local name ("" for a module that is merged into this one)
    for node in module.imports():
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        for alias in node.names:
            local = alias.asname or alias.name
            if isinstance(node, ast.Import):
                if alias.name.startswith("gleanrl."):
                    sys.exit(f"{module.name}:{node.lineno}: import {alias.name}: not supported")
                bindings[local] = Binding(alias.name, None)
                continue
            target, name = layout.place(node.module or "", alias.name)
            if (module.name, local) in RENAMED_IMPORTS:
                renames[local] = local = RENAMED_IMPORTS[module.name, local]
            if name is not None:
                if target != here:
                    bindings[local] = Binding(target, name)
                elif local != name:
                    renames[local] = name
                continue
            if target == here:
                renames[local] = ""
                continue
            short = target.rpartition(".")[2]
            if (
                alias.asname is None
                and short != local
                and short not in taken
                and local not in module.hidden()
            ):
                renames[local] = local = short
            bindings[local] = Binding(target, None)
    for (owner, old), new in RENAMED.items():
        if owner == module.name:
            renames[old] = new
    return body(module, renames), bindings


def body(module: Module, renames: dict[str, str]) -> str:
    """Return the source without its docstring and imports, and with local names renamed."""
    lines = list(module.lines)
    for line, start, old, new in sorted(uses(module, renames), reverse=True):
        text = lines[line - 1].encode()
        before, after = text[:start].decode(), text[start:].decode()
        if not after.startswith(old):
            sys.exit(f"{module.name}:{line}: expected {old!r} at byte {start}")
        after = after[len(old) :]
        if not new:
            after = after.removeprefix(".")
        lines[line - 1] = before + new + after
    for node in module.tree.body:
        is_docstring = node is module.tree.body[0] and isinstance(node, ast.Expr) and module.docstring
        if is_docstring or isinstance(node, (ast.Import, ast.ImportFrom)) or is_dropped(module, node):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[line - 1] = ""
    return "".join(lines).strip("\n") + "\n"


def uses(module: Module, renames: dict[str, str]) -> Iterator[tuple[int, int, str, str]]:
    """Yield the line, the byte, the old name and the new name of each use of a renamed name."""
    inside_strings = {
        id(part)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in renames:
            if id(node) in inside_strings:
                yield from in_text(module, node, renames)
            else:
                yield node.lineno, node.col_offset, node.id, renames[node.id]
        elif isinstance(node, ast.arg) and node.arg in renames:
            sys.exit(f"{module.name}:{node.lineno}: the argument {node.arg} hides an imported name")


def in_text(module: Module, node: ast.Name, renames: dict[str, str]) -> Iterator[tuple[int, int, str, str]]:
    """Yield a use within an f-string: the first match on its line, since Python 3.11 doesn't report its position."""
    for line in range(node.lineno, node.lineno + 8):
        if match := re.search(rf"(?<=[{{( ]){node.id}\b", module.lines[line - 1]):
            yield line, len(module.lines[line - 1][: match.start()].encode()), node.id, renames[node.id]
            return
    sys.exit(f"{module.name}:{node.lineno}: {node.id} in an f-string was not found")


def import_lines(bindings: dict[str, Binding]) -> str:
    lines = []
    for local, binding in sorted(
        bindings.items(), key=lambda item: (item[1].module, str(item[1].name), item[0])
    ):
        if binding.name is not None:
            alias = "" if binding.name == local else f" as {local}"
            lines.append(f"from {binding.module} import {binding.name}{alias}\n")
            continue
        package, _, short = binding.module.rpartition(".")
        if binding.module.startswith("gleanrl."):
            lines.append(f"from {package} import {short}{'' if short == local else f' as {local}'}\n")
        else:
            lines.append(f"import {binding.module}{'' if binding.module == local else f' as {local}'}\n")
    return "".join(lines)


def merged(target: str, modules: list[Module], layout: Layout) -> str:
    """Return the source of a new module: docstrings, imports, and the bodies, each after the bodies it imports."""
    here = dotted(target)
    names = {module.name for module in modules}
    graph = {
        module.name: sorted(
            {
                owner
                for node in module.imports()
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
                for owner in (f"{node.module}.{alias.name}", node.module or "")
                if owner in names
            }
        )
        for module in modules
    }
    order = list(TopologicalSorter(graph).static_order())
    modules = sorted(modules, key=lambda module: order.index(module.name))
    meanings: dict[str, dict[object, str]] = defaultdict(dict)
    for module in modules:
        for name in module.defined():
            name = RENAMED.get((module.name, name), name)
            if name != "__all__":
                meanings[name][module.name] = module.name
    taken = (
        set(meanings)
        | {n.id for module in modules for n in ast.walk(module.tree) if isinstance(n, ast.Name)}
        | {n.arg for module in modules for n in ast.walk(module.tree) if isinstance(n, ast.arg)}
    )
    parts, bindings = [], {}
    for module in modules:
        text, bound = rewritten(module, layout, here, taken)
        parts.append(mentions(text, layout))
        for local, binding in bound.items():
            meanings[local][binding] = module.name
            bindings[local] = binding
    clashes = {name: found for name, found in meanings.items() if len(found) > 1}
    if clashes:
        PROBLEMS.append(f"{target}: names with several meanings: {clashes}")
    main = [
        module for module in modules if dotted(target).rpartition(".")[2] == module.name.rpartition(".")[2]
    ]
    first = (main or modules[-1:])[0]
    docstrings = [first.docstring, *(module.docstring for module in modules if module is not first)]
    header = mentions("\n\n".join(text.strip("\n") for text in docstrings if text), layout)
    future = {"from __future__" in module.source for module in modules if module.defined() - {"__all__"}}
    if len(future) > 1:
        PROBLEMS.append(f"{target}: mixes modules with and without deferred annotations")
    closing = "\n" if "\n" in header else ""
    start = f'"""{header}{closing}"""\n' if header else ""
    start += "\nfrom __future__ import annotations\n\n" if future == {True} else "\n"
    public = sorted({name for module in modules for name in module.public()})
    listed = f"__all__ = {public!r}\n\n" if public else ""
    return start + import_lines(bindings) + "\n" + listed + "\n\n".join(parts)


def mentions(text: str, layout: Layout) -> str:
    """Return a text with dotted names and paths of modules replaced by the new ones."""

    def name(match: re.Match[str]) -> str:
        parts = match.group().split(".")
        for end in range(len(parts), 1, -1):
            old = ".".join(parts[:end])
            if old in layout.new and (end < len(parts) or old in layout.old):
                rest = parts[end:]
                if rest and (old, rest[0]) in RENAMED:
                    rest[0] = RENAMED[old, rest[0]]
                return ".".join([layout.new[old], *rest])
        return match.group()

    def path(match: re.Match[str]) -> str:
        old = dotted(match.group(2))
        return match.group(1) + layout.target[old] if old in layout.target else match.group()

    def test(match: re.Match[str]) -> str:
        found = layout.tests.get(match.group().replace("/", ".").removesuffix(".py"))
        if found is None:
            return match.group()
        return found if "/" not in match.group() else found.replace(".", "/") + ".py"

    text = re.sub(r"\btests(\.\w+)+|\btests(/\w+)+\.py", test, text)
    text = re.sub(r"\bgleanrl(\.\w+)+", name, text)
    return re.sub(r"(src/gleanrl/|(?<=[\"`]))([\w/]+\.py)\b", path, text)


def statements(where: str, source: str, layout: Layout) -> str:
    """Return a Python source of another folder with its imports from the package rewritten in place."""
    module = Module(where, source)
    lines = list(module.lines)
    taken = {n.id for n in ast.walk(module.tree) if isinstance(n, ast.Name)}
    taken |= {n.arg for n in ast.walk(module.tree) if isinstance(n, ast.arg)}
    renames: dict[str, str] = {}
    replaced: list[tuple[int, int, str]] = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("gleanrl"):
            continue
        bindings: dict[str, Binding] = {}
        for alias in node.names:
            if alias.name == "*":
                break
            target, name = layout.place(node.module or "", alias.name)
            local = alias.asname or alias.name
            short = target.rpartition(".")[2]
            free = short != local and short not in taken and local not in module.hidden()
            if name is None and alias.asname is None and free:
                renames[local] = local = short
            bindings[local] = Binding(target, name)
        else:
            indent = " " * node.col_offset
            block = "".join(indent + line for line in import_lines(bindings).splitlines(keepends=True))
            replaced.append((node.lineno, node.end_lineno or node.lineno, block))
    for line, start, old, new in sorted(uses(module, renames), reverse=True):
        text = lines[line - 1].encode()
        lines[line - 1] = text[:start].decode() + new + text[start:].decode()[len(old) :]
    lines = [mentions(line, layout) for line in lines]
    for first, last, block in replaced:
        if remark := re.search(r"  # noqa.*", "".join(module.lines[first - 1 : last])):
            block = marked(block, remark.group())
        lines[first - 1 : last] = [block, *[""] * (last - first)]
    return "".join(lines)


def test_name(path: Path) -> str:
    """Return the module name of a test file."""
    return path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")


def marked(block: str, remark: str) -> str:
    """Return import statements, one for each module, with a comment for the linter on the first line of each."""
    names: dict[str, list[str]] = defaultdict(list)
    for line in block.splitlines():
        start, _, name = line.partition(" import ")
        names[start].append(name)
    return "".join(
        f"{start} import ({remark}\n" + "".join(f"    {name},\n" for name in found) + ")\n"
        if len(found) > 1
        else f"{start} import {found[0]}{remark}\n"
        for start, found in names.items()
    )


def moved_test(path: Path, layout: Layout) -> Path:
    """Return the new path of a test file: `test_<new>.py`, or `test_<new>_<old>.py` if modules are merged."""
    relative = path.relative_to(ROOT / "tests").as_posix()
    parts = relative.removesuffix(".py").split("/")
    stem = parts[-1].removeprefix("test_")
    for end in range(len(stem.split("_")) if stem != parts[-1] else 0, 0, -1):
        old = "_".join(stem.split("_")[:end])
        name = ".".join(["gleanrl", *parts[:-1], old])
        if name in layout.target:
            new = layout.target[name].removesuffix(".py").removesuffix("/__init__").split("/")
            rest = stem.removeprefix(old)
            sources = [other for other, target in layout.target.items() if target == layout.target[name]]
            middle = "" if len(sources) == 1 or old == new[-1] else f"_{old}"
            place = (ROOT / "tests").joinpath(*new[:-1], f"test_{new[-1]}{middle}{rest}.py")
            return (
                place.with_name(f"test_{new[-1]}_{old}{rest}.py")
                if place.exists() and place != path
                else place
            )
    folder = ".".join(["gleanrl", *parts[:-1]])
    if len(parts) > 3 and parts[:2] == ["checkpoint", "golden"]:
        return (ROOT / "tests" / "_checkpoint").joinpath(*path.relative_to(ROOT / "tests").parts[1:])
    is_package = folder in layout.old and layout.old[folder].name == "__init__.py"
    if is_package and len(parts) > 1 and layout.new[folder] != folder:
        return (ROOT / "tests").joinpath(*layout.new[folder].split(".")[1:], path.name)
    return path


def moved(layout: Layout) -> str:
    """Return the source of the module that maps old modules to new modules."""
    taken = set(layout.new.values())
    rows = {old: new for old, new in sorted(layout.new.items()) if old != new and old not in taken}
    lines = "".join(f"    {old!r}: {new!r},\n" for old, new in rows.items())
    return (
        '"""Old and new paths of modules that have moved: old imports, pickles and saved states name them."""\n\n'
        f"from __future__ import annotations\n\nMOVED: dict[str, str] = {{\n{lines}}}\n"
        '"""Old module -> new module, or new package."""\n'
    )


def main() -> None:
    """Write the new layout."""
    layout = Layout()
    by_target: dict[str, list[Module]] = defaultdict(list)
    for name, target in layout.target.items():
        by_target[target].append(Module(name, layout.old[name].read_text()))
    written: dict[Path, str] = {}
    for target, modules in by_target.items():
        written[PACKAGE / target] = merged(target, modules, layout)
    for name, path in layout.old.items():
        if path.name != "__init__.py" or name in layout.target:
            continue
        new = PACKAGE.joinpath(*layout.new[name].split(".")[1:], "__init__.py")
        if PACKAGE.joinpath(*layout.new[name].split(".")[1:]).with_suffix(".py") in written:
            continue  # a module has taken the package's place
        text = statements(name, path.read_text(), layout)
        written.setdefault(new, text)
    written[PACKAGE / "compat" / "moved.py"] = moved(layout)
    for folder, docstring in NEW_PACKAGES.items():
        written[PACKAGE / folder / "__init__.py"] = f'"""{docstring}"""\n'
    if PROBLEMS:
        sys.exit("\n".join(PROBLEMS))
    moves = layout.moves
    for top in ("tests", "benchmarks", "examples", "docs", ".ci"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in (".py", ".md", ".sh", ".toml", ".yml") and path.is_file():
                text = path.read_text()
                rewrite = partial(statements, str(path)) if path.suffix == ".py" else mentions
                written[path] = rewrite(text, layout)
    stay = set(written) - set(moves)
    twice = [
        f"{path} -> {place}"
        for path, place in moves.items()
        if list(moves.values()).count(place) > 1 or place in stay
    ]
    if twice:
        sys.exit("expected a different new path for each test, got: " + ", ".join(twice))
    for path in layout.old.values():
        path.unlink()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path, place in moves.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    subprocess.run([sys.executable, "-m", "ruff", "check", "--fix", "--quiet", "."], cwd=ROOT, check=False)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", "."], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
