from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.load_tests.client.http1 import BadResponse, EventReader, ResponseReader
from tests.load_tests.sse_server import HEAD, chunk, stream

EVENTS = [b"data: one\n\n", b": ping\n\n", b"data: two\ndata: lines\n\n", b"data:three\n\n"]
PAYLOADS = [b"one", b"two\nlines", b"three"]
WIRE = b"".join(stream(EVENTS))


def read(pieces: list[bytes]) -> tuple[ResponseReader, list[bytes]]:
    reader, events = ResponseReader(), EventReader()
    payloads = [payload for piece in pieces for payload in events.feed(reader.feed(piece))]
    return reader, payloads


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("place", range(len(WIRE)))
def test_a_cut_anywhere_changes_nothing(place):
    reader, payloads = read(cut(WIRE, [place]))
    assert payloads == PAYLOADS
    assert reader.status == 200
    assert reader.complete


@given(st.lists(st.integers(0, len(WIRE)), max_size=30))
def test_many_cuts_change_nothing(places):
    reader, payloads = read(cut(WIRE, places))
    assert (payloads, reader.complete) == (PAYLOADS, True)


def test_byte_by_byte():
    reader, payloads = read([bytes([byte]) for byte in WIRE])
    assert (payloads, reader.complete) == (PAYLOADS, True)


@given(st.binary(max_size=200), st.lists(st.integers(1, 50), max_size=10), st.data())
def test_chunk_sizes_do_not_show_in_the_body(body, sizes, data):
    wire, at = HEAD, 0
    for size in [*sizes, len(body) + 1]:
        if body[at : at + size]:
            wire += chunk(body[at : at + size])
        at += size
    wire += b"0\r\nTrailer: x\r\n\r\n"
    places = data.draw(st.lists(st.integers(0, len(wire)), max_size=10))
    reader = ResponseReader()
    assert b"".join(reader.feed(piece) for piece in cut(wire, places)) == body
    assert reader.complete


def test_an_event_over_several_chunks_and_several_events_in_one_chunk():
    body = b"".join(EVENTS)
    wire = HEAD + chunk(body[:7]) + chunk(body[7:9]) + chunk(body[9:]) + b"0\r\n\r\n"
    assert read([wire])[1] == PAYLOADS


@pytest.mark.parametrize("place", range(1, 24))
def test_carriage_returns_end_lines_too(place):
    events = EventReader()
    wire = b"data: one\r\n\r\ndata: two\r\n\r\n"
    found = [payload for piece in cut(wire, [place]) for payload in events.feed(piece)]
    assert found == [b"one", b"two"]


def test_chunk_extensions_are_skipped():
    reader = ResponseReader()
    assert reader.feed(HEAD + b"3;x=y\r\nabc\r\n0\r\n\r\n") == b"abc"
    assert reader.complete


def test_content_length_ends_the_body():
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 400 Bad\r\nContent-Length: 5\r\n\r\nab") == b"ab"
    assert not reader.complete
    assert reader.feed(b"cde") == b"cde"
    assert (reader.status, reader.complete) == (400, True)


def test_an_empty_body_is_complete_with_its_head():
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    assert reader.complete


def test_without_a_length_the_body_ends_with_the_connection():
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not reader.complete
    reader.close()
    assert reader.complete


def test_an_interim_answer_is_not_the_answer():
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
    assert (reader.status, reader.complete) == (503, True)


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        HEAD + b"zz\r\n",
        HEAD + b"1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"x" * 70_000,
    ],
)
def test_other_protocols_and_broken_framing_are_refused(wire):
    with pytest.raises(BadResponse):
        ResponseReader().feed(wire)


@pytest.mark.parametrize("length", [0, 10, len(HEAD) + 4, len(WIRE) - 1])
def test_an_early_close_is_an_error(length):
    reader = ResponseReader()
    reader.feed(WIRE[:length])
    with pytest.raises(BadResponse, match="closed the connection"):
        reader.close()
