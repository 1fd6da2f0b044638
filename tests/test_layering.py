"""Tests which rooms may import which, and the layout of the source, read from all source files.

Data flows one way: no room imports from a later one. `ROOMS` has the order of the rooms, `SUB_ROOMS` the
order of the sub-rooms of input and store. Other rules are in the rest of this file.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.parsed_sources import nodes

ROOT = Path(__file__).parents[1]
TORCH = ("torch", "triton")
TEXT = ("tokenizers", "transformers", "jinja2")
FILES = ("pyarrow", "duckdb")

# The rooms of batchinfer/, from the ground up, each with the rooms that it may import. The package itself and
# __main__ are the doors: they may import every room, and none imports them.
LOWER = ("core", "machine", "job", "filesystem", "models", "report", "input", "store", "engine")
ROOMS: Mapping[str, tuple[str, ...]] = {
    "core": (),
    "machine": ("core",),
    "job": ("core",),
    "filesystem": ("core", "machine", "job"),
    "models": ("core", "machine", "filesystem"),
    "report": ("core", "machine"),
    "input": ("core", "machine", "job", "filesystem"),
    "store": ("core", "machine", "job", "filesystem", "input"),
    "engine": ("core", "machine", "models"),
    "plan": LOWER,
    "pipeline": (*LOWER, "plan"),
    "bench": (*LOWER, "plan", "pipeline"),
    "verbs": (*LOWER, "plan", "pipeline", "bench"),
    "cli": (*LOWER, "plan", "pipeline", "bench", "verbs"),
}
# From the ground up: a sub-room imports only sub-rooms before it. Modules in the root of input belong to its formats.
# Other rooms have sub-rooms too; they form no circle.
SUB_ROOMS: Mapping[str, tuple[str, ...]] = {
    "input": ("formats", "tokenizer", "tool_calls", "constraints", "prompts"),
    "store": ("kept", "index", "columns", "outputs", "accuracy", "answers", "results"),
}

MOST_ROOMS = 14
MOST_FLOORS = 10
MOST_IMPORTS = 25  # modules of ours that one file imports
MOST_MODULES = 20  # in one folder
DOORS = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}


@dataclass(frozen=True)
class Rule:
    """A rule: modules under a prefix of `room` may not import modules under a prefix of `never`."""

    room: tuple[str, ...]
    never: tuple[str, ...]
    why: str


RULES = (
    Rule(("batchinfer_kernels",), ("batchinfer", *TEXT, *FILES), "kernels touch tensors and nothing of ours"),
    Rule(("batchinfer_kernels.cost",), TORCH, "plan and report read the costs without torch"),
    Rule(("batchinfer.core",), (*TEXT, *FILES, "batchinfer_kernels"), "everything imports it"),
    Rule(
        ("batchinfer.core", "batchinfer.job", "batchinfer.pipeline"),
        TORCH,
        "the parent process stays free of torch",
    ),
    Rule(
        tuple(f"batchinfer.{room}" for room in ("machine", "filesystem", "input", "store", "report", "plan")),
        (*TORCH, "batchinfer_kernels.cpu", "batchinfer_kernels.gpu", "batchinfer.models.ops"),
        "the parent process stays free of torch",
    ),
    Rule(("batchinfer.report",), ("tokenizers", "transformers"), "the report reads plain numbers"),
    Rule(("batchinfer.report.tables",), TEXT, "only the page has templates"),
    Rule(("batchinfer.plan.order",), (*TEXT, "batchinfer.models", "batchinfer.report"), "the order is pure"),
    Rule(
        ("batchinfer.plan.setup",),
        (
            *(
                f"batchinfer.machine.{name}"
                for name in ("cpus", "memory", "devices", "limits", "facts.this_machine")
            ),
            *(f"batchinfer.machine.hardware.{name}" for name in ("detect", "nvidia_gpus", "has_fast_bf16")),
            "batchinfer_kernels.tiles",
            "importlib.metadata",
            "os",
        ),
        "a job is set up for the machine that its caller describes, which may be another one",
    ),
    Rule(
        ("batchinfer.models.files", "batchinfer.models.spec", "batchinfer.models.families"),
        TORCH,
        "a model's configuration is read without loading the model",
    ),
    Rule(("batchinfer.engine",), (*TEXT, *FILES), "token ids in, token ids out"),
    Rule(
        ("batchinfer.engine.schedule", "batchinfer.engine.kv"),
        (*TORCH, "batchinfer_kernels.cpu", "batchinfer_kernels.gpu", "batchinfer.models.ops"),
        "the scheduler and the KV cache's book-keeping are integers",
    ),
    Rule(
        ("batchinfer.plan.simulation",),
        (*TEXT, *FILES, "batchinfer.input", "batchinfer.store", "batchinfer.job", "batchinfer.report"),
        "requests and lengths in, counts out: the engine without a device",
    ),
)
# what only some may import
ONLY = {
    "ray": ("batchinfer.pipeline.workers.ray",),
    "typer": ("batchinfer.cli",),
    "pickle": (),
    "marshal": (),
}
MAY_SPEAK = ("batchinfer.cli", "batchinfer.__main__")
# child processes, which have no caller to raise to: they may exit, but not print
CHILDREN = (
    "batchinfer.input.prompts.render_worker",
    "batchinfer.pipeline.calibration.process",
    "batchinfer.pipeline.workers.endings",
    "batchinfer.pipeline.workers.ranks.others",
    "batchinfer.pipeline.workers.ranks.process",
    "batchinfer.pipeline.workers.ray.engine_actor",
    "batchinfer.pipeline.workers.worker",
    "batchinfer.machine.spawning",
)
# a checkpoint is inspected before anything loads, in the parent
TORCH_FREE = (
    "batchinfer.models.checkpoint.checkpoint",
    "batchinfer.models.checkpoint.config",
    "batchinfer.models.opening",
    "batchinfer.models.foreign.checkpoint",
    "batchinfer.models.foreign.spec",
)
Graph = Mapping[str, set[str]]


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def imports(source: str, module: str, package: bool = False) -> Iterator[tuple[str, int]]:
    """Yield every imported dotted name with its line, including relative imports and imports in functions."""
    for node in nodes(source, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    for node in nodes(source, ast.ImportFrom):
        base = _absolute(node, module, package)
        yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def import_faults(source: str, module: str, package: bool = False) -> list[str]:
    """Return the imports of a module that break the rules."""
    faults = []
    for name, line in imports(source, module, package):
        where = f"{module}:{line} imports {name}"
        faults += [f"{where}: {why}" for why in _faults_of_rooms(module, name)]
        for rule in RULES:
            if any(under(module, room) for room in rule.room) and any(under(name, n) for n in rule.never):
                faults.append(f"{where}: {rule.why}")
        for target, allowed in ONLY.items():
            if under(name, target) and not any(under(module, room) for room in allowed):
                faults.append(f"{where}, which only {list(allowed)} may")
        if module in TORCH_FREE and any(under(name, n) for n in TORCH):
            faults.append(f"{where}: it runs in the parent")
    return faults


def _faults_of_rooms(module: str, name: str) -> Iterator[str]:
    own, target = room_of(module), room_of(name)
    if own is None or not under(name, "batchinfer"):
        return
    if target is None:
        yield "the package is the door, which no room imports"
    elif target != own and target not in ROOMS.get(own, ()):
        yield f"{own}/ may import {list(ROOMS.get(own, ()))}"
    elif own == target and own in SUB_ROOMS and module != f"batchinfer.{own}":
        order = SUB_ROOMS[own]
        if _height(name, order) > _height(module, order):
            yield f"the sub-rooms of {own} import in one direction: {' <- '.join(order)}"


def room_of(module: str) -> str | None:
    """Return the room of a module of ours, or None for top-level and foreign modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "batchinfer" and len(parts) > 1 and parts[1] in ROOMS else None


