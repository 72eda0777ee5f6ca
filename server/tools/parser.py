"""Reads an answer as it is generated: its text, its reasoning and its tool calls, apart.

One parser for every family, told by a Format what to look for. Joined, what it gives is the same
however the text was cut into pieces: it waits wherever more text could change its mind.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ropewalk.server.tools.formats import Form, Format

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where it needs more text
Write = Callable[[str], None]

_SAFE = string.ascii_letters + string.digits
_PLAIN = re.compile(r'[^"\\]+')  # inside a string of JSON
_CONTROL = re.compile(r"[\x00-\x1f]")
_LITERAL = re.compile(r"[\w+\-.]+")
_BETWEEN = re.compile(r"[\w+\-.\s,:]+")
_WORD = re.compile(r"[^\s,:{}\[\]<]+")  # of arguments with other quotes than JSON's
_NAMES = ("name", "function", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_TYPES = {str: "string", type(None): "null"}
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stretch of an answer adds to its text, to its reasoning, or to its call number `call`.

    A call's first has `id` and `name`, and the others its arguments, piece by piece.
    """

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""


class _Malformed(Exception):
    """What follows is not what was expected."""


@dataclass(slots=True)
class _Call:
    number: int | None = None  # None until the name is known
    waiting: str = ""  # arguments that came before the name
    argued: bool = False


