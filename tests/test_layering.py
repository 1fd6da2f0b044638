"""The rooms and what each may never import, print or exit: read from the source, whatever is there.

    errors, request ◀─ kernels (no batchinfer) ◀─ ops ◀─ models ◀─ engine ◀─ launch ◀─ pipeline ◀─ cli
                     job ◀─ data, plan, report (no torch) ◀────────────────────────────┘

Data flows one way; nothing downstream is imported by anything upstream.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = ("torch", "triton")
HEAVY = (*TORCH, "batchinfer_kernels.cpu", "batchinfer.engine", "batchinfer.models", "batchinfer.ops")
TEXT = ("tokenizers", "transformers", "jinja2")
FILES = ("pyarrow", "duckdb")
JOB = ("batchinfer.job", "batchinfer.data", "batchinfer.plan")
# from the ground up: each may import those before it
DATA_ROOMS = tuple(f"batchinfer.data.{room}" for room in ("storage", "input", "prompts", "index", "results"))


@dataclass(frozen=True)
class Rule:
    """Modules under any prefix of `room` must not import anything under a prefix of `never`."""

    room: tuple[str, ...]
    never: tuple[str, ...]
    why: str


RULES = (
    Rule(("batchinfer_kernels",), ("batchinfer", *TEXT, *FILES), "kernels touch tensors and nothing of ours"),
    Rule(("batchinfer_kernels.cost",), TORCH, "plan and report read the costs without torch"),
    Rule(("batchinfer.errors", "batchinfer.request"), (*TORCH, "batchinfer_kernels", *JOB), "vocabulary"),
    Rule(("batchinfer.job",), (*TORCH, "batchinfer.data", "batchinfer.plan", *HEAVY), "a job is read early"),
    Rule(("batchinfer.data",), (*HEAVY, "batchinfer.plan", "batchinfer.report"), "data touches storage"),
    Rule(("batchinfer.plan",), (*HEAVY, *TEXT, "batchinfer.report"), "plan is pure"),
    Rule(("batchinfer.report",), (*HEAVY, *TEXT, *JOB), "report reads plain numbers"),
    Rule(("batchinfer.pipeline",), TORCH, "the parent process stays free of torch"),
    Rule(("batchinfer.ops", "batchinfer.models"), (*JOB, "batchinfer.engine"), "they know the device only"),
    Rule(
        ("batchinfer.ops",),
        (
            "batchinfer.models.decoder",
            "batchinfer.models.block",
            "batchinfer.models.weights",
            "batchinfer.models.families",
        ),
        "of models, operators know what a layer is: its spec",
    ),
    Rule(
        (
            "batchinfer.models.spec",
            "batchinfer.models.parameters",
            "batchinfer.models.model_cost",
            "batchinfer.models.families",
        ),
        (*TORCH, "batchinfer.ops", "batchinfer.models.decoder"),
        "what a model is, is read without loading it",
    ),
    Rule(("batchinfer.engine",), (*TEXT, *FILES, *JOB, "batchinfer.report"), "token ids in, token ids out"),
    Rule(
        (
            "batchinfer.engine.scheduler",
            "batchinfer.engine.kv_cache",
            "batchinfer.engine.block_tables",
            "batchinfer.engine.table_sizes",
            "batchinfer.engine.admission",
            "batchinfer.engine.sequence",
        ),
        (*TORCH, "batchinfer_kernels", "batchinfer.ops", "batchinfer.models"),
        "the scheduler and the KV cache's book-keeping are pure ints",
    ),
    Rule(
        ("batchinfer.simulation",),
        (*TORCH, *TEXT, *FILES, *JOB, "batchinfer.ops", "batchinfer.launch", "batchinfer.report"),
        "requests and lengths in, counts out: the engine without a device",
    ),
    Rule(("batchinfer.launch",), ("batchinfer.pipeline",), "launch is called from above"),
    *(
        Rule(
            (room,),
            DATA_ROOMS[at + 1 :],
            f"the rooms of data import downwards only: {' <- '.join(DATA_ROOMS)}",
        )
        for at, room in enumerate(DATA_ROOMS[:-1])
    ),
)
# the one exception to "only ... may import" rules is named with it
ONLY = {
    "ray": ("batchinfer.launch",),
    "typer": ("batchinfer.cli",),
    "batchinfer.cli": ("batchinfer.__main__", "batchinfer.cli"),
    "batchinfer.pipeline": ("batchinfer.cli", "batchinfer.bench", "batchinfer.library"),
    "batchinfer.bench": ("batchinfer.cli", "batchinfer.verbs", "batchinfer.bench"),
    "batchinfer.launch": (
        "batchinfer.cli",
        "batchinfer.pipeline",
        "batchinfer.library",
        "batchinfer.collect",
        "batchinfer.bench",
        "batchinfer.launch",
    ),
    "pickle": (),
    "marshal": (),
}
MAY_SPEAK = ("batchinfer.cli", "batchinfer.__main__")
# processes of their own, which have nobody to raise to: they may end themselves, but print nothing
CHILDREN = ("batchinfer.data.prompts.render_worker", "batchinfer.launch.worker", "batchinfer.spawning")
# models/checkpoint.py inspects a checkpoint before anything loads, in the parent
TORCH_FREE = (
    "batchinfer.library",
    "batchinfer.models.checkpoint",
    "batchinfer.models.model_cost",
    "batchinfer.models.opening",
    "batchinfer.models.foreign.apart",
    "batchinfer.models.foreign.checkpoint",
    "batchinfer.models.foreign.spec",
)


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def imports(tree: ast.AST, module: str, package: bool = False) -> Iterator[tuple[str, int]]:
    """Every imported dotted name with its line, relative ones made absolute, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, package)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def import_faults(source: str, module: str, package: bool = False) -> list[str]:
    """What a module imports against the rules."""
    faults = []
    for name, line in imports(ast.parse(source), module, package):
        for rule in RULES:
            if any(under(module, room) for room in rule.room) and any(under(name, n) for n in rule.never):
                faults.append(f"{module}:{line} imports {name}: {rule.why}")
        for target, allowed in ONLY.items():
            if under(name, target) and not any(under(module, room) for room in allowed):
                faults.append(f"{module}:{line} imports {name}, which only {list(allowed)} may")
        if module in TORCH_FREE and any(under(name, n) for n in TORCH):
            faults.append(f"{module}:{line} imports {name}: it runs in the parent")
    return faults


