"""Pictures of encodings that add a vector to the embedding: the vectors, and their products."""

import torch
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from ropewalk.model.formatting import listed
from ropewalk.model.inspect.explain.subject import Subject
from ropewalk.report.figure import (
    BLUE,
    INK,
    ORANGE,
    Omitted,
    Picture,
    axes_row,
    count_axis,
    draw_map,
    draw_spread,
    label_ends,
    one_axes,
)

SHOWN = 128  # positions in the map
ROWS = 128  # dimensions in the map, at most
LONGEST = 2048  # distances
RANDOM = 200  # pairs of embeddings

VECTORS, SCORES = "Vector by dimension and position", "Score by distance"


def vectors(subject: Subject) -> Picture | Omitted | None:
    """None when nothing is added to the embeddings."""
    if not subject.embeds:
        return None
    if subject.weights == "drawn":
        return Omitted(
            "vector",
            VECTORS,
            f"{subject.title} adds trained vectors, and no weights are loaded; use --model to "
            "load a checkpoint's.",
        )
    table = added(subject, min(SHOWN, subject.context))
    every = -(-table.shape[1] // ROWS)
    shown = "" if every == 1 else f" Every {every}th of {table.shape[1]} dimensions is shown."
    return Picture(
        "vector",
        VECTORS,
        "The vector added to the token's embedding at each position, once, before the first "
        "layer. It is then part of everything that is computed from the embedding, keys and "
        f"values included, so a stored entry cannot be moved to another position.{shown}",
        lambda figure: _draw_vectors(figure, table, every),
    )


def added(subject: Subject, positions: int) -> Tensor:
    """[positions, width] float32."""
    zeros = torch.zeros(positions, subject.config.hidden_size)
    return subject.whole.embed(zeros, torch.arange(positions))


def _draw_vectors(figure: Figure | SubFigure, table: Tensor, every: int) -> None:
    axes = one_axes(figure)
    reach = float(table.abs().quantile(0.999)) or 1.0
    draw_map(axes, table.t()[::every].numpy(), reach, table.shape[1], label="added value")
    axes.set(xlabel="position (tokens)", ylabel="dimension of the embedding")


def scores(subject: Subject) -> Picture | Omitted | None:
    if not subject.embeds:
        return None
    if subject.weights == "drawn":
        return Omitted(
            "score",
            SCORES,
            "How the products of its vectors depend on distance is trained, and no weights are "
            "loaded; use --model to load a checkpoint's.",
        )
    table = added(subject, min(subject.context, LONGEST)).double()
    return Picture(
        "score", SCORES, _about_scores(table), lambda figure: _draw_scores(figure, table)
    )


def _queries(count: int) -> list[int]:
    return sorted({count // 4, count // 2, count - 1})


def _by_distance(table: Tensor, query: int) -> Tensor:
    """[query + 1]: products of the query's vector and the one `distance` before it, over width."""
    return (table[: query + 1] @ table[query]).flip(0) / table.shape[1]


def _about_scores(table: Tensor) -> str:
    queries = _queries(len(table))
    curves = [_by_distance(table, query) for query in queries]
    short = len(curves[0])
    apart = max(float((curve[:short] - curves[0]).abs().max()) for curve in curves)
    scale = float(curves[0].abs().max())
    last = curves[-1]
    rises = float((last[1:] > last[:-1]).double().mean())
    same = (
        "The curves coincide: the product depends on the distance alone"
        if apart < 1e-4 * scale
        else "The curves differ: the product also depends on the query's position"
    )
    asked = listed([f"{query:,}" for query in queries])
    return (
        f"Left: the product of two position vectors, for queries at {asked}, per "
        f"dimension. {same} (largest difference {apart:.2g}), and it rises in {rises:.0%} of "
        "single steps. Right: the same with standard normal embeddings added, 5% to 95%. In a "
        "model, queries and keys are trained projections of the sum, so these products affect "
        "scores only through their weights."
    )


def _draw_scores(figure: Figure | SubFigure, table: Tensor) -> None:
    left, right = axes_row(figure, 2)
    queries = _queries(len(table))
    styles = ((ORANGE, "-", 3.2), (BLUE, "--", 2.0), (INK, ":", 1.2))
    labels = []
    for query, (color, style, width) in zip(queries, styles[-len(queries) :], strict=True):
        curve = _by_distance(table, query)
        left.plot(
            range(1, len(curve)), curve[1:].numpy(), color=color, linestyle=style, linewidth=width
        )
        labels.append((float(curve[-1]), f"query at {query:,}", color))
    left.set(title="position vectors", ylabel="product per dimension")

    generator = torch.Generator().manual_seed(0)
    width = table.shape[1]
    x = torch.randn(RANDOM, width, generator=generator, dtype=torch.float64)
    y = torch.randn(RANDOM, width, generator=generator, dtype=torch.float64)
    queried = x + table[-1]
    drawn = (queried @ table.t() + (queried * y).sum(1, keepdim=True)).flip(1) / width
    ends = draw_spread(right, drawn.numpy(), examples=1)
    right.set(title="with random embeddings", ylabel="product per dimension")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set(xlabel="distance (tokens)", xlim=(1, len(table) - 1))
        count_axis(axes)
    label_ends(left, labels)
    label_ends(right, ends)
