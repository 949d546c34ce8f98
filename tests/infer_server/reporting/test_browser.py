"""The report in a real browser: no errors, sorting, zooming, details, and the width of a phone."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from infer_server.cli import profile as profiling
from tests.infer_server.endpoints.http import browser
from tests.infer_server.reporting.models import HOSTILE, built

pytestmark = pytest.mark.skipif(not browser.executable(), reason="no Chromium on this machine")
MICROSECONDS = "[...document.querySelectorAll('#kernels tbody tr')].map(row => +row.cells[4].dataset.v)"
SCALE = "+/scale\\(([\\d.]+)/.exec(document.querySelector('#graph > g').getAttribute('transform'))[1]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """Return a tab that shows the report of an INT8 build."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "SECONDS", 0.001)
        _, file = built(folder, "--int8", "--calib", str(folder / "items.npy"))
    with browser.page(tmp_path_factory.mktemp("profile")) as tab:
        tab.show(file.as_uri(), 1280)
        tab.wait_for("document.readyState === 'complete'")
        yield tab
        assert not tab.errors


def test_the_page_renders_without_errors(page: browser.Page, record_property: pytest.RecordProperty) -> None:
    paint = page.wait_for("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    record_property("first_contentful_paint_ms", paint)
    assert not page.errors and page.evaluate("document.querySelectorAll('svg').length") > 4


def test_a_click_on_a_heading_sorts(page: browser.Page) -> None:
    click = "[...document.querySelectorAll('#kernels th button')].find(b => b.textContent === 'µs').click()"
    assert page.evaluate("document.querySelector('#kernels th:nth-child(5)').textContent") == "µs"
    page.evaluate(click)
    falling = page.evaluate(MICROSECONDS)
    page.evaluate(click)
    rising = page.evaluate(MICROSECONDS)
    assert falling == sorted(falling, reverse=True) and rising == sorted(rising) and len({*rising}) > 2


def test_the_filter_hides_other_kernels(page: browser.Page) -> None:
    for text, least in (("conv3", 1), ("", 4)):
        page.evaluate("{ const field = document.getElementById('filter'); "
                      f"field.value = '{text}'; field.dispatchEvent(new Event('input')); }}")
        shown = page.evaluate("[...document.querySelectorAll('#kernels tbody tr')].filter(row => !row.hidden).length")
        assert shown >= least and (not text or shown < 4)


def test_the_graph_zooms_and_moves(page: browser.Page) -> None:
    before = page.evaluate(SCALE)
    page.evaluate("document.querySelector('[data-zoom=in]').click()")
    assert page.evaluate(SCALE) == pytest.approx(1.4 * before, rel=1e-3)
    page.evaluate("document.getElementById('graph').focus()")
    page.evaluate("document.getElementById('graph').dispatchEvent("
                  "new WheelEvent('wheel', {deltaY: 400, cancelable: true, clientX: 300, clientY: 300}))")
    assert page.evaluate(SCALE) < 1.4 * before
    place = page.evaluate("document.querySelector('#graph > g').getAttribute('transform')")
    page.evaluate("document.getElementById('graph').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}))")
    assert page.evaluate("document.querySelector('#graph > g').getAttribute('transform')") != place


def test_a_click_on_a_box_shows_its_kernel_as_text(page: browser.Page) -> None:
    page.evaluate("document.querySelector('#graph .box[data-k]').nextElementSibling.dispatchEvent("
                  "new MouseEvent('click', {bubbles: true}))")
    shown = page.evaluate("document.getElementById('details').innerText")
    assert HOSTILE in shown and "int8" in shown and "Conv" in shown
    assert page.evaluate("document.querySelectorAll('#details script, #details img').length") == 0
    page.evaluate("document.querySelector('#details a').click()")
    assert page.wait_for("document.querySelector('#kernels tr:target')?.classList.contains('chosen')")


def test_colours_follow_the_choice(page: browser.Page) -> None:
    fills = set()
    for value in ("precision", "time", "sqnr", "noise"):
        page.evaluate(f"document.querySelector('input[value={value}]').click()")
        fills.add(page.evaluate("[...document.querySelectorAll('#graph .box[data-k] rect')].map("
                                "rect => getComputedStyle(rect).fill).join()"))
    assert len(fills) == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(page: browser.Page, scheme: str) -> None:
    page.show(page.evaluate("location.href.split('#')[0]"), 400, scheme=scheme)
    page.wait_for("document.readyState === 'complete'")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    ink, paper = page.evaluate("['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])")
    assert (sum(map(int, ink[4:-1].split(","))) < sum(map(int, paper[4:-1].split(",")))) == (scheme == "light")
    assert not page.errors