def voice_faults(source: str, module: str) -> list[str]:
    """Where a module that is not the command line prints or ends the process."""
    if any(under(module, room) for room in MAY_SPEAK):
        return []
    wrong = _prints if module in CHILDREN else _prints_or_exits
    return [
        f"{module}:{node.lineno} {ast.unparse(node)[:60]}: only cli prints and exits"
        for node in ast.walk(ast.parse(source))
        if wrong(node)
    ]


def _prints(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in {"print", "builtins.print"}
    return isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"}


def _prints_or_exits(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise) and node.exc is not None:
        return ast.unparse(node.exc).split("(")[0] == "SystemExit"
    exits = isinstance(node, ast.Call) and ast.unparse(node.func) in {"sys.exit", "os._exit", "exit", "quit"}
    return exits or _prints(node)


def modules() -> Iterator[tuple[str, Path, bool]]:
    """(dotted name, file, is a package) of everything in both packages."""
    for folder, package in (("batchinfer", "batchinfer"), ("kernels", "batchinfer_kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            yield ".".join(parts[:-1] if is_package else parts), path, is_package


def test_no_room_imports_what_it_must_not() -> None:
    found = [
        fault
        for module, path, package in modules()
        for fault in import_faults(path.read_text(encoding="utf-8"), module, package)
    ]
    assert found == []


def test_only_the_command_line_prints_and_exits() -> None:
    found = [
        fault
        for module, path, _ in modules()
        for fault in voice_faults(path.read_text(encoding="utf-8"), module)
    ]
    assert found == []


def test_every_module_of_data_is_in_a_room() -> None:
    names = {module for module, _, _ in modules() if under(module, "batchinfer.data")} - {"batchinfer.data"}
    assert [name for name in names if not any(under(name, room) for room in DATA_ROOMS)] == []
    assert {room for room in DATA_ROOMS if room in names} == set(DATA_ROOMS)


def test_the_walk_finds_both_packages() -> None:
    names = {module for module, _, _ in modules()}
    assert {"batchinfer.errors", "batchinfer.report.meter", "batchinfer_kernels.cost"} <= names


PARENT_ROOMS = (
    "batchinfer.data",
    "batchinfer.plan",
    "batchinfer.simulation",
    "batchinfer.report",
    "batchinfer.job",
    "batchinfer.cli",
)


def test_importing_the_parent_process_brings_no_torch() -> None:
    """Import all of it, in a fresh process: what a module imports, its imports import too."""
    rooms = (*PARENT_ROOMS, "batchinfer.pipeline", *TORCH_FREE)
    names = [module for module, _, _ in modules() if any(under(module, room) for room in rooms)]
    # hundreds of tests start it, and torch takes ten times as long as the rest of it
    names.append("tests.fake_engine")
    lines = [f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]"]
    lines += ["sys.exit('torch is imported' if 'torch' in sys.modules else 0)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batchinfer.plan.planner", "import torch"),
        ("batchinfer.simulation.simulator", "from batchinfer.ops.choose import choose_ops"),
        ("batchinfer.plan.planner", "def f():\n    from torch import Tensor"),
        ("batchinfer.data.input.reader", "from batchinfer.engine import core"),
        ("batchinfer.data.input.reader", "from ...engine.core import Engine"),
        ("batchinfer.data.input.reader", "from ... import engine"),
        ("batchinfer.data.input.reader", "import torch.nn.functional as F"),
        ("batchinfer.report.meter", "from batchinfer.engine import core"),
        ("batchinfer.job", "import torch"),
        ("batchinfer.request", "if TYPE_CHECKING:\n    import torch"),
        ("batchinfer.pipeline", "import torch"),
        ("batchinfer.engine.core", "import tokenizers"),
        ("batchinfer.engine.core", "from batchinfer.data import reader"),
        ("batchinfer.engine.scheduler", "import torch"),
        ("batchinfer.engine.kv_cache", "from batchinfer_kernels import rope_store"),
        ("batchinfer.models.decoder", "from batchinfer.job import Job"),
        ("batchinfer.models.checkpoint", "import torch"),
        ("batchinfer.ops.choose", "from batchinfer.plan import planner"),
        ("batchinfer_kernels.rope_store", "from batchinfer.errors import UsageError"),
        ("batchinfer_kernels.cost", "import torch"),
        ("batchinfer.pipeline", "import ray"),
        ("batchinfer.launch.local", "import batchinfer.pipeline"),
        ("batchinfer.report.summary", "import batchinfer.cli"),
        ("batchinfer.data.results.manifest", "import pickle"),
        ("batchinfer.data.storage.durable", "from batchinfer.data.input.files import list_inputs"),
        ("batchinfer.data.storage.durable", "from ..input.files import list_inputs"),
        ("batchinfer.data.input.protocol", "if TYPE_CHECKING:\n    from batchinfer.data.prompts import keys"),
        ("batchinfer.data.prompts.keys", "from batchinfer.data.index.index import Index"),
        ("batchinfer.data.index.index", "from batchinfer.data.results.join import used_rows"),
    ],
)
def test_a_violation_is_caught(module: str, source: str) -> None:
    assert import_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batchinfer.launch.ray_launch", "import ray"),
        ("batchinfer.engine.model_runner", "import torch\nfrom batchinfer.models import decoder"),
        ("batchinfer.report.meter", "from batchinfer_kernels.cost import Cost"),
        ("batchinfer.plan.planner", "import duckdb, numpy, pyarrow"),
        ("batchinfer.data.results.join", "from batchinfer.data.index.index import Index"),
        ("batchinfer.data.index.ingest", "from batchinfer.data.storage.durable import FileOps"),
        ("batchinfer.data.input.reader", "from .rows import RowBatch\nimport torchlike"),
        ("batchinfer.cli", "from batchinfer import pipeline"),
    ],
)
def test_what_is_allowed_is_not_a_violation(module: str, source: str) -> None:
    assert import_faults(source, module) == []


def test_a_relative_import_in_a_package_is_resolved() -> None:
    assert import_faults("from .engine import core", "batchinfer.data", package=True) == []
    assert import_faults("from ..engine import core", "batchinfer.data", package=True)


@pytest.mark.parametrize(
    "source",
    ["print(1)", "import sys\nsys.exit(3)", "raise SystemExit(1)", "sys.stderr.write('x')", "exit()"],
)
def test_speaking_is_caught(source: str) -> None:
    assert voice_faults(source, "batchinfer.data.input.reader")
    assert voice_faults(source, "batchinfer.cli") == []
    assert voice_faults("stream.write('x'); table.print()", "batchinfer.data.input.reader") == []


def test_a_child_process_may_end_itself_but_not_print() -> None:
    assert voice_faults("raise SystemExit(1)", "batchinfer.launch.worker") == []
    assert voice_faults("print(1)", "batchinfer.launch.worker")
