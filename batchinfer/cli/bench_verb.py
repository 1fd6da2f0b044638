"""The command `bench`, which measures the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchinfer.bench.options import DEFAULT_MODEL, DEFAULT_WORKLOADS, BenchOptions
from batchinfer.bench.workloads import WORKLOADS
from batchinfer.cli.terminal import say, say_json, tell
from batchinfer.core.text import printable
from batchinfer.models.checkpoint.shapes import SHAPES

Workloads = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[WORKLOAD]...",
        help=f"Any of {', '.join(WORKLOADS)}; by default {', '.join(DEFAULT_WORKLOADS)}.",
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"A shape run on dummy weights ({', '.join(SHAPES)}), a checkpoint folder, or `org/name` in the "
        "[Hugging Face cache](models.md#models-by-name).",
    ),
]
Dtype = Annotated[
    str, typer.Option(metavar="NAME", help="Type to compute in: `auto`, `bfloat16`, `float16` or `float32`.")
]
Quantization = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Quantisation of the linear layers, as in a job file: `auto`, `none`, `int4`, `int8`, `fp8` or "
        "`stored`.",
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Type of the values in the [KV cache](models.md#int8-and-fp8-in-the-kv-cache): `auto`, `int8` or `fp8` "
        "(GPUs only).",
    ),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Make answers independent of other rows.")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="Device to compute on: `auto`, `cpu` or `cuda`.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads; one per core by default.")]
MostSeqs = Annotated[int | None, typer.Option(metavar="N", help="Maximum sequences in a step.")]
MostBatchedTokens = Annotated[int | None, typer.Option(metavar="N", help="Maximum tokens in a step.")]
Rows = Annotated[
    int | None, typer.Option(metavar="N", help="Rows of each workload, instead of the workload's default.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Maximum tokens that a row generates, instead of the workload's default."),
]
Schemas = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        help="Also run each workload with this number of different JSON Schemas. May be repeated.",
        show_default=False,
    ),
]
WithDrafts = Annotated[
    bool,
    typer.Option(
        "--drafts",
        help="Also run each workload with [drafts](drafts.md) from each row's text and other answers.",
    ),
]
Repeat = Annotated[int, typer.Option(metavar="N", help="Timed runs, after one warm-up run.")]
Against = Annotated[
    str | None,
    typer.Option(metavar="ENGINE", help="Also run with another engine, in alternating runs: `transformers`."),
]
Export = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the workload as JSONL for another engine, and run nothing. An existing file is kept (exit code "
        "73).",
    ),
]


def bench(
    workloads: Workloads = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    deterministic: Deterministic = False,
    device: Device = "auto",
    threads: Threads = None,
    max_num_seqs: MostSeqs = None,
    max_num_batched_tokens: MostBatchedTokens = None,
    rows: Rows = None,
    max_tokens: MaxTokens = None,
    schemas: Schemas = None,
    drafts: WithDrafts = False,
    repeat: Repeat = 3,
    against: Against = None,
    export: Export = None,
) -> None:
    """Compare the speed of the engine with this machine's limit. The last line of stdout is JSON."""
    _run_bench(
        BenchOptions(
            workloads=tuple(workloads or DEFAULT_WORKLOADS),
            model=model,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            deterministic=deterministic,
            device=device,
            threads=threads,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            rows=rows,
            max_tokens=max_tokens,
            schemas=tuple(schemas or ()),
            drafts=drafts,
            repeat=repeat,
            against=against,
            export=export,
        )
    )


def _run_bench(options: BenchOptions) -> None:
    from batchinfer.bench.command import run_or_export

    text, facts = run_or_export(options, lambda line: tell(printable(line)))
    say(printable(text))
    say_json(facts)
