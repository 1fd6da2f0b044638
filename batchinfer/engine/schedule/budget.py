"""Computes how many tokens a step may run."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.engine.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from batchinfer.engine.schedule.batched_admission import AdmissionCosts
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer_kernels.cost import ModelCost, Peaks

DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}

LEAST, MOST = 512, 8192
# Reading the weights may take this part of a step's matrix products (docs/measurements/scheduling.md)
AMORTISED = 128

# What a decode step takes a GPU's host, and each of its rows: 0.9 ms for 256 rows were measured without CUDA calls
# (docs/measurements/gpu.md), and replaying its graph is taken to be as long again.
HOST_STEP_S, HOST_ROW_S = 1e-3, 3.5e-6
# What each further step that is launched at once with one takes the host, and each row of it: 0.9 ms of 1,024 rows were
# measured without CUDA calls (docs/measurements/gpu.md). Replaying the graph, and launching the head, the sampler and
# the kernel that moves rows on, is taken to be 0.4 ms of the first number; not measured.
HOST_REPEAT_S, HOST_REPEAT_ROW_S = 0.5e-3, 0.8e-6
# What the host takes to launch a layer of a step that no graph covers: 1.1 ms on an H100's host (a prompt of 512 tokens
# through 32 layers of an 8B Llama took 35.5 ms, a third of which the device worked).
LAUNCH_LAYER_S = 1.1e-3
# The same where all but attention is captured. Not measured on such a host: the same share of the time above as our
# part of launching such a layer took on another machine, 65 of 222 µs (docs/measurements/gpu.md).
REPLAY_LAYER_S = 0.33e-3


def further_host_s(steps: float, rows: int) -> float:
    """Return about how long a GPU's host takes for so many steps that it launches at once with another one."""
    return steps * (HOST_REPEAT_S + rows * HOST_REPEAT_ROW_S)


def step_tokens(cost: ModelCost, peaks: Peaks | None, max_num_seqs: int, default: int) -> int:
    """The step budget at which linear layers are bound by compute, with a margin; `default` where peaks are unknown.

    A weight of b bytes is read once a step and serves two operations a token, so reading takes 1 / AMORTISED of
    computing at AMORTISED × b / 2 × peak operations / bandwidth tokens; at more of them where a token multiplies only a
    part of the weights, as it does with experts. Rounded up to a power of two, within
    LEAST and MOST, and twice max_num_seqs at least, so that a full batch leaves room for reading prompts.
    """
    if peaks is None:
        return default
    operations = peaks.coded_ops_per_s if cost.quantized else None
    per_byte = (operations or peaks.flops_per_s) / peaks.bytes_per_s
    tokens = int(AMORTISED * cost.weight_itemsize * per_byte / 2 * cost.parameters / cost.active_parameters)
    rounded = 1 << max(0, tokens - 1).bit_length()
    return max(min(max(rounded, LEAST), MOST), 2 * max_num_seqs)


def admission_costs(cost: ModelCost, peaks: Peaks | None, pieces: bool = True) -> AdmissionCosts:
    """Compute what decides when places are filled on a GPU. `pieces`: steps that read prompts are captured in
    pieces."""
    known = AdmissionCosts(
        launch_s=(REPLAY_LAYER_S if pieces else LAUNCH_LAYER_S) * cost.layers,
        host_step_s=HOST_STEP_S,
        host_row_s=HOST_ROW_S,
    )
    if peaks is None:
        return known
    return replace(
        known,
        weights_s=cost.parameters * cost.weight_itemsize / peaks.bytes_per_s,
        token_s=_token_s(cost, peaks),
        kv_token_s=cost.kv_bytes(1) / peaks.bytes_per_s,
    )


def _token_s(cost: ModelCost, peaks: Peaks) -> float:
    """Estimate the seconds that computing a token takes, attention left out."""
    operations = (peaks.coded_ops_per_s if cost.quantized else None) or peaks.flops_per_s
    return 2 * cost.active_parameters / operations


def captured_tokens(cost: ModelCost, peaks: Peaks | None, most: int = MOST) -> int:
    """The tokens of the largest step that reads prompts and is captured: a larger one takes a GPU twice as long as its
    host takes to launch it, operator by operator. Twice, as the step before, while which it is launched, may be short.
    """
    return most if peaks is None else min(2 * int(LAUNCH_LAYER_S * cost.layers / _token_s(cost, peaks)), most)


def least_copied(cost: ModelCost, peaks: Peaks | None) -> int | None:
    """The fewest tokens that it pays to copy from another block: both copying and running a token take the same time
    for each, so it is one or, where copying takes longer, None. Where peaks are unknown it is taken to pay."""
    if peaks is None:
        return 1
    copying = sum(operator.copied.seconds(peaks) for operator in cost.operators)
    running = sum(operator.token.seconds(peaks) for operator in cost.operators)
    return 1 if copying < running else None


def scheduler_config(config: EngineConfig, cost: ModelCost, captured: bool = True) -> SchedulerConfig:
    """The scheduler's limits: the job's own, else those that suit the model and the machine. `captured`: a GPU's steps
    can be; where none can, one that only decodes costs the host as much as others."""
    device = config.load.device
    seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device]
    default = DEFAULT_MAX_NUM_BATCHED_TOKENS[device]
    tokens = config.max_num_batched_tokens or step_tokens(cost, config.peaks, seqs, default)
    if not cost.causal:  # a step has to take the longest prompt
        tokens = max(tokens, config.longest)
    waits = device == "cuda" and captured
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        prefix_caching=config.prefix_caching,
        admission_costs=admission_costs(cost, config.peaks) if waits else None,
        least_copied=least_copied(cost, config.peaks),
        whole_prompts=not cost.causal,
        most_adapters=config.load.adapter_places,
    )
