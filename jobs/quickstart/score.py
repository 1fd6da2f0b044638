"""Compare the answers of `batchinfer run jobs/quickstart/job.yaml` with the expected answers.

python jobs/quickstart/score.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import duckdb

RESULTS = Path(__file__).parents[2] / "results" / "quickstart"
QUERY = """
    select count(*) filter (where generated_text = expected) as exact, count(*) as rows
    from read_parquet(?) where expected is not null
"""


def main() -> int:
    """Print the share of exact answers. Return exit code 1 if there is no answer to compare."""
    if not any(RESULTS.glob("*.parquet")):
        print("no results yet: batchinfer run jobs/quickstart/job.yaml", file=sys.stderr)
        return 1
    row = duckdb.execute(QUERY, [str(RESULTS / "*.parquet")]).fetchone()
    assert row is not None
    exact, rows = row
    print(f"{exact} of {rows} answers are exactly right ({exact / max(rows, 1):.2%})")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
