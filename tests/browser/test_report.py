"""The report of the benchmarks in a real browser: it fetches nothing, shows everything, and fits.

    pip install --group browser && playwright install --with-deps --only-shell chromium
    python -m pytest tests/browser

A Chromium on PATH serves as well as playwright's own.
"""

import shutil

import pytest
from click.testing import CliRunner
from playwright.sync_api import sync_playwright

from benchmarks import __main__ as program

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SECTIONS = ["kernels", "overhead", "accuracy", "memory"]
COMMANDS = [
    ["kernels", "16x64", "4x256", "--dtypes", "fp32,bf16", "--seconds", "0.001"],
    ["overhead", "--seconds", "0.001"],
    ["accuracy", "--sweeps", "rows,cols", "--largest", "1024"],
    ["memory", "16x64"],
]


@pytest.fixture(scope="session")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)  # None: playwright's own
    with sync_playwright() as playwright:
        # A process of root, as in a container, has no sandbox to start.
        yield playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """A report of one run, and one of two of which the second has fewer benchmarks."""
    folder = tmp_path_factory.mktemp("reports")
    runs = [(folder / "one", COMMANDS), (folder / "other", COMMANDS[:2])]
    for out, commands in runs:
        for command in commands:
            shared = [] if command[0] == "memory" else ["--contenders", "ours,torch,apex"]
            invoke(*command, "--out", out, *shared)
    invoke("report", runs[0][0], "--html", folder / "one.html")
    invoke("report", runs[0][0], runs[1][0], "--html", folder / "two.html", "--names", "before,after")
    return folder


def invoke(*arguments):
    result = CliRunner().invoke(program.cli, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("width", [1400, 390], ids=["desk", "phone"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_report(browser, reports, name, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    address = (reports / f"{name}.html").as_uri()
    page.goto(address)

    assert not problems
    assert [url for url in requests if not url.startswith("data:")] == [address]
    assert sorted(s.get_attribute("id") for s in page.query_selector_all("section")) == sorted(SECTIONS)
    images = page.eval_on_selector_all("img", "all => all.map(i => [i.naturalWidth, i.clientWidth, i.alt])")
    assert len(images) == (3 + 1 + 2 + 1 if name == "one" else 3 + 1 + 2 + 1 + 3 + 1)
    assert all(natural > 300 and shown > 100 and alt for natural, shown, alt in images)
    # Tables scroll within themselves; the page as a whole does not move sideways.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for table in page.query_selector_all("table"):
        assert table.is_visible() and len(table.query_selector_all("tr")) > 1
    assert page.locator("td.failed").first.inner_text() == "failed"
    assert page.get_by_text("apex failed").first.is_visible()
    assert page.locator("table.changed").count() == (2 if name == "two" else 0)
    assert page.get_by_text("after: not measured").count() == (2 if name == "two" else 0)
    page.close()
