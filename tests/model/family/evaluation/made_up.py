"""Made-up figures of an evaluation, so that what is said about them can be checked."""

import math
from itertools import pairwise

from ropewalk.model.family.evaluation.curves import Curve, Point
from ropewalk.model.family.evaluation.losses import HeldOut, LossBin, Losses, edges
from ropewalk.model.family.evaluation.recalled import RecallCell, Recalls
from ropewalk.model.family.evaluation.results import SCHEMA, Evaluation, Measured, Packed, Sizes
from ropewalk.model.family.evaluation.samples import Sample
from ropewalk.model.family.evaluation.served import ServedLoss
from ropewalk.model.family.evaluation.shortened import Divergence
from ropewalk.report.statistics import Estimate, wilson

TRAINED, CONTEXT = 512, 4096
REFUSAL = "refuses: there is no vector for such a position"
CONFIG = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_heads": 4,
    "trained_context": TRAINED,
    "encoding": {"name": "any", "options": {"scale": 4.0, "layout": "split"}},
}


def around(value: float, half: float = 0.02) -> Estimate:
    return Estimate(value, value - half, value + half)


def losses(costs, *, half: float = 0.02, level: float = 3.5) -> Losses:
    """costs: of distance, per bin past the trained length; the last one repeats. None: refused."""
    cuts = edges(TRAINED, CONTEXT)
    bins = []
    for start, stop in pairwise(cuts):
        near = level + 3 / math.sqrt(max(start, 1))
        if stop <= TRAINED:
            bins.append(LossBin(start, stop, around(near, 0.08), None, None))
        elif costs is not None:
            number = len(bins) - cuts.index(TRAINED)
            cost = costs[min(number, len(costs) - 1)]
            change = around(cost, half)
            bins.append(LossBin(start, stop, around(near + cost, 0.08), around(near), change))
    reach = TRAINED if costs is None else CONTEXT
    documents = tuple(f"tales/{n}" for n in range(3))
    refusal = REFUSAL if costs is None else ""
    return Losses(TRAINED, reach, refusal, 9, documents, tuple(bins))


def held_out(level: float) -> HeldOut:
    means = (level - 0.3, level, level + 0.3)
    return HeldOut(tuple(f"tales/{n}" for n in range(3)), (3, 3, 3), means, around(level, 0.2))


def recalls(memory: float, reach: int) -> Recalls:
    cells = []
    for kind in ("pairs", "copy"):
        for length in (512, 1024, 2048):
            for distance in (32, 64, 128, 256, 384, 768, 1536):
                if distance < length - 100 and length <= reach:
                    right = round(50 * math.exp(-distance / memory))
                    share = wilson(right, 50)
                    cells.append(RecallCell(kind, length, distance, distance + 5, right, 50, share))
    return Recalls(TRAINED, reach, tuple(cells))


def curve(pace: float, end: float = 3.4, minutes: float = 40) -> Curve:
    points = []
    for n in range(1, 201):
        tokens = 200_000 * n
        loss = end + (8.2 - end) * math.exp(-((tokens / 1e6) ** 0.6) / pace)
        points.append(Point(tokens, minutes * 60 * n / 200, loss))
    return Curve(4882, tuple(points), tuple(points[9::50]))


def divergences(size: float | None) -> tuple[Divergence, ...]:
    found = []
    cases = [("shift", 1, 1), ("slide", 1, 0.1), ("slide", 32, 2), ("move", 1, 5)]
    for name, times, factor in cases:
        if size is None:
            why = "the position is part of every stored key and value"
            found.append(Divergence(name, times, "impossible", why, None, None))
        else:
            kl = size * factor
            spread = Estimate(kl, kl * 0.7, kl * 1.5)
            found.append(Divergence(name, times, "free", "", spread, around(kl / 2, kl)))
    return tuple(found)


def measured(label, costs, memory=200.0, pace=3.0, kl=0.01, seed=None, end=3.4) -> Measured:
    name = f"ropewalk-{label}" + (f".seed{seed}" if seed is not None else "")
    first = Measured(name, label, seed, "ab" * 32, label, 4_300_000, CONFIG)
    served = tuple(
        ServedLoss(dtype, 4, 1023, 3.61234, 3.61234 + off, 5 * off)
        for dtype, off in (("float32", 2e-7), ("bfloat16", 0.0012))
    )
    own = losses(costs)
    more = {"curve": curve(pace, end), "losses": own, "held_out": held_out(end + 0.15)}
    if seed is None:
        more |= {"recalls": recalls(memory, own.reach), "divergences": divergences(kl)}
        more |= {"served": served, "packed": Packed(4_300_000, 3.5, 3.5012)}
        more["samples"] = (Sample("My friends,", " the sea\nis blue."),)
    values = {field: getattr(first, field) for field in first.__slots__}
    return Measured(**values | more)


def family() -> Evaluation:
    """Figures that agree with the literature."""
    members = (
        measured("rope", [0.02, 0.3, 0.9, 1.4, 1.9, 2.4], pace=2.6),
        measured("rope", [0.02, 0.3, 1.0, 1.5, 2.0, 2.5], pace=2.7, seed=1),
        measured("t5", [0.0, 0.01, 0.01, 0.02], memory=900, pace=2.9, kl=0.004),
        measured("t5", [0.0, 0.01, 0.01, 0.02], pace=3.0, seed=1),
        measured("alibi", [-0.01, -0.02], memory=120, pace=2.8, kl=0.003),
        measured("alibi", [-0.01, -0.02], pace=2.65, seed=1),
        measured("learned", None, memory=90, pace=4.2, kl=None, end=3.7),
        measured("sinusoidal", [1.2, 2.5, 3.5, 4.0], memory=150, pace=3.4, kl=None),
        measured("nope", [0.04, 0.2, 0.7, 1.5, 2.2], memory=100, pace=3.6, kl=0.03, end=3.6),
    )
    return Evaluation(SCHEMA, "f" * 64, Sizes(), members)
