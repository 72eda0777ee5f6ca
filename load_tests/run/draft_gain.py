"""What guessing an answer's tokens ahead (--draft-tokens) gains.

python -m ropewalk.load_tests.run.draft_gain [MODEL] [--rounds N] [--tokens N] [--at-once N,N]

The model is loaded twice, as `ropewalk serve` would: with guesses, and with none. In each round
both answer the same eight chats of a kind, some at once, first the one and then the other. Prompts
have been computed before. Answers are greedy and must be the same. Kinds: a story has nothing to
repeat but itself; a summary quotes; an edit repeats nearly all of a text, which may be told as the
request's `prediction` besides.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from ropewalk.report.table import markdown
from ropewalk.server.library import Model, load

Chat = Mapping[str, Any]

THINGS = (
    "a rope",
    "a sea captain",
    "the moon",
    "a lost dog",
    "a baker",
    "a train",
    "a clock",
    "snow",
)
TEXT = (
    "A ropewalk is a long straight building in which rope is made. Yarn is spun from hemp, and the "
    "spinner walks backwards from the wheel while it turns. Strands of many yarns are stretched "
    "over the whole length of the walk, hung on posts, and twisted from both ends. Three strands "
    "are laid together into a rope, which is shorter than they were by a third. The longest walks "
    "were over a quarter of a mile, because a ship's cable may not be spliced. Tar keeps water "
    "out, and makes the rope weaker. A yarn that breaks is mended at once. When steam came, the "
    "walkers were replaced by a carriage on rails, which does not tire, and the long buildings "
    "by machines that need the room of a barn. Some walks still stand, and rope is made in them."
)


def story(thing: str) -> Chat:
    return {"prompt": _asked(f"Tell me a story about {thing}.")}


def summary(thing: str) -> Chat:
    asked = f"Summarise this text for somebody who likes {thing}, quoting it where you can:\n\n"
    return {"prompt": _asked(asked + TEXT)}


def edit(thing: str) -> Chat:
    return {"prompt": _asked(f"Write this text again, with {thing} in place of hemp:\n\n{TEXT}")}


def predicted(thing: str) -> Chat:
    expected = {"type": "content", "content": TEXT.replace("hemp", thing)}
    return {**edit(thing), "prediction": expected}


KINDS: Mapping[str, Callable[[str], Chat]] = {
    "story": story,
    "summary": summary,
    "edit": edit,
    "edit, predicted": predicted,
}


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answered(
    model: Model, chats: Sequence[Chat], tokens: int, at_once: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds that all answers took, and their tokens."""

    def generate(chat: Chat, most: int = tokens) -> tuple[int, ...]:
        return model.generate(max_tokens=most, temperature=0, ignore_eos=True, **chat).tokens

    for chat in chats:
        generate(chat, 1)
    with ThreadPoolExecutor(at_once) as threads:
        began = time.perf_counter()
        found = list(threads.map(generate, chats))
        return time.perf_counter() - began, found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--at-once", default="1,4,8", help="requests, with commas")
    args = parser.parse_args(argv)
    rows = []
    with (
        load(args.model, kv_memory="1GiB") as guessing,
        load(args.model, kv_memory="1GiB", draft_tokens=0) as plain,
    ):
        for name, make in KINDS.items():
            chats = [make(thing) for thing in THINGS]
            for at_once in map(int, args.at_once.split(",")):
                seconds: list[tuple[float, float]] = []
                for number in range(args.rounds):
                    pair = (guessing, plain) if number % 2 else (plain, guessing)
                    taken = {id(each): answered(each, chats, args.tokens, at_once) for each in pair}
                    (own, answers), (others, same) = taken[id(guessing)], taken[id(plain)]
                    assert answers == same, "an answer depends on guesses"
                    seconds.append((own, others))
                ratios = [others / own for own, others in seconds]
                count = len(chats) * args.tokens
                rows.append(
                    (
                        name,
                        str(at_once),
                        f"{count / median(others for _, others in seconds):.0f}",
                        f"{count / median(own for own, _ in seconds):.0f}",
                        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    )
                )
                print(" ".join(rows[-1]), flush=True)
    head = ("answers", "at once", "tokens/s", "with guesses", "times as many")
    print(f"\n{markdown([head, *rows], 1)}")


if __name__ == "__main__":
    main()
