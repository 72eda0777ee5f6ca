"""The page at /: who gets it, under which policy, and how large it is."""

import re
from base64 import b64encode
from hashlib import sha256

import pytest

from tests.server.toy import ask, error_of, toy_app

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MOST = 250_000  # bytes


def test_a_browser_gets_a_page_that_may_run_only_itself():
    page = ask(toy_app(), "GET", "/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert len(page.content) < MOST
    policy = dict(
        each.split(" ", 1) for each in page.headers["content-security-policy"].split("; ")
    )
    for kind in ("script", "style"):
        (inside,) = re.findall(rf"<{kind}[^>]*>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = b64encode(sha256(inside.encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert policy.pop("connect-src") == "'self'" and policy.pop("img-src") == "'self' data:"
    assert policy.keys() == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(policy.values()) == {"'none'"}
    assert "innerHTML" not in page.text and not re.search(r"\s(style|on\w+)=", page.text)


@pytest.mark.parametrize("options", [{"explorer": False}, {}])
def test_others_get_the_line_of_json(options):
    headers = BROWSER if options else {"accept": "*/*"}
    assert (
        error_of(ask(toy_app(**options), "GET", "/", headers=headers), 404)["code"] == "not_found"
    )


@pytest.mark.parametrize("path", ["/llm", "/llm/", "/"])
def test_the_page_is_below_a_root_path_and_needs_no_key(path):
    app = toy_app(root_path="/llm", api_keys=frozenset({"sesame"}))
    assert ask(app, "GET", path, headers=BROWSER).status_code == 200
    assert ask(app, "POST", path, headers=BROWSER, json={}).status_code == 401
    assert ask(app, "GET", "/v1/models", headers=BROWSER).status_code == 401
