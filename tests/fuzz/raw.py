"""Draws byte streams that are almost HTTP: odd framing, odd lines, odd timing, odd endings."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from tests.fuzz.streams import Ending, Stream

BODY = b'{"model":"ropewalk-rope","prompt":"a","max_tokens":1}'
# Would be a request of its own if the one that it is the body of ended early.
INNER = b"GET /inner HTTP/1.1\r\nhost: localhost\r\n\r\n"
TARGETS = (
    b"/v1/completions", b"/v1/completions", b"/v1/models", b"/version", b"/health", b"/tokenize",
    b"/v1/cache", b"/nowhere", b"/v1/completions?a=b", b"//v1/models", b"/%76%31/models", b"/",
    b"/v1/../version", b"*", b"http://localhost/version", b"http://a@b/", b"fuzz:80", b"/a b",
    b"/\xff", b"/" + b"a" * 5000, b"/\x00", b"/%00", b"/%", b"/?" + b"%41" * 50, b"/a#b", b"",
)  # fmt: skip
METHODS = (
    b"POST", b"POST", b"POST", b"GET", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"CONNECT",
    b"PRI", b"post", b"G\0T", b"G(T", b"",
)  # fmt: skip
VERSIONS = (b"HTTP/1.1",) * 12 + (
    b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.", b"HTTP/1.1 ", b"",
)  # fmt: skip
HEADERS = (
    b"accept: */*", b"X: y", b"connection: close", b"connection: keep-alive",
    b"expect: 100-continue", b"upgrade: h2c", b"connection: upgrade", b"x-request-id: a",
    b"content-encoding: gzip", b"host: other", b"x:" + b"a" * 3000, b"x : y", b" x: y", b"x\0: y",
    b"x: \0", b"x: a\rb", b"x: a\nb: c", b"x", b": y", b"x:\x0b", b"x: \x7f\x01", b"\xe9: y",
    b"x: \xe9", b"x:\ty\t", b"te: trailers", b"trailer: x", b"http2-settings: x",
    b"cookie: " + b"a=b; " * 50, b"content-length: 0", b"transfer-encoding: identity",
    b"range: bytes=0-", b"transfer_encoding: chunked",
)  # fmt: skip
LENGTHS = (
    b"content-length: %d", b"Content-Length:%d", b"content-length:  %d ", b"content-length: +%d",
    b"content-length: 0%d", b"content-length: %d, %d", b"content-length: %d\r\ncontent-length: %d",
    b"content-length: %d\r\ncontent-length: 0", b"content-length: -%d", b"content-length: %d.0",
    b"content-length: 0x%d", b"content-length: 1%d", b"content-length: \x0b%d",
    b"content-length : %d", b"content-length:\r\n %d", b"content-length: %d\x00",
    b"content-length: ", b"content_length: %d", b"content-length: 99999999999999999999%d",
)  # fmt: skip
CODINGS = (
    b"transfer-encoding: chunked", b"Transfer-Encoding:chunked", b"transfer-encoding: CHUNKED",
    b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, identity",
    b"transfer-encoding: xchunked", b"transfer-encoding : chunked",
    b"transfer-encoding: \x0bchunked", b"transfer-encoding:\r\n chunked",
    b'transfer-encoding: "chunked"', b"transfer-encoding: chunked\x00",
    b"transfer-encoding: chunked;a=b", b"transfer-encoding: ,chunked",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
    b"transfer-encoding: \xa0chunked", b"transfer-encoding\x00: chunked",
    b"x: y\rtransfer-encoding: chunked", b"x: y\ntransfer-encoding: chunked",
)  # fmt: skip
EXTENSIONS = (
    b";a", b";a=b", b';a="b"', b";", b" ", b"\t", b" ;a", b"; a", b";a\0", b";a\x0b", b";a\rb",
    b";a\nb", b';a="\r\n"', b';a="', b";" + b"a" * 3000, b"\0", b"\x0b", b"g", b".0", b"h",
    b";\xff=\xff",
)  # fmt: skip
SIZES = (
    b"0%x", b"%X", b"00000000%x", b"0000000000000000%x", b"+%x", b"-%x", b"0x%x", b" %x", b"%x_",
    b"1%x", b"f%x", b"ffffffffffffffff%x", b"\n%x",
)  # fmt: skip
TRAILERS = (
    b"X: y\r\n", b"X: y\n", b"X : y\r\n", b"X\r\n", b" X: y\r\n", b"X: a\0\r\n", b"X: a\rb\r\n",
    b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"host: a\r\n", b": y\r\n", b"\n",
    b"X: " + b"a" * 4000 + b"\r\n", b"GET /version HTTP/1.1\r\n", b"X: y\r\n\tz\r\n",
)  # fmt: skip
JUNK = (
    b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b"\0", b" ", b"\t", b"\x0b", b"\x85", b"\xff",
    b":", b";", b"0\r\n\r\n", b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02",
    b"HTTP/1.1 ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)  # fmt: skip
ODD_SIZE = 0.03  # how often a chunk says another size than it has


def draw_stream(draw: Random) -> Stream:
    data = b"".join(draw_request(draw) for _ in range(draw.choice((1, 1, 1, 2, 3))))
    for _ in range(draw.choice((0, 0, 0, 1, 2, 5))):
        data = spoilt(draw, data)
    return Stream(
        parts(draw, data),
        draw.choices(list(Ending), (45, 30, 15, 10))[0],
    )


def draw_request(draw: Random, *, odd: float = 0.12) -> bytes:
    """A request; each of its parts is odd with that probability."""

    def pick(usual: bytes, others: Sequence[bytes], more: float = 1) -> bytes:
        return draw.choice(others) if draw.random() < odd * more else usual

    method = draw.choice((b"POST", b"POST", b"GET"))
    target = b"/v1/completions" if method == b"POST" else draw.choice((b"/version", b"/health"))
    line = b" ".join((pick(method, METHODS), pick(target, TARGETS), pick(b"HTTP/1.1", VERSIONS)))
    headers = [pick(b"host: localhost", (b"", b"host: a\r\nhost: b", b"Host:", b"host: \0"), 0.5)]
    content = draw.choice((BODY, BODY, INNER))
    body = b""
    if method == b"POST":
        headers.append(pick(b"content-type: application/json", (b"content-type: text/plain",), 0.3))
        chunked = draw.random() < 0.5
        if chunked:
            headers.append(pick(CODINGS[0], CODINGS, 1.5))
            body = _chunked(draw, content, pick)
        if not chunked or draw.random() < 0.06:
            headers.append(_filled(pick(LENGTHS[0], LENGTHS, 1.5), len(body or content)))
            body = body or content
    headers += [draw.choice(HEADERS) for _ in range(draw.choice((0, 0, 1, 2)))]
    draw.shuffle(headers)
    end = pick(b"\r\n", (b"\n", b"\r", b"\r\r\n", b"\n\r\n"), 0.3)
    return end.join((line, *headers)) + end + end + body


def _filled(line: bytes, value: int) -> bytes:
    return line.replace(b"%d", b"%d" % value)


def _chunked(draw: Random, content: bytes, pick: Callable[..., bytes]) -> bytes:
    at = draw.choice((0, draw.randrange(1, len(content))))
    chunks = [part for part in (content[:at], content[at:]) if part]
    body = b""
    for chunk in (*chunks, b""):
        spelling = pick(b"%x", SIZES, 0.5) % (len(chunk) if draw.random() > ODD_SIZE else 3)
        end = pick(b"\r\n", (b"\n", b"\r", b"", b"\r\r\n"), 0.3)
        body += spelling + pick(b"", EXTENSIONS) + end
        body += chunk + pick(b"\r\n", (b"\n", b"\r", b"", b"\n\n"), 0.3) if chunk else b""
    return body + pick(b"", TRAILERS, 2) + pick(b"\r\n", (b"\n", b"\r", b""), 0.5)


def spoilt(draw: Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    junk = draw.choice(JUNK)
    to = min(len(data), at + draw.choice((1, 1, 2, 10, 200)))
    return draw.choice(
        (
            data[:at] + junk + data[at:],
            data[:at] + junk + data[to:],
            data[:at] + data[to:],
            data[:to] + data[at:],
            data[:at],
            data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
        )
    )


def parts(draw: Random, data: bytes) -> tuple[tuple[float, bytes], ...]:
    kind = draw.random()
    if kind < 0.6 or len(data) < 2:
        return ((0.0, data),)
    cuts = sorted(draw.sample(range(1, len(data)), min(len(data) - 1, draw.randint(1, 6))))
    pause = 0.02
    if kind > 0.97:  # byte by byte, as far as it gets
        cuts, pause = list(range(1, min(len(data), 60))), 0.01
    edges = [0, *cuts, len(data)]
    pairs = pairwise(edges)
    return tuple((draw.uniform(0, pause), data[low:high]) for low, high in pairs)
