"""The sections that measure speed and memory on a CPU: `python -m tests.speed NAME`.

They are declared separately from their functions: the command imports none of them, as a process inherits the
peak memory of its parent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.suite.section import Option, SuiteEntry

PROMPTS = ("user", "template", "text", "messages", "schema", "openai")  # of `ingest`


def _option(*names: str, **settings: Any) -> Option:
    """Return an option of argparse. The default determines the type unless given."""
    default = settings.get("default")
    first = default[0] if isinstance(default, tuple) else default
    kind = {} if first is None else {"type": type(first), "help": "default: %(default)s"}
    return names, kind | ({"nargs": "+"} if isinstance(default, tuple) else {}) | settings


def _rounds(default: int) -> Option:
    return _option("--rounds", default=default, help="turns in which everything is measured")


def _section(name: str, source: str, about: str, *options: Option) -> SuiteEntry:
    return SuiteEntry(name, 1.0, f"{__name__}.{source}", about=about, options=options)


SECTIONS = (
    _section(
        "drafts",
        "drafts",
        "Decode steps of rows that copy their prompts, with drafts and without.",
        _option("--dtype", default="bfloat16"),
        _option("--edited", default=0.05, help="the share of an answer's tokens that are not its prompt's"),
        _option("--rows", default=(1, 2, 4, 8, 64)),
        _rounds(7),
    ),
    _section(
        "ingest",
        "ingest",
        "Ingest: rows a second, CPU time of the parent and its workers, and memory.",
        _option("--rows", default=50_000),
        _option("--characters", default=300),
        _option("--format", default=("jsonl",), choices=("jsonl", "parquet", "csv")),
        _option("--kind", default=("user",), choices=PROMPTS),
        _option("--workers", default=(1,)),
        _option("--vocab", default=32_000, help="of a tokenizer that is made; 0: a tiny one"),
        _option("--bare", action="store_true", help="carry no columns"),
    ),
    _section(
        "layer",
        "kernels",
        "Each operator in a decoder layer, compared with its bound and with other sources.",
        _option("--against", type=Path, nargs="*", default=[], help="folders of other sources"),
        _option("--model", choices=("135m", "1b"), default="135m"),
        _option("--rows", default=(16, 32, 64, 128, 512, 1024, 2048)),
        _option("--int8", action="store_true", help="products of codes"),
        _option("--dtype", choices=("bfloat16", "float32"), default="bfloat16"),
        _option("--one-core", action="store_true", help="the CPU time of one thread, as on a busy machine"),
        _option("--seconds", default=4.0, help="of each number of rows and each folder"),
    ),
    _section(
        "load",
        "loading:loads",
        "Loads of a checkpoint beside dd, which reads its files, cold and warm.",
        _option("--model", default="qwen2.5-0.5b"),
        _option("--shards", default=(1, 4), help="the numbers of files"),
        _option("--folder", type=Path, help="keeps the checkpoints"),
        _rounds(5),
    ),
    _section(
        "memory",
        "loading:memory",
        "The most memory that a load takes, for each published format of weights.",
        _option("names", nargs="*", metavar="FORMAT", help="published formats; all by default"),
    ),
    _section(
        "ray",
        "ray_jobs",
        "Jobs on a Ray cluster of two nodes, beside two processes: time, the driver's CPU time, and memory.",
        _option("--rows", default=(200_000,), help="of jobs whose engine answers at once"),
        _rounds(5),
    ),
    _section(
        "whole",
        "jobs",
        "Whole jobs of short rows: seconds by phase, CPU seconds, and memory.",
        _option("--rows", default=(100_000,)),
        _option("--workers", default="auto"),
    ),
)
