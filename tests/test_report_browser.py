"""report.html as a browser shows it, without a network: wide and narrow, light and dark."""

import pytest
from browser import browser_page
from folders import chat, folder, prefill, record

from llmrepro import report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    warmup = record("warmup", warmup=True)
    return folder(tmp_path_factory.mktemp("whole"), [warmup, *chat(), *prefill()])


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_without_a_network_shows_it_whole(run, scheme, width):
    path = report.write(run)
    with browser_page(offline=True, width=width, color_scheme=scheme) as page:
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        for opened in (False, True):
            page.evaluate(f"document.querySelectorAll('details').forEach(d => d.open = {str(opened).lower()})")
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert said == []
