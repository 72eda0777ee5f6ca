"""Formats figures as text, uniformly for all tables and sentences."""

from collections.abc import Sequence

from ropewalk.report.statistics import Estimate

MISSING = "not measured"


def interval(estimate: Estimate, digits: int = 2) -> str:
    """For example -0.01 to 0.04."""
    return f"{signed(estimate.low, digits)} to {signed(estimate.high, digits)}"


def signed(value: float, digits: int = 2) -> str:
    """For example +0.04; a value that rounds to zero has no sign."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else f"{0:.{digits}f}"


def share(estimate: Estimate) -> str:
    """For example 0.86 (0.74 to 0.93)."""
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def small(value: float) -> str:
    """Two significant digits: 0.00021 and 1.3."""
    return f"{value:.2g}" if abs(value) >= 1e-4 or not value else f"{value:.0e}"


def millions(tokens: int) -> str:
    return f"{tokens / 1e6:.1f} M"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, with all columns but the first right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
