"""The tables of docs/models.md of model types that run through transformers' code, and of the others.

`python -m tests.foreign_table` rebuilds them; a test fails if they are outdated.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import transformers

from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.foreign.checkpoint import inspect_foreign
from batchinfer.models.foreign.probe import describe
from batchinfer.models.foreign.spec import CannotRun, ForeignSpec
from tests.foreign_models import RUNS, make_foreign, other_types, stated

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by `python -m tests.foreign_table` -->\n", "<!-- end -->"
HEAD = "| Attention | Model types |\n|---|---|\n"
REASONS = "| Why | Model types |\n|---|---|\n"


def attention_of(spec: ForeignSpec) -> str:
    """Return the features of a model's attention, as the page names them."""
    return ", ".join(_special(spec)) or "plain"


def _special(spec: ForeignSpec) -> Iterator[str]:
    """Yield requirements of its layers that plain attention does not meet."""
    layers = spec.layers
    if any(layer.window for layer in layers):
        yield "sliding window"
    if any(layer.soft_cap for layer in layers):
        yield "capped scores"
    if any(layer.sinks for layer in layers):
        yield "sinks"
    if any(layer.k_dim != layer.v_dim for layer in layers):
        yield "keys wider than values"
    if len({(layer.q_heads, layer.kv_heads, layer.head_dim) for layer in layers}) > 1:
        yield "layers with other heads"


def attention_on_page() -> dict[str, str]:
    """Return the attention of each type that runs."""
    return _first_cells(0, HEAD)


def reasons_on_page() -> dict[str, str]:
    """Return the reason of each type that does not run."""
    return _first_cells(1, REASONS)


def _first_cells(which: int, head: str) -> dict[str, str]:
    found = {}
    for line in _written(which).removeprefix(head).splitlines():
        _, first, kinds, _ = (part.strip() for part in line.split("|"))
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", kinds), first)
    return found


def _written(which: int) -> str:
    parts = re.findall(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", PAGE.read_text("utf-8"), re.DOTALL)
    found: str = parts[which]
    return found


def reason_of(kind: str) -> str | None:
    """Return the reason why a type outside of RUNS does not run, or None."""
    try:
        describe(stated(kind), {})
    except CannotRun as error:
        return error.reason
    return None


def _running() -> str:
    kinds: dict[str, list[str]] = {}
    for kind in sorted({*RUNS} - {*FAMILIES}):
        with tempfile.TemporaryDirectory() as folder:
            make_foreign(Path(folder), kind)
            spec = inspect_foreign(Path(folder), describe).spec
        kinds.setdefault(attention_of(spec), []).append(kind)
    return _table(HEAD, kinds)


def _refused() -> str:
    kinds: dict[str, list[str]] = {}
    for kind in other_types():
        kinds.setdefault(reason_of(kind) or "not tested", []).append(kind)
    return _table(REASONS, kinds)


def _table(head: str, kinds: dict[str, list[str]]) -> str:
    rows = [f"| {first} | {', '.join(f'`{kind}`' for kind in found)} |" for first, found in kinds.items()]
    return head + "".join(f"{row}\n" for row in sorted(rows))


def write() -> None:
    """Write both tables to the page."""
    fresh = iter((_running(), _refused()))
    text = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: BEGIN + next(fresh) + END,
        PAGE.read_text("utf-8"),
        flags=re.DOTALL,
    )
    PAGE.write_text(re.sub(r"transformers [0-9.]+[0-9]", f"transformers {transformers.__version__}", text))


if __name__ == "__main__":
    write()
