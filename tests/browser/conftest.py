"""One browser and one server of the family for all tests of the explorer."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.real import CHROMIUM, chromium, serving


@pytest.fixture(scope="package")  # not longer: while it is open, no other test can run a loop
def browser():
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no Chromium at {CHROMIUM}; install it, or name it in CHROMIUM")
    with chromium() as started:
        yield started


@pytest.fixture(scope="package")
def family(browser):
    """The address of a server of the six models, whose figures are those of every processor."""
    with serving("family", "--dtype", "float32") as address:
        yield address


@pytest.fixture(scope="package")
def context(browser):
    """A tab has storage of its own, and another context takes longer than most tests."""
    made = browser.new_context(reduced_motion="reduce")
    made.new_page()  # while it is open, so is the window, and others open in half the time
    return made


@pytest.fixture
def opened(context):
    """Opens a page, which may ask nobody but its server, and none of whose scripts may fail."""
    faults = []

    def open_page(address: str):
        page = context.new_page()
        page.set_default_timeout(30_000)
        own = urlsplit(address)[:2]  # scheme and host; of a file, no host

        def look(request) -> None:
            if urlsplit(request.url)[:2] != own and not request.url.startswith(("data:", "blob:")):
                faults.append(f"asked {request.url}")

        def hear(message) -> None:
            if "Content Security Policy" in message.text:  # tried, and was stopped
                faults.append(message.text)

        page.on("request", look)
        page.on("console", hear)
        page.on("pageerror", lambda error: faults.append(f"failed: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"said {dialog.message}"))
        page.goto(address)
        return page

    yield open_page
    for page in context.pages[1:]:
        page.close()
    assert faults == []


@pytest.fixture
def panel(opened, family):
    """Opens a panel with a model chosen by its encoding."""

    def open_panel(name: str, encoding: str = "rope"):
        page = opened(f"{family}/#{name}")
        page.select_option("#model", f"ropewalk-{encoding}")
        return page

    return open_panel
