"""How families write tool calls and reasoning: data, which parser, prompts and grammars read.

Markers that are special tokens stand here by their names, as the parser sees them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """What stands between `opens` and `close`; an object or list of JSON may stand there always."""

    JSON = "json"  # {"name": …, "arguments": {…}}, one or several, or a list of them
    NAMED = "named"  # the name, anything that is not a brace, and the arguments as JSON
    XML = "xml"  # <function=NAME><parameter=KEY>VALUE</parameter>…</function>


@dataclass(frozen=True, slots=True)
class Written:
    """How a call is written out: before its name, before its arguments, and after them.

    `begin` and `end` are around all calls of an answer, and `between` separates them.
    """

    before: str = '<tool_call>\n{"name": "'
    middle: str = '", "arguments": '
    after: str = "}\n</tool_call>"
    begin: str = ""
    between: str = "\n"
    end: str = ""

    def calls(self, calls: Iterable[tuple[str, str]]) -> str:
        """Names and arguments, which are JSON, as one text."""
        each = (f"{self.before}{name}{self.middle}{text}{self.after}" for name, text in calls)
        return f"{self.begin}{self.between.join(each)}{self.end}"


@dataclass(frozen=True, slots=True)
class Format:
    """Markers of one family.

    A call begins with one of `opens` and ends with `close`, or where its JSON ends if that is
    empty. `written` is a form of it that the parser reads too. With `bare`, JSON that begins an
    answer and names a tool is a call. `quote` is around strings of arguments; where it is not
    JSON's, keys have none. Text between `think` is reasoning, `turn` is what follows it, `text`
    what is before an answer in words, and `noise` is no text at all.
    """

    opens: tuple[str, ...] = ("<tool_call>",)
    close: str = "</tool_call>"
    form: Form = Form.JSON
    written: Written = Written()
    bare: bool = False
    quote: str = '"'
    think: tuple[str, str] | None = None
    turn: str = ""
    text: str = ""
    noise: tuple[str, ...] = ()

    @property
    def named(self) -> frozenset[str]:
        """The special tokens that its markers may be made of."""
        written = self.written
        texts = (*self.opens, self.close, self.quote, *(self.think or ()), *self.noise)
        texts += (written.begin, written.before, written.middle, written.after, written.end)
        return frozenset(name for text in texts for name in SPECIAL.findall(text))


SPECIAL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # what special tokens are called
THINK = ("<think>", "</think>")
HERMES = Format()

# A format is a template's when all of its signs are in it; the first such row counts.
KNOWN: Sequence[tuple[tuple[str, ...], Format]] = (
    (  # gpt-oss
        ("<|channel|>", "<|message|>", "functions."),
        Format(
            opens=(
                "<|channel|>commentary to=functions.",
                "<|channel|>analysis to=functions.",
                "<|start|>assistant to=functions.",
                " to=functions.",
            ),
            close="<|call|>",
            form=Form.NAMED,
            written=Written(
                before="<|channel|>commentary to=functions.",
                middle=" <|constrain|>json<|message|>",
                after="<|call|>",
                between="<|start|>assistant",
            ),
            think=("<|channel|>analysis<|message|>", "<|end|>"),
            turn="<|start|>assistant",
            text="<|channel|>final<|message|>",
            noise=(
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
                "<|end|>",
                "<|return|>",
            ),
        ),
    ),
    (  # Gemma 4
        ("<|tool_call>", '<|"|>'),
        Format(
            opens=("<|tool_call>call:", "<|tool_call>"),
            close="<tool_call|>",
            form=Form.NAMED,
            written=Written(
                '<|tool_call>{"name": "', '", "arguments": ', "}<tool_call|>", between=""
            ),
            quote='<|"|>',
            think=("<|channel>thought", "<channel|>"),
        ),
    ),
    (  # FunctionGemma
        ("<start_function_call>", "<escape>"),
        Format(
            opens=("<start_function_call>call:", "<start_function_call>"),
            close="<end_function_call>",
            form=Form.NAMED,
            written=Written(
                '<start_function_call>{"name": "',
                '", "arguments": ',
                "}<end_function_call>",
                between="",
            ),
            quote="<escape>",
        ),
    ),
    (  # Qwen3-Coder, Qwen3.5
        ("<tool_call>", "<function=", "<parameter="),
        Format(opens=("<tool_call>", "<function="), form=Form.XML, think=THINK),
    ),
    (  # Mistral, from its eleventh tokenizer on
        ("[TOOL_CALLS]", "[ARGS]"),
        Format(
            opens=("[TOOL_CALLS]",),
            close="",
            form=Form.NAMED,
            written=Written("[TOOL_CALLS]", "[ARGS]", "", between=""),
            think=("[THINK]", "[/THINK]"),
            noise=("[CALL_ID]",),
        ),
    ),
    (  # Mistral before
        ("[TOOL_CALLS]",),
        Format(
            opens=("[TOOL_CALLS]",),
            close="",
            form=Form.NAMED,
            written=Written('{"name": "', '", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]"),
            think=("[THINK]", "[/THINK]"),
        ),
    ),
    (  # Phi-4-mini
        ("<|/tool|>",),
        Format(
            opens=("<|tool_call|>", "functools"),
            close="<|/tool_call|>",
            written=Written(
                '{"name": "', '", "arguments": ', "}", "<|tool_call|>[", ", ", "]<|/tool_call|>"
            ),
        ),
    ),
    (  # Llama 3
        ("ipython", '"parameters"'),
        Format(
            opens=("<|python_tag|>",),
            close="",
            written=Written('{"name": "', '", "parameters": ', "}", between="; "),
            bare=True,
        ),
    ),
    (  # DeepSeek V3.1
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        Format(
            opens=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
            close="<｜tool▁call▁end｜>",
            form=Form.NAMED,
            written=Written(
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "",
                "<｜tool▁calls▁end｜>",
            ),
            think=THINK,
            noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    (("<tool_call>", "</think>"), Format(think=THINK)),  # Qwen 3, QwQ, SmolLM3
    (("<tool_call>",), HERMES),  # Hermes, Qwen 2
)


def known_format(source: str) -> Format | None:
    """The format that a chat template of this source writes; None if none of these."""
    return next((form for signs, form in KNOWN if all(sign in source for sign in signs)), None)
