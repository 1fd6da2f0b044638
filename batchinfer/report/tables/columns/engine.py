"""The columns of the tables steps, requests and ranks."""

from __future__ import annotations

import pyarrow as pa

from batchinfer.report.column import Column, count, real, seconds, text
from batchinfer.report.tables.columns.shared import RUN_ID, WHICH_ENGINE, drafts

STEP_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    *WHICH_ENGINE,
    count("step", "", "number of the step in its engine"),
    seconds("started_s", "start of the step, since the engine started"),
    seconds("duration_s", "length of the step"),
    seconds("interval_s", "end of the previous step to end of this step; null in an engine's first step"),
    seconds("model_s", "part of `duration_s`: inside the model and the sampler"),
    count("prefill_tokens", "tokens", "computed prompt tokens, and all tokens recomputed after a preemption"),
    count("decode_tokens", "tokens", "output tokens computed for the first time, to sample the next token"),
    count("recomputed_tokens", "tokens", "part of `prefill_tokens`: tokens recomputed after a preemption"),
    count("cached_tokens", "tokens", "prompt tokens not computed because their prefix was in the KV cache"),
    count(
        "sampled_tokens",
        "tokens",
        "positions whose logits were computed: tokens sampled, and `scored_positions`",
    ),
    count(
        "padded_tokens",
        "tokens",
        "unused query positions: padding, steps of rows that had ended, rejected drafts",
    ),
    count("running", "sequences", "running sequences after scheduling"),
    count("waiting", "sequences", "waiting sequences after scheduling"),
    count("preemptions", "times", "sequences preempted"),
    count("blocks_used", "blocks", "KV blocks in use"),
    count("blocks_total", "blocks", "KV blocks in total"),
    count("flops", "FLOP", "useful floating-point operations: without padding and recomputation"),
    count("bytes", "bytes", "bytes that had to move"),
    seconds("roofline_s", "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth); null: peaks unknown"),
    count(
        "forced_tokens",
        "tokens",
        "tokens appended after the sampled ones because a constraint left no alternative",
    ),
    seconds("mask_s", "part of `model_s`: computing the tokens that constraints allow"),
    seconds("compile_s", "compiling constraints, since the previous step"),
    text("phase", "`prefill`: the step computed only prompts; `decode`: no prompts; `mixed`: both"),
    seconds("scheduled_s", "when the step's scheduling began; earlier than `started_s` if steps overlap"),
    seconds("ended_s", "`started_s` + `duration_s`"),
    count("pairs", "pairs", "useful (query, key) pairs of attention, summed over layers"),
    count("kv_tokens", "tokens", "distinct cached tokens read, summed over layers"),
    seconds("metering_s", "time that the engine spent on measuring the step"),
    count(
        "copied_tokens", "tokens", "part of `cached_tokens`: copied from the middle of another row's KV block"
    ),
    text(
        "launch",
        "`full_graph`: replayed as one graph; `piecewise_graph`: as graphs of its pieces, with attention launched "
        "between the pieces; `eager`: launched one operator at a time; null on a CPU",
    ),
    seconds("capture_s", "capturing graphs for the step; null on a CPU"),
    count("graph_bytes", "bytes", "GPU memory of the graphs of `capture_s`; null on a CPU"),
    *drafts(of_run=False),
    seconds(
        "collective_s",
        "part of `model_s`: sums and gathers over ranks, measured by rank 0, including its waiting for other ranks; "
        "null if no ranks share layers, and on GPUs",
    ),
    count(
        "launched_steps",
        "steps",
        "number of steps that the host launched together with this one, itself included (multi-step decoding on GPUs)",
    ),
    count(
        "scored_positions",
        "tokens",
        "part of `sampled_tokens`: positions of prompts whose logits score given tokens (the tasks `score`, `classify` "
        "and `rerank`, and `prompt_logprobs`)",
    ),
)


REQUEST_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    text("key", "the work key in hexadecimal, as in the completion store"),
    *WHICH_ENGINE,
    count("prompt_tokens", "tokens", "length of the prompt"),
    count("completion_tokens", "tokens", "length of the completion, including its end token"),
    count("cached_tokens", "tokens", "prompt tokens served from a shared prefix"),
    count("preemptions", "times", "number of times that the request was preempted"),
    count(
        "forced_tokens",
        "tokens",
        "part of the completion: tokens without an alternative under its constraint",
    ),
    count(
        "unrun_tokens", "tokens", "part of the completion: its last tokens, which the model never computed"
    ),
    Column("cut", pa.bool_(), "", "whether `max_tokens` or the model's context ended the completion"),
    seconds("queued_s", "when the engine received the request, since the engine started"),
    seconds("scheduled_s", "when its first step began"),
    seconds("first_token_s", "when its first token was sampled"),
    seconds("finished_s", "when its last token was sampled"),
    seconds("queue_s", "`scheduled_s` − `queued_s`", sql="scheduled_s - queued_s"),
    seconds("ttft_s", "`first_token_s` − `queued_s`", sql="first_token_s - queued_s"),
    seconds(
        "tpot_s",
        "(`finished_s` − `first_token_s`) ÷ (`completion_tokens` − 1); null under two tokens",
        sql="CASE WHEN completion_tokens > 1 THEN (finished_s - first_token_s) / (completion_tokens - 1) END",
    ),
    seconds("latency_s", "`finished_s` − `queued_s`", sql="finished_s - queued_s"),
    count("rows", "rows", "input rows that the request answers"),
    count("prefix", "", "longest prefix that the request shares with others, as in `prefixes`; null: none"),
    seconds(
        "device_s",
        "the request's share of the steps' `model_s`; the time of shared prefixes is split among all users",
    ),
    seconds(
        "ran_device_s",
        "as `device_s`, but the time of a shared prefix counts for the request that computed it",
    ),
    seconds("answer_device_s", "part of both: computing the request's output tokens"),
    count("flops", "FLOP", "useful floating-point operations of the tokens that the request computed"),
    real("bytes", "bytes", "the request's share of the steps' `bytes`"),
    seconds("roofline_s", "the request's share of the steps' `roofline_s`; null: peaks unknown"),
    count(
        "scored_positions", "tokens", "positions of the prompt whose logits score given tokens, as in `steps`"
    ),
)


RANK_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    *WHICH_ENGINE,
    count("rank", "", "number of the rank in its engine, from 0"),
    count("stage", "", "number of its stage, from 0, in the order of the layers"),
    count("weight_bytes", "bytes", "loaded weights of its shard of the model"),
    count("kv_bytes", "bytes", "its part of the KV cache"),
    count(
        "read_bytes",
        "bytes",
        "bytes of tensors read from the model's files, from the page cache or the disk, without adapters and draft "
        "models",
    ),
    count(
        "before_rss_bytes",
        "bytes",
        "resident memory before loading the model: Python and libraries; null if the system does not report it",
    ),
    count("peak_rss_bytes", "bytes", "peak resident memory"),
    seconds(
        "collective_s",
        "as in `steps`, measured by this rank and summed over steps; the smallest value is the rank that waited least",
    ),
    seconds(
        "stage_wait_s",
        "time of waiting for steps and for ranks of other stages; null without stages, and on GPUs",
    ),
)
