"""JSON that two readers could read differently, or that would cost more than it is worth."""

import gc
import time

import pytest

from ropewalk.server.errors import DuplicateKey, InvalidBody
from ropewalk.server.openai.body import MAX_DEPTH, parse_object


def test_an_object_is_read():
    assert parse_object(b'{"a": [1, 2.5, "\\u00e9\\ud83d\\ude00", null, true]}') == {
        "a": [1, 2.5, "é😀", None, True]
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"[1]",
        b'"a"',
        b"5",
        b"null",
        b"{",
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": 1} x',
        b'{"a": "\n"}',
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"a": ["\\ud800x"]}',
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_refused_bodies(data):
    with pytest.raises(InvalidBody) as refused:
        parse_object(data)
    assert refused.value.status == 400
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("data", [b'{"a": 1, "a": 1}', b'{"b": [{"a": 1, "\\u0061": 2}]}'])
def test_duplicate_keys(data):
    with pytest.raises(DuplicateKey, match="'a'"):
        parse_object(data)


def nested(levels: int) -> bytes:
    return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_depth_is_limited():
    assert parse_object(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 900, 100_000):
        gc.collect()  # none of what other tests left falls into the time below
        start = time.thread_time()  # this thread's: other work on the machine does not count
        with pytest.raises(InvalidBody, match="nested"):
            parse_object(nested(levels))
        assert time.thread_time() - start < 0.2


def test_many_shallow_lists_are_no_depth():
    assert len(parse_object(b'{"a": [' + b",".join([b"[1]"] * 1000) + b"]}")["a"]) == 1000
