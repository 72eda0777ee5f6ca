"""Seeded prompts with an exact token count, all different. Knows no tokenizer.

With token ids the count is exact by construction. In text each word is one token in the common
byte-level vocabularies; the server's own count (`usage.prompt_tokens`) is compared afterwards.
"""

import random
from collections.abc import Sequence
from typing import Literal

Form = Literal["ids", "text"]
Prompt = str | tuple[int, ...]

_ATTEMPTS = 100

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "reason research girl moment air teacher force education foot boy age policy music market "
    "sense death north south east west field summer winter spring river forest window table chair "
    "paper letter picture color light stone metal glass wood fire earth wind rain snow cloud sun "
    "moon star bird dog cat horse fish tree flower grass bread milk sugar salt meat fruit apple "
    "road street bridge train plane ship boat engine wheel machine computer phone radio camera "
    "signal map plan price cost bank trade farm mill factory tool coat hat ring gold iron coal "
    "oil gas"
)
WORDS = _TEXT.split()


class PromptMaker:
    """Makes prompts that differ from all it made before; the same seed makes the same ones."""

    def __init__(self, seed: str, form: Form, vocab_size: int = 32_000) -> None:
        self.random = random.Random(seed)  # for a workload's own random choices
        self._form = form
        # Special tokens are at the ends of a vocabulary.
        self._ids = range(vocab_size // 10, vocab_size - vocab_size // 10)
        self._made: set[Prompt] = set()

    def prompt(self, tokens: int, prefix: Sequence[str | int] = ()) -> Prompt:
        """A prompt of `tokens` pieces: `prefix`, then new ones.

        Raises ValueError when no unused prompt of that length is found.
        """
        for _ in range(_ATTEMPTS):
            prompt = self._join([*prefix, *self.pieces(tokens - len(prefix))])
            if prompt not in self._made:
                self._made.add(prompt)
                return prompt
        raise ValueError(
            f"no more distinct prompts of {tokens} tokens: ask for longer ones or fewer"
        )

    def pieces(self, count: int) -> Sequence[str | int]:
        """`count` random words or token ids, for instance a prefix to share."""
        if self._form == "text":
            return self.random.choices(WORDS, k=count)
        return self.random.choices(self._ids, k=count)

    def _join(self, pieces: Sequence[str | int]) -> Prompt:
        if self._form == "text":
            return " ".join(str(piece) for piece in pieces)
        return tuple(int(piece) for piece in pieces)


def pieces_of(prompt: Prompt) -> Sequence[str | int]:
    """The words or token ids it was made of: a prefix for the prompt that continues it."""
    return prompt.split(" ") if isinstance(prompt, str) else prompt
