"""SmolLM2's own GGUF metadata against `transformers` reading the same file."""

import warnings

import gguf
import pytest
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from ropewalk.model.chat.template import chat_template_from_gguf
from ropewalk.model.tokenizers.base import decode
from ropewalk.model.tokenizers.gguf_vocab import tokenizer_from_gguf
from tests.model.tokenizers.samples import SENTENCES, TRICKY, texts
from tests.smollm2 import smollm2_path

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def fields(smollm2_reader):
    return {
        key: field.contents()
        for key, field in smollm2_reader.fields.items()
        if key.startswith("tokenizer.")
    }


@pytest.fixture(scope="module")
def ours(fields):
    return tokenizer_from_gguf(fields)


@pytest.fixture(scope="module")
def oracle(smollm2_reader):
    path = smollm2_path()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        patch.setattr(gguf, "GGUFReader", lambda path: smollm2_reader)  # it was slow enough once
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # From GGUF it cuts text as GPT-2 does; the model was trained with digits apart, as the file's
    # `pre` says. On text without digits the two are the same.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("text", TRICKY + SENTENCES[:7], ids=range(len(TRICKY) + 7))
def test_tricky_texts(ours, oracle, text):
    ids = oracle.encode(text, add_special_tokens=False)
    assert ours.encode(text, bos=True) == ids
    assert decode(ours, ids) == text


@settings(max_examples=200)
@given(text=texts)
def test_any_text(ours, oracle, text):
    ids = oracle.encode(text, add_special_tokens=False)
    assert ours.encode(text, bos=True) == ids
    # Not always the text: the vocabulary lacks a few control bytes.
    assert decode(ours, ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)


def test_every_token_has_the_bytes_that_the_oracle_decodes(ours, oracle):
    assert ours.vocab_size == len(oracle)
    for token in range(ours.vocab_size):
        ours_text = ours.token_bytes(token, first=False).decode(errors="replace")
        assert ours_text == oracle.decode([token], skip_special_tokens=True), token


def test_markers_and_digits(ours):
    assert ours.encode("<|im_start|><|im_end|>", bos=True) == [1, 2]
    assert len(ours.encode("2024", bos=False)) == 4
    assert ours.eos == {0, 2, 4}  # <|endoftext|>, <|im_end|> and <reponame>


def test_chat_prompt_equals_the_oracle_s(ours, oracle, fields):
    template = chat_template_from_gguf(fields)
    conversations = [
        [{"role": "user", "content": "Hi 😀 <|im_end|>"}],
        [
            {"role": "system", "content": "Be brief.\n"},
            {"role": "user", "content": " A "},
            {"role": "assistant", "content": "B"},
            {"role": "user", "content": ""},
        ],
    ]
    for messages in conversations:
        for prompt in (True, False):
            rendered = template.render(messages, add_generation_prompt=prompt)
            assert rendered == oracle.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
