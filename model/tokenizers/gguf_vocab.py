"""The tokenizer embedded in a GGUF file's metadata, as a Tokenizer.

Two kinds: "gpt2" is byte-level BPE, rebuilt for the `tokenizers` library; "llama" and "t5" are
SentencePiece, rebuilt as a model file for the sentencepiece library. Takes metadata as plain
Python values and opens no file.
"""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from ropewalk.model.tokenizers.base import AddedToken, Tokenizer, TokenizerError
from ropewalk.model.tokenizers.gguf_fields import TokenizerFields
from ropewalk.model.tokenizers.hf import HfTokenizer
from ropewalk.model.tokenizers.spm import SpmTokenizer, read_model
from ropewalk.model.tokenizers.spm_proto import ModelType, Piece, PieceType, Settings, write_model

_SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_QWEN2 = _SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_MARKS = r"\p{Lm}\p{Lo}\p{M}"  # letters of no case, and what is written on letters
_SPLIT_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_MARKS}]*[\p{{Ll}}{_MARKS}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_MARKS}]+[\p{{Ll}}{_MARKS}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_BLOOM = r" ?[^\s()|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c]+"

# How text is split before merging, by GGUF's name for it. Not `default`: converters write it where
# they did not recognise the model's own way, so whichever is used may be wrong.
_PLAIN = frozenset({"gpt-2", "mpt", "olmo", "phi-2"})
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "codeshell", "exaone", "command-r"})
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_SPLITS = {
    **dict.fromkeys(_LLAMA3, _SPLIT_LLAMA3),
    **dict.fromkeys(_QWEN2, _SPLIT_QWEN2),
    "tekken": _SPLIT_TEKKEN,
    "bloom": _SPLIT_BLOOM,
}
_BEGUN = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # have a BOS by default
_WHOLE = _LLAMA3 | {"tekken"}  # a word that is a token is not merged from its parts
_NFC = _QWEN2 | {"mpt", "olmo"}
_KEEP_SPACE = frozenset({"<s>", "<|endoftext|>"})  # Phi-3 tokens that do not strip white space


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Raises TokenizerError when the metadata holds no tokenizer that can be rebuilt exactly."""
    fields = TokenizerFields(metadata)
    kind = fields.text("model")
    if kind == "gpt2":
        return _byte_level(fields)
    if kind == "llama":
        return _sentencepiece(fields, ModelType.BPE, add_bos=True)
    if kind == "t5":
        return _sentencepiece(fields, ModelType.UNIGRAM, add_bos=False)
    raise TokenizerError(
        f"The GGUF file's tokenizer {kind!r} is not supported: use a file whose "
        "tokenizer.ggml.model is gpt2, llama or t5."
    )


def _byte_level(fields: TokenizerFields) -> HfTokenizer:
    # Old files do not say, which was correct only for GPT-2.
    name = fields.text("pre", "gpt-2" if fields.architecture in (None, "gpt2") else None)
    tokens, types = fields.tokens, fields.types()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [line.partition(" ")[::2] for line in fields.texts("merges")]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _WHOLE)
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(
            f"The GGUF file's merges do not fit its tokens ({error}): fetch the file again."
        ) from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_markers(tokenizer, tokens, types)
    add_bos = fields.flag("add_bos_token", name in _BEGUN)
    return HfTokenizer(
        tokenizer, bos=fields.bos(), eos=fields.eos(), add_bos=add_bos, ends=fields.ends()
    )


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, _pre_tokenizer("gpt-2")])
    if name not in _SPLITS:
        known = ", ".join(sorted({*_PLAIN, *_DIGITS_APART, *_SPLITS}))
        raise TokenizerError(
            f"The GGUF file's text splitting {name!r} is not supported: use one of {known}, or "
            "the model's Hugging Face directory."
        )
    split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def _add_markers(
    tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[PieceType]
) -> None:
    """Control tokens have no text of their own; user-defined ones are ordinary text."""
    control = _of_type(PieceType.CONTROL, tokens, types)
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=True) for token in control]
    )
    user_defined = _of_type(PieceType.USER_DEFINED, tokens, types)
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in user_defined])


def _of_type(wanted: PieceType, tokens: Sequence[str], types: Sequence[PieceType]) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _sentencepiece(fields: TokenizerFields, kind: ModelType, *, add_bos: bool) -> SpmTokenizer:
    tokens, types = fields.tokens, fields.types()
    # Converters write spaces in user-defined tokens as spaces, SentencePiece as its own mark.
    pieces = [
        Piece(text.replace(" ", "▁") if of is PieceType.USER_DEFINED else text, score, of)
        for text, score, of in zip(tokens, fields.scores(), types, strict=True)
    ]
    settings = Settings(
        add_dummy_prefix=fields.flag("add_space_prefix", True),
        remove_extra_whitespaces=fields.flag("remove_extra_whitespaces", False),
        charsmap=fields.data("precompiled_charsmap"),
    )
    # Phi-3's markers absorb the white space after them, which GGUF does not state.
    strips = fields.architecture == "phi3"
    markers = [
        AddedToken(token, piece.text, True, rstrip=strips and piece.text not in _KEEP_SPACE)
        for token, piece in enumerate(pieces)
        if piece.type is PieceType.CONTROL
    ]
    return SpmTokenizer(
        read_model(write_model(kind, pieces, settings)),
        bos=fields.bos(),
        eos=fields.eos(),
        add_bos=fields.flag("add_bos_token", add_bos),
        ends=fields.ends(),
        added=markers,
    )
