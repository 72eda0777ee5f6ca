"""What it costs a step that its answers must satisfy a grammar.

python -m ropewalk.load_tests.micro.mask_cost [MODEL] [--rounds N] [--threads N]

An engine as it serves decodes one token for each of 1, and of 32, requests, in steps of two kinds
by turns: free, and held to a JSON schema that never ends. What a step with a grammar takes longer
is masks, their application, and telling the grammar the tokens. For 32 requests also with only half
of them held. Forced tokens, which save whole steps, are left out.

With one thread its processor time counts, which other programs change least; with more, the clock.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence

import torch

from ropewalk.model.sampling import SamplingParams
from ropewalk.report.statistics import median_of
from ropewalk.server.cli.serve import from_program
from ropewalk.server.config import server_config
from ropewalk.server.engine.engine import Engine
from ropewalk.server.launch.build import load_models
from ropewalk.server.metrics.exporter import Metrics
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


class Unforced(Matcher):
    """So that each step computes one token of each request."""

    def advance(self, token: int, most: int) -> list[int]:
        return super().advance(token, 0)


def seconds(engine: Engine, requests: Sequence[Request], held: Sequence[Matcher | None]) -> float:
    """Of one step in which the requests have these matchers."""
    for request, matcher in zip(requests, held, strict=True):
        request.matcher = matcher
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    engine.step()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    config = server_config(from_program({"models": [args.model]}))
    torch.set_num_threads(args.threads)
    (loaded,) = load_models(config, Metrics())
    assert loaded.served.grammars is not None, "an encoder-decoder has no grammars"
    grammar = Grammar(Kind.JSON_SCHEMA, json.dumps(SCHEMA))
    compiled = asyncio.run(loaded.served.grammars.compile(grammar))
    prompt = loaded.served.tokenizer.encode("A list of things, as JSON:\n", bos=True)
    params = SamplingParams(max_tokens=1500, temperature=args.temperature)
    for count in (1, 32):
        requests = [
            Request(str(i), list(prompt), len(prompt), params, 0.0, random.Random(i))
            for i in range(count)
        ]
        begun = [compiled.begin() for _ in requests]
        held = [Unforced(each._state, each._mask, each._ends) for each in begun]
        kinds = {"free": [None] * count, "held": held}
        if count > 1:
            kinds["half held"] = [each if i % 2 else None for i, each in enumerate(held)]
        for request in requests:
            loaded.engine.submit(request)
        for _ in range(20):  # prompts, and what begins slowly
            seconds(loaded.engine, requests, kinds["free"])
        taken: list[dict[str, float]] = []
        names = list(kinds)
        for number in range(args.rounds):
            random.Random(number).shuffle(names)
            taken.append({n: seconds(loaded.engine, requests, kinds[n]) for n in names})
        free = median_of([each["free"] for each in taken]).value
        print(f"batch {count}: a free step {free * 1e3:.2f} ms", end="")
        for name in kinds:
            if name != "free":
                more = median_of([each[name] / each["free"] - 1 for each in taken])
                cost = median_of([each[name] - each["free"] for each in taken]).value
                print(
                    f"; {name} {more.value:+.2%} ({more.low:+.2%} to {more.high:+.2%}), "
                    f"{cost * 1e6:.0f} µs",
                    end="",
                )
        print(flush=True)
        for request in requests:
            loaded.engine.abort(request.id)


if __name__ == "__main__":
    main()
