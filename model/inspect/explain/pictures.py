"""Selects the pictures that an encoding has, in reading order, and says why it lacks others."""

from typing import Any

from matplotlib.figure import Figure, SubFigure

from ropewalk.model.encodings.base import KeyBias, LinearBias
from ropewalk.model.inspect.explain import bias_pictures, rotation_pictures, vector_pictures
from ropewalk.model.inspect.explain.codes import (
    NEAREST,
    Series,
    angle_codes,
    bias_codes,
    query_positions,
    vector_codes,
)
from ropewalk.model.inspect.explain.rotating import find_pair_rotation
from ropewalk.model.inspect.explain.subject import Subject
from ropewalk.report.figure import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    Omitted,
    Picture,
    count_axis,
    label_ends,
    one_axes,
)

CODES = f"Distinct codes among the nearest {NEAREST} positions"
FORMAT_STYLES: dict[str, dict[str, Any]] = {
    "bf16": {"color": ORANGE, "linestyle": "-", "marker": "o"},
    "fp16": {"color": BLUE, "linestyle": "--", "marker": "s"},
    "fp32": {"color": INK, "linestyle": ":", "marker": "^"},
}
REACH = 32768  # positions at which codes are counted, unless the encoding has a lower limit


def pictures(subject: Subject) -> list[Picture | Omitted]:
    """Angles, vectors, biases, scores, codes; those that do not apply come last."""
    found = (
        rotation_pictures.angles(subject),
        vector_pictures.vectors(subject),
        bias_pictures.biases(subject),
        *_scores(subject),
        codes(subject),
    )
    return sorted(filter(None, found), key=lambda part: isinstance(part, Omitted))


def _scores(subject: Subject) -> list[Picture | Omitted]:
    makers = (rotation_pictures.scores, bias_pictures.scores, vector_pictures.scores)
    made = (make(subject) for make in makers)
    found = [one for one in made if one is not None]
    about = f"With {subject.title}, scores depend on content alone, not on distance."
    if subject.by_content:
        about = f"With {subject.title}, what distance does to a score depends on the text."
    elif subject.encoding.query_scales() is not None:
        about = f"With {subject.title}, a score depends on the query's position, not on distance."
    return found or [Omitted("score", rotation_pictures.SCORES, about)]


def codes(subject: Subject) -> Picture | Omitted:
    """Of angles, biases or vectors, whichever the encoding has; the first if several."""
    if subject.context < NEAREST:
        return Omitted("codes", CODES, f"The context is shorter than {NEAREST} positions.")
    found = (
        find_pair_rotation(subject.encoding, subject.config, subject.context)
        if subject.rotates
        else None
    )
    bias = subject.encoding.score_bias()
    if found is not None:
        at = query_positions(max(subject.context, REACH) - 1)
        return _codes("angles", angle_codes(found, at), at, _ABOUT_ANGLES)
    if subject.weights == "drawn" and (bias is not None or subject.embeds):
        return Omitted(
            "codes",
            CODES,
            f"What {subject.title} adds is trained, and no weights are loaded; use --model to "
            "load a checkpoint's.",
        )
    if bias is not None:
        limited = isinstance(bias, KeyBias)
        at = query_positions((subject.context if limited else max(subject.context, REACH)) - 1)
        about = _ABOUT_LINEAR if isinstance(bias, LinearBias) else _ABOUT_TABLE
        return _codes("biases", bias_codes(bias, at), at, about)
    if subject.embeds:
        at = query_positions(subject.context - 1)
        return _codes(
            "vectors", vector_codes(subject.whole, subject.config.hidden_size, at), at, ""
        )
    return Omitted(
        "codes",
        CODES,
        f"{subject.title} has no angles, biases or vectors that a format could round.",
    )


_ABOUT_ANGLES = (
    "How many of the 64 nearest positions differ in at least one pair's angle when position, speed "
    "and their product are kept in that format. Positions that round to the same number have the "
    "same rotation and cannot be told apart by it. The encodings of this project keep all three in "
    "float32, whatever the model's format; casting a whole model to a lower precision loses that."
)
_ABOUT_LINEAR = (
    "Counted in the head that keeps fewest. For softmax, slope · distance and slope · key position "
    "are equivalent, because they differ by the same amount for all keys; rounding makes them "
    "differ, because the distances of near keys are small numbers and their positions are not. The "
    "lines by distance are the bias as served, rounded once at the end."
)
_ABOUT_TABLE = "Counted in the head that keeps fewest."


def _codes(what: str, series: Series, at: list[int], about: str) -> Picture | Omitted:
    if all(len(set(values)) == 1 for values in series.values()):
        told = ", ".join(f"{values[0]} in {_joined(names)}" for names, values in _alike(series))
        return Omitted(
            "codes",
            CODES,
            f"The number of different {what} among the nearest {NEAREST} positions is the same at "
            f"every position up to {at[-1]:,}: {told}.",
        )
    return Picture(
        "codes",
        f"{CODES}: {what}",
        f"{about} {_told(series, at)}".strip(),
        lambda figure: _draw_codes(figure, series, at),
    )


def _told(series: Series, at: list[int]) -> str:
    """The bf16 counts at a few positions, as a sentence."""
    name = "by key, bf16" if "by key, bf16" in series else "bf16"
    picked = [one for one in (255, 1023, 4095, 32767) if one in at] or at[-1:]
    told = ", ".join(f"{series[name][at.index(one)]} at position {one:,}" for one in picked)
    form = " slope · key position leaves" if name != "bf16" else " there are"
    return f"In bf16{form} {told}."


def _draw_codes(figure: Figure | SubFigure, series: Series, at: list[int]) -> None:
    axes = one_axes(figure)
    labels = []
    for names, values in _alike(series):
        style = FORMAT_STYLES[names[0].rpartition(" ")[2]]
        several = len(names) > 1
        color = GREY if several else style["color"]
        axes.plot(at, values, **(style | {"color": color}))
        labels.append((float(values[-1]), _joined(names), color))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.9, 80)
    axes.set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.set_xlim(at[0], at[-1])
    count_axis(axes)
    axes.set_xticks([n for n in (64, 256, 1024, 4096, 16384, 65536) if at[0] <= n <= at[-1] + 1])
    axes.set(xlabel="position of the query (tokens)", ylabel="distinct among 64")
    label_ends(axes, labels)


def _alike(series: Series) -> list[tuple[list[str], list[int]]]:
    """Groups labels of equal lines."""
    found: list[tuple[list[str], list[int]]] = []
    for name, values in series.items():
        for names, others in found:
            if others == values:
                names.append(name)
                break
        else:
            found.append(([name], values))
    return found


def _joined(names: list[str]) -> str:
    by_key = [name.rpartition(" ")[2] for name in names if name.startswith("by key")]
    others = [name for name in names if not name.startswith("by key")]
    if not by_key:
        return ", ".join(others)
    parts = ["by distance: " + ", ".join(others)] if others else []
    return "\n".join([*parts, "by key: " + ", ".join(by_key)])
