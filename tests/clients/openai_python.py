# packages: openai
"""Chat, stream, completion with echo and log-probabilities, list of models, tools both ways."""

import json
import os

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI()
model = os.environ["MODEL"]
asked = {"model": model, "messages": [{"role": "user", "content": "Name a river."}]}
assert model in [entry.id for entry in client.models.list()]
assert client.chat.completions.create(**asked, max_tokens=8).choices[0].message.content
chunks = client.chat.completions.create(**asked, max_completion_tokens=8, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
scored = client.completions.create(
    model=model, prompt="A river", echo=True, logprobs=1, max_tokens=1
).choices[0]
assert "".join(scored.logprobs.tokens) == scored.text


class Weather(BaseModel):
    city: str


tools = [pydantic_function_tool(Weather, name="weather")]
forced = {"tools": tools, "tool_choice": "required", "max_tokens": 200}
chosen = {"type": "function", "function": {"name": "weather"}}
message = (
    client.chat.completions.create(**asked, **forced | {"tool_choice": chosen}).choices[0].message
)
(call,) = message.tool_calls
assert set(json.loads(call.function.arguments)) == {"city"}
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
replayed = {"model": model, "messages": [*asked["messages"], message, result]}
assert client.chat.completions.create(**replayed, tools=tools, max_tokens=8).choices
parsed = client.chat.completions.parse(**asked, **forced).choices[0].message.tool_calls[0]
assert isinstance(parsed.function.parsed_arguments, Weather)
with client.chat.completions.stream(**asked, **forced) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_completion().choices[0]
assert kinds.count("tool_calls.function.arguments.done") == 1
assert kinds.count("tool_calls.function.arguments.delta") > 2
assert streamed.finish_reason == "tool_calls"
assert isinstance(streamed.message.tool_calls[0].function.parsed_arguments, Weather)
assert client.chat.completions.create(**asked, tools=tools, max_tokens=8).choices  # auto
print("models, chat, stream, completion, tools whole, parsed and streamed")
