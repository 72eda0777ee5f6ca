"""Grammars for tests: what follows them at random, and schemas drawn from all that JSON has."""

import asyncio
import random
import string

from ropewalk.model.sampling import SamplingParams, allows
from ropewalk.model.tokenizers.base import Detokenizer
from ropewalk.server.structured.compiler import Grammars

FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "hostname")
PATTERNS = (r"^[a-z]{2,6}$", r"^\d{3}-\d{4}$", r"^(red|green|blue)\d?$", r"^[A-Z][a-z]{1,5}$")


class Letters:
    """The tokens of the tiny decoders: printable ASCII, and one that ends a text."""

    vocab_size = 61
    bos = None
    eos = frozenset({60})
    text = string.ascii_lowercase + string.digits + '{}[]",:.- _ABCDEFGHIJK+L'

    def encode(self, text, *, bos):
        return [self.text.index(letter) for letter in text]

    def token_bytes(self, token, *, first):
        return b"" if token in self.eos else self.text[token].encode()

    def name(self, token):
        return "<end>" if token in self.eos else ""


def grammars_of(tokenizer, ends=None):
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos if ends is None else ends)


def compiled(grammars, grammar):
    return asyncio.run(grammars.compile(grammar))


def tokens_in(mask):
    bits = int.from_bytes(mask, "little")
    return [token for token in range(bits.bit_length()) if bits >> token & 1]


def random_answer(grammar, tokenizer, rng, *, most=400, force=0):
    """A text that the grammar allows, one allowed token after the other; None: not done in time."""
    matcher, text = grammar.begin(), Detokenizer(tokenizer)
    params = SamplingParams(most, stop_ids=frozenset(tokenizer.eos))
    pieces = []
    for place in range(most):
        allowed = matcher.allowed(params, place)
        some = [*tokenizer.eos, *rng.sample(range(tokenizer.vocab_size), 20)]
        quick = [allowed.includes(each) for each in some]  # before the others are found
        mask = allowed.bits()
        assert quick == [allows(mask, each) for each in some]
        token = rng.choice(tokens_in(mask))
        forced = matcher.advance(token, force)
        pieces += [text.push(each) for each in (token, *forced)]
        if matcher.finished:
            return "".join(pieces) + text.finish()
    return None


def follows(grammar, tokenizer, text):
    """Whether an answer may begin with the text."""
    matcher = grammar.begin()
    for place, token in enumerate(tokenizer.encode(text, bos=False)):
        if not matcher.allowed(SamplingParams(len(text)), place).includes(token):
            return False
        matcher.advance(token, 0)
    return True


class Drawing:
    """Schemas at random: nesting, enums, patterns, formats, references, anyOf, allOf, bounds."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self._defs = {}

    def schema(self):
        found = self._object(3)
        if self._defs:
            found["$defs"] = self._defs
        return found

    def _any(self, depth):
        simple = (self._text, self._integer, self._number, self._listed, self._plain)
        deep = (self._object, self._array, self._union, self._reference, self._joined)
        return self._rng.choice(simple + deep if depth else simple)(depth - 1)

    def _word(self):
        return "".join(self._rng.choices(string.ascii_lowercase + "_", k=self._rng.randint(1, 8)))

    def _object(self, depth):
        names = list(dict.fromkeys(self._word() for _ in range(self._rng.randint(1, 4))))
        found = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        found["required"] = [name for name in names if self._rng.random() < 0.8]
        found["additionalProperties"] = False
        return found

    def _array(self, depth):
        least = self._rng.randint(0, 2)
        bounds = {"minItems": least, "maxItems": least + self._rng.randint(0, 2)}
        if self._rng.random() < 0.2:
            parts = [self._any(depth) for _ in range(2)]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
        return {"type": "array", "items": self._any(depth), **bounds}

    def _union(self, depth):
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randint(2, 3))]}

    def _joined(self, depth):
        return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": self._rng.randint(3, 99)}]}

    def _reference(self, depth):
        name = f"d{len(self._defs)}"
        self._defs[name] = True  # its place is taken
        self._defs[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _text(self, depth):
        least = self._rng.randint(0, 3)
        return self._rng.choice(
            [
                {"type": "string", "minLength": least, "maxLength": least + 6},
                {"type": "string", "pattern": self._rng.choice(PATTERNS)},
                {"type": "string", "format": self._rng.choice(FORMATS)},
            ]
        )

    def _integer(self, depth):
        least = self._rng.randint(-50, 50)
        return self._rng.choice(
            [
                {"type": "integer", "minimum": least, "maximum": least + self._rng.randint(0, 200)},
                {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 9},
                {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": 5},
            ]
        )

    def _number(self, depth):
        return {"type": "number", "minimum": 0, "maximum": self._rng.randint(1, 99)}

    def _listed(self, depth):
        values = [self._word(), self._rng.randint(0, 9), None, True, 'naïve "quoted" \\ text']
        count = self._rng.randint(1, 4)
        return {"enum": values[:count]} if count > 1 else {"const": values[0]}

    def _plain(self, depth):
        return {"type": self._rng.choice(["boolean", "null", ["boolean", "null"]])}
