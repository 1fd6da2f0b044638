"""Renders the report page as a single HTML file that needs no network and no other file."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from batchinfer.core.text import printable
from batchinfer.core.version import __version__
from batchinfer.report.page.activities import activities
from batchinfer.report.page.all_columns import all_columns
from batchinfer.report.page.answers.accuracy import accuracy
from batchinfer.report.page.answers.failures import failures
from batchinfer.report.page.answers.task_answers import task_answers
from batchinfer.report.page.efficiency import efficiency
from batchinfer.report.page.expensive import expensive
from batchinfer.report.page.experts import experts
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

# The beginning of every page. A file that begins differently was not written by batchinfer and is not replaced.
MARK = "<!doctype html>\n<!-- batchinfer report -->\n"
_SCRIPTS = ("echarts.min.js", "page.js")


def page(run: ReportedRun) -> str:
    """Return the HTML page that reports a run. It is a single file that needs no network."""
    scripts = [_asset(name) for name in _SCRIPTS]
    return MARK + _environment().get_template("page.html").render(
        run=run,
        heading=heading(run.row),
        tiles=tiles(run.row),
        sections=list(_sections(run)),
        policy=_policy(scripts),
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        version=__version__,
    )


@cache
def _environment() -> Environment:
    # Escapes all text except our own scripts and styles
    environment = Environment(
        autoescape=True,
        finalize=_printable,
        loader=FunctionLoader(_asset),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["prose"] = prose
    return environment


def _printable(value: object) -> object:
    return value if isinstance(value, Markup) else printable(str(value))


def prose(text: str) -> Markup:
    """Return text as HTML. Words between backquotes become code, and all other text is escaped."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(printable(text)))))


def _sections(run: ReportedRun) -> Iterator[PageSection]:
    has_output = run.has_output
    if not has_output:
        yield from _answers(run)
    if run.row["steps"]:
        yield forecast(run)
    yield time_split(run)
    yield activities(run)
    if run.row["steps"]:
        yield from _computed(run)
    else:
        yield PageSection("engine", "The engine", "Nothing to show: this run computed nothing.")
    if has_output:
        yield from _answers(run)
    yield past_runs(run)
    yield all_columns(run)


def _answers(run: ReportedRun) -> Iterator[PageSection]:
    yield from task_answers(run)
    yield failures(run)
    yield from accuracy(run)


def _computed(run: ReportedRun) -> Iterator[PageSection]:
    yield from timeline(run)
    yield roofline(run)
    yield from efficiency(run)
    yield from launches(run)
    yield work(run)
    if run.shares_prefixes:
        yield prefix_tree(run)
    yield from lengths(run)
    yield from experts(run)
    yield expensive(run)
    yield latency(run)


def _policy(scripts: list[str]) -> str:
    # Allows these scripts, and inline styles, which ECharts sets
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
