"""Writes and reads result.json: a whole load test with its raw samples.

Times are whole microseconds since the first run began. Of a request's chunks the file holds
`first`, the time of the first, `gaps`, the times from each to the next, and `tokens`, the number
of tokens in each, which is left out if each has exactly one. The names of the servers' counters and
gauges are listed once, in `series`; a run has its values in that order, null for a missing one.
What is read differs from what was written only in the origin of the clock.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

from ropewalk.load_tests.common.types import (
    Outcome,
    Point,
    Profile,
    ProfileKind,
    Result,
    Run,
    ServerView,
)

SCHEMA = 1
_KIND = "ropewalk load test"
_US = 1_000_000
_VIEWED = ("counters", "gauges")
_Kind = TypeVar("_Kind")
_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class BadResult(ValueError):
    """The file is not a valid load test; the message names the field at fault."""


def write(path: Path, result: Result) -> None:
    """One run per line, so that files can be read and diffed."""
    content = as_json(result)
    runs = content.pop("runs")
    lines = [f"{json.dumps(name)}: {_compact(value)},\n" for name, value in content.items()]
    body = ",\n".join(_compact(run) for run in runs)
    path.write_text("{" + "".join(lines) + f'"runs": [\n{body}\n]}}\n', encoding="utf-8")


def read(path: Path) -> Result:
    """What `write` wrote. Raises BadResult, and OSError for a file that cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        return from_json(data)
    except BadResult as error:
        raise BadResult(f"{path}: {error}") from None
    except ValueError as error:
        raise BadResult(f"{path} is not JSON: {error}") from None


def as_json(result: Result) -> dict[str, Any]:
    """The content for `json.dumps`."""
    begins = [run.steady_from for run in result.runs]
    begins += [outcome.intended for run in result.runs for outcome in run.outcomes]
    begin = min(begins, default=0.0)
    views = [run.server for run in result.runs if run.server is not None]
    series = {
        kind: sorted({name for view in views for name in getattr(view, kind)}) for kind in _VIEWED
    }
    return {
        "schema": SCHEMA,
        "kind": _KIND,
        "command": result.command,
        "arguments": dict(result.arguments),
        "environment": dict(result.environment),
        "variants": {label: dict(about) for label, about in result.variants.items()},
        "baseline": result.baseline,
        "warnings": list(result.warnings),
        "series": series,
        "runs": [_run_as_json(run, begin, series) for run in result.runs],
    }


def from_json(data: object) -> Result:
    """The reverse of `as_json`. Raises BadResult."""
    top = _Fields(data, "")
    if top.data.get("kind") != _KIND:
        raise BadResult(f"its kind is not {_KIND!r}: is it a file of ropewalk bench?")
    if top.data.get("schema") != SCHEMA:
        found = top.data.get("schema")
        raise BadResult(f"its schema is {found!r} and this program reads {SCHEMA}: measure again")
    variants = {
        label: dict(_checked(about, dict, f"variants.{label}"))
        for label, about in top.get("variants", dict).items()
    }
    baseline = top.optional("baseline", str)
    if baseline is not None and baseline not in variants:
        raise BadResult(f"baseline is {baseline!r}, which is none of its variants")
    series = _Fields(top.get("series", dict), "series")
    runs = tuple(_run(each, series) for each in top.each("runs"))
    for index, run in enumerate(runs):
        if run.variant not in variants:
            raise BadResult(
                f"runs[{index}].variant is {run.variant!r}, which is none of its variants"
            )
    return Result(
        command=top.get("command", str),
        arguments=top.get("arguments", dict),
        environment=top.get("environment", dict),
        variants=variants,
        baseline=baseline,
        runs=runs,
        warnings=tuple(top.list_of("warnings", str)),
    )


