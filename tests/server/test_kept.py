"""Kept sequences: what their routes answer, under every encoding, and what they leave alone."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ropewalk.cache.types import Op
from ropewalk.model import family as bundled
from ropewalk.model.config import Pooling
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.errors import SequenceBusy, SequenceNotFound
from ropewalk.server.scheduling.kept import EXPIRES_S, MOST, Asked
from tests.server.fake_engine import counting, load_one, make_engine, make_request
from tests.server.toy import TEMPLATE, asking, toy_app

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 16
PATH = "/v1/cache/sequences"
VARIANTS = {  # what serves it, and whether it rewrites moved keys; None: it cannot move them
    "rope": ((), True),
    "rope in bfloat16": (("--dtype", "bfloat16"), True),
    "rope in 8 bits": (("--kv-dtype", "int8"), True),
    "rope raw": (("--encoding-option", "storage=raw"), False),
    "rope block": (("--encoding-option", "storage=block"), False),
    "t5": ((), False),
    "alibi": ((), False),
    "nope": ((), False),
    "learned": ((), None),
    "sinusoidal": ((), None),
}
# What is kept differs by how entries are stored: of those that store them alike, usually one.
ALIKE = ("rope in bfloat16", "alibi", "nope", "sinusoidal")
with_every_variant = pytest.mark.parametrize(
    "server",
    [
        pytest.param(variant, marks=pytest.mark.full if variant in ALIKE else ())
        for variant in VARIANTS
    ],
    indirect=True,
)
GREEDY = {
    "temperature": 0,
    "max_tokens": 8,
    "ignore_eos": True,
    "add_special_tokens": False,
    "return_token_ids": True,
}
COUNTS = ("copied_entries", "rewritten_entries", "bytes_moved")


def load(variant, *flags):
    encoding = variant.split()[0]
    folder = Path(bundled.__file__).parent / "weights" / f"ropewalk-{encoding}"
    exact = ("--dtype", "float32")  # the same on every processor
    flags = (*exact, "--kv-memory", "24M", "--audit", "full", *VARIANTS[variant][0], *flags)
    return load_one(folder, *flags)


@dataclass
class Server:
    """A served model, its client, and the tensors of its cache."""

    client: httpx.Client
    loaded: Any
    variant: str

    @property
    def moves(self):
        return VARIANTS[self.variant][1]

    def keep(self, prompt, **more):
        return self.sent("POST", PATH, {"prompt": prompt, "add_special_tokens": False, **more})

    def get(self, kept):
        return self.sent("GET", f"{PATH}/{kept['id']}")

    def operate(self, kept, operation, **more):
        path = f"{PATH}/{kept['id']}/operations"
        return self.sent("POST", path, {"operation": operation, **more})

    def complete(self, prompt, **more):
        answer = self.sent("POST", "/v1/completions", GREEDY | {"prompt": prompt} | more)
        return answer if "code" in answer else Answer(answer)

    def sent(self, method, path, body=None):
        answer = self.client.request(method, path, json=body).json()
        return answer.get("error", answer)

    def cache(self):
        return self.sent("GET", "/v1/cache")["data"][0]

    def entries(self, kept):
        """Keys and values that are stored of it, [layers, tokens, numbers] each."""
        kv, blocks = self.loaded.engine._kv, torch.tensor(kept["blocks"])
        layers = [
            kv.layer(layer).read(blocks, dtype=torch.float64) for layer in range(kv.num_layers)
        ]
        keys, values = (torch.stack(part).flatten(1, 2) for part in zip(*layers, strict=True))
        return keys[:, : kept["computed_tokens"]], values[:, : kept["computed_tokens"]]

    def empty(self):
        """Whether nothing is left once all is deleted and forgotten."""
        for kept in self.sent("GET", PATH)["data"]:
            self.sent("DELETE", f"{PATH}/{kept['id']}")
        self.sent("POST", "/v1/cache/flush", {})
        self.loaded.engine._manager.check()
        self.loaded.engine._scheduler.check()
        cache = self.cache()
        return (
            cache["blocks"] == {**cache["blocks"], "active": 0, "cached": 0, "quarantined": 0}
            and cache["audit"]["mutated"] == 0
            and cache["kept"] == cache["requests"] == cache["shared"] == []
        )


class Answer:
    def __init__(self, body):
        (choice,) = body["choices"]
        self.tokens = choice["token_ids"]
        self.cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.prompt = body["usage"]["prompt_tokens"]
        self.sequence = body.get("sequence")


@contextmanager
def serving(loaded, variant="rope", key=None, **options):
    name = loaded.served.name
    engine = AsyncEngine({name: loaded.engine}, lambda model, stats: None)
    app = toy_app(engine, [loaded.served], planners={name: loaded.planner}, **options)
    with asking(app) as client:
        if key:
            client.headers["authorization"] = f"Bearer {key}"
        yield Server(client, loaded, variant)


@pytest.fixture(scope="module")
def server(request, kernels):
    with serving(load(request.param), request.param) as server:
        yield server


@pytest.fixture(autouse=True)
def empty_afterwards(request):
    yield
    for name in {"server", "rope"}.intersection(request.fixturenames):
        assert request.getfixturevalue(name).empty()


@pytest.fixture(scope="module")
def rope(kernels, tmp_path_factory):
    template = tmp_path_factory.mktemp("chat") / "template"
    template.write_text(TEMPLATE)
    with serving(load("rope", "--chat-template", str(template))) as server:
        yield server


def text(length, seed=0):
    """Token ids, none of them special."""
    return [40 + (seed + 7 * n * n + n) % 900 for n in range(length)]


@with_every_variant
def test_a_prompt_is_kept_and_shared(server):
    whole = text(100)
    kept = server.keep(whole)
    assert (kept["tokens"], kept["computed_tokens"], len(kept["blocks"])) == (100, 100, 7)
    assert kept["bases"] == [SIZE * n for n in range(7)]
    assert kept["checksums"][6] is None and len(set(kept["checksums"][:6])) == 6
    assert server.keep(whole, cache_salt="apart")["cached_tokens"] == 0
    more = server.keep(whole[:70] + text(9, 5))
    assert more["cached_tokens"] == 64
    assert more["blocks"][:4] == kept["blocks"][:4]
    assert more["checksums"][:4] == kept["checksums"][:4]
    assert not set(more["blocks"][4:]) & set(kept["blocks"])
    shared = {each["block"]: each["holders"] for each in server.cache()["shared"]}
    assert all({kept["id"], more["id"]} <= {*shared[block]} for block in kept["blocks"][:4])
    assert server.sent("DELETE", f"{PATH}/{more['id']}")["deleted"]
    assert server.get(more)["code"] == "sequence_not_found"
    assert server.get(kept)["checksums"] == kept["checksums"]


@with_every_variant
def test_appending_changes_no_earlier_block(server):
    """Neither tokens that are sent, nor those that the model chooses."""
    kept = server.keep(text(72, 1))
    keys, values = server.entries(kept)
    expected = server.complete(text(72, 1) + text(30, 2), max_tokens=20).tokens
    for more in ({"prompt": text(30, 2)}, {"count": 20}):
        done = server.operate(kept, "append", **more)
        after, count = done["after"], len(more.get("prompt", range(20)))
        full = kept["computed_tokens"] // SIZE
        assert done["before"]["checksums"] == kept["checksums"]
        assert after["checksums"][:full] == kept["checksums"][:full]
        assert (after["id"], after["blocks"][: full + 1]) == (kept["id"], kept["blocks"])
        assert after["tokens"] == after["computed_tokens"] == kept["tokens"] + count
        assert done["changed_blocks"] == []
        assert done["happened"]["written_entries"] == done["predicted"]["written_entries"]
        assert (
            done["happened"]["written_entries"] == count * server.loaded.planner.entries_per_token
        )
        assert (done["happened"]["rewritten_entries"], done["happened"]["copied_entries"]) == (0, 0)
        assert torch.equal(server.entries(after)[0][:, :72], keys)
        assert torch.equal(server.entries(after)[1][:, :72], values)
        kept = after
    assert server.complete(expected[-1:], sequence=kept["id"], max_tokens=3).prompt == 123
    whole = server.keep(text(72, 1) + text(30, 2) + expected)
    assert whole["cached_tokens"] == 112, "what was appended is found like any prefix"


@with_every_variant
def test_a_fork_answers_like_the_whole_prompt(server):
    whole = text(90, 3)
    kept = server.keep(whole)
    expected = server.complete(whole + text(5, 4), cache_salt="apart")
    assert expected.cached == 0
    for _ in range(2):
        answer = server.complete(text(5, 4), sequence=kept["id"])
        assert (answer.tokens, answer.prompt, answer.cached) == (expected.tokens, 95, 90)
    again = server.complete("", sequence=kept["id"])
    assert again.cached == 89
    assert again.tokens == server.complete(whole, cache_salt="apart").tokens
    done = server.operate(kept, "fork", count=40)
    fork = done["after"]
    assert fork["blocks"][:2] == kept["blocks"][:2] and fork["blocks"][2] != kept["blocks"][2]
    assert done["happened"]["copied_entries"] == 8 * server.loaded.planner.entries_per_token
    expected = server.complete(whole[:40] + text(3, 8), cache_salt="apart").tokens
    assert server.complete(text(3, 8), sequence=fork["id"]).tokens == expected
    child = server.keep(text(3, 8), parent=fork["id"])
    assert (child["tokens"], child["cached_tokens"], child["blocks"][:2]) == (
        43,
        40,
        fork["blocks"][:2],
    )
    assert server.complete("", sequence=child["id"]).tokens == expected
    assert server.get(kept)["checksums"] == kept["checksums"]


@with_every_variant
def test_an_answer_is_kept_and_continued_from_any_token(server):
    prompt = text(21, 6)
    expected = server.complete(prompt, max_tokens=24).tokens
    first = server.complete(prompt, max_tokens=12, keep=True)
    kept = {"id": first.sequence}
    seen = server.get(kept)
    assert (seen["tokens"], seen["computed_tokens"]) == (33, 32)
    assert server.complete("", sequence=first.sequence, max_tokens=12).tokens == expected[12:]
    fork = server.operate(kept, "fork", count=26)["after"]
    assert server.complete("", sequence=fork["id"], max_tokens=12).tokens == expected[5:17]
    longer = server.operate(kept, "append", count=5)["after"]
    assert (longer["tokens"], longer["computed_tokens"]) == (38, 38)
    following = server.complete("", sequence=kept["id"], max_tokens=7)
    assert following.tokens == expected[17:], "what it appends is what it would have answered"


def moved(server, before, after, kept):
    """How many keys differ from those of tokens `kept`, and whether any value does."""
    (old_keys, old_values), (keys, values) = before, server.entries(after)
    turned = (keys != old_keys[:, kept]).unflatten(-1, (-1, 64)).any(-1).sum().item()
    return turned, not torch.equal(values, old_values[:, kept])


OPERATIONS = [  # each with its span, and the tokens that stay
    ("fork", {"count": 75}, [*range(75)]),
    ("truncate", {"count": 75}, [*range(75)]),
    ("evict_keep", {"first": 16, "count": 32}, [*range(16), *range(48, 100)]),
    ("evict_renumber", {"first": 16, "count": 32}, [*range(16), *range(48, 100)]),
    ("evict_renumber", {"first": 80, "count": 16}, [*range(80), *range(96, 100)]),
    ("move_span", {"first": 48, "count": 48}, [*range(32), *range(80, 128)]),
]


# Usually each operation under each variant either shared or not, and the next one the other way.
@pytest.mark.parametrize("server", VARIANTS, indirect=True)
@pytest.mark.parametrize("case", range(len(OPERATIONS)))
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.full)])
def test_operations_do_what_was_predicted(server, case, turn):
    """The plan's figures are those of the operation, and its figures those of the bytes."""
    operation, span, stays = OPERATIONS[case]
    shared = ([*VARIANTS].index(server.variant) + case + turn) % 2 == 1
    kept, onto = server.keep(text(100, 10), cache_salt="a"), None
    plan = {"operation": operation, "tokens": 100, **span}
    before = server.entries(kept)
    if operation == "move_span":
        onto = server.keep(text(32, 11), cache_salt="b")
        span, plan = span | {"onto": onto["id"]}, plan | {"offset": 32}
        both = zip(server.entries(onto), before, strict=True)
        before = [torch.cat((mine, own), 1) for mine, own in both]
    twin = server.operate(kept, "fork", count=100)["after"] if shared else None
    (own,) = (row for row in server.sent("POST", "/v1/cache/plan", plan)["data"] if row["own"])
    done = server.operate(kept, operation, **span)
    if own["reason"]:
        assert server.moves is None and operation in ("evict_renumber", "move_span")
        assert done["code"] == "impossible_operation" and own["reason"] in done["message"]
        same = ("tokens", "blocks", "bases", "checksums")
        assert [server.get(kept)[name] for name in same] == [kept[name] for name in same]
    else:
        predicted, happened = done["predicted"], done["happened"]
        assert [predicted[name] for name in COUNTS] == [happened[name] for name in COUNTS]
        assert predicted["capability"] == own["capability"]
        if not shared:
            assert [own[name] for name in COUNTS] == [happened[name] for name in COUNTS]
        turned, values_changed = moved(server, before, done["after"], stays)
        assert turned == happened["rewritten_entries"] == happened["should_change"]
        assert not values_changed
        rewrites = server.moves and operation in ("evict_renumber", "move_span")
        assert (turned > 0) == bool(rewrites)
        after, first = done["after"], 2 if onto else span.get("first", 0) // SIZE
        assert done["changed_blocks"] == (after["blocks"][first:] if rewrites else [])
        if operation == "evict_renumber":
            assert after["bases"] == [SIZE * n for n in range(len(after["blocks"]))]
        if operation == "evict_keep":
            assert after["bases"] == [0, 48, 64, 80, 96]
            for refused in (
                server.complete("", sequence=kept["id"]),
                server.operate(kept, "append", count=3),
            ):
                assert refused["code"] == "impossible_operation"
    if twin is not None:
        assert server.get(twin)["checksums"][:6] == kept["checksums"][:6]


