"""A browser, servers, and a page that may ask nobody but its server."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.real import CHROMIUM, chromium, serving


@pytest.fixture(scope="module")  # not longer: while it is open, no other test can run a loop
def browser():
    if not Path(CHROMIUM).exists():
        pytest.skip("Chromium is missing: install it, or name it in CHROMIUM")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def family(browser):
    """The address of a server of all bundled models."""
    with serving("family") as address:
        yield address


@pytest.fixture
def opened(browser):
    """Opens pages. Each may send requests to its own origin only, and no script of it may fail."""
    contexts, faults = [], []

    def open_page(address: str, *, width: int = 1400):
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        own = urlsplit(address)[:2]  # scheme and host; of a file, no host

        def look(request) -> None:
            if urlsplit(request.url)[:2] != own and not request.url.startswith(("data:", "blob:")):
                faults.append(f"asked {request.url}")

        page.on("request", look)
        page.on("pageerror", lambda error: faults.append(f"failed: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"said {dialog.message}"))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []
