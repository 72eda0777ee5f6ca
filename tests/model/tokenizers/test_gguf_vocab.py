"""Tokenizers rebuilt from GGUF metadata equal the ones the metadata was taken from."""

import json

import pytest
import sentencepiece
from hypothesis import given
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from ropewalk.model.tokenizers.base import TokenizerError, decode
from ropewalk.model.tokenizers.gguf_vocab import tokenizer_from_gguf
from ropewalk.model.tokenizers.spm_proto import PieceType, read_settings
from tests.model.tokenizers.hf_samples import byte_level
from tests.model.tokenizers.samples import SPM_KINDS, TRICKY, texts, train_spm

KINDS = [kind for kind in SPM_KINDS if kind != "suffix"]  # GGUF has no word for it


def spm_fields(kind):
    """The metadata a converter writes for a SentencePiece model."""
    model = train_spm(kind)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    settings = read_settings(model)
    ids = range(library.get_piece_size())

    def type_of(token):
        if library.is_unknown(token):
            return PieceType.UNKNOWN
        if library.is_control(token):
            return PieceType.CONTROL
        if library.is_byte(token):
            return PieceType.BYTE
        user_defined = SPM_KINDS[kind].get("user_defined_symbols", [])
        is_user_defined = library.id_to_piece(token) in user_defined
        return PieceType.USER_DEFINED if is_user_defined else PieceType.NORMAL

    def text_of(token):
        piece = library.id_to_piece(token)
        return piece.replace("▁", " ") if type_of(token) is PieceType.USER_DEFINED else piece

    bpe = SPM_KINDS[kind]["model_type"] == "bpe"
    fields = {
        "model": "llama" if bpe else "t5",
        "tokens": [text_of(token) for token in ids],
        "scores": [library.get_score(token) for token in ids],
        "token_type": [int(type_of(token)) for token in ids],
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
        "add_space_prefix": settings.add_dummy_prefix,
        "remove_extra_whitespaces": settings.remove_extra_whitespaces,
    }
    if settings.charsmap:
        # Converters write bytes as an array, signed in some versions.
        fields["precompiled_charsmap"] = [
            byte - 256 if byte > 127 else byte for byte in settings.charsmap
        ]
    return library, {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@pytest.fixture(scope="module")
def rebuilt():
    pairs = {kind: spm_fields(kind) for kind in KINDS}
    return {
        kind: (library, tokenizer_from_gguf(fields)) for kind, (library, fields) in pairs.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TRICKY, ids=range(len(TRICKY)))
def test_sentencepiece_tricky_texts(rebuilt, kind, text):
    same_tokens(*rebuilt[kind], text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_sentencepiece_any_text(rebuilt, kind, text):
    same_tokens(*rebuilt[kind], text)


def same_tokens(library, tokenizer, text):
    ids = library.encode(text)
    assert tokenizer.encode(text, bos=False) == ids
    assert decode(tokenizer, ids) == library.decode(ids)


def test_sentencepiece_markers_and_bos(rebuilt):
    library, tokenizer = rebuilt["symbols"]
    mask = library.piece_to_id("<mask>")
    assert tokenizer.encode("<mask></s>", bos=True) == [1, mask, 2]
    assert tokenizer.encode("a<sep>b", bos=False) == library.encode("a<sep>b")
    assert tokenizer.eos == {2}
    library, tokenizer = rebuilt["unigram"]
    assert tokenizer.encode("a", bos=True) == library.encode("a")  # T5's kind has no BOS


def bpe_fields(tokenizer, pre, **more):
    description = json.loads(tokenizer.to_str())
    special = {t["content"]: t["special"] for t in description["added_tokens"]}
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    kinds = {None: PieceType.NORMAL, True: PieceType.CONTROL, False: PieceType.USER_DEFINED}
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [piece for piece, _ in pieces],
        "token_type": [int(kinds[special.get(piece)]) for piece, _ in pieces],
        "merges": [" ".join(pair) for pair in description["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 2,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# As the tokenizer.json files of these models write them.
CUTS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "llama-bpe": split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "bloom": split(r" ?[^(\s|[.,!?…。，、।۔،])]+"),
}


@pytest.fixture(scope="module")
def byte_levels():
    pairs = {}
    for pre, cut in CUTS.items():
        library = Tokenizer.from_str(byte_level().to_str())
        library.pre_tokenizer = cut
        if pre == "qwen2":
            library.normalizer = normalizers.NFC()
        pairs[pre] = library, tokenizer_from_gguf(bpe_fields(library, pre))
    return pairs


@pytest.mark.parametrize("pre", CUTS)
@given(text=texts)
def test_byte_level_any_text(byte_levels, pre, text):
    library, tokenizer = byte_levels[pre]
    text = text + "<|im_start|>x<tool> "
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, bos=False) == ids
    assert decode(tokenizer, ids) == library.decode(ids)


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_where_the_library_cuts_it(byte_levels, pre) -> None:
    """Pieces, as the few merges of these tokenizers seldom reach over a cut."""
    _, tokenizer = byte_levels[pre]
    text = "One, two (three)|four: McKay it's 1234.\n\n a…b。c，d、e।f۔g،h  i\t[j]!?k_l"
    found = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert found == CUTS[pre].pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "declared", "expected"),
    [
        ("gpt-2", None, []),
        ("gpt-2", True, [0]),
        ("llama-bpe", None, [0]),
        ("smaug-bpe", None, []),
        ("dbrx", None, []),
        ("qwen2", False, []),
        ("tekken", None, [0]),
    ],
)
def test_bos_is_added_as_declared_and_by_default_only_for_some(pre, declared, expected):
    tokenizer = tokenizer_from_gguf(bpe_fields(byte_level(), pre, add_bos_token=declared))
    assert tokenizer.encode("", bos=True) == expected
    assert tokenizer.bos == 0
    assert tokenizer.eos == {1, 2}


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
def test_some_take_a_whole_word_that_no_merge_reaches(pre, whole):
    fields = bpe_fields(byte_level(), pre)
    fields["tokenizer.ggml.tokens"].append("qzx")
    fields["tokenizer.ggml.token_type"].append(int(PieceType.NORMAL))
    word = len(fields["tokenizer.ggml.tokens"]) - 1
    assert (tokenizer_from_gguf(fields).encode("qzx", bos=False) == [word]) == whole


def with_tokens(texts, kind=PieceType.CONTROL, **declared):
    """Llama 3's metadata with tokens added, and the first of their ids."""
    fields = bpe_fields(byte_level(), "llama-bpe", eot_token_id=None, **declared)
    first = len(fields["tokenizer.ggml.tokens"])
    fields["tokenizer.ggml.tokens"] += texts
    fields["tokenizer.ggml.token_type"] += [int(kind)] * len(texts)
    return fields, first


# As of llama.cpp's src/llama-vocab.cpp.
ENDS = [
    *["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>"],
    *["<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>"],
    *["<turn|>", "<|tool_response>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["],
    *["<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    *["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"],
]


@pytest.mark.parametrize(
    "kind", [PieceType.CONTROL, PieceType.USER_DEFINED, PieceType.NORMAL], ids=str
)
@pytest.mark.parametrize("text", ENDS)
def test_an_end_is_known_by_how_it_is_written(text, kind):
    fields, end = with_tokens([text], kind)
    tokenizer = tokenizer_from_gguf(fields)
    others = {1} if text != "<|tool_response>" else set()  # there, </s> is none
    assert tokenizer.eos == {end} | others
    assert tokenizer.encode(f"a{text}", bos=False)[1:] == [end]
    assert tokenizer.token_bytes(end, first=False) == b""


@pytest.mark.parametrize("text", ["<|im_start|>", "<end>", "<|endoftext|", "<|fim_middle|>"])
def test_other_markers_end_nothing(text):
    fields, _ = with_tokens([text] if text != "<|im_start|>" else [])
    assert tokenizer_from_gguf(fields).eos == {1}


@pytest.mark.parametrize(
    "beside",
    [
        ["<|return|>", "<|call|>"],
        ["<|return|>", "<|calls|>"],
        ["<|flush|>", "<|call|>"],
        ["<|calls|>", "<|flush|>"],
    ],
)
def test_the_end_of_a_part_of_an_answer_ends_no_answer(beside):
    """In gpt-oss, <|end|> stands between the analysis and the answer."""
    fields, first = with_tokens([*beside, "<|end|>"])
    for declared in ({}, {"tokenizer.ggml.eot_token_id": first + 2}):
        assert tokenizer_from_gguf(fields | declared).eos == {1, first, first + 1}
    fields, first = with_tokens([beside[0], "<|end|>"])
    assert tokenizer_from_gguf(fields).eos == {1, first, first + 1}


def test_a_declared_token_of_code_models_is_the_only_one_of_its_kind():
    fields, first = with_tokens(["<|fim_pad|>", "<mine>", "<|file_sep|>"])
    assert tokenizer_from_gguf(fields).eos == {1, first, first + 2}
    fields["tokenizer.ggml.fim_pad_token_id"] = first + 1
    assert tokenizer_from_gguf(fields).eos == {1, first + 1, first + 2}
    fields["tokenizer.ggml.fim_pad_token_id"] = 2**32 - 1  # as converters write "none"
    assert tokenizer_from_gguf(fields).eos == {1, first, first + 2}


def test_ends_of_a_sentencepiece_vocabulary():
    _, fields = spm_fields("llama")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    place = types.index(int(PieceType.NORMAL))
    tokens[place] = "<end_of_turn>"
    tokenizer = tokenizer_from_gguf(fields)
    assert tokenizer.eos == {2, place}
    assert tokenizer.encode("<end_of_turn>", bos=False) == [place]
    assert tokenizer.token_bytes(place, first=False) == b""


def test_every_part_of_a_sentencepiece_text_gets_the_space_as_in_llama_cpp():
    library, fields = spm_fields("symbols")
    mask = library.piece_to_id("<mask>")
    for adds in (True, False):
        tokenizer = tokenizer_from_gguf(fields | {"tokenizer.ggml.add_space_prefix": adds})
        a = tokenizer.encode("a", bos=False)
        assert (a == library.encode("a")) == adds
        assert tokenizer.encode("a<mask>a", bos=False) == [*a, mask, *a]


def test_a_file_that_does_not_say_how_to_cut_text_is_gpt2s():
    fields = bpe_fields(byte_level(), None) | {"general.architecture": "gpt2"}
    assert decode(tokenizer_from_gguf(fields), tokenizer_from_gguf(fields).encode("a b", bos=False))
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is missing"):
        tokenizer_from_gguf(fields | {"general.architecture": "llama"})


def test_phi3_markers_take_the_white_space_after_them():
    _, fields = spm_fields("llama")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    place = types.index(int(PieceType.NORMAL))
    tokens[place], types[place] = "<|user|>", int(PieceType.CONTROL)
    for architecture, strips in (("phi3", True), ("llama", False)):
        tokenizer = tokenizer_from_gguf(fields | {"general.architecture": architecture})
        user, *rest = tokenizer.encode("<|user|>\na", bos=False)
        assert user == place
        assert (rest == tokenizer.encode("a", bos=False)) == strips


@pytest.mark.parametrize(("pre", "composed"), [("gpt-2", False), ("mpt", True), ("olmo", True)])
def test_gpt_neox_tokenizers_compose_characters_first(pre, composed):
    tokenizer = tokenizer_from_gguf(bpe_fields(byte_level(), pre))
    same = tokenizer.encode("e\u0301", bos=False) == tokenizer.encode("\u00e9", bos=False)
    assert same == composed


def test_a_file_without_token_types_or_ends():
    fields = bpe_fields(
        byte_level(), None, token_type=None, eos_token_id=None, eot_token_id=None, bos_token_id=None
    )
    tokenizer = tokenizer_from_gguf(fields)
    assert tokenizer.eos == {1}  # by its text
    assert tokenizer.bos is None
    assert decode(tokenizer, tokenizer.encode("<s>", bos=True)) == "<s>"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "rwkv", "'rwkv' is not supported"),
        ("model", None, "is missing and should be a text"),
        ("pre", "hieroglyphs", "'hieroglyphs' is not supported"),
        ("pre", "default", "'default' is not supported"),
        ("tokens", None, "tokens is missing"),
        ("tokens", ["a", 1], "is not a list of texts"),
        ("tokens", ["a", "a"], "names the token 'a' twice"),
        ("token_type", [1], "as long as the list of tokens"),
        ("token_type", 3, "is not a list of token types"),
        ("merges", ["a nothing-of-the-kind"], "merges do not fit"),
        ("merges", None, "^The GGUF file.s tokenizer.ggml.merges is missing"),
        ("bos_token_id", 10**6, "bos_token_id is not the id of a token"),
        ("eos_token_id", -1, "eos_token_id is not the id of a token"),
        ("add_bos_token", "yes", "add_bos_token is not true or false"),
    ],
)
def test_wrong_metadata_is_refused_by_name(key, value, message):
    refused(bpe_fields(byte_level(), "gpt-2"), key, value, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", None, "scores is missing"),
        ("token_type", "all 9", "numbers from 1 to 6"),
        ("token_type", "all 1", "cannot be read"),
        ("precompiled_charsmap", "abc", "list of bytes"),
    ],
)
def test_wrong_sentencepiece_metadata_is_refused(key, value, message):
    _, fields = spm_fields("llama")
    if value is not None and value.startswith("all "):
        value = [int(value[4:])] * len(fields["tokenizer.ggml.tokens"])
    refused(fields, key, value, message)


def refused(fields, key, value, message):
    fields.pop(f"tokenizer.ggml.{key}", None)
    if value is not None:
        fields[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(fields)
