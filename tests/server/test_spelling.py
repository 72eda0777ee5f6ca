"""Which part of an echoed text each token stands for, markers and changed characters included."""

import time

import pytest
from hypothesis import given, settings
from tokenizers import normalizers

from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.tokenizers.base import AddedToken
from ropewalk.model.tokenizers.numbers import NumberTokenizer
from ropewalk.model.tokenizers.spm import SpmModel, SpmTokenizer
from ropewalk.server.openai.scores import parts_of, special, spell_prompt, spelled
from tests.model.tokenizers.samples import MARKERS, SPM_KINDS, TRICKY, byte_level, texts, train_spm
from tests.server.toy import BEGIN, END, ByteTokenizer
from tests.smollm2 import smollm2_path


@pytest.fixture(scope="module")
def spm() -> dict[str, SpmTokenizer]:
    """Each kind, with a marker of its own."""
    found = {}
    for kind in SPM_KINDS:
        model = SpmModel(train_spm(kind))
        found[kind] = SpmTokenizer(model, added=[AddedToken(model.size, "<|im_start|>", True)])
    return found


def parts(tokenizer, text: str, *, bos: bool = False) -> list[str]:
    return list(parts_of(text, tokenizer, tokenizer.encode(text, bos=bos)))


def test_markers_count_in_the_text_that_has_them():
    tokenizer = byte_level()
    assert parts(tokenizer, "<|im_start|>us<|im_end|>\n") == [
        *("<|im_start|>", "u", "s", "<|im_end|>", "\n")
    ]
    assert parts(tokenizer, "é<|im_end|>世") == ["", "é", "<|im_end|>", "", "", "世"]


def test_the_markers_of_a_conversation_are_where_its_text_has_them():
    tokenizer = open_checkpoint(smollm2_path()).tokenizer
    text = "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\nThe Nile."
    found = parts(tokenizer, text)
    assert "".join(found) == text
    offsets = {part: len("".join(found[:place])) for place, part in enumerate(found)}
    assert (offsets["user"], offsets["<|im_end|>"], offsets["The"]) == (12, 30, 63)


def test_a_prompt_of_ids_is_spelled_with_its_markers():
    tokenizer = byte_level()
    ids = tokenizer.encode("a<|im_end|>世", bos=False)
    assert "".join(spell_prompt(tokenizer, ids)) == "a<|im_end|>世"
    # An unfinished character ends at a marker and at the end.
    assert spell_prompt(ByteTokenizer(), [0xC3, END, 0xC3]) == ["", "\ufffd<end>", "\ufffd"]


def test_a_marker_takes_the_white_space_that_it_absorbs():
    tokenizer = byte_level(rstrip=True)
    assert parts(tokenizer, "<|im_start|> \n us") == ["<|im_start|> \n ", "u", "s"]


def test_a_token_that_the_text_does_not_have_stands_for_nothing():
    assert parts(ByteTokenizer(), "ab", bos=True) == ["", "a", "b"]
    assert special(ByteTokenizer(), BEGIN) == spelled(ByteTokenizer(), BEGIN) == "<begin>"


def test_words_find_their_place_after_composed_letters():
    found = parts(byte_level(normalizer=normalizers.NFC()), "e\u0301 e\u0301x")
    # Two bytes make one letter, which the text writes as two characters.
    assert found == ["", "e\u0301", " ", "", "e\u0301", "x"]


def test_white_space_between_numbers_is_no_token_of_its_own():
    assert parts(NumberTokenizer(100), "7  8\n word 9 ") == ["7  ", "8", "\n word ", "9 "]


@pytest.mark.parametrize("kind", SPM_KINDS)
def test_every_token_of_sentencepiece_has_its_part(spm, kind):
    for text in TRICKY:
        for marked in (text, f"<|im_start|>{text}<|im_start|> a"):
            assert "".join(parts(spm[kind], marked)) == marked


def test_the_space_that_sentencepiece_adds_is_no_part_of_a_text(spm):
    tokenizer = spm["llama"]
    text = "<|im_start|>The rope runs<|im_start|>over the walk"
    tokens = tokenizer.encode(text, bos=True)
    found = list(parts_of(text, tokenizer, tokens))
    assert "".join(found) == text
    assert found[0] == "" and tokens[0] == tokenizer.bos
    assert [part for part in found if "im_start" in part] == ["<|im_start|>"] * 2


@given(text=texts)
@settings(max_examples=50, deadline=None)
def test_parts_join_to_any_text(text):
    for tokenizer in (byte_level(), byte_level(rstrip=True, normalizer=normalizers.NFKC())):
        tokens = tokenizer.encode(text, bos=False)
        found = list(parts_of(text, tokenizer, tokens))
        assert "".join(found) == text or not tokens
        assert len(found) == len(tokens) or not tokens


def test_a_text_that_its_tokens_do_not_spell_is_divided_fast():
    class Unknown(ByteTokenizer):
        def token_bytes(self, token, *, first):
            return b" ?? "

    began = time.perf_counter()
    found = list(parts_of("x" * 20_000, Unknown(), [0] * 20_000))
    assert time.perf_counter() - began < 2
    assert "".join(found) == "x" * 20_000


def test_special_tokens_are_told_apart(spm):
    tokenizer = byte_level()
    assert [spelled(tokenizer, token) for token in (256, 257)] == MARKERS
    assert special(tokenizer, 65) == "" == special(tokenizer, 300)
    llama = spm["llama"]
    assert [spelled(llama, token) for token in (1, 2)] == ["<s>", "</s>"]
    assert spelled(llama, llama.vocab_size - 1) == "<|im_start|>"
    assert llama.name(llama.vocab_size) == ""
