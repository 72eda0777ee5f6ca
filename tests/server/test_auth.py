"""Keys: nothing but health is open, and prefixes of different keys stay apart."""

import pytest

from tests.server.toy import ScriptedEngine, ask, complete, error_of, toy_app

KEYS = frozenset({"sesame", "zweiter-schlüssel"})
OPEN = {"/health", "/health/live", "/health/ready"}


def bearer(key: str, scheme: str = "Bearer") -> dict:
    return {"authorization": f"{scheme} {key}".encode()}


def routes() -> list[tuple[str, str]]:
    """Every (method, path) a client could try, unmatched ones included."""
    posts = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
    gets = ["/v1/models", "/v1/models/toy", "/metrics", "/version", "/docs", "/openapi.json"]
    odd = ["/nope", "//v1/models", "/v1/../v1/models", "/health/x", "/v1/models/"]
    odd += ["/metrics/", "/models", "/health/../v1/models", "//health", "/"]
    return [("POST", path) for path in posts] + [("GET", path) for path in gets + odd]


def test_everything_but_health_needs_a_key():
    app = toy_app(api_keys=KEYS)
    for method, path in routes():
        response = ask(app, method, path)
        assert error_of(response, 401)["code"] == "invalid_api_key", path
        assert response.headers["www-authenticate"] == "Bearer"
    for path in OPEN:
        for spelled in (path, path + "/"):
            assert ask(app, "GET", spelled).status_code == 200
            assert ask(app, "HEAD", spelled).status_code == 200


@pytest.mark.parametrize("key", sorted(KEYS))
def test_each_key_opens(key):
    app = toy_app(api_keys=KEYS)
    for scheme in ("Bearer", "bearer"):
        assert ask(app, "GET", "/v1/models", headers=bearer(key, scheme)).status_code == 200


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"sesame", b"Basic sesame", b"Bearer Bearer sesame",
     b"Bearer sesam", b"Bearer sesame2", b"Bearer \xff\xfe", b"Bearer " + b"x" * 100_000],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_wrong_keys(value):
    response = ask(toy_app(api_keys=KEYS), "GET", "/v1/models", headers={"authorization": value})
    error = error_of(response, 401)
    assert "sesam" not in error["message"]


def test_two_authorization_headers_open_nothing():
    headers = [("authorization", "Bearer sesame"), ("authorization", "Bearer sesame")]
    error_of(ask(toy_app(api_keys=KEYS), "GET", "/v1/models", headers=headers), 401)


def salts(**options) -> list[str]:
    engine = ScriptedEngine()
    app = toy_app(engine, api_keys=KEYS, **options)
    for key in (*sorted(KEYS), "sesame"):
        assert complete(app, bearer(key), max_tokens=1).status_code == 200
    return [request.salt for request in engine.requests]


def test_prefixes_of_different_keys_are_not_shared():
    first, second, again = salts()
    assert first == again != second
    assert "sesame" not in first
    # KV events tell of salts, so they are drawn anew: from them no guessed key can be confirmed.
    assert first not in salts()


def test_prefixes_are_shared_when_asked_for():
    assert salts(share_prefixes=True) == ["", "", ""]


def test_foreign_hosts_are_refused_where_hosts_are_named():
    app = toy_app(allowed_hosts=frozenset({"localhost", "[::1]"}))
    for host, status in (
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
    ):
        assert ask(app, "GET", "/v1/models", headers={"host": host}).status_code == status
        assert ask(app, "GET", "/health/live", headers={"host": host}).status_code == 200


PAGE = "https://chat.example"


@pytest.mark.parametrize(("allowed", "named"), [(PAGE, PAGE), ("*", "*")])
def test_pages_of_an_allowed_origin_may_ask_and_read_errors_too(allowed, named):
    app = toy_app(allowed_origins=frozenset({allowed}), api_keys=frozenset({"sesame"}))
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    before = ask(app, "OPTIONS", "/v1/completions", headers=asked)  # a browser sends no key yet
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == named
    assert "authorization" in before.headers["access-control-allow-headers"]
    for headers, status in (({}, 401), (bearer("sesame"), 200)):
        response = ask(app, "GET", "/v1/models", headers={"origin": PAGE} | headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == named
        assert "x-request-id" in response.headers["access-control-expose-headers"]


@pytest.mark.parametrize("allowed", [PAGE, "*"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/", "/nowhere"])
def test_pages_of_an_allowed_origin_may_come_from_a_public_network(allowed, path):
    app = toy_app(allowed_origins=frozenset({allowed}), api_keys=KEYS)
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    before = ask(app, "OPTIONS", path, headers=asked)
    assert before.status_code == 200
    assert before.headers["access-control-allow-private-network"] == "true"
    without = {name: value for name, value in asked.items() if "private" not in name}
    plain = ask(app, "OPTIONS", path, headers=without)
    assert "access-control-allow-private-network" not in plain.headers


@pytest.mark.parametrize(
    "changed", [{"origin": "https://other.example"}, {"access-control-request-method": "PUT"}]
)
def test_a_browser_that_asks_in_vain_is_told_why(changed):
    app = toy_app(allowed_origins=frozenset({PAGE}))
    asked = {
        "origin": PAGE,
        "access-control-request-method": "HEAD",
        "access-control-request-private-network": "true",
    }
    assert ask(app, "OPTIONS", "/v1/models", headers=asked).status_code == 200
    error = error_of(ask(app, "OPTIONS", "/v1/models", headers=asked | changed), 400)
    assert error["code"] == "wrong_origin" and "--allowed-origin" in error["message"]


def test_pages_of_other_origins_may_not():
    for app in (toy_app(), toy_app(allowed_origins=frozenset({"https://other.example"}))):
        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        for method in ("GET", "OPTIONS"):
            response = ask(app, method, "/v1/models", headers=asked)
            assert "access-control-allow-origin" not in response.headers
    assert error_of(ask(toy_app(), "OPTIONS", "/v1/models", headers=asked), 405)
