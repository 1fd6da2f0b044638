"""Tests the package's rules: only it imports triton, launches do not wait, and all code except kernels is
annotated."""

from __future__ import annotations

import ast
from pathlib import Path

import batchinfer_kernels.gpu

HERE = Path(batchinfer_kernels.gpu.__file__).parent
# Calls that copy a value from or to the device
WAITS = {"item", "tolist", "cpu", "synchronize", "nonzero", "numpy"}


def parsed(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def unannotated(function: ast.FunctionDef) -> bool:
    """Return True if a function that Triton does not compile has arguments or a result without a type."""
    if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return False
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    named = [a for a in every if a is not None and a.arg not in ("self", "cls")]
    return function.returns is None or any(a.annotation is None for a in named)


def imported(nodes: list[ast.AST]) -> set[str]:
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_all_functions_except_kernels_are_annotated():
    functions = [
        node for path in HERE.glob("*.py") for node in parsed(path) if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 100
    assert [function.name for function in functions if unannotated(function)] == []


def test_no_launch_waits_for_the_device():
    """Otherwise it could not be captured. NumPy's arrays become lists without waiting."""
    for path in HERE.glob("*.py"):
        nodes = parsed(path)
        waits = WAITS - ({"tolist"} if "numpy" in imported(nodes) else set())
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        names = [function for function in called if isinstance(function, ast.Attribute)]
        found = [one for one in names if one.attr in waits or ast.unparse(one) == "torch.tensor"]
        assert found == [], f"{path.name}: {[one.lineno for one in found]}"


def test_nothing_else_imports_triton():
    others = {path for path in HERE.parent.rglob("*.py") if path.parent != HERE}
    names = {name for path in others for name in imported(parsed(path))}
    assert len(others) > 20
    assert not {name for name in names if name.startswith(("triton", "batchinfer_kernels.gpu"))}
