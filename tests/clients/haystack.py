# packages: haystack-ai
"""Text, tools both ways and streamed, structured output, and an agent that ends with its tool."""

import os

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from pydantic import BaseModel, Field


class River(BaseModel):
    name: str = Field(max_length=20)
    long: bool


def length_of(river: str) -> str:
    """The length of a river."""
    return f"{river} is 6650 km long."


options = {"model": os.environ["MODEL"], "api_base_url": os.environ["OPENAI_BASE_URL"]}
generator = OpenAIChatGenerator(**options)
short = {"max_tokens": 8}
asked = [ChatMessage.from_system("Answer briefly."), ChatMessage.from_user("How long is the Nile?")]
assert generator.run(asked, generation_kwargs=short)["replies"][0].text
pieces = []
generator.run(asked, generation_kwargs=short, streaming_callback=pieces.append)
assert "".join(piece.content for piece in pieces)
tools = [create_tool_from_function(length_of)]
forced = {"max_tokens": 200, "temperature": 0, "tool_choice": "required"}
for strict in False, True:
    how = {"tools": tools, "tools_strict": strict, "generation_kwargs": forced}
    (said,) = generator.run(asked, **how)["replies"]
    assert set(said.tool_call.arguments) == {"river"}
    (streamed,) = generator.run(asked, **how, streaming_callback=pieces.append)["replies"]
    assert streamed.tool_call.arguments == said.tool_call.arguments
result = ChatMessage.from_tool("6650 km", origin=said.tool_call)
assert generator.run([*asked, said, result], tools=tools, generation_kwargs=short)["replies"]
form = {"max_tokens": 200, "response_format": River}
River.model_validate_json(generator.run(asked, generation_kwargs=form)["replies"][0].text)
form = {"max_output_tokens": 200, "text_format": River}
responses = OpenAIResponsesChatGenerator(**options)
River.model_validate_json(responses.run(asked, generation_kwargs=form)["replies"][0].text)
agent = Agent(
    chat_generator=OpenAIChatGenerator(**options, generation_kwargs=forced),
    tools=tools,
    exit_conditions=["length_of"],
)
assert agent.run(asked)["last_message"].tool_call_result.result.endswith("6650 km long.")
print("text, stream, tools, response_format, agent, Responses")