def test_moved_keys_serve_as_those_that_never_carried_their_position(kernels):
    """What rope rewrites gives the answers of key storages of which nothing is rewritten."""
    answers = []
    for variant in ("rope", "rope raw", "rope block"):
        with serving(load(variant), variant) as server:
            kept, onto = server.keep(text(130, 20)), server.keep(text(48, 21))
            server.operate(kept, "evict_renumber", first=16, count=48)
            server.operate(kept, "append", prompt=text(9, 22))
            server.operate(kept, "move_span", first=32, count=48, onto=onto["id"])
            answers.append(
                [server.complete(text(3), sequence=each["id"]).tokens for each in (kept, onto)]
            )
            assert server.empty()
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] != answers[0][1]


def test_a_key_sees_no_sequence_of_another(kernels):
    loaded = load("rope")
    with serving(loaded, key="one", api_keys=frozenset({"one", "two"}), share_prefixes=True) as one:
        own, mine = one.keep(text(40)), one.keep(text(40, 1))
        others = {"authorization": "Bearer two"}
        with httpx.Client(base_url=one.client.base_url, headers=others, timeout=60) as client:
            two = Server(client, loaded, "rope")
            theirs = two.keep(text(48))
            for refused in (
                two.get(own),
                two.sent("DELETE", f"{PATH}/{own['id']}"),
                two.operate(own, "fork", count=3),
                two.operate(own, "append", count=3),
                two.operate(theirs, "move_span", first=0, count=16, onto=own["id"]),
                two.complete("", sequence=own["id"]),
                two.keep(text(3), parent=own["id"]),
            ):
                assert refused["code"] == "sequence_not_found"
            assert [each["id"] for each in two.sent("GET", PATH)["data"]] == [theirs["id"]]
            two.sent("DELETE", f"{PATH}/{theirs['id']}")
        assert [each["id"] for each in one.sent("GET", PATH)["data"]] == [own["id"], mine["id"]]
        assert one.empty()


