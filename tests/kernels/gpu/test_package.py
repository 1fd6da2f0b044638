"""The package's rules: triton is imported here alone, and all that is not a kernel is annotated."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import batchinfer_kernels
import batchinfer_kernels.gpu

HERE = Path(batchinfer_kernels.gpu.__file__).parent
MODULES = sorted(path for path in HERE.glob("*.py"))
OTHERS = sorted(set(Path(batchinfer_kernels.__file__).parent.rglob("*.py")) - set(MODULES))


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether it is Triton's to compile: its arguments have no types that Python knows."""
    return any(
        kind in ast.unparse(one) for one in function.decorator_list for kind in ("triton.jit", "gluon.jit")
    )


def unannotated(source: str) -> list[str]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if not is_kernel(f) and not is_annotated(f)]


def is_annotated(function: ast.FunctionDef) -> bool:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    named = [a for a in every if a is not None and a.arg not in ("self", "cls")]
    return function.returns is not None and all(a.annotation is not None for a in named)


def imported(source: str) -> set[str]:
    """The first names of all that is imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def waits(source: str) -> list[int]:
    """Lines that fetch a value from the device, or that copy one there. NumPy's arrays are lists without waiting."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {"item", "tolist", "cpu", "synchronize", "nonzero", "numpy"}
    if "numpy" in imported(source):
        names.remove("tolist")
    return [
        node.lineno
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and (node.func.attr in names or ast.unparse(node.func) == "torch.tensor")
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_module_is_annotated_and_its_launchers_do_not_wait(path):
    source = path.read_text("utf-8")
    assert unannotated(source) == []
    assert waits(source) == [], "a launch that waits for the device cannot be captured"
    importlib.import_module(f"batchinfer_kernels.gpu.{path.stem}".removesuffix(".__init__"))


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_nothing_else_imports_triton(path):
    assert "triton" not in imported(path.read_text("utf-8"))
    assert "batchinfer_kernels.gpu" not in path.read_text("utf-8")


def test_these_tests_can_fail():
    assert unannotated("def f(a) -> int: ...\ndef g(a: int): ...\n@triton.jit\ndef h(a): ...") == ["f", "g"]
    assert imported("import a.b\nfrom c.d import e") == {"a", "c"}
    assert waits("import numpy\nx.tolist()\ny.cpu()") == [3]
    assert waits("x.item()\ny = torch.tensor(3)\nz = torch.empty(3)\nx.sum().tolist()") == [1, 2, 4]
