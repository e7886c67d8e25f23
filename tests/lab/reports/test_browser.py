"""The page in a real browser."""

import shutil

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (375, 400, 768, 1280, 1360)

# Elements that reach beyond the right edge, those inside of a box that scrolls by itself left out.
OVERFLOW = """() => [...document.querySelectorAll("main *, header *, nav *")]
    .filter((element) => !element.closest(".table, pre, svg, .skip"))
    .filter((element) => element.getBoundingClientRect().right > innerWidth + 1)
    .map((element) => element.outerHTML.slice(0, 80))"""
EMPTY = """() => [...document.querySelectorAll("figure")].filter((figure) => !figure.closest("details:not([open])"))
    .flatMap((figure) => [...figure.querySelectorAll("svg")])
    .filter((svg) => svg.getBoundingClientRect().height < 100 || svg.querySelectorAll("path").length < 5).length"""


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if BROWSER is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with api.sync_playwright() as playwright:
        # Containers run as root, where Chromium's own sandbox cannot start.
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_the_page_shows_everything_at_every_width_in_both_themes_and_asks_for_nothing(browser, page):
    requests, problems = [], []
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(page.as_uri())
    assert tab.locator("figure").count() >= 6
    assert tab.locator("table caption").count() == tab.locator("table").count() >= 4
    assert tab.locator("#results-table tbody tr").count() == 5
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(OVERFLOW) == []
        assert tab.evaluate(EMPTY) == 0
    assert background(tab) == "rgb(20, 23, 26)"
    tab.locator("#theme").click()
    assert background(tab) == "rgb(255, 255, 255)"
    tab.locator("#again summary").first.press("Enter")
    assert tab.locator("#again details").first.get_attribute("open") is not None
    assert len(tab.pdf()) > 10_000
    assert [url for url in requests if url != page.as_uri() and not url.startswith("data:")] == []
    assert problems == []


def background(tab):
    return tab.evaluate("getComputedStyle(document.body).backgroundColor")


# Tables that are cut off at the right edge of their box.
CUT_OFF = """() => [...document.querySelectorAll(".table")].filter((box) => box.scrollWidth > box.clientWidth + 1)
    .filter((box) => !box.closest("details:not([open])")).map((box) => box.getAttribute("aria-label"))"""


def test_the_tables_of_runs_and_results_are_whole_on_a_desktop(browser, page):
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto(page.as_uri())
    assert not {"One row for each run", "Over the seeds of each recipe"} & set(tab.evaluate(CUT_OFF))


def test_the_slider_walks_through_the_spectrum_by_keyboard(browser, page):
    problems = []
    tab = browser.new_page()
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(page.as_uri())
    walk = tab.locator("figure.walk").first
    slider, said = walk.get_by_role("slider", name="Walk through training"), walk.locator("output")
    assert said.text_content() == "step 0: 12 states"
    slider.focus()
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    assert said.text_content().startswith("step 1\u202f000: 12 states, cut to ")
    assert slider.get_attribute("aria-valuetext") == said.text_content()
    shown = walk.evaluate("(walk) => [...walk.querySelectorAll('.now')].map((line) => line.id.split('-moment-')[1])")
    assert sorted(shown) == ["2"] * 3 + ["2-cut"] * 3  # of three layers
    slider.press("End")
    assert said.text_content().startswith("step 10\u202f000")
    slider.press("Home")
    assert said.text_content() == "step 0: 12 states"
    assert problems == []


def test_paper_shows_all_snapshots_and_no_slider(browser, page):
    tab = browser.new_page()
    tab.goto(page.as_uri())
    pale = (
        "(walk) => [...walk.querySelectorAll('[id*=-moment-]')].filter((x) => getComputedStyle(x).opacity < 1).length"
    )
    walk = tab.locator("figure.walk").first
    assert walk.evaluate(pale) > 0
    tab.emulate_media(media="print")
    assert walk.evaluate(pale) == 0
    assert not walk.locator(".slider").is_visible()


def test_a_page_without_scripts_shows_all_snapshots(browser, page):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.as_uri())
    assert not tab.locator("figure.walk .slider").first.is_visible()
    assert tab.locator("figure.walk svg").first.is_visible()
