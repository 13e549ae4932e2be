"""Rules about the source itself: each gate reads one file and returns its offences as "line: description".

`python -m tests.gates` counts private names that modules take from each other, and names looked up by `getattr`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import gymnasium as gym
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

LONG = 600  # lines above which a warning asks whether the file still has one idea
MOST_LINES = 800
MOST_ARGUMENTS = 8
MOST_FIELDS = 12

# Names that only `gleanrl/_os` may use: modules, functions of modules, and modes of a file that is written.
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
    """Yield each import: its statement, its module, and the imported name or None for the whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, node.module or "", alias.name


def seams(tree: ast.Module) -> list[str]:
    """Return uses of time, of written files and of processes. Only `gleanrl/_os` may contain them."""
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
    """Return whether a call of open has a mode that writes, or a mode that is not a constant."""
    given = [k.value for k in call.keywords if k.arg == "mode"] + call.args[first : first + 1]
    return any(not isinstance(m, ast.Constant) or bool(WRITING & set(str(m.value))) for m in given)


def late_imports(tree: ast.Module) -> list[str]:
    """Return imports inside functions, classes or branches (`TYPE_CHECKING` included). Imports belong at the top."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If)):
            found += [f"{statement.lineno}: imports {module} late" for statement, module, _ in imports(node)]
    return sorted(set(found))


def wide_constructors(tree: ast.Module) -> list[str]:
    """Return constructors with more than 8 arguments, and dataclasses and NamedTuples with more than 12 fields."""
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
    """Return the fields of a dataclass or a NamedTuple; other classes have none."""
    marks = [ast.unparse(d) for d in (*node.decorator_list, *node.bases)]
    if not any("dataclass" in mark or "NamedTuple" in mark for mark in marks):
        return []
    annotated = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return [n for n in annotated if "ClassVar" not in ast.unparse(n.annotation) and not is_state(n)]


def is_state(node: ast.AnnAssign) -> bool:
    """Return whether a field is no constructor argument: `field(init=False)`."""
    return node.value is not None and "init=False" in ast.unparse(node.value).replace(" ", "")


def container_internals(tree: ast.Module) -> list[str]:
    """Return uses of tensordict's private names. Only `gleanrl/_arrays/tensordicts.py` may contain them."""
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
    """Return whether a module has code to test: a function with a body, or a compound statement outside functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not all(map(is_nothing, node.body)):
            return True
    return any(isinstance(node, (ast.Try, ast.For, ast.While, ast.With)) for node in tree.body)


def is_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def length(path: Path, most: int = MOST_LINES) -> list[str]:
    """Return an offence if a file has more than `most` lines."""
    lines = path.read_text().count("\n")
    return [f"{lines} lines"] if lines > most else []


# Names that objects of other libraries have. Looking one up is a careful treatment of a user's object.
OTHERS = {
    *(name for kind in (torch.Tensor, TensorDictModule, gym.Env) for name in dir(kind)),
    *(name for made in (torch.nn.Module(), TensorDict()) for name in dir(made)),
    *("_asdict", "_fields", "_make", "_replace"),  # of named tuples
    "_generator",  # of tensordict's probabilistic modules
}


# Methods that users of the familiar API override, documented in docs/extending. They are private by their spelling
# only: code that steps an environment or runs a transform may call them from any module.
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
    """Return the names that a module defines: functions, classes, variables, and attributes of `self` and `cls`."""
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
    """Return whether an attribute is taken from `self`, `cls` or `super()`."""
    return ast.unparse(owner) in ("self", "cls", "super()")


def foreign_private_names(tree: ast.Module, everywhere: set[str]) -> list[str]:
    """Return private names of other modules that are taken from other objects, or imported.

    A name that the module also defines is allowed: objects of one family may call each other's hooks.

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
    """Return private names that are taken from `self` or `cls` but are defined in other modules, by a base class."""
    theirs = {name for name in everywhere - defined(tree) - OTHERS if is_private(name)}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value))
    return {node.attr for node in attributes if node.attr in theirs}


def sniffed_names(tree: ast.Module, protocol: set[str]) -> list[str]:
    """Return names of the package's classes that are looked up with `getattr` or `hasattr`.

    Such names belong in a protocol.

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
    """Return the public names that the classes of a module define: methods, fields, and attributes of `self`."""
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
    """Return each name that denotes several classes, with their modules. Nested classes don't count."""
    places: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


STRUCK_WORD = re.compile(
    "servant|crew|station|standing|taken|given|told|shown|held|kept|lent|borrowed|near|attending|lending|whole|fresh|quiet|"
    "familiar|parcel|moment|books|place|intake|handover|ledger|extent"
)
"""Words that only the authors of the first version understood in names; docs/glossary.md has the terms to use."""


def struck_words(module: ast.Module) -> list[str]:
    """Return the definitions whose names have a struck word, as "line: name"."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        words = re.split(r"_+|(?<=[a-z])(?=[A-Z])", re.sub("(?i)in_?place", "", name))
        if any(STRUCK_WORD.fullmatch(word.lower()) for word in words):
            found.append(f"{node.lineno}: {name}")
    return found


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
            for _ in range(9):  # follow packages that re-export the name, at most nine times
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
