"""Compare two layouts of the package: `python tools/check_move.py OLD_TREE NEW_TREE`, in the old layout's checkout.

Each imported name is replaced by the full name of its object in the new layout. Then two things must be equal. Each new
module must have the statements of its old modules, in their order. Each package must have the same `__all__`. Module
docstrings and import statements are ignored.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from move_modules import DROPPED, PACKAGE, RENAMED, Layout, Module, dotted, mentions


class Names(ast.NodeTransformer):
    """Replaces the names of modules, imported objects and top-level definitions by full names in the new layout."""

    def __init__(self, module: Module, layout: Layout | None, here: str) -> None:
        self.layout, self.full, self.local = layout, {}, []
        for node in module.imports():
            for alias in node.names:
                local = alias.asname or alias.name
                if isinstance(node, ast.Import):
                    self.full[local] = alias.name
                elif layout is not None:
                    target, name = layout.place(node.module or "", alias.name)
                    self.full[local] = target if name is None else f"{target}.{name}"
                else:
                    self.full[local] = f"{node.module}.{alias.name}"
        for owner, name in DROPPED:
            if owner == module.name:
                self.full[name] = DROPPED[owner, name]
        for name in module.defined():
            new = RENAMED.get((module.name, name), name)
            self.full.setdefault(name, f"{here}.{new}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        parts = list(ast.walk(node))
        names = {part.arg for part in parts if isinstance(part, ast.arg)}
        names |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        names -= {name for part in parts if isinstance(part, ast.Global) for name in part.names}
        self.local.append(names)
        self.generic_visit(node)
        self.local.pop()
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if any(node.id in names for names in self.local):
            return node
        return ast.Name(self.full.get(node.id, node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id.startswith("gleanrl."):
            return ast.Name(f"{node.value.id}.{node.attr}", node.ctx)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str) and self.layout is not None:
            return ast.Constant(mentions(node.value, self.layout))
        return node


def statements(module: Module, layout: Layout | None, here: str) -> list[str]:
    names = Names(module, layout, here)
    kept = module.tree.body[1 if module.docstring else 0 :]
    return [
        ast.dump(names.visit(node))
        for node in kept
        if not isinstance(node, (ast.Import, ast.ImportFrom))
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        and not (isinstance(node, ast.Assign) and (module.name, ast.unparse(node.targets[0])) in DROPPED)
    ]


def in_order(part: list[str], whole: list[str]) -> bool:
    """Return whether `whole` has all statements of `part` in the same order; more statements may be in between."""
    rest = iter(whole)
    return all(statement in rest for statement in part)


def main(old_tree: Path, new_tree: Path) -> int:
    """Print the differences and return their number."""
    layout, differences = Layout(), []
    new = {dotted(p.relative_to(new_tree).as_posix()): p for p in sorted(new_tree.rglob("*.py"))}
    left = {}
    for name, path in new.items():
        left[name] = statements(Module(name, path.read_text()), None, name)
    found: dict[str, list[str]] = {name: [] for name in new}
    public: dict[str, set[str]] = {name: set() for name in new}
    for name, path in layout.old.items():
        module, here = Module(name, (old_tree / path.relative_to(PACKAGE)).read_text()), layout.new[name]
        if here not in new:
            differences.append(f"{name}: expected the new module {here}, found none")
            continue
        part = statements(module, layout, here)
        public[here] |= set(module.public())
        if not in_order(part, left[here]):
            differences.append(f"{name}: expected its statements in {here} in the same order")
        found[here] += part
    for name in new:
        if sorted(found[name]) != sorted(left[name]):
            extra = [s for s in left[name] if s not in found[name]]
            differences.append(
                f"{name}: {len(extra)} statements are in no old module: {[s[:200] for s in extra[:3]]}"
            )
        if public[name] != set(Module(name, new[name].read_text()).public()):
            differences.append(f"{name}: expected the __all__ of its old modules, got another one")
    print("\n".join(differences) or f"{len(layout.old)} modules: equal")
    return len(differences)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])) > 0)