class Parser:
    """One answer. `thinking` says whether it is in the midst of reasoning, `done` that it is over.

    tools: the parameters' schemas by the names of the functions that may be called; without any,
    calls are text. single: the answer is done after one call.
    """

    def __init__(
        self,
        format: Format,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        thinking: bool = False,
        single: bool = False,
    ) -> None:
        self.thinking = thinking
        self.calls = 0
        self.done = False
        self.named = format.named  # special tokens whose names are part of the text to read
        self._format = format
        self._tools = tools
        self._single = single
        opens = format.opens if tools else ()
        self._markers = _Markers((*opens, *format.noise))
        self._ends = _Markers((format.close, *opens) if format.close else opens)
        self._text = ""
        self._at = 0  # what is read of it
        self._over = False
        self._out: list[Delta] = []
        self._gap = ""  # white space that is part of the text only if more text follows
        self._fresh = thinking  # nothing but white space since a marker
        self._spoke = self._thought = False  # there was text, there was reasoning
        self._sure = False  # that what is read is a call, whatever it names
        self._kept: list[str] | None = None  # read, and text after all if it is not a call
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[Delta]:
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._read()

    def finish(self) -> list[Delta]:
        """The rest, when no more text will come."""
        self._over = True
        return self._read()

    def _read(self) -> list[Delta]:
        next(self._reading, None)
        out, self._out = self._out, []
        return out

    # ---- an answer ----

    def _answer(self) -> Reading[None]:
        yield  # until the first text
        if self.thinking:
            yield from self._think()
        begins = True
        while not self.done:
            if begins and (yield from self._marked_or_bare()):
                continue
            marker = yield from self._until(self._markers, self._content)
            if not marker:
                if not self._fresh:
                    self._emit(Delta(content=self._gap))
                return
            begins = True
            if marker in self._format.noise:
                self._mark()
            else:
                begins = yield from self._call(marker)

    def _marked_or_bare(self) -> Reading[bool]:
        """Reasoning, or a call without a marker, both of which only begin a text."""
        think = self._format.think
        if think and (yield from self._starting(think[0])):
            self._mark()
            yield from self._think()
            return True
        if self._format.bare and self._tools and (yield from self._starting("{")):
            self._at -= 1
            return (yield from self._call(""))
        return False

    def _think(self) -> Reading[None]:
        self.thinking = True
        think = self._format.think
        yield from self._until(_Markers(think[1:] if think else ()), self._reason)
        self.thinking = False
        self._mark()

    def _call(self, marker: str) -> Reading[bool]:
        """The calls after a marker; whether there were any, or none but what is no text either."""
        before, self._kept = self.calls, []
        self._sure = bool(marker)
        try:
            closed = yield from self._body(marker)
        except _Malformed:
            closed = False
            if self.calls == before:
                kept, self._kept = self._kept, None
                self._content(marker + "".join(kept or ()))
                return False
        self._kept = None
        if self.calls == before:
            self._mark()
        if self._format.close and marker and not closed and not self.done:
            end = yield from self._until(self._ends, _ignore)
            if end != self._format.close:  # the next call begins: this one was not closed
                self._at -= len(end)
        return True

    def _body(self, marker: str) -> Reading[bool]:
        """Returns whether it has read the closing marker too."""
        first = yield from self._next()
        form = self._format.form
        if form is Form.XML and marker != "<function=" and first not in ("{", "["):
            if not (yield from self._starting("<function=")):
                raise _Malformed
            marker = "<function="
        if marker == "<function=":
            yield from self._tagged()
        elif first and first in "{[":
            yield from self._listed()
        elif form is Form.NAMED:
            return (yield from self._named())
        else:
            raise _Malformed
        return False

    def _listed(self) -> Reading[None]:
        """Objects one after the other, perhaps in a list."""
        listed = (yield from self._peek()) == "["
        if listed:
            self._take(1)
        while not self.done:
            first = yield from self._next()
            if first == "{":
                self._take(1)
                call = _Call()
                yield from self._fields(call)
                self._end(call)
            elif first and first in ",;":
                self._take(1)
            elif listed and first == "]":
                self._take(1)
                return
            elif listed:
                raise _Malformed
            else:
                return

    def _fields(self, call: _Call, *, inner: bool = False) -> Reading[None]:
        """Those of an object, after its brace. inner: it is another one's `function`."""
        while (first := (yield from self._next())) != "}":
            if first == ",":
                self._take(1)
                continue
            key = yield from self._string()
            if (yield from self._next()) != ":":
                raise _Malformed
            self._take(1)
            first = yield from self._next()
            if key in _NAMES and first == '"':
                self._start(call, (yield from self._string()))
            elif key == "function" and first == "{" and not inner:
                self._take(1)
                yield from self._fields(call, inner=True)
            elif key in _ARGUMENTS and first == '"':  # JSON in a string
                self._argue(call, (yield from self._string()))
            elif key in _ARGUMENTS and first == "{":
                yield from self._value(lambda text: self._argue(call, text))
            else:
                yield from self._value(_ignore)
        self._take(1)

    def _named(self) -> Reading[bool]:
        call = _Call()
        name, middle = "", self._format.written.middle
        pattern = re.compile(rf"[^\s<\[{{{re.escape(middle[:1])}]+")
        while run := (yield from self._run(pattern)):
            name += run
        self._start(call, name)
        end = yield from self._until(_Markers(("{", *self._ends.all)), _ignore)
        if end == "{":
            self._at -= 1
            if self._format.quote == '"':
                yield from self._value(lambda text: self._argue(call, text))
            else:
                yield from self._terse(lambda text: self._argue(call, text))
        elif end != self._format.close:
            self._at -= len(end)
        self._end(call)
        return bool(end) and end == self._format.close

    def _tagged(self) -> Reading[None]:
        """<function=, which is read already, up to </function>."""
        call = _Call()
        name = (yield from self._up_to(">")).strip(" \"'")
        self._start(call, name)
        properties = self._tools.get(name, {}).get("properties", {})
        tags = _Markers(("<parameter=", "</function>", *self._ends.all))
        begin = "{"
        while (tag := (yield from self._until(tags, _ignore))) == "<parameter=":
            key = (yield from self._up_to(">")).strip(" \"'")
            self._argue(call, f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
            begin = ", "
            kinds = _kinds(properties.get(key) if isinstance(properties, Mapping) else None)
            if kinds == {"string"}:
                yield from self._tagged_text(call)
            else:
                said = yield from self._up_to("</parameter>")
                text = kinds == {"string", "null"} and said.strip() not in ("null", "None")
                self._argue(call, _as_string(said) if text else _literal(said.strip()))
        if tag in self._ends.all:
            self._at -= len(tag)
        if tag:
            self._argue(call, "}" if begin == ", " else "{}")
        self._end(call)

    def _tagged_text(self, call: _Call) -> Reading[None]:
        """A parameter's text, piece by piece, without the line breaks beside its tags."""
        held, begun = "", False

        def write(text: str) -> None:
            nonlocal held, begun
            text = held + text
            if not begun and text:
                text, begun = text.removeprefix("\n"), True
            held = "\n" if text.endswith("\n") else ""
            self._argue(call, json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])

        self._argue(call, '"')
        if not (yield from self._until(_Markers(("</parameter>",)), write)):
            raise _Malformed
        self._argue(call, '"')

    # ---- what a call adds ----

    def _start(self, call: _Call, name: str) -> None:
        if call.number is not None:
            return
        if not name or not (self._sure or name in self._tools):
            raise _Malformed
        self._mark()
        self._kept = None
        call.number = self.calls
        self.calls += 1
        self._emit(Delta(call=call.number, id=new_id(), name=name))
        if call.waiting:
            self._argue(call, call.waiting)

    def _argue(self, call: _Call, text: str) -> None:
        if call.number is None:
            call.waiting += text
        elif text:
            call.argued = True
            self._emit(Delta(call=call.number, arguments=text))

    def _end(self, call: _Call) -> None:
        if call.number is None:
            raise _Malformed
        if not call.argued:
            self._argue(call, "{}")
        self.done = self._single

    # ---- text ----

    def _content(self, text: str) -> None:
        shown = self._shown(text, again=self._spoke)
        self._spoke = self._spoke or bool(shown)
        self._emit(Delta(content=shown))

    def _reason(self, text: str) -> None:
        shown = self._shown(text, again=self._thought)
        self._thought = self._thought or bool(shown)
        self._emit(Delta(reasoning=shown))

    def _shown(self, text: str, *, again: bool) -> str:
        """The text, but for white space beside a marker; on a line of its own if it goes on."""
        text = self._gap + text
        if self._fresh:
            text = text.lstrip()
        shown = text.rstrip()
        self._gap = text[len(shown) :]
        if not shown:
            return ""
        apart = self._fresh and again
        self._fresh = False
        return "\n" + shown if apart else shown

    def _mark(self) -> None:
        self._gap, self._fresh = "", True

    def _emit(self, delta: Delta) -> None:
        last = self._out[-1] if self._out else Delta()
        if delta.content and last.content:
            self._out[-1] = replace(last, content=last.content + delta.content)
        elif delta.reasoning and last.reasoning:
            self._out[-1] = replace(last, reasoning=last.reasoning + delta.reasoning)
        elif delta.arguments and last.arguments and last.call == delta.call:
            self._out[-1] = replace(last, arguments=last.arguments + delta.arguments)
        elif delta.content or delta.reasoning or delta.call is not None:
            self._out.append(delta)

    # ---- JSON, or nearly ----

    def _value(self, write: Write) -> Reading[None]:
        """One value, as it stands; control characters in strings are escaped."""
        depth = 0
        while True:
            first = yield from self._peek()
            if first == '"':
                yield from self._quoted(write)
            elif first and first in "{[":
                depth += 1
                write(self._take(1))
            elif first and first in "}]" and depth:
                depth -= 1
                write(self._take(1))
            else:
                run = yield from self._run(_BETWEEN if depth else _LITERAL)
                if not run and depth:
                    raise _Malformed
                if run:
                    write(run)
                    continue
            if not depth:
                return

    def _quoted(self, write: Write) -> Reading[None]:
        write(self._take(1))
        while (first := (yield from self._peek())) != '"':
            if not first:
                raise _Malformed
            if first == "\\":
                while len(self._text) - self._at < 2:
                    if not (yield from self._more()):
                        raise _Malformed
                write(self._take(2))
            else:
                run = yield from self._run(_PLAIN)
                write(_CONTROL.sub(lambda found: json.dumps(found.group())[1:-1], run))
        write(self._take(1))

    def _string(self) -> Reading[str]:
        if (yield from self._peek()) != '"':
            raise _Malformed
        parts: list[str] = []
        yield from self._quoted(parts.append)
        try:
            return str(json.loads("".join(parts)))
        except ValueError:
            raise _Malformed from None

    def _terse(self, write: Write) -> Reading[None]:
        """An object whose keys have no quotes and whose strings have other ones, as JSON."""
        quote = self._format.quote
        depth = 0
        while True:
            first = yield from self._next()
            if not first:
                raise _Malformed
            if first in "{}[],:":
                depth += (first in "{[") - (first in "}]")
                write(self._take(1))
                if not depth:
                    return
            elif first == '"' and quote != '"':
                yield from self._quoted(write)
            elif (yield from self._starting(quote)):
                write('"')
                end = yield from self._until(
                    _Markers((quote,)),
                    lambda text: write(json.dumps(text, ensure_ascii=False)[1:-1]),
                )
                if not end:
                    raise _Malformed
                write('"')
            else:
                word = ""
                while run := (yield from self._run(_WORD)):
                    word += run
                if not word:
                    raise _Malformed
                key = (yield from self._next()) == ":"
                write(json.dumps(word, ensure_ascii=False) if key else _literal(word))

    # ---- characters ----

    def _more(self) -> Reading[bool]:
        """Waits for more text; False if the answer is over."""
        if self._over:
            return False
        yield
        return True

    def _take(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _peek(self) -> Reading[str]:
        """The next character; empty at the end of the answer."""
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _next(self) -> Reading[str]:
        """The next character after white space."""
        while (character := (yield from self._peek())).isspace():
            self._take(1)
        return character

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Characters that match, as far as they are there; empty when the next one does not."""
        yield from self._peek()
        found = pattern.match(self._text, self._at)
        return self._take(found.end() - self._at) if found else ""

    def _starting(self, marker: str) -> Reading[bool]:
        """Whether the marker comes next, after white space; if it does not, nothing is read."""
        while True:
            rest = self._text[self._at :]
            text = rest.lstrip()
            if text.startswith(marker):
                spaces = self._take(len(rest) - len(text))
                self._take(len(marker))
                if self._kept is None:
                    self._gap += spaces
                return True
            if not marker.startswith(text) or not (yield from self._more()):
                return False

    def _until(self, markers: "_Markers", write: Write) -> Reading[str]:
        """Writes the text before the first marker, which it reads; empty at the end."""
        while True:
            found = markers.found(self._text, self._at)
            certain = len(self._text) if self._over else markers.maybe(self._text, self._at)
            if found is not None and found.start() < certain:
                write(self._take(found.start() - self._at))
                return self._take(len(found.group()))
            write(self._take(certain - self._at))
            if not (yield from self._more()):
                return ""

    def _up_to(self, marker: str) -> Reading[str]:
        parts: list[str] = []
        if not (yield from self._until(_Markers((marker,)), parts.append)):
            raise _Malformed
        return "".join(parts)


class _Markers:
    """Several markers to look for at once. Of those that begin at one place the longest counts."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.all = tuple(sorted(markers, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.all)) or r"(?!)")
        self._firsts = re.compile("|".join({re.escape(each[0]) for each in self.all}) or r"(?!)")
        self._longest = max(map(len, self.all), default=0)

    def found(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def maybe(self, text: str, at: int) -> int:
        """Where the text's end begins that may be the beginning of a marker; its length if none."""
        for first in self._firsts.finditer(text, max(at, len(text) - self._longest + 1)):
            rest = text[first.start() :]
            if any(marker.startswith(rest) and marker != rest for marker in self.all):
                return first.start()
        return len(text)


def new_id() -> str:
    """A call's id: nine letters or digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_SAFE) for _ in range(9))


def _ignore(text: str) -> None:
    pass


def _kinds(schema: object) -> set[str]:
    """The types that a parameter may have; none where its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {str(each) for each in named}
    if isinstance(values := schema.get("enum"), list):
        return {_TYPES.get(type(each), "other") for each in values}
    branches = schema.get("anyOf", schema.get("oneOf"))
    found = [_kinds(each) for each in branches] if isinstance(branches, list) else []
    return set().union(*found) if all(found) else set()


def _as_string(text: str) -> str:
    """A parameter's text as a string, without the line breaks beside its tags."""
    return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _literal(word: str) -> str:
    """A word of JSON, or a string of what is none."""
    word = _PYTHONS.get(word, word)
    try:
        json.loads(word, parse_constant=_no_constant)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word
