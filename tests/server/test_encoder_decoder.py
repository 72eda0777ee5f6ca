"""Encoder-decoders as clients and the scheduler see them: two sides, admitted and freed as one."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.tokenizers.base import Detokenizer
from ropewalk.server.errors import CommandError, InvalidField, PromptTooLong
from ropewalk.server.launch.load_model import prepare
from ropewalk.server.openai.answers import Choice
from ropewalk.server.scheduling.request import Limits, Sampled, TokenEvent
from tests.model import encoder_decoders as tiny
from tests.model.checkpoints import save
from tests.model.encoder_decoders import CPU, START, STOP, Answering
from tests.model.test_parity_t5 import reference_greedy
from tests.products import combined
from tests.server.fake_engine import configured, load_one, loaded_app, make_request
from tests.server.recording import Recording
from tests.server.recording import engine as engine_on
from tests.server.scheduling import make_scheduler
from tests.server.toy import asking, sample, spelled_apart, wait_for

MODELS = {"t5": (tiny.t5(), False), "t5-v1.1": (tiny.t5_v11(), True), "umt5": (tiny.umt5(), True)}
PROMPT = list(b"translate this: the rope is long")
BLOCK = 4
LIMITS = Limits(max_seqs=8, max_step_tokens=16, max_context=200, max_queue=50)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: (its folder, the model of transformers)}."""
    made = {}
    for name, (config, own_head) in MODELS.items():
        model = tiny.random_model(config, own_head=own_head)
        made[name] = save(model, tmp_path_factory.mktemp(name)), model
    return made


@contextlib.contextmanager
def serving(folders, *flags):
    """A client of a real application over real engines, and its metrics."""
    sources = [f"{name}={folder}" for name, folder in folders.items()]
    app = loaded_app(*sources, "--dtype", "float32", *flags)
    with asking(app) as client:
        yield client, app.state.metrics


@pytest.fixture(scope="module")
def client(models):
    folders = {name: folder for name, (folder, _) in models.items()}
    with serving(folders, "--kv-memory", "6M", "--max-model-len", "100") as (client, _):
        yield client


def ask(client, **body):
    return client.post("/v1/completions", json={"model": "t5", "temperature": 0} | body)


def scores(answer, choice=0):
    """Of the tokens of an answer: unlike its text, they differ where their bytes are no text."""
    return answer.json()["choices"][choice]["logprobs"]["token_logprobs"]


def tokenized(client, text, **options):
    answer = client.post("/tokenize", json={"model": "t5", "prompt": text} | options)
    return answer.json()["tokens"]


# ------------------------------------------------------------------------------ over HTTP


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_those_of_transformers(name, client, models):
    folder, model = models[name]
    theirs = reference_greedy(model, PROMPT, 32)
    tokenizer = open_checkpoint(folder).tokenizer
    spelled = Detokenizer(tokenizer, first=True)
    text = "".join(spelled.push(token) for token in theirs) + spelled.finish()
    answer = ask(client, model=name, prompt=PROMPT, max_tokens=32, ignore_eos=True, logprobs=1)
    body = answer.json()
    assert body["choices"][0]["text"] == text
    assert len(set(theirs)) > 3  # one token again and again would agree too easily
    assert body["choices"][0]["logprobs"]["tokens"] == spelled_apart(tokenizer, theirs)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 32)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_text_ends_with_the_token_that_ended_all_texts_in_training(client):
    tokens = tokenized(client, "abc")
    assert tokens == [*tokenized(client, "abc", add_special_tokens=False), STOP]
    by_text, by_ids, without = (
        scores(ask(client, prompt=prompt, max_tokens=8, ignore_eos=True, logprobs=1))
        for prompt in ("abc", tokens, tokens[:-1])
    )
    assert by_text == by_ids != without


