"""The columns of the run table about time."""

from __future__ import annotations

from batchinfer.report.column import Column, count, ratio, real, seconds, text, total, whole
from batchinfer.report.tables.columns.formulas import host_s, known_sum, over, while_computing
from batchinfer.report.tables.columns.shared import mean_of_engines

# Idle time of replicas that ended before the last one, summed over replicas
_UNUSED_S = "(SELECT coalesce(max(wall_s) * $engines - sum(wall_s), 0) FROM walls)"

TIMES: tuple[Column, ...] = (
    seconds(
        "startup_s",
        "starting the command: imports, job file, checkpoint and its fingerprint, the state's lock",
    ),
    seconds("ingest_s", "reading, rendering and tokenising"),
    seconds("plan_s", "looking up stored answers, and planning"),
    seconds("load_s", "waiting for the model to be loaded after planning"),
    seconds(
        "operators_build_s",
        "compiling the CPU operators, in parallel with the phases up to `load_s`; null if they were compiled already",
    ),
    seconds("operators_wait_s", "part of `load_s`: waiting for the operators to be compiled"),
    seconds(
        "load_capture_s",
        "part of `load_s`: capturing graphs, in the replica that took longest; null on a CPU",
    ),
    count(
        "load_graph_bytes",
        "bytes",
        "GPU memory of the graphs captured while loading, in the replica with the most; null on a CPU",
    ),
    count(
        "load_free_bytes",
        "bytes",
        "GPU memory free after loading, in the replica with the least; null on a CPU",
    ),
    seconds("engine_s", "computing, measured by the command"),
    seconds("publish_s", "counting errors, joining and publishing the results"),
    seconds("close_s", "storing the last answers, ending the worker, writing these tables"),
    seconds("other_s", "part of `wall_s`: time outside of the other phases"),
    seconds(
        "engine_wall_s",
        "start of the first step to end of the last, idle time included, in the replica that took longest",
        sql="coalesce((SELECT max(wall_s) FROM walls), 0)",
    ),
    seconds(
        "model_s",
        "part of `engine_wall_s`: inside the model and the sampler",
        sql=mean_of_engines("model_s"),
    ),
    seconds(
        "overhead_s",
        "part of `engine_wall_s`: inside a step, outside of model and sampler",
        sql=mean_of_engines("duration_s - model_s"),
    ),
    seconds(
        "idle_s",
        "part of `engine_wall_s`: between steps of the same engine, and while other replicas still ran",
        sql=f"({total('gap_s')} + {_UNUSED_S}) / $engines",
    ),
    seconds(
        "idle_input_s",
        "devices idle without rows: `ingest_s`, and the part of `idle_s` in which the engine had no rows",
        formula=while_computing("ingest_s", "waited_s"),
    ),
    seconds(
        "idle_load_s",
        "devices idle until an engine was ready: `startup_s` and `load_s`",
        formula=while_computing("startup_s", "load_s"),
    ),
    seconds(
        "idle_plan_s", "devices idle while the run was planned: `plan_s`", formula=while_computing("plan_s")
    ),
    seconds(
        "idle_tail_s",
        "devices idle at the end, while other replicas still ran; part of `idle_s`",
        sql=f"{_UNUSED_S} / $engines",
    ),
    seconds(
        "idle_publish_s",
        "devices idle after the last answer: `publish_s` and `close_s`",
        formula=while_computing("publish_s", "close_s"),
    ),
    seconds(
        "idle_devices_s",
        "`idle_input_s` + `idle_load_s` + `idle_plan_s` + `idle_tail_s` + `idle_publish_s`; all are null for a run "
        "that computed nothing",
        formula=known_sum("idle_input_s", "idle_load_s", "idle_plan_s", "idle_tail_s", "idle_publish_s"),
    ),
    text(
        "expert_placement",
        "how whole experts are divided among ranks: `ranges` of their numbers, or `loads`: by the tokens of each in "
        "earlier runs; null if they are not divided",
    ),
    count(
        "expert_copies",
        "",
        "additional copies of experts on ranks, over all layers; null if experts are not divided",
    ),
    real(
        "expert_imbalance",
        "",
        "tokens of the rank with the most in a layer ÷ mean tokens of ranks, over all layers and the whole run, with "
        "equal shares for copies of an expert; null if experts are not divided or computed no token",
    ),
    seconds(
        "stage_wait_s",
        "time in which a stage waited for steps and for its neighbouring stages, as a mean over stages and engines; "
        "null without stages (`engine.pipeline_parallel_size`), and on GPUs",
    ),
    ratio(
        "stage_wait_share", "`stage_wait_s` / `engine_wall_s`", formula=over("stage_wait_s", "engine_wall_s")
    ),
    seconds(
        "collective_s",
        "part of `model_s`: sums and gathers over ranks, measured by rank 0, including its waiting for other ranks; "
        "the table `ranks` has the value of each rank; null if no ranks share layers, and on GPUs",
        sql=f"{whole('collective_s')} / $engines",
    ),
    ratio(
        "collective_share", "`collective_s` / `engine_wall_s`", formula=over("collective_s", "engine_wall_s")
    ),
    seconds(
        "metering_s",
        "time of measuring for this report: in the engine, for each step, and in the command",
        sql=mean_of_engines("metering_s"),
    ),
    seconds(
        "wall_load_s", "part of `wall_s`: `startup_s` and `load_s`", formula=known_sum("startup_s", "load_s")
    ),
    seconds(
        "wall_input_s",
        "part of `wall_s`: `ingest_s`, `plan_s`, and the part of `idle_s` in which the engine had no rows",
        formula=known_sum("ingest_s", "plan_s", "waited_s"),
    ),
    seconds("wall_device_s", "part of `wall_s`: `model_s`", formula=known_sum("model_s")),
    seconds("wall_host_s", "part of `wall_s`: the rest of `engine_s`, and `other_s`", formula=host_s),
    seconds(
        "wall_output_s",
        "part of `wall_s`: `publish_s` and `close_s`",
        formula=known_sum("publish_s", "close_s"),
    ),
    seconds("device_roofline_s", "part of `wall_device_s`: `roofline_s`"),
    seconds("device_padding_s", "part of `wall_device_s`: padded positions"),
    seconds("device_recomputation_s", "part of `wall_device_s`: tokens recomputed after a preemption"),
    *(
        seconds(f"device_{kind}_loss_s", f"part of `wall_device_s`: {what}, beyond the roofline")
        for kind, what in (
            ("linear", "linear layers and experts"),
            ("attention", "attention"),
            ("sampling", "the head and the sampler"),
            ("elementwise", "norms, activations and all other operators"),
        )
    ),
    seconds("device_other_loss_s", "part of `wall_device_s`: the fixed time per step, and the rest"),
)
