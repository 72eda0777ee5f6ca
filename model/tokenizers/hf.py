"""tokenizer.json through the `tokenizers` library, as a Tokenizer.

The library encodes. Decoding is done here: the file's decoder is read as a rule from one token to
its bytes, and a file whose decoder is not such a rule is refused.
"""

import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import tokenizers

from ropewalk.model.tokenizers.base import (
    MAX_GROWTH,
    AddedToken,
    InvalidText,
    TokenizerError,
    TokenTable,
    byte_of_fallback,
    from_byte_level,
    refuse_ids,
    require_unicode,
)
from ropewalk.model.tokenizers.spm_proto import longest_replacement
from ropewalk.model.tokenizers.trial import try_file

# A piece of the vocabulary → its usual bytes, and its bytes where it is the first with any.
Rule = Callable[[str], tuple[bytes, bytes]]


class HfTokenizer:
    """Markers such as <|im_start|> in a text become their own token, as in `transformers`."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos: int | None = None,
        eos: Iterable[int] = (),
        add_bos: bool | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        """Without add_bos or ends these follow the file's post-processor. Raises TokenizerError.

        The file's padding and truncation are switched off: they would change prompts.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._table = TokenTable(_entries(tokenizer))
        self.vocab_size = len(self._table)
        prefix, after = _around(tokenizer)
        self.ends: Sequence[int] = ends or after
        self.bos: int | None = bos if bos is not None else prefix[-1] if prefix else None
        self.eos: frozenset[int] = frozenset(eos)
        if add_bos is not None:
            prefix = [self.bos] if add_bos and self.bos is not None else []
        self._start = prefix

    def encode(self, text: str, *, bos: bool) -> list[int]:
        require_unicode(text)
        try:
            # The library's `encode` would keep the interpreter from other threads.
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            if not _of_library(error):
                raise
            raise InvalidText(
                f"The tokenizer fails on this text ({_one_line(error)}): send another one."
            ) from None
        return [*self._start, *ids] if bos else ids

    def token_bytes(self, token: int, *, first: bool) -> bytes:
        return self._table.get(token, first=first)

    def name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""


def read_tokenizer_json(text: str) -> tokenizers.Tokenizer:
    """Raises TokenizerError."""
    file = text.encode()
    try_file("tokenizer.json", "tokenizers", "ropewalk.model.tokenizers.hf_process", file)
    tokenizer = tokenizers.Tokenizer.from_buffer(file)
    _refuse_growth(tokenizer)
    return tokenizer


def _of_library(error: BaseException) -> bool:
    """Whether it is a plain Exception, or a panic, which is no Exception to Python."""
    return type(error) is Exception or type(error).__module__ == "pyo3_runtime"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _refuse_growth(tokenizer: tokenizers.Tokenizer) -> None:
    """What makes texts longer is multiplied, by each step and by each character."""
    steps = _steps(_described(tokenizer)["normalizer"], "normalizers")
    ends = (
        getattr(tokenizer.model, "continuing_subword_prefix", None),
        getattr(tokenizer.model, "end_of_word_suffix", None),
    )
    growth = max(_growth(steps), *(len(end or "") for end in ends))
    if growth > MAX_GROWTH:
        raise TokenizerError(
            f"tokenizer.json makes texts {growth:.0f} times as long, more than the {MAX_GROWTH} "
            "allowed: correct its normalizer or its affixes."
        )


def _growth(steps: Iterable[Mapping[str, Any]]) -> float:
    """How many times longer a text may become, in bytes."""
    growth = 1.0
    for step in steps:
        if step["type"] == "Prepend":
            growth *= 1 + len(step["prepend"].encode())
        if step["type"] == "Replace":
            new, old = len(step["content"].encode()), step["pattern"].get("String")
            # An expression may match nothing, between any two characters.
            growth *= 1 + new if old is None else max(1, new / max(1, len(old.encode())))
        if step["type"] == "Precompiled":
            table = b64decode(step["precompiled_charsmap"])
            growth = max(growth, longest_replacement(table))
    return growth


