"""Rules about the source itself: each gate reads one file and returns its offences, as "line: what".

`python -m tests.gates` counts private names that modules take from each other, and names looked up by `getattr`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import gymnasium as gym
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

LONG = 600  # lines from which on a file is looked at again: does it still have one idea?
MOST_LINES = 800
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


def length(path: Path, most: int = MOST_LINES) -> list[str]:
    """A file has at most so many lines."""
    lines = path.read_text().count("\n")
    return [f"{lines} lines"] if lines > most else []


# Names that objects of other libraries have: to look them up is to be careful with what users bring.
OTHERS = {
    *(name for kind in (torch.Tensor, TensorDictModule, gym.Env) for name in dir(kind)),
    *(name for made in (torch.nn.Module(), TensorDict()) for name in dir(made)),
    *("_asdict", "_fields", "_make", "_replace"),  # of named tuples
    "_generator",  # of tensordict's probabilistic modules
}


# Private by their spelling only: methods that users of the familiar API override, told of in docs/extending. Whoever
# steps an environment or runs a transform calls these, wherever it is defined.
EXTENSION_POINTS = {
    *("_reset", "_step", "_set_seed"),  # of environments
    *(
        "_apply_transform",
        "_inv_apply_transform",
        "_call",
        "_inv_call",
        "_reset_env_preprocess",
    ),  # of transforms
    *("_output_transform", "_reset_output_transform"),  # of gymnasium's environments
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in EXTENSION_POINTS


def defined(tree: ast.Module) -> set[str]:
    """The names that a module defines: functions, classes, variables, and attributes of `self` and `cls`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(owner: ast.expr) -> bool:
    """Whether an attribute is taken from `self`, `cls` or `super()`."""
    return ast.unparse(owner) in ("self", "cls", "super()")


def foreign_private_names(tree: ast.Module, everywhere: set[str]) -> list[str]:
    """Private names of other modules, taken from other objects or imported.

    A name that the module defines itself is its own: objects of one family may call each other's hooks.

    Args:
        everywhere: the names that all modules of the package define.
    """
    theirs = {name for name in everywhere - defined(tree) - OTHERS if is_private(name)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in theirs and not is_own(node.value):
            found.append(f"{node.lineno}: takes {node.attr} of {ast.unparse(node.value)}")
    for node, module, name in imports(tree):
        if module.startswith("gleanrl.") and name is not None and is_private(name):
            found.append(f"{node.lineno}: imports {name} of {module}")
    return found


def inherited_private_names(tree: ast.Module, everywhere: set[str]) -> set[str]:
    """Private names of other modules that are taken from `self` or `cls`: those of a base class elsewhere."""
    theirs = {name for name in everywhere - defined(tree) - OTHERS if is_private(name)}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value))
    return {node.attr for node in attributes if node.attr in theirs}


def sniffed_names(tree: ast.Module, protocol: set[str]) -> list[str]:
    """Names of our own classes that are looked up with `getattr` or `hasattr`, instead of being in a protocol.

    Args:
        protocol: the public names that classes of the package define.
    """
    found = []
    for call in calls(tree):
        if ast.unparse(call.func) in ("getattr", "hasattr") and len(call.args) > 1:
            name = call.args[1].value if isinstance(call.args[1], ast.Constant) else None
            if name in protocol - OTHERS:
                found.append(f"{call.lineno}: sniffs {name} in {ast.unparse(call)}")
    return found


def public_attributes(tree: ast.Module) -> set[str]:
    """The public names that the classes of a module define: methods, fields, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            declared = [n for n in node.body if not isinstance(n, ast.FunctionDef)]
            names |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            names |= defined(ast.Module(declared, [])) - {
                n.name for n in declared if isinstance(n, ast.ClassDef)
            }
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return {name for name in names if not name.startswith("_")}


def class_names(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the names that denote several classes, and the modules that define these; nested classes don't count."""
    places: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def single_subclasses(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the classes that have exactly one direct subclass, which is in another module, as "module.Class".

    Args:
        trees: all modules of the package, by their dotted names.
    """
    classes = {
        f"{m}.{n.name}": n for m, tree in trees.items() for n in tree.body if isinstance(n, ast.ClassDef)
    }
    bound = {
        m: {
            n.asname or n.name: f"{s.module}.{n.name}"
            for s in tree.body
            if isinstance(s, ast.ImportFrom)
            for n in s.names
        }
        for m, tree in trees.items()
    }
    subclasses: dict[str, list[str]] = {name: [] for name in classes}
    for name, node in classes.items():
        module = name.rpartition(".")[0]
        for base in node.bases:
            first, _, rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).partition(
                "."
            )
            found = bound[module].get(first, f"{module}.{first}") + (f".{rest}" if rest else "")
            for _ in range(9):  # a package that hands the name on
                owner, _, last = found.rpartition(".")
                if found in classes or last not in bound.get(owner, {}):
                    break
                found = bound[owner][last]
            if found in classes:
                subclasses[found].append(module)
    return sorted(
        n for n, found in subclasses.items() if len(found) == 1 and found[0] != n.rpartition(".")[0]
    )


def main() -> None:
    package = Path(__file__).resolve().parents[1] / "src" / "gleanrl"
    trees = {p.relative_to(package): ast.parse(p.read_text()) for p in sorted(package.rglob("*.py"))}
    everywhere = set().union(*map(defined, trees.values()))
    protocol = set().union(*map(public_attributes, trees.values()))
    counts: Counter[str] = Counter()
    for path, tree in trees.items():
        taken, sniffed = foreign_private_names(tree, everywhere), sniffed_names(tree, protocol)
        inherited = inherited_private_names(tree, everywhere)
        counts.update(taken=len(taken), inherited=len(inherited), sniffed=len(sniffed))
        for line in [*taken, *sniffed, *([f"inherits {', '.join(sorted(inherited))}"] if inherited else [])]:
            print(f"{path}:{line}")
    print(dict(counts))


if __name__ == "__main__":
    main()
