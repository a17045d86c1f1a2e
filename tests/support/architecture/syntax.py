"""Syntax trees of files of code, for the rules on all of them; those that run in one process read a file once."""

import ast
from functools import cache
from pathlib import Path

#: Fields in which statements, or parts of a statement that hold others, are.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@cache
def parsed(file: Path) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(file.read_text(), filename=str(file))


@cache
def statements(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the statements, also those in others: all imports, classes and functions, for a tenth of the work of
    `ast.walk`, which also looks into expressions."""
    found = [tree]
    for node in found:
        if not isinstance(node, ast.expr):
            for block in _BLOCKS:
                found += getattr(node, block, ())
    return tuple(found[1:])