def test_where_operator_routes_are_off_nothing_is_kept(kernels):
    with serving(load("rope"), operator_routes=False) as server:
        nobody = {"id": "seq-" + "0" * 32}
        for refused in (
            server.keep(text(3)),
            server.operate(nobody, "fork", count=3),
            server.operate(nobody, "append", count=3),
            server.sent("DELETE", f"{PATH}/{nobody['id']}"),
            server.complete("", sequence=nobody["id"]),
            server.complete("a", keep=True),
        ):
            assert refused["code"] == "operator_routes_off"
            assert "--operator-routes" in refused["message"]
        assert server.sent("GET", PATH)["data"] == []
        assert server.get(nobody)["code"] == "sequence_not_found"


@pytest.mark.parametrize(
    ("operation", "more", "code", "param", "words"),
    [
        ("fork", {}, "missing_required_parameter", "count", "fork needs it"),
        ("fork", {"count": 41}, "invalid_value", "count", "only 40 tokens"),
        ("fork", {"count": 3, "first": 0}, "invalid_value", "first", "does not apply to fork"),
        ("truncate", {"count": 0}, "invalid_value", "count", "greater than or equal to 1"),
        ("evict_keep", {"first": 3, "count": 16}, "invalid_value", "first", "multiple of 16"),
        ("evict_renumber", {"first": 16, "count": 32}, "invalid_value", "count", "end at 32"),
        ("evict_renumber", {"first": 0, "count": 16, "onto": "seq-" + "0" * 32}, "invalid_value",
         "onto", "does not apply"),
        ("move_span", {"first": 0, "count": 16}, "missing_required_parameter", "onto", "needs it"),
        ("move_span", {"first": 0, "count": 16, "onto": "me"}, "invalid_value", "onto", "pattern"),
        ("move_span", {"first": 0, "count": 16, "onto": "seq-" + "0" * 32}, "sequence_not_found",
         None, "no sequence"),
        ("append", {}, "invalid_value", "prompt", "send one of them"),
        ("append", {"count": 3, "prompt": "a"}, "invalid_value", "prompt", "send one of them"),
        ("append", {"count": 500}, "context_length_exceeded", "count", "context"),
        ("append", {"prompt": [9] * 500}, "context_length_exceeded", "prompt", "context"),
        ("append", {"prompt": [99999]}, "invalid_value", "prompt", "vocabulary"),
        ("append", {"prompt": ""}, "invalid_value", "prompt", "has no tokens"),
        ("append", {"prompt": 7}, "invalid_value", "prompt", "be text or a list of token ids"),
        ("append", {"prompt": ["a"]}, "invalid_value", "prompt[0]", "valid integer"),
        ("swap", {}, "invalid_value", "operation", "should be"),
    ],
)  # fmt: skip
def test_refused_operations(rope, operation, more, code, param, words):
    kept = rope.keep(text(40))
    refused = rope.operate(kept, operation, **more)
    assert (refused["code"], refused["param"]) == (code, param)
    assert words in refused["message"]
    assert rope.get(kept)["checksums"] == kept["checksums"]


