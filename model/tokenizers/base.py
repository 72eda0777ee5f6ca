"""What a tokenizer must say, and the incremental way back from tokens to text."""

from typing import Protocol


class Tokenizer(Protocol):
    vocab_size: int  # ids are 0 .. vocab_size - 1
    bos: int | None  # prepended by encode(bos=True), when the model was trained with one
    eos: frozenset[int]  # ids that end a text

    def encode(self, text: str, *, bos: bool) -> list[int]: ...
    def token_bytes(self, token: int, *, first: bool) -> bytes: ...
