"""The banner says what is served, stays a box, and its curl line is one a shell understands."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from ropewalk.server.launch.banner import ModelFacts, banner, readable_bytes

FACTS = ModelFacts(
    name="smollm2",
    architecture="llama",
    encoding="rope",
    trained_context=8192,
    max_context=4096,
    device="cpu",
    dtype="bfloat16",
    attention="cpu",
    kv_dtype="bfloat16",
    kv_bytes_per_token=23040,
    blocks=2048,
    block_size=16,
    chat=True,
)
URL = "http://127.0.0.1:8000"


def printed(
    *facts: ModelFacts, url: str = URL, open_to_all: bool = True, **more: Path | bool
) -> str:
    return banner(facts, url=url, open_to_all=open_to_all, version="1.2.3", **more)


def test_everything_is_said() -> None:
    said = printed(FACTS)
    for words in (
        "ropewalk 1.2.3",
        "smollm2 (llama)",
        "rope",
        "4,096 tokens, trained on 8,192",
        "cpu, bfloat16, cpu attention",
        "bfloat16, 23,040 bytes per token",
        "2,048 blocks of 16 tokens, 720.0 MiB",
        "8.0 concurrent requests",
        f"{URL}/v1/completions",
        f"{URL}/v1/chat/completions",
        f"{URL}/metrics",
        "no API key required",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("changes", "said", "word"),
    [
        ({"key_storage": "raw"}, "rope, raw key storage", "storage"),
        ({"quantize": "int8"}, "cpu, bfloat16 with int8 weights, cpu attention", "int8"),
        ({"max_context": 16384}, "16,384 tokens (beyond training), trained on 8,192", "beyond"),
    ],
)
def test_what_is_not_as_usual_is_said(changes, said, word) -> None:
    assert said in printed(dataclasses.replace(FACTS, **changes))
    assert word not in printed(dataclasses.replace(FACTS, max_context=FACTS.trained_context))


def test_a_page_for_browsers_is_named_where_they_can_open_it() -> None:
    assert f"{URL}/ " in printed(FACTS, explorer=True)
    assert "explorer" not in printed(FACTS)
    assert "explorer" not in printed(FACTS, explorer=True, uds=Path("/run/ropewalk"))


def test_it_is_a_box() -> None:
    box, _, below = printed(FACTS, dataclasses.replace(FACTS, name="x" * 70)).partition("\n\n")
    lines = box.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("╭") and lines[-1].startswith("╰")
    assert all(line[0] in "│├" and line[-1] in "│┤" for line in lines[1:-1])
    assert below.startswith("Try it:")


def curl(said: str) -> tuple[list[str], dict]:
    words = shlex.split(said.splitlines()[-1])
    return words, json.loads(words[words.index("-d") + 1])


def test_curl_line_can_be_pasted() -> None:
    words, body = curl(printed(FACTS))
    assert words[:3] == ["curl", "-N", f"{URL}/v1/chat/completions"]
    assert body["model"] == "smollm2"
    assert body["stream"] is True
    assert body["messages"][0]["role"] == "user"
    assert not any("Bearer" in word for word in words)


def test_curl_line_of_a_model_without_chat_and_with_an_odd_name() -> None:
    odd = dataclasses.replace(FACTS, chat=False, name='it\'s "mine"')
    words, body = curl(printed(odd))
    assert words[2] == f"{URL}/v1/completions"
    assert body["model"] == 'it\'s "mine"'
    assert "prompt" in body


def test_curl_line_leaves_room_for_the_key() -> None:
    said = printed(FACTS, open_to_all=False)
    assert "API key required" in said and "no API key" not in said
    assert 'Authorization: Bearer $KEY"' in said


def test_curl_line_over_a_unix_socket_and_https() -> None:
    said = printed(
        FACTS, url=URL.replace("http", "https"), uds=Path("/run/a b"), certificate=Path("c.pem")
    )
    words, _ = curl(said)
    assert words[2] == "https://localhost/v1/chat/completions"
    assert words[3:7] == ["--unix-socket", "/run/a b", "--insecure", "-H"]
    assert "│ socket" in said and "/run/a b" in said
    assert "socket" not in printed(FACTS)


def test_curl_line_over_https_trusts_the_certificate_from_afar_alone() -> None:
    """On this machine it need not bear the name of the address."""
    for url, flags in [
        ("https://127.0.0.1:8000", ["--insecure"]),
        ("https://[::1]:8000", ["--insecure"]),
        ("https://example.org:8000", ["--cacert", "c.pem"]),
    ]:
        words, _ = curl(printed(FACTS, url=url, certificate=Path("c.pem")))
        assert words[3 : 3 + len(flags)] == flags


def test_readable_bytes() -> None:
    sizes = (0, 1023, 1024, 1536, 1 << 20, 3 << 29, 1 << 41)
    said = "0 bytes, 1023 bytes, 1.0 KiB, 1.5 KiB, 1.0 MiB, 1.5 GiB, 2.0 TiB"
    assert [readable_bytes(size) for size in sizes] == said.split(", ")
