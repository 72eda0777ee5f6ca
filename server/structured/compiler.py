"""Compiles grammars beside the event loop and the engine, and keeps those that it has compiled.

Each is first tried in a process of its own, which is stopped where that takes too long.
"""

import asyncio
import json
import os
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropewalk.model.confined.process import Confined, Stopped
from ropewalk.model.tokenizers.base import Tokenizer
from ropewalk.server.errors import InvalidField, QueueFull
from ropewalk.server.structured.grammar import MAX_TEXT, Grammar
from ropewalk.server.structured.matcher import LIMITS, Matcher, any_but, mask_of
from ropewalk.server.structured.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEPT = 64  # compiled grammars of a model
KEPT_TEXT = 1 << 20  # characters of these; compiled, each takes some 60 bytes
MEMORY = 512 << 20  # bytes, besides what the process had before
SECONDS = 0.3  # of the processor, to try a grammar; usual ones take milliseconds
START_SECONDS = 10.0  # of the processor, until a process knows the vocabulary
WAIT = 30.0  # by the clock, on a machine that is out of breath
WAIT_FOR_OTHERS = 5.0  # until a grammar must be compiled
NICE = 5  # so that a step of the engine has the processor first
MAX_REASON = 200  # characters
# Of Lark: the place, what is wrong there, and lines around it.
_AT_LINE = re.compile(
    r"at (?P<line>\d+)\(\d+\): (failed to compile JSON schema: )?(?P<reason>.*?)( \d+ \| .*)?$"
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that answers can follow. May be shared by threads."""

    _pristine: "LLMatcher"
    _mask: bytes  # of the first token
    _ends: frozenset[int]

    def begin(self) -> Matcher:
        """For one answer."""
        return Matcher(self._pristine.deep_copy(), self._mask, self._ends)


class Grammars:
    """Of one model. Its thread and its process begin with the first grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        """vocab_size: ids that the model can pick. ends: those that end an answer.

        Takes the library some tenths of a second, in which it keeps the interpreter to itself: so
        make one before anything is served.
        """
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        vocabulary = vocabulary_of(tokenizer, vocab_size, ends)
        self._library = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.ends)
        self._limits = LLParserLimits(**LIMITS)
        self._ends = frozenset(vocabulary.ends)
        self._vocabulary = vocabulary.written()
        self._thread = ThreadPoolExecutor(1, "grammars", initializer=os.nice, initargs=(NICE,))
        self._process: Confined | None = None
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()  # the last used one last

    async def compile(self, grammar: Grammar) -> Compiled:
        """Raises InvalidField, with the library's reason; QueueFull where others take long."""
        if len(grammar.text) > MAX_TEXT:
            raise _refused(grammar, f"it has more than {MAX_TEXT} characters")
        if (compiled := self._kept.get(grammar)) is not None:
            self._kept.move_to_end(grammar)
            return compiled
        work = self._thread.submit(self._compiled, grammar)
        try:
            compiled = await asyncio.wait_for(asyncio.wrap_future(work), WAIT_FOR_OTHERS)
        except TimeoutError:
            raise QueueFull(
                "other requests' grammars keep the server busy; send this one again later"
            ) from None
        self._kept[grammar] = compiled
        while len(self._kept) > KEPT or sum(len(each.text) for each in self._kept) > KEPT_TEXT:
            self._kept.popitem(last=False)
        return compiled

    def _compiled(self, grammar: Grammar) -> Compiled:
        if (known := self._kept.get(grammar)) is not None:  # since it has waited here
            return known
        text = self._tried(grammar)
        from llguidance import LLMatcher

        matcher = LLMatcher(self._library, text, limits=self._limits, log_level=0)
        mask = mask_of(matcher)
        if mask is None:
            raise _refused(grammar, "no token of this model begins such an answer")
        if not any_but(mask, self._ends):
            raise _refused(grammar, "only an empty answer would satisfy it")
        return Compiled(matcher, mask, self._ends)

    def _tried(self, grammar: Grammar) -> str:
        """The grammar as the library reads it, which it can do without harm."""
        work = {"kind": grammar.kind, "text": grammar.text, "whitespace": grammar.whitespace}
        try:
            process = self._living()
            process.tell(json.dumps(work).encode(), seconds=SECONDS, wait=WAIT)
            reply = json.loads(process.hear(wait=WAIT))
        except Stopped as error:
            self._thread.submit(self._living)  # for the next one, while nobody waits
            raise _refused(grammar, str(error)) from None
        if "error" in reply:
            raise _refused(grammar, reply["error"])
        return str(reply["grammar"])

    def _living(self) -> Confined:
        """A process that knows the vocabulary. Raises Stopped."""
        if self._process is None or self._process.ended:
            self._process = Confined("ropewalk.server.structured.process", ["llguidance"], MEMORY)
            self._process.tell(self._vocabulary, seconds=START_SECONDS, wait=WAIT)
            self._process.hear(wait=WAIT)
        return self._process


def _refused(grammar: Grammar, reason: str) -> InvalidField:
    reason = " ".join(reason.split())
    if found := _AT_LINE.match(reason):
        place = grammar.places.get(int(found["line"]), f"line {found['line']}")
        reason = f"{found['reason']} (in {place})"
    reason = reason[:MAX_REASON]
    return InvalidField(
        f"{grammar.param} cannot be followed: {reason}; simplify it or leave it out",
        grammar.param,
        quotes=True,
    )
