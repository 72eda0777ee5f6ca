"""Draws a model's cache while it answers, and what positions add to the scores of one token.

    python docs/examples/cache_and_positions.py [URL] [--model NAME] [--prompt TEXT] [--out FILE]

What the explorer's panels "Cache" and "Position" show, in one picture, from the same public routes
(docs/http.md). Needs only matplotlib, and a server: ropewalk serve family, for example.
"""

import argparse
import json
import math
import threading
import time
import urllib.request
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

History = list[tuple[float, str]]  # of the pool: when, and a letter for each block

# Letters of the stream's `pool`, with shades that survive a printer without colours.
STATES = {
    "f": ("free", "#ffffff"),
    "c": ("cached", "#c9d6e3"),
    "h": ("held by one", "#4f8fc0"),
    "s": ("shared", "#14324f"),
    "q": ("quarantined", "#b03a2e"),
}


def ask(url: str, path: str, body: object = None) -> Any:
    """An answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
        return json.load(answer)


class Mirror(threading.Thread):
    """Applies the changes of /v1/cache/stream, and remembers the pool after each."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        self.stream = urllib.request.urlopen(f"{url}/v1/cache/stream?model={model}")
        self.pool = ""
        self.requests: dict[str, dict[str, Any]] = {}
        self.history: History = []
        self.ready = threading.Event()

    def run(self) -> None:
        for line in self.stream:
            if line.startswith(b"data: "):
                self.take(json.loads(line[6:]))
                self.ready.set()

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == "snapshot":
            self.pool = event["pool"]
            self.requests = {each["id"]: each for each in event["entry"]["requests"]}
        for first, letters in event.get("pool", ()) if event["type"] == "delta" else ():
            self.pool = self.pool[:first] + letters + self.pool[first + len(letters) :]
        for name, change in event.get("sequences", {}).items():
            if change is None:
                self.requests.pop(name, None)
            elif change["kind"] == "request":
                self.requests.setdefault(name, {}).update(change)
        self.history.append((event["at"], self.pool))


def watch(url: str, model: str, prompt: str) -> History:
    """Two prompts with the same beginning are answered, one a little after the other."""
    mirror = Mirror(url, model)
    mirror.start()
    mirror.ready.wait(30)
    asked = []
    for more in (" First,", " Then,"):
        body = {"model": model, "prompt": prompt * 4 + more, "max_tokens": 96, "ignore_eos": True}
        asked.append(threading.Thread(target=ask, args=(url, "/v1/completions", body)))
        asked[-1].start()
        time.sleep(0.3)
    for each in asked:
        each.join()
    time.sleep(1.5)
    return mirror.history


def draw_cache(axes: Axes, history: History) -> None:
    """Blocks that were used from bottom to top, time from left to right."""
    used = [
        block
        for block in range(1, len(history[0][1]))
        if any(pool[block] != "f" for _, pool in history)
    ]
    letters, began = "".join(STATES), history[0][0]
    times = [at - began for at, _ in history]
    times.append(times[-1] + 0.3)
    rows = [[letters.index(pool[block]) for _, pool in history] for block in used]
    colours = [colour for _, colour in STATES.values()]
    norm = BoundaryNorm([index - 0.5 for index in range(len(letters) + 1)], len(letters))
    edges = range(len(used) + 1)
    axes.pcolormesh(times, edges, rows, cmap=ListedColormap(colours), norm=norm)
    axes.set(xlabel="seconds", ylabel="blocks that were used", title="The cache's blocks")
    axes.legend(
        handles=[Patch(fc=fc, ec="#888888", label=label) for label, fc in STATES.values()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.18),
        ncols=len(STATES),
        frameon=False,
        fontsize=8,
    )


def draw_scores(axes: Axes, found: dict[str, Any], head: int) -> None:
    """What a token's score with each other is made of."""
    shown = found["heads"][head]
    texts = [each["text"] or "·" for each in found["tokens"]]
    places = range(len(texts))
    if found["split"]["possible"]:
        axes.bar(places, shown["content"], 0.4, label="content", color="#4f8fc0")
        moved = [place + 0.4 for place in places]
        axes.bar(moved, shown["position"], 0.4, label="position", color="#d98c3f", hatch="//")
    axes.plot(places, shown["scores"], "o", color="#1b1d21", ms=4, label="score: their sum")
    axes.axhline(0, color="#888888", lw=0.6)
    axes.set_xticks(list(places), texts, rotation=90, fontsize=8)
    title = f"{found['encoding']}, layer {found['layer']}, head {head}: the last token and each"
    axes.set(title=title, ylabel="score")
    axes.legend(frameon=False, fontsize=8)


def draw_position(axes: Axes, found: dict[str, Any], head_shown: int) -> None:
    """Biases by distance; or of a rotation, the score of two tokens as they are moved apart; or of
    vectors that are added to embeddings, whose vector adds what."""
    heads = range(len(found["heads"]))
    styles = ["-", "--", ":", "-."]
    if found["bias"]:
        for head in heads:
            style = styles[head % len(styles)]
            axes.plot(found["bias"]["distances"], found["bias"]["heads"][head], style, label=head)
        axes.set(title="The bias by distance", xlabel="distance", ylabel="added to the score")
    elif found["pairs"]:
        distances = range(512)
        for head in list(heads)[: len(styles)]:
            pairs = [(each["frequency"], each["heads"][head]) for each in found["pairs"]]
            moved = [
                found["still"][head]
                + sum(
                    of["magnitude"] * math.cos(distance * frequency + of["phase"])
                    for frequency, of in pairs
                )
                for distance in distances
            ]
            axes.plot(distances, moved, styles[head % len(styles)], lw=1, label=head)
            at = found["query"] - found["key"]
            axes.plot([at], [found["heads"][head]["scores"][found["key"]]], "o", color="#1b1d21")
        title = f"The last token and number {found['key']}, were they so far apart"
        axes.set(title=title, xlabel="distance", ylabel="score")
    elif found["heads"][head_shown]["terms"]:
        for index, (whose, row) in enumerate(found["heads"][head_shown]["terms"].items()):
            places = [place + 0.25 * (index - 1) for place in range(len(row))]
            axes.bar(places, row, 0.25, label=whose, hatch=("", "//", "..")[index], ec="#ffffff")
        axes.set(title="What positions add, by whose it is", xlabel="token", ylabel="of the score")
    else:
        axes.axis("off")
        reason = found["split"]["reason"] or "Attention in this layer knows no positions."
        axes.text(0, 0.5, reason, wrap=True, va="center")
        return
    title = "whose position" if found["heads"][head_shown]["terms"] else "head"
    axes.legend(title=title, frameon=False, fontsize=8, ncols=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--prompt", default="Once upon a time a king walked on a rope.")
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--head", type=int, default=0)
    parser.add_argument("--out", default="cache_and_positions.png")
    given = parser.parse_args()
    model = given.model or ask(given.url, "/v1/models")["data"][0]["id"]
    history = watch(given.url, model, given.prompt)
    body = {"model": model, "input": given.prompt, "layer": given.layer, "key": 1}
    found = ask(given.url, "/v1/positions/explain", body)
    figure = Figure(figsize=(9.6, 11), layout="constrained")
    blocks, scores, position = figure.subplots(3, 1)
    draw_cache(blocks, history)
    draw_scores(scores, found, given.head)
    draw_position(position, found, given.head)
    figure.savefig(given.out, dpi=120)
    print(given.out)


if __name__ == "__main__":
    main()
