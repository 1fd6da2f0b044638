"""The verbs about this machine: doctor, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchinfer.bench.options import DEFAULT_MODEL, DEFAULT_WORKLOADS, BenchOptions
from batchinfer.bench.workloads import WORKLOADS
from batchinfer.cli.options import Json
from batchinfer.cli.terminal import painted, say, say_json, tell
from batchinfer.core.errors import UsageError
from batchinfer.core.text import printable
from batchinfer.models.checkpoint.shapes import SHAPES


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure this machine's peaks and how long steps take on it, for reports and forecasts.",
        ),
    ] = False,
    although_busy: Annotated[
        bool,
        typer.Option(
            "--although-busy",
            help="With --measure: measure even while other processes use the cores; the peaks come out too low.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what this machine has, and what batchinfer knows of it."""
    from batchinfer.verbs import measure as measurement
    from batchinfer.verbs import verbs

    if although_busy and not measure:
        raise UsageError("--although-busy has no effect without --measure; add --measure")
    if measure:
        tell("measuring matrix products, memory and steps of two small models, up to a minute ...")
        tell(printable(f"wrote {measurement.measure_hardware(although_busy, tell)}"))
    facts = verbs.machine_facts()
    if as_json:
        say_json({fact.name: fact.value for fact in facts})
        return
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        say(f"{painted(f'{fact.name:<{width}}', 'quiet')}  {printable(fact.value)}")


KvCacheOption = Annotated[str, typer.Option(help="What the KV cache keeps: auto, int8 or fp8 (GPUs only).")]


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]...",
            help=f"Any of {', '.join(WORKLOADS)}; {' '.join(DEFAULT_WORKLOADS)} by default.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"A shape run on dummy weights ({', '.join(SHAPES)}), a checkpoint folder, or org/name in the "
            "Hugging Face cache."
        ),
    ] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="Quantization of the linear layers, as in a job file: auto, none, int8, fp8 or stored."
        ),
    ] = "auto",
    kv_cache_dtype: KvCacheOption = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Make answers independent of what else runs.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; one per core by default.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in a step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in a step.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of each workload, instead of the workload's default.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens that a row generates, instead of the workload's default.")
    ] = None,
    schemas: Annotated[
        list[int] | None,
        typer.Option(
            help="Also run each workload with this many different JSON Schemas; may be given several times.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Timed runs, after one warm-up run that is not counted.")] = 3,
    against: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="Also run with another engine: transformers.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the workload as JSONL for another engine, and run nothing."),
    ] = None,
) -> None:
    """Measure how near to this machine's limit the engine comes. The last line of stdout is JSON."""
    names = tuple(workloads or DEFAULT_WORKLOADS)
    options = BenchOptions(
        names, model, dtype, quantization, kv_cache_dtype, deterministic, device, threads,
        max_num_seqs, max_num_batched_tokens, rows, max_tokens, tuple(schemas or ()), repeat, against, export,
    )  # fmt: skip
    _show_bench(options)


def _show_bench(options: BenchOptions) -> None:
    from batchinfer.verbs import verbs

    text, facts = verbs.bench(options, lambda line: tell(printable(line)))
    say(printable(text))
    say_json(facts)
