"""Rules about the source itself: each gate reads one file and returns its offences, as "line: what"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tensordict import TensorDict

MOST_LINES = 400
MOST_ARGUMENTS = 8
MOST_FIELDS = 12

# What only the seams may do: modules, functions of modules, and the modes of a file that is written.
SEALED_MODULES = ("time",)
SEALED_FUNCTIONS = {
    "os": (
        "replace",
        "rename",
        "renames",
        "fsync",
        "fdatasync",
        "unlink",
        "remove",
        "rmdir",
        "removedirs",
        "fork",
    ),
    "shutil": ("rmtree", "move"),
    "multiprocessing": ("Process", "get_context"),
    "subprocess": ("Popen", "run", "call", "check_call", "check_output"),
}
SEALED_METHODS = ("write_text", "write_bytes", "Process", "Popen")
WRITING = set("wax+")

TENSORDICT_PRIVATE = {
    name
    for name in {*dir(TensorDict), *TensorDict().__dict__}
    if name.startswith("_") and not name.startswith("__")
}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, str | None]]:
    """Each imported thing: its statement, its module and the name taken from it, if it's not the whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, node.module or "", alias.name


def seams(tree: ast.Module) -> list[str]:
    """Time, files that are written and processes: in `gleanrl/system` only."""
    found = []
    for node, module, name in imports(tree):
        top = module.split(".")[0]
        if top in SEALED_MODULES or (name is not None and name in SEALED_FUNCTIONS.get(top, ())):
            found.append(f"{node.lineno}: imports {module}{'.' + name if name else ''}")
    for call in calls(tree):
        function = call.func
        if isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else None
            if function.attr in SEALED_FUNCTIONS.get(owner or "", ()) or function.attr in SEALED_METHODS:
                found.append(f"{call.lineno}: calls {ast.unparse(function)}")
            elif function.attr == "open" and owner != "os" and writes(call, first=0):
                found.append(f"{call.lineno}: opens a file to write")
        elif isinstance(function, ast.Name) and function.id == "open" and writes(call, first=1):
            found.append(f"{call.lineno}: opens a file to write")
    return found


def writes(call: ast.Call, first: int) -> bool:
    """Whether a call of open has a mode that writes, or one that only the run will show."""
    given = [k.value for k in call.keywords if k.arg == "mode"] + call.args[first : first + 1]
    return any(not isinstance(m, ast.Constant) or bool(WRITING & set(str(m.value))) for m in given)


def late_imports(tree: ast.Module) -> list[str]:
    """Imports stand at the top of a file: in no function, class or branch, `TYPE_CHECKING` included."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If)):
            found += [f"{statement.lineno}: imports {module} late" for statement, module, _ in imports(node)]
    return sorted(set(found))


def wide_constructors(tree: ast.Module) -> list[str]:
    """A constructor takes at most eight arguments; a record (dataclass, NamedTuple) has at most 12 fields."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = [*method.args.posonlyargs, *method.args.args[1:], *method.args.kwonlyargs]
                if len(arguments) > MOST_ARGUMENTS:
                    found.append(
                        f"{node.lineno}: the constructor of {node.name} takes {len(arguments)} arguments"
                    )
        if len(fields(node)) > MOST_FIELDS:
            found.append(f"{node.lineno}: {node.name} has {len(fields(node))} fields")
    return found


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """The fields of a dataclass or a NamedTuple; none for other classes."""
    marks = [ast.unparse(d) for d in (*node.decorator_list, *node.bases)]
    if not any("dataclass" in mark or "NamedTuple" in mark for mark in marks):
        return []
    annotated = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return [n for n in annotated if "ClassVar" not in ast.unparse(n.annotation) and not is_state(n)]


def is_state(node: ast.AnnAssign) -> bool:
    """Whether a field isn't an argument: `field(init=False)`."""
    return node.value is not None and "init=False" in ast.unparse(node.value).replace(" ", "")


def container_internals(tree: ast.Module) -> list[str]:
    """Private attributes and modules of tensordict: in `gleanrl/tree.py` only."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in TENSORDICT_PRIVATE:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and not owner.startswith(("self._", "cls._")):
                found.append(f"{node.lineno}: touches {owner}.{node.attr}")
    for node, module, name in imports(tree):
        if module.split(".")[0] == "tensordict" and any(
            p.startswith("_") for p in [*module.split("."), name or ""]
        ):
            found.append(f"{node.lineno}: imports {module}.{name}")
    return found


def has_logic(tree: ast.Module) -> bool:
    """Whether there's anything to test: a function with a body, or a statement beside declarations."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not all(map(is_nothing, node.body)):
            return True
    return any(isinstance(node, (ast.Try, ast.For, ast.While, ast.With)) for node in tree.body)


def is_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def length(path: Path) -> list[str]:
    """A file has at most 400 lines."""
    lines = path.read_text().count("\n")
    return [f"{lines} lines"] if lines > MOST_LINES else []
