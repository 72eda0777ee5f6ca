"""The parser: every family's answers, whatever is wrong with them, and however they are cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.server.tools.formats import HERMES, KNOWN, THINK, Format, known_format
from ropewalk.server.tools.parser import Parser
from tests.server.tools import families
from tests.server.tools.families import CITY, FAMILIES, TOOLS, Read, joined

FORMATS = [*(format for _, format in KNOWN), HERMES]


def read(format: Format, pieces, tools=TOOLS, **options) -> Read:
    parser = Parser(format, tools, **options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined(deltas + parser.finish())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_each_family(name: str) -> None:
    template, answer, meant = FAMILIES[name]
    format = known_format(template)
    assert format is not None
    assert read(format, [answer]) == meant
    assert read(format, answer) == meant


CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
FAULTY = [
    # what is no call is text, to the letter
    ("a <tool_call> b", Read("a <tool_call> b")),
    ("<tool_call>\n{not JSON}\n</tool_call>", Read("<tool_call>\n{not JSON}\n</tool_call>")),
    ('<tool_call>{"arguments": {}}</tool_call>', Read('<tool_call>{"arguments": {}}</tool_call>')),
    ("<tool_call>", Read("<tool_call>")),
    ('<tool_call>{"na', Read('<tool_call>{"na')),
    (" <tool_cal", Read(" <tool_cal")),
    ("<think> late", Read("", "late")),
    ("No <think> here.", Read("No <think> here.")),
    # what begins as a call is one
    (f"<tool_call>{{'x'}} {CALL}", Read("<tool_call>{'x'}", "", [("weather", CITY)])),
    (CALL.replace("}\n</", "</"), Read("", "", [("weather", CITY)])),
    (CALL.replace("}\n</", "}}}\n</"), Read("", "", [("weather", CITY)])),
    (CALL.removesuffix("\n</tool_call>") + CALL, Read("", "", [("weather", CITY)] * 2)),
    (CALL.removesuffix('"}}\n</tool_call>'), Read("", "", [("weather", '{"city": "Rome')])),
    ('<tool_call>{"name": "x", "arguments": null}</tool_call>.', Read(".", "", [("x", "{}")])),
    ('<tool_call>{"name": "x", "parameters": [1]} </tool_call>', Read("", "", [("x", "{}")])),
    ('<tool_call>{"function": {"name": "x"}}</tool_call>', Read("", "", [("x", "{}")])),
    ("<tool_call>" + '{"function": ' * 2000, Read("<tool_call>" + '{"function": ' * 2000)),
    ("<tool_call>[]</tool_call>Hi", Read("Hi")),
    (CALL.replace("Rome", "a\nb"), Read("", "", [("weather", '{"city": "a\\nb"}')])),
    (CALL.replace("Rome", "</tool_call>"), Read("", "", [("weather", '{"city": "</tool_call>"}')])),
    # white space beside markers is no text, and stretches of text are lines
    (f"  a \n{CALL}\n b \n", Read("  a\nb \n", "", [("weather", CITY)])),
    ("<think>\n a \n</think>\n\n<think>b</think>\n c", Read("c", "a\nb")),
]


@pytest.mark.parametrize(("answer", "meant"), FAULTY)
def test_an_answer_with_a_fault(answer: str, meant: Read) -> None:
    assert read(Format(think=THINK), [answer]) == meant
    assert read(Format(think=THINK), answer) == meant


def test_without_tools_a_call_is_text_and_reasoning_is_reasoning() -> None:
    meant = Read(CALL, "a")
    assert read(Format(think=THINK), [f"<think>a</think>{CALL}"], tools={}) == meant


def test_a_prompt_may_end_within_reasoning() -> None:
    assert read(Format(think=THINK), ["\na\n</think>\n\nb"], thinking=True) == Read("b", "a")


def test_a_single_call_ends_the_answer() -> None:
    parser = Parser(HERMES, TOOLS, single=True)
    deltas = parser.push(CALL + CALL)
    assert parser.done and parser.calls == 1
    assert joined(deltas + parser.push("more") + parser.finish()) == Read(calls=[("weather", CITY)])


def test_arguments_come_as_they_are_written() -> None:
    parser = Parser(HERMES, TOOLS)
    assert parser.push('<tool_call>{"name": "weather", "arguments": ')[0].name == "weather"
    pieces = [parser.push(text) for text in ('{"city', '": "Ro', 'me"', "}")]
    assert [delta.arguments for deltas in pieces for delta in deltas] == [
        '{"city',
        '": "Ro',
        'me"',
        "}",
    ]


def test_a_text_in_tags_comes_piece_by_piece() -> None:
    parser = Parser(known_format(families.CODER), TOOLS)
    parser.push("<tool_call><function=weather><parameter=city>\nRo")
    pieces = [parser.push(text) for text in ("me\n", '"!\n', "</param", "eter>")]
    assert ["".join(delta.arguments for delta in deltas) for deltas in pieces] == [
        "me",
        '\\n\\"!',
        "",
        '"',
    ]


@pytest.mark.parametrize(
    ("schema", "written", "meant"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", "42"),
        ({"type": ["string", "null"]}, '{"k": 1}', '{"k": 1}'),
        ({"type": ["string", "null"]}, "    return x\n", "    return x\n"),
        ({"type": ["string", "null"]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "-Infinity", "-Infinity"),
        (None, "[1]", [1]),
    ],
)
def test_a_text_in_tags_is_read_as_its_schema_says(schema, written: str, meant) -> None:
    format = next(each for source, each in KNOWN if "<function=" in source)
    answer = f"<tool_call>\n<function=get>\n<parameter=a>\n{written}\n</parameter>\n</function>\n"
    tools = {"get": {"properties": {"a": schema}}}
    ((_, arguments),) = read(format, [answer + "</tool_call>"], tools).calls
    assert json.loads(arguments, parse_constant=pytest.fail) == {"a": meant}


def fragments(format: Format) -> st.SearchStrategy[str]:
    """Texts made of a format's own markers, of pieces of JSON, and of anything else."""
    written = format.written
    own = {*format.opens, format.close, format.quote, *(format.think or ()), *format.noise}
    own |= {written.before, written.middle, written.after, written.begin, written.between}
    own |= {written.calls([("weather", CITY), ("now", "{}")]), "<function=weather>", "</function>"}
    own |= {"<parameter=city>", "</parameter>", *'{}[]",:\\ \n<', '{"name": "now"', "weather", "é"}
    return st.lists(st.sampled_from(sorted(own - {""})) | st.text(max_size=3), max_size=12).map(
        "".join
    )


@given(st.data())
@settings(deadline=None)
def test_cuts_change_nothing(data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(FORMATS))
    answer = data.draw(fragments(format))
    options = {"thinking": data.draw(st.booleans()) and format.think is not None}
    options["single"] = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [
        answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)
    ]
    whole = read(format, [answer], **options)
    assert read(format, pieces, **options) == whole
    assert read(format, answer, **options) == whole
