"""The canary of a start: silent on every model that is right, loud on planted mistakes."""

from dataclasses import replace

import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.cpu import executor as cpu
from ropewalk.model.layers import executor
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.server.launch.self_check import check_parity
from tests.model import checkpoints, encoder_decoders, plain
from tests.model.checkpoints import save
from tests.model.few_bits import round_weights
from tests.model.running import new_cache
from tests.model.test_planted_mistakes import Backend
from tests.model.tiny import CONTEXT, ENCODINGS, program_of, tiny
from tests.products import pairs
from tests.server.fake_engine import loaded_app
from tests.server.toy import asking, sample

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def defect(decoder, block_size=16, context=CONTEXT, stored=None):
    kv = new_cache(decoder, 2, block_size, stored)
    found = check_parity(decoder, decoder.config, kv, context)
    return found.defect("m")


@pairs(
    encoding=ENCODINGS,
    backend=[SdpaAttention, ReferenceAttention],
    dtype=DTYPES,
    stored=[None, torch.int8],
)
def test_a_model_that_is_right(encoding, backend, dtype, stored):
    assert defect(tiny(encoding, backend, dtype), stored=stored) is None


@pairs(bits=[8, 4], encoding=["rope", "sinusoidal", "nope"], dtype=[torch.float32, torch.bfloat16])
def test_kernels_with_weights_of_few_bits(bits, encoding, dtype, kernels):
    program = round_weights(program_of(tiny(encoding, dtype=dtype)), bits, kernels)
    assert defect(Decoder(program, cpu.CpuExecutor(program, kernels))) is None


@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_any_size_of_block(block_size):
    assert defect(tiny("t5", dtype=torch.float32), block_size) is None


@pytest.mark.parametrize("context", [1, 2, 5])
def test_a_context_may_be_shorter_than_the_sequences(context):
    learned = tiny("learned", dtype=torch.float32, options={"positions": context, "offset": 0})
    assert defect(learned, context=context) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [SdpaAttention, ReferenceAttention], ids=lambda each: each.name)
def test_an_encoder_decoder_that_is_right(backend, dtype, tmp_path):
    model = encoder_decoders.random_model(encoder_decoders.umt5(), own_head=True)
    checkpoint = open_checkpoint(save(model, tmp_path))
    decoder = encoder_decoders.loaded(checkpoint, dtype, backend)
    assert defect(decoder) is defect(decoder, stored=torch.int8) is None


# ------------------------------------------------------------------------- planted mistakes


def nothing_when_decoding(bias, batch):
    """As keras-hub#2861 and TensorRT-LLM#13870: steps of one row for each request get no bias."""
    return None if batch.max_query == 1 else bias


def last_key_forgotten(batch):
    """By requests of more than one block."""
    lens = batch.context_lens
    return replace(batch, context_lens=lens - (lens > 16).long())


def position_by_row(batch):
    """As TransformerEngine#1046, and as the first chunk of a prompt would have it."""
    return replace(batch, positions=torch.arange(len(batch.tokens)))


MISTAKES = {
    "alibi zero when decoding": ("alibi", Backend(bias=nothing_when_decoding)),
    "t5 zero when decoding": ("t5", Backend(bias=nothing_when_decoding)),
    "t5 by row": ("t5", Backend(batch=position_by_row)),
    "rope by row": ("rope-raw", Backend(batch=position_by_row)),
    "a key forgotten": ("nope", Backend(batch=last_key_forgotten)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_attention_is_found(mistake, dtype):
    encoding, backend = MISTAKES[mistake]
    assert "decoding m through the cache" in defect(tiny(encoding, backend, dtype))


@pytest.mark.parametrize("encoding", ["learned", "sinusoidal"])
def test_embeddings_by_row_are_found(encoding):
    decoder = tiny(encoding, dtype=torch.bfloat16)
    embed = decoder.encoding.embed
    decoder.encoding.embed = lambda x, positions: embed(x, torch.arange(len(positions)))
    assert defect(decoder)


def test_what_is_no_number_is_found():
    def unwritten(batch):
        lens = batch.context_lens
        return replace(
            batch, context_lens=lens + (lens % 16 > 0).long(), max_context=batch.max_context + 1
        )

    found = defect(tiny("nope", Backend(batch=unwritten), torch.bfloat16))
    assert "from those of one whole pass by inf" in found


def test_an_encoded_prompt_that_moves_is_found(tmp_path, monkeypatch):
    """Once it is encoded, the decoder looks one token short of its end."""
    model = encoder_decoders.random_model(encoder_decoders.umt5(), own_head=True)
    checkpoint = open_checkpoint(save(model, tmp_path))
    decoder = encoder_decoders.loaded(checkpoint)
    right = executor.attended

    def short(op, attend, now, q):
        if op.crosses and now.batch.max_query == 1:
            seen = now.batch.cross.seen
            seen = replace(seen, context_lens=seen.context_lens - 1)
            cross = replace(now.batch.cross, seen=seen)
            now = replace(now, batch=replace(now.batch, cross=cross))
        return right(op, attend, now, q)

    monkeypatch.setattr(executor, "attended", short)
    assert defect(decoder)


# ------------------------------------------------------------------------- what comes of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = plain.random_model(plain.bloom(tie_word_embeddings=False))
    return checkpoints.save(model, tmp_path_factory.mktemp("bloom"))


def started(folder):
    return loaded_app(f"m={folder}", "--dtype", "float32", "--kv-memory", "4M")


def shown(app):
    labels = {"model_name": "m", "encoding": "alibi"}
    names = ("cache_parity_max_abs_error", "cache_parity_tolerance")
    return tuple(sample(app.state.metrics, name, **labels) for name in names)


def test_a_server_that_is_right_is_ready_and_shows_how_exactly(folder):
    app = started(folder)
    with asking(app) as client:
        assert client.get("/health/ready").status_code == 200
    error, tolerance = shown(app)
    assert 0 <= error < tolerance < 0.01  # some processors round both ways alike


def test_a_server_whose_decoding_is_wrong_is_never_ready(folder, monkeypatch, caplog):
    right = executor.step_bias

    def wrong(encoding, batch, block_size):
        return nothing_when_decoding(right(encoding, batch, block_size), batch)

    for each in (executor, cpu):
        monkeypatch.setattr(each, "step_bias", wrong)
    app = started(folder)
    with asking(app) as client:
        answer = client.get("/health/ready")
        assert client.get("/health/live").status_code == 200
    assert answer.status_code == 503
    assert (
        "decoding m through the cache gives logits that differ from those of one whole pass by"
        in answer.text
    )
    assert "decoding m through the cache" in caplog.text
    error, tolerance = shown(app)
    assert error > 100 * tolerance