def add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Iterable[AddedToken]) -> None:
    """Add these, or change how they are found. An id that the file gives to a text counts.

    Raises TokenizerError for a new token whose id is not the next one.
    """
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    changed = []
    for token in sorted(tokens, key=lambda token: token.id):
        before = known.get(token.text)
        wanted = tokenizers.AddedToken(
            token.text,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special or (before is not None and before.special),
        )
        if repr(before) != repr(wanted):  # equality looks at the text alone
            changed.append((token, wanted))
    new = [token for token, _ in changed if tokenizer.token_to_id(token.text) is None]
    tokenizer.add_tokens([wanted for _, wanted in changed])
    for token in new:
        if (given := tokenizer.token_to_id(token.text)) != token.id:
            raise TokenizerError(
                f"The added token {token.text!r} is declared with the id {token.id}, but in "
                f"tokenizer.json the next free id is {given}: save the tokenizer again with "
                "transformers."
            )


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the post-processor puts before a text and after it."""
    for text in _plain_texts(tokenizer):
        if plain := tokenizer.encode(text, add_special_tokens=False).ids:
            break
    else:
        return [], []
    full = tokenizer.encode(text, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def _plain_texts(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Without added tokens, which may be those that the post-processor puts around a text."""
    yield from ("a", "A", "0")
    added = {each.content for each in tokenizer.get_added_tokens_decoder().values()}
    # Some vocabularies know few letters. Sorted, as they come in another order every time.
    yield from islice(sorted(tokenizer.get_vocab(with_added_tokens=False).keys() - added), 1_000)


def _entries(tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[bytes, bytes]]:
    decoder = _described(tokenizer)["decoder"]
    rule = byte_rule(decoder)
    literal = decoder["type"] == "ByteLevel"  # added tokens do not use the byte alphabet
    added = tokenizer.get_added_tokens_decoder()
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    refuse_ids(highest)
    for token in range(highest + 1):
        piece = tokenizer.id_to_token(token)
        if piece is None or (token in added and added[token].special):
            yield b"", b""
        elif token in added and literal:
            text = added[token].content.encode()
            yield text, text
        else:
            yield rule(piece)


def _described(tokenizer: tokenizers.Tokenizer) -> Any:
    """Its JSON, without the vocabulary, which takes long to parse."""
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    if tokenizer.decoder is not None:
        bare.decoder = tokenizer.decoder
    return json.loads(bare.to_str())


def byte_rule(decoder: Mapping[str, Any] | None) -> Rule:
    """A tokenizer.json's decoder as a rule per token. Raises TokenizerError if it is not one."""
    steps = list(_steps(decoder, "decoders"))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    rule = _pieces_rule(steps)
    if rule is None:
        named = " + ".join(str(kind) for kind in kinds) or "none"
        raise TokenizerError(
            f"The tokenizer's decoder ({named}) does not give every token bytes of its own, so "
            "its text cannot be streamed exactly: use a byte-level or SentencePiece tokenizer."
        )
    return rule


def _steps(described: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
    """One after the other; `key` is where a sequence has its steps, which may be sequences."""
    if described is None:
        return
    if described.get("type") != "Sequence":
        yield described
        return
    for step in described[key]:
        yield from _steps(step, key)


def _byte_level(piece: str) -> tuple[bytes, bytes]:
    data = from_byte_level(piece)
    return data, data


def _metaspace(step: Mapping[str, Any]) -> Rule:
    mark = step["replacement"]
    drops = step.get("prepend_scheme", "always") != "never"

    def rule(piece: str) -> tuple[bytes, bytes]:
        usual = piece.replace(mark, " ").encode()
        # The library drops every mark of the first token, not just one.
        return usual, piece.replace(mark, "").encode() if drops else usual

    return rule


def _pieces_rule(steps: Sequence[Mapping[str, Any]]) -> Rule | None:
    """Replace…, ByteFallback, Fuse, Strip in this order, each optional, as in Llama's relatives."""
    rest = list(steps)
    replaced: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replaced.append((step["pattern"]["String"], step["content"]))
    fallback = _take(rest, "ByteFallback")
    fuse = _take(rest, "Fuse")
    # Only after Fuse does Strip apply to the start of the text rather than of each token.
    strips = fuse and bool(rest) and _drops_one_space(rest[0])
    if not steps or len(rest) != int(strips) or _growth(steps) > MAX_GROWTH:
        return None

    def rule(piece: str) -> tuple[bytes, bytes]:
        for old, new in replaced:
            piece = piece.replace(old, new)
        byte = byte_of_fallback(piece) if fallback else None
        data = piece.encode() if byte is None else bytes([byte])
        return data, data[1:] if strips and data.startswith(b" ") else data

    return rule


def _take(steps: list[Mapping[str, Any]], kind: str) -> bool:
    found = bool(steps) and steps[0]["type"] == kind
    if found:
        steps.pop(0)
    return found


def _drops_one_space(step: Mapping[str, Any]) -> bool:
    wanted = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return dict(step) == wanted
