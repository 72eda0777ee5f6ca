"""Which files of a Hugging Face directory count, and what its configuration declares."""

import json

import pytest

from model.tokenizers.base import TokenizerError, decode
from model.tokenizers.hf import HfTokenizer
from model.tokenizers.loading import tokenizer_from_directory
from model.tokenizers.spm import SpmTokenizer
from tests.model.tokenizers.hf_samples import byte_level
from tests.model.tokenizers.samples import train_spm


@pytest.fixture
def write(tmp_path):
    def write(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.write_text(
                    content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
                )
        return tmp_path

    return write


def test_tokenizer_json_is_preferred(write):
    path = write(tokenizer__json=byte_level().to_str(), tokenizer__model=train_spm("llama"))
    assert isinstance(tokenizer_from_directory(path), HfTokenizer)
    (path / "tokenizer.json").unlink()
    assert isinstance(tokenizer_from_directory(path), SpmTokenizer)


@pytest.mark.parametrize("spell", [str, lambda text: {"content": text, "special": True}])
def test_bos_and_eos_in_both_spellings(write, spell):
    path = write(
        tokenizer__json=byte_level().to_str(),
        tokenizer_config__json={
            "bos_token": spell("<|im_start|>"),
            "eos_token": spell("</s>"),
            "add_bos_token": True,
        },
    )
    tokenizer = tokenizer_from_directory(path)
    assert (tokenizer.bos, tokenizer.eos) == (2, {1})
    assert tokenizer.encode("", bos=True) == [2]


def test_the_post_processor_decides_when_nothing_is_declared(write):
    path = write(
        tokenizer__json=byte_level().to_str(),
        tokenizer_config__json={"eos_token": "</s>", "bos_token": None},
    )
    assert tokenizer_from_directory(path).encode("", bos=True) == [0]


def test_special_tokens_map_fills_what_the_config_leaves_out(write):
    path = write(
        tokenizer__json=byte_level().to_str(),
        tokenizer_config__json={"bos_token": "<s>", "eos_token": None},
        special_tokens_map__json={"bos_token": "</s>", "eos_token": "<|im_start|>"},
    )
    tokenizer = tokenizer_from_directory(path)
    assert (tokenizer.bos, tokenizer.eos) == (0, {2})


def test_a_bare_sentencepiece_model(write):
    tokenizer = tokenizer_from_directory(write(tokenizer__model=train_spm("llama")))
    assert (tokenizer.bos, tokenizer.eos) == (1, {2})
    assert tokenizer.encode("", bos=True) == [1]
    assert 2 not in tokenizer.encode("</s>", bos=False)


def test_a_sentencepiece_model_with_chat_markers(write):
    model = train_spm("llama")
    size = tokenizer_from_directory(write(tokenizer__model=model)).vocab_size
    path = write(
        tokenizer_config__json={
            "bos_token": {"content": "<s>"},
            "eos_token": "<|im_end|>",
            "add_bos_token": False,
            "added_tokens_decoder": {str(size + 1): {"content": "<|im_end|>", "special": True}},
        },
        added_tokens__json={"<tool>": size, "<|im_end|>": size + 1},
    )
    tokenizer = tokenizer_from_directory(path)
    assert tokenizer.vocab_size == size + 2
    assert (tokenizer.bos, tokenizer.eos) == (1, {size + 1})
    ids = tokenizer.encode("<s><tool><|im_end|>", bos=True)
    assert ids == [1, size, size + 1]
    assert decode(tokenizer, ids) == "<tool>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"add_bos_token": True, "bos_token": "<none>"}, "asks for a BOS token"),
        ({"add_bos_token": True}, "asks for a BOS token"),
        ({"eos_token": "<none>"}, "names the EOS token '<none>'"),
        ({"eos_token": 3}, "eos_token must be a token's text"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"x": {}}}, "tokens by id"),
        ({"added_tokens_decoder": {"1": {"content": ""}}}, "tokens with content"),
        ([], "holds no JSON object"),
        ("{", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("kind", ["json", "model"])
def test_a_wrong_configuration_is_refused(write, kind, config, message):
    if kind == "json":
        path = write(tokenizer__json=byte_level().to_str(), tokenizer_config__json=config)
    else:
        path = write(tokenizer__model=train_spm("llama"), tokenizer_config__json=config)
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_directory(path)


def test_other_broken_files_are_refused(write):
    path = write(tokenizer__json=b"\xff\xfe{}")
    with pytest.raises(TokenizerError, match="not UTF-8"):
        tokenizer_from_directory(path)
    write(tokenizer__json="{}", added_tokens__json={"<a>": "one"})
    with pytest.raises(TokenizerError, match="must map texts to ids"):
        tokenizer_from_directory(path)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        tokenizer_from_directory(tmp_path)
