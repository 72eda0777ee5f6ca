# packages: langchain-openai
"""Text, a tool of its own both ways and streamed, and each method of structured output."""

import os

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class River(BaseModel):
    """A river."""

    name: str = Field(max_length=20)
    long: bool


@tool
def length_of(river: str) -> str:
    """The length of a river."""
    return f"{river} is 6650 km long."


chat = ChatOpenAI(model=os.environ["MODEL"], max_tokens=200, temperature=0)
short = ChatOpenAI(model=os.environ["MODEL"], max_tokens=8)
assert short.invoke([("system", "Answer briefly."), ("user", "Name a river.")]).content
assert "".join(piece.content for piece in short.stream("Name a river."))
assert OpenAI(model=os.environ["MODEL"], max_tokens=8).invoke("A river is")
asked = [HumanMessage("How long is the Nile?")]
for choice in ("any", "length_of"):
    bound = chat.bind_tools([length_of], tool_choice=choice)
    said = bound.invoke(asked)
    (call,) = said.tool_calls
    streamed = None
    for piece in bound.stream(asked):
        streamed = piece if streamed is None else streamed + piece
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]], streamed
assert short.bind_tools([length_of]).invoke([*asked, said, length_of.invoke(call)]).content
for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(River, method=method).invoke(asked), River)
# This one leaves the form to the prompt, and holds the answer to JSON alone.
free = chat.with_structured_output(None, method="json_mode").invoke(asked)
assert isinstance(free, dict)
try:
    short.invoke("a b" * 20_000)
except ContextOverflowError as refused:
    assert "shorten it" in str(refused)
else:
    raise AssertionError("a prompt that does not fit was answered")
print("text, tools, structured output by json_schema, function_calling, json_mode, overflow")
