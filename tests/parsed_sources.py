"""Sources that are parsed and walked once for all tests, which takes nearly all of their time."""

from __future__ import annotations

import ast
import gc
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)
# Kinds of nodes that tests use. Other nodes, the majority, are dropped: they would slow garbage collection down.
KINDS = (
    ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler, ast.Import, ast.ImportFrom,
    ast.Call, ast.Attribute, ast.Raise,
)  # fmt: skip


def nodes(source: str, *kinds: type[Node]) -> list[Node]:
    """Return the nodes of a source that have one of `kinds`, which are in `KINDS`."""
    return [node for kind in kinds for node in _found(source)[kind] if isinstance(node, kind)]


@cache
def _found(source: str) -> dict[type[ast.AST], Sequence[ast.AST]]:
    collects = gc.isenabled()
    gc.disable()
    try:
        found: dict[type[ast.AST], list[ast.AST]] = {kind: [] for kind in KINDS}
        for node in ast.walk(ast.parse(source)):
            if type(node) in found:
                found[type(node)].append(node)
    finally:
        if collects:
            gc.enable()
    return {**found}
