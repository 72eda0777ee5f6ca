"""One browser and one server of the family for all tests of the explorer."""

from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def browser():
    pytest.importorskip("playwright", reason="playwright is not installed: pip install -e .[test]")
    from tests.browser.real import CHROMIUM, chromium

    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no Chromium at {CHROMIUM}; install it, or name it in CHROMIUM")
    with chromium() as started:
        yield started


@pytest.fixture(scope="package")
def family():
    """The address of a server of the six models."""
    from tests.browser.real import serving

    with serving("family") as address:
        yield address


@pytest.fixture
def panel(browser, family):
    """Opens a panel with a model chosen by its encoding; what its scripts threw fails the test."""
    thrown, context = [], browser.new_context(reduced_motion="reduce")

    def open_panel(name: str, encoding: str = "rope"):
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: thrown.append(error))
        page.goto(f"{family}/#{name}")
        page.select_option("#model", f"ropewalk-{encoding}")
        return page

    yield open_panel
    context.close()
    assert not thrown
