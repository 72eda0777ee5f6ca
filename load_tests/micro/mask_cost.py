"""What it costs a step that its answers must satisfy a grammar.

python -m ropewalk.load_tests.micro.mask_cost [MODEL] [--rounds N] [--threads N]

Engines as they serve decode one token for each of 1, and of 32, requests, a step of each by turns:
one engine has free requests, one has requests held to a JSON schema that never ends, and one, of
32, has half of them held. What a held step takes longer is masks, their application, and telling
the grammar the tokens. Forced tokens, which save whole steps, are left out. The engines change
roles, since no two lie in memory alike.

With one thread its processor time counts, which other programs change least; with more, the clock.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence

import torch

from ropewalk.load_tests.common.rounds import Clock, rounds
from ropewalk.load_tests.micro.engines import loaded
from ropewalk.model.sampling import SamplingParams
from ropewalk.report.statistics import median_of
from ropewalk.server.engine.engine import Engine
from ropewalk.server.scheduling.request import Request
from ropewalk.server.structured.grammar import Grammar, Kind
from ropewalk.server.structured.matcher import Matcher

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["rope", "cord", "twine"]},
            "born": {"type": "string", "format": "date"},
            "size": {"type": "integer", "minimum": 0, "maximum": 5000},
            "parts": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
            "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "required": ["name", "kind", "born", "size", "parts", "next"],
        "additionalProperties": False,
    },
}


KINDS = {"free": 0, "held": 1, "half held": 2}  # of so many requests one is held


class Unforced(Matcher):
    """So that each step computes one token of each request."""

    def advance(self, token: int, most: int) -> list[int]:
        return super().advance(token, 0)


def begin(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, held: Sequence[Matcher | None]
) -> None:
    """Submit a request for each matcher and run their prompts."""
    for i, matcher in enumerate(held):
        rng = random.Random(i)
        request = Request(str(i), list(prompt), len(prompt), params, 0.0, rng, matcher=matcher)
        engine.submit(request)
    for _ in range(20):  # also what begins slowly
        engine.step()


def end(engine: Engine, count: int) -> None:
    for i in range(count):
        engine.abort(str(i))
    engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock: Clock = "processor" if args.threads == 1 else "wall"
    models = [loaded(args.model, kv_memory=2**30) for _ in KINDS]
    served = models[0].served
    assert served.grammars is not None, "an encoder-decoder has no grammars"
    grammar = Grammar(Kind.JSON_SCHEMA, json.dumps(SCHEMA))
    compiled = asyncio.run(served.grammars.compile(grammar))
    prompt = served.tokenizer.encode("A list of things, as JSON:\n", bos=True)
    params = SamplingParams(max_tokens=1500, temperature=args.temperature)

    def matcher() -> Matcher:
        begun = compiled.begin()
        return Unforced(begun._state, begun.mask(), begun._ends)

    for count in (1, 32):
        kinds = [kind for kind, every in KINDS.items() if count >= every]
        taken: list[dict[str, float]] = []
        for first in range(len(kinds)):
            engines = {k: models[(first + i) % len(kinds)].engine for i, k in enumerate(kinds)}
            for kind, engine in engines.items():
                every = KINDS[kind]
                held = [matcher() if every and i % every == 0 else None for i in range(count)]
                begin(engine, prompt, params, held)
            calls = {kind: engine.step for kind, engine in engines.items()}
            taken += rounds(calls, args.rounds // len(kinds), clock, f"{count} {first}")
            for engine in engines.values():
                end(engine, count)
        free = median_of([each["free"] for each in taken]).value
        print(f"batch {count}: a free step {free * 1e3:.2f} ms", end="")
        for kind in sorted(kinds):
            if kind != "free":
                more = median_of([each[kind] / each["free"] - 1 for each in taken])
                cost = median_of([each[kind] - each["free"] for each in taken]).value
                print(
                    f"; {kind} {more.value:+.2%} ({more.low:+.2%} to {more.high:+.2%}), "
                    f"{cost * 1e6:.0f} µs",
                    end="",
                )
        print(flush=True)


if __name__ == "__main__":
    main()
