"""Formats numbers and differences for people."""

import math
from collections.abc import Iterable, Mapping, Sequence

from ropewalk.load_tests.common.statistics import DEFINITIONS, RATES
from ropewalk.load_tests.report.differences import Difference

TITLES: Mapping[str, str] = {
    "ttft": "TTFT",
    "ttft_from_wire": "TTFT from the wire",
    "itl": "time per token",
    "tpot": "TPOT",
    "e2e": "end to end",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
}
# Metric → verb, what is more, what is less.
_COSTS = ("costs", "more per token", "less per token")
_WORDS: Mapping[str, tuple[str, str, str]] = {
    "itl": _COSTS,
    "tpot": _COSTS,
    "ttft": ("takes", "longer to the first token", "less time to the first token"),
    "e2e": ("takes", "longer to the end", "less time to the end"),
    "output_tokens_per_s": (
        "gives",
        "more output tokens per second",
        "fewer output tokens per second",
    ),
}


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def milliseconds(seconds: float) -> str:
    return digits(seconds * 1000)


def fine_milliseconds(seconds: float) -> str:
    """Milliseconds: below one with three decimals, above with three digits."""
    return milliseconds(seconds) if seconds >= 0.9995e-3 else f"{seconds * 1e3:.3f}"


def number(metric: str, value: float) -> str:
    """A figure in its `unit`."""
    return digits(value) if metric in RATES else milliseconds(value)


def percent(share: float) -> str:
    """0.0312 → 3.1."""
    return f"{share * 100:,.0f}" if abs(share) >= 0.9995 else f"{share * 100:.1f}"


def signed(ratio: float) -> str:
    """1.0312 → +3.1."""
    return f"{'+' if ratio >= 1 else '−'}{percent(abs(ratio - 1))}"


def interval(found: Difference) -> str:
    """+3.1 % (+1.9 to +4.4): slower; or unknown, for a reason that `compared` gives."""
    if found.verdict == "unknown":
        return found.verdict
    inside = f"{signed(found.low)} to {signed(found.high)}"
    return f"{signed(found.value)} % ({inside}): {found.verdict}"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def heading(metric: str) -> str:
    """ttft_p99 → TTFT p99."""
    if metric in TITLES:
        return TITLES[metric]
    name, _, share = metric.rpartition("_")
    return f"{TITLES[name]} {share}"


def unit(metric: str) -> str:
    return "tokens/s" if metric in RATES else "ms"


def column(metric: str) -> str:
    """The heading with its unit: TTFT p99, ms."""
    return heading(metric) if metric in RATES else f"{heading(metric)}, ms"


def defined(metrics: Iterable[str]) -> str:
    """The definitions of the metrics, each once for all its percentiles."""
    names = [metric if metric in DEFINITIONS else metric.rpartition("_")[0] for metric in metrics]
    return " ".join(f"{heading(name)} is {DEFINITIONS[name]}." for name in dict.fromkeys(names))


def compared(where: str, base: str, found: Mapping[str, Difference], metric: str) -> str:
    """One sentence on what each variant costs over `base`; `where` begins it.

    At 8,192 tokens t5 costs 3.1 % (1.9 to 4.4) more per token than nope; rope shows no difference.
    """
    differing = [variant for variant in found if found[variant].verdict in ("slower", "faster")]
    differing.sort(key=lambda variant: -abs(math.log(found[variant].value)))
    parts = [_difference(variant, found[variant], metric, base) for variant in differing[:1]]
    parts += [_difference(variant, found[variant], metric) for variant in differing[1:]]
    same = [variant for variant in found if found[variant].verdict == "no difference"]
    if same:
        most = max(
            abs(end - 1) for variant in same for end in (found[variant].low, found[variant].high)
        )
        verb = "shows" if len(same) == 1 else "show"
        what = "" if parts else f" in {heading(metric)}"
        parts.append(
            f"{listed(same)} {verb} no difference from {base}{what} (up to {percent(most)} % could "
            "hide)"
        )
    reasons: dict[str, list[str]] = {}
    for variant, one in found.items():
        if one.verdict == "unknown":
            reasons.setdefault(one.reason, []).append(variant)
    for reason, variants in reasons.items():
        who = "no variant can" if len(variants) == len(found) > 1 else f"{listed(variants)} cannot"
        parts.append(f"{who} be compared with {base}: {reason}")
    return f"{where} {'; '.join(parts)}."


def _difference(variant: str, found: Difference, metric: str, base: str = "") -> str:
    """In full with `base`; without it, in short, to continue a sentence about another variant."""
    name = metric if metric in _WORDS else metric.rpartition("_")[0]
    verb, more, less = _WORDS[name]
    low, high = sorted(abs(end - 1) for end in (found.low, found.high))
    size = f"{percent(abs(found.value - 1))} % ({percent(low)} to {percent(high)})"
    direction = more if found.value > 1 else less
    if base:
        return f"{variant} {verb} {size} {direction} than {base}"
    return f"{variant} {size} {direction.split()[0]}"
