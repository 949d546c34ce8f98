"""Facts about sources: each is parsed once for all tests that read it."""
from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")       # fields of a statement that hold statements


@dataclass(frozen=True)
class Facts:
    """Contents of a module.

    docstrings: each with its line. imports: each with True if it is inside a function. functions: names, and numbers of
    lines. names: classes, functions, constants and attributes, those of a class as `Class.name`.
    """
    docstrings: list[tuple[int, str]] = field(default_factory=list)
    imports: list[tuple[ast.Import | ast.ImportFrom, bool]] = field(default_factory=list)
    functions: list[tuple[str, int]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


@cache
def facts(source: str) -> Facts:
    """Parse a module. Expressions are not visited: most nodes of a module are in them."""
    collects = gc.isenabled()
    gc.disable()            # a tree is of thousands of objects, none of them in a cycle
    try:
        return _facts(ast.parse(source))
    finally:
        if collects:
            gc.enable()


def _facts(tree: ast.Module) -> Facts:
    found = Facts()
    if text := ast.get_docstring(tree):
        found.docstrings.append((1, text))
    for statement in tree.body:
        _gather(statement, found, ("",), False)
    return found


def _gather(node: ast.stmt, found: Facts, holders: tuple[str, ...], is_inside: bool) -> None:
    """Add the facts of a statement. holders: prefixes of names; is_inside: a function holds the statement."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        found.imports.append((node, is_inside))
    found.names.update(holder + name for name in _stored(_targets(node)) for holder in holders)
    if isinstance(node, Definition):
        found.names.update(holder + node.name for holder in holders)
        if text := ast.get_docstring(node):
            found.docstrings.append((node.lineno, text))
        if isinstance(node, ast.ClassDef):
            holders = (*holders, f"{node.name}.") if is_inside else (f"{node.name}.",)
        else:
            found.functions.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
            is_inside = True
    for block in BLOCKS:
        for child in getattr(node, block, ()):
            _gather(child, found, holders, is_inside)


def _targets(node: ast.stmt) -> Iterable[ast.expr | None]:
    """Return what a statement assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        return (node.target,)
    return [item.optional_vars for item in node.items] if isinstance(node, ast.With | ast.AsyncWith) else ()


def _stored(targets: Iterable[ast.expr | None]) -> Iterator[str]:
    """Yield the names and the attributes in targets."""
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Attribute):
            yield target.attr
        elif isinstance(target, ast.Tuple | ast.List):
            yield from _stored(target.elts)
        elif isinstance(target, ast.Starred):
            yield from _stored((target.value,))
