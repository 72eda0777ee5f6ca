"""tokenizer.json through the `tokenizers` library, as a Tokenizer.

The library encodes. Decoding is done here: the file's decoder is read as a rule from one token to
its bytes, and a file whose decoder is not such a rule is refused.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from model.tokenizers.base import AddedToken, TokenizerError, require_unicode
from model.tokenizers.bytes import TokenTable, byte_of_fallback, from_byte_level

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
    ) -> None:
        """add_bos None follows the file's post-processor. Raises TokenizerError.

        The file's padding and truncation are switched off: they would change prompts.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._table = TokenTable(_entries(tokenizer))
        self.vocab_size = len(self._table)
        prefix = _prefix(tokenizer)
        self.bos: int | None = bos if bos is not None else prefix[-1] if prefix else None
        self.eos: frozenset[int] = frozenset(eos)
        if add_bos is not None:
            prefix = [self.bos] if add_bos and self.bos is not None else []
        self._start = prefix

    def encode(self, text: str, *, bos: bool) -> list[int]:
        require_unicode(text)
        # The library's `encode` would keep the interpreter from other threads.
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [*self._start, *ids] if bos else ids

    def token_bytes(self, token: int, *, first: bool) -> bytes:
        return self._table.get(token, first=first)

    def name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""


def read_tokenizer_json(text: str) -> tokenizers.Tokenizer:
    """Raises TokenizerError."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(
            f"tokenizer.json cannot be read ({error}): fetch it again or update `tokenizers`."
        ) from None


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


def _prefix(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """The tokens that the post-processor puts before a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _entries(tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[bytes, bytes]]:
    decoder = _decoder(tokenizer)
    rule = byte_rule(decoder)
    literal = decoder["type"] == "ByteLevel"  # added tokens do not use the byte alphabet
    added = tokenizer.get_added_tokens_decoder()
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    for token in range(size):
        piece = tokenizer.id_to_token(token)
        if piece is None or (token in added and added[token].special):
            yield b"", b""
        elif token in added and literal:
            text = added[token].content.encode()
            yield text, text
        else:
            yield rule(piece)


def _decoder(tokenizer: tokenizers.Tokenizer) -> Any:
    """The decoder's JSON, without the vocabulary, whose JSON takes long to parse."""
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    if tokenizer.decoder is not None:
        bare.decoder = tokenizer.decoder
    return json.loads(bare.to_str())["decoder"]


def byte_rule(decoder: Mapping[str, Any] | None) -> Rule:
    """A tokenizer.json's decoder as a rule per token. Raises TokenizerError if it is not one."""
    steps = list(_flatten(decoder))
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


def _flatten(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _flatten(step)


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
    if not steps or len(rest) != int(strips):
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