def _height(module: str, order: Sequence[str]) -> int:
    """Return the position of a module's sub-room in `order`, or 0 for modules in the root of a room."""
    part = ".".join(module.split(".")[2:3])
    return order.index(part) if part in order else 0


def voice_faults(source: str, module: str) -> list[str]:
    """Return the places where a module other than the command line prints or ends the process."""
    if any(under(module, room) for room in MAY_SPEAK):
        return []
    wrong = _prints if module in CHILDREN else _prints_or_exits
    return [
        f"{module}:{node.lineno} {ast.unparse(node)[:60]}: only cli prints and exits"
        for node in nodes(source, ast.Call, ast.Attribute, ast.Raise)
        if wrong(node)
    ]


def _prints(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _name(node.func) in {"print", "builtins.print"}
    return isinstance(node, ast.Attribute) and _name(node) in {"sys.stdout", "sys.stderr"}


def _prints_or_exits(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise) and node.exc is not None:
        return ast.unparse(node.exc).split("(")[0] == "SystemExit"
    exits = isinstance(node, ast.Call) and _name(node.func) in {"sys.exit", "os._exit", "exit", "quit"}
    return exits or _prints(node)


def _name(node: ast.AST) -> str:
    """Return the dotted name of an expression, or ""."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def modules() -> Iterator[tuple[str, Path, bool]]:
    """Yield (dotted name, file, is a package) of all modules in both packages."""
    for folder, package in (("batchinfer", "batchinfer"), ("kernels", "batchinfer_kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            yield ".".join(parts[:-1] if is_package else parts), path, is_package


@cache
def import_graph() -> Graph:
    """Return our imports per module, including imports in functions."""
    sources = {module: (path, package) for module, path, package in modules()}
    graph: dict[str, set[str]] = {}
    for module, (path, package) in sources.items():
        names = {name for name, _ in imports(path.read_text("utf-8"), module, package)}
        ours = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in ours if name in sources and name != module}
    return graph


def grouped(graph: Graph, group: Callable[[str], str | None]) -> Graph:
    """Return the graph between groups of modules, without modules whose group is None."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        if (own := group(module)) is not None:
            arrows[own] |= {other for target in targets if (other := group(target)) not in (None, own)}
    return arrows


def circles(graph: Graph) -> list[list[str]]:
    """Return groups of nodes that lead back to themselves through each other."""
    reached = {node: _reached(graph, node) for node in graph}
    found = {frozenset(other for other in reached[node] if node in reached.get(other, ())) for node in graph}
    return sorted(sorted(circle) for circle in found if circle)


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def floors(graph: Graph) -> int:
    """Return the number of nodes on the longest path of a graph without cycles."""
    height: dict[str, int] = {}

    def of(node: str) -> int:
        if node not in height:
            height[node] = 1 + max(map(of, graph.get(node, ())), default=0)
        return height[node]

    return max(map(of, graph))


def sub_room(module: str) -> str | None:
    parts = module.split(".")
    return ".".join(parts[1:3]) if len(parts) > 3 else None


def test_no_room_breaks_its_import_rules() -> None:
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


def holds_sources(path: Path) -> bool:
    """Return True if the folder has sources, not only compiled modules that git left."""
    return path.is_file() or any(path.rglob("*.py"))


def test_every_entry_is_a_room() -> None:
    """All modules belong to a room, and no folder is a catch-all."""
    entries = {path.name for path in (ROOT / "batchinfer").iterdir() if holds_sources(path)} - DOORS
    assert entries == set(ROOMS)
    assert len(entries) <= MOST_ROOMS
    for room, order in SUB_ROOMS.items():
        assert {p.name for p in (ROOT / "batchinfer" / room).iterdir() if p.is_dir()} - DOORS == set(order)
    held = Counter(path.parent for _, path, package in modules() if not package)
    wide = {str(folder.relative_to(ROOT)): n for folder, n in held.items() if n > MOST_MODULES}
    assert {name: n for name, n in wide.items() if not name.startswith("kernels")} == {}


def test_there_are_no_circles() -> None:
    graph = import_graph()
    assert circles(graph) == []
    assert circles(grouped(graph, room_of)) == []
    assert circles(grouped(graph, sub_room)) == []
    assert floors(grouped(graph, room_of)) <= MOST_FLOORS


def test_no_module_knows_everything() -> None:
    counts = {module: sum(room_of(t) is not None for t in ts) for module, ts in import_graph().items()}
    assert {module: count for module, count in counts.items() if count > MOST_IMPORTS} == {}


def test_the_table_of_rooms_goes_upwards() -> None:
    names = list(ROOMS)
    assert [
        (room, low) for room in names for low in ROOMS[room] if names.index(low) >= names.index(room)
    ] == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert circles(graph) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


def test_the_walk_finds_both_packages() -> None:
    names = {module for module, _, _ in modules()}
    assert {"batchinfer.core.errors", "batchinfer.report.tables.meter", "batchinfer_kernels.cost"} <= names
    assert "batchinfer.core.errors" in import_graph()["batchinfer.job.spec"]


PARENT_ROOMS = tuple(
    f"batchinfer.{room}"
    for room in (
        "core",
        "machine",
        "job",
        "filesystem",
        "report",
        "input",
        "store",
        "plan.order",
        "plan.simulation",
        "cli",
    )
)


def test_importing_the_parent_process_brings_no_torch() -> None:
    """Imports all of it in a fresh process, including indirect imports."""
    rooms = (*PARENT_ROOMS, "batchinfer.pipeline.run", "batchinfer.pipeline.library", *TORCH_FREE)
    names = [module for module, _, _ in modules() if any(under(module, room) for room in rooms)]
    # hundreds of tests start it, and torch takes ten times the rest
    names.append("tests.fake_engine")
    lines = [f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]"]
    lines += ["sys.exit('torch is imported' if 'torch' in sys.modules else 0)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batchinfer.plan.setup.resolve", "from batchinfer.machine.facts import this_machine"),
        ("batchinfer.plan.order.planner", "import torch"),
        ("batchinfer.plan.simulation.simulator", "from batchinfer.models.ops.choose import choose_ops"),
        ("batchinfer.plan.order.planner", "def f():\n    from torch import Tensor"),
        ("batchinfer.input.reader", "from batchinfer.engine import core"),
        ("batchinfer.input.formats.jsonl", "from ...engine.core import Engine"),
        ("batchinfer.input.formats.jsonl", "from ... import engine"),
        ("batchinfer.input.reader", "import torch.nn.functional as F"),
        ("batchinfer.report.tables.meter", "from batchinfer.engine import core"),
        ("batchinfer.report.tables.meter", "from batchinfer.job import Job"),
        ("batchinfer.job", "import torch"),
        ("batchinfer.core.request", "if TYPE_CHECKING:\n    import torch"),
        ("batchinfer.core.errors", "from batchinfer import __version__"),
        ("batchinfer.core.errors", "from batchinfer.machine.cpus import usable_cpus"),
        ("batchinfer.pipeline.run", "import torch"),
        ("batchinfer.pipeline.run", "import ray"),
        ("batchinfer.pipeline.run", "import batchinfer.cli"),
        ("batchinfer.engine.loop.engine", "import tokenizers"),
        ("batchinfer.engine.loop.engine", "from batchinfer.input import reader"),
        ("batchinfer.engine.loop.engine", "from batchinfer.report.tables import meter"),
        ("batchinfer.engine.schedule.scheduler", "import torch"),
        ("batchinfer.engine.kv.kv_cache", "from batchinfer.models.ops.interface import Ops"),
        ("batchinfer.models.decoder.decoder", "from batchinfer.job import Job"),
        ("batchinfer.models.checkpoint.checkpoint", "import torch"),
        ("batchinfer.models.ops.choose", "from batchinfer.plan.order import planner"),
        ("batchinfer_kernels.rope_store", "from batchinfer.core.errors import UsageError"),
        ("batchinfer_kernels.cost", "import torch"),
        ("batchinfer.pipeline.workers.local", "import batchinfer.verbs.query"),
        ("batchinfer.report.summary", "import batchinfer.cli"),
        ("batchinfer.store.results.manifest", "import pickle"),
        ("batchinfer.filesystem.durable", "from batchinfer.input.files import list_inputs"),
        ("batchinfer.filesystem.durable", "from ..input.files import list_inputs"),
        ("batchinfer.input.protocol", "if TYPE_CHECKING:\n    from batchinfer.input.prompts import keys"),
        ("batchinfer.input.prompts.keys", "from batchinfer.store.index.index import Index"),
        ("batchinfer.store.index.index", "from batchinfer.store.results.join import joined"),
    ],
)
def test_a_violation_is_caught(module: str, source: str) -> None:
    assert import_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batchinfer.pipeline.workers.ray.cluster", "import ray"),
        (
            "batchinfer.engine.runner.model_runner",
            "import torch\nfrom batchinfer.models.decoder import decoder",
        ),
        ("batchinfer.report.tables.meter", "from batchinfer_kernels.cost import Cost"),
        ("batchinfer.plan.order.planner", "import duckdb, numpy, pyarrow"),
        ("batchinfer.store.results.join", "from batchinfer.store.index.index import Index"),
        ("batchinfer.store.index.ingest", "from batchinfer.filesystem.durable import FileOps"),
        ("batchinfer.input.reader", "from .rows import RowBatch\nimport torchlike"),
        ("batchinfer.cli", "from batchinfer.pipeline import run"),
    ],
)
def test_allowed_imports_are_no_violation(module: str, source: str) -> None:
    assert import_faults(source, module) == []


def test_a_relative_import_in_a_package_is_resolved() -> None:
    assert import_faults("from .answers import parts", "batchinfer.store", package=True) == []
    assert import_faults("from ..engine import core", "batchinfer.store", package=True)


@pytest.mark.parametrize(
    "source",
    ["print(1)", "import sys\nsys.exit(3)", "raise SystemExit(1)", "sys.stderr.write('x')", "exit()"],
)
def test_speaking_is_caught(source: str) -> None:
    assert voice_faults(source, "batchinfer.input.reader")
    assert voice_faults(source, "batchinfer.cli") == []
    assert voice_faults("stream.write('x'); table.print()", "batchinfer.input.reader") == []


def test_a_child_process_may_end_itself_but_not_print() -> None:
    assert voice_faults("raise SystemExit(1)", "batchinfer.pipeline.workers.worker") == []
    assert voice_faults("print(1)", "batchinfer.pipeline.workers.worker")
