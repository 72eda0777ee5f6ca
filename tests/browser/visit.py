"""Records a visit to the explorer and makes the README's picture of it: scripts/explorer-visit."""

import argparse
import io
import time
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.browser.real import chromium, serving, standalone

FOLDER = Path(__file__).parents[2] / "docs" / "explorer"
SIZE = {"width": 960, "height": 1080}  # pixels, of the page
SHOWN = (640, 720)  # and of the picture
FRAME_MS = 350  # at least, between two frames
LONGEST_MS = 1500  # that a frame of the picture is shown
QUALITY = 32  # of WebP, 0 to 100
MODEL = "ropewalk-rope"


def look(page: Page, ms: int = 1500) -> None:
    page.wait_for_timeout(ms)


def press(page: Page, *acts: str) -> None:
    for act in acts:
        page.click(f'[data-act="{act}"]:not(:disabled)', timeout=30_000)
        page.wait_for_selector("main section:not([hidden]) [aria-busy=true]", state="detached")
        look(page)


def record(browser: Browser, address: str) -> str:
    """The visit: a fork in Talk, a race, the proof, and a shift in the cache."""
    with browser.new_context(viewport=SIZE) as context:
        page = context.new_page()
        page.goto(f"{address}/?record#talk")
        page.select_option("#model", MODEL)
        press(page, "talk-go", "talk-cell-1-24", "talk-take-1", "tab-race", "race-past")
        press(page, "tab-proof", "proof-1", "proof-2", "proof-3", "proof-move")
        press(page, "tab-cache", "cache-keep", "cache-evict_renumber", "cache-do", "cache-all")
        press(page, "tab-position", "position-move", "position-move", "position-move")
        with page.expect_download() as saved:
            page.click("text=Save the visit")
        return saved.value.path().read_text()


def frames(browser: Browser, file: Path) -> list[tuple[Image.Image, float]]:
    """What a replay shows, each with the milliseconds that it is shown; equal ones are one."""
    found: list[tuple[Image.Image, float]] = []
    with browser.new_context(viewport=SIZE, color_scheme="light") as context:
        page = context.new_page()
        page.goto(file.as_uri())
        last, began = b"", time.monotonic()
        while page.locator("#visit[data-over]").count() == 0:
            page.wait_for_timeout(FRAME_MS)
            shot, now = page.screenshot(), time.monotonic()
            ms, began = 1000 * (now - began), now
            if shot == last:
                image, before = found[-1]
                found[-1] = image, before + ms
            else:
                image = Image.open(io.BytesIO(shot)).convert("RGB")
                found.append((image.resize(SHOWN, Image.Resampling.LANCZOS), ms))
            last = shot
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", action="store_true", help="of the visit that there is")
    asked = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    visit, picture, page = FOLDER / "visit.json", FOLDER / "visit.webp", FOLDER / "visit.html"
    with chromium() as browser, serving("family") as address:
        if not asked.picture:
            visit.write_text(record(browser, address))
        html = httpx.get(address, headers={"accept": "text/html"}).text
        page.write_text(standalone(html, visit.read_text()))
        first, *others = shown = frames(browser, page)
        page.unlink()
    times = [round(min(ms, LONGEST_MS)) for _, ms in shown]
    more = {"append_images": [image for image, _ in others], "save_all": True, "loop": 0}
    first[0].save(picture, duration=times, quality=QUALITY, method=4, minimize_size=True, **more)
    for file in (visit, picture):
        print(f"{file} {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
