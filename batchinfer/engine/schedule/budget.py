"""Chooses the limits of the scheduler from the costs of the model and the peaks of the device."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.engine.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from batchinfer.engine.schedule.batched_admission import AdmissionCosts
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer_kernels.cost import ModelCost, Peaks

DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}

LEAST, MOST = 512, 8192  # bounds of the computed budget, in tokens per step
# In a full step, matrix products take AMORTISED times the time of reading the weights (docs/measurements/scheduling.md)
AMORTISED = 128

# Host time of a decode step on a GPU, per step and per row. 0.9 ms for 256 rows were measured without CUDA calls
# (docs/measurements/gpu.md); replaying the graph is assumed to take the same time again.
HOST_STEP_S, HOST_ROW_S = 1e-3, 3.5e-6
# Host time of each further step of a multi-step launch, per step and per row. 0.9 ms for 1,024 rows were measured
# without CUDA calls (docs/measurements/gpu.md). 0.4 ms of the first number are an assumption for CUDA calls.
HOST_REPEAT_S, HOST_REPEAT_ROW_S = 0.5e-3, 0.8e-6
# Host time to launch a layer without a graph. Measured on an H100's host: a prompt of 512 tokens through the 32 layers
# of an 8B Llama took 35.5 ms, and the device was busy for a third of it.
LAUNCH_LAYER_S = 1.1e-3
# Host time to launch a layer with piecewise graphs. Not measured on such a host: the time above, scaled by the measured
# ratio of another machine, 65 of 222 µs (docs/measurements/gpu.md).
REPLAY_LAYER_S = 0.33e-3


def further_host_s(steps: float, rows: int) -> float:
    """Return the estimated host time in seconds for the second and later steps of a multi-step launch.

    Args:
        steps: The number of steps after the first one.
        rows: The number of rows per step.
    """
    return steps * (HOST_REPEAT_S + rows * HOST_REPEAT_ROW_S)


def step_tokens(cost: ModelCost, peaks: Peaks | None, max_num_seqs: int, default: int) -> int:
    """Choose the maximum number of tokens per step, so that full steps are bound by arithmetic in linear layers.

    The result is a power of two from 512 to 8192, or 2 * `max_num_seqs` if that is larger.

    Args:
        cost: Computes the FLOPs and memory traffic of a step of the model.
        peaks: The peak FLOP/s and bandwidth of the device, or None if unknown.
        max_num_seqs: The maximum number of running sequences.
        default: The result if `peaks` is None.
    """
    if peaks is None:
        return default
    operations = peaks.coded_ops_per_s if cost.quantized else None
    per_byte = (operations or peaks.flops_per_s) / peaks.bytes_per_s
    tokens = int(AMORTISED * cost.weight_itemsize * per_byte / 2 * cost.parameters / cost.active_parameters)
    rounded = 1 << max(0, tokens - 1).bit_length()
    return max(min(max(rounded, LEAST), MOST), 2 * max_num_seqs)


def admission_costs(cost: ModelCost, peaks: Peaks | None, pieces: bool = True) -> AdmissionCosts:
    """Return the estimated times from which the scheduler of a GPU engine decides when to admit sequences.

    Args:
        cost: Computes the FLOPs and memory traffic of a step of the model.
        peaks: The peak FLOP/s and bandwidth of the device. None: device times are 0.
        pieces: True if steps with prompts are captured as piecewise CUDA graphs, which are faster to launch.
    """
    host_costs = AdmissionCosts(
        launch_s=(REPLAY_LAYER_S if pieces else LAUNCH_LAYER_S) * cost.layers,
        host_step_s=HOST_STEP_S,
        host_row_s=HOST_ROW_S,
    )
    if peaks is None:
        return host_costs
    return replace(
        host_costs,
        weights_s=cost.parameters * cost.weight_itemsize / peaks.bytes_per_s,
        token_s=_token_s(cost, peaks),
        kv_token_s=cost.kv_bytes(1) / peaks.bytes_per_s,
    )


def _token_s(cost: ModelCost, peaks: Peaks) -> float:
    operations = (peaks.coded_ops_per_s if cost.quantized else None) or peaks.flops_per_s
    return 2 * cost.active_parameters / operations


def captured_tokens(cost: ModelCost, peaks: Peaks | None, most: int = MOST) -> int:
    """Return the number of tokens of the largest step with prompts that is captured as CUDA graphs.

    In larger steps, the device needs more time than the host, so a graph would gain nothing.

    Args:
        cost: Computes the FLOPs and memory traffic of a step of the model.
        peaks: The peak FLOP/s and bandwidth of the device. None: the result is `most`.
        most: The maximum result.
    """
    # The factor 2 is a margin: the host launches a step during the previous step, which may be short
    return most if peaks is None else min(2 * int(LAUNCH_LAYER_S * cost.layers / _token_s(cost, peaks)), most)


def least_copied(cost: ModelCost, peaks: Peaks | None) -> int | None:
    """Return the minimum number of tokens for which copying keys and values from another block is worthwhile.

    Args:
        cost: Computes the FLOPs and memory traffic of a step of the model.
        peaks: The peak FLOP/s and bandwidth of the device. None: the result is 1.

    Returns:
        1 if copying a token's keys and values is faster than computing them. Else None: nothing is copied.
    """
    if peaks is None:
        return 1
    copying = sum(operator.copied.seconds(peaks) for operator in cost.operators)
    running = sum(operator.token.seconds(peaks) for operator in cost.operators)
    return 1 if copying < running else None


def scheduler_config(config: EngineConfig, cost: ModelCost, captured: bool = True) -> SchedulerConfig:
    """Return the limits of the scheduler. Limits that the job does not set are chosen for the model and the device.

    Args:
        config: The settings of the engine.
        cost: Computes the FLOPs and memory traffic of a step of the model.
        captured: True if a GPU engine captures steps as CUDA graphs. False: admission is not delayed.
    """
    device = config.load.device
    seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device]
    default = DEFAULT_MAX_NUM_BATCHED_TOKENS[device]
    tokens = config.max_num_batched_tokens or step_tokens(cost, config.peaks, seqs, default)
    if not cost.causal:  # an encoder runs each prompt in a single step
        tokens = max(tokens, config.longest)
    waits = device == "cuda" and captured
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        prefix_caching=config.prefix_caching,
        admission_costs=admission_costs(cost, config.peaks) if waits else None,
        least_copied=least_copied(cost, config.peaks),
        whole_prompts=not cost.causal,
        most_adapters=config.load.adapter_slots,
    )
