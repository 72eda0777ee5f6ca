"""The explorer: one page, joined of the sources in server/explorer, that shows what models do.

The page asks public routes only. Its policy lets it load nothing and ask nobody but this server.
"""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

STYLES = ("style.css", "panels.css")
# In this order: later ones use what earlier ones define.
SCRIPTS = (
    *("drawing", "charts", "visit", "api", "frame"),
    *("talk", "race", "blocks", "operations", "cache", "position", "proof", "load"),
)


def joined() -> tuple[str, dict[str, str]]:
    """The page, of its sources, and the headers that it is sent with."""
    style = "".join(map(_source, STYLES))
    script = "".join(_source(f"{name}.js") for name in SCRIPTS)
    html = _source("page.html").replace("/* style */", style).replace("/* script */", script)
    policy = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
        "vary": "accept",
    }
    return html, headers


def _source(name: str) -> str:
    return files("ropewalk.server").joinpath("explorer", name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