def test_choices_and_streams(client):
    options = {"max_tokens": 5, "ignore_eos": True, "logprobs": 1}
    answer = ask(client, prompt=["abc", "rope"], n=2, **options)
    first, again, other, same = (scores(answer, index) for index in range(4))
    assert first == again != other == same
    assert answer.json()["usage"]["prompt_tokens"] == 4 + 5
    streamed = ask(client, prompt="abc", max_tokens=5, ignore_eos=True, stream=True).text
    assert streamed.rstrip().endswith("data: [DONE]")


def test_a_prompt_and_an_answer_may_each_fill_the_context(client):
    full = ask(client, prompt=[7] * 100, max_tokens=99, ignore_eos=True).json()
    assert full["usage"]["total_tokens"] == 199
    assert full["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"prompt": "abc", "echo": True}, "unsupported_parameter", "decoder never reads"),
        ({"prompt": [7] * 101}, "context_length_exceeded", "length is 100 tokens for its encoder"),
        ({"prompt": "abc", "max_tokens": 100}, "context_length_exceeded", "request at most 99"),
        ({"prompt": ""}, "invalid_value", "no tokens"),
    ],
)
def test_refusals(body, code, words, client):
    answer = ask(client, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert words in answer.json()["error"]["message"]


def test_chat_needs_a_template(client):
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "t5", "messages": messages}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


def test_what_is_told_of_the_model(client):
    told = client.get("/v1/models/umt5").json()
    assert (told["encoding"], told["max_model_len"], told["architecture"]) == ("t5", 100, "umt5")
    assert told["encoder_decoder"] is True
    assert client.get("/health").status_code == 200


def test_metrics_count_the_prompt_as_the_client_sent_it(models):
    with serving({"t5": models["t5"][0]}, "--kv-memory", "2M") as (client, metrics):
        ask(client, prompt=PROMPT, max_tokens=5, ignore_eos=True)
        labels = {"model_name": "t5", "encoding": "t5"}
        # The engine's thread counts a step after it has sent what came of it.
        wait_for(lambda: sample(metrics, "request_prompt_tokens_count", **labels) == 1)
        counted = sample(metrics, "prompt_tokens_total", source="computed", **labels)
        assert counted == sample(metrics, "request_prompt_tokens_sum", **labels) == len(PROMPT)
        # Five tokens of the decoder, the last of which is never stored.
        rows = len(PROMPT) + 5
        entries = 2 * 3 * 3  # keys and values of 3 layers, 3 heads each
        assert sample(metrics, "kv_written_entries_total", **labels) == rows * entries


def test_the_cache_has_room_for_both_sides(models):
    folder, context = models["t5"][0], ("--max-model-len", "100")
    ample = load_one(folder, "--dtype", "float32", *context, "--max-seqs", "3")
    assert ample.facts.blocks == 3 * 2 * -(-100 // 16)
    # Nine blocks of 16 · 2 · 3 layers · 3 heads · 7 float32: four for each side and one over.
    memory = ("--kv-memory", 10 * 16 * 2 * 3 * 3 * 7 * 4)
    small = load_one(folder, "--dtype", "float32", *context, *memory)
    assert (small.facts.blocks, small.served.max_context) == (9, 65)
    full = request("a", [7] * 65, max_tokens=64)
    small.engine.submit(full)
    while small.engine.busy:
        stats = small.engine.step().stats
    assert full.num_generated == 64
    assert not full.preemptions
    # Nothing is kept for others: equal tokens of two decoders mean nothing.
    assert (stats.blocks.free, stats.blocks.cached) == (9, 0)


class SpacedTokenizer:
    """Each token is a space and its number; a text does not start with the space."""

    def token_bytes(self, token, *, first):
        return b"" if token == STOP else f"{'' if first else ' '}{token}".encode()

    def name(self, token: int) -> str:
        return ""


@pytest.mark.parametrize(("source", "text"), [([5], "7 8"), ([], " 7 8")])
def test_an_answer_is_a_text_of_its_own(source, text):
    asked = request("a", source, logprobs=0)
    choice = Choice(0, asked, SpacedTokenizer())
    events = [TokenEvent("a", token) for token in (STOP, 7, 8)]
    assert choice.take(events).text == text
    assert "".join(choice.speller.spell(token)[0] for token in (STOP, 7, 8)) == text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype", "float16"], "use --dtype bfloat16 or float32"),
        (
            ["--dtype", "float32", "--kv-memory", "17K"],
            "but prompt and answer need one each; raise",
        ),
        (["--encoding", "nope"], "has an encoding on each side, which cannot be replaced"),
    ],
)
def test_refusals_at_the_start(flags, words, models):
    with pytest.raises(CommandError) as refused:
        load_one(models["t5"][0], *flags)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", ["window", "table", "materialised"])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_the_decoders_bias_is_in_the_form_asked_for(name, form, models):
    asked = configured(
        str(models[name][0]), "--dtype", "float32", "--encoding-option", f"form={form}"
    )
    decoder = prepare(asked.loading, asked.models[0], CPU, "not asked for").decoder
    assert decoder.encoding.for_layer(1).form == form
    assert decoder.encoder_encoding.for_layer(1).form == "table"


