"""The section with the load of the experts of each layer."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.core.wording import count
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import EXPERTS

_LAYERS = """
SELECT layer::VARCHAR, count(*), sum(tokens)::BIGINT, min(load), median(load), max(load) FROM {experts}
GROUP BY layer ORDER BY experts.layer
"""
_COLUMNS = (
    TableColumn("layer", "layer"),
    TableColumn("experts", "experts", "experts"),
    TableColumn("tokens", "tokens", "tokens"),
    TableColumn("load_max", "most loaded expert"),
    TableColumn("load_median", "median"),
    TableColumn("load_min", "least loaded expert"),
)


def experts(run: ReportedRun) -> Iterator[PageSection]:
    """Yield the section of the report page about the load of experts by layer.

    It yields nothing for a model without experts.
    """
    if not run.has(EXPERTS):
        return
    found = run.fetch(_LAYERS.format(experts=f"{run.own(EXPERTS)} AS experts"))
    rows = [
        (layer, number, tokens, most, median, least) for layer, number, tokens, least, median, most in found
    ]
    lines = [{"y": name} for name in ("load_max", "load_median", "load_min")]
    chart = Chart(
        "curves",
        "Lines of the experts' loads over layers",
        {"category": "layer", "lines": lines, "unit": "", "zero": True},
    )
    text = (
        f"Tokens of an expert, as a multiple of its even share, in {count(len(rows))} layers. The nearer to 1 all are, "
        "the more evenly the work was spread."
    )
    yield PageSection("experts", "Load of the experts", text, chart, PageTable(_COLUMNS, rows))
