# packages: anthropic
"""Messages: text, streamed, blocks sent back, tools, JSON, and tokens counted."""

import json
import os

from anthropic import Anthropic, BadRequestError, beta_tool

client = Anthropic(
    base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key=os.environ["OPENAI_API_KEY"]
)
model = os.environ["MODEL"]
user = {"role": "user", "content": "Name a river."}
asked = {"model": model, "system": "Answer briefly.", "max_tokens": 16}
first = client.messages.create(**asked, messages=[user], stop_sequences=["xyz"])
assert first.content[0].text and first.usage.output_tokens, first
messages = [user, {"role": "assistant", "content": first.content}, user]
with client.messages.stream(**asked, messages=messages) as stream:
    said = "".join(stream.text_stream)
    final = stream.get_final_message()
assert said and final.content[0].text == said and final.stop_reason, final
counted = client.messages.count_tokens(model=model, system="Answer briefly.", messages=[user])
used = first.usage
assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens, (counted, used)
# A limit beyond the context is the context.
longest = {**asked, "max_tokens": 10**6, "stop_sequences": ["."]}
with client.messages.stream(**longest, messages=[user]) as stream:
    assert stream.get_final_message().stop_reason == "stop_sequence"
tool = {
    "name": "length_of",
    "input_schema": {
        "type": "object",
        "properties": {"river": {"enum": ["Nile", "Rhine"]}},
        "required": ["river"],
        "additionalProperties": False,
    },
}
once = {"type": "any", "disable_parallel_tool_use": True}
called = {"model": model, "max_tokens": 400, "tools": [tool]}
question = {"role": "user", "content": "How long is the Nile?"}
call = client.messages.create(**called, tool_choice=once, messages=[question])
assert call.stop_reason == "tool_use" and call.content[-1].input["river"] in ("Nile", "Rhine"), call
with client.messages.stream(**called, tool_choice=once, messages=[question]) as stream:
    streamed = stream.get_final_message()
assert streamed.content[-1].input["river"] in ("Nile", "Rhine"), streamed
result = {"type": "tool_result", "tool_use_id": call.content[-1].id, "content": "6650 km"}
again = [
    question,
    {"role": "assistant", "content": call.content},
    {"role": "user", "content": [result]},
]
assert client.messages.create(**{**called, "max_tokens": 16}, messages=again).content


@beta_tool
def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    return f"It is sunny in {city}."


run = client.beta.messages.tool_runner(
    model=model, max_tokens=60, tools=[weather], messages=[question], max_iterations=2
)
assert [message.content for message in run]
form = {"type": "json_schema", "schema": tool["input_schema"]}
text = client.messages.create(
    model=model, max_tokens=400, messages=[question], output_config={"format": form}
)
assert json.loads(text.content[0].text)["river"] in ("Nile", "Rhine"), text
try:
    client.messages.create(**asked, messages=[user], extra_body={"temperature": 3})
except BadRequestError as refused:
    assert refused.body["error"]["type"] == "invalid_request_error", refused.body
else:
    raise AssertionError("a temperature of 3 was accepted")
print("text, stream, tools, JSON, tokens counted")
