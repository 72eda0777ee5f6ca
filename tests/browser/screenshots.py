"""Pictures of every panel of the explorer in use, to be looked at."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import httpx
from playwright.sync_api import Page

from tests.browser.real import chromium, serving

WIDTHS = (1400, 400)
LOOKS = ("light", "dark", "grey")  # grey: light, without colours
SETTLED_MS = 1000  # by then whatever moves has come to rest


def press(page: Page, *acts: str) -> None:
    for act in acts:
        page.click(f'[data-act="{act}"]:enabled')
        page.wait_for_timeout(SETTLED_MS)


def forget(address: str) -> None:
    """Frees what earlier pictures kept."""
    kept = httpx.get(f"{address}/v1/cache/sequences").json()["data"]
    for each in kept:
        httpx.delete(f"{address}/v1/cache/sequences/{each['id']}")
    httpx.post(f"{address}/v1/cache/flush", json={})


def talk(page: Page) -> None:
    press(page, "talk-go")
    page.wait_for_selector('[data-act="talk-stop"]:disabled')


def race(page: Page) -> None:
    press(page, "race-go")
    page.wait_for_selector('[data-act="race-stop"]:disabled', timeout=60_000)


def cache(page: Page) -> None:
    press(page, "cache-keep", "cache-fork", "cache-do", "cache-evict_renumber", "cache-do")
    press(page, "cache-all")
    page.wait_for_selector("tr[data-encoding=t5] .happened")


def position(page: Page) -> None:
    page.wait_for_selector(".word")


def moved(page: Page) -> None:
    position(page)
    press(page, *["position-move"] * 3)


def proof(page: Page) -> None:
    press(page, "proof-1", "proof-2", "proof-3", "proof-move")
    press(page, "proof-counter")
    page.wait_for_selector('[data-arm="own"]')


def load(page: Page) -> None:
    pass


# name of a picture: panel, model by its encoding, and what is done first
PICTURES: dict[str, tuple[str, str, Callable[[Page], None]]] = {
    "talk": ("talk", "rope", talk),
    "race": ("race", "rope", race),
    "cache": ("cache", "rope", cache),
    "position-rotation": ("position", "rope", position),
    "position-moved": ("position", "rope", moved),
    "position-bias": ("position", "t5", position),
    "position-embedding": ("position", "learned", position),
    "proof": ("proof", "rope", proof),
    "load": ("load", "rope", load),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--out", type=Path, default=Path("explorer-screenshots"))
    parser.add_argument("--url", help="of a server of the family; without it one is started")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    chosen = asked.names or list(PICTURES)
    server = nullcontext(asked.url) if asked.url else serving("family")
    with chromium() as browser, server as address:
        for name, width, look in product(chosen, WIDTHS, LOOKS):
            panel, encoding, act = PICTURES[name]
            forget(address)
            size = {"width": width, "height": 900}
            scheme = "dark" if look == "dark" else "light"
            with browser.new_context(viewport=size, color_scheme=scheme) as context:
                page = context.new_page()
                page.on("pageerror", lambda error, name=name: print(f"{name}: {error}"))
                page.goto(f"{address}/#{panel}")
                page.select_option("#model", f"ropewalk-{encoding}")
                act(page)
                page.wait_for_timeout(SETTLED_MS)
                if look == "grey":
                    page.evaluate("document.documentElement.style.filter = 'grayscale(1)'")
                wide = page.evaluate("document.documentElement.scrollWidth")
                if wide > width:
                    print(f"{name} is {wide} pixels wide on a screen of {width}")
                file = asked.out / f"{name}-{width}-{look}.png"
                page.screenshot(path=file, full_page=True)
                print(file)


if __name__ == "__main__":
    main()