def test_a_span_is_moved_onto_whole_blocks(rope):
    kept, onto = rope.keep(text(40)), rope.keep(text(40, 3))
    refused = rope.operate(kept, "move_span", first=0, count=16, onto=onto["id"])
    assert (refused["code"], refused["param"]) == ("invalid_value", "onto")
    assert "onto has 40 tokens, so its last block of 16 is not full" in refused["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"], "keep": True}, "keep"),
        ({"prompt": "a", "keep": True, "n": 2}, "keep"),
        ({"prompt": ["a", "b"], "sequence": "seq-" + "0" * 32}, "sequence"),
        ({"prompt": "a", "sequence": "seq-" + "0" * 32, "echo": True}, "echo"),
        ({"prompt": "a", "sequence": "seq-" + "0" * 32, "cache_salt": "x"}, "cache_salt"),
        ({"prompt": "a", "sequence": "x"}, "sequence"),
    ],
)
def test_refused_completions(rope, body, param):
    assert rope.complete(**body)["param"] == param


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_ends_with_the_id_of_what_is_kept(rope, path):
    asked = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = asked | {"max_tokens": 3, "keep": True, "stream": True, "ignore_eos": True}
    lines = rope.client.post(f"/v1/{path}", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (named,) = (chunk for chunk in chunks if "sequence" in chunk)
    assert named["choices"][0]["finish_reason"] == "length"
    (kept,) = rope.sent("GET", PATH)["data"]
    assert kept["id"] == named["sequence"]
    whole = rope.sent("POST", f"/v1/{path}", body | {"stream": False})
    assert rope.get({"id": whole["sequence"]})["tokens"] == whole["usage"]["total_tokens"]


def test_an_answer_that_a_stop_string_ends_is_kept(rope):
    answer = rope.complete("The", max_tokens=40, add_special_tokens=True, keep=True, stop=[" "])
    kept = rope.get({"id": answer.sequence})
    assert kept["tokens"] == answer.prompt + len(answer.tokens)


@pytest.mark.parametrize("steps", [12, 99])
def test_what_was_generated_after_a_stop_string_is_not_kept(steps):
    """Whether the request still ran, or had ended, when its client found the string."""
    engine, _ = make_engine()
    request = make_request("r", [1, 2, 3], max_tokens=20)
    request.keep = "kept"
    engine.submit(request)
    for _ in range(steps):
        engine.step()
    request.stop_after(7)
    engine.abort("r")
    assert request.num_generated > 8
    engine.shorten_kept(request)
    (kept,) = engine._scheduler.kept.all()
    assert kept.tokens == (1, 2, 3, *request.tokens[3:10])
    assert engine._manager.computed("kept") == 9  # the last token is not stored, as of any other
    engine._manager.check()
    engine._scheduler.check()
    engine.shorten_kept(request)  # it has changed since
    assert engine._scheduler.kept.all() == [kept]


def test_only_so_many_are_kept(rope):
    ids = [rope.keep(text(5, seed))["id"] for seed in range(MOST)]
    rope.get({"id": ids[0]})
    ids.append(rope.keep(text(6))["id"])
    left = [each["id"] for each in rope.sent("GET", PATH)["data"]]
    assert left == [*ids[2:-1], ids[0], ids[-1]]


def test_none_is_longer_than_a_share_of_the_cache(kernels):
    with serving(load("rope", "--kv-memory", "5M", "--max-model-len", "256")) as server:
        blocks = server.cache()["blocks"]["free"] // 4
        assert server.keep(text(SIZE * blocks + 1))["code"] == "context_length_exceeded"
        refused = server.complete(text(SIZE * blocks - 4), max_tokens=5, keep=True)
        assert refused["code"] == "context_length_exceeded"
        first = server.keep(text(SIZE * blocks))
        assert server.operate(first, "append", count=1)["code"] == "context_length_exceeded"
        twin = server.keep(text(SIZE * blocks))  # its last block is its own
        assert [each["id"] for each in server.sent("GET", PATH)["data"]] == [twin["id"]]
        assert server.empty()


# ---- in an engine that counts, in a cache of a few blocks ----

TINY = {"max_seqs": 4, "max_context": 60}


def counted(name, length, keep="", origin=None, **params):
    """A request for a kept prompt, unless it has `params`: then for an answer."""
    begins = origin.tokens if origin else ()
    prompt = [*begins, *(n % 50 for n in range(length))]
    pooling = None if params else Pooling.LAST
    return make_request(name, prompt, keep=keep, origin=origin, pooling=pooling, **params)


def hidden(batch, kv):
    """Stores every token as its own entries, and returns as many numbers for each."""
    for layer in range(kv.num_layers):
        entries = batch.tokens[:, None, None].float().expand(-1, 3, 2)
        kv.layer(layer).write(entries, -entries, batch.slots)
    return counting(batch, kv)


def until_idle(engine):
    events = []
    while engine.busy:
        events += engine.step().events
        engine._scheduler.check()
    return events


def kept_ones(engine, *lengths):
    """Each under a name of its own, no token of one like that of another."""
    for index, length in enumerate(lengths):
        request = counted(f"k{index}", length, f"seq-{index}")
        request.tokens[:] = [10 * index + token % 10 for token in request.tokens]
        engine.submit(request)
        until_idle(engine)
    return engine._scheduler.kept


def test_kept_sequences_give_way_before_anybody_waits_or_is_preempted():
    engine, manager = make_engine(hidden, blocks=41, **TINY)
    kept = kept_ones(engine, 12, 8, 12)
    kept.get("seq-0", "")
    gone = []
    for name in ("a", "b", "c"):
        engine.submit(counted(name, 30, max_tokens=17, salt=name))
    preempted = 0
    while engine.busy:
        step = engine.step()
        preempted += step.stats.preemptions
        assert step.stats.waiting == 0
        gone.append(len(kept.ids))
    assert preempted == 0 and gone == sorted(gone, reverse=True)
    assert [*kept.ids] == ["seq-0"], "the one used last stays longest"
    engine.kept.drop("seq-0", "")
    engine.step()
    assert manager.counts().active == 0


def test_kept_sequences_expire():
    now = [0.0]
    engine, manager = make_engine(hidden, **TINY)
    kept = kept_ones(engine, 8, 8)
    kept._clock = lambda: now[0]
    for used in kept._used:
        kept._used[used] = 0.0
    now[0] = EXPIRES_S - 1
    kept.get("seq-1", "")
    assert kept.expires_in(kept.all()[0]) == 1
    now[0] = EXPIRES_S
    assert [each.id for each in kept.all()] == ["seq-1"] == [*kept.ids]
    now[0] = 2 * EXPIRES_S
    with pytest.raises(SequenceNotFound):
        engine.kept.view("seq-1", "")
    engine.step()
    assert manager.counts().active == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_who_leaves_while_appending_leaves_the_sequence_as_it_was(steps):
    engine, manager = make_engine(hidden, max_step_tokens=6, max_seqs=4, max_context=60)
    kept_ones(engine, 9)
    before = engine.kept.view("seq-0", "")
    engine.submit(counted("more", 20, "seq-0", before.kept))
    for _ in range(steps):
        engine.step()
    with pytest.raises(SequenceBusy):
        engine.kept.view("seq-0", "")
    with pytest.raises(SequenceBusy):
        engine.submit(counted("other", 20, "seq-0", before.kept))
    engine.abort("more")
    engine.step()
    after = engine.kept.view("seq-0", "")
    assert (after.kept, after.stored) == (before.kept, before.stored)
    assert after.sums[:2] == before.sums[:2]
    engine._scheduler.check()
    engine.kept.drop("seq-0", "")
    engine.step()
    assert manager.counts().active == 0


def test_the_next_step_tells_of_operations():
    engine, _ = make_engine(hidden, **TINY)
    kept_ones(engine, 12)
    engine.kept.apply("seq-0", "", Asked(Op.EVICT_RENUMBER, first=4, count=4))
    engine.kept.apply("seq-0", "", Asked(Op.TRUNCATE, count=6))
    told = engine.step().stats.kept
    assert [report.op for report in told] == [Op.EVICT_RENUMBER, Op.TRUNCATE]
    assert engine.step().stats.kept == ()


def test_what_others_did_since_one_looked_is_not_written_over():
    engine, _ = make_engine(hidden, **TINY)
    kept = kept_ones(engine, 12, 12)
    shortened, freed = (kept.get(id_, "") for id_ in ("seq-0", "seq-1"))
    engine.kept.apply("seq-0", "", Asked(Op.TRUNCATE, count=8))
    engine.kept.drop("seq-1", "")
    for seen in (shortened, freed):
        with pytest.raises(SequenceBusy, match="look at it again"):
            engine.submit(counted("more", 4, seen.id, seen))
    until_idle(engine)
    assert [len(each.tokens) for each in kept.all()] == [8]
    engine.submit(counted("more", 4, "seq-0", kept.get("seq-0", "")))
    until_idle(engine)
    assert len(kept.get("seq-0", "").tokens) == 12


def test_a_kept_sequence_whose_block_changed_is_dropped():
    engine, manager = make_engine(hidden, **TINY)
    kept = kept_ones(engine, 9, 9)
    block = manager.table("seq-1").blocks[0]
    engine._kv.layer(1).keys[block] += 1
    engine.step()
    assert [*kept.ids] == ["seq-0"]
    assert manager.counts().quarantined == 1 and manager.counts().active == 3
    assert engine.mutated_blocks == 1


def test_an_altered_sequence_is_found_by_nobody_who_sends_its_tokens():
    """Its entries were computed among tokens that are gone."""
    engine, _ = make_engine(hidden, **TINY)
    kept = kept_ones(engine, 20)
    engine.kept.apply("seq-0", "", Asked(Op.EVICT_RENUMBER, first=4, count=8))
    shorter = kept.get("seq-0", "")
    assert shorter.altered and len(shorter.tokens) == 12
    engine.submit(counted("more", 9, "seq-0", shorter))
    until_idle(engine)
    tokens = [*kept.get("seq-0", "").tokens]
    whole = make_request("plain", tokens, max_tokens=1)
    engine.submit(whole)
    until_idle(engine)
    assert whole.cached == 4, "what comes before the gap is as it was"


def test_who_waits_gets_the_tokens_that_were_there_when_it_came():
    """The sequence has changed before the request's turn: its tokens are computed anew."""
    engine, manager = make_engine(hidden, **TINY | {"max_seqs": 1})
    kept = kept_ones(engine, 20)
    engine.submit(counted("first", 5, max_tokens=3))
    engine.step()
    origin = kept.get("seq-0", "")
    engine.submit(counted("second", 3, origin=origin, max_tokens=9))
    engine.kept.apply("seq-0", "", Asked(Op.EVICT_RENUMBER, first=4, count=8))
    while "second" not in manager.sequences:
        engine.step()
    (request,) = engine._scheduler.running
    assert request.cached == 20 - 20 % 4, "its prefix is still published"
    blocks = torch.tensor(manager.table("second").blocks)
    stored = engine._kv.layer(0).keys[blocks][..., 0, 0].flatten()[: manager.computed("second")]
    assert stored.tolist() == request.tokens[: manager.computed("second")]
    until_idle(engine)
