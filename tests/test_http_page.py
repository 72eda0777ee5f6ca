"""What docs/http.md says of paths, errors and limits is what the code has."""

import re
from pathlib import Path

from ropewalk.server.config import HttpOptions
from ropewalk.server.errors import InvalidField, ServeError
from ropewalk.server.http import accepting, chunked, middleware, protocol
from tests.server.toy import toy_app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "http.md").read_text()


def errors(kind: type[ServeError]) -> set[tuple[int, str]]:
    """(status, code) of everything that is derived from it."""
    found = {(kind.status, kind.code)} if kind is not ServeError else set()
    return found.union(*map(errors, kind.__subclasses__()))


def test_every_error_is_there_and_no_other() -> None:
    rows = re.findall(r"^\|(\d{3})\|(.*?)\|", PAGE, re.M)
    said = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert said == errors(ServeError)


def test_every_path_is_there_and_no_other() -> None:
    described = toy_app().openapi()["paths"]
    served = {
        f"{method.upper()} {path}" for path, methods in described.items() for method in methods
    }
    optional = {"GET /v1/encodings", "GET /v1/cache", "POST /v1/cache/plan", "POST /v1/cache/flush"}
    paths = re.findall(r"`((?:GET|POST) /\S*)`", PAGE)
    assert len(paths) == len(set(paths))
    assert served <= set(paths) <= served | optional


def test_limits_are_those_of_the_code() -> None:
    options = HttpOptions()
    for said in (
        f"more than {protocol.HEAD_SECONDS:.0f} s to arrive",
        f"more than {protocol.REQUEST_SECONDS:.0f} s|",
        f"{protocol.MAX_HEAD >> 10} KiB, {protocol.MAX_HEADERS} headers",
        f"{protocol.MAX_TARGET >> 10} KiB of path",
        f"may have {chunked.MAX_UNREAD >> 10} KiB together",
        f"At most {accepting.MOST_CONNECTIONS:,} connections",
        f"when {accepting.RESERVED} are kept",
        f"after {options.ping_s:.0f} s without a token",
        f"reads nothing for {options.stalled_write_s:.0f} s",
    ):
        assert said in PAGE, said
    assert re.search(r"\{1,(\d+)\}", middleware._REQUEST_ID.pattern.decode())[1] == "64"
    assert "invalid_json" in {each.code for each in InvalidField.__subclasses__()}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
