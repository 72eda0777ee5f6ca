"""Recall: readers whose memory is known, and texts that end where they should."""

from collections import defaultdict

import pytest
import torch

from ropewalk.model.family.evaluation import recalled
from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.family.texts.recall import FACTS
from ropewalk.model.tokenizers.spm import SpmModel, SpmTokenizer
from tests.model.family.evaluation.trained import ENCODINGS, VOCAB, random_decoder

TOKENIZER = SpmTokenizer(SpmModel(SHIPPED_TOKENIZER.read_bytes()))
PROSE = [TOKENIZER.encode("the sea and the ship and " * 200, bos=True) for _ in range(3)]
TEXTS = recalled.asked(TOKENIZER, (32, 128, 384), 4)


class Copier:
    """Says what once followed the last tokens, as far as it remembers: an induction head."""

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def read(self, tokens, *, wanted, start=0):
        found = torch.full((wanted, VOCAB), -9.0)
        for row, end in enumerate(range(len(tokens) - wanted + 1, len(tokens) + 1)):
            found[row, self.guess(tokens[:end][-self.memory :])] = 0.0
        return found

    @staticmethod
    def guess(tokens):
        def alike(end):
            count = 0
            while count < end and tokens[end - 1 - count] == tokens[-1 - count]:
                count += 1
            return count

        best = max(range(1, len(tokens)), key=lambda end: (alike(end), end))
        return tokens[best]


def measured(reader, lengths, reach=4096, texts=TEXTS):
    found = recalled.measure(
        reader, texts, PROSE, lengths, trained=512, reach=reach, done=lambda _: None
    )
    return found.cells


def test_a_copier_copies_and_is_asked_at_every_distance() -> None:
    cells = measured(Copier(10_000), (512, 700))
    copies = [cell for cell in cells if cell.kind == "copy"]
    assert [(cell.length, cell.wanted) for cell in copies] == [
        (length, distance) for length in (512, 700) for distance in (32, 128, 384)
    ]
    for cell in copies:
        assert (cell.right, cell.trials, cell.share.value) == (4, 4, 1.0)
        assert cell.wanted <= cell.distance < cell.wanted + 24


def test_what_is_out_of_memory_is_not_recalled() -> None:
    cells = measured(Copier(110), (512,))
    shares = {(cell.kind, cell.wanted): cell.share.value for cell in cells}
    assert shares["copy", 32] == 1.0 and shares["copy", 128] == shares["copy", 384] == 0.0
    assert shares["pairs", 384] < 1


def test_texts_are_those_of_the_tokenizer_and_end_with_the_answer() -> None:
    for one in TEXTS:
        text = b"".join(TOKENIZER.token_bytes(token, first=False) for token in one.tokens).decode()
        assert list(one.tokens) == TOKENIZER.encode(text, bos=True)
        assert text.count(". In") <= FACTS * 20 and one.answer >= 1
    assert {len([o for o in TEXTS if o.wanted == d]) for d in (32, 128, 384)} == {8}


@pytest.mark.parametrize("length", [512, 600])
def test_every_text_ends_at_the_length_and_no_answer_is_shown(length) -> None:
    seen = []

    class Recorder(Copier):
        def read(self, tokens, *, wanted, start=0):
            seen.append((len(tokens), wanted))
            return super().read(tokens, wanted=wanted, start=start)

    measured(Recorder(64), (length,))
    assert {count for count, _ in seen} == {length - 1}
    assert sorted(wanted for _, wanted in seen) == sorted(one.answer for one in TEXTS)


def test_texts_of_a_cell_stand_after_as_many_proses_as_there_are() -> None:
    """Each text begins where its own prose does, whose first token tells them apart."""
    behind = defaultdict(set)

    class Recorder(Copier):
        def read(self, tokens, *, wanted, start=0):
            behind[by_end[tuple(tokens[-20:])]].add(tokens[0])
            return super().read(tokens, wanted=wanted, start=start)

    texts = recalled.asked(TOKENIZER, (64,), 4)
    by_end = {one.tokens[:-1][-20:]: one.kind for one in texts}
    proses = [[mark, *PROSE[0]] for mark in range(4)]
    recalled.measure(
        Recorder(64), texts, proses, (600,), trained=512, reach=600, done=lambda _: None
    )
    assert behind == {"pairs": {0, 1, 2, 3}, "copy": {0, 1, 2, 3}}


def test_prose_that_was_read_once_is_read_as_if_every_time() -> None:
    """Log-probabilities equal those of a fresh pass over the whole text."""
    decoder = random_decoder(ENCODINGS["rope"])
    differences = []

    class Checked(Reader):
        def read(self, tokens, *, wanted, start=0):
            found = super().read(tokens, wanted=wanted, start=start)
            fresh = Reader(decoder, 600).read(tokens, wanted=wanted)
            differences.append(float((found - fresh).abs().max()))
            return found

    measured(Checked(decoder, 600), (600,))
    assert len(differences) == len(TEXTS) and max(differences) < 1e-4


def test_lengths_past_the_encodings_positions_have_no_cells() -> None:
    assert {cell.length for cell in measured(Copier(64), (512, 600), reach=512)} == {512}
    assert recalled.cells_in(TEXTS, (512, 600), 512) == 6
    # A distance is left out of a length as soon as one of its texts is too long for it.
    assert {cell.wanted for cell in measured(Copier(64), (300,))} == {32, 128}
