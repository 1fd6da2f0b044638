"""Runs `batchinfer bench`: measures the peaks, loads the model, runs all workloads, measures the peaks again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from batchinfer.bench.constrained import under_schemas, with_constraints
from batchinfer.bench.forecast import calibrated_time, forecast_seconds
from batchinfer.bench.ideal import ideal_job
from batchinfer.bench.options import BenchOptions
from batchinfer.bench.peer import TransformersPeer
from batchinfer.bench.report import BenchReport, Series, WorkloadResult
from batchinfer.bench.runs import timed_run
from batchinfer.bench.workloads import Row, Workload, make_workload
from batchinfer.core.errors import UsageError
from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.machine.facts import MachineFacts, this_machine
from batchinfer.machine.garbage import freeze_existing_objects
from batchinfer.machine.hardware import codes_of
from batchinfer.models.checkpoint.dummy import DummyWeights, write_checkpoint
from batchinfer.models.checkpoint.shapes import SHAPES, shape_config
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.ops.peaks import MeasuredPeaks, measure_peaks
from batchinfer.models.sources import ModelSource, Source, checkpoint_source
from batchinfer.models.spec.parameters import parameter_count
from batchinfer.pipeline.operators_build import build_operators
from batchinfer.plan.setup.resolve import auto_dtype, resolved_quantization
from batchinfer_kernels.arithmetic import Device, Dtype, KvCacheDtype, Quantization, RequestedQuantization
from batchinfer_kernels.cost import Peaks

Notice = Callable[[str], None]
Measure = Callable[[str, tuple[str, ...]], MeasuredPeaks]
PEER_WARM_UP = 8  # rows
WARM_UP_TOKENS = 4
DRAFTS: tuple[DraftSourceName, ...] = ("prompt", "answers")  # the draft sources that need no earlier result


def run_bench(options: BenchOptions, notice: Notice, measure: Measure | None = None) -> BenchReport:
    """Run all workloads of `batchinfer bench` and return the report.

    Args:
        options: The options of the command.
        notice: Called with a line of text for each step of the work.
        measure: Called with a device and dtypes to measure the peak rates; None: `measure_peaks`.

    Raises:
        UsageError: The options are wrong. Errors of loading and running are raised as well.
    """
    options.check()
    workloads = [workload_of(options, name) for name in options.workloads]
    machine = _machine(options)
    config = _engine_config(options, machine, longest=max(workload.longest for workload in workloads))
    load = config.load
    build_operators(load.device, notice, load.kv_cache == "int8")
    torch.set_num_threads(options.threads or machine.cores or 1)  # must precede the measurement of peaks
    measure = measure or _measure_of(options)
    before = _measured(load, measure, notice)
    notice(f"loading {options.model}")
    loaded = load_model(replace(config, peaks=before), _source(options, load.quantization))
    if options.schemas:
        loaded = with_constraints(loaded, options)
    with _peer(options, load, notice) as peer, freeze_existing_objects():
        series = [_run_series(loaded, workload, options, before, peer, notice) for workload in workloads]
    time = calibrated_time(load.device, load.dtype, load.quantization)
    peaks = best_peaks(before, _measured(load, measure, notice))
    results = [
        WorkloadResult(
            workload,
            ideal_job(workload.rows, loaded.runner.layout.windows),
            runs,
            None if time is None else forecast_seconds(loaded, workload.rows, time),
        )
        for workload, runs in zip(workloads, series, strict=True)
    ]
    return BenchReport(options, loaded.info, loaded.runner.cost, peaks, tuple(results))


def workload_of(options: BenchOptions, name: str) -> Workload:
    """Return a workload by its name, with token ids in the vocabulary of the model that `options` names."""
    spec = shape_config(options.model) if options.is_shape else open_checkpoint(options.folder).spec
    vocab = spec.vocab
    return make_workload(name, vocab, options.rows, options.max_tokens)


def best_peaks(before: Peaks, after: Peaks) -> Peaks:
    """Return for each peak rate the higher one of two measurements, because other load on the machine lowers them.

    Args:
        before: Peaks that were measured before the runs.
        after: Peaks that were measured after the runs.
    """
    integer = max(before.coded_ops_per_s or 0.0, after.coded_ops_per_s or 0.0)
    return Peaks(
        max(before.flops_per_s, after.flops_per_s),
        max(before.bytes_per_s, after.bytes_per_s),
        integer or None,
    )


def _machine(options: BenchOptions) -> MachineFacts:
    chosen = options.device
    if chosen == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
    return this_machine(cast(Device, chosen))


def _engine_config(options: BenchOptions, machine: MachineFacts, longest: int) -> EngineConfig:
    # To save memory, max_model_len is the length of the longest row of the workloads
    dtype = _dtype(options, machine)
    load = LoadConfig(
        model=options.folder,
        dtype=dtype,
        device=machine.device,
        threads=options.threads,
        quantization=_quantization(options, machine, dtype),
        deterministic=options.deterministic,
        tiles=machine.tiles,
        kv_cache=_kv_cache(options),
    )
    return EngineConfig(
        load,
        max_model_len=longest,
        longest=longest,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def _dtype(options: BenchOptions, machine: MachineFacts) -> Dtype:
    # Dummy weights count as stored in bfloat16
    if options.dtype != "auto":
        return cast(Dtype, options.dtype)
    stored: Dtype = "bfloat16" if options.is_shape else open_checkpoint(options.folder).dtype
    return auto_dtype(machine, stored)


def _quantization(options: BenchOptions, machine: MachineFacts, dtype: Dtype) -> Quantization:
    # For dummy weights, `auto` and `stored` mean none
    asked = cast(RequestedQuantization, options.quantization)
    if options.is_shape:
        found: Quantization = "none" if asked == "auto" or asked == "stored" else asked
    else:
        found = resolved_quantization(asked, open_checkpoint(options.folder), machine, dtype)
    if asked == "stored" and found == "none":
        what = "runs on dummy weights" if options.is_shape else "stores no quantised weights that can be used"
        raise UsageError(
            f"--quantization is 'stored', but {options.model} {what}; leave it out, or use another checkpoint"
        )
    return found


def _kv_cache(options: BenchOptions) -> KvCacheDtype:
    return cast(KvCacheDtype, options.kv_cache_dtype)


def _source(options: BenchOptions, quantization: Quantization) -> Source:
    if not options.is_shape:
        refused = open_checkpoint(options.folder).refusals(False, False, options.kv_cache_dtype != "auto")
        if refused:
            raise UsageError(f"--kv-cache-dtype is {options.kv_cache_dtype!r}, but {refused[0][1]}")
        return checkpoint_source(options.folder, _kv_cache(options), quantization)
    spec = shape_config(options.model).quantized(quantization).with_cache_dtype(_kv_cache(options))
    return ModelSource(spec, parameter_count(spec), lambda *place: DummyWeights(spec, *place))


def _measure_of(options: BenchOptions) -> Measure:
    # The tiny shape is for trying the command: a short measurement is enough
    if options.model == "tiny":
        return lambda device, dtypes: measure_peaks(device, dtypes, size=256, stream_bytes=2**22)
    return measure_peaks


def _measured(config: LoadConfig, measure: Measure, notice: Notice) -> Peaks:
    notice("measuring this machine's peaks")
    codes = codes_of(config.quantization, config.device)
    found = measure(config.device, (config.dtype, *([] if codes is None else [codes])))
    coded = None if codes is None else found.peak_flops[codes]
    return Peaks(found.peak_flops[config.dtype], found.bandwidth, coded)


@contextmanager
def _peer(options: BenchOptions, config: LoadConfig, notice: Notice) -> Iterator[TransformersPeer | None]:
    # Dummy weights are on disk inside of the context
    if options.against is None:
        yield None
        return
    notice(f"loading {options.model} in {options.against}")
    if not options.is_shape:
        yield TransformersPeer(config.model, config.dtype, config.device)
        return
    with temporary_folder("bench-model") as folder:
        weights = DummyWeights(shape_config(options.model), getattr(torch, config.dtype), config.device)
        write_checkpoint(Path(folder), SHAPES[options.model], weights)
        yield TransformersPeer(Path(folder), config.dtype, config.device)


def _run_series(
    loaded: LoadedModel,
    workload: Workload,
    options: BenchOptions,
    peaks: Peaks,
    peer: TransformersPeer | None,
    notice: Notice,
) -> Series:
    # Variants run in turns, so that they see the same load on the machine
    rows, repeat, series = workload.rows, options.repeat, Series()
    notice(f"{workload.name}: warm-up, {timed_run(loaded, rows).wall_s:.2f} s")
    if peer is not None:
        peer.run(_few(rows))
    for number in range(1, repeat + 1):
        series.ours.append(timed_run(loaded, rows))
        told = [f"{series.ours[-1].wall_s:.2f} s"]
        if workload.duplicates:
            series.without.append(timed_run(loaded, rows, deduplicate=False))
            told.append(f"without deduplication {series.without[-1].wall_s:.2f} s")
        for schemas in options.schemas:
            run = timed_run(loaded, under_schemas(rows, schemas, number))
            series.under.setdefault(schemas, []).append(run)
            told.append(f"under {schemas} schema{'s' * (schemas != 1)} {run.wall_s:.2f} s")
        if options.drafts:
            series.drafted.append(timed_run(replace(loaded, drafts=DRAFTS), rows, peaks=peaks))
            told.append(f"with drafts {series.drafted[-1].wall_s:.2f} s")
        if peer is not None:
            series.peer.append(peer.run(rows))
            told.append(f"{peer.name} {series.peer[-1].wall_s:.2f} s")
        notice(f"{workload.name}: run {number} of {repeat}, {', '.join(told)}")
    return series


def _few(rows: Sequence[Row]) -> list[Row]:
    return [Row(row.prompt, WARM_UP_TOKENS) for row in rows[:PEER_WARM_UP]]
