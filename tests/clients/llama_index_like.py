# packages: llama-index-llms-openai-like
"""Text, tools both ways and structured output."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class River(BaseModel):
    """A river."""

    name: str = Field(max_length=20)
    long: bool


def length_of(river: str) -> str:
    """The length of a river."""
    return f"{river} is 6650 km long."


options = {
    "model": os.environ["MODEL"],
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
}
short = OpenAILike(is_chat_model=True, max_tokens=8, **options)
assert short.chat([ChatMessage("Name a river.")]).message.content
assert "".join(piece.delta or "" for piece in short.stream_complete("Name a river."))
assert OpenAILike(is_chat_model=False, max_tokens=8, **options).complete("A river is").text
chat = OpenAILike(
    is_chat_model=True, is_function_calling_model=True, max_tokens=200, temperature=0, **options
)
tools = [FunctionTool.from_defaults(length_of)]
forced = {"tool_required": True, "allow_parallel_tool_calls": False}
said = chat.chat_with_tools(tools, "How long is the Nile?", **forced)
(call,) = chat.get_tool_calls_from_response(said)
assert set(call.tool_kwargs) == {"river"}
*_, last = chat.stream_chat_with_tools(tools, "How long is the Nile?", **forced)
assert chat.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
done = chat.predict_and_call(tools, "How long is the Nile?", **forced)
assert done.response.endswith("6650 km long."), done
river = chat.as_structured_llm(River).complete("Describe the Nile.").raw
assert isinstance(river, River), river
held = OpenAILike(
    is_chat_model=True, should_use_structured_outputs=True, max_tokens=200, temperature=0, **options
)
river = held.as_structured_llm(River).complete("Describe the Nile.").raw
assert isinstance(river, River), river
print("chat, stream, completion, tools, structured output")
