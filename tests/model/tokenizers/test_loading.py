"""Which files of a Hugging Face directory count, and what its configuration declares."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, processors
from transformers import AutoTokenizer

from ropewalk.model.tokenizers.base import TokenizerError, decode
from ropewalk.model.tokenizers.hf import HfTokenizer
from ropewalk.model.tokenizers.loading import tokenizer_from_directory
from ropewalk.model.tokenizers.spm import SpmTokenizer
from tests.model.tokenizers.hf_samples import byte_level, llama
from tests.model.tokenizers.samples import texts, train_spm


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


@pytest.mark.parametrize(("more", "bos"), [({"added_tokens_decoder": {}}, 0), ({}, 1)])
def test_special_tokens_map_fills_what_the_config_leaves_out(write, more, bos):
    """Where the config lists no added tokens, transformers prefers the map."""
    path = write(
        tokenizer__json=byte_level().to_str(),
        tokenizer_config__json={"bos_token": "<s>", "eos_token": None, **more},
        special_tokens_map__json={"bos_token": "</s>", "eos_token": "<|im_start|>"},
    )
    tokenizer = tokenizer_from_directory(path)
    assert (tokenizer.bos, tokenizer.eos) == (bos, {2})
    assert AutoTokenizer.from_pretrained(path).bos_token_id == bos


def test_a_vocabulary_without_the_usual_letters_has_its_bos(write):
    """The first in any order is the one that is put before a text."""
    letters = {"<!>": 0, "</s>": 1, "C": 2, "G": 3, "T": 4}
    known = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    known.decoder = decoders.Fuse()
    known.add_special_tokens(["<!>", "</s>"])
    known.post_processor = processors.TemplateProcessing(
        single="<!> $A", pair="<!> $A $B", special_tokens=[("<!>", 0)]
    )
    tokenizer = tokenizer_from_directory(write(tokenizer__json=known.to_str()))
    assert tokenizer.encode("GTC", bos=True) == known.encode("GTC").ids == [0, 3, 4, 2]
    assert tokenizer.encode("GTC", bos=False) == [3, 4, 2]


def test_a_token_that_is_not_special_is_written_though_it_is_listed(write):
    path = write(
        tokenizer__json=byte_level().to_str(),
        tokenizer_config__json={
            "added_tokens_decoder": {"3": declared("<tool>")},
            "additional_special_tokens": ["<tool>"],
        },
    )
    tokenizer = tokenizer_from_directory(path)
    ids = tokenizer.encode("a<tool>b", bos=False)
    theirs = AutoTokenizer.from_pretrained(path).decode(ids, skip_special_tokens=True)
    assert decode(tokenizer, ids) == theirs == "a<tool>b"


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


def declared(text, **flags):
    usual = dict.fromkeys(("special", "lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **usual, **flags}


NEXT = byte_level().get_vocab_size()  # the id after tokenizer.json's last one
MARKED = [
    "a<|new|>b",
    "a <|new|> b<tool> <|new|>",
    "<|new|><|new|>xe\u0301<old>",
    "no<|new|>word",
    " <s> <tool> </s>",
]


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"added_tokens_decoder": {NEXT: declared("<|new|>", special=True)}}},
        {"config": {"added_tokens_decoder": {NEXT: declared("<|new|>")}}},
        {"config": {"added_tokens_decoder": {NEXT: declared("<|new|>", lstrip=True, rstrip=True)}}},
        {"config": {"added_tokens_decoder": {NEXT: declared("<|new|>", single_word=True)}}},
        {
            "config": {
                "added_tokens_decoder": {
                    NEXT + 1: declared("<|new|>"),
                    NEXT: declared("<old>", special=True),
                }
            }
        },
        # What tokenizer.json has too, with other flags or none.
        {"config": {"added_tokens_decoder": {3: declared("<tool>", special=True, lstrip=True)}}},
        {"config": {"added_tokens_decoder": {1: declared("</s>")}}},
        {"added": {"<|new|>": NEXT, "<old>": NEXT + 1}},
        {"added": {"<|new|>": NEXT, "<s>": 0, "<tool>": 3}},
        {"added": {"<|new|>": NEXT}, "config": {"eos_token": "<|new|>"}},
        # In the vocabulary of tokenizer.json, but no added token there.
        {"config": {"eos_token": "and", "pad_token": "er"}},
        {"config": {"additional_special_tokens": ["and", "</s>"]}},
        {"config": {"mask_token": {"__type": "AddedToken", **declared("and", lstrip=True)}}},
    ],
)
def test_added_tokens_beside_a_tokenizer_json_are_those_of_transformers(write, files):
    transformers = pytest.importorskip("transformers")
    path = write(tokenizer__json=byte_level().to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.get("config", {})}
    write(tokenizer_config__json=config)
    if "added" in files:
        write(added_tokens__json=files["added"])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ours = tokenizer_from_directory(path)
    for text in [*MARKED, "sand over <tool> other </s>"]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, bos=False) == ids
        assert decode(ours, ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_added_token_that_ends_texts(write):
    path = write(
        tokenizer__json=byte_level().to_str(),
        tokenizer_config__json={
            "eos_token": "<|new|>",
            "added_tokens_decoder": {NEXT: declared("<|new|>", special=True)},
        },
    )
    tokenizer = tokenizer_from_directory(path)
    assert tokenizer.eos == {NEXT}
    assert tokenizer.vocab_size == NEXT + 1
    assert tokenizer.token_bytes(NEXT, first=False) == b""


@pytest.mark.parametrize("id", [NEXT + 1, 0, NEXT - 1])
def test_an_added_token_whose_id_tokenizer_json_does_not_give_it_is_refused(write, id):
    path = write(
        tokenizer__json=byte_level().to_str(),
        tokenizer_config__json={"added_tokens_decoder": {id: declared("<|new|>")}},
    )
    with pytest.raises(TokenizerError, match=rf"declared with the id {id}, but.*is {NEXT}"):
        tokenizer_from_directory(path)


CHAT = ["<|im_start|>", "<|im_end|>"]
CHATS = [
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|>user\nThe rope<|im_end|>\n<|im_start|>assistant\n",
    "The rope<|im_end|> runs<|im_end|>  over",
    " The rope <|im_start|> <|im_end|>",
    "  two<|im_end|>▁a",
    "▁a",
    "</s>a<s> b",
    "a</s>\n\nb",
    "",
]


def llama_folder(write, **config):
    """A SentencePiece model with chat markers, and transformers' own tokenizer of the same."""
    transformers = pytest.importorskip("transformers")
    model = train_spm("llama")
    description = json.loads(llama().to_str())["model"]
    size = len(description["vocab"])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    added = {size + index: declared(text, special=True) for index, text in enumerate(CHAT)}
    path = write(
        tokenizer__model=model,
        tokenizer_config__json=named | {"added_tokens_decoder": added} | config,
    )
    theirs = transformers.LlamaTokenizer(
        vocab=description["vocab"],
        merges=[tuple(pair) for pair in description["merges"]],
        additional_special_tokens=CHAT,
        **{key: value for key, value in config.items() if key == "legacy"},
    )
    return path, theirs


