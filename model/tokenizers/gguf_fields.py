"""Typed reading of GGUF's `tokenizer.ggml.*` metadata; knows no tokenizer library."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from ropewalk.model.tokenizers.base import TokenizerError, refuse_ids
from ropewalk.model.tokenizers.spm_proto import PieceType

_PREFIX = "tokenizer.ggml."
_T = TypeVar("_T")
_TYPES = {kind.value: kind for kind in PieceType}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Converters declare one end or two, and models have more: as llama.cpp does (llama-vocab.cpp),
# tokens that end an answer are recognised by their text, and are control tokens.
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<｜end▁of▁sentence｜>",
    }
)
# Of code models: ends only where the file declares no token for that purpose.
_CODE_ENDS = {
    "fim_pad_token_id": frozenset({"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}),
    "fim_rep_token_id": frozenset(
        {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}
    ),
    "fim_sep_token_id": frozenset({"<|file_sep|>"}),
}
# Ends that are none beside all the others of their line: there, <|end|> closes only a part of the
# answer (gpt-oss, Solar Open), and </s> is a tag of HTML (Gemma 4).
_PART_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|return|>", "<|calls|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
# Their names in chat templates, and GGUF's for their ids.
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


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

    @cached_property
    def tokens(self) -> list[str]:
        """Read once: there may be 200,000."""
        tokens = self.texts("tokens")
        refuse_ids(len(tokens) - 1)
        if len(set(tokens)) != len(tokens):
            (twice, _), *_ = Counter(tokens).most_common(1)
            raise TokenizerError(
                f"The GGUF file names the token {twice!r} twice: convert the model again."
            )
        return tokens

    def types(self) -> list[PieceType]:
        """One per token; all normal if the file does not say. Ends are control tokens."""
        tokens = self.tokens
        value = self._metadata.get(_PREFIX + "token_type", [PieceType.NORMAL.value] * len(tokens))
        numbers = self._list("token_type", value, int, "a list of token types")
        self._same_length("token_type", numbers)
        ends = self._ends(tokens)
        try:
            return [
                PieceType.CONTROL if text in ends else _TYPES[number]
                for text, number in zip(tokens, numbers, strict=True)
            ]
        except KeyError:
            raise self._wrong("token_type", "a list of numbers from 1 to 6") from None

    def scores(self) -> list[float]:
        value = self._metadata.get(_PREFIX + "scores")
        scores = self._list("scores", value, float, "a list of numbers")
        self._same_length("scores", scores)
        return scores

    def bos(self) -> int | None:
        return self._id("bos_token_id")

    def ends(self) -> tuple[int, ...]:
        """What follows a text that is embedded."""
        end = self._id("eos_token_id") if self.flag("add_eos_token", False) else None
        return () if end is None else (end,)

    def eos(self) -> frozenset[int]:
        """Every id that ends an answer: declared, or recognised by the token's text."""
        tokens = self.tokens
        ends = self._ends(tokens)
        declared = {self._id(key) for key in _END_KEYS} | {self._valid_id(k) for k in _CODE_ENDS}
        written = {token for token, text in enumerate(tokens) if text in ends}
        of_parts = _ENDS - ends  # even if they are declared
        return frozenset(
            token
            for token in declared | written
            if token is not None and tokens[token] not in of_parts
        )

    def special_tokens(self) -> dict[str, str]:
        """Texts of the declared tokens, by the names that chat templates use."""
        ids = {name: self._valid_id(key) for name, key in _SPECIAL_TOKENS.items()}
        tokens = self.tokens
        return {name: tokens[token] for name, token in ids.items() if token is not None}

    def _ends(self, tokens: Sequence[str]) -> frozenset[str]:
        """Every text by which a token of such a vocabulary ends an answer."""
        of_code = (names for key, names in _CODE_ENDS.items() if self._valid_id(key) is None)
        vocabulary = frozenset(tokens)
        of_parts = {text for text, beside in _PART_ENDS if beside <= vocabulary}
        return _ENDS.union(*of_code) - of_parts

    def _valid_id(self, key: str) -> int | None:
        """None for an id without a token too: such files are common, and these ids seldom used."""
        value = self._metadata.get(_PREFIX + key)
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            return None
        return value

    def _id(self, key: str) -> int | None:
        found = self._valid_id(key)
        if found is None and self._metadata.get(_PREFIX + key) is not None:
            raise self._wrong(key, "the id of a token")
        return found

    def _same_length(self, key: str, values: Sequence[object]) -> None:
        if len(values) != len(self.tokens):
            raise self._wrong(key, "as long as the list of tokens")

    def _list(self, key: str, value: object, kind: type[_T], wanted: str) -> list[_T]:
        if not isinstance(value, list | tuple) or not all(
            issubclass(found, kind) for found in set(map(type, value))
        ):
            raise self._wrong(key, wanted)
        return list(value)

    def _wrong(self, key: str, wanted: str) -> TokenizerError:
        state = "is not" if _PREFIX + key in self._metadata else "is missing and should be"
        return TokenizerError(
            f"The GGUF file's {_PREFIX}{key} {state} {wanted}: fetch or convert the file again."
        )
