"""The page in a real browser: no errors, no network, and charts that show the numbers of their tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.report.page.document import page
from tests.batchinfer.report.reported_runs import error_rows, read_run, write_tables
from tests.chromium import Chromium, chromium, find_chromium
from tests.examples import first_of

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here (Debian's package is chromium; CHROMIUM names another program)"
)
HOSTILE = '"><img src=x onerror="document.title=1"><script>document.title=2</script>'
# The numbers that a chart has drawn, by the names of its series
DRAWN = """(() => {
  const found = {};
  for (const figure of document.querySelectorAll("figure.chart")) {
    const option = echarts.getInstanceByDom(figure).getOption();
    found[figure.dataset.table] = Object.fromEntries(option.series.map((one) => [
      one.name, one.data.map((item) => (item && item.value !== undefined ? item.value : item))]));
  }
  return found;
})()"""
CELLS = """(() => {
  const found = {};
  for (const table of document.querySelectorAll("table")) {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.c);
    const number = (cell) => (cell.dataset.v === undefined ? null : Number(cell.dataset.v));
    found[table.id] = Object.fromEntries(names.map((name, at) => [
      name, [...table.tBodies[0].rows].map((row) => number(row.cells[at]))]));
  }
  return found;
})()"""

# The colour of each text inside a coloured area, and the colour of the area
INKS = """(() => {
  const found = [];
  const walk = (one) => {
    const inner = one.children ? one.children() : [];
    const [area, text] = inner;
    if (inner.length === 2 && area.type === "rect" && text.type === "text") {
      found.push([text.style.fill, area.style.fill]);
    }
    inner.forEach(walk);
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = echarts.getInstanceByDom(figure);
    chart.getZr().storage.getRoots().forEach(walk);
    for (const one of chart.getOption().series) {
      const add = (area) => found.push([area.label.color, area.itemStyle.color]);
      const inTree = (box) => (box.children ? box.children.forEach(inTree) : add(box));
      if (one.type === "treemap") one.data.forEach(inTree);
      if (one.type === "bar" && one.stack && one.label.show) add(one);
    }
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_tables(folder, steps=2000, job=HOSTILE, model=HOSTILE)
    path = folder / "report.html"
    ids = {"bad_json": [HOSTILE] * 10, HOSTILE: [f"r{i}" for i in range(5)]}
    path.write_text(page(read_run(folder, error_rows(ids), notice=HOSTILE)), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    with chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize(
    ("width", "dark"), first_of([(390, True), (1280, False), (1280, True), (390, False)], 1)
)
def test_all_is_drawn_without_an_error_and_without_a_network(
    browser: Chromium, file: Path, width: int, dark: bool
) -> None:
    browser.said.clear()
    browser.requested.clear()
    browser.open(file, width=width, dark=dark)
    assert browser.said == []
    assert browser.requested == [file.as_uri()]
    figures = browser.evaluate('document.querySelectorAll("figure.chart").length')
    assert browser.evaluate('document.querySelectorAll("figure.chart svg path").length') > figures >= 10
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("document.title").startswith('"><img src=x')  # and no other script has changed it


@pytest.mark.parametrize("width", [1280, 900])
def test_no_table_is_truncated(browser: Chromium, file: Path, width: int) -> None:
    browser.open(file, width=width)
    wide = """[...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth)
        .map((one) => one.querySelector("table").id)"""
    assert browser.evaluate(wide) == []
    broken = """[...document.querySelectorAll(".facts span")].filter((one) => one.getClientRects().length > 1).length"""
    assert browser.evaluate(broken) == 0


def test_charts_show_the_numbers_of_their_tables(browser: Chromium, file: Path) -> None:
    browser.open(file)
    drawn, cells = browser.evaluate(DRAWN), browser.evaluate(CELLS)
    assert drawn["prompts-table"]["requests"] == cells["prompts-table"]["requests"]
    assert drawn["errors-table"]["rows"] == cells["errors-table"]["rows"] == [10, 5]
    assert drawn["latency-table"]["TTFT"] == cells["latency-table"]["ttft_s"]
    lines = {
        "throughput": ("prompt tokens", "prompt_tokens_per_s"),
        "kv": ("KV blocks used, median", "kv_median"),
    }
    for name, (title, column) in lines.items():
        table = cells[f"{name}-table"]
        points = [[until, value] for until, value in zip(table["until_s"], table[column], strict=True)]
        assert drawn[f"{name}-table"][title] == [[table["from_s"][0], points[0][1]], *points]
    check_roofline(drawn["roofline-table"], cells["roofline-table"])


def check_roofline(drawn: dict[str, Any], cells: dict[str, Any]) -> None:
    points = [point for kind in ("decode", "mixed", "prefill") for point in drawn[kind]]
    assert sorted(points) == sorted(map(list, zip(cells["intensity"], cells["reached"], strict=True)))
    (_, ridge, _) = drawn["roof"]
    assert ridge == pytest.approx([180e9 / 33e9, 180e9])


def test_a_tooltip_has_the_row_of_the_table(browser: Chromium, file: Path) -> None:
    browser.open(file)
    browser.evaluate(
        """echarts.getInstanceByDom(document.querySelector('[data-table="errors-table"]'))
           .dispatchAction({type: "showTip", seriesIndex: 0, dataIndex: 1})"""
    )
    text = browser.evaluate('document.querySelector(".tip").innerText')
    assert text.startswith(HOSTILE)
    assert text.splitlines()[-3:] == ["5", "of all rows", "1.6%"]
    assert browser.said == []


def test_charts_over_time_are_zoomed_together(browser: Chromium, file: Path) -> None:
    browser.open(file)
    found = browser.evaluate(
        """(() => {
             const charts = ["throughput", "batch", "kv"].map((name) =>
               echarts.getInstanceByDom(document.querySelector(`[data-table="${name}-table"]`)));
             charts[0].dispatchAction({type: "dataZoom", dataZoomIndex: 1, start: 20, end: 40});
             return charts.map((chart) => [chart.getOption().dataZoom[1].start, chart.getOption().dataZoom[1].end]);
           })()"""
    )
    assert found == [[20, 40]] * 3


def test_colours_follow_the_system(browser: Chromium, file: Path) -> None:
    script = """[getComputedStyle(document.body).backgroundColor,
        echarts.getInstanceByDom(document.querySelector("figure.chart")).getOption().color[0]]"""
    browser.open(file)
    light = browser.evaluate(script)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", features=[dark])
    browser.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    )
    assert all(one != other for one, other in zip(light, browser.evaluate(script), strict=True))


@pytest.mark.parametrize("dark", [False, True])
def test_texts_inside_coloured_areas_can_be_read(browser: Chromium, file: Path, dark: bool) -> None:
    browser.open(file, dark=dark)
    pairs = browser.evaluate(INKS)
    assert len(pairs) > 10
    # WCAG 2 asks for 4.5 of small text
    assert min(_contrast(*pair) for pair in pairs) >= 4.5


def _contrast(one: str, other: str) -> float:
    """Return the contrast of two colours #rrggbb, 1 to 21, as WCAG 2 defines it."""
    lower, higher = sorted((_luminance(one), _luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
