"""A real browser and a real server: for tests of the explorer, and for pictures of it."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
# It looks for nothing on the network but the server.
ALONE = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ALONE)
        yield browser
        browser.close()


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """`ropewalk serve ARGUMENTS`, ready; its address. Raises RuntimeError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ropewalk", "serve", *arguments, "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            until_ready(address, server)
            yield address
        finally:
            server.terminate()


def until_ready(address: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            if httpx.get(f"{address}/health/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server ended with {server.returncode} before it was ready")


def standalone(html: str, visit: str) -> str:
    """The page with a recorded visit in it, which it replays when it is opened from a file."""
    inside = visit.replace("<", "\\u003c")  # what a browser could take for the script's end
    data = f'<script type="application/json" id="recording">{inside}</script>\n'
    return html.replace("<script type=", f"{data}<script type=", 1)
