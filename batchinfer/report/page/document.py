"""The page as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files

from batchinfer.core.version import __version__
from batchinfer.report.page.all_columns import all_columns
from batchinfer.report.page.efficiency import efficiency
from batchinfer.report.page.expensive import expensive
from batchinfer.report.page.experts import experts
from batchinfer.report.page.failures import failures
from batchinfer.report.page.figures import html_prose, html_text
from batchinfer.report.page.latency import latency
from batchinfer.report.page.launches import launches
from batchinfer.report.page.lengths import lengths
from batchinfer.report.page.overview import forecast, heading, tiles, work
from batchinfer.report.page.past_runs import past_runs
from batchinfer.report.page.prefix_tree import prefix_tree
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.roofline import roofline
from batchinfer.report.page.section import PageSection
from batchinfer.report.page.time_split import time_split
from batchinfer.report.page.timeline import timeline

# How every page begins: what begins otherwise was not written by us, and is not replaced.
MARK = "<!doctype html>\n<!-- batchinfer report -->\n"
_SCRIPTS = ("echarts.min.js", "page.js")


def page(run: ReportedRun) -> str:
    """The HTML of one run's page."""
    scripts = [_asset(name) for name in _SCRIPTS]
    sections = list(_sections(run))
    return f"""{MARK}<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html_text(str(run.row["job"]))} – batchinfer report</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<header>{heading(run.row)}{_notice(run.notice)}{tiles(run.row)}</header>
<nav>{_links(sections)}</nav>
<noscript><p>Charts need JavaScript; the tables below have the same numbers.</p></noscript>
<main>
{"".join(section.html() + chr(10) for section in sections)}</main>
<footer>Written by batchinfer {html_text(__version__)} from the tables of its report, for a browser without a network.
Charts by Apache ECharts (Apache-2.0).</footer>
{"".join(f"<script>{script}</script>" + chr(10) for script in scripts)}</body>
</html>
"""


def _sections(run: ReportedRun) -> Iterator[PageSection]:
    if run.row["steps"]:
        yield forecast(run)
    yield time_split(run)
    if run.row["steps"]:
        yield from _computed(run)
    else:
        yield PageSection("engine", "The engine", "Nothing to show: this run computed nothing.")
    yield failures(run)
    yield past_runs(run)
    yield all_columns(run)


def _computed(run: ReportedRun) -> Iterator[PageSection]:
    """What the engine did."""
    yield from timeline(run)
    yield roofline(run)
    yield from efficiency(run)
    yield from launches(run)
    yield work(run)
    yield prefix_tree(run)
    yield from lengths(run)
    yield from experts(run)
    yield expensive(run)
    yield latency(run)


def _notice(text: str) -> str:
    return f'<p class="notice">{html_prose(text)}</p>' if text else ""


def _links(sections: list[PageSection]) -> str:
    return " ".join(f'<a href="#{section.name}">{html_text(section.title)}</a>' for section in sections)


def _policy(scripts: list[str]) -> str:
    """These scripts and no others, and nothing from anywhere else: ECharts sets styles of elements."""
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
