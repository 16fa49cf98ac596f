"""The HTML report in headless Chromium: on a phone, on a desk, in the dark and on paper."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import sample_report
from browser import CHROMIUM, Browser
from m3_convert.report_page import write_page

# ------------------------------------------------------------------------------------------------ browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, make in sample_report.REPORTS.items():
        write_page(make(), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in sample_report.REPORTS}


# Texts of charts that stick out of the window, with what they say.
CUT = """[...document.querySelectorAll("svg text")].filter(t => {
    const box = t.getBoundingClientRect(); return box.width && (box.left < 0 || box.right > innerWidth);
}).map(t => t.textContent)"""
# Pairs of texts of one chart that lie on each other, or next to each other without a gap.
COLLIDING = """[...document.querySelectorAll("svg.plot")].flatMap(svg => {
    const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()])
        .filter(([text, box]) => text.trim() && box.width);
    return boxes.flatMap(([a, p], n) => boxes.slice(n + 1).filter(([, q]) =>
        p.left < q.right + 3 && q.left < p.right + 3 && p.top < q.bottom - 5 && q.top < p.bottom - 5
    ).map(([b]) => a + " | " + b));
})"""


@pytest.mark.parametrize("name", sample_report.REPORTS)
def test_page_fits_a_phone(browser, written, name):
    browser.open(written[name], width=360, height=780)
    assert browser.value("innerWidth") == 360
    assert browser.value("document.documentElement.scrollWidth") <= 360
    assert browser.messages == []
    assert browser.requests == [written[name].as_uri()]
    if name != "hostile":
        assert browser.value(CUT) == []
        assert browser.value(COLLIDING) == []
    boxes = "[...document.querySelectorAll('.scroll')]"
    assert browser.value(
        f"{boxes}.some(b => b.scrollWidth > b.clientWidth)"
    )  # wide tables scroll in a box of their own


@pytest.mark.parametrize("name", ["full", "release", "all_equal"])
def test_texts_of_charts_do_not_collide_on_a_desk(browser, written, name):
    browser.open(written[name], width=1200)
    assert browser.value("document.documentElement.scrollWidth") <= 1200
    assert browser.value(CUT) == [] and browser.value(COLLIDING) == []


def test_light_dark_and_print(browser, written):
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.body).color"
    table = "document.querySelector('details table').checkVisibility({contentVisibilityAuto: true})"
    browser.open(written["full"], width=1000)
    assert (browser.value(background), browser.value(table)) == ("rgb(255, 255, 255)", False)
    light = browser.value(ink)
    browser.open(written["full"], width=1000, dark=True)
    assert browser.value(background) == "rgb(20, 22, 26)" and browser.value(ink) != light
    browser.open(written["full"], width=1000, dark=True, media="print")
    assert (browser.value(background), browser.value(ink), browser.value(table)) == ("rgb(255, 255, 255)", light, True)
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_every_chart_fits_a_printed_page(browser, written):
    width, height = (round((mm - 30) / 25.4 * 96) for mm in (210, 297))
    browser.open(written["release"], width=width, media="print")
    figures = "[...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().height)"
    heights = browser.value(figures)
    assert len(heights) == 8 and max(heights) < height
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.pdf().startswith(b"%PDF-")