@pytest.mark.parametrize("text", CHATS)
@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizer", "legacy": False},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "LlamaTokenizer", "legacy": None},
        {},
    ],
)
def test_only_the_start_of_a_text_gets_the_space_unless_legacy(write, config, text):
    path, theirs = llama_folder(write, **{k: v for k, v in config.items() if v is not None})
    ours = tokenizer_from_directory(path)
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, bos=False) == ids
    assert ours.encode(text, bos=True) == [1, *ids]
    assert decode(ours, ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")

    def write(**files):
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name.replace("__", ".")).write_bytes(data)
        return folder

    path, theirs = llama_folder(write, tokenizer_class="LlamaTokenizer")
    return tokenizer_from_directory(path), theirs


@given(parts=st.lists(st.one_of(texts, st.sampled_from([*CHAT, "</s>", " ", "\n"])), max_size=6))
def test_any_text_with_markers_is_cut_as_transformers_does(llamas, parts):
    ours, theirs = llamas
    text = "".join(parts)
    assert ours.encode(text, bos=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", [*CHATS[:2], "</s>a<s>b", "a</s>\n\nb"])
def test_legacy_gives_every_part_the_space(write, text):
    path, theirs = llama_folder(write, tokenizer_class="LlamaTokenizer", legacy=True)
    ids = theirs.encode(text, add_special_tokens=False)
    assert tokenizer_from_directory(path).encode(text, bos=False) == ids


@pytest.mark.parametrize("config", [{}, {"legacy": False}, {"legacy": True}])
def test_t5_gives_every_part_the_space_whatever_legacy_is(write, config):
    model = train_spm("unigram")
    size = tokenizer_from_directory(write(tokenizer__model=model)).vocab_size
    added = {size: declared("<extra_id_0>", special=True)}
    write(
        tokenizer_config__json={
            "tokenizer_class": "T5Tokenizer",
            "add_bos_token": False,
            "added_tokens_decoder": added,
            **config,
        }
    )
    tokenizer = tokenizer_from_directory(write())
    rope = tokenizer.encode("rope", bos=False)
    assert tokenizer.encode("rope<extra_id_0>rope", bos=False) == [*rope, size, *rope]


def test_a_model_that_removes_spaces_keeps_the_one_after_a_marker(write):
    model = train_spm("bpe")
    size = tokenizer_from_directory(write(tokenizer__model=model)).vocab_size
    write(tokenizer_config__json={"added_tokens_decoder": {size: declared("<|x|>")}})
    tokenizer = tokenizer_from_directory(write())
    rope = tokenizer.encode("rope", bos=False)
    assert tokenizer.encode("rope<|x|>  rope", bos=False) == [*rope, size, *rope]
    glued = tokenizer.encode("<|x|>rope", bos=False)
    assert glued != [size, *rope]
    assert decode(tokenizer, [*rope, *glued]) == "rope<|x|>rope"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"add_bos_token": True, "bos_token": "<none>"}, "asks for a BOS token"),
        ({"add_bos_token": True}, "asks for a BOS token"),
        ({"eos_token": "<none>"}, "names the EOS token '<none>'"),
        ({"eos_token": 3}, "eos_token must be a token's text"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true"),
        ({"legacy": "no"}, "legacy must be true, false or null"),
        ({"tokenizer_class": 3}, "tokenizer_class must be a name"),
        ({"pad_token": ["<pad>"]}, "pad_token must be a token's text"),
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
