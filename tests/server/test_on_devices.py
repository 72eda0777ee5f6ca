"""A whole server on a GPU gives the CPU's answers, whatever is asked of it.

The same is asked of the CPU's kernels, so that the questions are known to be good ones.
"""

import pytest
import torch

from tests.server import disturbed
from tests.server.test_kept import GREEDY, VARIANTS, load, serving, text
from tests.server.test_preemption import BLOCKS, family

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 256
REFERENCE = ("--device", "cpu", "--attention", "sdpa")
GPU = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
WAYS = {  # where the model is computed, and which variants
    "cpu": (("--device", "cpu"), ("rope",)),
    "cuda": (("--device", "cuda"), VARIANTS),
    "cuda, sdpa": (("--device", "cuda", "--attention", "sdpa"), VARIANTS),
}


def served(variant, *flags):
    narrow = "--dtype" in VARIANTS[variant][0]
    dtype = () if narrow else ("--dtype", "float32")
    return serving(load(variant, "--max-model-len", str(CONTEXT), *dtype, *flags), variant)


def completed(server, prompts, **more):
    """The answers' tokens, the answers themselves, and how many tokens were cached."""
    body = GREEDY | {"prompt": prompts, "max_tokens": 24} | more
    found = server.sent("POST", "/v1/completions", body)
    assert "choices" in found, found
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [choice["token_ids"] for choice in found["choices"]], found["choices"], cached


def asked(server):
    """Tokens by what was asked for: all of it greedy."""
    prompts = [text(3), text(50, 1), text(150, 2), text(90, 3)]
    found = {}
    found["new"], _, cached = completed(server, prompts)
    assert cached == 0
    found["cached"], _, cached = completed(server, prompts)
    assert cached >= 32 + 144 + 80
    found["held"], _, _ = completed(server, [text(20)], guided_regex="[a-z ]{20,30}")
    kept = server.keep(text(100, 4))
    server.operate(kept, "append", count=5)
    fork = server.operate(kept, "fork", count=60)["after"]
    found["forked"] = server.complete(text(3), sequence=fork["id"]).tokens
    if server.moves is not None:
        server.operate(kept, "evict_renumber", first=16, count=32)
        server.operate(kept, "append", prompt=text(9, 5))
        onto = server.keep(text(48, 6))
        server.operate(kept, "move_span", first=16, count=32, onto=onto["id"])
        for name, each in ("shortened", kept), ("moved", onto):
            found[name] = server.complete(text(3), sequence=each["id"]).tokens
        long = {"overflow": "shift", "max_tokens": 160}
        found["shifted"], _, _ = completed(server, [text(120, 7)], **long)
    assert server.empty()
    return found


def embedded(server):
    answer = server.sent("POST", "/v1/embeddings", {"input": [text(30), text(90, 1)]})
    return torch.tensor([each["embedding"] for each in answer["data"]])


@pytest.mark.parametrize(
    ("way", "variant"),
    [
        pytest.param(way, variant, marks=GPU if "cuda" in way else ())
        for way, (_, variants) in WAYS.items()
        for variant in variants
    ],
)
def test_answers_are_those_of_the_reference(way, variant):
    with served(variant, *REFERENCE) as server:
        expected, meant = asked(server), embedded(server)
    with served(variant, *WAYS[way][0]) as server:
        found, vectors = asked(server), embedded(server)
    if variant == "rope in bfloat16":  # whose rounding decides between tokens that are as likely
        same = [found[name] == expected[name] for name in expected]
        assert sum(same) >= len(same) // 2
        assert (vectors - meant).abs().max() < 0.05
    else:
        assert found == expected
        assert (vectors - meant).abs().max() < 1e-3


@pytest.mark.parametrize("way", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("variant", ["rope", "t5"])
def test_bfloat16_differs_by_rounding(variant, way):
    echo = {"echo": True, "logprobs": 0, "max_tokens": 1}

    def scores(server):
        _, choices, _ = completed(server, [text(150, 2), text(90, 3)], **echo)
        return torch.tensor(
            [
                one
                for each in choices
                for one in each["logprobs"]["token_logprobs"]
                if one is not None
            ]
        )

    with served(variant, *REFERENCE) as server:
        expected = scores(server)
    with served(variant, *WAYS[way][0], "--dtype", "bfloat16") as server:
        gaps = (scores(server) - expected).abs()
    assert gaps.mean() < 0.03 and gaps.max() < 0.3


# Of the CPU, test_preemption.py shows it to the last bit.
@pytest.mark.parametrize(
    "way", [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=GPU)]
)
def test_what_was_preempted_comes_back(way):
    """From pinned memory on a GPU, where a pass rounds differently with the number of rows."""
    flags = ("--dtype", "float32", *WAYS[way][0])
    ample = disturbed.load(family("rope"), "--dtype", "float32", *REFERENCE, "--kv-spill", "0")
    block = 16 * ample.facts.kv_bytes_per_token
    flags += ("--kv-memory", str((BLOCKS + 1) * block), "--kv-spill", str(100 * block))
    small = disturbed.load(family("rope"), *flags, "--max-step-tokens", "64")
    expected, found = (
        disturbed.run(
            loaded.engine,
            disturbed.requests(30, seeded=False, vocab=ample.served.vocab_size),
            check=True,
        )
        for loaded in (ample, small)
    )
    assert found.preempted > 3 and found.back > 0
    same = [
        [token for token, *_ in found.answers[name]] == [token for token, *_ in answer]
        for name, answer in expected.answers.items()
    ]
    assert sum(same) >= 0.9 * len(same)
