"""The explorer: one page, joined of the sources in server/explorer, that shows what models do.

The page asks public routes only. Its policy lets it load nothing and ask nobody but this server.
"""

from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from ropewalk.server.errors import RouteNotFound

NOTHING = "there is nothing at this path; see the API in README.md"
STYLES = ("style.css", "panels.css")
# In this order: later ones use what earlier ones define.
SCRIPTS = (
    *("drawing", "charts", "visit", "api", "frame"),
    *("talk", "race", "cache", "position", "proof", "load"),
)


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent, and its Content-Security-Policy."""

    html: str
    policy: str


@cache
def page() -> Page:
    """Joined when it is first asked for."""
    style = "".join(map(_source, STYLES))
    script = "".join(_source(f"{name}.js") for name in SCRIPTS)
    html = _source("page.html").replace("/* style */", style).replace("/* script */", script)
    allowed = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return Page(html, "; ".join(allowed))


def explorer_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/", response_model=None, include_in_schema=False)
    async def explorer(request: Request) -> Response:
        """The page for browsers; other clients asked for an API that is not here."""
        if "text/html" not in request.headers.get("accept", ""):
            raise RouteNotFound(NOTHING)
        headers = {
            "content-security-policy": page().policy,
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
            "vary": "accept",
        }
        return HTMLResponse(page().html, headers=headers)

    return router


def _source(name: str) -> str:
    return files("ropewalk.server").joinpath("explorer", name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
