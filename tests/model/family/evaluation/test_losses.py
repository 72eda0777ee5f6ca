"""Loss by position: known answers, and that chunks change nothing."""

from dataclasses import replace
from math import log

import pytest
import torch

from ropewalk.model.encodings.base import create
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation import losses, reading
from ropewalk.model.family.evaluation.losses import HeldOut
from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.evaluation.texts import texts_of
from ropewalk.model.family.training.dense import DenseAttention, dense_logits
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.recipes import program
from ropewalk.report.statistics import Estimate
from tests.model.family.evaluation.trained import (
    CPU,
    ENCODINGS,
    TRAINED,
    VOCAB,
    corpus,
    random_decoder,
)
from tests.model.tiny import program_of

TEXTS = texts_of(corpus().held_out, 4 * TRAINED, 5)


def measured(encoding: str, **changes):
    decoder = random_decoder(ENCODINGS[encoding], **changes)
    return losses.measure(
        Reader(decoder, 4 * TRAINED),
        TEXTS,
        trained=TRAINED,
        reach=decoder.encoding.max_positions or 4 * TRAINED,
        refusal="no vector",
        done=lambda _: None,
    )


def test_windows_are_whole_and_taken_from_all_documents_in_turn() -> None:
    held_out = corpus(documents=3, length=600).held_out
    found = texts_of(held_out, 255, 4)
    assert found.documents == held_out.names and found.owner == (0, 1, 2, 0)
    assert found.tokens[3] == (held_out.bos, *held_out.document(0)[257:512].tolist())
    assert found.weights.tolist() == [2, 1, 1]
    with pytest.raises(FamilyError, match="only 0 held-out documents have 601 tokens"):
        texts_of(held_out, 600, 4)


def test_translations_of_a_book_are_one_document() -> None:
    split = corpus(documents=4, length=600).held_out
    names = ("grimm/Esther", "bible-web/Esther", "bible-web/Ruth", "bible-bbe/Esther")
    found = texts_of(replace(split, names=names), 255, 6)
    assert found.documents == ("grimm/Esther", "bible/Esther", "bible/Ruth")
    assert found.owner == (0, 1, 2, 1, 0, 1)
    assert found.weights.tolist() == [2, 3, 1]


def with_weights_of(decoder, encoding):
    """The decoder's program under the same encoding for another context."""
    own = program_of(decoder)
    encoding.load_state_dict(own.encoding.state_dict())
    encoding.freeze()
    return program(own.config, own.weights, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_chunks_read_what_a_whole_pass_reads(encoding, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 24)  # no multiple of a block, and several in a window
    tokens = TEXTS.tokens[0][: TRAINED + 1]
    decoder = random_decoder(ENCODINGS[encoding])
    found = losses.token_losses(Reader(decoder, TRAINED), tokens)
    shape = decoder.config
    whole = with_weights_of(decoder, create(shape.encoding, shape, TRAINED, CPU))
    training = TorchExecutor(whole, DenseAttention)
    logits = dense_logits(training, torch.tensor([tokens[:-1]]), torch.float32)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-4


def test_a_model_that_knows_nothing_loses_the_logarithm_of_its_vocabulary() -> None:
    found = measured("nope", scale=0.0)
    for one in found.bins:
        assert one.loss.value == pytest.approx(log(VOCAB), abs=1e-5)
        if one.start >= TRAINED:
            assert one.change is not None and one.change.value == pytest.approx(0, abs=1e-5)
    assert found.bins[-1].stop == 4 * TRAINED


def test_bins_never_mix_trained_positions_with_others() -> None:
    found = losses.edges(512, 4096)
    assert found == [0, 16, 32, 64, 128, 256, 512, 640, 768, 1024, 1536, 2048, 3072, 4096]
    assert losses.edges(64, 256) == [0, 16, 32, 64, 80, 96, 128, 192, 256]


def test_an_encoding_without_more_positions_is_reported_and_not_asked() -> None:
    found = measured("learned")
    assert (found.reach, found.refusal) == (TRAINED, "no vector")
    assert found.bins[-1].stop == TRAINED and found.bins[-1].near is None
    assert measured("rope").refusal == ""


def test_near_losses_are_those_of_the_same_tokens_after_fewer() -> None:
    decoder = random_decoder(ENCODINGS["rope"])
    reader, tokens = Reader(decoder, 4 * TRAINED), TEXTS.tokens[0]
    found = losses.near_losses(reader, tokens, TRAINED)
    assert len(found) == 3 * TRAINED
    half = TRAINED // 2
    for place in (0, 31, 32, 3 * TRAINED - 1):
        predicted = TRAINED + place + 1
        start = TRAINED + place // half * half - half
        (loss,) = losses.token_losses(reader, [tokens[0], *tokens[start + 1 : predicted + 1]])[-1:]
        assert float(found[place]) == pytest.approx(float(loss), abs=1e-4)
    far = losses.token_losses(reader, tokens)[TRAINED:]
    assert (far - found).abs().max() > 0.01  # they see less


def test_held_out_loss_is_that_of_the_later_half() -> None:
    texts = texts_of(corpus().held_out, TRAINED, 1 << 20)
    reader = Reader(random_decoder(ENCODINGS["rope"]), TRAINED)
    found = losses.held_out(reader, texts, lambda _: None)
    assert sum(found.windows) == len(texts.tokens) > 30
    expected = [
        losses.token_losses(reader, tokens)[TRAINED // 2 :].mean() for tokens in texts.tokens
    ]
    assert found.loss.value == pytest.approx(float(torch.stack(expected).mean()), abs=1e-6)
    assert found.loss.low < found.loss.value < found.loss.high


def test_models_are_compared_document_by_document() -> None:
    """Texts differ far more than models on each of them."""
    spread = Estimate(3.0, 2.0, 4.0)
    one = HeldOut(("a", "b", "c"), (2, 1, 1), (2.1, 3.1, 4.1), spread)
    other = replace(one, means=(2.0, 3.0, 4.1))
    found = losses.difference(one, other)
    assert found is not None and found.value == pytest.approx(0.075)
    assert found.low > -1e-9 and found.high < 0.1 + 1e-9
    assert losses.difference(one, replace(other, windows=(2, 1, 2))) is None
