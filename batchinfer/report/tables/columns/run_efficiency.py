"""The columns of the run table about efficiency, latency, energy and cost."""

from __future__ import annotations

from batchinfer.report.column import Column, count, ratio, real, seconds, spread, total, whole
from batchinfer.report.tables.columns.formulas import cost_of, energy_per_token, known_sum, over

EFFICIENCY: tuple[Column, ...] = (
    count(
        "flops",
        "FLOP",
        "useful floating-point operations by the operators' declared costs",
        sql=total("flops"),
    ),
    count(
        "bytes_moved", "bytes", "bytes that had to move by the operators' declared costs", sql=total("bytes")
    ),
    ratio(
        "mfu",
        "`flops` ÷ (`engine_wall_s` × `peak_flops_per_s`)",
        formula=over("flops", "engine_wall_s", "peak_flops_per_s"),
    ),
    ratio(
        "mbu",
        "`bytes_moved` ÷ (`engine_wall_s` × `peak_bytes_per_s`)",
        formula=over("bytes_moved", "engine_wall_s", "peak_bytes_per_s"),
    ),
    seconds(
        "roofline_s",
        "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth)",
        sql=f"{whole('roofline_s')} / $engines",
    ),
    ratio(
        "roofline_efficiency", "`roofline_s` ÷ `engine_wall_s`", formula=over("roofline_s", "engine_wall_s")
    ),
    seconds(
        "step_bound_s",
        "Σ over steps of the same maximum: as if operators overlapped perfectly",
        sql="sum(greatest(flops / $fastest, bytes / $bytes_per_s)) / $engines",
    ),
    ratio(
        "step_bound_efficiency",
        "`step_bound_s` ÷ `engine_wall_s`; no higher than `roofline_efficiency`",
        formula=over("step_bound_s", "engine_wall_s"),
    ),
    real(
        "prompt_tokens_per_s",
        "tokens/s",
        "`prompt_tokens_run` ÷ `engine_wall_s`",
        formula=over("prompt_tokens_run", "engine_wall_s"),
    ),
    real(
        "output_tokens_per_s",
        "tokens/s",
        "`output_tokens` ÷ `engine_wall_s`",
        formula=over("output_tokens", "engine_wall_s"),
    ),
    real(
        "total_tokens_per_s",
        "tokens/s",
        "`prompt_tokens_per_s` + `output_tokens_per_s`",
        formula=known_sum("prompt_tokens_per_s", "output_tokens_per_s"),
    ),
    *spread("queue", "from the arrival of the request in the engine to the start of its first step"),
    *spread(
        "ttft", "from the arrival of the request in the engine to its first token (offline, mostly waiting)"
    ),
    *spread("tpot", "seconds per output token after the first, one value per request"),
    *spread("itl", "gap between two tokens of a sequence, one value per decoded token"),
    *spread("latency", "from the arrival of the request in the engine to its last token"),
    real(
        "energy_j", "J", "energy that the machine used while the engine ran: `cpu_energy_j` + `gpu_energy_j`"
    ),
    real(
        "cpu_energy_j",
        "J",
        "energy by the counters of the CPUs (RAPL); null if there are none, or only root may read them",
    ),
    real(
        "gpu_energy_j",
        "J",
        "energy by the GPU's counter (NVML); null if there is none, or the package `nvidia-ml-py` is missing",
    ),
    real(
        "energy_j_per_token",
        "J/token",
        "`energy_j` ÷ (`prompt_tokens_run` + `output_tokens`)",
        formula=energy_per_token,
    ),
    real("price_per_hour", "money/h", "price of the machine, as given by `--price-per-hour`"),
    real("cost", "money", "`wall_s` at this price", formula=cost_of("wall_s")),
    real("engine_cost", "money", "`engine_wall_s` at this price", formula=cost_of("engine_wall_s")),
)
