"""The page in a real browser: every chart drawn, no complaint, no request, controls that work."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polyphily.report.blocks import Content, Entries, Fact, Figure, Section, Table
from polyphily.report.page import render
from report.browser import Visit, chromium
from report.stories import DATA, call, compared

LIMIT = 5_000_000
EVERYTHING = {
    "ranks",
    "spread",
    "convergence",
    "accuracy-homophily",
    "homophily",
    "labels",
    "differences",
    "collaboration",
    "confusion",
    "traffic",
    "precision-recall",
    "reliability",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("page") / "runs", "local", "fedavg", "fedgsp")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_everything_is_drawn_without_a_complaint(
    folder: Path, browser: Any, width: int, scheme: str
) -> None:
    visit = Visit(browser, folder / "report.html", width=width, scheme=scheme)
    marks = visit.marks()
    assert set(marks) == EVERYTHING
    assert all(marks.values()), marks
    assert visit.complaints == []
    assert visit.network() == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_sweep_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    """Runs with long names, whose buttons stand side by side where there is room."""
    given = [*DATA, "--rounds", "2", "--out", tmp_path]
    assert call("sweep", "fedprox", "--vary", "mu=0.001,0.1,1", *given) == 0
    visit = Visit(browser, tmp_path / "report.html", width=390)
    assert visit.page.locator("[data-figure=collaboration] .segments button").count() == 3
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.complaints == []


def test_one_run_is_drawn(folder: Path, browser: Any) -> None:
    assert call("report", folder / "fedgsp") == 0
    visit = Visit(browser, folder / "fedgsp" / "report.html")
    marks = visit.marks()
    assert set(marks) == EVERYTHING - {"ranks", "spread"}
    assert all(marks.values()), marks
    assert visit.complaints == []
    # Two seeds: a band about the curve.
    assert visit.page.locator("[data-figure=convergence] .band").count() == 1


def test_an_inspection_is_drawn(folder: Path, browser: Any) -> None:
    assert call("inspect", folder / "fedgsp", "--out", folder / "inspected") == 0
    visit = Visit(browser, folder / "inspected" / "inspect.html", width=390)
    marks = visit.marks()
    assert set(marks) == {"homophily", "labels", "spectra", "differences", "embeddings", "filters"}
    assert all(marks.values()), marks
    assert visit.complaints == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("where", [".", "local"])
def test_every_choice_draws_something(folder: Path, browser: Any, where: str) -> None:
    """Also of a run that sends nothing, and so has no curve over megabytes."""
    assert call("report", folder / where) == 0
    visit = Visit(browser, folder / where / "report.html")
    for figure in visit.page.query_selector_all("figure[data-figure]"):
        for button in figure.query_selector_all(".segments button"):
            button.click()
            assert figure.query_selector("svg .mark"), button.inner_text()
        for select in figure.query_selector_all("select"):
            for option in select.query_selector_all("option"):
                select.select_option(option.get_attribute("value"))
                assert figure.query_selector("svg .mark"), option.inner_text()
    assert visit.complaints == []


def test_slider_goes_through_the_rounds(folder: Path, browser: Any) -> None:
    visit = Visit(browser, folder / "report.html")
    figure = visit.page.locator("[data-figure=collaboration]")
    figure.get_by_role("button", name="fedgsp").click()
    slider, said = figure.locator("input[type=range]"), figure.locator("output")
    assert said.inner_text() == "round 4"
    slider.focus()
    before = figure.locator("svg").inner_html()
    visit.page.keyboard.press("Home")
    assert said.inner_text() == "round 1"
    visit.page.keyboard.press("ArrowRight")
    assert said.inner_text() == "round 2"
    visit.page.keyboard.press("End")
    assert figure.locator("svg").inner_html() == before


def test_figures_are_saved_as_svg_and_png(folder: Path, browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, folder / "report.html")
    for figure in sorted(EVERYTHING):
        for kind in ("svg", "png"):
            with visit.page.expect_download() as caught:
                visit.page.locator(f"[data-figure={figure}] [data-save={kind}]").click()
            assert caught.value.suggested_filename.startswith(figure)
            assert caught.value.suggested_filename.endswith(kind)
            caught.value.save_as(tmp_path / f"{figure}.{kind}")
        root = ElementTree.parse(tmp_path / f"{figure}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert sum(node.get("class") == "mark" for node in root.iter()) == visit.marks()[figure]
        assert (tmp_path / f"{figure}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert visit.complaints == []
    assert visit.network() == []


def test_theme_can_be_changed_and_charts_follow(folder: Path, browser: Any) -> None:
    visit = Visit(browser, folder / "report.html")
    look = "getComputedStyle(document.body).backgroundColor"
    line = "document.querySelector('[data-figure=convergence] .mark').getAttribute('stroke')"
    light = visit.page.evaluate(f"[{look}, {line}]")
    visit.page.locator(".theme").click()
    dark = visit.page.evaluate(f"[{look}, {line}]")
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    visit.page.locator(".theme").click()
    assert visit.page.evaluate(f"[{look}, {line}]") == light


def test_paper_is_light_whatever_the_screen(folder: Path, browser: Any) -> None:
    visit = Visit(browser, folder / "report.html", scheme="dark")
    line = "document.querySelector('[data-figure=convergence] .mark').getAttribute('stroke')"
    dark = visit.page.evaluate(line)
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert visit.page.evaluate(line) != dark
    visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert visit.page.evaluate(line) == dark
    assert len(visit.page.pdf()) > 10_000


def test_pointing_at_a_chart_names_what_is_there(folder: Path, browser: Any) -> None:
    visit = Visit(browser, folder / "report.html")
    figure = visit.page.locator("[data-figure=homophily]")
    figure.locator("svg .mark").first.hover()
    assert "client-0" in figure.locator(".tip").inner_text()


# Without a browser -------------------------------------------------------------------------------


class _Links(HTMLParser):
    """Addresses that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_page_is_one_file(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    links = _Links()
    links.feed(text)
    assert all(link.startswith(("#", "data:")) for link in links.found)
    assert len(text) < LIMIT


def test_names_cannot_break_out_of_the_page(browser: Any, tmp_path: Path) -> None:
    evil = '</script><script>console.log("in")</script><img src=x onerror=alert(1)>&"'
    figure = Figure(
        "homophily",
        "bars",
        evil,
        evil,
        {"": {"x": evil, "names": [evil], "series": [{"name": evil, "slot": 0, "values": [1]}]}},
    )
    items = (figure, Table((evil,), ((evil,),), evil), Entries(evil, {evil: evil}))
    section = Section("result", evil, evil, items, (evil,))
    page = render(Content(evil, evil, (Fact(evil, evil, evil),), (section,), (evil,)))
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    visit = Visit(browser, tmp_path / "page.html")
    assert visit.complaints == []
    assert visit.network() == []
    assert visit.page.locator("h1").inner_text() == evil
    assert visit.page.locator("img").count() == 0
    assert visit.marks() == {"homophily": 1}


def test_numbers_below_bars_do_not_run_together(browser: Any, tmp_path: Path) -> None:
    series = [{"name": "every round", "slot": 0, "values": [367_000, 189_000]}]
    names = ["model/linears.0.weight", "homophily"]
    panel = {"x": "bytes", "names": names, "series": series, "format": "bytes"}
    section = Section("models", "Sent", items=(Figure("traffic", "bars", "Sent", "", {"": panel}),))
    file = tmp_path / "page.html"
    file.write_text(render(Content("Sent", "", (), (section,), ())), encoding="utf-8")
    visit = Visit(browser, file, width=390)
    boxes = visit.page.evaluate(
        """() => [...document.querySelectorAll("figure svg text[text-anchor=middle]")].map(
             (t) => { const box = t.getBoundingClientRect(); return [box.left, box.right]; })"""
    )
    assert len(boxes) >= 2
    for (_, end), (start, _) in pairwise(sorted(boxes)):
        assert end < start