@pytest.mark.parametrize("form", ["table", "materialised"])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_answers_are_the_same_in_every_form(name, form, client, models):
    body = {"model": name, "prompt": PROMPT, "max_tokens": 32, "ignore_eos": True, "logprobs": 1}
    expected = ask(client, **body)
    flags = ("--kv-memory", "3M", "--max-model-len", "100", "--encoding-option", f"form={form}")
    with serving({name: models[name][0]}, *flags) as (other, _):
        found = ask(other, **body)
    assert found.json()["choices"][0]["text"] == expected.json()["choices"][0]["text"]
    assert scores(found) == pytest.approx(scores(expected), abs=1e-4)


# ------------------------------------------------------------------------------- the engine


def request(name, source, max_tokens=20, logprobs=None):
    more = {"max_tokens": max_tokens, "logprobs": logprobs}
    return make_request(name, [START], source=tuple(source), **more)


def sources(count=7):
    rng = random.Random(5)
    return [[rng.randrange(260) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def alone(decoder, source, tokens):
    """Logits [tokens, vocab] of one pass over a prompt and its whole answer."""
    generator = torch.Generator().manual_seed(1)
    whole = Answering(source, tokens, tiny.allocator(generator))
    return tiny.step(decoder, [(whole, len(tokens))], tiny.new_cache(decoder))[0]


@pytest.mark.parametrize(
    ("name", "backend", "ahead"),
    combined(
        MODELS,
        (ReferenceAttention, SdpaAttention),
        (False, True),
        # T5 and T5 v1.1 attend alike: each shows one backend.
        always=lambda name, backend, ahead: (
            (name == "umt5" or (name == "t5") == (backend is ReferenceAttention))
            and ahead is (name == "t5")
        ),
    ),
)
def test_disturbed_answers_equal_one_undisturbed_pass(name, backend, ahead, models):
    """Prompts longer than a step, preempted answers computed again in chunks, one aborted."""
    checkpoint = open_checkpoint(models[name][0])
    exact = tiny.loaded(checkpoint, torch.float64, ReferenceAttention)
    decoder = tiny.loaded(checkpoint, torch.float64, backend)
    recording = Recording(decoder, 28, LIMITS, ahead=ahead, sharing=False)
    engine, manager = recording.engine, recording.manager
    requests = [request(str(i), source) for i, source in enumerate(sources())]
    for each in requests:
        engine.submit(each)
    steps = 0
    while engine.busy:
        recording.step()
        steps += 1
        if steps == 9:
            engine.abort("1")
    assert manager.counts().active == 0
    assert not manager.sequences
    # At least one was preempted after some tokens, and caught up in more than one step.
    assert sum(each.preemptions for each in requests) >= 2
    assert sum(len(rows) > 1 for *_, rows in recording.rows) >= 2
    oracle = {each.id: alone(exact, each.source, each.tokens) for each in requests}
    for owner, start, rows in recording.rows:
        whole = oracle[owner.id]
        expected = whole[start : start + len(rows)]
        if ahead and start == len(whole):  # computed of one that was aborted meanwhile
            continue
        assert (rows - expected).abs().max() <= 1e-10
    for each in requests:
        if each.id != "1":
            assert each.num_generated == 20
            assert each.tokens[1:] == oracle[each.id].argmax(dim=-1)[:-1].tolist()


def test_every_way_to_end_gives_all_blocks_back(models):
    decoder = tiny.loaded(open_checkpoint(models["t5"][0]))
    broken = []

    def forward(batch, kv):
        logits = decoder(batch, kv)
        if broken:
            logits[:] = torch.nan
        return logits

    engine, manager, scheduler = engine_on(
        forward, decoder, 60, replace(LIMITS, max_seqs=3), sharing=False
    )
    for i, source in enumerate(sources()):
        engine.submit(request(str(i), source))
    engine.step()
    running = [each.id for each in scheduler.running]
    assert len(manager.sequences) == 2 * len(running) > 0
    engine.abort(running[0])  # running
    engine.abort("6")  # waiting
    scheduler.check()
    assert len(manager.sequences) == 2 * len(running) - 2
    engine.step()
    broken.append(True)
    engine.step()  # fails all that run
    broken.clear()
    while engine.busy:
        engine.step()
        scheduler.check()
    manager.check()
    assert manager.counts().active == 0


# ----------------------------------------------------------------------------- the scheduler


def scheduler_of(blocks):
    chosen = {"tokens": 16, "context": 40, "prefix_sharing": False}
    made = make_scheduler(blocks + 1, BLOCK, seqs=8, **chosen)
    return made, made._cache


def test_admission_takes_both_sides_or_neither():
    """Five blocks: four for the first, so that the second finds room for one side alone."""
    scheduler, manager = scheduler_of(5)
    scheduler.add(request("a", [1] * 12, max_tokens=2))
    scheduler.add(request("b", [1] * 4, max_tokens=2))
    plan = scheduler.plan()
    assert [work.request.id for work in plan.work] == ["a"]
    assert manager.sequences == {"a", "a/encoder"}
    assert manager.counts().free == 1
    scheduler.check()
    scheduler.abort("a")
    assert [work.request.id for work in scheduler.plan().work] == ["b"]


def test_a_source_counts_towards_the_step_and_one_may_exceed_it():
    scheduler, _ = scheduler_of(60)
    for name, length in (("a", 10), ("b", 30), ("c", 1)):
        scheduler.add(request(name, [1] * length))
    plan = scheduler.plan()
    assert [(work.request.id, work.encodes, work.rows) for work in plan.work] == [
        ("a", True, 11),
        ("b", True, 31),
    ]


def test_what_cannot_ever_fit_is_refused():
    scheduler, _ = scheduler_of(5)
    with pytest.raises(PromptTooLong, match=r"41 tokens: .* 40 tokens for its encoder"):
        scheduler.add(request("a", [1] * 41))
    # Three blocks for 9 tokens leave two, for 8 stored tokens: 9 with the last.
    scheduler.add(request("b", [1] * 9, max_tokens=8))
    with pytest.raises(InvalidField, match="need room for 21 tokens, but the cache holds 20"):
        scheduler.add(request("c", [1] * 9, max_tokens=9))


def test_a_prompt_is_counted_once_however_often_it_is_encoded():
    scheduler, _ = scheduler_of(60)
    scheduler.add(request("a", [1] * 10))
    for _ in range(2):
        plan = scheduler.plan()
        scheduler.record(plan, {"a": Sampled(5)})
        scheduler._preempt_newest()
    assert scheduler.plan().work[0].encodes
    assert scheduler.computed_prompt_tokens == 10