def _run_as_json(run: Run, begin: float, series: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    def us(time: float) -> int:
        return round((time - begin) * _US)

    def request(outcome: Outcome) -> dict[str, Any]:
        times = [us(time) for time, _ in outcome.chunks]
        tokens = [
            after - before for before, after in pairwise((0, *(n for _, n in outcome.chunks)))
        ]
        fields: dict[str, Any] = {
            "intended": us(outcome.intended),
            "sent": us(outcome.sent),
            "first": times[0] if times else None,
            "ended": us(outcome.ended),
            "gaps": [after - before for before, after in pairwise(times)],
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.output_tokens,
            "cached_tokens": outcome.cached_tokens,
            "left": outcome.left,
            "error": outcome.error,
        }
        return fields if set(tokens) <= {1} else {**fields, "tokens": tokens}

    return {
        "variant": run.variant,
        "workload": run.point.workload,
        "point": run.point.label,
        "context": run.point.context,
        "profile": run.profile.kind,
        "concurrency": run.profile.concurrency,
        "rate": run.profile.rate,
        "burstiness": run.profile.burstiness,
        "round": run.round,
        "steady_from": us(run.steady_from),
        "steady_to": us(run.steady_to),
        "server": None if run.server is None else _view_as_json(run.server, series),
        "requests": [request(outcome) for outcome in run.outcomes],
    }


def _view_as_json(view: ServerView, series: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        "counters": [_short(view.counters.get(name)) for name in series["counters"]],
        "gauges": [_short(view.gauges.get(name)) for name in series["gauges"]],
        "disagreements": list(view.disagreements),
    }


class _Fields:
    """An object in the file, and its path in it."""

    def __init__(self, data: object, where: str) -> None:
        self.data: dict[str, Any] = _checked(data, dict, where or "the file")
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str, kind: type[_Kind]) -> _Kind:
        if name not in self.data:
            raise BadResult(f"{self.path(name)} is missing")
        return _checked(self.data[name], kind, self.path(name))

    def optional(self, name: str, kind: type[_Kind]) -> _Kind | None:
        return None if self.data.get(name) is None else self.get(name, kind)

    def seconds(self, name: str) -> float:
        return self.get(name, int) / _US

    def each(self, name: str) -> list["_Fields"]:
        listed = self.get(name, list)
        return [_Fields(one, f"{self.path(name)}[{index}]") for index, one in enumerate(listed)]

    def list_of(self, name: str, kind: type[_Kind]) -> list[_Kind]:
        listed = self.get(name, list)
        return [_checked(one, kind, f"{self.path(name)}[{i}]") for i, one in enumerate(listed)]

    def numbers(self, name: str, series: "_Fields") -> dict[str, float]:
        names, values = series.list_of(name, str), self.get(name, list)
        if len(values) != len(names):
            raise BadResult(f"{self.path(name)} has {len(values)} entries for {len(names)} series")
        return {
            key: _checked(value, float, f"{self.path(name)}[{index}]")
            for index, (key, value) in enumerate(zip(names, values, strict=True))
            if value is not None
        }


def _run(fields: _Fields, series: _Fields) -> Run:
    kind = fields.get("profile", str)
    kinds: Sequence[ProfileKind] = get_args(ProfileKind)
    if kind not in kinds:
        raise BadResult(f"{fields.path('profile')} is {kind!r}, not one of {', '.join(kinds)}")
    view = fields.optional("server", dict)
    return Run(
        variant=fields.get("variant", str),
        point=Point(
            fields.get("workload", str), fields.get("point", str), fields.optional("context", int)
        ),
        profile=Profile(
            kinds[kinds.index(kind)],
            fields.get("concurrency", int),
            fields.get("rate", float),
            fields.get("burstiness", float),
        ),
        round=fields.get("round", int),
        outcomes=tuple(_outcome(each) for each in fields.each("requests")),
        steady_from=fields.seconds("steady_from"),
        steady_to=fields.seconds("steady_to"),
        server=None if view is None else _view(_Fields(view, fields.path("server")), series),
    )


def _outcome(fields: _Fields) -> Outcome:
    return Outcome(
        intended=fields.seconds("intended"),
        sent=fields.seconds("sent"),
        ended=fields.seconds("ended"),
        chunks=_chunks(fields),
        prompt_tokens=fields.get("prompt_tokens", int),
        output_tokens=fields.get("output_tokens", int),
        cached_tokens=fields.optional("cached_tokens", int),
        left=fields.get("left", bool),
        error=fields.optional("error", str),
    )


def _chunks(fields: _Fields) -> tuple[tuple[float, int], ...]:
    first = fields.optional("first", int)
    if first is None:
        return ()
    times = list(accumulate(fields.list_of("gaps", int), initial=first))
    tokens = fields.list_of("tokens", int) if "tokens" in fields.data else [1] * len(times)
    if len(tokens) != len(times):
        raise BadResult(
            f"{fields.path('tokens')} has {len(tokens)} entries for {len(times)} chunks"
        )
    return tuple(zip((time / _US for time in times), accumulate(tokens), strict=True))


def _view(fields: _Fields, series: _Fields) -> ServerView:
    return ServerView(
        fields.numbers("counters", series),
        fields.numbers("gauges", series),
        tuple(fields.list_of("disagreements", str)),
    )


def _checked(value: Any, kind: type[_Kind], where: str) -> _Kind:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadResult(f"{where} is {json.dumps(value)[:60]}, not {_NAMES[kind]}")
    return value


def _short(value: float | None) -> float | int | None:
    """A whole number without its decimal point; None for infinity, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def _compact(value: Mapping[str, Any] | Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
