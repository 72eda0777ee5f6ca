"""Typed reading of GGUF's `tokenizer.ggml.*` metadata; knows no tokenizer library."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from model.tokenizers.base import TokenizerError
from model.tokenizers.spm_proto import PieceType

_PREFIX = "tokenizer.ggml."
_T = TypeVar("_T")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Converters declare the end of a text; tokens that end a turn are recognised by their text.
_TURN_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>"}
)


class TokenizerFields:
    """Every getter raises TokenizerError when the value is invalid, or absent without a default."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    @property
    def architecture(self) -> object:
        """The model's architecture, which decides some rules that no field states."""
        return self._metadata.get("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def data(self, key: str) -> bytes:
        """An array of bytes, signed or not; empty when absent."""
        value = self._metadata.get(_PREFIX + key, b"")
        if isinstance(value, bytes):
            return value
        numbers = self._list(key, value, int, "a list of bytes")
        return bytes(number & 0xFF for number in numbers)

    def texts(self, key: str) -> list[str]:
        return self._list(key, self._metadata.get(_PREFIX + key), str, "a list of texts")

    def tokens(self) -> list[str]:
        tokens = self.texts("tokens")
        if len(set(tokens)) != len(tokens):
            twice = next(token for token in tokens if tokens.count(token) > 1)
            raise TokenizerError(
                f"The GGUF file names the token {twice!r} twice: convert the model again."
            )
        return tokens

    def types(self) -> list[PieceType]:
        """One per token; all normal if the file does not say. Ends of a turn are control tokens."""
        tokens = self.tokens()
        value = self._metadata.get(_PREFIX + "token_type", [PieceType.NORMAL.value] * len(tokens))
        numbers = self._list("token_type", value, int, "a list of token types")
        self._same_length("token_type", numbers)
        try:
            return [
                PieceType.CONTROL if text in _TURN_ENDS else PieceType(number)
                for text, number in zip(tokens, numbers, strict=True)
            ]
        except ValueError:
            raise self._wrong("token_type", "a list of numbers from 1 to 6") from None

    def scores(self) -> list[float]:
        value = self._metadata.get(_PREFIX + "scores")
        scores = self._list("scores", value, float, "a list of numbers")
        self._same_length("scores", scores)
        return scores

    def bos(self) -> int | None:
        return self._id("bos_token_id")

    def eos(self) -> frozenset[int]:
        """Every id that ends a text or a turn: declared, or recognised by the token's text."""
        declared = (self._id(key) for key in _END_KEYS)
        written = (token for token, text in enumerate(self.texts("tokens")) if text in _TURN_ENDS)
        return frozenset(token for token in (*declared, *written) if token is not None)

    def bos_text(self) -> str:
        """As chat templates use it; empty when none is declared."""
        return self._text_of("bos_token_id")

    def eos_text(self) -> str:
        """As chat templates use it; empty when none is declared."""
        return self._text_of("eos_token_id")

    def _text_of(self, key: str) -> str:
        token = self._id(key)
        return "" if token is None else self.texts("tokens")[token]

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.texts("tokens")):
            raise self._wrong(key, "the id of a token")
        return value

    def _same_length(self, key: str, values: Sequence[object]) -> None:
        if len(values) != len(self.texts("tokens")):
            raise self._wrong(key, "as long as the list of tokens")

    def _list(self, key: str, value: object, kind: type[_T], wanted: str) -> list[_T]:
        if not isinstance(value, list | tuple) or not all(isinstance(v, kind) for v in value):
            raise self._wrong(key, wanted)
        return list(value)

    def _wrong(self, key: str, wanted: str) -> TokenizerError:
        state = "is not" if _PREFIX + key in self._metadata else "is missing and should be"
        return TokenizerError(
            f"The GGUF file's {_PREFIX}{key} {state} {wanted}: fetch or convert the file again."
        )
