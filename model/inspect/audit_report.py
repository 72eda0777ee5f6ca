"""Summaries of an audit of several encodings: sums for a table, and plain data for programs."""

from dataclasses import asdict, dataclass

from ropewalk.model.config import ModelConfig
from ropewalk.model.inspect.audit import Audit, AuditStep, entries

HEADLINE = (
    "Appending changes no cached entry under any encoding that Ropewalk serves. Under PaTH, whose "
    "authors keep keys as the newest query needs them, each token rewrites the keys of all before "
    "it. RoPE as it is usually stored needs no positional work over the context and no special "
    "attention kernel; its cost is that moved keys must be rewritten. ALiBi and T5's bias are the "
    "reverse: moved keys stay as they are, but every step adds a bias, ALiBi's to every key, T5's "
    "to the nearest 113 or, unless in its window form, to all."
)


@dataclass(frozen=True, slots=True)
class Report:
    """One run: the same prompt and number of steps under each encoding."""

    model: str
    note: str  # what the answers of these arms are worth
    config: ModelConfig
    audits: tuple[Audit, ...]

    @property
    def unexpected(self) -> int:
        """Entries that changed although they were correct."""
        return sum(audit.unexpected for audit in self.audits)


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm in a line. An entry is counted once for every step to which the count applies."""

    steps: int  # the prompt's included
    written_per_token: float
    changed: int
    should_change: int
    stale: int
    unexpected: int
    rotations_at_end: int  # of the last token
    bias_values_at_end: int


def summary(audit: Audit) -> Summary:
    steps = audit.steps
    return Summary(
        steps=len(steps),
        written_per_token=sum(entries(step.written) for step in steps) / steps[-1].length,
        changed=sum(entries(step.changed) for step in steps),
        should_change=sum(entries(step.should_change) for step in steps),
        stale=sum(entries(step.stale) for step in steps),
        unexpected=audit.unexpected,
        rotations_at_end=steps[-1].rotations,
        bias_values_at_end=steps[-1].bias_values,
    )


COLUMNS = (
    "encoding",
    "steps",
    "written/token",
    "changed",
    "should change",
    "stale",
    "rotations/token",
    "bias values/token",
)


def cells(audit: Audit) -> tuple[str, ...]:
    """One arm's values under COLUMNS; values per token are those of the last step."""
    found = summary(audit)
    return (
        audit.name,
        f"{found.steps:,}",
        f"{found.written_per_token:,g}",
        f"{found.changed:,}",
        f"{found.should_change:,}",
        f"{found.stale:,}",
        f"{found.rotations_at_end:,}",
        f"{found.bias_values_at_end:,}",
    )


def as_json(report: Report) -> dict[str, object]:
    """Lists, strings and numbers. A position's counts are [position, keys, values]."""
    config = report.config
    return {
        "object": "audit",
        "model": report.model,
        "note": report.note,
        "headline": HEADLINE,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "arms": [
            {
                "encoding": audit.name,
                "note": audit.note,
                "trained_length": audit.trained_length,
                "summary": asdict(summary(audit)),
                "steps": [_step(step) for step in audit.steps],
            }
            for audit in report.audits
        ],
    }


def _step(step: AuditStep) -> dict[str, object]:
    counted = ("written", "changed", "should_change", "stale")
    return {
        **asdict(step),
        **{name: [list(one) for one in getattr(step, name)] for name in counted},
        "unexpected": [entry._asdict() for entry in step.unexpected],
    }
