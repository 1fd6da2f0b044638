"""A forecast as a table of one row, so that those of many jobs can be collected and queried."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchinfer.core.request import LAUNCH_MODES
from batchinfer.report.tables.spool import Spool

_INT, _REAL, _TEXT = pa.int64(), pa.float64(), pa.string()


def _struct(kind: pa.DataType, *names: str) -> list[pa.Field]:
    return [pa.field(name, kind) for name in names]


_LAUNCHED = pa.struct(_struct(_INT, "steps", "tokens"))
# The fields of `plan --json`, in the same order
FORECAST_SCHEMA = pa.schema(
    [
        *_struct(_TEXT, "job", "setting"),
        *_struct(_INT, "rows", "error_rows"),
        pa.field("error_codes", pa.map_(_TEXT, _INT)),
        *_struct(_INT, "duplicate_rows", "stored", "to_run", "prompt_tokens", "shared_prefix_tokens"),
        *_struct(_INT, "most_output_tokens"),
        pa.field(
            "prompt_lengths",
            pa.struct(
                [
                    *_struct(_INT, "shortest", "median", "longest"),
                    pa.field("buckets", pa.list_(pa.struct(_struct(_INT, "tokens_at_most", "prompts")))),
                ]
            ),
        ),
        pa.field("sample", pa.struct([*_struct(_INT, "rows", "of_rows"), pa.field("error", _REAL)])),
        pa.field("context", pa.struct(_struct(_INT, "tokens", "rows_over"))),
        pa.field(
            "prefixes",
            pa.list_(
                pa.struct(
                    _struct(_INT, "node", "parent", "prefix_tokens", "own_tokens", "users", "saved_tokens")
                )
            ),
        ),
        pa.field("memory", pa.struct(_struct(_INT, "weight_bytes", "kv_cache_bytes", "blocks"))),
        pa.field("misfit", _TEXT),
        pa.field(
            "forecast",
            pa.struct(
                [
                    pa.field("engine_s", _REAL),
                    *_struct(
                        _INT,
                        "steps",
                        "prompt_tokens_run",
                        "recomputed_tokens",
                        "cached_tokens",
                        "decode_tokens",
                    ),
                    *_struct(_INT, "output_tokens", "preemptions"),
                    pa.field("launches", pa.struct([pa.field(mode, _LAUNCHED) for mode in LAUNCH_MODES])),
                    *_struct(_REAL, "mfu", "mbu", "simulated_share"),
                    pa.field("answers_from_runs", _INT),
                    pa.field("upper_bound", pa.bool_()),
                    pa.field("times_from", _TEXT),
                    pa.field("times_from_runs", _INT),
                    *_struct(_REAL, "energy_j", "cost"),
                    pa.field(
                        "order",
                        pa.struct(
                            [
                                *_struct(_TEXT, "chosen", "why"),
                                pa.field("seconds", pa.map_(_TEXT, _REAL)),
                                pa.field("simulated_share", _REAL),
                            ]
                        ),
                    ),
                ]
            ),
        ),
        pa.field(
            "lint",
            pa.list_(
                pa.struct(
                    [
                        *_struct(_TEXT, "kind", "text"),
                        pa.field("saved_tokens", _INT),
                        *_struct(_REAL, "share", "saved_s"),
                        pa.field("template", _TEXT),
                        pa.field("rows", _INT),
                    ]
                )
            ),
        ),
        pa.field("deadline", pa.struct([pa.field("at", _TEXT), pa.field("spare_s", _REAL)])),
    ]
)


def write_forecast(path: Path, facts: Mapping[str, Any]) -> Path:
    """Write what `forecast_json` says. Raises OSError."""
    with Spool(path, FORECAST_SCHEMA) as spool:
        spool.write(forecast_table(facts))
        return spool.finish()


def forecast_table(facts: Mapping[str, Any]) -> pa.Table:
    """The table of one row. Raises ValueError for facts of other names than the schema's."""
    wrong = set(facts) ^ set(FORECAST_SCHEMA.names)
    if wrong:
        raise ValueError(f"the forecast and the columns differ in {sorted(wrong)}")
    return pa.Table.from_pylist([dict(facts)], schema=FORECAST_SCHEMA)
