"""SentencePiece models (tokenizer.model, or one rebuilt from GGUF) as a Tokenizer.

The only file that reads such models. Ids beyond the model's own pieces can be added, as Hugging
Face directories do for chat markers.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from ropewalk.model.tokenizers.base import (
    MAX_GROWTH,
    AddedToken,
    TokenizerError,
    TokenTable,
    refuse_ids,
    require_unicode,
)
from ropewalk.model.tokenizers.spm_proto import longest_replacement, read_settings, without_prefix
from ropewalk.model.tokenizers.trial import try_file

_SPACE = "▁"
_SPACES = re.compile(r"\s+")
_WORD = re.compile(r"\w")


class SpmModel:
    """A model file accepted by the library, whose tokens have bytes of their own."""

    def __init__(self, data: bytes) -> None:
        """Raises TokenizerError."""
        self.processor = _processor(data)
        self.size: int = self.processor.get_piece_size()
        if self.size == 0:
            raise TokenizerError("The SentencePiece model is empty: fetch it again.")
        try:
            self.settings = read_settings(self.processor.serialized_model_proto())
        except (ValueError, IndexError) as error:
            raise TokenizerError(
                f"The SentencePiece model has fields that cannot be read ({error}): fetch it again."
            ) from None
        if self.settings.denormalizes:
            raise TokenizerError(
                "The SentencePiece model rewrites text after decoding, so its tokens have no bytes "
                "of their own: use one trained without denormalisation rules."
            )

    def processor_without_prefix(self) -> sentencepiece.SentencePieceProcessor:
        """Encodes text that continues another: adds no space before it."""
        if not self.settings.add_dummy_prefix:
            return self.processor
        return _processor(without_prefix(self.processor.serialized_model_proto()))

    def find(self, piece: str) -> int | None:
        """The id of exactly this piece, or None."""
        token: int = self.processor.piece_to_id(piece)
        return token if self.processor.id_to_piece(token) == piece else None

    def piece_bytes(self, token: int) -> tuple[bytes, bytes]:
        """One token's usual bytes, and its bytes where it is the first with any."""
        piece: str = self.processor.id_to_piece(token)
        if self.processor.is_control(token):
            return b"", b""
        if self.processor.is_unknown(token):
            unknown = self.settings.unknown.encode()
            return unknown, unknown
        if self.processor.is_byte(token):
            # The library refuses models with byte pieces that name no byte.
            data = bytes.fromhex(piece[3:5])
            return data, data
        text = piece.replace(_SPACE, " ").encode()
        drops = self.settings.add_dummy_prefix or self.settings.remove_extra_whitespaces
        return text, text[1:] if drops and piece.startswith(_SPACE) else text


def read_model(data: bytes) -> SpmModel:
    """A model that came with a checkpoint. Raises TokenizerError."""
    try_file(
        "The SentencePiece model", "sentencepiece", "ropewalk.model.tokenizers.spm_process", data
    )
    model = SpmModel(data)
    if (growth := longest_replacement(model.settings.charsmap)) > MAX_GROWTH:
        raise TokenizerError(
            f"The SentencePiece model replaces a text by {growth} bytes, more than the "
            f"{MAX_GROWTH} allowed: use one with other normalisation rules."
        )
    return model


class SpmTokenizer:
    """A SentencePiece model; decoding is one byte string per token.

    Decoding follows the library, which drops the space at the start of a text when the model adds
    or removes spaces there. (For models that remove extra whitespace the library would drop
    several, but their own encoding never starts with two.) Invalid bytes become U+FFFD, as in
    Python.

    Added tokens cut a text into parts. With `prefix_each_part`, each of them is a text to the
    library, which puts the model's space before it; without, only the start of the whole text gets
    that space, unless it begins with one.
    """

    def __init__(
        self,
        model: SpmModel,
        *,
        bos: int | None = None,
        eos: Iterable[int] = (),
        add_bos: bool = True,
        ends: Sequence[int] = (),
        added: Iterable[AddedToken] = (),
        prefix_each_part: bool = True,
    ) -> None:
        """bos and eos default to the model's own. Without `added`, "</s>" in a text is text."""
        self._starting = model.processor
        self._continuing = None if prefix_each_part else model.processor_without_prefix()
        self._removes_spaces = model.settings.remove_extra_whitespaces
        tokens = {token.id: token for token in added}
        self._table = TokenTable(_entries(model, tokens))
        self.vocab_size = len(self._table)
        own: int = model.processor.bos_id()
        self.bos: int | None = bos if bos is not None else own if own >= 0 else None
        known = frozenset(eos) or frozenset({model.processor.eos_id()})
        self.eos: frozenset[int] = known - {-1}
        self.ends: Sequence[int] = ends
        self._start = [self.bos] if add_bos and self.bos is not None else []
        self._names = {token.id: token.text for token in tokens.values()}
        self._added = {token.text: token for token in tokens.values()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str, *, bos: bool) -> list[int]:
        require_unicode(text)
        tokens = list(self._start) if bos else []
        at = 0
        for start, stop, token in self._find_added(text):
            tokens += [*self._encode_part(text, at, start), token.id]
            at = stop
        return tokens + self._encode_part(text, at, len(text))

    def _encode_part(self, text: str, start: int, stop: int) -> list[int]:
        if not (part := text[start:stop]):
            return []
        ids: list[int] = self._processor_for(part, start == 0).encode(part)
        return ids

    def _find_added(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        """Where added tokens are in a text, with the white space that belongs to them.

        As the `tokenizers` library finds them: the first, and of several there the longest; if
        that must be a word and is not, none of them.
        """
        at = 0
        for match in self._pattern.finditer(text):
            token = self._added[match[0]]
            start, stop = match.span()
            within = _WORD.match(text[start - 1 : start]) or _WORD.match(text, stop)
            if token.single_word and within:
                continue
            if token.lstrip:
                start = at + len(text[at:start].rstrip())
            if token.rstrip and (spaces := _SPACES.match(text, stop)):
                stop = spaces.end()
            yield start, stop, token
            at = stop

    def _processor_for(self, part: str, starts: bool) -> sentencepiece.SentencePieceProcessor:
        if self._continuing is None:
            return self._starting
        if part.startswith((" ", _SPACE)):
            # A model that removes spaces keeps this one only where it adds one.
            return self._starting if self._removes_spaces else self._continuing
        return self._starting if starts else self._continuing

    def token_bytes(self, token: int, *, first: bool) -> bytes:
        return self._table.get(token, first=first)

    def name(self, token: int) -> str:
        if token in self._names:
            return self._names[token]
        known = token < self._starting.get_piece_size()
        return str(self._starting.id_to_piece(token)) if known else ""


def _processor(data: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"The SentencePiece model cannot be read ({reason}): fetch it again."
        ) from None


def _entries(model: SpmModel, added: dict[int, AddedToken]) -> Iterator[tuple[bytes, bytes]]:
    size = max(model.size, max(added, default=-1) + 1)
    refuse_ids(size - 1)
    for token in range(size):
        if token in added:
            text = b"" if added[token].special else added[token].text.encode()
            yield text, text
        elif token < model.size:
            yield model.piece_bytes(token)
        else:
            yield b"", b""  # a gap between the model's pieces and an added id
